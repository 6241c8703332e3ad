"""Checks that requests stay within a model's limits, and leaves demonstrations out of requests that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_eval_icl.methods.base import Method
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt


@dataclass(frozen=True)
class Request:
    """One request as token ids."""

    prompt: TokenizedPrompt
    answer: Ids  # the continuation to score; empty if text is to be generated
    answer_positions: (
        int  # how many positions the answer or the generated text needs after the prompt
    )
    left_out: tuple[
        int, ...
    ] = ()  # the indices of the demonstrations left out (in canonical order, if it is used)
    cut: int = 0  # how many tokens were cut off the beginning of the prompt, which then has no demonstrations
    arguments: tuple[Any, ...] = ()  # the arguments of the harness's request

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the response in a cache: the arguments, and which parts of the prompt were left out, since this
        also depends on the other options of the document."""
        return (*self.arguments, self.left_out, self.cut)

    @property
    def length(self) -> int:
        """How many tokens run through the model if the request runs alone."""
        return len(self.prompt) + self.answer_positions


@dataclass(frozen=True)
class TooLong:
    """Why a prompt does not fit."""

    why: str  # the end of a sentence about such prompts: "do not fit the model's 1024 positions"
    takes: tuple[
        int, int, int
    ]  # the numbers of positions, or of tokens in a row, of context, query and answer
    hint: str  # advice of the method, if the demonstrations take more positions to encode than in the prompt

    @property
    def needed(self) -> int:
        return sum(self.takes)

    def sum(self, answer: str) -> str:
        """`needed` as a sum of its parts, in words; `answer` is the name of the answer."""
        parts = zip(("prefix and demonstrations", "query", answer), self.takes, strict=True)
        return f"{self.needed}: " + " + ".join(
            f"{name} {number}" for name, number in parts if number
        )


@dataclass(frozen=True)
class PromptLimits:
    """A model's limits for prompts that a method encodes."""

    method: Method
    model: str  # the model's name, for messages
    positions: int  # how many positions the model has
    window: (
        int | None
    )  # how many tokens a row may have under the method's mask; None for as many as positions
    switch: (
        tuple[int, bool] | None
    )  # the length from which rotary angles change (`positions.position_switch`)
    hint: str  # advice for the error, in addition to fewer demonstrations, if encoding takes too many positions
    keeps_window: bool = False  # whether rows may be longer than the window (`needs.keeps_window`)
    also: tuple[PromptLimits, ...] = ()  # those of other methods, under which prompts must fit too

    def too_long(self, prompt: TokenizedPrompt, answer: int) -> TooLong | None:
        """Why a prompt with an answer of `answer` positions does not fit; None if it fits."""
        reasons = (limits._too_long(prompt, answer) for limits in (self, *self.also))
        return next(filter(None, reasons), None)

    def _too_long(self, prompt: TokenizedPrompt, answer: int) -> TooLong | None:
        context = prompt.context
        why = ""
        terms = self._takes(prompt, answer)
        if sum(terms) > self.positions:
            why = f"do not fit the model's {self.positions} positions"
        elif self.switch is not None and sum(terms) > self.switch[0]:
            switch, always_changes = self.switch
            # The memory would have the rotary angles of short sequences, and the query those of long sequences.
            if always_changes or self.method.footprint(context).shortest_pass <= switch:
                why = (
                    f"cross position {switch} after their demonstrations, and from there on this model computes "
                    "positions differently (rotary angles of type longrope or dynamic)"
                )
        # Without demonstrations, a method hides nothing, and the model runs with its ordinary mask and window.
        if not why and self.window is not None and context.demonstrations:
            terms = self._takes(prompt, answer, tokens=True)
            footprint = self.method.footprint(context)
            # The window counts the entries of a memory. If the memory does not have all tokens of the context, the
            # prefix is nearer to the query than in one pass over the whole prompt.
            keeps = self.keeps_window and (not context.prefix or footprint.kept == footprint.tokens)
            if sum(terms) > (most := self.positions if keeps else self.window):
                why = (
                    f"do not fit the {most} tokens of a row that {self.model} sees as a whole (a sliding window, local "
                    f"attention or attention scaled by a token's index), as {self.method.name} needs it"
                )
        if not why:
            return None
        return TooLong(why, terms, self.hint if sum(terms) > len(prompt) + answer else "")

    def _takes(
        self, prompt: TokenizedPrompt, answer: int, tokens: bool = False
    ) -> tuple[int, int, int]:
        """How many positions context, query and answer take in the longer of two passes: the pass that encodes the
        context, and the pass of the query. If `tokens`, how many tokens, entries of memories included."""
        footprint = self.method.footprint(prompt.context)
        query = len(prompt.query)
        encoding = footprint.positions
        before_query = footprint.query_start
        if tokens:
            encoding = footprint.tokens
            before_query = footprint.kept
        alone = encoding, query if self.method.memory_depends_on_query else 0, 0
        return max((before_query, query, answer), alone, key=sum)

    @property
    def longest_go_first(self) -> bool:
        """Whether the longest demonstrations are left out first, rather than the first demonstrations: if positions are
        symmetric, so that only the longest counts, or the order has no effect. This leaves out the fewest. If prompts
        must fit under other methods too, it leaves out the same ones under all of them, in any order."""
        return self.method.positions == "symmetric" or self.method.invariant or bool(self.also)

    def leaves_out(self, prompts: Sequence[tuple[TokenizedPrompt, int]]) -> int:
        """The index of the demonstration to leave out next of all `prompts` (each with the positions of its answer): 0,
        or that of the longest demonstration (`longest_go_first`). Among equally long demonstrations the token ids
        decide, so that the choice of an order-invariant method does not depend on the order."""
        if not self.longest_go_first:
            return 0
        n = max(len(prompt.context.demonstrations) for prompt, _ in prompts)
        prompts = [
            (prompt, answer)
            for prompt, answer in prompts
            if len(prompt.context.demonstrations) == n
        ]

        def size(i: int) -> tuple[int, list[Ids]]:
            alone = max(sum(self._takes(prompt.keeping([i]), answer)) for prompt, answer in prompts)
            return alone, [prompt.context.demonstrations[i] for prompt, _ in prompts]

        return max(range(n), key=size)


# The indices of demonstrations to leave out -> the requests of a document without these demonstrations.
Tokenize = Callable[[tuple[int, ...]], list[Request]]


def fits(limits: PromptLimits, requests: Iterable[Request]) -> bool:
    """Whether all of these requests fit."""
    return all(
        limits.too_long(request.prompt, request.answer_positions) is None for request in requests
    )


def shortened(requests: list[Request], tokenize: Tokenize, limits: PromptLimits) -> list[Request]:
    """The requests of a document that does not fit, without some demonstrations: as few as possible, in the order of
    `PromptLimits.leaves_out`. All prompts of the document lose the same demonstrations, so that its options stay
    comparable. A prompt that does not even fit without demonstrations is cut from the left (`truncated`)."""
    longest_answers: dict[
        TokenizedPrompt, int
    ] = {}  # prompt -> the positions of its longest answer
    for request in requests:
        longest_answers[request.prompt] = max(
            request.answer_positions, longest_answers.get(request.prompt, 0)
        )

    kept = list(range(max(len(prompt.context.demonstrations) for prompt in longest_answers)))
    left_out: list[int] = []
    fewer = list(longest_answers.items())
    while kept and not fits(limits, requests):
        left_out.append(kept.pop(limits.leaves_out(fewer)))
        # The prompts are tokenized again, since tokens at a boundary may change, but only when enough demonstrations
        # are left out by the present numbers of tokens.
        fewer = [(prompt.keeping(kept), answer) for prompt, answer in longest_answers.items()]
        if not kept or all(limits.too_long(*prompt) is None for prompt in fewer):
            requests = tokenize(tuple(sorted(left_out)))
    while len(left_out) > 1 and fits(
        limits, requests
    ):  # there may now be fewer tokens: take demonstrations back
        more = tokenize(tuple(sorted(left_out[:-1])))
        if not fits(limits, more):
            break
        requests = more
        kept.append(left_out.pop())
    return (
        requests if fits(limits, requests) else [truncated(request, limits) for request in requests]
    )


def truncated(request: Request, limits: PromptLimits) -> Request:
    """A request without demonstrations, with only the last tokens of its prompt that fit, as in `hf`: BOS and
    description are cut first. At least one token stays, and an answer is never cut."""
    tokens = (*request.prompt.context.tokens, *request.prompt.query)
    positions = (
        limits.positions if limits.switch is None else min(limits.positions, limits.switch[0])
    )
    cut = min(len(tokens) + request.answer_positions - positions, len(tokens) - 1)
    if cut <= 0:
        return request
    return replace(request, prompt=TokenizedPrompt(Context((), ()), tokens[cut:]), cut=cut)
