"""The embedding part of a training step: lookups exchanged, pooled, and rows updated; by the package and by others."""
