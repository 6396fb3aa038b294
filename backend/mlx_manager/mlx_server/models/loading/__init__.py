"""From a checked folder to a model in memory."""
