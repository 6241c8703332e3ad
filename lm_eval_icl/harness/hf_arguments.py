"""The arguments that are passed on to lm-eval's `HFLM`: checks before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lm_eval_icl.errors import InputError, is_whole

# Arguments that are switches. Any text would count as True, also for `trust_remote_code`.
_SWITCHES = (
    "trust_remote_code parallelize add_bos_token truncation logits_cache use_fast_tokenizer gptqmodel enable_thinking"
).split()
# Arguments that name a type of torch's, and which types they may name. (torch ignores autocast to any other.)
_FLOATING = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype) and value.is_floating_point}
_TYPES = {
    "dtype": ({"auto", *_FLOATING}, "auto or a floating-point type of torch's, such as bfloat16"),
    "softmax_dtype": (_FLOATING, "a floating-point type of torch's, such as float32"),
    "mixed_precision_dtype": ({"float16", "bfloat16"}, "float16 or bfloat16"),
}


def check_values(arguments: Mapping[str, Any]) -> None:
    """Refuse values that `HFLM` would refuse without naming the argument, misunderstand, or refuse only after the
    weights are loaded; and paths where no folder is."""
    for name in _SWITCHES:
        if not isinstance(arguments.get(name), bool | None):
            raise InputError(f"{name}={arguments[name]!r}: must be True or False.")
    for name, (types, must) in _TYPES.items():
        if arguments.get(name) is not None and str(arguments[name]).removeprefix("torch.") not in types:
            raise InputError(f"{name}={arguments[name]!r}: must be {must}.")
    for name in ("max_length", "max_batch_size"):
        value = arguments.get(name)
        if value is not None and not (isinstance(value, int) and is_whole(value) and value > 0):
            raise InputError(f"{name}={arguments[name]!r}: must be a whole number, 1 or more.")
    size = arguments.get("batch_size", 1)
    if isinstance(size, bool) or not re.fullmatch(r"auto(:\d+(\.\d+)?)?|0*[1-9]\d*", str(size)):
        raise InputError(f"batch_size={size!r}: must be a whole number, 1 or more, or auto.")
    if (backend := arguments.get("backend", "default")) not in ("default", "causal"):
        raise InputError(f"backend={backend!r}: must be causal: these methods are defined for decoders only.")
    if not arguments.get("gguf_file"):
        for name in ("pretrained", "tokenizer", "peft", "delta"):
            path = arguments.get(name)
            if not isinstance(path, str) or Path(path).is_dir():
                continue
            if Path(path).is_file():
                raise InputError(f"{name}={path!r}: a file: give the folder that it is in.")
            # transformers would take it for a name on the Hub, and say so.
            if path.startswith((".", "~", "/")) or path.endswith("/") or path.count("/") > 1:
                home = " (~ stands for nothing here: write the path in full)" if path.startswith("~") else ""
                raise InputError(f"{name}={path!r}: no checkpoint there (no such folder){home}.")


# Arguments of `hf` that have no effect here: the value that would have one in `hf`, and why it has none.
_NO_EFFECT = {
    "truncation": (True, "prompts that do not fit lose whole demonstrations before anything is cut (overflow=drop)"),
    "use_fast_tokenizer": (False, "the parts of a prompt are found with a fast tokenizer"),
    "logits_cache": (False, "queries that are equal always run once; leave it out"),
}
# Arguments that have an effect only together with another one.
_NEEDS = {
    "max_memory_per_gpu": ("parallelize", "True"),
    "max_cpu_memory": ("parallelize", "True"),
    "offload_folder": ("parallelize", "True"),
    "device_map": ("parallelize", "True"),
    "max_batch_size": ("batch_size", "auto"),
}


def check_effects(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that would silently have no effect."""
    for name, (refused, why) in _NO_EFFECT.items():
        if arguments.get(name) == refused:
            raise InputError(f"model argument {name}={refused} has no effect here: {why}.")
    for name, (other, needed) in _NEEDS.items():
        if arguments.get(name) is not None and not str(arguments.get(other)).startswith(needed):
            raise InputError(
                f"model argument {name}={arguments[name]!r} has an effect only with {other}={needed}: give that too, "
                "or leave it out."
            )
