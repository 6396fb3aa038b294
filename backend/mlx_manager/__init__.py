"""MLX Manager: an inference server on MLX for any OpenAI or Anthropic client."""

__version__ = "0.1.0"
