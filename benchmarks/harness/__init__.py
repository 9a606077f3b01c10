"""The common parts of the operators' benchmarks: PEs, timing, ceilings, records and tables."""
