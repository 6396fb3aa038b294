"""The devices that MLX computes on, and what is tuned or written for each."""
