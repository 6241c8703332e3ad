"""The documents of a task as texts: as rows, as prompts render them, and with other texts."""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.demonstrations.draw import as_text
from lm_eval_icl.files import as_json
from lm_eval_icl.harness.prompts import recording

Doc = dict[str, Any]


def copy_text(task: ConfigurableTask, doc: Doc) -> str:
    """A document's text, by which copies are recognized: as a query. A few-shot document that has
    other columns than queries is rendered as a demonstration."""
    try:
        return text_of(task, doc, task.config)
    except Exception:  # a template lacks a column, or a task's function raises anything
        return text_of(task, doc, task.fewshot_cfg)


def text_of(task: ConfigurableTask, doc: Doc, template: Any) -> str:
    """A document's query and options, or its answer if it has neither, as `template` renders them
    (the configuration of the task, or that of its few-shot documents)."""
    query = query_of(task, doc, template)
    options = []
    if template.doc_to_choice is not None:
        options = task.doc_to_choice(doc, template.doc_to_choice)
    if not query.strip() and not options:
        query = str(task.doc_to_target(doc, template.doc_to_target))
    return as_text(query, map(str, options))


def query_of(task: ConfigurableTask, doc: Doc, template: Any) -> str:
    """A document's query, as `template` renders it. Empty if each option has a query of its own."""
    if task.multiple_input:
        return ""
    return str(task.doc_to_text(doc, template.doc_to_text))


def label_of(task: ConfigurableTask, doc: Doc) -> int | None:
    """The index of a document's right option; None if its answer is not among its options."""
    answer = task.doc_to_target(doc)
    options = task.doc_to_choice(doc)
    if isinstance(answer, str) and answer in options:
        return options.index(answer)
    if isinstance(answer, int) and 0 <= answer < len(options):
        return int(answer)
    return None


def with_texts(value: Any, text_for: Callable[[str], Any]) -> Any:
    """A field of a document with `text_for(text)` in place of each text, however deep it is nested.
    Lists of single letters, which number options, stay."""
    if isinstance(value, str):
        return text_for(value)
    if isinstance(value, Mapping):
        return {name: with_texts(inner, text_for) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        if all(isinstance(letter, str) and len(letter) == 1 for letter in value):
            return value
        return [with_texts(inner, text_for) for inner in value]
    return value


def texts_in(value: Any) -> list[str]:
    """The texts in a field of a document, without lists of single letters, which number options."""
    texts: list[str] = []
    with_texts(value, texts.append)
    return texts


# Keys of a task's configuration that say its name, where its data are, or what a run may set.
_NAMES = r"task|task_alias|tag|group|class|dataset_.*|custom_dataset|\w*_split|num_fewshot|metadata"


def template_of(task: ConfigurableTask) -> str:
    """A task's configuration as JSON, without its name and the place where it was found."""
    config = task.dump_config().items()
    return stable_json({key: value for key, value in config if not re.fullmatch(_NAMES, key)})


def stable_json(value: Any) -> str:
    """A value as JSON, without the addresses of functions, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", json.dumps(value, sort_keys=True, default=str))


def among(task: ConfigurableTask, documents: Callable[[], Iterable[Any]]) -> Callable[[Doc], bool]:
    """A function that says whether a document of a task is among others: whether one of these has
    the same row or the same rendered text (`copy_text`).

    Args:
        documents: returns the others, when the function is first called.
    """

    @functools.cache
    def known() -> set[str]:
        texts = set[str]()
        for doc in documents():
            texts.add(as_json(doc))
            texts.add(copy_text(task, doc))
        return texts

    def is_among(doc: Any) -> bool:
        with recording():  # in which templates are compiled once
            return as_json(doc) in known() or copy_text(task, doc) in known()

    return is_among


@functools.lru_cache(maxsize=128)
def evaluated(task: ConfigurableTask) -> Callable[[Doc], bool]:
    """A function that says whether a task evaluates a few-shot document, within a run's `--limit`
    or beyond it."""
    return among(task, lambda: task.eval_docs)
