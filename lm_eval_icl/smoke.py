"""A smoke test of every method on a tiny random model: `lm-eval-icl smoke --arch llama`, or from pytest."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from lm_eval_icl import demo, methods
from lm_eval_icl.errors import InputError, Unsupported, one_line
from lm_eval_icl.harness import plugin

# The settings of a tiny model, under all the names that transformers' configurations have for them.
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
        arch: a transformers model type with a causal language model, for example "gpt2" or "qwen3".
        limit: how many documents of each task are run.

    Returns:
        Method -> task -> score. The scores of a random model mean nothing, except that the method ran. A method that
        does not work with the architecture has the message of its `Unsupported` in place of scores.

    Raises:
        InputError: a method failed; the message says how.
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
        for name in (*methods.NAMES, *methods.installed()):
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
                scores[name] = refusal.message
            except Exception as error:
                what = error.message if isinstance(error, InputError) else one_line(error)
                raise InputError(f"smoke test of {name} on {arch}: {what[:300]}") from error
    return scores


def save_tiny(arch: str, folder: Path) -> None:
    """Write a random checkpoint of an architecture, a few hundred kilobytes, with the demo model's tokenizer.

    Raises:
        InputError: transformers cannot make a tiny model of this architecture.
    """
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
            f"smoke --arch {arch}: no tiny model of it can be made "
            f"({type(error).__name__}: {' '.join(str(error).split())[:90]}...)"
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _score(results: Any, task: str, documents: int) -> float:
    """The task's metric. Every document must have a response, and every log-likelihood must be finite."""
    samples = results["samples"][task]
    if len(samples) != documents:
        raise ValueError(f"{task}: {len(samples)} of {documents} documents came back")
    for sample in samples:
        for (response,) in sample["resps"]:
            if not isinstance(response, str) and not math.isfinite(float(response[0])):
                raise ValueError(f"{task}, document {sample['doc_id']}: log-likelihood {response[0]}")
    metric = "acc,none" if task == "smoke_loglikelihood" else "exact_match,none"
    return float(results["results"][task][metric])
