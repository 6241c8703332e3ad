"""A GPT-2 that reads points and values, in the layout of a method (Garg et al., 2022, as InvICL, A.3, follows them)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from lm_eval_icl.methods.base import Method
from lm_eval_icl.training.rows import leaks
from scripts.regression.configuration import Configuration


@dataclass(frozen=True)
class RegressionRow:
    """The row of n examples and a query under a method. An example is two tokens, x and (y, 0, ..., 0); a query is x.

    Attributes:
        source: [m] the index of each token in the prompt, which has every example once.
        mask: [1, 1, m, m] bool: which token attends to which.
        positions: [1, m].
        reads: the tokens at which the last points of the prompt are predicted, the query's the last of them.
    """

    source: Tensor
    mask: Tensor
    positions: Tensor
    reads: Tensor


@functools.lru_cache(maxsize=1024)
def row(method: Method, n: int, device: torch.device) -> RegressionRow:
    """The row of n examples and a query."""
    layout = method.lay_out(0, [2] * n, 1)
    xs = layout.kept_tokens[::2]  # of the copies that the query sees, and the query
    return RegressionRow(
        torch.tensor(layout.source, device=device),
        layout.mask[None, None].to(device),
        layout.positions[None].to(device),
        torch.tensor(xs if predicts_examples(method) else xs[-1:], device=device),
    )


@functools.cache
def predicts_examples(method: Method) -> bool:
    """Whether the value of an example is predicted at its x too: from other examples, and without being seen.

    Under `prefixicl` x sees its own y; under `pcw` it sees no other example.
    """
    return bool(method.pattern(2).sees.any()) and not leaks(method)


@functools.cache
def reads_all_numbers(method: Method) -> bool:
    """Whether the value at an example's x is predicted as if x were a query after the earlier examples, so that one row
    gives the predictions with every number of examples."""
    return method.lay_out(0, [2, 2], 1).causal


class Regressor(nn.Module):
    """Predicts y at x from examples. Its weights do not depend on the method, except that `positions=none` has no
    position embeddings."""

    def __init__(self, configuration: Configuration, method: Method) -> None:
        super().__init__()
        self.configuration = configuration
        self.method = method
        gpt2 = GPT2Config(
            vocab_size=1,  # its own embeddings are not used
            bos_token_id=0,
            eos_token_id=0,
            n_positions=2 * configuration.longest + 1,
            n_embd=configuration.width,
            n_layer=configuration.layers,
            n_head=configuration.heads,
            activation_function="gelu_pytorch_tanh",  # the same function as GPT-2's "gelu_new", in one kernel
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        self.read_in = nn.Linear(configuration.dimensions, configuration.width)
        self.transformer = GPT2Model(gpt2)
        self.read_out = nn.Linear(configuration.width, 1)
        if method.positions == "none":
            nn.init.zeros_(self.transformer.wpe.weight.requires_grad_(False))

    def states(self, x: Tensor, y: Tensor, layers: Sequence[int]) -> Tensor:
        """The hidden states at the tokens at which values are predicted.

        Args:
            x: [b, n + 1, d], the points of n examples and of the query.
            y: [b, n], the values of the examples.
            layers: which hidden states; the last layer's are those that predictions are read from.

        Returns:
            [b, r, layers, width], for the last r points.
        """
        arranged = row(self.method, y.shape[1], x.device)
        values = nn.functional.pad(y[:, :, None], (0, x.shape[2] - 1))
        examples = torch.stack([x[:, :-1], values], dim=2).flatten(1, 2)
        prompt = self.read_in(torch.cat([examples, x[:, -1:]], dim=1))
        output = self.transformer(
            inputs_embeds=prompt[:, arranged.source],
            attention_mask=arranged.mask,
            position_ids=arranged.positions,
            output_hidden_states=True,
        )
        states = [output.hidden_states[layer][:, arranged.reads] for layer in layers]
        return torch.stack(states, dim=2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The predicted values of the last points of the prompt, [b, r]: of every point, or of the query alone."""
        read: Tensor = self.read_out(self.states(x, y, [self.configuration.layers]))
        return read[:, :, 0, 0]

    def states_with(
        self, numbers: Sequence[int], x: Tensor, y: Tensor, layers: Sequence[int]
    ) -> Tensor:
        """The hidden states of queries after different numbers of examples: point n after the n points before it.

        Under an order-invariant method the examples are put into canonical order, so that the order they are given in
        changes no bit.

        Args:
            numbers: how many examples, each less than the number of points.
            x: [b, points, d]. y: [b, points].

        Returns:
            [b, numbers, layers, width].
        """
        if reads_all_numbers(self.method):
            most = max(numbers)
            return self.states(x[:, : most + 1], y[:, :most], layers)[:, list(numbers)]
        states = []
        for n in numbers:
            before = x[:, :n]
            values = y[:, :n]
            if self.method.invariant:
                before, values = in_canonical_order(before, values)
            points = torch.cat([before, x[:, n : n + 1]], dim=1)
            states.append(self.states(points, values, layers)[:, -1])
        return torch.stack(states, dim=1)

    def predict(self, numbers: Sequence[int], x: Tensor, y: Tensor) -> Tensor:
        """The predicted values of queries after different numbers of examples, [b, numbers] (see `states_with`)."""
        states = self.states_with(numbers, x, y, [self.configuration.layers])
        read: Tensor = self.read_out(states)
        return read[:, :, 0, 0]


def in_canonical_order(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The examples of each prompt, sorted by their coordinates and their value."""
    order = torch.arange(y.shape[1], device=y.device).expand_as(y)
    for key in (
        y,
        *x.flip(-1).unbind(-1),
    ):  # from the last key to the first, as sorts that are stable need it
        order = order.gather(1, key.gather(1, order).argsort(dim=1, stable=True))
    return x.gather(1, order[:, :, None].expand_as(x)), y.gather(1, order)
