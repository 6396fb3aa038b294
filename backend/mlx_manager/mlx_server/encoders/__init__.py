"""Models that read texts and generate none."""
