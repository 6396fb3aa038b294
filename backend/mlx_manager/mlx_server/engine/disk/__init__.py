"""KV pages on disk: prefixes that outlive memory and the process."""
