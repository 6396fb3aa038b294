"""Layers that keep a state, on NVIDIA GPUs."""
