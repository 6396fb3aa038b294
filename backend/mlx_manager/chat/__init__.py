"""A chat in the terminal with any OpenAI-shaped server."""
