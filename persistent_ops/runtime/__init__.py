"""What the operators run on: launchers, bootstrap, symmetric heap, kernels."""
