"""Training under the layout of a method: episodes, rows with their masks, and the training loop."""
