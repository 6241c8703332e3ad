"""Tasks with other labels in their demonstrations, or in another format: `--metadata labels=flipped:0.25,format=3`."""

from __future__ import annotations

import copy
import dataclasses
import json
from random import Random
from typing import Any

from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.declared import NotNegative, checked
from lm_eval_icl.demonstrations import how, wrong_labels
from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.prompts.formats import Template, format_of


def vary(task: ConfigurableTask, other_labels: Any, number: Any) -> None:
    """Give a task's demonstrations other labels, and all its prompts another format; None for no change.

    The task's metadata say what was changed: "relabeled" has the numbers of different demonstrations that were rendered
    and that have another label, "unformatted" has the templates that the format has replaced.

    Args:
        other_labels: see `demonstrations.wrong_labels.read`.
        number: see `prompts.formats.format_of`.

    Raises:
        InputError: the task cannot have other labels, or another format.
    """
    written = {"labels": other_labels, "format": number}
    given = {name: value for name, value in written.items() if value is not None}
    if not given:
        return
    with naming(
        f"task {task.config.task!r}: {', '.join(f'{name}={value}' for name, value in given.items())}"
    ):
        if hasattr(task, "why_not_decided"):  # MetaICL's
            raise InputError("its own class makes its sequences: leave this out.")
        metadata = task.config.metadata or {}
        if (drawn := metadata.get("demonstrations")) is not None and how.read(drawn) is not None:
            raise InputError(
                f"demonstrations={drawn}: choose them first (`lm-eval-icl select`), and give the file."
            )
        task.config.metadata = {**metadata, **given}
        if number is not None:
            _format(task, checked("format", number, NotNegative))
        if other_labels is not None:
            relabel = Relabel(task, wrong_labels.read(other_labels))
            task.fewshot_cfg = dataclasses.replace(task.fewshot_cfg, doc_to_target=relabel)
            task.config.metadata["relabeled"] = relabel.counts


class Relabel:
    """Returns the labels of demonstrations, in place of the task's `doc_to_target`, which queries keep.

    Labels are drawn by the few-shot seed of lm-eval's `--seed` and the row, so that a row has the same label under
    every model and in every order.

    Attributes:
        counts: how many different rows were labeled ("demonstrations"), and how many got another label ("changed").
    """

    def __init__(self, task: ConfigurableTask, how_labeled: wrong_labels.Labels) -> None:
        if task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input:
            raise InputError(
                "labels are changed only in tasks with options, of which one follows the query."
            )
        self._task, self._labels, self._template = task, how_labeled, task.fewshot_cfg
        self._generator, self._seed = Random(0), 0.0
        self._known: dict[str, str | int] = {}
        self.counts = {"demonstrations": 0, "changed": 0}

    def __call__(self, doc: dict[str, Any]) -> str | int:
        task, template = self._task, self._template
        if (
            generator := getattr(task, "fewshot_rnd", None) or self._generator
        ) is not self._generator:
            # A copy draws, so that the task's generator stays as it is.
            self._generator, self._seed = generator, copy.copy(generator).random()
        row = f"{self._seed} {json.dumps(doc, sort_keys=True, default=str)}"
        if row not in self._known:
            options = task.doc_to_choice(doc, template.doc_to_choice)
            answer = task.doc_to_target(doc, template.doc_to_target)
            right = (
                answer
                if isinstance(answer, int)
                else options.index(answer)
                if answer in options
                else -1
            )
            if not 0 <= right < len(options):
                raise InputError(
                    f"task {task.config.task!r}: labels: {answer!r} is not one of its options."
                )
            label = self._labels.label(right, len(options), row)
            self._known[row] = answer if label == right else options[label]
            self.counts["demonstrations"] += 1
            self.counts["changed"] += label != right
        return self._known[row]


def _format(task: ConfigurableTask, number: int) -> None:
    """Replace the templates of a task's queries and demonstrations by those of a format."""
    config, shots = task.config, task.fewshot_cfg
    if not isinstance(config.doc_to_text, str) or not isinstance(shots.doc_to_text, str):
        raise InputError(
            "its prompts are made by a function or by another task's, and not by a template."
        )
    query_template = Template(config.doc_to_text, config.target_delimiter, config.fewshot_delimiter)
    shot_template = Template(shots.doc_to_text, shots.target_delimiter, shots.fewshot_delimiter)
    if (new_format := format_of(query_template, number)) is None:
        return
    new_queries, new_shots = new_format.of(query_template), new_format.of(shot_template)
    names = {
        "doc_to_text": "text",
        "target_delimiter": "before_answer",
        "fewshot_delimiter": "between",
    }
    old_queries, old_shots = (
        {name: getattr(old, name) for name in names} for old in (config, shots)
    )
    task.fewshot_cfg = config.fewshot_config = dataclasses.replace(
        shots, **{name: getattr(new_shots, part) for name, part in names.items()}
    )
    for name, part in names.items():
        setattr(config, name, getattr(new_queries, part))
    config.metadata["unformatted"] = {**old_queries, "fewshot_config": old_shots}
