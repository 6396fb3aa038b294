"""Pictures to pixels, pixels to rows of features, and rows to their places in prompts."""
