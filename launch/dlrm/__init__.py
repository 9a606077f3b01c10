"""Training a DLRM: readers of click logs, the dense part of the model, metrics, checkpoints and the loop."""
