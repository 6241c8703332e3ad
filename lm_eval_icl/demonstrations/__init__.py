"""Which rows of a pool become demonstrations: drawn, chosen by a published method, or given.

`draw.py` draws rows or reads them from a file, and `how.py` reads what a user writes of a method. `select.py` has the
methods that choose rows, one file a paper, as functions of arrays:

    Pool(labels, features, probabilities)   what a method may see of the pool's N documents
    SELECTORS                               name -> Selector: the function, what it needs, its arguments, its paper
    select("craig", pool, n, seed)          -> Selection(rows in the order of picking, margin)
    in_prompt_order(rows, seed)             the same rows as they stand in the prompt

`best_random.py` and `lens.py` choose by trying demonstrations on a model. They are functions too: the model is behind a
function that the caller gives, and `cost` in either file counts beforehand what it will be asked.

All arithmetic is in float64, and everything is determined by the arrays and the seed. The features and probabilities
themselves are not: another batch size changes their last digits. `Selection.margin` says how much noise a choice
bears: as long as every row of features changes by less than that part of its length, and every probability by less than
that part of itself (to first order), the same rows are chosen. Every method bounds how far such noise moves a score
and divides the gap between the row that it picks and each other row by the two bounds; the margin is the least of
these, at most 1. A tie goes to the lowest row, and its margin is 0, unless the rows are one document twice: the same
label, features and probabilities. Which copy is picked makes no difference, so copies do not count as each other's
rivals. In a pool without features nobody can tell copies, and every tie counts.
"""
