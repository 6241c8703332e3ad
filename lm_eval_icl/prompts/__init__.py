"""A prompt and its parts: as text, as token ids, and as a layout, which says which token attends to which."""
