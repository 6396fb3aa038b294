"""What every kernel of ours is made with: its source text, the devices, their instructions."""
