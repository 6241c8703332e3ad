"""Studies: grids of models, methods, arguments, tasks, shots, seeds and orders, and their results."""
