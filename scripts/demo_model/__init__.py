"""The demonstration checkpoint and its tasks: `python -m scripts.demo_model`."""
