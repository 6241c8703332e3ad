"""The checkpoint and the documents that ship with the package, for a first run with nothing downloaded.

scripts/make_demo_model.py makes both; docs/demo-model.md says how.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Value

from lm_eval_icl.plugin import task_dir


def model_path() -> Path:
    """The folder of the checkpoint: `--model_args pretrained=<it>`."""
    return Path(__file__).parent / "demo_model"


def documents(name: str, **_: Any) -> DatasetDict:
    """The documents of the task `name`, splits `train` (to draw demonstrations from) and `test`.

    Rows are {"text": str, "label": int}. (`custom_dataset` of the tasks' YAML; lm-eval passes it the task's
    `dataset_kwargs` and `metadata`.)
    """
    features = Features({"text": Value("string"), "label": Value("int64")})
    folder = task_dir() / "demo" / name
    splits = {}
    for split in ("train", "test"):
        lines = (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        splits[split] = Dataset.from_list([json.loads(line) for line in lines], features=features)
    return DatasetDict(splits)
