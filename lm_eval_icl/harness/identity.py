"""What a run's responses depend on besides its requests, identified by contents: the contents of a path can change."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lm_eval_icl import version
from lm_eval_icl.errors import InputError
from lm_eval_icl.methods.base import Method

# How many elements of a tensor are hashed at a time.
_PART = 2**24
_PACKAGE = Path(__file__).parent.parent


def identity(
    model: Mapping[str, Any], method: Method, code: str | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """What the responses of a run depend on beside the requests, by name. A cache (`--use_cache`) that was written by
    a run with another identity is refused.

    Args:
        model: `fingerprint` of the model.
        code: `code_digest` of the method.
        arguments: the run's other arguments on which its responses depend.

    Raises:
        InputError: the method's code cannot be read.
    """
    if code is None:
        raise InputError(
            f"{method.name} and --use_cache do not go together: the code of this method is in no file, so that the "
            "cache could not tell it from an edited one. Put it into a file, or leave --use_cache out."
        )
    return {
        **arguments,
        "version": version.VERSION,
        "code": code,
        "method": method.name,
        **{f"{method.name}.{name}": value for name, value in dataclasses.asdict(method).items()},
        **model,
    }


def fingerprint(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Digests of a model's weights and tokenizer, and the settings of its configuration, by name.

    All bytes of all weights are hashed (docs/resuming.md says how long this takes), so that every training step, merge,
    adapter or exchange of two rows is noticed. The versions of transformers and torch are left out: they change results
    by no more than rounding, and otherwise every upgrade would make the cache useless.

    Raises:
        InputError: the model's weights cannot be read.
    """
    found = {"weights": weights_digest(model)}
    if type(model).__module__.startswith("transformers_modules."):  # code that came with the checkpoint
        source = inspect.getsource(sys.modules[type(model).__module__])
        found["checkpoint.code"] = hashlib.sha256(source.encode()).hexdigest()[:16]
    for name in ("config", "generation_config"):
        if (settings := getattr(model, name, None)) is not None:
            found |= {f"{name}.{k}": v for k, v in settings.to_diff_dict().items()}
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        found |= {f"peft.{name}.{k}": v for k, v in adapter.to_dict().items()}
    # The checkpoint's path, and the version of transformers that wrote it, are left out.
    found = {k: _plain(v) for k, v in found.items() if not k.endswith(("version", "_name_or_path"))}
    return found | {"tokenizer": _tokenizer(tokenizer)}


def _plain(value: Any) -> Any:
    """The value as JSON reads it back. Sets, which have no order, are sorted."""
    return json.loads(json.dumps(value, default=lambda v: sorted(map(str, v)) if isinstance(v, set) else str(v)))


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for padding in ("padding", "truncation"):  # every call of the tokenizer changes them
        backend.pop(padding, None)
    # The chat template is left out, since its effect shows in the prompts.
    said = [type(tokenizer).__name__, backend, tokenizer.special_tokens_map]
    said.append(getattr(tokenizer, "clean_up_tokenization_spaces", None))  # changes how generated ids are decoded
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def weights_digest(model: nn.Module) -> str:
    """A digest of the names, shapes, dtypes and bytes of all weights, including the scales of quantized weights."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda named: _digest(model, *named), model.state_dict().items())
        return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def _digest(model: nn.Module, name: str, value: Any) -> bytes:
    """A digest of one entry of a state dictionary.

    Raises:
        InputError: its values cannot be read.
    """
    digest = hashlib.sha256(name.encode())
    if isinstance(value, (tuple, list)):  # of a quantized layer
        for i, part in enumerate(value):
            digest.update(_digest(model, f"{name}.{i}", part))
        return digest.digest()
    if value is None or isinstance(value, (str, int, float, torch.dtype, torch.Size)):
        digest.update(repr(value).encode())
        return digest.digest()
    if isinstance(value, Tensor) and value.is_meta:  # accelerate may have offloaded it
        module, _, own = name.rpartition(".")
        hook = getattr(model.get_submodule(module), "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            if (elsewhere := getattr(each, "weights_map", None)) is not None:
                value = elsewhere[own]
    if not isinstance(value, Tensor) or value.is_meta:
        raise InputError(
            f"the weights {name!r} of this model cannot be read, so that a response cache could not tell it from "
            "another one: leave --use_cache out."
        )
    for part, values in _flat(name, value):
        digest.update(f"{part} {tuple(values.shape)} {values.dtype}".encode())
        if values.is_quantized:  # torch's own kind, with scales inside
            values = values.dequantize()
        for some in values.detach().reshape(-1).split(_PART):  # in parts, since each is copied to the CPU
            digest.update(some.view(torch.uint8).cpu().numpy().data)
    return digest.digest()


def _flat(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The name and the tensor itself, or those of the inner tensors of a tensor subclass (quantized, sharded)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    inner, _ = tensor.__tensor_flatten__()
    for part in inner:
        yield from _flat(f"{name}.{part}", getattr(tensor, part))


def code_digest(method: type[Method]) -> str | None:
    """A digest of the code that computes responses: this package's, and the modules of a method from elsewhere.

    Returns:
        None if the method's code is in no file, for example because it was typed into an interpreter.
    """
    try:
        theirs = {inspect.getsourcefile(cls) for cls in method.__mro__ if _from_elsewhere(cls)}
        files = [*sorted(_PACKAGE.rglob("*.py")), *sorted(Path(str(file)) for file in theirs)]
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    except (OSError, TypeError):
        return None


def _from_elsewhere(cls: type) -> bool:
    """Whether a class is defined neither in this package nor in Python's standard library."""
    package = cls.__module__.partition(".")[0]
    return package == "__main__" or package not in ("lm_eval_icl", *sys.stdlib_module_names)
