"""Draws layouts as text and as pictures."""
