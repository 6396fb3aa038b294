"""A load test against any server with OpenAI's chat completions."""
