"""Texts of answers: tokens to characters, and these to what a reader gets.

No arrays are computed here; of mlx-lm its tokenizers are used.
"""
