"""The arguments of a model: its method's, those that all models have in common, and those of lm-eval's `hf`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.utils import simple_parse_args_string

from lm_eval_icl import methods
from lm_eval_icl.decisions import how as deciding_how
from lm_eval_icl.demonstrations import how
from lm_eval_icl.errors import InputError, checked_whole

if TYPE_CHECKING:  # transformers and torch take seconds to import, and a refusal should not
    import transformers

    from lm_eval_icl.methods.base import Method

OVERFLOW = ("drop", "error")


@dataclass(frozen=True)
class CommonArguments:
    """The arguments that every model takes besides those of its method and of `hf`.

    Args:
        pack_tokens: how many tokens of queries and options, and of contexts that run side by side, share one forward
            pass that scores log-likelihoods.
        store_bytes: how many bytes of keys and values are stored for contexts that occur again.
        overflow: what is done if a prompt does not fit the model's positions: "drop" leaves out as few whole
            demonstrations as it takes (`methods.limits.PromptLimits.leaves_out`), and if it does not fit without any,
            keeps the last tokens of the prompt, as `hf` does; "error" refuses the run.
        canonical_order: encode a set of demonstrations in one order, whatever order they are given in, so that their
            order changes no bit of a result. None to do so if the method does not depend on the order.

    Raises:
        InputError: an argument is outside its range.
    """

    pack_tokens: int = 1024
    store_bytes: int = 2**31
    overflow: str = "drop"
    canonical_order: bool | None = None

    def __post_init__(self) -> None:
        for name in ("pack_tokens", "store_bytes"):
            object.__setattr__(self, name, checked_whole(name, getattr(self, name)))
        if self.overflow not in OVERFLOW:
            raise InputError(f"overflow={self.overflow!r}: must be {' or '.join(OVERFLOW)}.")
        if self.canonical_order is not None and not isinstance(self.canonical_order, bool):
            raise InputError(f"canonical_order={self.canonical_order!r}: must be True or False.")

    def is_canonical(self, method: Method) -> bool:
        """Whether demonstrations are encoded in canonical order.

        Raises:
            InputError: `canonical_order` is True, but the method depends on the order.
        """
        if self.canonical_order and not method.invariant:
            raise InputError(
                f"canonical_order=True: {method.name} depends on the order of its demonstrations with these arguments, "
                "and one order for all would hide it."
            )
        return method.invariant if self.canonical_order is None else self.canonical_order


def read_arguments(cls: type[Method], arguments: Mapping[str, Any]) -> tuple[Method, CommonArguments, dict[str, Any]]:
    """The method, the common arguments, and the arguments that are passed to `hf`, checked as far as can be done
    without a checkpoint.

    Raises:
        InputError: an argument is outside its range, has no effect, or names a folder that is not there.
    """
    from lm_eval_icl.harness.hf_arguments import check_effects, check_values

    own, ours = methods.arguments_of(cls), {field.name for field in dataclasses.fields(CommonArguments)}
    if "method" in own:
        raise InputError(
            f"{cls.__name__}: results files have its name under 'method': rename its argument of that name."
        )
    common = CommonArguments(**{name: value for name, value in arguments.items() if name in ours - own})
    method = cls.from_arguments({name: value for name, value in arguments.items() if name in own})
    common.is_canonical(method)
    forwarded = {name: value for name, value in arguments.items() if name not in own | ours}
    check_values(forwarded)
    check_effects(forwarded)
    return method, common, forwarded


def checked_first(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper of `EvaluatorConfig.process_tasks`, which reads thousands of files: check the model arguments first.

    Raises:
        InputError: as for `read_arguments`; or an argument is given that `lm_eval` has an option for; or a folder is
            not there, or cannot be written.
    """
    if methods.is_ours(config.model):
        check_folders(config.include_path, config.output_path)
        options = {name: getattr(config, name) for name in ("batch_size", "max_batch_size", "device")}
        options = {name: value for name, value in options.items() if value is not None}
        if twice := sorted(options.keys() & config.model_args.keys()):
            raise InputError(f"model argument {twice[0]!r}: lm-eval has an option for it: give --{twice[0]} instead.")
        read_arguments(methods.find(config.model), {**config.model_args, **options})
        if (drawn_by := (config.metadata or {}).get("demonstrations")) is not None:
            how.read(drawn_by)
        if (rules := (config.metadata or {}).get("decide")) is not None:
            deciding_how.read(rules)
        if config.device == "cuda:0":  # the default, which stands for the CPU where there is no GPU; it is recorded
            import torch

            config.device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return original(config, *args, **kwargs)


def check_folders(include: object, output: str | None) -> None:
    """Refuse a folder of tasks that lm-eval would ignore, and one of results that it could not write after the run."""
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
            raise InputError(f"--output_path {output}: the results could not be saved there ({why}).") from error


# Arguments that transformers' `from_pretrained` takes, but that are not in its signature.
_FROM_PRETRAINED = set(
    "adapter_kwargs adapter_name attn_implementation commit_hash device_map device_mesh disable_mmap "
    "distributed_config dtype experts_implementation generation_config gguf_file key_mapping kernel_config "
    "load_in_4bit load_in_8bit low_cpu_mem_usage max_memory offload_buffers offload_folder offload_state_dict "
    "output_loading_info proxies quantization_config state_dict torch_dtype tp_size use_kernels variant".split()
)


def check_names(
    names: Collection[str], method: type[Method], config: transformers.PreTrainedConfig, any_name: bool
) -> None:
    """Refuse an argument that neither this package, nor `hf`, nor `from_pretrained` knows.

    Args:
        names: the names of the arguments that would be passed to `hf`.
        method: the method, whose arguments are known.
        config: the checkpoint's configuration, whose attributes `from_pretrained` takes as arguments.
        any_name: the checkpoint comes with code that may take any argument, so an unknown one is refused only if it is
            similar to an argument of this package.
    """
    import transformers
    from lm_eval.models.huggingface import HFLM

    ours = {field.name for field in dataclasses.fields(CommonArguments)} | methods.arguments_of(method) | {"pretrained"}
    arguments_of = {name: methods.arguments_of(methods.find(name)) for name in methods.NAMES}
    known = {*ours, *_FROM_PRETRAINED, *config.to_dict(), *config.attribute_map}
    for function in (
        HFLM.__init__,
        transformers.PreTrainedModel.from_pretrained,
        transformers.BitsAndBytesConfig.__init__,
    ):
        known |= set(inspect.signature(function).parameters) - {"self", "cls", "kwargs", "model_args"}
    for name in sorted(set(names) - known):
        if owners := [owner for owner, arguments in arguments_of.items() if name in arguments]:
            raise InputError(f"model argument {name!r} belongs to {' and '.join(owners)}, not to this method.")
        near = [other for other in sorted(known) if other.lower() == name.lower()]  # T, written t
        near = near or difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
        if any_name and not difflib.get_close_matches(name, ours, cutoff=0.8):
            continue
        raise InputError(
            f"unknown model argument {name!r}"
            + (f": did you mean {near[0]!r}?" if near else f": there are {', '.join(sorted(ours))}, and those of hf.")
        )


def pairs(option: str, written: Any) -> dict[str, Any]:
    """Arguments given as K=V,K=V, as JSON, or as a dictionary from a file; anything else is refused."""
    if isinstance(written, Mapping):
        return dict(written)
    try:
        arguments = json.loads(written) if str(written).lstrip().startswith("{") else simple_parse_args_string(written)
    except ValueError as error:
        raise InputError(f"--{option} {written}: must be K=V,K=V,... ({error}).") from error
    return dict(arguments)
