"""A model on several devices: rank 0 decides, and the other ranks run the same passes."""
