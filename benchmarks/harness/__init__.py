"""What the operators' benchmarks share: PEs, timing, ceilings, records and tables."""
