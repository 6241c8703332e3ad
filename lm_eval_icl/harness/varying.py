"""Tasks with other labels in their demonstrations, or in another format: `--metadata
labels=flipped:0.25,format=3`."""

import copy
import dataclasses
import json
from random import Random
from typing import Any

from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.declared import NotNegative, checked
from lm_eval_icl.demonstrations import how, wrong_labels
from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.harness.metaicl_task import MetaICLTask
from lm_eval_icl.prompts.formats import Template, format_of


def vary(task: ConfigurableTask, other_labels: Any, format_number: Any) -> None:
    """Give a task's demonstrations other labels, and all its prompts another format; None for no
    change.

    The task's metadata say what was changed: "relabeled" has the numbers of different
    demonstrations that were rendered and that have another label, "unformatted" has the templates
    that the format has replaced.

    Args:
        other_labels: see `demonstrations.wrong_labels.read`.
        format_number: see `prompts.formats.format_of`.

    Raises:
        InputError: the task cannot have other labels, or another format.
    """
    given = {}
    if other_labels is not None:
        given["labels"] = other_labels
    if format_number is not None:
        given["format"] = format_number
    if not given:
        return
    written = ", ".join(f"{name}={value}" for name, value in given.items())
    with naming(f"task {task.config.task!r}: {written}"):
        if isinstance(task, MetaICLTask):
            raise InputError("its own class makes its sequences: leave this out.")
        metadata = task.config.metadata or {}
        drawn = metadata.get("demonstrations")
        if drawn is not None and how.read(drawn) is not None:
            raise InputError(
                f"demonstrations={drawn}: choose them first (`lm-eval-icl select`), and give the "
                "file."
            )
        task.config.metadata = {**metadata, **given}
        if format_number is not None:
            _format(task, checked("format", format_number, NotNegative))
        if other_labels is not None:
            relabel = Relabel(task, wrong_labels.read(other_labels))
            task.fewshot_cfg = dataclasses.replace(task.fewshot_cfg, doc_to_target=relabel)
            task.config.metadata["relabeled"] = relabel.counts


class Relabel:
    """Returns the labels of demonstrations, in place of the task's `doc_to_target`, which queries
    keep.

    Labels are drawn by the few-shot seed of lm-eval's `--seed` and the row, so that a row has the
    same label under every model and in every order.

    Attributes:
        counts: how many different rows were labeled ("demonstrations"), and how many got another
            label ("changed").
    """

    def __init__(self, task: ConfigurableTask, how_labeled: wrong_labels.Labels) -> None:
        if task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input:
            raise InputError(
                "labels are changed only in tasks with options, of which one follows the query."
            )
        self._task = task
        self._labels = how_labeled
        self._template = task.fewshot_cfg
        self._generator = Random(0)
        self._seed = 0.0
        self._known: dict[str, str | int] = {}
        self.counts = {"demonstrations": 0, "changed": 0}

    def __call__(self, doc: dict[str, Any]) -> str | int:
        task = self._task
        template = self._template
        generator = getattr(task, "fewshot_rnd", None) or self._generator
        if generator is not self._generator:
            # A copy draws, so that the task's generator stays as it is.
            self._generator = generator
            self._seed = copy.copy(generator).random()
        row = f"{self._seed} {json.dumps(doc, sort_keys=True, default=str)}"
        if row not in self._known:
            options = task.doc_to_choice(doc, template.doc_to_choice)
            answer = task.doc_to_target(doc, template.doc_to_target)
            right = answer
            if not isinstance(answer, int):
                right = options.index(answer) if answer in options else -1
            if not 0 <= right < len(options):
                raise InputError(
                    f"task {task.config.task!r}: labels: {answer!r} is not one of its options."
                )
            label = self._labels.label(right, len(options), row)
            self._known[row] = answer if label == right else options[label]
            self.counts["demonstrations"] += 1
            self.counts["changed"] += label != right
        return self._known[row]


def _format(task: ConfigurableTask, format_number: int) -> None:
    """Replace the templates of a task's queries and demonstrations by those of a format."""
    config = task.config
    shots = task.fewshot_cfg
    if not isinstance(config.doc_to_text, str) or not isinstance(shots.doc_to_text, str):
        raise InputError(
            "its prompts are made by a function or by another task's, and not by a template."
        )
    queries = _template(config)
    demonstrations = _template(shots)
    new_format = format_of(queries, format_number)
    if new_format is None:
        return
    task.fewshot_cfg = dataclasses.replace(shots, **_settings(new_format.of(demonstrations)))
    config.fewshot_config = task.fewshot_cfg
    for name, value in _settings(new_format.of(queries)).items():
        setattr(config, name, value)
    config.metadata["unformatted"] = {
        **_settings(queries),
        "fewshot_config": _settings(demonstrations),
    }


def _template(config: Any) -> Template:
    return Template(config.doc_to_text, config.target_delimiter, config.fewshot_delimiter)


def _settings(template: Template) -> dict[str, Any]:
    """A template under lm-eval's names."""
    return {
        "doc_to_text": template.text,
        "target_delimiter": template.before_answer,
        "fewshot_delimiter": template.between,
    }
