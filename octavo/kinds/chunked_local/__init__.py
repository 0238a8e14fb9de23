"""Chunked local attention: every token sees its own chunk of the text up to itself."""
