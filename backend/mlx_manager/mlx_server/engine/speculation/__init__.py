"""Speculation: tokens that rows are expected to draw, tried several in one step."""
