"""Layers that keep a state of their own instead of keys and values."""
