"""The parts of the benchmark of gemv_all_reduce."""
