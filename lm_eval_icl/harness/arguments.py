"""The arguments of a model: its method's, those of all models of this package, and the others, which go to `hf`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lm_eval.utils import simple_parse_args_string

from lm_eval_icl import methods
from lm_eval_icl.declared import Arguments, NotNegative, Positive, arguments_of
from lm_eval_icl.errors import InputError, did_you_mean

if TYPE_CHECKING:  # methods import torch, which takes seconds, and a refusal should not
    from lm_eval_icl.methods.base import Method

# Arguments of `hf` -> the value that has no effect here (None: every value without parallelize=True), and why.
_IDLE = {
    "truncation": (True, "overflow=drop leaves out whole demonstrations"),
    "logits_cache": (False, "equal queries always run once"),
    "use_fast_tokenizer": (False, "the parts of a prompt are found with a fast tokenizer"),
    **dict.fromkeys(
        ("device_map", "max_memory_per_gpu", "offload_folder"),
        (None, "it belongs to parallelize=True"),
    ),
}


@dataclass(frozen=True)
class CommonArguments(Arguments):
    """The arguments that every model takes besides those of its method and of `hf`.

    Args:
        pack_tokens: how many tokens of queries and options, and of contexts that run side by side, share one forward
            pass that scores log-likelihoods.
        store_bytes: how many bytes of keys and values are stored for contexts that occur again; 0 stores none. None:
            half of the memory that is free on the device when the model is loaded.
        overflow: what is done if a prompt does not fit the model's positions: "drop" leaves out as few whole
            demonstrations as needed (`methods.limits.PromptLimits.leaves_out`), and if the prompt does not fit without
            any, keeps its last tokens, as `hf` does; "error" refuses the run.
        canonical_order: encode a set of demonstrations in one order, sorted by their texts, whatever order they are
            given in, so that, on a CPU, their order changes no bit of a result. None to do so if the method does not
            depend on the order. Under other methods, such as `icl`, True is a control: it makes them order-invariant.
        plain: compute every request alone, by the definition of the method, with none of the optimizations: slowly, to
            compare with (`methods.plain`).

    Raises:
        InputError: an argument is outside its range.
    """

    pack_tokens: Positive = 1024
    store_bytes: NotNegative | None = None
    overflow: Literal["drop", "error"] = "drop"
    canonical_order: bool | None = None
    plain: bool = False

    def is_canonical(self, method: Method) -> bool:
        """Whether demonstrations are encoded in canonical order."""
        return method.invariant if self.canonical_order is None else self.canonical_order


def read_arguments(
    cls: type[Method], arguments: Mapping[str, Any]
) -> tuple[Method, CommonArguments, dict[str, Any]]:
    """The method, the common arguments, and the arguments that are passed to `hf`.

    Raises:
        InputError: an argument of the method or of all models is outside its range, or misspelt.
    """
    method_names = methods.arguments_of(cls)
    shared_names = arguments_of(CommonArguments).keys() - method_names
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    forwarded: dict[str, Any] = {}
    for name, value in arguments.items():
        kind = shared if name in shared_names else own if name in method_names else forwarded
        kind[name] = value
    common = CommonArguments(**shared)
    method = cls.from_arguments(own)
    for name, value in forwarded.items():
        idle, why = _IDLE.get(name, (..., ""))
        if value is idle or (idle is None and not forwarded.get("parallelize")):
            raise InputError(
                f"model argument {name}={value}: has no effect here ({why}): leave it out."
            )
        owners = methods.owners_of(name)
        if owners:
            raise InputError(f"model argument {name!r} belongs to {owners}, not to this method.")
        # All other unknown names go to transformers, which refuses the names that no model has.
        near = did_you_mean(name, method_names | shared_names, cutoff=0.7)
        if near and not _is_hf_argument(name):
            raise InputError(f"unknown model argument {name!r}: {near}")
    return method, common, forwarded


def _is_hf_argument(name: str) -> bool:
    from lm_eval.models.huggingface import HFLM

    return name in inspect.signature(HFLM.__init__).parameters


def check_folder(include: str | None) -> None:
    """Refuse a folder of tasks that does not exist, which lm-eval would ignore."""
    if include is not None and not Path(include).is_dir():
        raise InputError(f"--include_path {include}: no such folder.")


def pairs(option: str, written: Any) -> dict[str, Any]:
    """Arguments given as K=V,K=V, as JSON, or as a dictionary from a file. Anything else is an `InputError`."""
    if isinstance(written, Mapping):
        return dict(written)
    try:
        arguments = (
            json.loads(written)
            if str(written).lstrip().startswith("{")
            else simple_parse_args_string(written)
        )
    except ValueError as error:
        raise InputError(f"--{option} {written}: must be K=V,K=V,... ({error}).") from error
    return dict(arguments)
