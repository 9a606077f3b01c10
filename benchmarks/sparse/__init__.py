"""The parts of the benchmark of sparse_all_reduce."""
