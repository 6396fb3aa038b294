"""Models that servers on other machines answer for."""
