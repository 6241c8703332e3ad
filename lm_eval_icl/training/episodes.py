"""Episodes: some demonstrations of a task and a query with its answer.

They are drawn anew for each row of a training batch. An episode depends on the seed and on its
number alone, so every process, and a run that resumes, draws the same ones.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Any, Protocol

from pydantic import Field

from lm_eval_icl.demonstrations.draw import as_text
from lm_eval_icl.errors import InputError
from lm_eval_icl.metaicl.data import Row, read_lines
from lm_eval_icl.methods.base import Method
from lm_eval_icl.prompts.prompt import FewShotPrompt

# After this many episodes of a task that did not fit, another task is drawn.
ATTEMPTS_OF_A_TASK = 100


@dataclass(frozen=True)
class Example:
    """A prompt with its options.

    Attributes:
        prompt: demonstrations and query.
        options: the continuations to choose from, as they follow the prompt (with the blank before
            them); a single one if the answer is free text.
        right: the index of the right option.
    """

    prompt: FewShotPrompt
    options: tuple[str, ...]
    right: int

    @property
    def answer(self) -> str:
        return self.options[self.right]


class Task(Protocol):
    """Rows, and the template that makes prompts of them. Two different tasks are never equal."""

    @property
    def name(self) -> str:
        """The task's name."""

    def __len__(self) -> int:
        """How many rows there are."""

    def text(self, row: int) -> str | None:
        """A row's text (`demonstrations.draw.as_text`).

        No demonstration may have the same text as the query. None if the task allows that.
        """

    def example(self, demonstrations: Sequence[int], query: int) -> Example:
        """The prompt of some rows.

        Args:
            demonstrations: the indices of the demonstrations, in order.
            query: the index of the query.
        """


@dataclass(frozen=True)
class Episode:
    """Demonstrations and a query of one task."""

    task: Task
    demonstrations: tuple[int, ...]  # the indices of the rows
    query: int

    @functools.cached_property
    def example(self) -> Example:
        return self.task.example(self.demonstrations, self.query)

    def answer_spans(self) -> list[tuple[int, int]]:
        """For each demonstration, (begin, end) of the characters of its answer.

        The blank before the answer is a part of it.

        Raises:
            InputError: the task's demonstrations are not its queries followed by their answers.
        """
        spans = []
        for row, part in zip(self.demonstrations, self.example.prompt.demonstrations, strict=True):
            # mypy does not see that tasks have a hash.
            query, answer = _alone(self.task, row)  # type: ignore[arg-type]
            if not part.startswith(query + answer):
                raise InputError(
                    f"loss=all: the demonstrations of task {self.task.name!r} have another "
                    "template than its queries, so that their answers cannot be found "
                    f"({part!r} does not "
                    f"begin with {query + answer!r}): give loss=query."
                )
            spans.append((len(query), len(query + answer)))
        return spans


@functools.lru_cache(maxsize=100_000)
def _alone(task: Task, row: int) -> tuple[str, str]:
    """A row's query and answer, without demonstrations."""
    example = task.example((), row)
    return example.prompt.query, example.answer


class EpisodePool:
    """The rows of a task that training draws from, and those that are held out.

    Which rows are held out depends on the number of rows alone. So it is the same for every method
    and every seed, and for two tasks over the same rows.

    Args:
        shots: how many demonstrations an episode has.
        held_out: how many rows are held out, but never more than a tenth of the rows.

    Raises:
        InputError: there are too few rows for an episode.
    """

    def __init__(self, task: Task, shots: int, held_out: int) -> None:
        rows = list(range(len(task)))
        Random(f"held out of {len(rows)} rows").shuffle(rows)
        held_out = min(held_out, len(rows) // 10)
        self.task = task
        self.shots = shots
        self.held_out = rows[:held_out]
        self.rows = sorted(rows[held_out:])
        # lm-eval renders a template for a text, and a row is drawn many times.
        self._text = functools.cache(task.text)
        if len(self.rows) < shots + 1:
            raise InputError(
                f"task {task.name!r}: {shots} demonstrations and a query are {shots + 1} rows, and "
                f"it has {len(self.rows)} to train on: lower --num_fewshot."
            )

    def draw(self, rnd: Random) -> Episode:
        """An episode of different rows, all equally likely (InvICL, section 5.2)."""
        *shown, query = rnd.sample(self.rows, self.shots + 1)
        return self.episode(shown, query)

    def episode(self, shown: Sequence[int], query: int) -> Episode:
        """An episode of these rows.

        Other rows replace demonstrations that have the same text as the query.

        Raises:
            InputError: too few rows have another text than the query.
        """
        text = self._text(query)
        copies = {row for row in shown if text is not None and self._text(row) == text}
        if not copies:
            return Episode(self.task, tuple(shown), query)
        drawn = Random(f"in place of copies of {query} in {shown}").sample(
            self.rows, len(self.rows)
        )
        differing = (row for row in drawn if row not in shown and self._text(row) != text)
        others = list(islice(differing, len(copies)))
        if len(others) < len(copies):
            raise InputError(
                f"task {self.task.name!r}: fewer than {self.shots} of its rows have another text "
                f"than row {query}: lower --num_fewshot."
            )
        demonstrations = [others.pop() if row in copies else row for row in shown]
        return Episode(self.task, tuple(demonstrations), query)

    def evaluation(self) -> list[Episode]:
        """An episode for every row that is held out, as its query.

        Every eight queries share their demonstrations.
        """
        rnd = Random(f"demonstrations for what is held out of {self.task.name}")
        episodes = []
        for at, query in enumerate(self.held_out):
            if at % 8 == 0:
                shown = tuple(rnd.sample(self.rows, self.shots))
            episodes.append(self.episode(shown, query))
        return episodes


def draw_episode(pools: Sequence[EpisodePool], seed: int, number: int, attempt: int = 0) -> Episode:
    """An episode of a task, which is drawn first, all tasks equally likely (InvICL, section 5.2).

    Args:
        attempt: how many episodes of this number were drawn before, and did not fit. After every
            hundred, another task is drawn.
    """
    tasks_before = attempt // ATTEMPTS_OF_A_TASK
    seed_of_task = f"{seed} {number}"
    if tasks_before:
        seed_of_task += f" in place of {tasks_before}"
    pool = Random(seed_of_task).choice(pools)
    return pool.draw(Random(f"{seed} {number} {attempt}"))


class RowDraw:
    """Draws every row once an epoch, in random order.

    A task's weight is therefore its number of rows, as in MetaICL. The demonstrations of a row are
    other rows of its task, in random order. They are the same in every epoch.

    Args:
        pools: the pools of the tasks.
        seed: the seed of the draw.
        methods: the methods under which the rows that are not cut are counted
            (`SettingTask.remains`).
        all_remain: whether only rows that are cut under none of these methods are drawn.

    Attributes:
        rows: the rows that are drawn, each with the pool of its task.
        shares: method's name -> the share of all rows that are not cut under the method.

    Raises:
        InputError: every row is cut.
    """

    def __init__(
        self,
        pools: Sequence[EpisodePool],
        seed: int,
        methods: Sequence[Method] = (),
        all_remain: bool = False,
    ) -> None:
        self.seed = seed
        self.rows: list[tuple[EpisodePool, int]] = []
        for pool in pools:
            self.rows += [(pool, row) for row in pool.rows]
        kept = self.rows
        self.shares: dict[str, float] = {}
        episodes: list[Any] = [self._episode(*row) for row in self.rows if methods]
        for method in methods:
            whole = {
                row
                for row, episode in zip(self.rows, episodes, strict=True)
                if episode.task.remains(method, episode)
            }
            self.shares[method.name] = len(whole) / len(self.rows)
            if all_remain:
                kept = [row for row in kept if row in whole]
        self.rows = kept
        if not self.rows:
            raise InputError(
                f"--fits: no row is short enough under {', '.join(self.shares)}: lower "
                "--num_fewshot."
            )
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def __call__(self, number: int, attempt: int = 0) -> Episode:
        epoch, at = divmod(number, len(self.rows))
        if attempt:  # another episode, in place of an episode that did not fit
            return self._episode(*Random(f"{self.seed} {number} {attempt}").choice(self.rows))
        return self._episode(*self.rows[self._order(epoch)[at]])

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        Random(f"{self.seed} epoch {epoch}").shuffle(order)
        return order

    def _episode(self, pool: EpisodePool, row: int) -> Episode:
        drawn = Random(f"{self.seed} {pool.task.name} {row}").sample(pool.rows, pool.shots + 1)
        return pool.episode([other for other in drawn if other != row][: pool.shots], row)


Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class TaskRow(Row):
    """A row of a file of episodes."""

    task: Text
    input: Text
    output: Text


@dataclass(frozen=True, eq=False)
class FileTask:
    """A task whose rows come from a file.

    A blank joins input and output, and demonstrations end with a blank line.
    """

    name: str
    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def text(self, row: int) -> str:
        return as_text(self.rows[row].input, self.rows[row].options)

    def example(self, demonstrations: Sequence[int], query: int) -> Example:
        row = self.rows[query]
        shown = [self.rows[i] for i in demonstrations]
        texts = [f"{other.input} {other.output}\n\n" for other in shown]
        options = row.options or (row.output,)
        continuations = tuple(f" {option}" for option in options)
        prompt = FewShotPrompt("", texts, row.input)
        return Example(prompt, continuations, options.index(row.output))


def read_file(path: Path) -> list[FileTask]:
    """The tasks of a file of JSON lines, in the order of their first rows.

    A line is {"task": str, "input": str, "output": str, "options": [str, ...]}. `options` may be
    left out or empty. (MetaICL's files have such rows.)

    Raises:
        InputError: the file cannot be read, or a line of it is not such a row; the message has the
            line's number.
    """
    rows: dict[str, list[Row]] = defaultdict(list)
    for _, row in read_lines(path, f"--episodes {path}", TaskRow):
        rows[row.task].append(row)
    return [FileTask(name, tuple(task_rows)) for name, task_rows in rows.items()]
