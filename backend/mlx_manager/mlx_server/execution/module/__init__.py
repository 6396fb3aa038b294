"""mlx-lm's module of a model over our pages."""
