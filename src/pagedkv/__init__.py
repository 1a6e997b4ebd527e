"""Page-based memory for the key-value cache of language models."""
