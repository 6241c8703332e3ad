"""Layouts as text and as pictures."""
