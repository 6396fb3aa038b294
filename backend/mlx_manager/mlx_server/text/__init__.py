"""Texts of answers: tokens to characters, and these to what a reader gets. Without MLX."""
