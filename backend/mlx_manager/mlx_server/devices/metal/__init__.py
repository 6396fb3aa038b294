"""Apple's GPUs."""
