"""Whether a prompt, encoded by a method, stays within a model's limits, and what is left out if it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError
from lm_eval_icl.inference.capabilities import Capabilities
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.needs import longest_row
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt


@dataclass(frozen=True)
class TooLong:
    """Why a prompt does not fit.

    Attributes:
        why: the end of a sentence about such prompts: "do not fit the model's 1024 positions".
        parts: how many positions (or tokens of its longest row, if these are too many) the prompt takes, by part.
        hint: advice of the method, if it is encoding the demonstrations that takes too many.
    """

    why: str
    parts: Mapping[str, int]
    hint: str

    @property
    def needed(self) -> int:
        return sum(self.parts.values())

    @property
    def longest(self) -> str:
        """The name of the one demonstration, or window of them, that alone counts; empty if all of them count."""
        return next((name for name in self.parts if name.startswith("longest")), "")

    def sum(self, answer: str) -> str:
        """`needed` as a sum of its parts, with this name for the answer."""
        return f"{self.needed}: " + " + ".join(
            f"{answer if name == 'answer' else name} {number}" for name, number in self.parts.items()
        )


@dataclass(frozen=True)
class PromptLimits:
    """A model's limits (positions, attention window, RoPE switch), and whether a prompt, encoded by a method, stays
    within them.

    Attributes:
        method: the method, whose `footprint` says how many tokens and positions a context takes.
        model: the model's name, for messages.
        positions: how many positions the model has.
        window: how many tokens a row may have under the method's mask; None if only `positions` limits them.
        switch: the position from which on rotary angles of all positions change, and whether they change again with
            every longer sequence (`inference.positions.position_switch`); None if they do not change.
        hint: advice for the error, in addition to fewer demonstrations, if encoding takes too many positions.
    """

    method: Method
    model: str
    positions: int
    window: int | None
    switch: tuple[int, bool] | None
    hint: str

    @classmethod
    def of(
        cls, method: Method, model: PreTrainedModel, can: Capabilities, learned: int | None, max_length: int
    ) -> PromptLimits:
        """The limits of a model under a method.

        Args:
            learned: of how many positions the model has learned embeddings; None if it has none.
            max_length: how many positions the model has, or may use.

        Raises:
            InputError: the model has fewer learned position embeddings than `max_length`.
        """
        name = type(model).__name__
        if learned is not None and max_length > learned:
            raise InputError(
                f"max_length={max_length}: {name} has learned embeddings of {learned} positions and no more: give "
                f"max_length={learned} or less."
            )
        hint = method.overflow_hint if can.obeys_positions else ""
        return cls(method, name, max_length, longest_row(method, can), can.position_switch, hint)

    def too_long(self, prompt: TokenizedPrompt, answer: int) -> TooLong | None:
        """Why a prompt with an answer of `answer` positions does not fit; None if it fits."""
        context, why, terms = prompt.context, "", self._positions(prompt, answer)
        needed = sum(terms)
        if needed > self.positions:
            why = f"do not fit the model's {self.positions} positions"
        elif self.switch is not None and needed > self.switch[0]:
            switch, ever = self.switch
            if ever:
                why = (
                    f"cross position {switch}, from which on this model computes all positions anew with every longer "
                    "sequence (rotary angles of type dynamic)"
                )
            # The memory would have the rotary angles of short sequences, and the query those of long ones.
            elif self.method.footprint(context).shortest_pass <= switch:
                why = (
                    f"cross position {switch} behind their demonstrations, from which on this model computes all "
                    "positions otherwise (rotary angles of type longrope)"
                )
        # Without demonstrations there is nothing to hide, so that the model's own mask is used, window and all.
        if not why and self.window is not None and context.demonstrations:
            terms = self._tokens(prompt, answer)
            if sum(terms) > self.window:
                why = (
                    f"do not fit the {self.window} tokens that {self.model} looks back at most (a sliding window or "
                    f"local attention layers; or attention that depends on a token's index from there on), and "
                    f"{self.method.name} needs a model that sees all that its mask shows"
                )
        if not why:
            return None
        parts = self._parts(context, *terms)
        return TooLong(why, parts, self.hint if sum(terms) > len(prompt) + answer else "")

    def _positions(self, prompt: TokenizedPrompt, answer: int) -> tuple[int, int, int]:
        """How many positions a prompt takes: those of its context, of its query and of its answer."""
        footprint = self.method.footprint(prompt.context)
        return self._terms(prompt, answer, footprint.positions, footprint.query_start)

    def _tokens(self, prompt: TokenizedPrompt, answer: int) -> tuple[int, int, int]:
        """How many tokens the longest row has, memory entries included: those of context, query and answer."""
        footprint = self.method.footprint(prompt.context)
        return self._terms(prompt, answer, footprint.tokens, footprint.kept)

    def _terms(self, prompt: TokenizedPrompt, answer: int, encoding: int, before_query: int) -> tuple[int, int, int]:
        """Of the pass that encodes the context and the pass of the query behind it, the one that takes more."""
        query = len(prompt.query)
        alone = encoding, query if self.method.memory_depends_on_query else 0, 0
        return max((before_query, query, answer), alone, key=sum)

    def _parts(self, context: Context, encoded: int, query: int, answer: int) -> dict[str, int]:
        """By name, with the context divided into prefix and demonstrations, and without parts that take nothing."""
        prefix, lengths = len(context.prefix), context.lengths
        demonstrations, all_of_them = encoded - prefix, sum(lengths) * self.method.repeat
        name = "longest demonstration" if demonstrations == max(lengths, default=0) else "longest window"
        if demonstrations == all_of_them:
            name = "demonstrations"
        elif demonstrations > all_of_them:
            name, prefix, demonstrations = "encoding prefix and demonstrations", 0, encoded
        parts = {"prefix": prefix, name: demonstrations, "query": query, "answer": answer}
        return {name: number for name, number in parts.items() if number}

    @property
    def longest_go_first(self) -> bool:
        """Whether the longest demonstrations are left out first, instead of the first ones.

        So it is if positions are symmetric, where only the longest counts, and if the order of the demonstrations makes
        no difference, where "first" would mean nothing. In both cases no other choice leaves out fewer.
        """
        return self.method.positions == "symmetric" or self.method.invariant

    def leaves_out(self, prompts: Sequence[tuple[TokenizedPrompt, int]]) -> int:
        """The index of the demonstration to leave out next, of prompts that do not fit and all lose the same ones.

        It is the first one, or the longest one (`longest_go_first`). Of equally long ones, the tokens decide: which are
        left out may not depend on the order in which an order-invariant method gets them. Where windows of several
        demonstrations stand side by side, it is the longest one of the first window that is too long: the
        demonstrations behind it move up, and no other choice leaves out fewer.

        Args:
            prompts: the prompts, each with the number of positions of its answer.
        """
        if not self.longest_go_first:
            return 0
        n = max(len(prompt.context.demonstrations) for prompt, _ in prompts)
        prompts = [(prompt, answer) for prompt, answer in prompts if len(prompt.context.demonstrations) == n]

        def positions(some: Sequence[int]) -> int:
            """How many positions the prompts take at most with only these demonstrations."""
            return max(sum(self._positions(prompt.keeping(some), answer)) for prompt, answer in prompts)

        among: Sequence[int] = range(n)
        windows = self.method.pattern(n * self.method.repeat).windows
        if windows is not None and self.method.positions == "symmetric":
            members: dict[int, list[int]] = {}
            for block, window in enumerate(windows.tolist()):
                members.setdefault(window, []).append(block % n)
            most = self.positions if self.switch is None else min(self.positions, self.switch[0])
            among = next((some for some in members.values() if positions(some) > most), among)
        return max(among, key=lambda i: (positions([i]), [prompt.context.demonstrations[i] for prompt, _ in prompts]))
