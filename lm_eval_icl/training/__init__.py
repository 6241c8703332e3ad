"""Training under the layout of a method: episodes, rows of tokens with their masks, and the training loop."""
