"""Attention over pages on GPUs: its shapes, kernels, and what checks them."""
