"""Attention of a step's queries over pages."""
