"""Layer specs: mlx-lm's modules read as common decoders.

Whether a module is one, and what it consists of, is told by its parts' names and by the facts that
families declare about its classes (`models/families`).
"""
