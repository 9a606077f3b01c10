"""Compilers, the cache of compiled kernels, and the descriptions of kernel headers."""
