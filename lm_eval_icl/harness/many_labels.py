"""Tasks whose options are the names of a data set's classes, of which there may be hundreds."""

from __future__ import annotations

from typing import Any

from datasets import ClassLabel

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.tasks import ICLTask


class NamedLabelsTask(ICLTask):
    """A task whose options are the names that the data set gives to the classes of the column `label_column`, with
    blanks for underscores. Documents get a column `answer` with the name of their class.

    Args:
        config: the configuration of the YAML file. Its `words` maps some names to other words. Its `without` lists
            classes that are not options: their documents are left out.

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
