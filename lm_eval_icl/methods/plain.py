"""Plain mode: every request computed alone, by the definition of its method, with none of the optimizations.

A request is a context, a query and an answer. Each of its forward passes is one row of the model, under the dense mask
and at the positions of the layout that the method gives (`Method.passes`). The model's own attention computes it. No
keys and values are kept for another request, nothing is packed or batched, and the text is generated without a cache.
It is slow, and it is what the optimized code is compared with, so it shares with it only the methods' layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lm_eval_icl.errors import Unsupported
from lm_eval_icl.inference.attention import Reading
from lm_eval_icl.inference.blocks import replaced_stream, residual_stream
from lm_eval_icl.inference.caches import cache_arguments, without_adapter
from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.scoring import Scores, States
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.batchicl import BatchICL
from lm_eval_icl.methods.deepthink import DeepThink
from lm_eval_icl.methods.several import Several
from lm_eval_icl.prompts.layouts import Layout
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt


class Plain:
    """A method on a model, one request at a time.

    Args:
        method: the method, with the arguments filled in that depend on the model (`Method.bind`).
        softmax_dtype: the dtype of the softmax over the vocabulary; if None, at least float32.
    """

    def __init__(
        self, model: PreTrainedModel, method: Method, softmax_dtype: torch.dtype | None
    ) -> None:
        self.model = model
        self.method = method
        self.softmax_dtype = softmax_dtype

    def score(self, context: Context, query: Ids, answer: Ids, states: States = None) -> Scores:
        """The score of one answer. `states` is as for `MethodRunner.score`."""
        ids = torch.tensor(answer)
        with self._projected(states) as projected:
            by_memory = self._by_memory(context, query, answer[:-1]).cpu()
        vector = None
        if states == "log_probs":
            vector = by_memory[:, 0].log_softmax(-1)
        elif states == "hidden":
            at_query = projected[-1][:, -len(answer)]
            vector = at_query.to(torch.promote_types(at_query.dtype, torch.float32))
        combined = self._combined(by_memory)
        greedy = combined.argmax(-1) == ids
        logprobs = combined.gather(-1, ids[:, None])[:, 0]
        if isinstance(self.method, Several) and len(by_memory) > 1:
            logprobs = self.method.score(combined, by_memory, ids)[None]
            greedy = greedy.all()[None]
        return Scores(torch.stack((logprobs, greedy.to(logprobs))), [len(logprobs)], vector)

    def generate(self, prompt: TokenizedPrompt, generate: Callable[..., Tensor]) -> list[int]:
        """The ids that `generate` (as for `MethodRunner.generate`) puts after one prompt. In each step, the scores of
        the next token are those of a request of its own, whose answer is the text so far."""
        row = [*prompt.context.tokens, *prompt.query]

        def next_token(ids: list[int]) -> Tensor:
            by_memory = self._by_memory(prompt.context, prompt.query, tuple(ids[len(row) :]))
            return self._combined(by_memory)[-1]

        ids = torch.tensor([row], device=device_of(self.model))
        with _predicting(self.model, next_token):
            output = generate(ids, attention_mask=torch.ones_like(ids))
        generated: list[int] = output[0, len(row) :].tolist()
        return generated

    def _combined(self, by_memory: Tensor) -> Tensor:
        """The distribution of each next token, [tokens, vocabulary], from those on all memories."""
        if len(by_memory) == 1:
            return by_memory[0]
        assert isinstance(self.method, Several)
        return self.method.combined(by_memory)

    def _by_memory(self, context: Context, query: Ids, answer: Ids) -> Tensor:
        """The log-probabilities after the query and after each token of the answer, on each memory of the context:
        [memories, 1 + tokens of the answer, vocabulary]."""
        method = self.method.window_method
        logits = torch.stack(
            [
                self._predictions(method, window, query, answer)[-len(answer) - 1 :]
                for window in self.method.contexts(context)
            ]
        )
        dtype = self.softmax_dtype or torch.promote_types(logits.dtype, torch.float32)
        logprobs = logits.log_softmax(-1, dtype=dtype)
        return logprobs.to(torch.promote_types(dtype, torch.float32))

    def _predictions(self, method: Method, context: Context, query: Ids, answer: Ids) -> Tensor:
        """The logits of the last tokens of a request, [tokens, vocabulary]."""
        after = (*query, *answer)
        lengths = (len(context.prefix), context.lengths, len(query), len(answer))
        layouts = [layout for _, layout in method.passes(*lengths)]
        if isinstance(method, BatchICL):
            return self._averaged(method, layouts, context, query, answer)
        if isinstance(method, DeepThink) and len(layouts) > 1:
            return self._refined(method, layouts, context, after)
        if not (method.one_pass or method.reads_in_parts or isinstance(method, DeepThink)):
            return self._encoded(method, context, query, answer)
        with self._reading(method, context, layouts[-1], len(after)):
            return self._run(layouts[-1], [*context.tokens, *after], len(after))

    # One forward pass.

    def _run(
        self,
        layout: Layout,
        prompt: Sequence[int],
        keep: int = 1,
        cache: DynamicCache | None = None,
    ) -> Tensor:
        """Run the row of a layout, and return the logits of its last tokens, [tokens, vocabulary].

        Args:
            prompt: the ids of the prompt, which has every part once (`Layout.source`).
            keep: for how many tokens logits are needed. Some models compute them for all tokens.
            cache: the memory at the beginning of the layout, to which the keys and values of the row are added.
        """
        device = device_of(self.model)
        first = layout.entries
        row = [prompt[i] for i in layout.source[first:]]
        positions = layout.positions[first:]
        arguments: dict[str, Any] = {}
        if not torch.equal(positions, torch.arange(first, len(layout))):
            arguments["position_ids"] = positions[None].to(device)
        if self.method.needs_mask and not layout.causal:
            hidden = torch.finfo(self.model.dtype).min
            mask = torch.zeros(len(row), len(layout), dtype=self.model.dtype)
            mask = mask.masked_fill(~layout.mask[first:], hidden)
            arguments["attention_mask"] = mask[None, None].to(device)
        if cache is None and not arguments:
            arguments["use_cache"] = False
        else:
            # Without a cache, transformers would take a position that occurs again for the start of another text.
            arguments |= cache_arguments(self.model, DynamicCache() if cache is None else cache)
        ids = torch.tensor([row], device=device)
        logits: Tensor = self.model(input_ids=ids, logits_to_keep=keep, **arguments).logits
        return logits[0]

    @contextmanager
    def _projected(self, states: States) -> Iterator[list[Tensor]]:
        """Inside this context, if `states` are hidden states, keep the input of the vocabulary projection in the last
        pass, [1, tokens, width]."""
        inputs: list[Tensor] = []
        if states != "hidden":
            yield inputs
            return

        def read(module: Any, given: tuple[Tensor, ...]) -> None:
            inputs[:] = given[:1]

        with self.model.get_output_embeddings().register_forward_pre_hook(read):
            yield inputs

    # The methods that are more than one pass under a mask.

    def _averaged(
        self,
        method: BatchICL,
        layouts: Sequence[Layout],
        context: Context,
        query: Ids,
        answer: Ids,
    ) -> Tensor:
        """Batch-ICL: the mean of the residual streams of Q's last token over P + D_i + Q, put into P + Q + A."""
        *shots, last = layouts
        prompt = [*context.prefix, *query, *answer]
        keep = len(answer) + 1
        if not shots:
            return self._run(last, prompt, keep)
        assert method.layer is not None  # `bind` has set it
        with residual_stream(self.model, method.layer) as streams:
            for layout, demonstration in zip(shots, context.demonstrations, strict=True):
                self._run(layout, [*context.prefix, *demonstration, *query])
        at_query = torch.stack([stream[0, -1] for stream in streams])
        wide = torch.promote_types(at_query.dtype, torch.float32)
        mean = at_query.mean(0, keepdim=True, dtype=wide)
        token = len(context.prefix) + len(query) - 1
        with replaced_stream(self.model, method.layer, [token], mean):
            return self._run(last, prompt, keep)

    def _refined(
        self, method: DeepThink, layouts: Sequence[Layout], context: Context, after: Ids
    ) -> Tensor:
        """Deep-Thinking: the memory of all tokens after T passes, then the query on the entries that are kept."""
        first, again, last = layouts
        cache = DynamicCache()
        self._run(first, context.tokens, cache=cache)
        dtype = self.model.dtype
        wide = torch.promote_types(dtype, torch.float32)
        memory = [entry.to(wide) for entry in _entries(cache)]
        velocity = [torch.zeros_like(entry) for entry in memory]
        for _ in range(2, method.T + 1):
            cache = _replaced(cache, [entry.to(dtype) for entry in memory])
            self._run(again, context.tokens, cache=cache)
            for i, entry in enumerate(_entries(cache)):
                present = entry[:, :, len(first) :]
                velocity[i] = present - memory[i] + method.momentum * velocity[i]
                memory[i] = memory[i] + method.eta * velocity[i]
        kept = torch.tensor(first.kept_tokens)
        kept_entries = [entry[:, :, kept.to(entry.device)].to(dtype) for entry in memory]
        memory_kept = _replaced(cache, kept_entries)
        return self._run(last, [*context.tokens, *after], len(after), memory_kept)

    def _encoded(self, method: Method, context: Context, query: Ids, answer: Ids) -> Tensor:
        """A method that encodes a memory by code of its own: the rest of the query, and the answer, on the memory."""

        def encode(contexts: Sequence[Context]) -> list[Any]:
            return [method.encode(self.model, [alone])[0] for alone in contexts]

        [(memory, rest)] = method.encode_queries(self.model, [(context, query)], encode)
        device = device_of(self.model)
        ids = torch.tensor([[*rest, *answer]], device=device)
        positions = memory.query_start + torch.arange(ids.shape[1], device=device)[None]
        given = {} if memory.in_sequence else {"position_ids": positions}
        with memory.reading(self.model):
            output = self.model(
                input_ids=ids, **given, **cache_arguments(self.model, memory.cache())
            )
        logits: Tensor = output.logits
        return logits[0]

    @contextmanager
    def _reading(
        self, method: Method, context: Context, layout: Layout, after: int
    ) -> Iterator[None]:
        """Inside this context, the last `after` tokens of the row read a part of the context as `Method.reading`
        says. Attention is then computed from the scores, as the definition has it."""
        part = method.reading(context)
        if part is None:
            yield
            return
        rows = slice(len(layout) - after, len(layout))
        columns = slice(part[0], len(layout) - after)
        layers = 0

        def attend(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
        ) -> tuple[Tensor, None]:
            nonlocal layers
            layers += 1
            return _in_parts(query, key, value, mask, rows, columns, part[1], **options), None

        original = AttentionInterface()["sdpa"]
        AttentionInterface.register("sdpa", attend)
        try:
            yield
        finally:
            AttentionInterface.register("sdpa", original)
        if not layers:
            name = type(self.model).__name__
            raise Unsupported(f"{method.name}: no layer of {name} uses sdpa: use pcw.")


def _in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    rows: slice,
    columns: slice,
    reading: Reading,
    scaling: float | None = None,
    **_: Any,
) -> Tensor:
    """Attention in which the tokens `rows` read the entries `columns` as `reading` says: [1, n, heads, width]."""
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = key.repeat_interleave(groups, dim=1).to(wide)
    values = value.repeat_interleave(groups, dim=1).to(wide)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = scale * query.to(wide) @ keys.mT
    if mask is None:
        n = scores.shape[-1]
        seen = torch.ones(n, n, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, torch.finfo(wide).min)
    else:
        scores = scores + mask.to(wide)
    # The share of a part is exp(factor * LSE(s / T) + log w), and inside it the shares are softmax(s / T).
    tempered = scores[..., rows, columns] / reading.temperature
    total = tempered.logsumexp(-1, keepdim=True)
    scores[..., rows, columns] = tempered - total + reading.factor * total + reading.log_weight
    return (scores.softmax(-1) @ values).transpose(1, 2).to(query.dtype)


def _entries(cache: DynamicCache) -> list[Tensor]:
    """The keys and values of all layers in turn. A layer that the model leaves out has none."""
    layers: list[Any] = cache.layers
    used = [layer for layer in layers if layer.keys is not None]
    return [entry for layer in used for entry in (layer.keys, layer.values)]


def _replaced(cache: DynamicCache, entries: Sequence[Tensor]) -> DynamicCache:
    """A cache with the layers of `cache` and other `entries`, as `_entries` gives them."""
    replaced = DynamicCache()
    pairs = iter(zip(entries[::2], entries[1::2], strict=True))
    layers: list[Any] = cache.layers
    for i, layer in enumerate(layers):
        if layer.keys is not None:
            replaced.update(*next(pairs), i)
    return replaced


@contextmanager
def _predicting(
    model: PreTrainedModel, next_token: Callable[[list[int]], Tensor]
) -> Iterator[None]:
    """Inside this context, the model's `generate` gets the scores of the next token from `next_token`, which takes the
    ids of a whole row and returns [vocabulary]."""
    inner: Any = without_adapter(model)
    forward = vars(inner).get("forward")

    def restore() -> None:
        del inner.forward
        if forward is not None:
            inner.forward = forward

    def predict(input_ids: Tensor, **_: Any) -> CausalLMOutputWithPast:
        restore()
        try:
            logits = torch.stack([next_token(row) for row in input_ids.tolist()])
        finally:
            inner.forward = predict
        return CausalLMOutputWithPast(logits=logits[:, None])

    inner.forward = predict
    inner.prepare_inputs_for_generation = lambda input_ids, **_: {"input_ids": input_ids}
    try:
        yield
    finally:
        restore()
        del inner.prepare_inputs_for_generation
