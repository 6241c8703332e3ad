"""Tiny random models of transformers' model types, made from their default configurations by one
rule: sizes are small, windows are shorter than a prompt, and there is one layer of each kind that
the default configuration has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from lm_eval_icl.errors import InputError, did_you_mean, one_line
from lm_eval_icl.smoke.demo import model_path

# How many tokens a token sees in a layer with a sliding window, or with attention in chunks.
WINDOW = 72
# How many positions a model has: more than any prompt.
POSITIONS = 2048

# The sizes, with all names of the fields that get them, in transformers' configurations of models
# and parts of models. There are more heads than key-value heads, which thus have to be repeated. A
# router chooses one of two groups of experts, and two of the group's four experts. The keys of
# latent attention (4 + 8) are wider than its values. The indexer of sparse attention chooses fewer
# tokens than a prompt has. Chunks of states are shorter than a prompt.
_NAMES: dict[int, str] = {
    1: "topk_group num_dense_layers first_k_dense_replace",
    2: """
        num_key_value_heads num_hidden_layers encoder_layers decoder_layers depth num_global_layers
        linear_num_key_heads num_experts_per_tok top_k_experts moe_topk moe_k n_group""",
    4: """
        num_attention_heads encoder_attention_heads decoder_attention_heads num_heads rotary_dim
        qk_nope_head_dim linear_num_value_heads linear_num_heads time_step_rank""",
    8: """
        head_dim dim_head d_head attention_head_size num_experts num_local_experts n_routed_experts
        moe_num_experts qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim
        linear_head_dim state_size ssm_state_size mamba_d_state mamba_n_heads mamba_num_heads
        mamba_d_head mamba_head_dim hidden_size_per_layer_input laurel_rank""",
    16: """
        moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size q_lora_rank
        kv_lora_rank moe_shared_expert_intermediate_size shared_experts_intermediate_size
        o_lora_rank index_n_heads index_head_dim index_topk chunk_size mamba_chunk_size""",
    32: """
        hidden_size hidden_size_global embedding_size input_embedding_size output_embedding_size
        word_embed_proj_dim""",
    48: """
        intermediate_size intermediate_size_mlp dense_intermediate_size feed_forward_size mlp_dim
        dim_ff dff d_inner ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size""",
    WINDOW: "sliding_window attention_chunk_size window_size",
    POSITIONS: "max_position_embeddings n_ctx",
}
SMALL: dict[str, Any] = {}
for _size, _names in _NAMES.items():
    SMALL |= dict.fromkeys(_names.split(), _size)
SMALL["attention_types"] = [[["global", "local"], 1]]  # GPT-Neo's kinds of layers
# These fields stay unset if a type's default configuration does not set them.
_IF_ANY = {"sliding_window", "attention_chunk_size"}
# Token 0 begins and ends texts, and token 1 pads them.
_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")
# The fields that name the kind of each layer. A tiny model has one layer of each kind that is in
# the default.
_KINDS = ("layer_types", "mlp_layer_types")


# Model type -> further settings of its tiny models.
SpecialSettings = Mapping[str, Mapping[str, Any]]
NOTHING_SPECIAL: SpecialSettings = {}


class NoTinyModel(InputError):
    """No tiny model of a type can be tested; `why` is the reason."""

    def __init__(self, arch: str, why: str) -> None:
        super().__init__(f"no tiny model of {arch!r}: {why}.")
        self.why = why


def types() -> tuple[str, ...]:
    """The model types of the installed transformers that have a causal language model."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_encoder_decoder(arch: str) -> bool:
    """Whether lm-eval runs models of a type as encoder-decoder models."""
    return arch in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES


def check(arch: str) -> None:
    """Raise `NoTinyModel` if transformers has no causal language model of a type."""
    if is_encoder_decoder(arch) and arch not in types():
        raise NoTinyModel(
            arch, "it is an encoder-decoder model, and the methods are defined for decoders only"
        )
    if arch in CONFIG_MAPPING and arch not in types():
        raise NoTinyModel(arch, "transformers has no causal language model of this type")
    if arch not in types():
        why = "transformers has no such model type"
        near = did_you_mean(arch, types())
        if near:
            why += f" ({near})"
        raise NoTinyModel(arch, why)


def save(arch: str, folder: Path, special: SpecialSettings = NOTHING_SPECIAL) -> None:
    """Write the tiny random model that `build` makes, with the demonstration model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    build(arch, len(tokenizer), special).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build(
    arch: str, vocabulary: int = 1329, special: SpecialSettings = NOTHING_SPECIAL
) -> PreTrainedModel:
    """A tiny random model of a type.

    Args:
        arch: the model type.
        vocabulary: how many tokens it knows. Token 0 begins and ends texts, and token 1 pads them.
        special: further settings, by the model type of the model or of a part of it.

    Raises:
        NoTinyModel: no such model can be made.
    """
    check(arch)
    try:
        config = configuration(arch, vocabulary, special)
        auto_class: Any = AutoModelForCausalLM
        # Published checkpoints of some types hold this model, which is larger than the causal
        # language model.
        if type(config) in AutoModelForImageTextToText._model_mapping:
            auto_class = AutoModelForImageTextToText
        torch.manual_seed(0)
        model: PreTrainedModel = auto_class.from_config(config)
    except Exception as error:
        raise NoTinyModel(arch, one_line(error).split(". ")[0][:200]) from error
    spread(model)
    return model.eval()


def configuration(
    arch: str, vocabulary: int, special: SpecialSettings = NOTHING_SPECIAL, **settings: Any
) -> PreTrainedConfig:
    """The configuration of a tiny model of a type; `settings` replace the settings that it would
    have by itself."""
    special = {**special, arch: {**special.get(arch, {}), **settings}}
    return AutoConfig.for_model(arch, **_settings(AutoConfig.for_model(arch), vocabulary, special))


def _settings(
    default: PreTrainedConfig, vocabulary: int, special: SpecialSettings
) -> dict[str, Any]:
    """The settings of a tiny model, or a part of one, that differ from its type's default
    configuration."""
    fields = {field.name for field in dataclasses.fields(default)}

    def field(name: str) -> str:
        """The name that this configuration has for the field that is usually called `name`."""
        return name if name in fields else default.attribute_map.get(name, name)

    further = {field(name): value for name, value in special.get(default.model_type, {}).items()}
    small = {field(name): value for name, value in {**SMALL, **_TOKENS}.items()}
    small |= dict.fromkeys(map(field, _VOCABULARIES), vocabulary)
    without = {name for name in _IF_ANY & fields if getattr(default, name) is None}
    settings = {name: value for name, value in small.items() if name in fields - without} | further
    if "kv_lora_rank" in fields:  # latent attention has keys and values for every head
        settings["num_key_value_heads"] = settings["num_attention_heads"]

    kinds = {}
    for name in map(field, _KINDS):
        if name in fields:
            values = further.get(name) or list(dict.fromkeys(getattr(default, name) or ()))
            if values:
                kinds[name] = values
    if kinds:
        depth = field("num_hidden_layers")
        layers = max(settings.get(depth, 0), *map(len, kinds.values()))
        for name, values in kinds.items():
            settings[name] = (values + [values[-1]] * layers)[:layers]
        if depth in fields:
            settings[depth] = layers

    for name in default.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            kind = {"model_type": part.model_type} if part.model_type else {}
            part_settings = _settings(part, vocabulary, special)
            settings[name] = {**kind, **part_settings, **further.get(name, {})}
    return settings


def spread(model: PreTrainedModel) -> None:
    """Change random weights in place, so that every weight has an effect that a log-likelihood
    shows.

    Freshly initialized weights are so small that all tokens are nearly alike, and biases, gates and
    the like have no effect, since they are 0 or 1.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            deviation = float(parameter.std()) if parameter.numel() > 1 else 0.0
            if deviation == 0:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            # Parameters whose mean is large, such as a decay rate, stay as they are.
            elif parameter.dim() > 1 and parameter.mean().abs() < deviation:
                parameter.mul_(max(1, 0.3 / deviation))
