"""How a model reads MetaICL's sequences: its tokenizer, what it puts before a text, and how many tokens it takes."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lm_eval_icl.metaicl.strings import Codec, Joined, Sequences, codec
from lm_eval_icl.prompts.encoded import EncodedPrompt, EncodedText
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt


@dataclass(frozen=True)
class Reader:
    """How a model reads sequences.

    Attributes:
        codec: its tokenizer.
        prefix: what its tokenizer puts before every text, such as BOS. (GPT-2's puts nothing, and so does MetaICL.)
        max_length: how many tokens it takes.
        alike, longest_first, canonical: as for `Sequences`, for a method that treats demonstrations alike.
    """

    codec: Codec
    prefix: tuple[int, ...]
    max_length: int
    alike: bool = False
    longest_first: bool = False
    canonical: bool = False

    def sequences(self, channel: bool) -> Sequences:
        longest = self.max_length - len(self.prefix)
        return Sequences(self.codec, channel, longest, self.alike, self.longest_first, self.canonical)


def reader(tokenizer: PreTrainedTokenizerBase, add_bos_token: bool | None, max_length: int) -> Reader:
    """How a model reads sequences, one token after another.

    Args:
        add_bos_token: whether BOS is put at the beginning; None for the tokenizer's default.
    """
    special = {} if add_bos_token is None else {"add_special_tokens": add_bos_token}
    whole, alone = tokenizer("x", **special)["input_ids"], tokenizer("x", add_special_tokens=False)["input_ids"]
    at = next((i for i in range(len(whole)) if whole[i : i + len(alone)] == alone), 0)
    return Reader(codec(tokenizer), tuple(whole[:at]), max_length)


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
