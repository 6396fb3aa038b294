"""CUDA's compiler, the instructions, and what the devices have room for."""
