"""What the YAML files in `task_configs` refer to: fixed demonstrations, and BBH as cloze."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from datasets import Dataset
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.errors import InputError

Doc = dict[str, Any]


class ICLTask(ConfigurableTask):
    """A task whose demonstrations are drawn once a seed: the same for every document and every method.

    lm-eval's own sampler draws anew for each document. `metadata.demonstrations` (in the YAML file, or
    `--metadata demonstrations=...`) says how they are chosen from the few-shot pool:

    - `stratified`: as equally many of each label as their number allows, in random order;
    - `random`: at random;
    - `first`: the first ones, for data that come with demonstrations of their own;
    - a JSON file: their indices in the pool, in order, as a list or as {task name: list}.

    The seed is the few-shot slot of lm-eval's `--seed`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})
        how = (self.config.metadata or {}).get("demonstrations", "stratified")
        pool: list[Doc] = list(self.fewshot_docs())
        self.sampler: ContextSampler = FixedSampler(pool, str(how), self.doc_to_target, str(self.config.task))


class FixedSampler(ContextSampler):
    """Draws n demonstrations once, and gives them for every document.

    Args:
        df: the pool.
        how: see `ICLTask`.
        label: a document's label.
        task: the task's name, to look up its indices in a file and for errors.

    Raises:
        InputError: an unknown way to choose, a file that cannot be used, more demonstrations than there are.
    """

    def __init__(self, df: list[Doc], how: str, label: Callable[[Doc], Any], task: str) -> None:
        super().__init__(df)
        self.how, self.label, self.task = how, label, task
        self._drawn: dict[int, list[Doc]] = {}

    def set_rnd(self, rnd: int | None) -> FixedSampler:
        self._drawn = {}
        super().set_rnd(rnd)
        return self

    def sample(self, n: int, eval_doc: Doc | None = None, df: object = None, **kwargs: object) -> list[Doc]:
        if eval_doc is not None:
            raise self._error(
                "the demonstrations would come from the documents that are evaluated, where one that is drawn once "
                "for all would be its own demonstration: give the task another fewshot_split."
            )
        if n not in self._drawn:
            self._drawn[n] = self._draw(n)
        return self._drawn[n]

    def _draw(self, n: int) -> list[Doc]:
        pool = list(self.df)
        if n > len(pool):
            raise self._error(f"{n} demonstrations asked for, {len(pool)} there: lower --num_fewshot.")
        if self.how == "first":
            return pool[:n]
        if self.how == "random":
            return self.rnd.sample(pool, n)
        if self.how == "stratified":
            return stratified(pool, n, self.label, self.rnd)
        return [pool[index] for index in self._indices(n, len(pool))]

    def _indices(self, n: int, size: int) -> list[int]:
        path = Path(self.how)
        if not path.is_file():
            raise self._error("must be stratified, random, first, or a JSON file of indices that exists.")
        try:
            indices = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise self._error(f"not JSON ({error}).") from error
        if isinstance(indices, dict):
            if self.task not in indices:
                raise self._error(f"the file has no indices for this task, only for {', '.join(indices)}.")
            indices = indices[self.task]
        if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < size for index in indices):
            raise self._error(f"must hold a list of whole numbers from 0 to {size - 1}, or one for each task.")
        if len(indices) < n:
            raise self._error(f"holds {len(indices)} indices, {n} demonstrations asked for: lower --num_fewshot.")
        return indices[:n]

    def _error(self, what: str) -> InputError:
        return InputError(f"lm-eval-icl: task {self.task!r}: demonstrations={self.how}: {what}")


def stratified(pool: list[Doc], n: int, label: Callable[[Doc], Any], rnd: Random) -> list[Doc]:
    """Draw n documents, labels as equally as n allows, in random order.

    Where n is no multiple of the number of labels, which labels get one more is drawn too; where a label
    has too few documents, the others make up for it.
    """
    by_label = defaultdict(list)
    for doc in pool:
        by_label[label(doc)].append(doc)
    groups = list(by_label.values())
    rnd.shuffle(groups)
    for group in groups:
        rnd.shuffle(group)
    drawn: list[Doc] = []
    while len(drawn) < n:
        for group in groups:
            if group and len(drawn) < n:
                drawn.append(group.pop())
    rnd.shuffle(drawn)
    return drawn


def bbh_docs(dataset: Dataset) -> Dataset:
    """BBH as cloze, the rows with their subtask's usual number of options (Deep-Thinking's Table 6 counts them)."""
    rows = dataset.to_list()
    docs = bbh_cloze(rows, answers=sorted({row["target"] for row in rows}))
    usual = Counter(len(doc["choices"]) for doc in docs).most_common(1)[0][0]
    return Dataset.from_list([doc for doc in docs if len(doc["choices"]) == usual])


def bbh_cloze(rows: list[Doc], answers: list[str]) -> list[Doc]:
    """Rows with `input` and `target` as `question` (without its options), `choices` (full texts), `answer` (index).

    Args:
        answers: the choices of rows that list no options.
    """
    docs = []
    for row in rows:
        question, _, options = row["input"].partition("\nOptions:")
        choices = [text.strip() for text in re.findall(r"^(?:\([A-Z]\)|-) (.*)", options, re.MULTILINE)] or answers
        target = row["target"].strip()
        letter = re.fullmatch(r"\(([A-Z])\)", target)
        # Three of BBH's targets are neither; their rows have an unusual number of options and are left out.
        answer = ord(letter[1]) - ord("A") if letter else choices.index(target) if target in choices else None
        docs.append({"question": question.strip(), "choices": choices, "answer": answer})
    return docs
