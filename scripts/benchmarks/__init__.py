"""The commands of `scripts/benchmark.py`, with a module for each, and their common modules."""
