"""Adapters (LoRA): low-rank changes of a model's linear layers, which leave the model as it is.

Forward hooks add them, in one thread and inside one context alone. Whoever else runs the model, as
it runs or in another thread, has the model's own modules and weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from lm_eval_icl.inference.devices import device_of
from lm_eval_icl.inference.residual import transformer_layers

# The names of linear layers that get no adapter: those that make keys alone, and those that choose
# experts, tokens or what is let through.
_NO_ADAPTER = frozenset(
    "k_proj key key_proj k_lin project_k k Wk wk router gate wg shared_expert_gate".split()
)


class LowRank(NamedTuple):
    """The change of a linear layer: x -> up @ (down @ x), times the adapter's scale."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank]


def adapted_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers that an adapter changes, by their names in the model's list of blocks.

    They are all linear layers in the blocks but those of `_NO_ADAPTER`. A layer that makes queries,
    keys and values at once is one of them. The weights of experts may be no linear layers.

    Raises:
        LookupError: the model has no list of blocks, or no such layers in it.
    """
    layers: dict[str, nn.Module] = {}
    for name, module in transformer_layers(model).named_modules():
        # A layer with an adapter of peft has linear layers in it.
        inside = any(name.startswith(f"{outer}.") for outer in layers)
        short_name = name.rpartition(".")[2]
        if _features(module) and not inside and short_name not in _NO_ADAPTER:
            layers[name] = module
    if not layers:
        raise LookupError(f"{type(model).__name__} has no linear layers in its blocks")
    return layers


def _features(module: Any) -> tuple[int, int] | None:
    """The numbers of inputs and outputs of a linear layer. None: it is no linear layer."""
    if hasattr(module, "nf"):  # GPT-2's
        return module.nx, module.nf
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return module.in_features, module.out_features
    return None


@dataclass(frozen=True)
class Adapter:
    """The changes of some linear layers, by their names in the model's list of blocks."""

    changes: Mapping[str, LowRank]
    scale: float

    @classmethod
    def begin(
        cls, model: PreTrainedModel, rank: int, scale: float, generator: torch.Generator
    ) -> Adapter:
        """An adapter that changes nothing yet: `up` is 0, and `down` uniform, as in LoRA's code.

        Its numbers are float32, or wider if the model's are.
        """
        place: Any = {
            "device": device_of(model),
            "dtype": torch.promote_types(model.dtype, torch.float32),
        }
        changes = {}
        for name, module in adapted_layers(model).items():
            features = _features(module)
            assert features is not None
            inputs, outputs = features
            draws = torch.rand(rank, inputs, generator=generator)
            down = (2 * draws.to(**place) - 1) / inputs**0.5
            changes[name] = LowRank(down, torch.zeros(outputs, rank, **place))
        return cls(changes, scale)

    @property
    def parameters(self) -> list[Tensor]:
        return list(chain(*self.changes.values()))

    def with_parameters(self, parameters: list[Tensor]) -> Adapter:
        """This adapter with other numbers, in the order of `parameters`."""
        pairs = map(LowRank, parameters[::2], parameters[1::2])
        return replace(self, changes=dict(zip(self.changes, pairs, strict=True)))

    @contextmanager
    def on(
        self, model: PreTrainedModel, drop: Callable[[Tensor], Tensor] = lambda inputs: inputs
    ) -> Iterator[None]:
        """Inside this context, the model runs with the adapter, in this thread alone.

        Args:
            drop: applied to the inputs of each change.
        """
        thread = threading.get_ident()

        def changed(change: LowRank, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            if threading.get_ident() != thread:
                return None
            inputs = args[0]
            down = change.down.to(inputs.device)
            up = change.up.to(inputs.device)
            added = linear(linear(drop(inputs.to(down.dtype)), down), up)
            return (output + self.scale * added).to(output.dtype)

        blocks = transformer_layers(model)
        with ExitStack() as hooks:
            for name, change in self.changes.items():
                module = blocks.get_submodule(name)
                hooks.enter_context(module.register_forward_hook(partial(changed, change)))
            yield


class Dropout:
    """Sets numbers to 0 with a probability, and scales the others up, by draws of its own.

    The draws are made on the device of the numbers, so other devices have others.
    """

    def __init__(self, probability: float, seed: int) -> None:
        self.probability = probability
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, inputs: Tensor) -> Tensor:
        if not self.probability:
            return inputs
        device = inputs.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        draws = torch.rand(inputs.shape, generator=self._generators[device], device=device)
        return inputs * (draws >= self.probability) / (1 - self.probability)
