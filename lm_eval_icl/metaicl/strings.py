"""MetaICL's sequences of rows, made piece by piece as token ids; its decision, and its metric.

A row has two pieces: the source, which is given, and the target, which is scored. In the direct
form the source is the input and the target is the output. In the channel form the source is the
output and the target is the input. Each piece is tokenized by itself, with the line breaks before
it, and the lists of ids are joined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lm_eval_icl.errors import InputError
from lm_eval_icl.metaicl.data import Row
from lm_eval_icl.metaicl.reading import Reader
from lm_eval_icl.prompts.encoded import EncodedPrompt, EncodedText
from lm_eval_icl.prompts.prompt import Span
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt

PER_EXAMPLE = 256  # how many tokens an example may have
FREE = 2  # how many of these MetaICL leaves free
PER_SEQUENCE = 1024  # how many tokens a sequence may have
BETWEEN = "\n\n\n"  # between two examples
INSIDE = "\n"  # between the two pieces of an example


def texts(row: Row, output: str, channel: bool, first: bool) -> tuple[str, str, str]:
    """The pieces of a row with one of its options, as texts.

    Args:
        first: whether the sequence begins with this row.

    Returns:
        The separator from the example before, the source, and the target (with the line break
        before it).
    """
    inside = INSIDE if any(row.options) else ""  # free text follows without a line break
    between = BETWEEN if row.input or channel else BETWEEN[:-1]
    if first:
        between = ""
    if not channel:
        return between, row.input, inside + output
    return between, output, inside + row.input if row.input else ""


@dataclass(frozen=True)
class EncodedExample:
    """An example in three pieces, as ids.

    Attributes:
        between: the separator from the example before.
        source: the ids that are given.
        target: the ids that are scored.
    """

    between: Ids
    source: Ids
    target: Ids


@dataclass(frozen=True)
class Joined:
    """A sequence to score, as ids.

    Attributes:
        demonstrations: the ids of each demonstration, with the separator that follows it.
        query: the ids of the query, up to the target.
        target: the ids that are scored.
        answers: the indices of each demonstration's target among its ids.
    """

    demonstrations: tuple[Ids, ...]
    query: Ids
    target: Ids
    answers: tuple[Span, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, (*self.demonstrations, self.query, self.target)))


@dataclass(frozen=True)
class Sequences:
    """Makes sequences of token ids from rows.

    Attributes:
        reader: how the model reads sequences.
        channel: whether the output is given and the input scored.
    """

    reader: Reader
    channel: bool

    def limit(self, shots: int) -> int:
        """How many tokens a sequence with so many demonstrations may have, without the prefix."""
        positions = self.reader.max_length - len(self.reader.prefix)
        return min(PER_EXAMPLE * max(shots, 1), PER_SEQUENCE, positions)

    # Examples.

    def encoded_demonstrations(self, rows: Sequence[Row]) -> list[EncodedExample]:
        """The rows as demonstrations, in their order, or sorted if the reader is canonical."""
        examples = []
        for i, row in enumerate(rows):
            first = i == 0 and not self.reader.alike
            examples += self.encoded_options(row, first, [row.output])
        if self.reader.canonical:
            examples.sort(key=lambda example: (example.source, example.target))
        return examples

    def encoded_options(
        self, row: Row, first: bool, outputs: Sequence[str] | None = None
    ) -> list[EncodedExample]:
        """A query with each of its options.

        The end of the input is cut so that the longest option fits.

        Args:
            first: whether the query has no demonstrations before it.
            outputs: the outputs that take the place of the row's options; None for all options.
        """
        outputs = row.options if outputs is None else outputs
        examples = [self._pieces(row, output, first) for output in outputs]
        inputs = [len(example.between) + len(example.source) for example in examples]
        others = [len(example.target) for example in examples]
        if self.channel:
            inputs, others = others, inputs
        room = max(0, PER_EXAMPLE - FREE - max(others))
        sizes = zip(examples, inputs, strict=True)
        return [self._cut(example, size - room) for example, size in sizes]

    def _pieces(self, row: Row, output: str, first: bool) -> EncodedExample:
        between, source, target = texts(row, output, self.channel, first)
        ids, starts = self.reader.encode(between + source, first)
        target_ids, _ = self.reader.encode(target, False)
        at = bisect_left(starts, len(between))
        return EncodedExample(tuple(ids[:at]), tuple(ids[at:]), tuple(target_ids))

    def _cut(self, example: EncodedExample, too_many: int) -> EncodedExample:
        """The example without the last `too_many` tokens of its input."""
        if too_many <= 0:
            return example
        if self.channel:
            return replace(example, target=example.target[:-too_many])
        at = len(example.between)
        ids = (example.between + example.source)[:-too_many]
        return EncodedExample(ids[:at], ids[at:], example.target)

    # Sequences.

    def join(
        self, shown: Sequence[EncodedExample], options: Sequence[EncodedExample]
    ) -> list[Joined]:
        """One sequence for each option of a query, after the demonstrations `shown`.

        Raises:
            InputError: the target alone fills the model's positions, or no token precedes it.
        """
        joined = [self._joined(shown, option) for option in options]
        limit = self.limit(len(shown))
        if self.reader.alike and shown:
            joined = self._drop_whole_demonstrations(joined, limit)
        return [self._cut_beginning(sequence, limit) for sequence in joined]

    def _joined(self, shown: Sequence[EncodedExample], option: EncodedExample) -> Joined:
        """The sequence of the demonstrations and a query.

        Each demonstration ends with the separator of the next example. If all demonstrations have
        to be alike, each ends with the separator before itself instead.
        """
        if not shown:
            return Joined((), option.between + option.source, option.target)
        separators = [example.between for example in (shown if self.reader.alike else shown[1:])]
        query = option.source or option.between
        if not self.reader.alike:
            # A blank query is its separator alone, since some token has to predict the first token
            # of the target.
            separators.append(option.between if option.source else ())
        parts = []
        answers = list[Span]()
        for example, end in zip(shown, separators, strict=True):
            begin = len(example.source)
            parts.append(example.source + example.target + end)
            answers.append((begin, begin + len(example.target)))
        return Joined(tuple(parts), query, option.target, tuple(answers))

    def _drop_whole_demonstrations(self, joined: list[Joined], limit: int) -> list[Joined]:
        """Leave out as few whole demonstrations as needed for all sequences to fit.

        The same ones are left out of every sequence.
        """
        kept = list(zip(joined[0].demonstrations, joined[0].answers, strict=True))
        longest_query = max(len(sequence.query) + len(sequence.target) for sequence in joined)
        while kept and sum(len(part) for part, _ in kept) + longest_query > limit:
            at = 0
            if self.reader.longest_first:
                at = max(range(len(kept)), key=lambda i: (len(kept[i][0]), kept[i]))
            kept.pop(at)
        parts = tuple(part for part, _ in kept)
        answers = tuple(answer for _, answer in kept)
        return [replace(sequence, demonstrations=parts, answers=answers) for sequence in joined]

    def _cut_beginning(self, sequence: Joined, limit: int) -> Joined:
        """Cut as few tokens as needed at the beginning of a sequence. The target is never cut."""
        surplus = max(0, len(sequence) - limit)
        parts = list[Ids]()
        answers = list[Span]()
        for part, (begin, end) in zip(sequence.demonstrations, sequence.answers, strict=True):
            cut = min(surplus, len(part))
            surplus -= cut
            if cut < len(part) or not cut:
                parts.append(part[cut:])
                answers.append((max(begin - cut, 0), max(end - cut, 0)))
        query = sequence.query[surplus:]
        if not query or not sequence.target:
            what = "the target is empty"
            if sequence.target:
                what = "no token is left before the target"
            raise InputError(
                f"{what}: the sequence has {len(sequence)} tokens, and may have {limit}."
            )
        return Joined(tuple(parts), query, sequence.target, tuple(answers))


def encoded(
    sequence: Joined, reader: Reader, contexts: MutableMapping[Context, Context]
) -> tuple[EncodedPrompt, EncodedText]:
    """A sequence as a prompt and a continuation.

    Args:
        contexts: the contexts of earlier sequences, so that equal contexts are one object. A new
            context is added.
    """
    context = Context(reader.prefix, sequence.demonstrations, sequence.answers)
    context = contexts.setdefault(context, context)
    tokens = TokenizedPrompt(context, sequence.query)
    shown = [reader.decode(ids) for ids in sequence.demonstrations]
    prompt = EncodedPrompt(shown, reader.decode(sequence.query), tokens)
    return prompt, EncodedText(reader.decode(sequence.target), sequence.target)


# The decision and the metric.


def mean_losses(logprobs: Sequence[float], tokens: Sequence[int]) -> np.ndarray:
    """(n,) the mean loss of each option's tokens in nats.

    Args:
        logprobs: the summed log-probabilities of n options.
        tokens: how many tokens each option has.
    """
    return -np.asarray(logprobs, dtype=np.float64) / np.asarray(tokens, dtype=np.float64)


def decision(losses: Sequence[float] | np.ndarray) -> int:
    """The index of the option with the smallest loss; the first such option if several have it."""
    return int(np.argmin(losses))


def macro_f1(pairs: Sequence[tuple[str, str]]) -> float:
    """The mean F1 over the classes that some document has.

    A class that is only predicted does not count.

    Args:
        pairs: for each document, the right class and the predicted one.
    """
    scores = []
    for label in {right for right, _ in pairs}:
        actual = sum(right == label for right, _ in pairs)
        predicted = sum(answer == label for _, answer in pairs)
        both = sum(right == answer == label for right, answer in pairs)
        scores.append(2 * both / (actual + predicted))  # the harmonic mean of precision and recall
    return sum(scores) / len(scores)
