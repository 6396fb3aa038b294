"""Products of a few rows with large matrices on NVIDIA GPUs."""
