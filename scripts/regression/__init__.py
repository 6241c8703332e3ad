"""In-context regression: transformers trained to predict a function's values from examples, under each method."""
