"""Which model arguments there are, and which were misspelt."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection

import transformers
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.errors import InputError

# What transformers' `from_pretrained` takes without naming it in its signature.
_FROM_PRETRAINED = set(
    "adapter_kwargs adapter_name attn_implementation commit_hash device_map device_mesh disable_mmap "
    "distributed_config dtype experts_implementation generation_config gguf_file key_mapping kernel_config "
    "load_in_4bit load_in_8bit low_cpu_mem_usage max_memory offload_buffers offload_folder offload_state_dict "
    "output_loading_info proxies quantization_config state_dict torch_dtype tp_size use_kernels variant".split()
)


def check_names(
    given: Collection[str],
    ours: Collection[str],
    others: dict[str, str],
    config: transformers.PreTrainedConfig,
    any_name: bool,
) -> None:
    """Refuse a name that neither we, nor `hf`, nor `from_pretrained` know.

    Args:
        given: the names that would be forwarded to `hf`.
        ours: the names that this model takes itself.
        others: names that another method takes, and which.
        config: the checkpoint's; `from_pretrained` takes its attributes as arguments.
        any_name: the checkpoint has code of its own, which may take any argument: only what is close to one of
            ours is refused.

    Raises:
        InputError: names the first unknown one, and the nearest known.
    """
    known = {*ours, *_FROM_PRETRAINED, *config.to_dict(), *config.attribute_map}
    for function in (
        HFLM.__init__,
        transformers.PreTrainedModel.from_pretrained,
        transformers.BitsAndBytesConfig.__init__,
    ):
        known |= set(inspect.signature(function).parameters) - {"self", "cls", "kwargs", "model_args"}
    for name in sorted(set(given) - known):
        if name in others:
            raise InputError(f"lm-eval-icl: model argument {name!r} belongs to {others[name]}, not to this method.")
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
        if any_name and not difflib.get_close_matches(name, ours, cutoff=0.8):
            continue
        raise InputError(
            f"lm-eval-icl: unknown model argument {name!r}"
            + (f": did you mean {near[0]!r}?" if near else ": README lists the arguments.")
        )
