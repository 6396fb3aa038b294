"""Loaded models that answer: `text` generates, `embedding` turns texts into vectors and scores."""
