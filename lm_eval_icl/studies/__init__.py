"""Studies: grids of models, methods, arguments, tasks, shots, seeds and orders, and what comes out of them."""
