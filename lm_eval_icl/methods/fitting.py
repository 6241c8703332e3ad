"""Requests as token ids, and what is left out of those of a document that does not fit the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from lm_eval_icl.methods.limits import PromptLimits
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt


@dataclass(frozen=True)
class Request:
    """One request as token ids.

    Attributes:
        prompt: the prompt by part.
        answer: the continuation to score; empty if text is to be generated.
        answer_positions: how many positions the answer or the generated text needs after the prompt.
        left_out: the indices of the demonstrations that were left out (in canonical order, if that is used).
        cut: how many tokens were cut off the beginning of the prompt, which then has no demonstrations.
        arguments: what was asked, as it was given.
    """

    prompt: TokenizedPrompt
    answer: Ids
    answer_positions: int
    left_out: tuple[int, ...] = ()
    cut: int = 0
    arguments: tuple[Any, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """The key under which a cache stores the response: the arguments, and what was left out of the prompt, which
        also depends on the other options of the document."""
        return (*self.arguments, self.left_out, self.cut)

    @property
    def length(self) -> int:
        """How many tokens are run through the model if the request is run by itself."""
        return len(self.prompt) + self.answer_positions


# The indices of demonstrations to leave out -> the requests of a document without these.
Tokenize = Callable[[tuple[int, ...]], list[Request]]


def fits(limits: PromptLimits, requests: Iterable[Request]) -> bool:
    """Whether all of these requests fit."""
    return all(limits.too_long(request.prompt, request.answer_positions) is None for request in requests)


def shortened(requests: list[Request], tokenize: Tokenize, limits: PromptLimits, overflow: str) -> list[Request]:
    """The requests of a document that does not fit, with as little left out as makes them fit. All its prompts lose the
    same demonstrations, so that its options stay comparable.

    If nothing that `overflow` allows to leave out makes them fit, they are without demonstrations, and not cut.

    Args:
        overflow: "drop" or "truncate" (`CommonArguments.overflow`).
    """
    requests = _with_fewest_left_out(requests, tokenize, limits)
    if overflow == "truncate" and not fits(limits, requests):
        cut = [truncated(request, limits) for request in requests]
        requests = cut if fits(limits, cut) else requests
    return requests


def _with_fewest_left_out(requests: list[Request], tokenize: Tokenize, limits: PromptLimits) -> list[Request]:
    """The requests of a document that does not fit, with as few demonstrations left out as needed, in the order of
    `PromptLimits.leaves_out`; without any, if they do not fit then either."""
    asked: dict[TokenizedPrompt, int] = {}  # prompt -> the positions of its longest answer
    for request in requests:
        asked[request.prompt] = max(request.answer_positions, asked.get(request.prompt, 0))

    kept, left_out = list(range(max(len(prompt.context.demonstrations) for prompt in asked))), list[int]()
    fewer = list(asked.items())
    while kept and not fits(limits, requests):
        left_out.append(kept.pop(limits.leaves_out(fewer)))
        # The numbers of tokens tell about how many to leave out, and only then it is tokenized again: tokens at a
        # boundary may become others.
        fewer = [(prompt.keeping(kept), answer) for prompt, answer in asked.items()]
        if not kept or all(limits.too_long(*prompt) is None for prompt in fewer):
            requests = tokenize(tuple(sorted(left_out)))
    while len(left_out) > 1 and fits(limits, requests):  # and they may become fewer
        more = tokenize(tuple(sorted(left_out[:-1])))
        if not fits(limits, more):
            break
        requests = more
        left_out.pop()
    return requests


def truncated(request: Request, limits: PromptLimits) -> Request:
    """A request without demonstrations, of whose prompt only the last tokens that fit are kept, as `hf` does."""
    tokens = (*request.prompt.context.tokens, *request.prompt.query)
    cut = min(len(tokens) + request.answer_positions - limits.positions, len(tokens) - 1)
    if cut <= 0:
        return request
    return replace(request, prompt=TokenizedPrompt(Context((), ()), tokens[cut:]), cut=cut)
