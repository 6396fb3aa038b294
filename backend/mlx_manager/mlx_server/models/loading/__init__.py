"""The load of a model from a checked folder into memory."""
