"""A prompt and its parts: as text, as ids, and as who sees whom at which position."""
