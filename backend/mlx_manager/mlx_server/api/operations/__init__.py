"""Routes for the owner and for monitoring."""
