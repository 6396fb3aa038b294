"""Replacements for parts of MLX and mlx-lm that are slow on a CPU."""
