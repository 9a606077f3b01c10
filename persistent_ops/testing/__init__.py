"""Shared by the demo, the benchmarks, the examples and the tests; programs that measure or check may use it too.

`pes` starts PEs and exchanges their values. `timing`, `record` and `figures` serve measurements. `output_files` checks
the files that a run will write. Workloads: `lookups`, `criteo` (files of the Criteo format) and `dlrm_batch` (batches
with the shape of MLPerf's benchmark). Baselines of the operators: `symmetric_memory` (torch's), `exchanged_embedding`
and `fbgemm_embedding` (tables over torch.distributed), `row_update`.
"""
