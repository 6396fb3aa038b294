"""CUDA's compiler, instructions of some GPUs, and limits of the devices."""
