"""Which rows of a pool become demonstrations: drawn (`draw.py`), chosen by a published method, or given.

All arithmetic is in float64, and everything is determined by the arrays and the seed. The features and probabilities
themselves are not: another batch size changes their last digits, which may decide between two rows that are nearly
alike. A tie goes to the lowest row.
"""
