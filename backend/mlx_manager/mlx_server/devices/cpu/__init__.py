"""What is done otherwise on a CPU."""
