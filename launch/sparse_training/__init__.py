"""Word vectors with sparse gradients: CBOW with negative sampling, data-parallel over the PEs."""
