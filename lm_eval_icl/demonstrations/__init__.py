"""Which rows of a pool become demonstrations: drawn, chosen by a published method, or given.

`draw.py` draws rows or reads them from a file, and `how.py` reads what a user writes of a method. `select.py` has the
methods that choose rows, one file a paper, as functions of arrays; `best_random.py` and `lens.py` try demonstrations on
a model, which is behind functions that the caller gives. `reading.py` asks the model about a task, for `choosing.py`.

All arithmetic is in float64, and everything is determined by the arrays and the seed. The features and probabilities
themselves are not: another batch size changes their last digits, which may decide between two rows that are nearly
alike. A tie goes to the lowest row.
"""
