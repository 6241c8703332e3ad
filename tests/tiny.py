"""Tiny random checkpoints of many architectures, with tokenizers of three kinds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lm_eval_icl.inference.memory import Memory
from lm_eval_icl.methods import Method
from lm_eval_icl.prompts.tokens import Context
from lm_eval_icl.smoke.tiny import configuration
from tests.smoke.model_types import TYPES

# Enough English, layout and punctuation for merges that straddle words, blanks and line breaks.
CORPUS = [
    "Review: a gripping film , warm and funny .\nSentiment: positive\n\n",
    "Review: the plot is dull and the jokes fall flat\nSentiment: negative\n\n",
    "Question: What is the capital of France ?\nAnswer: Paris\n\n"
    "The following are multiple choice questions.",
    "Q: Is the following sentence plausible?\nOptions:\n(A) Yes\n(B) No\nA: (A)\n\n\n"
    "  indented text, 12 + 30 = 42",
] * 4


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind: byte-level BPE, offsets trimmed of leading blanks, no BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    train_on_bytes(tokenizer, "<|endoftext|>")
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )


def train_on_bytes(tokenizer: Tokenizer, *special_tokens: str) -> None:
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)


def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama-2's kind: BPE over the whole text with blanks as "▁", bytes as a fallback, BOS in
    front."""
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    base = Tokenizer(models.BPE())
    base.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    # For training alone: no token may hold a line break or reach over a blank, as in Llama-2's
    # vocabulary.
    base.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "removed"),
            pre_tokenizers.Metaspace(prepend_scheme="never", split=True),
        ]
    )
    base.train_from_iterator(CORPUS, trainer)
    learned = json.loads(base.to_str())["model"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=learned["vocab"],
            merges=[tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = base.normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def llama3() -> PreTrainedTokenizerFast:
    """Llama-3's kind: byte-level BPE after a regular expression of its own, BOS in front."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    train_on_bytes(tokenizer, "<|begin_of_text|>", "<|end_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
    )


TOKENIZERS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "llama3": llama3}

# Three layers: what the last one reads of another token may have come to that by a third.
_WIDTH: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_SIZES = {**_WIDTH, "intermediate_size": 64, "max_position_embeddings": 4096}
_LLAMA = {**_SIZES, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": None}
_WINDOW = {**_LLAMA, "sliding_window": 24}
_GPT_NEO = {**_SIZES, "num_hidden_layers": 2, "window_size": 24, "intermediate_size": None}
_FULL = "full_attention"
_QWEN = {**_LLAMA, "use_sliding_window": False, "layer_types": [_FULL] * 3}
_LINEAR = {**_LLAMA, "layer_types": ["linear_attention", _FULL, "linear_attention"]}
_GEMMA = {**_WINDOW, "layer_types": ["sliding_attention", _FULL, "sliding_attention"]}
_JAMBA = {**_LLAMA, "attn_layer_period": 2, "attn_layer_offset": 1}
_JAMBA |= {"expert_layer_period": 2, "num_experts": 2, "mamba_dt_rank": 4}


# name -> (model type, settings, tokenizer)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("gpt2", {**_WIDTH, "max_position_embeddings": 4096, "n_inner": None}, "byte_level"),
    "opt": ("opt", {**_SIZES, "word_embed_proj_dim": 48, "ffn_dim": 64}, "byte_level"),
    "gpt_neo": ("gpt_neo", _GPT_NEO, "byte_level"),
    "gpt_neox": ("gpt_neox", _SIZES, "byte_level"),
    "llama": ("llama", _LLAMA, "sentencepiece"),
    "llama3": ("llama", _LLAMA, "llama3"),
    "qwen3": ("qwen3", _QWEN, "byte_level"),
    "mistral_window": ("mistral", _WINDOW, "sentencepiece"),
    "gemma2_window": ("gemma2", _GEMMA, "sentencepiece"),
    "phi": ("phi", _LLAMA, "byte_level"),
    "bloom": ("bloom", _WIDTH, "byte_level"),
    # Attention beside linear attention, beside gated linear attention with experts, and beside
    # state spaces.
    "qwen3_5": ("qwen3_5_text", _LINEAR, "byte_level"),
    "qwen3_next": ("qwen3_next", {**_LINEAR, "num_experts": 4}, "byte_level"),
    "jamba": ("jamba", _JAMBA, "sentencepiece"),
}


def slow_but(fast: Iterable[object], values: Iterable[object]) -> list[Any]:
    """Values of a test's parameter, or tuples of several parameters' values. `make test` takes the
    fast ones alone."""
    fast = [*fast]
    parameters = []
    for value in values:
        several = value if isinstance(value, tuple) else [value]
        marks = () if value in fast else pytest.mark.slow
        parameters.append(pytest.param(*several, marks=marks))
    return parameters


def build(name: str, dtype: torch.dtype = torch.float32, **overrides: object) -> PreTrainedModel:
    """A random model of an architecture, its weights far enough from zero that answers differ."""
    kind, settings, tokenizer = ARCHITECTURES[name]
    tok = TOKENIZERS[tokenizer]()
    settings = {
        "bos_token_id": tok.bos_token_id,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": None,
        **settings,
        **overrides,
    }
    config = configuration(kind, len(tok), TYPES, **settings)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model.to(dtype).eval()


def save(name: str, folder: Path, **overrides: object) -> None:
    """Write the checkpoint and its tokenizer."""
    build(name, **overrides).save_pretrained(folder)
    _, _, tokenizer = ARCHITECTURES[name]
    TOKENIZERS[tokenizer]().save_pretrained(folder)


def longrope(switch: int) -> dict[str, Any]:
    """The `rope_parameters` of a model whose rotary angles change beyond this length."""
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    return {**rope, "original_max_position_embeddings": switch}


def load(path: Path, **kwargs: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A checkpoint's model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(path, **kwargs).eval()
    return model, AutoTokenizer.from_pretrained(path)


def encoded_alone(
    method: Method, model: PreTrainedModel, context: Context, query: Sequence[int]
) -> tuple[Memory, Sequence[int]]:
    """The memory of a query, whose contexts are encoded one by one, and the query's tokens still to
    be run."""

    def memories(contexts: Sequence[Context]) -> list[Memory]:
        encoded = []
        for alone in contexts:
            encoded += method.encode(model, [alone])
        return encoded

    encoder = SimpleNamespace(model=model, memories=memories)
    encoded = method.encoded(encoder, context, query)
    [memory] = encoded.memories
    return memory, encoded.rest or query


def scores(runner: Any, work: dict, once: bool = False) -> dict:
    """The runner's scores: {(context, query, answer): (log-likelihood, is greedy)}."""
    by_request: dict = {}
    with runner.inference_mode():
        for requests, scored in runner.score(work, once):
            by_request |= zip(requests, scored, strict=True)
    return by_request
