"""Tasks of lm-eval by their names, and their documents as examples to train on or to choose
from."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from lm_eval_icl.errors import InputError, did_you_mean, refusing
from lm_eval_icl.harness.documents import copy_text, label_of
from lm_eval_icl.harness.private_names import copied
from lm_eval_icl.harness.prompts import recording
from lm_eval_icl.harness.samplers import prompt_of
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.training.episodes import Example


class Examples:
    """Documents of a task of lm-eval, with prompts and answers as lm-eval makes them for
    evaluation.

    Args:
        task: the task.
        docs: documents of the task.

    Raises:
        InputError: a document's answer is not among its options.
    """

    def __init__(self, task: ConfigurableTask, docs: Any) -> None:
        self.name = str(task.config.task)
        self._task = copied(task)
        self._docs = docs
        for row in range(len(docs) if task.OUTPUT_TYPE == "multiple_choice" else 0):
            self.right(row)  # refuses a row now, not when it is drawn after hours of work

    def __len__(self) -> int:
        return len(self._docs)

    def text(self, row: int) -> str:
        """The text of a document, by which documents are compared (`documents.copy_text`)."""
        with recording():
            return copy_text(self._task, self._docs[row])

    def example(self, demonstrations: Sequence[int], query: int) -> Example:
        task = self._task
        doc = self._docs[query]
        prompt = self.prompt(demonstrations, doc)
        delimiter = task.config.target_delimiter
        if task.OUTPUT_TYPE == "multiple_choice":
            options = tuple(f"{delimiter}{option}" for option in task.doc_to_choice(doc))
            return Example(prompt, options, self.right(query))
        answer: Any = task.doc_to_target(doc)
        text = answer[0] if isinstance(answer, list) else answer
        # In tasks of lm-eval that score a text, the text begins with a blank already.
        if task.OUTPUT_TYPE != "loglikelihood":
            text = f"{delimiter}{text}"
        return Example(prompt, (str(text),), 0)

    def prompt(self, demonstrations: Sequence[int], doc: Any) -> FewShotPrompt:
        """The prompt of a document, which may be of another split, after rows of these documents as
        demonstrations."""
        return prompt_of(self._task, doc, [self._docs[i] for i in demonstrations])

    def right(self, row: int) -> int:
        """The index of a row's right option."""
        doc = self._docs[row]
        if (right := label_of(self._task, doc)) is None:
            answer = self._task.doc_to_target(doc)
            raise InputError(
                f"task {self.name!r}, row {row}: its answer {answer!r} is none of its options."
            )
        return right


class HarnessTask(Examples):
    """The training split of a task of lm-eval.

    Args:
        task: the task.

    Raises:
        InputError: the task has no training split, or its prompts have no demonstrations, query and
            answer.
    """

    def __init__(self, task: ConfigurableTask) -> None:
        name = str(task.config.task)
        if not isinstance(task, ConfigurableTask):
            raise InputError(
                f"task {name!r}: its own class builds its prompts, so that it cannot be trained on."
            )
        if not task.has_training_docs():
            raise InputError(f"task {name!r} has no training split (training_split): give others.")
        if task.OUTPUT_TYPE == "loglikelihood_rolling" or task.multiple_input:
            raise InputError(
                f"task {name!r} has no query with one answer, so that it cannot be trained on."
            )
        super().__init__(task, task.training_docs())


def tasks_of(
    names: Sequence[str], include_path: str | None, metadata: Mapping[str, Any]
) -> list[ConfigurableTask]:
    """The tasks of these names, each once. The name of a group stands for all its tasks.

    Raises:
        InputError: there is no such task, or its data cannot be loaded.
    """
    check_tasks(names, include_path, metadata)
    manager = task_manager(include_path, metadata)
    tasks: dict[str, ConfigurableTask] = {}
    for name in names:
        with refusing(f"--tasks {name}: the task cannot be loaded"):
            loaded = manager.load([name])["tasks"]
        for key, task in loaded.items():
            tasks.setdefault(key, task)
    return list(tasks.values())


def unknown_task(name: str, known: Iterable[str], include_path: str | None) -> str:
    """The message about a name of no task or group, with the nearest among the `known` names."""
    near = did_you_mean(name, known)
    what = f"there is no task {name!r}" + (f": {near}" if near else ".")
    option = ""
    advice = " For tasks in a folder of your own, give --include_path DIR."
    if include_path:
        option = f" --include_path {include_path}"
        advice = ""
    return f"{what} `lm-eval-icl ls tasks{option}` lists them.{advice}"


def check_tasks(
    names: Sequence[str], include_path: str | None, metadata: Mapping[str, Any]
) -> None:
    """Raise an `InputError` if a name is neither a task nor a group."""
    known = task_manager(include_path, metadata).all_tasks
    unknown = [name for name in names if name not in known and not Path(name).is_file()]
    if unknown:
        raise InputError(f"--tasks: {unknown_task(unknown[0], known, include_path)}")


def task_manager(include_path: str | None, metadata: Mapping[str, Any]) -> TaskManager:
    """lm-eval's index of tasks, which is made once, since lm-eval reads thousands of files to make
    it."""
    return _manager(include_path, json.dumps(dict(metadata), sort_keys=True, default=str))


@functools.cache
def _manager(include_path: str | None, metadata: str) -> TaskManager:
    return TaskManager(include_path=include_path, metadata=json.loads(metadata))
