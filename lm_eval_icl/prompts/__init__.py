"""A prompt and its parts: as text, as token ids, and as a layout (which token sees which)."""
