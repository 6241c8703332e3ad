"""A smoke test of every method on a tiny random model: `lm-eval-icl smoke --arch llama`, or from pytest."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from lm_eval_icl import demo, plugin
from lm_eval_icl.errors import InputError, Unsupported

# What makes a model tiny, by every name that configurations have for it.
_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 2048,
    "attention_types": [[["global", "local"], 1]],
    "rotary_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 16,
}


def smoke(arch: str = "llama", limit: int = 3) -> dict[str, dict[str, float] | str]:
    """Run every method through lm-eval on a tiny random model: log-likelihoods and generation.

    Args:
        arch: a transformers model type with a causal language model, "gpt2" or "qwen3", say.
        limit: documents a task.

    Returns:
        Model name -> task -> score; the scores of a random model mean nothing, that they are there does. A method
        that the architecture cannot serve has the line that says so instead.

    Raises:
        InputError: what broke, in one line.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    plugin.register_models()
    task: dict[str, Any] = {
        "custom_dataset": demo.documents,
        "dataset_kwargs": {"name": "icl_demo_short"},
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "fewshot_config": {"sampler": "first_n"},
        "doc_to_text": "Review: {{text}}\nSentiment:",
        "doc_to_choice": ["amber", "very square"],
        "num_fewshot": 3,
    }
    generation: dict[str, Any] = {
        "output_type": "generate_until",
        "doc_to_target": "{{['amber', 'very square'][label]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 5},
        "doc_to_choice": None,
    }
    tasks: list[dict[str, Any]] = [
        {**task, "task": "smoke_loglikelihood", "output_type": "multiple_choice", "doc_to_target": "label"},
        {**task, "task": "smoke_generation", **generation},
    ]
    scores: dict[str, dict[str, float] | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(arch, Path(folder))
        for name in plugin.MODELS:
            try:
                results = lm_eval.simple_evaluate(
                    model=name,
                    model_args={"pretrained": folder},
                    tasks=[dict(config) for config in tasks],
                    task_manager=TaskManager(include_defaults=False),
                    limit=limit,
                    batch_size=2,
                    device="cpu",
                    bootstrap_iters=0,
                )
                scores[name] = {config["task"]: _score(results, config["task"], limit) for config in tasks}
            except Unsupported as refusal:
                scores[name] = str(refusal)
            except Exception as error:
                kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
                what = " ".join(str(error).removeprefix("lm-eval-icl: ").split())
                raise InputError(f"lm-eval-icl: smoke test of {name} on {arch}: {kind}{what[:300]}") from error
    return scores


def save_tiny(arch: str, folder: Path) -> None:
    """Write a random checkpoint of an architecture, a few hundred kilobytes, with the demo's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.model_path())
    torch.manual_seed(0)
    try:
        default = AutoConfig.for_model(arch)
        computed = {name for name, member in vars(type(default)).items() if isinstance(member, property)}
        tiny = {name: value for name, value in _TINY.items() if hasattr(default, name) and name not in computed}
        special = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
        config = AutoConfig.for_model(arch, **tiny, vocab_size=len(tokenizer), pad_token_id=None, **special)
        model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise InputError(
            f"lm-eval-icl: smoke --arch {arch}: no tiny model of it can be made "
            f"({type(error).__name__}: {' '.join(str(error).split())[:90]}...)"
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _score(results: Any, task: str, documents: int) -> float:
    """The task's metric, after a look at every single response."""
    samples = results["samples"][task]
    if len(samples) != documents:
        raise ValueError(f"{task}: {len(samples)} of {documents} documents came back")
    for sample in samples:
        for (response,) in sample["resps"]:
            if not isinstance(response, str) and not math.isfinite(float(response[0])):
                raise ValueError(f"{task}, document {sample['doc_id']}: log-likelihood {response[0]}")
    metric = "acc,none" if task == "smoke_loglikelihood" else "exact_match,none"
    return float(results["results"][task][metric])
