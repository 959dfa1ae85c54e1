"""FP8 for linear layers, on GPUs that have it."""
