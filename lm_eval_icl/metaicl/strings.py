"""MetaICL's sequences of rows, made piece by piece as token ids; its decision, and its metric.

A row is two pieces: its source, which is given, and its target, which is scored. In the direct form the input is given
and the output is scored, in the channel form the output is given and the input is scored. Every piece is tokenized by
itself, with the line breaks in front of it, and the lists of ids are joined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lm_eval_icl.errors import InputError
from lm_eval_icl.metaicl.files import Row
from lm_eval_icl.metaicl.reading import Reader
from lm_eval_icl.prompts.encoded import EncodedPrompt, EncodedText
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt

# How many tokens an example may have, two of which MetaICL leaves free, and how many a sequence.
PER_EXAMPLE, FREE, PER_SEQUENCE = 256, 2, 1024
# The texts between two examples, and between the pieces of one.
BETWEEN, INSIDE = "\n\n\n", "\n"


def texts(row: Row, output: str, channel: bool, first: bool) -> tuple[str, str, str]:
    """The pieces of a row with one of its options, as texts.

    Args:
        first: a sequence begins with the row.

    Returns:
        The separator from the example before, the source, and the target (with the line break before it).
    """
    inside = INSIDE if any(row.options) else ""  # free text follows without a line break
    if channel:
        return "" if first else BETWEEN, output, (inside if row.input else "") + row.input
    between = BETWEEN if row.input else BETWEEN[:-1]
    return "" if first else between, row.input, inside + output


@dataclass(frozen=True)
class EncodedExample:
    """An example in three pieces, as ids.

    Attributes:
        between: the separator from the example before.
        source: what is given.
        target: the text to score.
    """

    between: Ids
    source: Ids
    target: Ids


@dataclass(frozen=True)
class Joined:
    """A sequence to score, as ids.

    Attributes:
        demonstrations: each with the separator that follows it.
        query: the query, up to the target.
        target: the ids that are scored.
    """

    demonstrations: tuple[Ids, ...]
    query: Ids
    target: Ids

    def __len__(self) -> int:
        return sum(map(len, (*self.demonstrations, self.query, self.target)))


@dataclass(frozen=True)
class Sequences:
    """Makes sequences of rows.

    Attributes:
        reader: how the model reads them.
        channel: give the output and score the input.
    """

    reader: Reader
    channel: bool

    def limit(self, shots: int) -> int:
        """How many tokens a sequence with so many demonstrations may have."""
        return min(PER_EXAMPLE * max(shots, 1), PER_SEQUENCE, self.reader.max_length - len(self.reader.prefix))

    # Examples.

    def encoded_demonstrations(self, rows: Sequence[Row]) -> list[EncodedExample]:
        """Demonstrations, in their order."""
        alike = self.reader.alike
        examples = [self.encoded_options(row, i == 0 and not alike, [row.output])[0] for i, row in enumerate(rows)]
        if self.reader.canonical:
            examples.sort(key=lambda example: (example.source, example.target))
        return examples

    def encoded_options(self, row: Row, first: bool, outputs: Sequence[str] | None = None) -> list[EncodedExample]:
        """A query with each of its options; the end of the input is cut so that the longest option fits.

        Args:
            first: the query has no demonstrations before it.
            outputs: in place of all options.
        """
        examples = [self._pieces(row, output, first) for output in (row.options if outputs is None else outputs)]
        sources = [len(example.between) + len(example.source) for example in examples]
        targets = [len(example.target) for example in examples]
        inputs, others = (targets, sources) if self.channel else (sources, targets)
        room = max(0, PER_EXAMPLE - FREE - max(others))
        return [self._cut(example, size - room) for example, size in zip(examples, inputs, strict=True)]

    def _pieces(self, row: Row, output: str, first: bool) -> EncodedExample:
        between, source, target = texts(row, output, self.channel, first)
        ids, starts = self.reader.encode(between + source, first)
        at = bisect_left(starts, len(between))
        return EncodedExample(tuple(ids[:at]), tuple(ids[at:]), tuple(self.reader.encode(target, False)[0]))

    def _cut(self, example: EncodedExample, too_many: int) -> EncodedExample:
        """The example with so many tokens fewer at the end of its input."""
        if too_many <= 0:
            return example
        if self.channel:
            return replace(example, target=example.target[:-too_many])
        at, ids = len(example.between), (example.between + example.source)[:-too_many]
        return EncodedExample(ids[:at], ids[at:], example.target)

    # Sequences.

    def join(self, shown: Sequence[EncodedExample], options: Sequence[EncodedExample]) -> list[Joined]:
        """The sequences of a query with each of its options, after these demonstrations.

        Raises:
            InputError: the target alone fills the model's positions, or nothing precedes it.
        """
        if not shown:
            joined = [Joined((), option.between + option.source, option.target) for option in options]
        else:
            joined = [self._behind(shown, option) for option in options]
        limit = self.limit(len(shown))
        if self.reader.alike and shown:
            joined = self._with_whole_ones(joined, limit)
        return [self._fitting(sequence, limit) for sequence in joined]

    def _behind(self, shown: Sequence[EncodedExample], option: EncodedExample) -> Joined:
        """A query after all demonstrations, each of which ends with a separator: that of the next example, or, if all
        demonstrations have to be alike, its own."""
        behind = [example.between for example in (shown if self.reader.alike else shown[1:])]
        query = option.source or option.between
        if not self.reader.alike:
            # A blank query is its separator alone, since some token has to predict the first token of the target.
            behind.append(option.between if option.source else ())
        parts = tuple(example.source + example.target + end for example, end in zip(shown, behind, strict=True))
        return Joined(parts, query, option.target)

    def _with_whole_ones(self, joined: list[Joined], limit: int) -> list[Joined]:
        """The sequences without as many whole demonstrations as needed, the same ones in all."""
        kept = list(joined[0].demonstrations)
        behind = max(len(sequence.query) + len(sequence.target) for sequence in joined)
        while kept and sum(map(len, kept)) + behind > limit:
            at = max(range(len(kept)), key=lambda i: (len(kept[i]), kept[i])) if self.reader.longest_first else 0
            kept.pop(at)
        return [replace(row, demonstrations=tuple(kept)) for row in joined]

    def _fitting(self, sequence: Joined, limit: int) -> Joined:
        """The sequence without as many tokens at its beginning as needed; the target is never cut."""
        parts, surplus = list(sequence.demonstrations), max(0, len(sequence) - limit)
        while surplus and parts:
            first = parts.pop(0)
            if len(first) > surplus:
                parts.insert(0, first[surplus:])
            surplus = max(0, surplus - len(first))
        query = sequence.query[surplus:]
        if not query or not sequence.target:
            what = "nothing stands before what is scored" if sequence.target else "what is scored is empty"
            raise InputError(f"{what}: of {len(sequence)} tokens, a sequence may have {limit}.")
        return Joined(tuple(parts), query, sequence.target)


def encoded(
    sequence: Joined, reader: Reader, contexts: MutableMapping[Context, Context]
) -> tuple[EncodedPrompt, EncodedText]:
    """A sequence as a prompt and a continuation.

    Args:
        contexts: those that were made already, so that prompts share one object.
    """
    context = Context(reader.prefix, sequence.demonstrations)
    context = contexts.setdefault(context, context)
    tokens, said = TokenizedPrompt(context, sequence.query), list(map(reader.decode, sequence.demonstrations))
    prompt = EncodedPrompt(said, reader.decode(sequence.query), tokens)
    return prompt, EncodedText(reader.decode(sequence.target), sequence.target)


# The decision and the metric.


def mean_losses(logprobs: Sequence[float], tokens: Sequence[int]) -> np.ndarray:
    """The mean loss of an option's tokens, from the sums of their log-probabilities and their numbers."""
    return -np.asarray(logprobs, dtype=np.float64) / np.asarray(tokens, dtype=np.float64)


def decision(losses: Sequence[float] | np.ndarray) -> int:
    """The option with the smallest loss; the first if several have it."""
    return int(np.argmin(losses))


def macro_f1(pairs: Sequence[tuple[str, str]]) -> float:
    """The mean of the F1 of the classes that some document has: a class that is only predicted does not count.

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
