"""Who runs in the next step, and how much of the prompts."""
