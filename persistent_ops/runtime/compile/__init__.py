"""Compilers, the cache of what they made, and what kernel headers say of themselves."""
