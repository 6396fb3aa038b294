"""Commands that start a server, install it and administer it."""
