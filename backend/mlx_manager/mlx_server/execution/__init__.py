"""How a model is run: the ways, and which of them is right."""
