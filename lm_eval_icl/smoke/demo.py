"""The checkpoint and the documents that ship with the package, for a first run without any
download.

`python -m scripts.demo_model` makes both; docs/reports/demo-model.md says how.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_icl.harness.plugin import task_dir

if TYPE_CHECKING:
    from datasets import DatasetDict


def model_path() -> Path:
    """The folder of the checkpoint, to be given as `--model_args pretrained=FOLDER`."""
    return Path(__file__).parents[1] / "demo_model"


def documents(name: str, **_: Any) -> DatasetDict:
    """The documents of the task `name`, with the splits `train` (to draw demonstrations from) and
    `test`.

    Rows are {"text": str, "label": int}. This function is `custom_dataset` in the tasks' YAML
    files; lm-eval passes the task's `dataset_kwargs` and `metadata` to it.
    """
    # This import takes a second.
    from datasets import Dataset, DatasetDict, Features, Value

    features = Features({"text": Value("string"), "label": Value("int64")})
    folder = task_dir() / "demo" / name
    splits = {}
    for split in ("train", "test"):
        lines = (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        splits[split] = Dataset.from_list([json.loads(line) for line in lines], features=features)
    return DatasetDict(splits)
