"""The parts of the benchmark of embedding_all_to_all."""
