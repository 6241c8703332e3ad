"""What tiny models of single types have beside the rule of `lm_eval_icl.smoke.tiny`, so that each has a layer of every
kind that published models of its type have, several experts, windows shorter than a prompt, and so on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lm_eval_icl.smoke import tiny
from lm_eval_icl.smoke.tiny import POSITIONS, WINDOW

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
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
            },
            "full_attention": None,  # no positions
        },
    },
    # All layers have a window, which the default configuration leaves out.
    "phi3": {"sliding_window": WINDOW},
    "qwen3_moe": {"sliding_window": WINDOW, "use_sliding_window": True},
    "starcoder2": {"sliding_window": WINDOW},
    # The kinds of layers follow from numbers.
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 4,
    },
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
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
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
    "inkling2_loop_text": {
        **_INKLING2,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
    },
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
        **{
            "attn_layers": ["local", "lsh"],
            "hash_seed": 0,
        },  # without a seed every pass draws other buckets
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


def build(arch: str) -> PreTrainedModel:
    """A tiny model of a type, with what is special about it."""
    return tiny.build(arch, special=TYPES)


def save(arch: str, folder: Path) -> None:
    """Write a tiny model of a type, with what is special about it, and a tokenizer."""
    tiny.save(arch, folder, TYPES)
