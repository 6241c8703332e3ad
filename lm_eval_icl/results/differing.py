"""The documents on which two entries differ most."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from lm_eval_icl.results.board import Entry, TaskRun, shown
from lm_eval_icl.results.cells import common, matrix
from lm_eval_icl.results.records import Unusable
from lm_eval_icl.results.samples import first_prompt, lines
from lm_eval_icl.results.tasks import samples_file

_CHARACTERS = 60  # of a prompt, from its end


def differing(first: Entry, second: Entry, task: str, most: int) -> list[str]:
    """Lines on the documents of a task with the largest difference of two entries' scores, the largest first.

    A line has the end of the document's prompt if the samples are still beside the results. There are no lines if the
    metric is not a mean of documents' scores, or if all scores are equal.

    Args:
        most: how many documents.
    """
    mine, theirs = zip(*common(first.cells[task].sets, second.cells[task].sets), strict=True)
    answered = mine[0].answered[0]
    answers = answered.result.answers
    assert answers is not None
    if answers.items.ndim > 1:
        return []
    a, b = matrix(mine).mean(axis=1), matrix(theirs).mean(axis=1)
    distances = np.nan_to_num(np.abs(a - b))
    order = [i for i in np.argsort(-distances, kind="stable")[:most] if distances[i]]
    if not order:
        return []
    prompts = _endings(answered, {int(answers.doc_ids[i]) for i in order})
    sets = f"the mean over {len(mine)} sets of demonstrations" if len(mine) > 1 else "one set of demonstrations"
    printed = [
        f"{shown(task)}, documents that differ most ({sets if answers.demonstrations else 'no demonstrations'}):"
    ]
    for i in order:
        number = int(answers.doc_ids[i])
        printed.append(f"  document {number}: A {a[i]:.3g}, B {b[i]:.3g}")
        if number in prompts:
            printed.append(f"    {prompts[number]}")
    return printed


def _endings(answered: TaskRun, numbers: set[int]) -> Mapping[int, str]:
    """The ends of documents' prompts, from the samples beside the results; nothing of what cannot be read."""
    endings: dict[int, str] = {}
    samples = samples_file(answered.run.path, answered.result.task)
    with suppress(Unusable):
        for sample in lines(samples) if samples.is_file() else ():
            if (number := sample["doc_id"]) in numbers:
                prompt = first_prompt(sample.get("arguments"))
                dots = "..." if len(prompt) > _CHARACTERS else ""
                endings[number] = f"{dots}{shown(prompt[-_CHARACTERS:])}"
    return endings
