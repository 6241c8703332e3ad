"""The sequences that MetaICL makes of rows, piece by piece as token ids.

A row is two pieces: its source, which is given, and its target, which is asked for. `direct` gives the input and asks
for the output, and `channel` gives the output and asks for the input. Every piece is tokenized by itself, with the line
breaks in front of it, and the lists of ids are joined.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from lm_eval_icl.errors import InputError
from lm_eval_icl.metaicl.files import Row
from lm_eval_icl.prompts.splitting import encoder

# How many tokens an example may have, two of which MetaICL leaves free, and how many a sequence.
PER_EXAMPLE, FREE, PER_SEQUENCE = 256, 2, 1024
# The texts between two examples, and between the pieces of one.
BETWEEN, INSIDE = "\n\n\n", "\n"


@dataclass(frozen=True)
class Codec:
    """A tokenizer, as pieces need it.

    Attributes:
        encode: from a text, and whether a sequence begins with it, to its ids and each one's first character.
        decode: from ids to a text.
    """

    encode: Callable[[str, bool], tuple[list[int], list[int]]]
    decode: Callable[[Sequence[int]], str]


def codec(tokenizer: PreTrainedTokenizerBase) -> Codec:
    """The codec of a tokenizer, without special tokens.

    Some tokenizers put a blank in front of every text. Theirs is taken away from pieces inside of a sequence, where no
    blank stands. For all others, such as GPT-2's, a piece has the ids that it has by itself.
    """
    if tokenizer.is_fast:
        with_starts = encoder(tokenizer, add_special_tokens=False)
    else:  # without the characters of tokens, which only methods need that know a prompt's parts

        def with_starts(text: str) -> tuple[list[int], list[int], int]:
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            return ids, [0] * len(ids), 0

    def alone(text: str) -> list[int]:
        return with_starts(text)[0]

    front = alone("\n")
    adds_a_blank = alone("x\nx") != [*alone("x"), *alone("\nx")]

    @functools.lru_cache(maxsize=100_000)  # options are there again with every row
    def encode(text: str, first: bool) -> tuple[list[int], list[int]]:
        if adds_a_blank and not first:
            ids, starts, _ = with_starts(f"\n{text}")
            if ids[: len(front)] == front:
                return ids[len(front) :], [start - 1 for start in starts[len(front) :]]
        ids, starts, _ = with_starts(text)
        return ids, starts

    def decode(ids: Sequence[int]) -> str:
        before = tokenizer.decode(front, clean_up_tokenization_spaces=False)
        return str(tokenizer.decode([*front, *ids], clean_up_tokenization_spaces=False))[len(before) :]

    return Codec(encode, decode)


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


class Sequences:
    """Makes sequences of rows.

    Args:
        codec: the tokenizer.
        channel: give the output and ask for the input.
        max_length: how many tokens the model takes, special ones not counted.
        alike: demonstrations are alike wherever they stand, and are never cut: whole ones are left out instead.
        longest_first: the longest ones are left out first, rather than the first ones.
        canonical: bring the demonstrations into one order, whatever order they are given in.
    """

    def __init__(
        self,
        codec: Codec,
        channel: bool,
        max_length: int,
        alike: bool = False,
        longest_first: bool = False,
        canonical: bool = False,
    ) -> None:
        self.codec, self.channel, self.max_length = codec, channel, max_length
        self.alike, self.longest_first, self.canonical = alike, longest_first, canonical

    def limit(self, shots: int) -> int:
        """How many tokens a sequence with so many demonstrations may have."""
        return min(PER_EXAMPLE * max(shots, 1), PER_SEQUENCE, self.max_length)

    # Examples.

    def encoded_demonstrations(self, rows: Sequence[Row]) -> list[EncodedExample]:
        """Demonstrations, in their order."""
        examples = [self.encoded_options(row, i == 0 and not self.alike, [row.output])[0] for i, row in enumerate(rows)]
        if self.canonical:
            examples.sort(key=lambda example: (example.source.ids, example.target.ids))
        return examples

    def encoded_options(self, row: Row, first: bool, outputs: Sequence[str] | None = None) -> list[EncodedExample]:
        """A query with each of its options; the input is cut for the longest one.

        Args:
            first: the query has no demonstrations before it.
            outputs: in place of all options.
        """
        examples = [self._pieces(row, output, first) for output in (row.options if outputs is None else outputs)]
        inputs, others = (1, 0) if self.channel else (0, 1)
        longest = max(len(self._two(example)[others]) for example in examples)
        room = max(0, PER_EXAMPLE - FREE - longest)
        return [self._cut(example, len(self._two(example)[inputs]) - room) for example in examples]

    @staticmethod
    def _two(example: EncodedExample) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The pieces as MetaICL has them: the separator belongs to the source."""
        return example.between.ids + example.source.ids, example.target.ids

    def _pieces(self, row: Row, output: str, first: bool) -> EncodedExample:
        between, source, target = texts(row, output, self.channel, first)
        ids, starts = self.codec.encode(between + source, first)
        at = bisect_left(starts, len(between))
        target_ids, _ = self.codec.encode(target, False)
        return EncodedExample(
            Piece(tuple(ids[:at]), between), Piece(tuple(ids[at:]), source), Piece(tuple(target_ids), target)
        )

    def _cut(self, example: EncodedExample, too_many: int) -> EncodedExample:
        """The example with so many tokens fewer at the end of its input."""
        if too_many <= 0:
            return example
        if self.channel:
            target = self._part(example.target.ids[:-too_many])
            return EncodedExample(example.between, example.source, target, too_many)
        ids = self._two(example)[0][:-too_many]
        at = len(example.between.ids)
        between = example.between if len(ids) >= at else self._part(ids)
        return EncodedExample(between, self._part(ids[at:]), example.target, too_many)

    def _part(self, ids: Sequence[int]) -> Piece:
        return Piece(tuple(ids), self.codec.decode(ids) if ids else "")

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
        if self.alike and shown:
            joined = self._with_whole_ones(joined, limit)
        return [self._fitting(sequence, limit) for sequence in joined]

    def _behind(self, shown: Sequence[EncodedExample], option: EncodedExample) -> Joined:
        """A query behind all demonstrations, each of which ends with a separator: that of the next example, or, if all
        are to be alike, its own."""
        behind = [example.between for example in (shown if self.alike else shown[1:])]
        query = option.source
        if not self.alike:
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
            at = max(range(len(kept)), key=lambda i: (len(kept[i].ids), kept[i].ids)) if self.longest_first else 0
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
