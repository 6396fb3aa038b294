"""A model's folder: its config, its files, and what mlx-lm makes of them."""
