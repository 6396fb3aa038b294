"""Tool calls as models write them: read, forced, and their parameters' schemas."""
