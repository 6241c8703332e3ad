"""What a task is asked for: its demonstrations and variations, by `--metadata`, and the classes and
functions that the YAML files in `task_configs` refer to.

A task's way through a run: its sampler (`samplers`), other labels and formats (`varying`), decision
rules (`deciding`), requests (`prompts`, `requests`), and results (`evaluate`).
"""

import re
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from datasets import ClassLabel, Dataset
from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.declared import NotNegative, checked
from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.harness.documents import Doc
from lm_eval_icl.harness.samplers import sampler_of
from lm_eval_icl.harness.varying import vary


class ICLTask(ConfigurableTask):
    """A task whose demonstrations are drawn once for each seed: they are the same for every
    document and every method.

    lm-eval's own sampler draws new demonstrations for each document. Here,
    `metadata.demonstrations` (in the YAML file, or `--metadata demonstrations=...`) says how they
    are chosen from the few-shot pool: `stratified` (the same number for each label as far as
    possible), `random`, `first`, a method by which the model chooses (`demonstrations.how`), or a
    JSON file of indices or of `lm-eval-icl select`. The seed is the few-shot seed of lm-eval's
    `--seed`. With `similar`, every document has other demonstrations
    (`samplers.RetrievingSampler`). `with_given_demonstrations`, which runs when any task is made,
    does all of this.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})


def with_given_demonstrations(
    original: Callable[..., None], task: Any, *args: Any, **kwargs: Any
) -> None:
    """Wrapper of `ConfigurableTask.__init__`: lm-eval's own tasks, too, get the demonstrations that
    `--metadata demonstrations=...` names, and documents in the order of `--metadata shuffle=SEED`.
    A task without few-shot documents has no demonstrations. `labels=...` and `format=...` are
    applied by `varying`."""
    original(task, *args, **kwargs)
    metadata = task.config.metadata or {}
    vary(task, metadata.get("labels"), metadata.get("format"))
    seed = metadata.get("shuffle")
    if seed is not None:
        _shuffle(task, seed)
    default = "stratified" if isinstance(task, ICLTask) else None
    how = metadata.get("demonstrations", default)
    pool = [] if how is None else list(task.fewshot_docs() or [])
    if pool:
        task.sampler = sampler_of(pool, how, task)


def _shuffle(task: ConfigurableTask, seed: Any) -> None:
    """Put the evaluated documents in random order, so that `--limit` takes a random sample."""
    with naming(f"task {task.config.task!r}"):
        number = checked("shuffle", seed, NotNegative)
    split = task.config.test_split or task.config.validation_split
    if split is None or split not in (task.dataset or {}) or split == task.fewshot_cfg.split:
        raise InputError(
            f"task {task.config.task!r}: shuffle={seed!r}: its evaluated documents are not a split "
            "of the dataset without demonstrations: leave it out."
        )
    documents = task.dataset[split]
    rows = Random(number).sample(range(len(documents)), len(documents))
    task.dataset = {**task.dataset, split: documents.select(rows)}


class NamedLabelsTask(ICLTask):
    """A task whose options are the names that the data set gives to the classes of the column
    `label_column`, with blanks for underscores. Documents get a column `answer` with the name of
    their class.

    Args:
        config: the configuration of the YAML file. Its `words` maps some names to other words. Its
            `without` lists classes that are not options: their documents are left out.

    Raises:
        InputError: the column has no names of classes, or two classes have the same name in words.
    """

    dataset: Any

    def __init__(self, config: dict[str, Any]) -> None:
        config = dict(config)
        self._column = str(config.pop("label_column"))
        self._words = dict(config.pop("words", None) or {})
        self._without = set(config.pop("without", None) or ())
        super().__init__(config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().download(dataset_kwargs, **kwargs)
        feature = next(iter(self.dataset.values())).features.get(self._column)
        if not isinstance(feature, ClassLabel):
            raise InputError(
                f"task {self.config.task!r}: its column {self._column!r} has no names of classes."
            )
        words = []
        options = list[str]()
        for name in feature.names:
            text = self._words.get(name, name.replace("_", " ").strip("? "))
            words.append(text)
            if name in self._without:
                continue
            if text in options:
                raise InputError(f"task {self.config.task!r}: two classes are called {text!r}.")
            options.append(text)
        splits = {}
        for split, rows in self.dataset.items():
            answers = [words[label] for label in rows[self._column]]
            kept = [row for row, answer in enumerate(answers) if answer in options]
            splits[split] = rows.add_column("answer", answers).select(kept)
        self.dataset = splits
        self.config.doc_to_choice = options
        self.fewshot_cfg.doc_to_choice = options


def bbh_docs(dataset: Dataset) -> Dataset:
    """BBH as cloze, without rows of an unusual number of options for the subtask (as in
    Deep-Thinking, Table 6)."""
    rows = dataset.to_list()
    docs = bbh_cloze(rows, answers=sorted({row["target"] for row in rows}))
    usual = Counter(len(doc["choices"]) for doc in docs).most_common(1)[0][0]
    return Dataset.from_list([doc for doc in docs if len(doc["choices"]) == usual])


def bbh_cloze(rows: list[Doc], answers: list[str]) -> list[Doc]:
    """Convert rows with `input` and `target` to `question` (without options), `choices` (full
    texts), `answer` (index).

    Args:
        answers: the choices of rows that list no options.
    """
    docs = []
    for row in rows:
        question, _, options = row["input"].partition("\nOptions:")
        listed = re.findall(r"^(?:\([A-Z]\)|-) (.*)", options, re.MULTILINE)
        choices = [text.strip() for text in listed] or answers
        target = row["target"].strip()
        letter = re.fullmatch(r"\(([A-Z])\)", target)
        answer: int | None = None
        if letter:
            answer = ord(letter[1]) - ord("A")
        elif target in choices:
            answer = choices.index(target)
        # Three of BBH's targets are neither a letter nor a choice. Their rows have an unusual
        # number of options and are left out by `bbh_docs`.
        docs.append({"question": question.strip(), "choices": choices, "answer": answer})
    return docs
