"""The decode loop: a Llama-shaped decoder, tensor-parallel over the PEs, and several kinds of row-parallel layers."""
