"""Pictures on their way into prompts: the tower's jobs, and features."""
