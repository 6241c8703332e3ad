"""Finds out what a loaded model can do by running a few tokens through it.

There is no list of architectures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from lm_eval_icl.errors import InputError, log, one_line
from lm_eval_icl.inference.attention import additive
from lm_eval_icl.inference.caches import cache_arguments, takes_positions, without_adapter
from lm_eval_icl.inference.capabilities import Capabilities
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.generation import continue_from
from lm_eval_icl.inference.hybrids import check_states, empty_cache, is_hybrid
from lm_eval_icl.inference.memory import Memory, read_causally, run_after_memory, run_rows
from lm_eval_icl.inference.positions import position_switch
from lm_eval_icl.inference.scoring import score_packed, score_rows

# A trial finds out if a mask switches a window off. Longer windows are not tried.
_LONGEST_TRIAL = 512


def probe(model: PreTrainedModel) -> Capabilities:
    """Find out what a model can do, by running a few tokens through it.

    Two answers, scored on a memory, must have the scores that they have in a single pass. A token
    after the scored tokens must change a score by no more than rounding: by 32 units in the last
    place, and by a tenth of the difference that the token makes when it is seen. A hidden token
    must not change any bit of a score, in any precision. Only a mixture of experts is allowed
    rounding here, since it multiplies all tokens of one expert at once.

    Raises:
        InputError: the model does not run, is bidirectional, or its log-probabilities are NaN or
            infinite.
        RuntimeError: the device ran out of memory.
    """
    trial = _Trial(model)
    name = type(model).__name__
    if error := _failure(trial.run_in_one_pass):
        raise InputError(f"{name} cannot be used: it does not run on a row of tokens ({error}).")
    if trial.ahead > trial.rounding:
        raise InputError(
            f"{name} is bidirectional: a token's result changes with the tokens after it, so it "
            "does not predict the next token. These methods need a causal language model (a "
            "decoder). If this checkpoint was trained as a decoder, its config.json must say so "
            "(is_decoder: true)."
        )
    logprob = trial.expected[0]
    if not math.isfinite(logprob):
        raise InputError(
            f"{name} cannot be used: the log-probability of a few tokens is {logprob} "
            f"({model.dtype}). The checkpoint is broken, or its numbers overflow: try "
            "--model_args dtype=float32."
        )
    hybrid = is_hybrid(model)
    if error := _failure(trial.continue_from_cache):
        return Capabilities(no_memory=error, is_hybrid=hybrid)
    mask = not hybrid and _succeeds("obeys_mask", trial.obeys_mask)
    counts = _succeeds("counts_from_zero", trial.counts_from_zero)
    positions = not hybrid and counts and _succeeds("moves", trial.moves)
    both = mask and positions
    short = trial.query
    pads = positions and takes_positions(model)
    pads = pads and _succeeds("pads", trial.generates, short, [*short, *trial.other])
    generates = counts and (pads or _succeeds("generates", trial.generates, short))
    return Capabilities(
        is_hybrid=hybrid,
        obeys_mask=mask,
        sees_ahead=mask and _succeeds("sees_ahead", trial.sees_ahead),
        obeys_positions=positions,
        window=_window(model),
        keeps_window=both and _succeeds("keeps_window", trial.keeps_window),
        scaled_from=_scaled_from(model),
        position_switch=position_switch(model),
        can_trim=both and _succeeds("trims", trial.trims),
        can_batch=_succeeds("batches", trial.batches),
        can_generate=generates,
        can_pad=pads,
        can_share=pads and _succeeds("shares_memory", trial.shares_memory),
    )


def tells_positions_apart(model: PreTrainedModel) -> bool:
    """True if a score on a memory changes with the position of the query's first token."""
    trial = _Trial(model)
    trial.memory = read_causally(model, trial.context)
    return _succeeds("moves", trial.moves)


def _failure(test: Callable[[], Any]) -> str:
    """The exception that a test raises, in one line; empty if it raises none.

    Out-of-memory errors are passed on.
    """
    try:
        test()
    except Exception as error:
        if should_reduce_batch_size(error):
            raise
        return one_line(error)[:200]
    return ""


def _succeeds(name: str, test: Callable[..., bool], *args: Any) -> bool:
    """The result of a test. If it raises an exception: False, and a line in the log."""
    results: list[bool] = []
    if error := _failure(lambda: results.append(test(*args))):
        log.info("the model's capabilities: the trial %r fails with %s", name, error)
    return results == [True]


class _Trial:
    """A context, a query and two answers, run through a model in one pass and in other ways."""

    dtype: torch.dtype  # in which its passes compute
    expected: list[float]  # the answers' log-probabilities in one pass, as `hf` computes them
    noise: float  # a log-probability may differ this much from the expected one
    rounding: float  # the largest difference that counts as rounding
    ahead: float  # how much a log-probability changes with the tokens after the answer
    memory: Memory  # the memory of the context
    beside_other: float  # the first answer's log-probability beside a hidden query

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = device_of(model)
        self.dtype = model.dtype
        if torch.is_autocast_enabled(self.device.type):
            self.dtype = torch.get_autocast_dtype(self.device.type)
        vocabulary = model.config.get_text_config().vocab_size
        ids = [(7 + 11 * i) % vocabulary for i in range(64)]
        self.context = ids[:12]
        self.query = ids[12:20]
        self.whole = ids[:20]
        self.answers = [tuple(ids[44:48]), tuple(ids[48:52])]
        # The hidden query begins with another token than the query, or both would share tokens of
        # the packed row. This token is smaller than the query's first token, so that the hidden
        # query stands before the query in the row.
        self.other = [(self.query[0] - 1) % vocabulary, *ids[21:32]]
        self.another = [(self.query[0] - 2) % vocabulary, *ids[33:44]]
        self.query_answers = (tuple(self.query), self.answers)

    def in_one_pass(
        self,
        before: Sequence[int],
        answer: Sequence[int],
        after: Sequence[int] = (),
        counted: bool = False,
    ) -> float:
        """The log-probability of an answer between two texts.

        Args:
            counted: the model is given positions, from 0 on.
        """
        row = [*before, *answer, *after]
        positions = torch.arange(len(row), device=self.device)[None] if counted else None
        logits = self.predicting(row, range(len(before), len(before) + len(answer)), positions)
        logprobs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        return float(logprobs[range(len(answer)), list(answer)].sum())

    def predicting(
        self, row: Sequence[int], tokens: range, positions: Tensor | None = None
    ) -> Tensor:
        """The logits that predict some tokens of a row, from one pass: [tokens, vocabulary]."""
        ids = torch.tensor([row], device=self.device)
        read = range(tokens.start - 1, tokens.stop - 1)
        return run_rows(self.model, ids, read, empty_cache(self.model), positions)[0]

    def run_in_one_pass(self) -> None:
        self.expected = [self.in_one_pass(self.whole, answer) for answer in self.answers]
        answer = self.answers[0]
        size = abs(self.expected[0])
        seen_other = self.in_one_pass([*self.context, *self.other, *self.query], answer)
        seen_another = self.in_one_pass([*self.context, *self.another, *self.query], answer)
        after_other = self.in_one_pass(self.whole, answer, self.other)
        after_another = self.in_one_pass(self.whole, answer, self.another)
        self.ahead = abs(after_other - after_another)
        precision = torch.finfo(self.dtype)
        self.rounding = min(abs(seen_other - seen_another) / 10, 32 * precision.eps * size)
        self.noise = 1e-3 * size
        if precision.bits < 32:
            # Numbers are noisy, but a model that ignores the memory differs by more than this.
            without_memory = self.in_one_pass(self.query, answer)
            self.noise = max(self.noise, abs(without_memory - self.expected[0]) / 2)

    def same(self, score: float, wanted: float) -> bool:
        return not math.isfinite(wanted) or abs(score - wanted) <= self.noise

    def continue_from_cache(self) -> None:
        """Check that the model continues from its cache.

        Raises:
            ValueError: answers do not have the same scores on the memory as in one pass, or states
                are not the same as after one pass.
        """
        model = self.model
        if empty_cache(model) is None:
            raise ValueError("its cache is of a class that is not known here")
        self.memory = read_causally(model, self.context)
        if self.memory.state is not None:
            few = self.query[:3]
            whole = read_causally(model, [*self.context, *few]).state
            assert whole is not None
            # This overwrites a state that is kept in the model, not in the cache.
            read_causally(model, self.another)
            continued = self.memory.cache()
            run_after_memory(model, self.memory, continued, [few], 0, [len(few) - 1])
            check_states(continued, whole, self.dtype)
        else:
            # Each layer has an entry for every token, or none if the model leaves it out. Some
            # layer has entries.
            entries = {entry.shape[-2] for entry in chain(*self.memory.layers)}
            if not any(entries) or not entries <= {0, len(self.memory)}:
                raise ValueError("its cache does not hold one key and one value for each token")
        scores = score_rows(model, self.memory, [self.query_answers])
        for (score, _), wanted in zip(scores, self.expected, strict=True):
            if not self.same(score, wanted):
                raise ValueError(
                    f"continued from its cache, it gives {score:.4f}, in one pass {wanted:.4f}"
                )

    def moves(self) -> bool:
        """True if a score changes with the position of the query's first token."""
        moved = replace(self.memory, query_start=len(self.context) + 7)
        queries = [(tuple(self.query), [self.answers[0][:1]])]
        score = score_rows(self.model, self.memory, queries)[0]
        return score_rows(self.model, moved, queries)[0] != score

    def counts_from_zero(self) -> bool:
        """True if the model counts positions from 0 on if it is given none, as `generate` does.

        (RoBERTa's positions begin with the id of its padding token plus 1.)
        """
        if not takes_positions(self.model):
            return True
        from_zero = self.in_one_pass(self.whole, self.answers[0], counted=True)
        return abs(from_zero - self.expected[0]) <= self.rounding

    def beside(self, hidden: Sequence[int], trim_last_layer: bool = False) -> float:
        """The first answer's log-probability in a packed row with a hidden query."""
        pairs = [(hidden, self.answers[0]), (self.query, self.answers[0])]
        work = [(self.memory, pairs)]
        return score_packed(self.model, work, trim_last_layer=trim_last_layer)[1][0]

    def obeys_mask(self) -> bool:
        self.beside_other = self.beside(self.other)
        allowed = self.rounding if _has_experts(self.model) else 0.0
        return abs(self.beside_other - self.beside(self.another)) <= allowed

    def trims(self) -> bool:
        trimmed = self.beside(self.other, trim_last_layer=True)
        return abs(trimmed - self.beside_other) <= self.rounding

    def masked(self, ids: Sequence[int], sees: Tensor) -> Tensor:
        """The logits of a row of n tokens under a 4-D mask: [n, vocabulary].

        Args:
            sees: [n, n] the mask as booleans.
        """
        mask = additive(sees, self.model.dtype)[None, None].to(self.device)
        row = torch.tensor([[*ids]], device=self.device)
        positions = torch.arange(len(ids), device=self.device)[None]
        return self.model(input_ids=row, attention_mask=mask, position_ids=positions).logits[0]

    def sees_ahead(self) -> bool:
        everything = torch.ones(16, 16, dtype=torch.bool)
        start = [*self.context, *self.query[:3]]
        other = self.masked([*start, self.other[0]], everything)
        another = self.masked([*start, self.another[0]], everything)
        return _differ(other[0], another[0])

    def keeps_window(self) -> bool:
        """True if a causal 4-D mask changes no logits of tokens after the first window.

        A window of more than `_LONGEST_TRIAL` tokens is not tried.
        """
        window = _window(self.model)
        if window is None or window > _LONGEST_TRIAL:
            return False
        n = window + len(self.context)
        ids = ([*self.whole, *self.other] * n)[:n]
        masked = self.masked(ids, torch.ones(n, n, dtype=torch.bool).tril())
        unmasked = self.model(torch.tensor([ids], device=self.device)).logits[0]
        return not _differ(masked[window:], unmasked[window:])

    def batches(self) -> bool:
        """True if rows of a batch have the scores that they have in one pass.

        The rows are queries of different lengths, or the answers of several queries.
        """
        answer = self.answers[0][:1]
        queries = [self.query, [*self.query, *self.other]]
        wanted = [self.in_one_pass([*self.context, *query], answer) for query in queries]
        wanted += [*self.expected, *self.expected]
        queries_answer = [(tuple(query), [answer]) for query in queries]
        scores = list(score_rows(self.model, self.memory, queries_answer, rows=2))
        scores += score_rows(self.model, self.memory, [self.query_answers] * 2, rows=4)
        return all(map(self.same, (score for score, _ in scores), wanted))

    def shares_memory(self) -> bool:
        """True if two rows have the same logits on a shared memory as on copies of it.

        One of the rows begins with padding. The logits are those of several tokens, and then those
        of one further token.
        """
        ids = torch.tensor([self.query, self.other[: len(self.query)]], device=self.device)
        n = len(self.memory)
        mask = torch.ones(2, n + len(self.query) + 1, dtype=torch.long, device=self.device)
        mask[0, n : n + 3] = 0

        def logits(memory: Memory, shared: bool = False) -> Tensor:
            cache = cache_arguments(self.model, memory.cache(shared=shared))
            first = self.model(input_ids=ids, attention_mask=mask[:, :-1], **cache)
            second = self.model(input_ids=ids[:, :1], attention_mask=mask, **cache)
            return torch.cat([first.logits[:, 3:], second.logits], dim=1).double()

        on_copies = logits(self.memory)
        precision = torch.finfo(self.dtype)
        eps = min(precision.eps, torch.finfo(torch.float32).eps)
        allowed = 1000 * eps * on_copies.norm()
        if precision.bits < 32 and self.device.type != "cpu":
            # The kernel rounds to half precision, which is more than this.
            on_another = logits(read_causally(self.model, self.another))
            allowed = (on_another - on_copies).norm() / 4
        return bool((logits(self.memory, shared=True) - on_copies).norm() <= allowed)

    def generates(self, *queries: Sequence[int]) -> bool:
        """True if `generate` on the memory finds the likeliest tokens of one pass.

        It runs for all queries in one batch. The checkpoint's generation settings are put aside, so
        that only the scores decide.
        """
        state = self.memory.state
        kept = [] if state is None else state.layers
        if kept and not any(isinstance(layer, CacheLayerMixin) for layer in kept):
            return False  # without attention layers, `generate` runs all tokens again
        model: Any = self.model
        inner: Any = without_adapter(model)

        def shortfall(query: Sequence[int], generated: list[int]) -> float:
            """How far the generated tokens' logits are below the largest logits."""
            start = len(self.context) + len(query)
            row = [*self.context, *query, *generated]
            logits = self.predicting(row, range(start, len(row)))
            return float((logits.amax(-1) - logits[range(len(generated)), generated]).max())

        checkpoint = inner.generation_config
        inner.generation_config = GenerationConfig(
            max_new_tokens=3, do_sample=False, pad_token_id=0
        )
        try:
            rows = continue_from(model, model.generate, [self.memory], queries)
        finally:
            inner.generation_config = checkpoint
        return all(shortfall(*row) <= self.noise for row in zip(queries, rows, strict=True))


def _differ(logits: Tensor, other_logits: Tensor) -> bool:
    """True if logits differ by more than 2 units in the last place of the largest logit."""
    rounding = 2 * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    return float((logits - other_logits).abs().max()) > rounding


def _has_experts(model: PreTrainedModel) -> bool:
    """True if the model is a mixture of experts.

    A setting of its configuration with "experts" in its name is a number above 1.
    """
    config = model.config.get_text_config().to_json_string(use_diff=False)
    return re.search(r'"\w*experts\w*": ([2-9]|[1-9]\d)', config) is not None


def _window(model: PreTrainedModel) -> int | None:
    """The shortest attention window in the configuration, if there is one.

    It is read from the configuration, since a trial with a few tokens does not show it: a window
    hides nothing in rows up to its length, and some models have no window under a 4-D mask.
    """
    config = model.config.get_text_config()
    names = ["attention_chunk_size", "window_size"]
    if getattr(config, "use_sliding_window", True) is not False:
        names.append("sliding_window")
    windows = [getattr(config, name, None) for name in names]
    return min((window for window in windows if isinstance(window, int)), default=None)


def _scaled_from(model: PreTrainedModel) -> int | None:
    """In rows of more tokens than this, attention is scaled by a token's index.

    This is Llama 4's temperature tuning, which ignores `position_ids`. None for other models.
    """
    config = model.config.get_text_config()
    first = getattr(config, "floor_scale", None)
    if first is None or not getattr(config, "attn_temperature_tuning", False):
        return None
    return first - 1
