"""Chooses rows of a pool as demonstrations: by drawing, by a published method, or from a file.

All arithmetic is in float64. A choice is determined by the seed and by the model's features and
probabilities. Another batch size changes the last digits of features and probabilities, which may
decide between two rows that are nearly alike. A tie goes to the lowest row.
"""
