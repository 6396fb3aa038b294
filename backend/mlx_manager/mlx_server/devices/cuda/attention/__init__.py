"""Attention over pages on NVIDIA GPUs."""
