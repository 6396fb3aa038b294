"""Commands for the models on this machine."""
