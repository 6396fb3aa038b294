"""Bodies and answers of every protocol, as they are validated."""
