"""What a loaded model computes, told by its contents: a path stays the same when what lies there does not."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

# So many bytes are added up to one number of the digest.
_BLOCK = 2**14


def fingerprint(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Weights, settings and tokenizer, by name.

    All weights are read, once (some tenths of a second for each billion on a CPU, less on a GPU), so that no
    training step, merge or adapter goes unseen. Versions of transformers and torch are left out: they change
    results by rounding if at all, and a cache would be worth nothing after an upgrade.
    """
    found = {"weights": _digest(_tensors(model))}
    if type(model).__module__.startswith("transformers_modules."):  # code that came with the checkpoint
        found["code"] = hashlib.sha256(inspect.getsource(sys.modules[type(model).__module__]).encode()).hexdigest()[:16]
    for name in ("config", "generation_config"):
        if (settings := getattr(model, name, None)) is not None:
            found |= {f"{name}.{k}": v for k, v in settings.to_diff_dict().items()}
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        found |= {f"peft.{name}.{k}": v for k, v in adapter.to_dict().items()}
    # Where a checkpoint lay and what wrote it.
    found = {k: _plain(v) for k, v in found.items() if not k.endswith(("version", "_name_or_path"))}
    return found | {"tokenizer": _tokenizer(tokenizer)}


def _plain(value: Any) -> Any:
    """As JSON reads it back; sets, which have no order, in one."""
    return json.loads(json.dumps(value, default=lambda v: sorted(map(str, v)) if isinstance(v, set) else str(v)))


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for padding in ("padding", "truncation"):  # set and unset by every call
        backend.pop(padding, None)
    # The chat template is not among them: it shows in the prompts.
    said = [type(tokenizer).__name__, backend, tokenizer.special_tokens_map]
    said.append(getattr(tokenizer, "clean_up_tokenization_spaces", None))  # of texts that were generated
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A model's weights by name, quantized ones with their scales, and those that accelerate keeps elsewhere."""
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue  # a quantized layer's notes on itself
        if tensor.is_meta:
            module, _, own = name.rpartition(".")
            hook = getattr(model.get_submodule(module), "_hf_hook", None)
            for each in getattr(hook, "hooks", [hook]):
                if (elsewhere := getattr(each, "weights_map", None)) is not None:
                    tensor = elsewhere[own]
        yield from _flat(name, tensor)


def _flat(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or those that one of torch's wrappers (quantized, sharded) is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    inner, _ = tensor.__tensor_flatten__()
    for part in inner:
        yield from _flat(f"{name}.{part}", getattr(tensor, part))


def _digest(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """A digest of all weights: their bits taken as whole numbers and added up, which no order of adding changes."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.is_meta:
            continue  # nobody knows where it is
        numbers = tensor.detach().reshape(-1).view(torch.uint8)
        if numbers.storage_offset() % 8:
            numbers = numbers.clone()
        even = len(numbers) // _BLOCK * _BLOCK
        sums = numbers[:even].view(torch.int64).view(-1, _BLOCK // 8).sum(-1)
        for part in (sums, numbers[even:]):
            digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
