"""Tiny models of every model type, with what is special about single types (model_types.yaml)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel

from lm_eval_icl.smoke import tiny
from lm_eval_icl.smoke.tiny import POSITIONS, WINDOW


def special_settings() -> dict[str, dict[str, Any]]:
    """Model type -> its further settings."""
    numbers = {"WINDOW": WINDOW, "TWICE_WINDOW": 2 * WINDOW, "POSITIONS": POSITIONS}
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    text = re.sub("|".join(rf"\b{name}\b" for name in numbers), lambda m: str(numbers[m[0]]), text)
    settings = yaml.safe_load(text)
    return {name: of_type for name, of_type in settings.items() if not name.startswith(".")}


TYPES = special_settings()

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
