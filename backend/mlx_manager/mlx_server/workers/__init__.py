"""A process for each model: the server's side of it, the worker's side, and what they say."""
