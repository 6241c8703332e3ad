"""Classes and functions that the YAML files in `task_configs` refer to: fixed demonstrations, and BBH as cloze."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.demonstrations.draw import draw
from lm_eval_icl.demonstrations.how import read
from lm_eval_icl.errors import InputError

Doc = dict[str, Any]


class ICLTask(ConfigurableTask):
    """A task whose demonstrations are drawn once for each seed: they are the same for every document and every method.

    lm-eval's own sampler draws new demonstrations for each document. `metadata.demonstrations` (in the YAML file, or
    `--metadata demonstrations=...`) says how the demonstrations are chosen from the few-shot pool:

    - `stratified`: the same number for each label as far as possible, in random order;
    - `random`: at random;
    - `first`: the first ones, for datasets that come with their own demonstrations;
    - `herding`, `lens:m=500` or another method (`demonstrations.how`): what the model chooses at the start of its run;
    - a JSON file: their indices in the pool, in order, as a list or as {task name: list}; or what `lm-eval-icl select`
      has written.

    The seed is the few-shot seed of lm-eval's `--seed`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})
        how = (self.config.metadata or {}).get("demonstrations", "stratified")
        pool: list[Doc] = list(self.fewshot_docs())
        self.sampler: ContextSampler = FixedSampler(pool, how, self.doc_to_target, str(self.config.task))


def with_given_demonstrations(original: Callable[..., None], task: Any, *args: Any, **kwargs: Any) -> None:
    """Wrapper of `ConfigurableTask.__init__`: a task of lm-eval's own, too, has the demonstrations that `--metadata
    demonstrations=...` names. A task without few-shot documents has none."""
    original(task, *args, **kwargs)
    how = (task.config.metadata or {}).get("demonstrations")
    if how is None or isinstance(task, ICLTask):
        return
    if pool := list(task.fewshot_docs() or []):
        task.sampler = FixedSampler(pool, how, task.doc_to_target, str(task.config.task))


def pool_of(task: ConfigurableTask) -> list[Doc]:
    """The documents that a task takes its demonstrations from; to read them from the dataset again takes seconds."""
    sampler = getattr(task, "sampler", None)
    return sampler.df if isinstance(sampler, FixedSampler) else list(task.fewshot_docs() or [])


def is_its_own_pool(task: ConfigurableTask) -> bool:
    """Whether the documents that are evaluated are those that demonstrations come from, as lm-eval decides it."""
    return bool(task.fewshot_cfg.split == task.config.test_split)


# Keys of a task's configuration that name or place it, or that a run says itself.
_NAMES = r"task|task_alias|tag|group|class|dataset_.*|custom_dataset|\w*_split|num_fewshot|metadata"


def template_of(task: ConfigurableTask) -> str:
    """What a task's configuration says, as JSON; not where the task is found, and what it is called."""
    config = {key: value for key, value in task.dump_config().items() if not re.fullmatch(_NAMES, key)}
    return re.sub(r" at 0x[0-9a-f]+", "", json.dumps(config, sort_keys=True, default=str))


class FixedSampler(ContextSampler):
    """Draws n demonstrations once, and returns the same ones for every document.

    Args:
        df: the pool of demonstrations.
        how: see `ICLTask`.
        label: returns the label of a document.
        task: the task's name, for errors.

    Attributes:
        method: the method by which a model chooses; None for what is drawn, and for a file.
        seed: of the draw, or of the choice.

    Raises:
        InputError: `how` is unknown, its file cannot be used, or the pool has too few documents.
    """

    def __init__(self, df: list[Doc], how: Any, label: Callable[[Doc], Any], task: str) -> None:
        super().__init__(df)
        self.label, self.task = label, task
        try:
            self.method = read(how)
        except InputError as error:
            raise InputError(f"task {task!r}: {error.message}") from error
        self.how = str(self.method or how)
        self._drawn: dict[int, list[Doc]] = {}
        self.seed: int | None = None

    def set_rnd(self, rnd: int | None) -> FixedSampler:
        self._drawn, self.seed = {}, rnd
        super().set_rnd(rnd)
        return self

    def give(self, rows: Sequence[int]) -> None:
        """Set what a model has chosen: `sample` returns these rows of the pool, for their number."""
        self._drawn[len(rows)] = [self.df[row] for row in rows]

    def refuse_own_documents(self) -> None:
        """Refuse demonstrations from the documents that are evaluated."""
        raise InputError(
            f"task {self.task!r}: demonstrations={self.how}: the demonstrations would come from the documents that "
            "are evaluated, where one that is drawn once for all would be its own demonstration: give the task "
            "another fewshot_split."
        )

    def sample(self, n: int, eval_doc: Doc | None = None, df: object = None, **kwargs: object) -> list[Doc]:
        if eval_doc is not None:
            self.refuse_own_documents()
        if n not in self._drawn:
            if self.method is not None:
                raise InputError(
                    f"task {self.task!r}: demonstrations={self.how}: a model chooses these, and here is none that "
                    f"could (--model hf cannot): make a file with `lm-eval-icl select {self.method.name} --model_args "
                    f"pretrained=... --tasks {self.task} --num_fewshot {n} --output FILE.json`, and give that: "
                    "demonstrations=FILE.json."
                )
            self._drawn[n] = draw(list(self.df), n, self.how, self.label, self.rnd, self.task, self.seed)
        return self._drawn[n]


class These(ContextSampler):
    """Returns the documents that it was given, as the demonstrations of every document."""

    def sample(self, n: int, eval_doc: Doc | None = None, df: object = None, **kwargs: object) -> list[Doc]:
        return list(self.df)


def bbh_docs(dataset: Dataset) -> Dataset:
    """BBH as cloze, only rows with their subtask's usual number of options (as many as in Deep-Thinking, Table 6)."""
    rows = dataset.to_list()
    docs = bbh_cloze(rows, answers=sorted({row["target"] for row in rows}))
    usual = Counter(len(doc["choices"]) for doc in docs).most_common(1)[0][0]
    return Dataset.from_list([doc for doc in docs if len(doc["choices"]) == usual])


def bbh_cloze(rows: list[Doc], answers: list[str]) -> list[Doc]:
    """Convert rows with `input` and `target` to `question` (without options), `choices` (full texts), `answer` (index).

    Args:
        answers: the choices of rows that list no options.
    """
    docs = []
    for row in rows:
        question, _, options = row["input"].partition("\nOptions:")
        choices = [text.strip() for text in re.findall(r"^(?:\([A-Z]\)|-) (.*)", options, re.MULTILINE)] or answers
        target = row["target"].strip()
        letter = re.fullmatch(r"\(([A-Z])\)", target)
        # Three of BBH's targets are neither a letter nor a choice. Their rows have an unusual number of options and are
        # left out by `bbh_docs`.
        answer = ord(letter[1]) - ord("A") if letter else choices.index(target) if target in choices else None
        docs.append({"question": question.strip(), "choices": choices, "answer": answer})
    return docs
