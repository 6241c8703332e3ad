"""How a model's tokenizer encodes MetaICL's sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lm_eval_icl.prompts.splitting import encoder
from lm_eval_icl.prompts.tokens import Ids


@dataclass(frozen=True)
class Reader:
    """How a model reads sequences.

    Attributes:
        encode: maps (text, whether a sequence begins with it) to the text's ids and the index of
            each first character.
        decode: maps ids to their text.
        prefix: the ids that the tokenizer puts before every text, such as BOS. (GPT-2's puts none,
            like MetaICL.)
        max_length: how many tokens a sequence may have, with the prefix.
        alike: whether a demonstration has the same ids wherever it stands. Then only whole
            demonstrations are left out.
        longest_first: whether the longest demonstrations are left out first, rather than the first
            in the prompt.
        canonical: whether the demonstrations are sorted, so that their given order makes no
            difference.
    """

    encode: Callable[[str, bool], tuple[list[int], list[int]]]
    decode: Callable[[Ids], str]
    prefix: tuple[int, ...]
    max_length: int
    alike: bool = False
    longest_first: bool = False
    canonical: bool = False


def reader(
    tokenizer: PreTrainedTokenizerBase, add_bos_token: bool | None, max_length: int
) -> Reader:
    """How a model reads sequences, one token after another.

    Some tokenizers put a blank in front of every text. That blank is removed from pieces inside a
    sequence. With all other tokenizers, such as GPT-2's, a piece has the ids that it has by itself.

    Args:
        add_bos_token: whether a sequence begins with BOS; None for the tokenizer's default.
    """
    with_starts = encoder(tokenizer, add_special_tokens=False)

    def alone(text: str) -> list[int]:
        return with_starts(text)[0]

    front = alone("\n")
    adds_a_blank = alone("x\nx") != [*alone("x"), *alone("\nx")]

    @functools.lru_cache(maxsize=100_000)  # every row of a task has the same options
    def encode(text: str, first: bool) -> tuple[list[int], list[int]]:
        if adds_a_blank and not first:
            ids, starts, _ = with_starts(f"\n{text}")
            if ids[: len(front)] == front:
                return ids[len(front) :], [start - 1 for start in starts[len(front) :]]
        ids, starts, _ = with_starts(text)
        return ids, starts

    @functools.lru_cache(maxsize=100_000)  # every query of a task has the same demonstrations
    def decode(ids: Ids) -> str:
        before = tokenizer.decode(front, clean_up_tokenization_spaces=False)
        text = tokenizer.decode([*front, *ids], clean_up_tokenization_spaces=False)
        return str(text)[len(before) :]

    special = {} if add_bos_token is None else {"add_special_tokens": add_bos_token}
    with_prefix = tokenizer("x", **special)["input_ids"]
    x = tokenizer("x", add_special_tokens=False)["input_ids"]
    starts_with_x = [at for at in range(len(with_prefix)) if with_prefix[at : at + len(x)] == x]
    prefix = with_prefix[: starts_with_x[0]] if starts_with_x else []
    return Reader(encode, decode, tuple(prefix), max_length)
