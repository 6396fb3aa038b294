"""Translations, pure ones: a body to `core.GenerationRequest`s, and `core.Event`s to an answer."""
