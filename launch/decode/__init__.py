"""The decode loop: a Llama-shaped decoder, tensor-parallel over the PEs, and what its row-parallel layers can be."""
