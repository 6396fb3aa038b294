"""Pictures on their way into prompts: numbers of their contents, the tower's jobs, and features."""
