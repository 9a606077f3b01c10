"""What the demo, the benchmarks, the examples and the tests share; programs that measure or check may use it too.

`pes` starts PEs and exchanges what they have to say; `timing`, `record` and `figures` are for what is measured;
`output_files` looks at what a run will write. Workloads: `lookups`, `criteo` (files of the Criteo format) and
`dlrm_batch` (batches with the shape of MLPerf's benchmark). What the operators are compared with: `symmetric_memory`
(torch's), `exchanged_embedding` and `fbgemm_embedding` (tables over torch.distributed), `row_update`.
"""
