"""The sequences that MetaICL makes of rows, piece by piece as token ids.

A row is two pieces: its source, which is given, and its target, which is asked for. `direct` gives the input and asks
for the output, and `channel` gives the output and asks for the input. Every piece is tokenized by itself, with the line
breaks in front of it, and the lists of ids are joined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

from lm_eval_icl.errors import InputError
from lm_eval_icl.metaicl.files import Row
from lm_eval_icl.metaicl.reading import Reader
from lm_eval_icl.prompts.encoded import EncodedPrompt, EncodedText
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt

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
class Piece:
    """A piece of a sequence: its ids, and the text that they stand for."""

    ids: tuple[int, ...]
    text: str

    def __add__(self, other: Piece) -> Piece:
        return Piece(self.ids + other.ids, self.text + other.text)


@dataclass(frozen=True)
class EncodedExample:
    """An example in three pieces.

    Attributes:
        between: the separator from the example before.
        source: what is given.
        target: what is asked for.
        cut: how many tokens of its input were dropped.
    """

    between: Piece
    source: Piece
    target: Piece
    cut: int = 0


@dataclass(frozen=True)
class Joined:
    """A sequence to score, and what was dropped of it.

    Attributes:
        demonstrations: each with the separator behind it.
        query: the query, up to what is scored.
        target: what is scored.
        cut: how many tokens were dropped, those of demonstrations that were left out included.
        left_out: how many demonstrations are not there at all.
    """

    demonstrations: tuple[Piece, ...]
    query: Piece
    target: Piece
    cut: int
    left_out: int

    def __len__(self) -> int:
        return sum(len(part.ids) for part in (*self.demonstrations, self.query, self.target))


@dataclass(frozen=True)
class Sequences:
    """Makes sequences of rows.

    Attributes:
        reader: how the model reads them.
        channel: give the output and ask for the input.
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
            examples.sort(key=lambda example: (example.source.ids, example.target.ids))
        return examples

    def encoded_options(self, row: Row, first: bool, outputs: Sequence[str] | None = None) -> list[EncodedExample]:
        """A query with each of its options; the end of the input is cut so that the longest option fits.

        Args:
            first: the query has no demonstrations before it.
            outputs: in place of all options.
        """
        examples = [self._pieces(row, output, first) for output in (row.options if outputs is None else outputs)]
        sources = [len(example.between.ids) + len(example.source.ids) for example in examples]
        targets = [len(example.target.ids) for example in examples]
        inputs, others = (targets, sources) if self.channel else (sources, targets)
        room = max(0, PER_EXAMPLE - FREE - max(others))
        return [self._cut(example, size - room) for example, size in zip(examples, inputs, strict=True)]

    def _pieces(self, row: Row, output: str, first: bool) -> EncodedExample:
        between, source, target = texts(row, output, self.channel, first)
        ids, starts = self.reader.encode(between + source, first)
        at = bisect_left(starts, len(between))
        target_ids, _ = self.reader.encode(target, False)
        return EncodedExample(
            Piece(tuple(ids[:at]), between), Piece(tuple(ids[at:]), source), Piece(tuple(target_ids), target)
        )

    def _cut(self, example: EncodedExample, too_many: int) -> EncodedExample:
        """The example with so many tokens fewer at the end of its input."""
        if too_many <= 0:
            return example
        if self.channel:
            return replace(example, target=self._part(example.target.ids[:-too_many]), cut=too_many)
        at = len(example.between.ids)
        ids = (example.between.ids + example.source.ids)[:-too_many]
        between = example.between if len(ids) >= at else self._part(ids)
        return EncodedExample(between, self._part(ids[at:]), example.target, too_many)

    def _part(self, ids: Sequence[int]) -> Piece:
        return Piece(tuple(ids), self.reader.decode(ids) if ids else "")

    # Sequences.

    def join(self, shown: Sequence[EncodedExample], options: Sequence[EncodedExample]) -> list[Joined]:
        """The sequences of a query with each of its options, behind these demonstrations.

        Raises:
            InputError: what is to be scored fills the model by itself, or there is nothing before it.
        """
        if not shown:
            joined = [Joined((), option.between + option.source, option.target, option.cut, 0) for option in options]
        else:
            joined = [self._behind(shown, option) for option in options]
        limit = self.limit(len(shown))
        if self.reader.alike and shown:
            joined = self._with_whole_ones(joined, limit)
        return [self._fitting(sequence, limit) for sequence in joined]

    def _behind(self, shown: Sequence[EncodedExample], option: EncodedExample) -> Joined:
        """A query behind all demonstrations, each of which ends with a separator: that of the next example, or, if all
        are to be alike, its own."""
        behind = [example.between for example in (shown if self.reader.alike else shown[1:])]
        query = option.source
        if not self.reader.alike:
            # A blank query is its separator alone, since something has to predict the first token behind it.
            behind.append(option.between if query.ids else Piece((), ""))
        query = query if query.ids else option.between
        parts = tuple(example.source + example.target + end for example, end in zip(shown, behind, strict=True))
        return Joined(parts, query, option.target, option.cut + sum(example.cut for example in shown), 0)

    def _with_whole_ones(self, joined: list[Joined], limit: int) -> list[Joined]:
        """The sequences without as many whole demonstrations as it takes, the same ones in all."""
        kept = list(joined[0].demonstrations)
        behind = max(len(sequence.query.ids) + len(sequence.target.ids) for sequence in joined)
        gone = 0
        while kept and sum(len(part.ids) for part in kept) + behind > limit:
            at = (
                max(range(len(kept)), key=lambda i: (len(kept[i].ids), kept[i].ids)) if self.reader.longest_first else 0
            )
            gone += len(kept.pop(at).ids)
        left_out = len(joined[0].demonstrations) - len(kept)
        parts = tuple(kept)
        return [replace(row, demonstrations=parts, cut=row.cut + gone, left_out=left_out) for row in joined]

    def _fitting(self, sequence: Joined, limit: int) -> Joined:
        """The sequence without as many tokens at its beginning as it takes; what is scored is never cut."""
        too_many = len(sequence) - limit
        parts, query, surplus = list(sequence.demonstrations), sequence.query, max(0, too_many)
        while surplus and parts:
            first = parts.pop(0).ids
            if len(first) > surplus:
                parts.insert(0, self._part(first[surplus:]))
            surplus = max(0, surplus - len(first))
        if surplus:
            query = self._part(query.ids[surplus:])
        if not query.ids or not sequence.target.ids:
            what = "nothing stands before what is scored" if sequence.target.ids else "what is scored is empty"
            full = f", of {len(sequence)} tokens, in the {limit} that a sequence may have" if too_many > 0 else ""
            raise InputError(f"{what}{full}.")
        left_out = sequence.left_out + len(sequence.demonstrations) - len(parts)
        return Joined(tuple(parts), query, sequence.target, sequence.cut + max(0, too_many), left_out)


def encoded(
    sequence: Joined, prefix: tuple[int, ...], contexts: MutableMapping[Context, Context]
) -> tuple[EncodedPrompt, EncodedText]:
    """A sequence as a prompt and a continuation.

    Args:
        contexts: those that were made already, so that prompts share one object.
    """
    context = Context(prefix, tuple(part.ids for part in sequence.demonstrations))
    context = contexts.setdefault(context, context)
    tokens = TokenizedPrompt(context, sequence.query.ids)
    prompt = EncodedPrompt([part.text for part in sequence.demonstrations], sequence.query.text, tokens)
    return prompt, EncodedText(sequence.target.text, sequence.target.ids)
