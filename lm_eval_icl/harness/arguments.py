"""The arguments of a model: its method's, those of all models of this package, and the others, which go to `hf`."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.registry import model_registry
from lm_eval.utils import simple_parse_args_string

from lm_eval_icl import methods
from lm_eval_icl.decisions import how as deciding_how
from lm_eval_icl.demonstrations import how, labels
from lm_eval_icl.errors import InputError, checked_whole, did_you_mean

if TYPE_CHECKING:  # methods import torch, which takes seconds, and a refusal should not
    from lm_eval_icl.methods.base import Method

OVERFLOW = ("drop", "error")
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
class CommonArguments:
    """The arguments that every model takes besides those of its method and of `hf`.

    Args:
        pack_tokens: how many tokens of queries and options, and of contexts that run side by side, share one forward
            pass that scores log-likelihoods.
        store_bytes: how many bytes of keys and values are stored for contexts that occur again; 0 stores none.
        overflow: what is done if a prompt does not fit the model's positions: "drop" leaves out as few whole
            demonstrations as needed (`methods.limits.PromptLimits.leaves_out`), and if the prompt does not fit without
            any, keeps its last tokens, as `hf` does; "error" refuses the run.
        canonical_order: encode a set of demonstrations in one order, sorted by their texts, whatever order they are
            given in, so that, on a CPU, their order changes no bit of a result. None to do so if the method does not
            depend on the order. Under other methods, such as `icl`, True is a control: it makes them order-invariant.

    Raises:
        InputError: an argument is outside its range.
    """

    pack_tokens: int = 1024
    store_bytes: int = 2**31
    overflow: str = "drop"
    canonical_order: bool | None = None

    def __post_init__(self) -> None:
        for name, least in (("pack_tokens", 1), ("store_bytes", 0)):
            object.__setattr__(self, name, checked_whole(name, getattr(self, name), least))
        if self.overflow not in OVERFLOW:
            raise InputError(f"overflow={self.overflow!r}: must be {' or '.join(OVERFLOW)}.")
        if self.canonical_order is not None and not isinstance(self.canonical_order, bool):
            raise InputError(f"canonical_order={self.canonical_order!r}: must be True or False.")

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
    method_names, shared_names = (
        methods.arguments_of(cls),
        {f.name for f in dataclasses.fields(CommonArguments)},
    )
    common = CommonArguments(
        **{key: value for key, value in arguments.items() if key in shared_names - method_names}
    )
    method = cls.from_arguments(
        {name: value for name, value in arguments.items() if name in method_names}
    )
    forwarded = {
        name: value for name, value in arguments.items() if name not in method_names | shared_names
    }
    for name, value in forwarded.items():
        idle, why = _IDLE.get(name, ("", ""))
        if value is idle or (idle is None and not forwarded.get("parallelize")):
            raise InputError(
                f"model argument {name}={value}: has no effect here ({why}): leave it out."
            )
        if owners := [
            other for other in methods.NAMES if name in methods.arguments_of(methods.find(other))
        ]:
            raise InputError(
                f"model argument {name!r} belongs to {' and '.join(owners)}, not to this method."
            )
        # All other unknown names go to transformers, which refuses the names that no model has.
        near = difflib.get_close_matches(name, method_names | shared_names, n=1, cutoff=0.75)
        near = near or [*method_names & {name.upper()}]  # T, written t
        if near and not _is_hf_argument(name):
            raise InputError(f"unknown model argument {name!r}: did you mean {near[0]!r}?")
    return method, common, forwarded


def _is_hf_argument(name: str) -> bool:
    from lm_eval.models.huggingface import HFLM

    return name in inspect.signature(HFLM.__init__).parameters


def checked_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrapper of `EvaluatorConfig.from_cli`: check a model of ours before lm-eval reads thousands of files.

    Raises:
        InputError: there is no such model, its arguments are wrong, or a folder does not exist or cannot be written.
    """
    config = original(*args, **kwargs)
    name = str(config.model)
    if near := did_you_mean(name.lower(), methods.NAMES):  # other names are lm-eval's to refuse
        importlib.import_module("lm_eval.models")  # which registers lm-eval's models and ours
        if name not in model_registry and ":" not in name:
            raise InputError(f"--model: unknown model {name!r}: {near}")
    if config.model in methods.NAMES or ":" in config.model:
        check_folders(config.include_path, config.output_path)
        read_arguments(methods.find(config.model), config.model_args)
        for key, read in (
            ("demonstrations", how.read),
            ("decide", deciding_how.read),
            ("labels", labels.read),
        ):
            if (given := (config.metadata or {}).get(key)) is not None:
                read(given)
    return config


def check_folders(include: object, output: str | None) -> None:
    """Refuse a folder of tasks that does not exist, which lm-eval would ignore, and a folder of results that cannot be
    written, at which lm-eval would fail after the run."""
    if isinstance(include, str) and not Path(include).is_dir():
        raise InputError(f"--include_path {include}: no such folder.")
    if output is not None:
        folder = Path(output).absolute()
        folder = folder.parent if folder.suffix == ".json" else folder
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        try:
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            why = f"{existing}: {error.strerror}"
            raise InputError(
                f"--output_path {output}: the results could not be saved there ({why})."
            ) from error


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
