"""A prompt as token ids by part.

The token sequence is that of the whole string, as lm-eval's `hf` makes it, cut afterwards at the
character offsets of the parts: a token belongs to the part in which its first character lies.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lm_eval_icl.prompts import FewShotPrompt


@dataclass(frozen=True)
class Context:
    """What the queries of one set of demonstrations share, as token ids. Hashable: the key of a memory.

    Attributes:
        prefix: BOS if the tokenizer adds one, and the description or system text.
        demonstrations: one tuple of ids a demonstration; together with the prefix, in this order, the
            beginning of the prompt's token sequence.
    """

    prefix: tuple[int, ...]
    demonstrations: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def tokens(self) -> list[int]:
        """All ids in a row."""
        return [*self.prefix, *(token for part in self.demonstrations for token in part)]


@functools.lru_cache(maxsize=1024)
def _one(context: Context) -> Context:
    """The first of equal contexts, so that thousands of documents keep one."""
    return context


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt's ids: the shared context, and the query (at least one token, since a memory alone
    predicts nothing: where the query is empty, the context gives up its last token to it)."""

    context: Context
    query: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.context.tokens) + len(self.query)


Encode = Callable[[str], "tuple[list[int], list[int], int]"]


def encoder(tokenizer: PreTrainedTokenizerBase, **special: bool) -> Encode:
    """A function from a text to its ids, the character at which each begins, and the number of special
    tokens that the tokenizer put in front. `special`: `add_special_tokens`, where not the default."""

    def encode(text: str) -> tuple[list[int], list[int], int]:
        encoding = tokenizer(
            text,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            return_attention_mask=False,
            verbose=False,
            **special,
        )
        starts: list[int] = []
        end = 0
        for start, stop in encoding["offset_mapping"]:
            # Byte-level tokenizers leave the blanks in front of a word out of its offsets: a token begins
            # where the one before it ended, at the latest.
            starts.append(max(starts[-1], min(start, end)) if starts else 0)
            end = max(end, stop)
        added = 0
        for mask, (start, stop) in zip(encoding["special_tokens_mask"], encoding["offset_mapping"], strict=True):
            if not mask or stop > start:
                break
            added += 1
        return encoding["input_ids"], starts, added

    return encode


def split(prompt: FewShotPrompt, text: str, encode: Encode) -> TokenizedPrompt:
    """Tokenize `text`, the prompt or what is left of it without blanks at its end, by part."""
    ids, starts, added = encode(text)
    cuts, at = [], len(prompt.prefix)
    for part in (*prompt.demonstrations, prompt.query):
        cuts.append(max(added, bisect_left(starts, at)))
        at += len(part)
    cuts[-1] = min(cuts[-1], len(ids) - 1)
    cuts = [max(0, min(cut, cuts[-1])) for cut in cuts]
    demonstrations = tuple(tuple(ids[a:b]) for a, b in itertools.pairwise(cuts))
    return TokenizedPrompt(_one(Context(tuple(ids[: cuts[0]]), demonstrations)), tuple(ids[cuts[-1] :]))


class PairEncoder:
    """Context and continuation as `TemplateLM._encode_pair` makes them, each context tokenized once.

    Blanks at the end of the context move to the continuation, whose ids are those of the joined text
    behind the context's. Joining at full length for every option is not needed: no token of a BPE
    tokenizer reaches over a line break into a word behind it, so the context's last line with the line
    break before it stands for the whole, if its own tokens are those that the whole context ends in.
    """

    def __init__(self, encode: Encode, bare: Encode):
        """`encode` adds special tokens as the model wants them, `bare` adds none."""
        self.encode = encode
        self._ids = functools.lru_cache(maxsize=100_000)(lambda text: bare(text)[0])
        self._prompt: FewShotPrompt | None = None

    def __call__(self, prompt: FewShotPrompt, continuation: str) -> tuple[TokenizedPrompt, tuple[int, ...]]:
        """The context's tokens by part and the continuation's ids."""
        if prompt is not self._prompt:  # lm-eval gives all options of a document the same object
            self._tokenize(prompt)
        continuation = prompt[len(self._text) :] + continuation
        if self._line:
            return self._tokens, tuple(self._ids(self._line + continuation)[len(self._ids(self._line)) :])
        return self._tokens, tuple(self.encode(self._text + continuation)[0][len(self._tokens) :])

    def _tokenize(self, prompt: FewShotPrompt) -> None:
        self._prompt, self._text = prompt, prompt.rstrip()
        self._tokens = split(prompt, self._text, self.encode)
        self._line = ""
        if "\n" in self._text:
            line = "\n" + self._text.rpartition("\n")[2]
            tail = self._ids(line)[len(self._ids("\n")) :]
            ids = [*self._tokens.context.tokens, *self._tokens.query]
            if tail and not line[1].isspace() and ids[-len(tail) :] == tail:
                self._line = line
