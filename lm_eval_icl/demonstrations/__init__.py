"""Which rows of a pool become demonstrations: drawn, chosen by a published method, or given.

`draw.py` draws rows or reads them from a file, and `how.py` reads what a user writes of a method. `select.py` has the
methods that choose rows, one file a paper, as functions of arrays:

    Pool(labels, features, probabilities)   what a method may see of the pool's N documents
    SELECTORS                               name -> Selector: the function, what it needs, its arguments, its paper
    select("craig", pool, n, seed)          -> the rows in the order of picking
    in_prompt_order(rows, seed)             the same rows as they stand in the prompt

`best_random.py` and `lens.py` choose by trying demonstrations on a model. They are functions too: the model is behind a
function that the caller gives, and `cost` in either file counts beforehand what it will be asked.

All arithmetic is in float64, and everything is determined by the arrays and the seed. The features and probabilities
themselves are not: another batch size changes their last digits, which may decide between two rows that are nearly
alike. A tie goes to the lowest row.
"""
