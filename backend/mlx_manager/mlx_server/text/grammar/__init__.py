"""Forms that answers are held to."""
