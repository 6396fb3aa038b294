"""Layers with a recurrent state, on NVIDIA GPUs."""
