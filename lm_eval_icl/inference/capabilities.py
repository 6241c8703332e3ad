"""The capabilities of a loaded model, found by running a few tokens through it; there is no list of architectures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from lm_eval_icl.errors import InputError, log, one_line
from lm_eval_icl.inference.attention import additive
from lm_eval_icl.inference.caches import cache_arguments, takes_positions, without_adapter
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.generation import continue_from
from lm_eval_icl.inference.hybrids import check_states, empty_cache, is_hybrid
from lm_eval_icl.inference.memory import Memory, read_causally, run_after_memory, run_rows
from lm_eval_icl.inference.positions import position_switch
from lm_eval_icl.inference.scoring import score_packed, score_rows

# A trial finds out whether a mask switches a window off, if the window has at most this many tokens.
_LONGEST_TRIAL = 512


@dataclass(frozen=True)
class Capabilities:
    """What a model can do."""

    # If not empty: why the model gives other results from its cache than in one pass. Every prompt is then run whole.
    no_memory: str = ""
    is_hybrid: bool = False  # the model keeps states that no mask and no `position_ids` change (`inference.hybrids`)
    obeys_mask: bool = False  # a token that is hidden by a 4-D mask does not influence the result
    sees_ahead: bool = False  # a token attends to later tokens if a 4-D mask shows them
    obeys_positions: bool = (
        False  # a token's position is the one given in `position_ids`, whatever its index
    )
    window: int | None = (
        None  # a token attends to at most this many tokens up to itself, counted by index
    )
    # The window also holds under a 4-D mask (GPT-Neo). In other models, a token attends to all tokens the mask shows.
    keeps_window: bool = False
    scaled_from: int | None = (
        None  # in rows of more tokens than this, attention also depends on a token's index
    )
    position_switch: tuple[int, bool] | None = (
        None  # the length from which rotary angles change (`position_switch`)
    )
    can_batch: bool = (
        False  # queries of different lengths can be the rows of a batch (`scoring.score_rows`)
    )
    # transformers' `generate` continues from the model's cache, and counts positions as the model does.
    can_generate: bool = False
    can_pad: bool = False  # `generate` can also continue queries of different lengths in one batch, with padding
    can_share: bool = (
        False  # `can_pad`, and attention can read a memory once for all rows of a batch
    )

    @property
    def can_pack(self) -> bool:
        """Whether several queries can be packed into one row."""
        return self.obeys_mask and self.obeys_positions

    @property
    def can_divide(self) -> bool:
        """Whether a part of a prompt can run on the memory of another part, at given positions."""
        return self.can_pack and self.position_switch is None

    def can_pack_to(self, length: int) -> bool:
        """Whether a row of `length` tokens can be packed, and no window hides tokens that the mask shows."""
        return self.can_pack and self.sees_all_of(length)

    def sees_all_of(self, length: int) -> bool:
        """Whether the last token of a row of `length` tokens attends to all tokens, with no scaling by their index."""
        return all(limit is None or length <= limit for limit in (self.window, self.scaled_from))


def probe(model: PreTrainedModel) -> Capabilities:
    """Find out what a model can do, by running a few tokens through it.

    Two answers, scored on a memory, must have the scores that they have in a single pass. A token after the scored
    tokens must change a score by no more than rounding: by 32 units in the last place, and by a tenth of the difference
    that the token makes when it is seen. A hidden token must not change any bit of a score, in any precision. Only a
    mixture of experts is allowed rounding here, since it multiplies all tokens of one expert at once.

    Raises:
        InputError: the model does not run, is bidirectional, or its log-probabilities are NaN or infinite.
        RuntimeError: the device ran out of memory.
    """
    name, trial, hybrid = type(model).__name__, _Trial(model), is_hybrid(model)
    if error := _failure(trial.run_in_one_pass):
        raise InputError(f"{name} cannot be used: it does not run on a row of tokens ({error}).")
    if trial.ahead > trial.rounding:
        raise InputError(
            f"{name} is bidirectional: a token's result changes with the tokens after it, so it does not predict the "
            "next token. These methods need a causal language model (a decoder). If this checkpoint was trained as a "
            "decoder, its config.json must say so (is_decoder: true)."
        )
    if not math.isfinite(trial.expected[0]):
        raise InputError(
            f"{name} cannot be used: the log-probability of a few tokens is {trial.expected[0]} ({model.dtype}). The "
            "checkpoint is broken, or its numbers overflow: try --model_args dtype=float32."
        )
    if error := _failure(trial.continue_from_cache):
        return Capabilities(no_memory=error, is_hybrid=hybrid)
    positions = not hybrid and _succeeds(
        "obeys_positions", lambda: trial.counts_from_zero() and trial.moves()
    )
    mask = not hybrid and _succeeds("obeys_mask", trial.obeys_mask)
    short, long = trial.query, [*trial.query, *trial.other]
    pads = positions and takes_positions(model) and _succeeds("pads", trial.generates, short, long)
    generates = pads or _succeeds(
        "generates", lambda: trial.counts_from_zero() and trial.generates(short)
    )
    return Capabilities(
        is_hybrid=hybrid,
        obeys_mask=mask,
        sees_ahead=mask and _succeeds("sees_ahead", trial.sees_ahead),
        obeys_positions=positions,
        window=_window(model),
        keeps_window=mask and positions and _succeeds("keeps_window", trial.keeps_window),
        scaled_from=_scaled_from(model),
        position_switch=position_switch(model),
        can_batch=_succeeds("batches", trial.batches),
        can_generate=generates,
        can_pad=pads,
        can_share=pads and _succeeds("shares_memory", trial.shares_memory),
    )


def tells_positions_apart(model: PreTrainedModel) -> bool:
    """Whether a score on a memory changes with the position of the query's first token."""
    trial = _Trial(model)
    trial.memory = read_causally(model, trial.context)
    return _succeeds("moves", trial.moves)


def _failure(test: Callable[[], None]) -> str:
    """The exception that a test raises, in one line; empty if it raises none. Out-of-memory errors are passed on."""
    try:
        test()
    except Exception as error:
        if should_reduce_batch_size(error):
            raise
        return one_line(error)[:200]
    return ""


def _succeeds(name: str, test: Callable[..., bool], *args: Any) -> bool:
    """The result of a test. If the test raises an exception, the result is False, and the log gets a line."""
    results: list[bool] = []
    if error := _failure(lambda: results.append(test(*args))):
        log.info("the model's capabilities: the trial %r fails with %s", name, error)
    return results == [True]


class _Trial:
    """A context, a query and two answers, run through a model in one pass and in other ways."""

    expected: tuple[
        float, float
    ]  # the log-probabilities of the two answers in one pass, as `hf` computes them
    noise: float  # by how much a log-probability may differ from the expected one
    rounding: float  # the largest difference that counts as rounding
    ahead: float  # by how much a log-probability changes with the tokens after the answer
    memory: Memory  # the memory of the context

    def __init__(self, model: PreTrainedModel) -> None:
        vocabulary = model.config.get_text_config().vocab_size
        ids = [(7 + 11 * i) % vocabulary for i in range(64)]
        self.model, self.device = model, device_of(model)
        self.context, self.query, other, another = ids[:12], ids[12:20], ids[20:32], ids[32:44]
        self.answers = (tuple(ids[44:48]), tuple(ids[48:52]))
        # The hidden query begins with another token than the query, or both would share tokens of the packed row. This
        # token is smaller than the query's first token, so that the hidden query is before the query in the row.
        self.other = [(self.query[0] - 1) % vocabulary, *other[1:]]
        self.another = [(self.query[0] - 2) % vocabulary, *another[1:]]
        self.query_answers = (tuple(self.query), list(self.answers))

    def in_one_pass(
        self,
        before: Sequence[int],
        answer: Sequence[int],
        after: Sequence[int] = (),
        counted: bool = False,
    ) -> float:
        """The log-probability of an answer between two texts. `counted`: the model is given positions, from 0 on."""
        ids = torch.tensor([[*before, *answer, *after]], device=self.device)
        read = range(len(before) - 1, len(before) + len(answer) - 1)
        positions = torch.arange(ids.shape[1], device=self.device)[None] if counted else None
        logits = run_rows(self.model, ids, read, empty_cache(self.model), positions)
        logprobs = logits[0].log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        return float(logprobs.gather(-1, torch.tensor(answer, device=logits.device)[:, None]).sum())

    def run_in_one_pass(self) -> None:
        whole, (answer, second) = [*self.context, *self.query], self.answers
        self.expected = (self.in_one_pass(whole, answer), self.in_one_pass(whole, second))
        visible = self.in_one_pass([*self.context, *self.other, *self.query], answer)
        visible = abs(
            visible - self.in_one_pass([*self.context, *self.another, *self.query], answer)
        )
        precision = torch.finfo(self.model.dtype)
        self.rounding = min(visible / 10, 32 * precision.eps * abs(self.expected[0]))
        self.ahead = abs(
            self.in_one_pass(whole, answer, self.other)
            - self.in_one_pass(whole, answer, self.another)
        )
        self.noise = 1e-3 * abs(self.expected[0])
        if (
            precision.bits < 32
        ):  # noisy, but a model that ignores the memory differs by more than this
            self.noise = max(
                self.noise, abs(self.in_one_pass(self.query, answer) - self.expected[0]) / 2
            )

    def same(self, score: float, wanted: float) -> bool:
        return not math.isfinite(wanted) or abs(score - wanted) <= self.noise

    def continue_from_cache(self) -> None:
        """Check that the model continues from its cache.

        Raises:
            ValueError: answers do not have the same scores on the memory as in one pass, or states are not the same as
                after one pass.
        """
        if empty_cache(self.model) is None:
            raise ValueError("its cache is of a class that is not known here")
        self.memory = memory = read_causally(self.model, self.context)
        if memory.state is not None:
            few = self.query[:3]
            whole = read_causally(self.model, [*self.context, *few]).state
            assert whole is not None
            read_causally(
                self.model, self.another
            )  # overwrites a state that is kept in the model, not in the cache
            run_after_memory(
                self.model, memory, continued := memory.cache(), [few], 0, [len(few) - 1]
            )
            check_states(continued, whole, self.model.dtype)
        else:
            # Each layer has an entry for every token or, if the model leaves it out, none; some layer has entries.
            entries = {entry.shape[-2] for layer in memory.layers for entry in layer}
            if not any(entries) or not entries <= {0, len(memory)}:
                raise ValueError("its cache does not hold one key and one value for each token")
        for (score, _), wanted in zip(
            score_rows(self.model, memory, [self.query_answers]), self.expected, strict=True
        ):
            if not self.same(score, wanted):
                raise ValueError(
                    f"continued from its cache, it gives {score:.4f}, in one pass {wanted:.4f}"
                )

    def moves(self) -> bool:
        """Whether a score changes with the position of the query's first token."""
        moved = replace(self.memory, query_start=len(self.context) + 7)
        queries = [(tuple(self.query), [self.answers[0][:1]])]
        return [*score_rows(self.model, moved, queries)] != [
            *score_rows(self.model, self.memory, queries)
        ]

    def counts_from_zero(self) -> bool:
        """Whether the model counts positions from 0 on if it is given none, as `generate` does. (RoBERTa's positions
        begin with the id of its padding token plus 1.)"""
        if not takes_positions(self.model):
            return True
        from_zero = self.in_one_pass([*self.context, *self.query], self.answers[0], counted=True)
        return abs(from_zero - self.expected[0]) <= self.rounding

    def obeys_mask(self) -> bool:
        def beside(hidden: Sequence[int]) -> float:
            pairs = [(hidden, self.answers[0]), (self.query, self.answers[0])]
            return score_packed(self.model, [(self.memory, pairs)])[1][0]

        allowed = self.rounding if _has_experts(self.model) else 0.0
        return abs(beside(self.other) - beside(self.another)) <= allowed

    def masked(self, ids: Sequence[int], sees: Tensor) -> Tensor:
        """The logits of a row of n tokens under the 4-D mask that `sees`, [n, n], becomes: [n, vocabulary]."""
        mask = additive(sees, self.model.dtype)[None, None].to(self.device)
        row, at = (
            torch.tensor([[*ids]], device=self.device),
            torch.arange(len(ids), device=self.device)[None],
        )
        logits: Tensor = self.model(input_ids=row, attention_mask=mask, position_ids=at).logits[0]
        return logits

    def sees_ahead(self) -> bool:
        everything = torch.ones(16, 16, dtype=torch.bool)
        rows = ([*self.context, *self.query[:3], last] for last in (self.other[0], self.another[0]))
        return _differ(*(self.masked(row, everything)[0] for row in rows))

    def keeps_window(self) -> bool:
        """Whether the logits of tokens after the first window are the same with a causal 4-D mask and without a mask.
        A window of more than `_LONGEST_TRIAL` tokens is not tried."""
        window = _window(self.model)
        if window is None or window > _LONGEST_TRIAL:
            return False
        n = window + len(self.context)
        ids = ([*self.context, *self.query, *self.other] * n)[:n]
        masked = self.masked(ids, torch.ones(n, n, dtype=torch.bool).tril())
        return not _differ(
            masked[window:], self.model(torch.tensor([ids], device=self.device)).logits[0, window:]
        )

    def batches(self) -> bool:
        """Whether rows of different lengths, and the answers of several rows, have the same scores as in one pass."""
        queries, answer = (self.query, [*self.query, *self.other]), self.answers[0][:1]
        wanted = [self.in_one_pass([*self.context, *query], answer) for query in queries] + [
            *self.expected
        ] * 2
        scores = [
            *score_rows(
                self.model, self.memory, [(tuple(query), [answer]) for query in queries], rows=2
            )
        ]
        scores += score_rows(self.model, self.memory, [self.query_answers] * 2, rows=4)
        return all(map(self.same, (score for score, _ in scores), wanted))

    def shares_memory(self) -> bool:
        """Whether two rows, one of which begins with padding, have the same logits on a shared memory as on copies of
        it: the logits of several tokens, and of one further token."""
        ids = torch.tensor([self.query, self.other[: len(self.query)]], device=self.device)
        mask = torch.ones(
            2, len(self.memory) + len(self.query) + 1, dtype=torch.long, device=self.device
        )
        mask[0, len(self.memory) : len(self.memory) + 3] = 0

        def logits(memory: Memory, shared: bool = False) -> Tensor:
            cache = cache_arguments(self.model, memory.cache(shared=shared))
            first = self.model(input_ids=ids, attention_mask=mask[:, :-1], **cache)
            second = self.model(input_ids=ids[:, :1], attention_mask=mask, **cache)
            return torch.cat([first.logits[:, 3:], second.logits], dim=1).double()

        alone, precision = logits(self.memory), torch.finfo(self.model.dtype)
        allowed = 1000 * min(precision.eps, torch.finfo(torch.float32).eps) * alone.norm()
        if (
            precision.bits < 32 and self.device.type != "cpu"
        ):  # its kernel rounds more than this, to half precision
            allowed = (logits(read_causally(self.model, self.another)) - alone).norm() / 4
        return bool((logits(self.memory, shared=True) - alone).norm() <= allowed)

    def generates(self, *queries: Sequence[int]) -> bool:
        """Whether `generate`, run on the memory for all queries in one batch, finds the likeliest tokens of one pass.
        The checkpoint's generation settings are put aside, so that only the scores decide."""
        state = self.memory.state
        if state is not None and not any(
            isinstance(layer, CacheLayerMixin) for layer in state.layers
        ):
            return False  # given a cache without attention layers, `generate` runs all tokens again
        model: Any = self.model
        inner: Any = without_adapter(model)

        def shortfall(
            query: Sequence[int], generated: list[int]
        ) -> float:  # how far below the largest logits they are
            ids = torch.tensor([[*self.context, *query, *generated[:-1]]], device=self.device)
            read = range(ids.shape[1] - len(generated), ids.shape[1])
            logits = run_rows(self.model, ids, read, empty_cache(self.model))
            return float((logits[0].amax(-1) - logits[0, range(len(generated)), generated]).max())

        checkpoint, plain = (
            inner.generation_config,
            GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0),
        )
        inner.generation_config = plain
        try:
            generated = continue_from(model, model.generate, [self.memory], queries)
        finally:
            inner.generation_config = checkpoint
        return all(
            shortfall(query, row) <= self.noise
            for query, row in zip(queries, generated, strict=True)
        )


def _differ(logits: Tensor, other_logits: Tensor) -> bool:
    """Whether some logits differ by more than rounding: 2 units in the last place of the largest logit."""
    return float((logits - other_logits).abs().max()) > 2 * torch.finfo(logits.dtype).eps * float(
        logits.abs().max()
    )


def _has_experts(model: PreTrainedModel) -> bool:
    """Whether the model is a mixture of experts: a setting of its configuration with "experts" in its name is a number
    above 1."""
    config = model.config.get_text_config().to_json_string(use_diff=False)
    return re.search(r'"\w*experts\w*": ([2-9]|[1-9]\d)', config) is not None


def _window(model: PreTrainedModel) -> int | None:
    """The shortest attention window in the configuration; None if there is none.

    It is read from the configuration, since a trial with a few tokens does not show it: a window hides nothing in rows
    up to its length, and some models have no window under a 4-D mask.
    """
    config = model.config.get_text_config()
    windows = [
        getattr(config, name, None)
        for name in ("sliding_window", "attention_chunk_size", "window_size")
    ]
    if getattr(config, "use_sliding_window", True) is False:
        windows[0] = None
    return min((window for window in windows if isinstance(window, int)), default=None)


def _scaled_from(model: PreTrainedModel) -> int | None:
    """The largest number of tokens in a row at which attention is not yet scaled by a token's index (Llama 4's
    temperature tuning, which ignores `position_ids`); None if attention is never scaled in this way."""
    config = model.config.get_text_config()
    first: int | None = getattr(config, "floor_scale", None)
    return (
        first - 1
        if first is not None and getattr(config, "attn_temperature_tuning", False)
        else None
    )
