"""The base of the operators: launchers, bootstrap, symmetric heap, kernels."""
