"""Tiny models, the embedded model, and the evaluation that tries every method on them."""
