"""Embedding + All-to-All: forward, backward, input exchange, and the tables' optimizers."""
