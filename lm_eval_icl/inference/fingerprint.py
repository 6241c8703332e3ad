"""Digests of a model, by contents: of its weights, its tokenizer and its files. The contents of a path can change."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lm_eval_icl.errors import InputError, log

# How many elements of a tensor are hashed at a time.
_PART = 2**24
# How many bytes of a file are hashed at a time, and by one thread.
_BYTES, _BYTES_OF_THREAD = 2**20, 2**26
# The files of a checkpoint's folder that are its weights, its adapter, its configuration, its code and its tokenizer;
# not what a trainer leaves beside them. Of GGUF files, a folder may have many: the one that is loaded counts.
_MODEL_FILES = re.compile(
    r".*\.(safetensors|safetensors\.index\.json|bin\.index\.json|py|model|tiktoken|jinja)"
    r"|(?!training_args|optimizer|scheduler|sampler|random_states).*\.bin"
    r"|((generation_|adapter_|quantize_|quantization_)?config|tokenizer|tokenizer_config|special_tokens_map"
    r"|added_tokens|vocab)\.json|(vocab|merges)\.txt"
)


def fingerprint(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Digests of a model's weights and tokenizer, and the settings of its configuration, by name.

    All bytes of all weights are hashed (docs/resuming.md says how long this takes), so that every training step, merge,
    adapter or exchange of two rows is noticed. The versions of transformers and torch are left out: they change results
    by no more than rounding, and otherwise every upgrade would make the cache useless.

    Raises:
        InputError: the model's weights cannot be read.
    """
    facts = {"weights": weights_digest(model)}
    if type(model).__module__.startswith("transformers_modules."):  # code that came with the checkpoint
        source = inspect.getsource(sys.modules[type(model).__module__])
        facts["checkpoint.code"] = hashlib.sha256(source.encode()).hexdigest()[:16]
    for name in ("config", "generation_config"):
        if (settings := getattr(model, name, None)) is not None:
            facts |= {f"{name}.{k}": v for k, v in settings.to_diff_dict().items()}
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        facts |= {f"peft.{name}.{k}": v for k, v in adapter.to_dict().items()}
    # The checkpoint's path, and the version of transformers that wrote it, are left out.
    facts = {k: _plain(v) for k, v in facts.items() if not k.endswith(("version", "_name_or_path"))}
    return facts | {"tokenizer": _tokenizer(tokenizer)}


def _plain(value: Any) -> Any:
    """The value as JSON reads it back. Sets, which have no order, are sorted."""
    return json.loads(json.dumps(value, default=lambda v: sorted(map(str, v)) if isinstance(v, set) else str(v)))


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for padding in ("padding", "truncation"):  # every call of the tokenizer changes them
        backend.pop(padding, None)
    # The chat template is left out, since its effect shows in the prompts.
    facts = [type(tokenizer).__name__, backend, tokenizer.special_tokens_map]
    facts.append(getattr(tokenizer, "clean_up_tokenization_spaces", None))  # changes how generated ids are decoded
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


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
        for inner_hook in getattr(hook, "hooks", [hook]):
            if (elsewhere := getattr(inner_hook, "weights_map", None)) is not None:
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
        for piece in values.detach().reshape(-1).split(_PART):  # in parts, since each is copied to the CPU
            digest.update(piece.view(torch.uint8).cpu().numpy().data)
    return digest.digest()


def _flat(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The name and the tensor itself, or those of the inner tensors of a tensor subclass (quantized, sharded)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    inner, _ = tensor.__tensor_flatten__()
    for part in inner:
        yield from _flat(f"{name}.{part}", getattr(tensor, part))


def files_digest(
    pretrained: Any,
    *,
    subfolder: str = "",
    gguf_file: str | None = None,
    tokenizer: Any = None,
    peft: Any = None,
    delta: Any = None,
    **_: Any,
) -> str | None:
    """A digest of the local files that a model of lm-eval's `hf` is made of: their names and all of their bytes.

    It is of files, not of weights in memory, so that nothing is copied back from a device.

    Args:
        pretrained: this and the others are arguments of `HFLM`; further ones do not say which files there are.

    Returns:
        None if there is no such file here (a model of the Hub, or one made in Python), or one cannot be read.
    """
    places = {"pretrained": pretrained, "tokenizer": tokenizer, "peft": peft, "delta": delta}
    files_by_role: list[tuple[str, Path]] = []
    try:
        for role, place in places.items():
            if isinstance(place, str) and Path(place).is_dir():
                folder = Path(place, subfolder) if role in ("pretrained", "tokenizer") else Path(place)
                files = sorted(
                    file for file in folder.iterdir() if _MODEL_FILES.fullmatch(file.name) and file.is_file()
                )
                if gguf_file and role == "pretrained":
                    files.append(folder / gguf_file)
                files_by_role += [(role, path) for path in files]
        parts = [
            (f"{role} {path.name} {size}", path, start)
            for role, path in files_by_role
            for size in [path.stat().st_size]
            for start in range(0, max(size, 1), _BYTES_OF_THREAD)
        ]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(lambda part: _digest_of_part(*part), parts))
    except OSError as error:
        log.warning("%s: no digest of the model's files is recorded (%s).", pretrained, error)
        return None
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16] if digests else None


def _digest_of_part(name: str, path: Path, start: int) -> bytes:
    digest = hashlib.sha256(f"{name} {start}".encode())
    with path.open("rb") as file:
        file.seek(start)
        remaining = _BYTES_OF_THREAD
        while remaining and (data := file.read(min(remaining, _BYTES))):
            digest.update(data)
            remaining -= len(data)
    return digest.digest()
