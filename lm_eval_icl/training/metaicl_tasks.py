"""The training tasks of a setting of MetaICL."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lm_eval_icl.metaicl.data import MetaICLFolder, Row, check_missing, setting_of
from lm_eval_icl.metaicl.reading import Reader, reader
from lm_eval_icl.metaicl.strings import Sequences, encoded
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.predictor import Predictor
from lm_eval_icl.training.episodes import Episode, Example


@dataclass(frozen=True, eq=False)
class SettingTask:
    """The rows of a task, and the sequences that MetaICL makes of them for training.

    Attributes:
        reader: how the model reads sequences.
        channel: whether the output is given and the input is the answer, rather than the other way
            around.
    """

    name: str
    rows: tuple[Row, ...]
    reader: Reader
    channel: bool

    def __len__(self) -> int:
        return len(self.rows)

    def text(self, row: int) -> None:
        """None, since in MetaICL a demonstration may have the same text as the query."""

    def example(self, demonstrations: Sequence[int], query: int) -> Example:
        sequences = self._sequences
        row = self.rows[query]
        shown = sequences.encoded_demonstrations([self.rows[i] for i in demonstrations])
        [joined] = sequences.join(shown, sequences.encoded_options(row, not shown, [row.output]))
        prompt, answer = encoded(joined, self.reader, {})
        if self.channel or not row.options:
            return Example(prompt, (answer,), 0)
        options = []
        for option in row.options:
            [example] = sequences.encoded_options(row, not shown, [option])
            sequence = replace(joined, target=example.target)
            options.append(encoded(sequence, self.reader, {})[1])
        options[row.right] = answer
        return Example(prompt, tuple(options), row.right)

    def remains(self, method: Method, episode: Episode) -> bool:
        """Whether an episode would stay whole if all its tokens under the method had to fit.

        Copies count too (InvICL, appendix A.4 and Table 4).
        """
        shots = len(episode.demonstrations)
        shown = sum(self._lengths[row] for row in episode.demonstrations)
        copies = _copies(method, shots)
        return copies * shown + self._lengths[episode.query] <= self._sequences.limit(shots)

    @functools.cached_property
    def _sequences(self) -> Sequences:
        return Sequences(self.reader, self.channel)

    @functools.cached_property
    def _lengths(self) -> list[int]:
        """The tokens of each row with the separator before it, after its input has been cut."""
        lengths = []
        for row in self.rows:
            [example] = self._sequences.encoded_options(row, False, [row.output])
            lengths.append(len(example.between) + len(example.source) + len(example.target))
        return lengths


@functools.cache
def _copies(method: Method, shots: int) -> int:
    """How many copies of a demonstration a row under a method has: one, or two under InvICL."""
    return len(method.lay_out(0, [1] * shots)) // shots if shots else 1


def load_rows(
    setting: str, folder: MetaICLFolder, k: int, skip_missing: bool
) -> dict[str, tuple[Row, ...]]:
    """The rows of the tasks that MetaICL trains on in a setting, by task.

    Args:
        k: the K in the names of the training files.
        skip_missing: leave out tasks that have no file.

    Raises:
        InputError: there is no such setting, or a file is missing or cannot be used.
    """
    names = setting_of(setting)["train"]
    missing = folder.without_train(names, k)
    what = f"training tasks of {setting} (TASK_{k}_100_train.jsonl: --train_k)"
    check_missing(folder.option, what, missing, len(names), skip_missing)
    return {name: folder.train(name, k) for name in names if name not in missing}


def setting_tasks(
    rows: Mapping[str, tuple[Row, ...]],
    predictor: Predictor,
    channel: bool,
    add_bos_token: bool | None,
) -> list[SettingTask]:
    """The tasks of these rows, as sequences for a model under its method."""
    model_reader = replace(
        reader(predictor.tokenizer.tokenizer, add_bos_token, predictor.limits.positions),
        alike=predictor.runner.method.treats_demonstrations_alike,
        longest_first=predictor.limits.longest_go_first,
        canonical=predictor.runner.invariant,
    )
    return [SettingTask(name, task_rows, model_reader, channel) for name, task_rows in rows.items()]
