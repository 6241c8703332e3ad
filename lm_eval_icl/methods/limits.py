"""Checks that requests fit a model, and shortens those that do not.

Whole demonstrations are left out first. A prompt is cut only if it does not even fit without
demonstrations (`truncated`). `Request.left_out` and `Request.cut` say what a request has lost.
Under lm-eval, `harness.prepared_run` warns about these requests and writes their numbers into the
results.
`methods.predictor` cuts nothing, and refuses prompts that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from lm_eval_icl.inference.capabilities import Capabilities, PositionSwitch
from lm_eval_icl.methods import needs
from lm_eval_icl.methods.base import Method
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt


@dataclass(frozen=True)
class Request:
    """One request as token ids."""

    prompt: TokenizedPrompt
    answer: Ids  # the continuation to score. Empty if text is to be generated.
    answer_positions: (
        int  # the positions that the answer or the generated text needs after the prompt
    )
    left_out: tuple[
        int, ...
    ] = ()  # the demonstrations left out, by index (in canonical order, if it is used)
    cut: int = 0  # the tokens cut off the beginning of the prompt, which then has no demonstrations
    arguments: tuple[Any, ...] = ()  # the arguments of the harness's request

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the response in a cache: the arguments, and what was left out.

        These also depend on the other options of the document.
        """
        return (*self.arguments, self.left_out, self.cut)

    @property
    def length(self) -> int:
        """How many tokens run through the model if the request runs alone."""
        return len(self.prompt) + self.answer_positions


class Takes(NamedTuple):
    """The positions that the parts of a request take, or their tokens in a row."""

    context: int
    query: int
    answer: int


@dataclass(frozen=True)
class TooLong:
    """Why a prompt does not fit."""

    why: str  # the end of a sentence about such prompts: "do not fit the model's 1024 positions"
    takes: Takes
    # advice of the method, if the demonstrations take more positions to encode than in the prompt
    hint: str

    @property
    def needed(self) -> int:
        return sum(self.takes)

    def sum(self, answer: str) -> str:
        """`needed` as a sum of its parts, in words. `answer` is the name of the answer."""
        names = ("prefix and demonstrations", "query", answer)
        parts = zip(names, self.takes, strict=True)
        terms = [f"{name} {number}" for name, number in parts if number]
        return f"{self.needed}: {' + '.join(terms)}"


@dataclass(frozen=True)
class PromptLimits:
    """A model's limits for prompts that a method encodes."""

    method: Method
    model: str  # the model's name, for messages
    positions: int  # how many positions the model has
    # the tokens that a row may have under the method's mask. None: as many as positions.
    window: int | None
    # Where the model's rotary angles change (`positions.position_switch`).
    switch: PositionSwitch | None
    hint: str  # advice for the error, in addition to fewer demonstrations
    keeps_window: bool = False  # rows may be longer than the window (`needs.keeps_window`)
    # The limits of other methods, under which prompts must fit too.
    also: tuple[PromptLimits, ...] = ()

    @classmethod
    def of(
        cls, method: Method, model: PreTrainedModel, can: Capabilities, positions: int
    ) -> PromptLimits:
        """The limits of a model that has, or may use, these positions."""
        return cls(
            method,
            type(model).__name__,
            positions,
            window=needs.longest_row(method, can),
            switch=can.position_switch,
            hint=method.overflow_hint if can.obeys_positions else "",
            keeps_window=needs.keeps_window(method, can),
        )

    def too_long(self, prompt: TokenizedPrompt, answer: int) -> TooLong | None:
        """Why a prompt with an answer of `answer` positions does not fit. None if it fits."""
        for limits in (self, *self.also):
            reason = limits._too_long_here(prompt, answer)
            if reason is not None:
                return reason
        return None

    def _too_long_here(self, prompt: TokenizedPrompt, answer: int) -> TooLong | None:
        """`too_long` under this method alone."""
        takes = self._takes(prompt, answer)
        why = self._over_positions(prompt, sum(takes))
        if not why:
            takes = self._takes(prompt, answer, tokens=True)
            why = self._over_window(prompt.context, sum(takes))
        if not why:
            return None
        return TooLong(why, takes, self.hint if sum(takes) > len(prompt) + answer else "")

    def _over_positions(self, prompt: TokenizedPrompt, needed: int) -> str:
        """Why a request that needs these positions does not fit. Empty if it fits."""
        if needed > self.positions:
            return f"do not fit the model's {self.positions} positions"
        if self.switch is None or needed <= self.switch.length:
            return ""
        length = self.switch.length
        shortest_pass = needed  # without a context, prompt and answer are one pass
        if prompt.context.tokens:
            shortest_pass = self.method.footprint(prompt.context).shortest_pass
        # The memory would have the rotary angles of short sequences, and the query those of long
        # sequences.
        if self.switch.always_changes or shortest_pass <= length:
            return (
                f"cross position {length}, and from there on this model computes positions "
                "differently (rotary angles of type longrope or dynamic)"
            )
        return ""

    def _over_window(self, context: Context, needed: int) -> str:
        """Why a request whose row has these tokens does not fit. Empty if it fits."""
        # Without demonstrations, a method hides nothing, and the model runs with its ordinary mask
        # and window.
        if self.window is None or not context.demonstrations:
            return ""
        footprint = self.method.footprint(context)
        # The window counts the entries of a memory. If the memory does not have all tokens of the
        # context, the prefix is nearer to the query than in one pass over the whole prompt.
        keeps = self.keeps_window and (not context.prefix or footprint.kept == footprint.tokens)
        most = self.positions if keeps else self.window
        if needed <= most:
            return ""
        return (
            f"do not fit the {most} tokens of a row that {self.model} sees as a whole (a sliding "
            "window, local attention or attention scaled by a token's index), as "
            f"{self.method.name} needs it"
        )

    def _takes(self, prompt: TokenizedPrompt, answer: int, tokens: bool = False) -> Takes:
        """What a request takes in the longer of two passes: that of the context or of the query.

        Args:
            tokens: count tokens, entries of memories included, and not positions.
        """
        footprint = self.method.footprint(prompt.context)
        query = len(prompt.query)
        of_query = Takes(footprint.kept if tokens else footprint.query_start, query, answer)
        with_context = query if self.method.memory_depends_on_query else 0
        encoding = footprint.tokens if tokens else footprint.positions
        return max(of_query, Takes(encoding, with_context, 0), key=sum)

    @property
    def longest_go_first(self) -> bool:
        """Whether the longest demonstrations are left out first. Otherwise, the first ones are.

        They are if positions are symmetric, so that only the longest counts, or if the order has no
        effect. This leaves out the fewest. They also are if prompts must fit under other methods
        too: then all methods lose the same demonstrations, in any order.
        """
        return self.method.positions == "symmetric" or self.method.invariant or bool(self.also)

    def leaves_out(self, prompts: Sequence[tuple[TokenizedPrompt, int]]) -> int:
        """The index of the demonstration to leave out next: 0, or that of the longest.

        Among equally long demonstrations the token ids decide, so that the choice of an
        order-invariant method does not depend on the order.

        Args:
            prompts: the prompts that lose the demonstration, each with the positions of its answer.
        """
        if not self.longest_go_first:
            return 0
        n = max(len(prompt.context.demonstrations) for prompt, _ in prompts)
        complete = [pair for pair in prompts if len(pair[0].context.demonstrations) == n]

        def size(i: int) -> tuple[int, list[Ids]]:
            alone = [sum(self._takes(prompt.keeping([i]), answer)) for prompt, answer in complete]
            return max(alone), [prompt.context.demonstrations[i] for prompt, _ in complete]

        return max(range(n), key=size)


# The indices of demonstrations to leave out -> the requests of a document without these
# demonstrations.
Tokenize = Callable[[tuple[int, ...]], list[Request]]


def fits(limits: PromptLimits, requests: Iterable[Request]) -> bool:
    """Whether all of these requests fit."""
    return all(
        limits.too_long(request.prompt, request.answer_positions) is None for request in requests
    )


def shortened(requests: list[Request], tokenize: Tokenize, limits: PromptLimits) -> list[Request]:
    """The requests of a document that does not fit, without as few demonstrations as possible.

    They are left out in the order of `PromptLimits.leaves_out`. All prompts of the document lose
    the same demonstrations, so that its options stay comparable. A prompt that does not even fit
    without demonstrations is cut from the left (`truncated`).
    """
    # The prompts, each with the positions of its longest answer.
    prompts: dict[TokenizedPrompt, int] = {}
    for request in requests:
        known = prompts.get(request.prompt, 0)
        prompts[request.prompt] = max(request.answer_positions, known)
    most = max(len(prompt.context.demonstrations) for prompt in prompts)
    kept = list(range(most))
    left_out = list[int]()
    shorter = list(prompts.items())
    while kept and not fits(limits, requests):
        left_out.append(kept.pop(limits.leaves_out(shorter)))
        # The prompts are tokenized again, since tokens at a boundary may change, but only when
        # enough demonstrations are left out by the present numbers of tokens.
        shorter = [(prompt.keeping(kept), answer) for prompt, answer in prompts.items()]
        if not kept or all(limits.too_long(*prompt) is None for prompt in shorter):
            requests = tokenize(tuple(sorted(left_out)))
    # There may now be fewer tokens: demonstrations are taken back.
    while len(left_out) > 1 and fits(limits, requests):
        more = tokenize(tuple(sorted(left_out[:-1])))
        if not fits(limits, more):
            break
        requests = more
        kept.append(left_out.pop())
    if fits(limits, requests):
        return requests
    return [truncated(request, limits) for request in requests]


def truncated(request: Request, limits: PromptLimits) -> Request:
    """A request without demonstrations, with the last tokens of its prompt that fit, as in `hf`.

    BOS and description are cut first. At least one token stays, and an answer is never cut. A
    request that reaches beyond the switch of rotary angles becomes one query, so that all of it has
    the angles of long sequences.
    """
    if fits(limits, [request]):
        return request
    tokens = (*request.prompt.context.tokens, *request.prompt.query)
    positions = limits.positions
    switch = limits.switch
    if switch is not None and switch.always_changes:
        positions = min(positions, switch.length)
    cut = min(len(tokens) + request.answer_positions - positions, len(tokens) - 1)
    cut = max(cut, 0)
    return replace(request, prompt=TokenizedPrompt(Context((), ()), tokens[cut:]), cut=cut)
