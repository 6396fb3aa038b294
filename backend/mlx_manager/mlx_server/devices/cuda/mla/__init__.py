"""Multi-head latent attention on NVIDIA GPUs."""
