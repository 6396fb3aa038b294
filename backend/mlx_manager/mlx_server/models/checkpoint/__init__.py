"""A model's folder: its config, its files, and the module that mlx-lm builds from them."""
