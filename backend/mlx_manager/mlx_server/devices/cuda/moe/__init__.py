"""Layers with experts on NVIDIA GPUs."""
