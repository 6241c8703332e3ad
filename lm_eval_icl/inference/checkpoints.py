"""Loads checkpoints of transformers, and says in one line why a checkpoint cannot be used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from lm_eval_icl.errors import InputError, log, refusing

# The arguments of --model_args that `load_model` takes.
_TOKENIZER_ARGUMENTS = ("revision", "subfolder", "trust_remote_code")
_MODEL_ARGUMENTS = (*_TOKENIZER_ARGUMENTS, "attn_implementation")
ARGUMENTS = {"pretrained", "tokenizer", "dtype", "max_length", "add_bos_token", *_MODEL_ARGUMENTS}


def load_model(arguments: Mapping[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer. The weights are in float32, unless `dtype` says otherwise.

    Args:
        arguments: values for some of `ARGUMENTS`; `pretrained` is required.

    Raises:
        InputError: the model or the tokenizer cannot be loaded.
    """
    pretrained = str(arguments["pretrained"])
    for_model = {name: arguments[name] for name in _MODEL_ARGUMENTS if name in arguments}
    for_tokenizer = {name: arguments[name] for name in _TOKENIZER_ARGUMENTS if name in arguments}
    with refusing(f"pretrained={pretrained!r}: the model cannot be loaded"):
        config = AutoConfig.from_pretrained(pretrained, **for_tokenizer)
        if getattr(config, "is_encoder_decoder", False):
            raise InputError(
                f"pretrained={pretrained!r}: {config.model_type!r} is an encoder-decoder model; "
                "these methods are defined for decoders (causal language models) only."
            )
        refuse_vision(pretrained, config)
        dtype = arguments.get("dtype", "float32")
        model = WholeCheckpoints.from_pretrained(pretrained, dtype=dtype, **for_model)
    where = str(arguments.get("tokenizer", pretrained))
    with refusing(f"tokenizer={where!r}: the tokenizer cannot be loaded"):
        tokenizer: Any = AutoTokenizer.from_pretrained(where, **for_tokenizer)
    if tokenizer.chat_template and os.environ.get("RANK", "0") == "0":
        log.warning(
            "%s has a chat template, which is not applied here: prompts are those of an evaluation "
            "without --apply_chat_template.",
            where,
        )
    return model, tokenizer


def refuse_vision(pretrained: str, config: transformers.PreTrainedConfig) -> None:
    """Refuse a model of images with text that transformers does not know as a language model.

    Raises:
        InputError: it is such a model.
    """
    kind = type(config)
    own_code = getattr(config, "auto_map", None) or {}
    is_language_model = kind in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not is_language_model:
        raise InputError(
            f"pretrained={pretrained!r}: {config.model_type!r} is a vision model (images and "
            "text), and these methods are defined for causal language models only: give the "
            "checkpoint of its language model alone, which is often the one that it was trained "
            "from. lm-eval's --model hf-multimodal runs the vision model."
        )


class WholeCheckpoints:
    """`AutoModelForCausalLM` that refuses checkpoints with missing weights.

    transformers would initialize these weights at random.
    """

    @staticmethod
    def from_pretrained(pretrained: str, **kwargs: Any) -> transformers.PreTrainedModel:
        kwargs["output_loading_info"] = True
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(pretrained, **kwargs)
        model, report = loaded
        missing = sorted(report["missing_keys"])
        if missing:
            names = [*missing[:3], "..."] if len(missing) > 3 else missing
            raise InputError(
                f"pretrained={pretrained!r}: {len(missing)} of the weights of "
                f"{type(model).__name__} are not in the checkpoint ({', '.join(names)}), and "
                "random weights would replace them: is it the checkpoint of another kind of "
                "model, or incomplete?"
            )
        return model
