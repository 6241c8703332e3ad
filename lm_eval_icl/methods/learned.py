"""The base classes of methods that learn from the answers of their demonstrations."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm
from transformers import PreTrainedModel

from lm_eval_icl.declared import NotNegative
from lm_eval_icl.errors import InputError, log
from lm_eval_icl.inference.caches import cache_arguments
from lm_eval_icl.inference.devices import on_device
from lm_eval_icl.inference.memory import Memory, added_to, run_after_memory
from lm_eval_icl.inference.prefix_cache import PrefixCache
from lm_eval_icl.methods.answers import canonical, examples_of
from lm_eval_icl.methods.base import Passes, Positions
from lm_eval_icl.methods.encoder import ContextEncoder
from lm_eval_icl.methods.plain import Plain
from lm_eval_icl.methods.stepwise import FromLayout
from lm_eval_icl.prompts.layouts import Block, Layout, nothing
from lm_eval_icl.prompts.tokens import Context, Ids, TokenizedPrompt

Probability = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0)]


class Learning(NamedTuple):
    """What a method has learned after some steps."""

    loss: float  # of the last step, before its update. NaN before the first step.
    memory: Memory  # what queries attend to now


@dataclass(frozen=True)
class Learned(FromLayout):
    """One memory for all queries, which is learned from the demonstrations in steps.

    A class defines `learn` and `steps`. Each context is learned once in a run, by itself.

    Args:
        positions: "layout" for the positions of the method `layout`.
        layout: the name of the method whose memory is the beginning. It must come from a single
            forward pass under a mask.
        lr: the learning rate at the beginning.
        seed: of all random draws.
        after: queries run after this many of the steps. None: after the last one.
        per_document: learn also if every document has other demonstrations.
    """

    counts_memories = "after"
    first_number = 0
    learns = True
    needs_answers = True
    without_demonstrations = "nothing to learn from, evaluated as plain zero-shot"

    positions: Literal[Positions, "layout"] = "layout"  # type: ignore[assignment]
    layout: str = "icl"
    lr: Rate = 1e-3
    seed: NotNegative = 0
    after: NotNegative | None = None
    per_document: bool = False

    def __post_init__(self) -> None:
        self._begin()
        super().__post_init__()
        after = self.steps if self.after is None else self.after
        object.__setattr__(self, "after", after)
        self._check("after", fine=after <= self.steps, must=f"at most steps={self.steps}")

    @property
    @abstractmethod
    def steps(self) -> int:
        """The number of steps. With 0, it is the method `layout`."""

    @abstractmethod
    def learn(self, model: PreTrainedModel, context: Context) -> Iterator[Learning]:
        """Learn from a context that has demonstrations. Yield before the first step, and then
        after each of `steps` steps.
        """

    def descend(
        self,
        parameters: Sequence[Tensor],
        losses: Callable[[int], Iterator[Tensor]],
        weight_decay: float,
        max_norm: float = math.inf,
    ) -> Iterator[float]:
        """Steps of AdamW, whose learning rate falls from `lr` to 0 with a cosine.

        Args:
            losses: the parts of the loss of a step, counted from 0. Each has its backward pass
                before the next is computed.
            max_norm: the norm to which gradients are clipped.

        Yields:
            The loss of each step, after its update.
        """
        optimizer = torch.optim.AdamW(parameters, self.lr, weight_decay=weight_decay)
        for step in range(self.steps):
            optimizer.zero_grad()
            total = 0.0
            for loss in losses(step):
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                for part, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        part.grad = gradient if part.grad is None else part.grad + gradient
                total += loss.item()
            if not math.isfinite(total):
                raise InputError(
                    f"{self.name}: the loss is {total} in step {step + 1}: lower lr={self.lr:g}."
                )
            if max_norm < math.inf:
                clip_grad_norm_(parameters, max_norm)
            rate = self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            # Autocast keeps casts of parameters, and does not see that a step changes these.
            torch.clear_autocast_cache()
            yield total

    def steps_of(self, model: PreTrainedModel, context: Context) -> Iterator[Learning]:
        """`learn`. Without answers to learn from, the memory stays as it is."""
        if context.answers and examples_of(context):
            return self.learn(model, context)
        [memory] = self.first.encode(model, [context])
        return iter([Learning(math.nan, memory)] * (self.steps + 1))

    def memories(
        self, model: PreTrainedModel, contexts: Sequence[Context]
    ) -> Iterator[list[Memory]]:
        steps = [self.steps_of(model, context) for context in contexts]
        for together in zip(*steps, strict=True):
            yield [learning.memory for learning in together]

    def encode(self, model: PreTrainedModel, contexts: Sequence[Context]) -> list[Memory]:
        return [self.last(self.steps_of(model, context)) for context in contexts]

    def last(self, steps: Iterator[Learning]) -> Memory:
        """The memory after the step `after`."""
        assert self.after is not None
        for learning in islice(steps, self.after + 1):
            memory = learning.memory  # those of earlier steps are freed
        return memory

    def by_definition(self, plain: Plain, prompt: TokenizedPrompt, answer: Ids) -> list[Tensor]:
        """The query on the memory, which is learned once for all requests."""
        context = prompt.context
        if not context.answers:
            return self.first.by_definition(plain, prompt, answer)
        stores = plain.mode.learned
        if self not in stores:
            encode = partial(self.encode, plain.model)
            stores[self] = PrefixCache(encode, plain.mode.store_bytes)
        [memory] = stores[self].several([context])
        # The entries of the memory, before query and answer.
        block = Block("M", len(memory), 0, 0)
        entries = Layout((block,), nothing(1), (True,), memory.query_start)
        row = self.first.lay_out(0, (), len(prompt.query), len(answer))
        moved = [replace(part, start=part.start + memory.query_start) for part in row.blocks]
        after = replace(row, blocks=tuple(moved)).on_memory(entries)
        with memory.adapted(plain.model):
            return [plain.run(after, [*prompt.query, *answer], memory.cache())]


@dataclass(frozen=True)
class LearnedMemory(Learned):
    """Numbers of a memory, learned by gradient descent. The model stays as it is.

    A class says what is learned (`parameters`), and which memory it makes (`memory`). Each
    demonstration is an example: its input runs as a query, at positions after the whole context,
    on the memory without the entries of this demonstration. The loss is the mean cross-entropy of
    all answer tokens of all demonstrations. There is one step of AdamW (no weight decay) for all of
    them: its gradients are summed one demonstration at a time and clipped to the norm 1, and its
    learning rate falls from `lr` to 0 with a cosine.

    Args:
        steps: the number of steps. With 0, it is the method `layout`.
        token_dropout: the probability with which an example does not see an entry of the memory,
            drawn anew for each step and example.
    """

    overflow_hint = "Under a method that learns, a demonstration also runs after all of them. "
    needs_mask = True  # a window by index would hide other entries than those that are left out

    steps: NotNegative = 200
    token_dropout: Probability = 0.0

    def passes(
        self, prefix: int, demonstrations: Sequence[int], query: int = 0, answer: int = 0
    ) -> Passes:
        """The pass of `layout`, a step's pass over the longest demonstration, and the query."""
        row = self.first.lay_out(prefix, demonstrations, query, answer)
        if not self.steps or not demonstrations:
            return [("", row)]
        first = self.first.lay_out(prefix, demonstrations)
        i = max(range(len(demonstrations)), key=demonstrations.__getitem__)
        place = prefix + sum(demonstrations[:i])
        example = Block(f"D{i + 1}", demonstrations[i], first.end, place)
        end = first.end + first.step * demonstrations[i]
        step = Layout((example,), nothing(1), (True,), end, first.step).on_memory(first)
        own = torch.tensor([block.source == place for block in step.blocks])
        step.sees[-1] &= ~own
        return [
            ("its keys and values are the beginning of the memory M", first),
            (f"each of {self.steps} steps, for each demonstration: learn to predict it", step),
            ("query and answer on the last M", row.take("QA").on_memory(first)),
        ]

    @abstractmethod
    def parameters(self, model: PreTrainedModel, memory: Memory) -> list[Tensor]:
        """What is learned, at its beginning, in float32 or wider.

        Args:
            memory: that of the method `layout`.
        """

    @abstractmethod
    def memory(
        self, model: PreTrainedModel, memory: Memory, parameters: Sequence[Tensor], seen: Tensor
    ) -> Memory:
        """The memory of the parameters, through which gradients flow to them.

        Args:
            memory: that of the method `layout`.
            seen: the indices of its entries that are not left out or dropped, in order.
        """

    def learn(self, model: PreTrainedModel, context: Context) -> Iterator[Learning]:
        """See `Learned`. It runs inside `torch.no_grad`."""
        [memory] = self.first.encode(model, [context])
        start = self.parameters(model, memory)
        parameters = [part.detach().clone().requires_grad_() for part in start]
        generator = torch.Generator().manual_seed(self.seed)
        owners = entry_owners(self.first.row(context), context)
        ranks = entry_ranks(owners, context)
        examples = examples_of(context)
        answer_tokens = sum(len(tokens) - begin for _, tokens, begin in examples)
        everything = torch.arange(len(memory))

        def losses(step: int) -> Iterator[Tensor]:
            for i, tokens, begin in examples:
                seen = owners != i
                if self.token_dropout:
                    draws = torch.rand(len(owners), generator=generator)
                    seen &= draws[ranks] >= self.token_dropout
                indices = seen.nonzero()[:, 0]
                with torch.enable_grad():
                    own = self.memory(model, memory, parameters, indices)
                    loss = answer_loss(model, own, tokens, begin) / answer_tokens
                yield loss

        yield Learning(math.nan, self.memory(model, memory, parameters, everything))
        for loss in self.descend(parameters, losses, weight_decay=0.0, max_norm=1.0):
            yield Learning(loss, self.memory(model, memory, parameters, everything))


def keeping(memory: Memory, seen: Tensor) -> Memory:
    """The entries with the indices `seen`. Later tokens keep their positions."""
    if len(seen) == len(memory):
        return memory
    indices = seen.tolist()
    layers = []
    for keys, values in memory.layers:
        at = on_device(indices, keys.device)
        # The model leaves out a layer without entries.
        at = at if keys.numel() else at[:0]
        layers.append((keys.index_select(2, at), values.index_select(2, at)))
    return replace(memory, layers=layers, tokens=[memory.tokens[i] for i in indices])


def followed_by(model: PreTrainedModel, memory: Memory, vectors: Tensor) -> Memory:
    """The memory with further entries: those of vectors that run in the place of embeddings.

    Args:
        vectors: [n, width].
    """
    positions = torch.arange(len(vectors), device=vectors.device) + memory.query_start
    cache = memory.cache()
    model(
        inputs_embeds=vectors[None].to(model.dtype),
        position_ids=positions[None],
        logits_to_keep=1,
        **cache_arguments(model, cache),
    )
    added = Memory(added_to(cache), [-1] * len(vectors), memory.query_start + len(vectors))
    layers = []
    for (keys, values), (more_keys, more_values) in zip(memory.layers, added.layers, strict=True):
        layers.append((torch.cat([keys, more_keys], -2), torch.cat([values, more_values], -2)))
    return replace(added, layers=layers, tokens=[*memory.tokens, *added.tokens])


def entry_owners(layout: Layout, context: Context) -> Tensor:
    """For each entry of a context's memory, the index of its demonstration. -1 for the prefix."""
    owner_of_token = [-1] * len(context.prefix)
    for i, length in enumerate(context.lengths):
        owner_of_token += [i] * length
    sources = [layout.source[token] for token in layout.kept_tokens]
    return torch.tensor([owner_of_token[source] for source in sources])


def entry_ranks(owners: Tensor, context: Context) -> Tensor:
    """The place of each entry if the demonstrations stood in canonical order."""
    places = torch.tensor(canonical(context)).argsort()
    by_demonstration = torch.where(owners < 0, -1, places[owners])
    return by_demonstration.argsort(stable=True).argsort()


def answer_loss(
    model: PreTrainedModel, memory: Memory, tokens: Sequence[int], begin: int
) -> Tensor:
    """The summed cross-entropy of the tokens from `begin` on, which run on a memory."""
    read = range(begin - 1, len(tokens) - 1)
    logits = run_after_memory(model, memory, memory.cache(), [tokens[:-1]], 0, read)[0]
    targets = on_device(tokens[begin:], logits.device)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(logits.to(wide), targets, reduction="sum")


class LearningEncoder(ContextEncoder):
    """Shows how contexts are learned, and counts it."""

    method: Learned

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._encoded = set[Context]()
        self._told = False

    def steps_of(self, context: Context) -> Iterator[Learning]:
        """What is learned from a context before the first step and after each step."""
        begun = time.perf_counter()
        self.learned["contexts"] += 1
        title = f"{self.method.name}, context {self.learned['contexts']:.0f}"
        with tqdm(total=self.method.after, desc=title, leave=False, disable=None) as bar:
            for learning in self.method.steps_of(self.model, context):
                if not math.isnan(learning.loss):
                    self.learned["steps"] += 1
                    bar.set_postfix(loss=f"{learning.loss:.4f}")
                    bar.update(1)
                self.learned["seconds"] += time.perf_counter() - begun
                yield learning
                begun = time.perf_counter()

    def stepwise(self, context: Context) -> Iterator[Memory]:
        for learning in self.steps_of(context):
            yield learning.memory

    def encode(self, contexts: Sequence[Context]) -> list[Memory]:
        if not self._encoded.isdisjoint(contexts) and not self._told:
            self._told = True
            log.warning(
                "%s: store_bytes=%d does not hold what was learned from all sets of "
                "demonstrations, so that some are learned again",
                self.method.name,
                self.store.max_bytes,
            )
        memories = [self.method.last(self.steps_of(context)) for context in contexts]
        self._encoded.update(contexts)
        return memories

    def forget(self, context: Context) -> None:
        super().forget(context)
        self._encoded.discard(context)

    def together(self, contexts: Sequence[Context]) -> int:
        return 1
