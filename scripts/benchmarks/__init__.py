"""The commands of `scripts/benchmark.py`, a module for each, and what they share."""
