"""Choice of the rows and prompt chunks that run in the next step."""
