"""Tiny random models of transformers' model types, each with what is special about its type.

A tiny model has a layer of every kind that published models of its type have, several experts, windows that are shorter
than the prompts it is tested with, and so on. Apart from that it is as small as it can be.
"""

from __future__ import annotations

import dataclasses
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

# How many tokens a layer with a sliding window, or with attention in chunks, sees.
WINDOW = 72
# How many positions a model has: more than any prompt.
POSITIONS = 2048

# The sizes, under all the names that transformers' configurations have for them; and for parts of a model too.
SMALL: dict[str, Any] = {
    name: size
    for size, names in [
        # Widths. Heads are more than key-value heads, so that these have to be repeated.
        (32, "hidden_size hidden_size_global embedding_size input_embedding_size output_embedding_size"),
        (32, "word_embed_proj_dim"),
        (48, "intermediate_size intermediate_size_mlp dense_intermediate_size feed_forward_size mlp_dim"),
        (48, "ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dim_ff dff d_inner"),
        (8, "head_dim dim_head d_head attention_head_size"),
        (4, "num_attention_heads encoder_attention_heads decoder_attention_heads num_heads rotary_dim"),
        (2, "num_key_value_heads"),
        # Depth.
        (2, "num_hidden_layers encoder_layers decoder_layers depth num_global_layers"),
        # Positions and windows.
        (POSITIONS, "max_position_embeddings n_ctx"),
        (WINDOW, "sliding_window attention_chunk_size window_size"),
        # Experts: a router chooses one group of two, and in it two experts of four. The first layer has none.
        (8, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok top_k_experts moe_topk moe_k n_group"),
        (1, "topk_group num_dense_layers first_k_dense_replace"),
        (16, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"),
        (16, "moe_shared_expert_intermediate_size shared_experts_intermediate_size"),
        # Latent attention: keys (4 + 8) are wider than values.
        (16, "q_lora_rank kv_lora_rank o_lora_rank"),
        (8, "qk_rope_head_dim v_head_dim"),
        (4, "qk_nope_head_dim"),
        # Sparse attention: an indexer chooses fewer tokens than a prompt has. With few heads, the scores of many tokens
        # would be 0, and which of them are chosen is left to chance.
        (16, "index_n_heads index_head_dim index_topk"),
        # Linear attention.
        (2, "linear_num_key_heads"),
        (4, "linear_num_value_heads linear_num_heads"),
        (8, "linear_key_head_dim linear_value_head_dim linear_head_dim"),
        # State spaces, computed in chunks shorter than a prompt. Heads times their width is twice the model's width.
        (8, "state_size ssm_state_size mamba_d_state mamba_n_heads mamba_num_heads mamba_d_head mamba_head_dim"),
        (16, "chunk_size mamba_chunk_size"),
        (4, "time_step_rank"),
        # Gemma's additions to every layer.
        (8, "hidden_size_per_layer_input laurel_rank"),
    ]
    for name in names.split()
}
# Settings that are made only where a type's default configuration has some.
_IF_ANY = {"sliding_window", "attention_chunk_size"}
# Token 0 begins and ends texts, and token 1 pads them.
_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")
# The fields that name the kind of each layer. A tiny model has one layer of each kind that is in the default.
_KINDS = ("layer_types", "mlp_layer_types")

_WINDOWED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW}
_INKLING2 = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "rel_extent": 32,
    "log_scaling_n_floor": 16,
    "n_layers_per_attn_res_block": 1,
}
_MAMBA_AND_HYBRID = {"layer_types": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4}

# Further settings of single types, parts of models included.
TYPES: dict[str, dict[str, Any]] = {
    # The default configuration has layers of one kind, published models have several.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
        "index_block_size": 8,  # it chooses 2 of the 15 blocks of a prompt
        "index_topk_blocks": 2,
    },
    "laguna": _WINDOWED,
    "mellum": _WINDOWED,
    "qwen2": {**_WINDOWED, "use_sliding_window": True},
    "qwen2_moe": {**_WINDOWED, "use_sliding_window": True},
    "qwen3": {**_WINDOWED, "use_sliding_window": True},
    "dots1": {**_WINDOWED, "n_shared_experts": 1},
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": WINDOW,
        "num_experts_per_tok": 1,  # no other number is allowed
        "router_hidden_size": 16,
    },
    "cohere_compass_text": {
        **_WINDOWED,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "full_attention": None,  # no positions
        },
    },
    # All layers have a window, which the default configuration leaves out.
    "phi3": {"sliding_window": WINDOW},
    "qwen3_moe": {"sliding_window": WINDOW, "use_sliding_window": True},
    "starcoder2": {"sliding_window": WINDOW},
    # The kinds of layers follow from numbers.
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "modernbert-decoder": {"local_attention": 2 * WINDOW},  # half of it to the left
    "recurrent_gemma": {"num_hidden_layers": 3},
    "smollm3": {"no_rope_layers": [1, 0]},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
        "floor_scale": WINDOW,  # from here on, attention without rotary positions depends on the number of the token
    },
    # Layers that use the keys and values of an earlier layer of their kind, or a transformer block that is used twice.
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "global_head_dim": 16,  # full attention has wider heads
    },
    "gemma4_unified_text": {"global_head_dim": 16},
    "zamba": {**_MAMBA_AND_HYBRID, "attention_head_dim": 16},
    "zamba2": {**_MAMBA_AND_HYBRID, "adapter_rank": 8},
    # Gemma 4 with experts, which has none of what its smaller models have.
    "gemma4": {
        "text_config": {
            "enable_moe_block": True,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
        }
    },
    # Sparse attention: a layer that has an indexer, and one that uses the choice of the layer before.
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "index_topk": 8,  # of the 30 that are left of a prompt
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "hc_mult": 2,
    },
    "dots3_note_text": {
        "head_dim": 12,
        # The same, for layers with a window.
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 4,
        "swa_v_head_dim": 8,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],  # embeddings of n-grams
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    },
    # Relative positions, and a scale of attention that grows with the number of the token.
    "inkling_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 8,
        "rel_extent": 32,
        "log_scaling_n_floor": 16,
        "logits_mup_width_multiplier": 1.0,  # it is for a wide model
    },
    "inkling2_text": _INKLING2,
    "inkling2_loop_text": {**_INKLING2, "loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2},
    # Layers between the first and the last one run twice.
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_output_layers": 1,
    },
    # Windows as long as the context, as published. (With shorter ones, transformers' own `generate` differs from greedy
    # decoding by forward passes of Moshi, and which of two equal tokens Doge keeps is left to chance.)
    "doge": {"keep_window_size": POSITIONS},
    "moshi": {"sliding_window": POSITIONS},
    # Sizes under names that no other type has, that depend on each other, or that must not be small.
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "mimo_v2_flash": {"head_dim": 12},  # a third of it is rotated
    "minimax": {"block_size": 16},
    "nemotron_h": {"n_groups": 2},
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": 8,
        "shape_embed_dim": 8,
        "shape_vocab_size": 8,
    },
    "rwkv": {"rescale_every": 1},
    "whisper": {"max_target_positions": 4096},  # as many as lm-eval takes it to have
    "xlstm": {"hidden_size": 128},  # the least that its widths, multiples of 64, are right for
    # Logits are divided by a number that is for a wide model.
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "minicpm3": {"dim_model_base": 32},
    # Settings that the default configuration lacks, and a model cannot be made without.
    "emu3": {"vocabulary_map": {"<image>": 2}},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [32, 64],
        "axial_pos_embds_dim": [16, 16],
    },
    "xmod": {"default_language": "en_XX"},
    # Parts that read pictures or sound; they have no effect on a text.
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "codebook_size": 16},
    "llama4_vision_model": {
        "image_size": 28,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "phi4_multimodal_audio": {
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 32,
    },
}

# Types of which there is nothing to test, and why.
NONE: dict[str, str] = {
    "gemma4_assistant": "it continues the keys and values of another model",
    "gemma4_unified_assistant": "it continues the keys and values of another model",
    "musicgen": "it generates sound",
    "musicgen_melody": "it generates sound",
    "xlnet": "its configuration says that it has -1 positions, so lm-eval's hf runs no prompt",
}


class NoTinyModel(InputError):
    """There is no tiny model of a type that could be tested.

    Attributes:
        why: the reason.
    """

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
    """Check that transformers has a causal language model of a type.

    Raises:
        NoTinyModel: it has none.
    """
    if arch in types():
        return
    if is_encoder_decoder(arch):
        raise NoTinyModel(arch, "it is an encoder-decoder model, and the methods are defined for decoders only")
    if arch in CONFIG_MAPPING:
        raise NoTinyModel(arch, "transformers has no causal language model of this type")
    near = did_you_mean(arch, types())
    raise NoTinyModel(arch, "transformers has no such model type" + (f" ({near})" if near else ""))


def save(arch: str, folder: Path) -> None:
    """Write a tiny random model of a type, with the demonstration model's tokenizer.

    Raises:
        NoTinyModel: there is none.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    build(arch, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build(arch: str, vocabulary: int = 1329) -> PreTrainedModel:
    """A tiny random model of a type.

    Args:
        arch: the model type.
        vocabulary: how many tokens it knows. Token 0 begins and ends texts, and token 1 pads them.

    Raises:
        NoTinyModel: there is none.
    """
    check(arch)
    if arch in NONE:
        raise NoTinyModel(arch, NONE[arch])
    try:
        config = configuration(arch, vocabulary)
        # For some types this is a larger model than the causal one, and what published checkpoints hold.
        whole = type(config) in AutoModelForImageTextToText._model_mapping
        torch.manual_seed(0)
        model: PreTrainedModel = (AutoModelForImageTextToText if whole else AutoModelForCausalLM).from_config(config)
    except Exception as error:
        raise NoTinyModel(arch, one_line(error).split(". ")[0][:200]) from error
    spread(model)
    return model.eval()


def configuration(arch: str, vocabulary: int, **settings: Any) -> PreTrainedConfig:
    """The configuration of a tiny model of a type, with these settings in place of those that it would have."""
    default = AutoConfig.for_model(arch)
    return AutoConfig.for_model(arch, **_settings(default, vocabulary, {**TYPES.get(arch, {}), **settings}))


def _settings(default: PreTrainedConfig, vocabulary: int, special: dict[str, Any]) -> dict[str, Any]:
    """The settings of a tiny model that differ from its type's default configuration.

    Args:
        special: those that it has in place of the usual small ones.
    """
    fields = {field.name for field in dataclasses.fields(default)}

    def field(name: str) -> str:
        """The configuration's own name for what is usually called `name`."""
        return name if name in fields else default.attribute_map.get(name, name)

    own = {field(name): value for name, value in special.items()}
    small = {field(name): value for name, value in {**SMALL, **_TOKENS}.items()}
    small |= dict.fromkeys(map(field, _VOCABULARIES), vocabulary)
    without = {name for name in _IF_ANY & fields if getattr(default, name) is None}
    settings = {name: value for name, value in small.items() if name in fields - without} | own
    if "kv_lora_rank" in fields:  # latent attention has keys and values for every head
        settings["num_key_value_heads"] = settings["num_attention_heads"]

    kinds = {
        name: values
        for name in map(field, _KINDS)
        if name in fields and (values := own.get(name) or list(dict.fromkeys(getattr(default, name) or ())))
    }
    if kinds:
        depth = field("num_hidden_layers")
        layers = max(settings.get(depth, 0), *map(len, kinds.values()))
        settings |= {name: [*values, *[values[-1]] * layers][:layers] for name, values in kinds.items()}
        if depth in fields:
            settings[depth] = layers

    for name in default.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            kind = {"model_type": part.model_type} if part.model_type else {}
            of_part = _settings(part, vocabulary, TYPES.get(part.model_type, {}))
            settings[name] = {**kind, **of_part, **own.get(name, {})}
    return settings


def spread(model: PreTrainedModel) -> None:
    """Change random weights in place, so that every one of them makes a difference that a log-likelihood shows.

    Freshly initialized, weights are so small that all tokens are nearly alike, and biases, gates and the like have no
    effect, since they are 0 or 1.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            deviation = float(parameter.std()) if parameter.numel() > 1 else 0.0
            if deviation == 0:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.dim() > 1 and parameter.mean().abs() < deviation:  # not a decay rate, for example
                parameter.mul_(max(1, 0.3 / deviation))
