"""Small evaluations through lm-eval, on documents made here: no dataset is needed."""

from __future__ import annotations

import copy
import functools
import json
import os
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from datasets import Dataset, DatasetDict
from lm_eval.tasks import TaskManager

from lm_eval_icl.harness.models import model_class
from tests import once

once.install()

ROOT = Path(__file__).resolve().parent.parent

ICL, DeepThink = model_class("icl"), model_class("deepthink")

WORDS = "film plot actor music story scene joke dull warm sharp slow bright long quiet odd".split()


def documents(n: int, offset: int) -> list[dict[str, Any]]:
    """Texts of different lengths, some with blank lines, blanks at the end, digits and an accent."""
    docs = []
    for i in range(offset, offset + n):
        words = [WORDS[(i * 7 + j * (i % 5 + 1)) % len(WORDS)] for j in range(3 + i % 6)]
        extra = ["", "\n\nIt ends.", " 12 + 30", " café "][i % 4]
        docs.append(
            {"text": " ".join(words) + extra, "label": i % 2, "other": WORDS[i % len(WORDS)]}
        )
    return docs


@functools.cache
def splits() -> dict[str, Dataset]:
    return {
        "train": Dataset.from_list(documents(12, 50)),
        "test": Dataset.from_list(documents(6, 0)),
    }


def load(**_: Any) -> DatasetDict:
    return DatasetDict(splits())


def task(name: str, **config: Any) -> dict[str, Any]:
    """An inline task over `documents`, few-shot from its training split."""
    return {
        "task": name,
        "custom_dataset": load,
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "doc_to_text": "Review: {{text}}\nSentiment:",
        "doc_to_target": "label",
        "fewshot_config": {"sampler": "first_n"},
        **config,
    }


CHOICE = {"output_type": "multiple_choice"}
# Every shape of prompt and answer that lm-eval's ConfigurableTask makes.
TASKS: dict[str, dict[str, Any]] = {
    "one_token": task("one_token", **CHOICE, doc_to_choice=["a", "b", "c"]),
    "many_tokens": task(
        "many_tokens", **CHOICE, doc_to_choice=["very negative indeed", "very negative", "positive"]
    ),
    "described": task(
        "described",
        **CHOICE,
        doc_to_choice=["no", "yes"],
        description="Tell, of {{other}}, what it is.\n\nNow: ",
    ),
    "spaces": task(
        "spaces",
        **CHOICE,
        doc_to_choice=["no", "yes"],
        doc_to_text="{{text}} ?  ",
        target_delimiter="",
    ),
    "prefixed": task("prefixed", **CHOICE, doc_to_choice=["no", "yes"], gen_prefix="I say"),
    "inputs": task(  # winogrande's kind: the options are contexts, the continuation is shared
        "inputs",
        **CHOICE,
        doc_to_text="label",
        doc_to_choice="{{[text + ' ' + other, other + ' ' + text]}}",
        doc_to_target="and so on {{other}}",
        fewshot_config={
            "sampler": "first_n",
            "doc_to_choice": "{{[text + ' ' + other, other + ' ' + text]}}",
        },
    ),
    "mutual": task(
        "mutual",
        **CHOICE,
        doc_to_choice=["no", "yes"],
        metric_list=[
            {"metric": "acc_mutual_info", "aggregation": "mean", "higher_is_better": True}
        ],
    ),
    "likelihood": task(
        "likelihood",
        output_type="loglikelihood",
        doc_to_text="{{text}}",
        doc_to_target="then {{other}} {{text}}",
    ),
    "empty_query": task(
        "empty_query",
        output_type="loglikelihood",
        doc_to_text="",
        doc_to_target="{{text}}",
        target_delimiter="",
    ),
    "generate": task(
        "generate",
        output_type="generate_until",
        doc_to_target="{{other}}",
        generation_kwargs={"until": ["\n\n", "film"], "max_gen_toks": 12, "do_sample": False},
    ),
    "samples": task(
        "samples",
        output_type="generate_until",
        doc_to_target="{{other}}",
        fewshot_split=None,
        training_split=None,
        fewshot_config={"sampler": "first_n", "samples": documents(5, 80)},
        generation_kwargs={"until": ["?"], "max_gen_toks": 7, "do_sample": False},
    ),
}


@functools.cache
def manager(defaults: bool) -> TaskManager:
    """lm-eval's task index: reading its 14,000 files takes seconds, and inline tasks need none of them."""
    return TaskManager(include_defaults=defaults)


def task_file(
    folder: Path, name: str, rows: dict[str, list[dict[str, Any]]], **config: Any
) -> Path:
    """A task's YAML file, beside JSON files of the rows of its splits."""
    for split, docs in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    files = {split: str(folder / f"{split}.jsonl") for split in rows}
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
    if "train" in rows:
        data |= {"training_split": "train", "fewshot_split": "train"}
    path = folder / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump({"task": name, "output_type": "multiple_choice", **data, **config})
    )
    return path


def load_task(config: dict[str, Any], **metadata: Any) -> Any:
    """The task of an inline configuration, as lm-eval makes it with --metadata."""
    return TaskManager(include_defaults=False, metadata=metadata).load([{**config}])["tasks"][
        config["task"]
    ]


def answers(model: Any, path: Any, names: list[Any], shots: int | None, **kwargs: Any) -> list[Any]:
    """Every response of an evaluation, in order."""
    return responses(run(model, path, names, shots, **kwargs))


def run(
    model: str,
    path: Any,
    names: list[Any],
    shots: int | None,
    *,
    args: dict | None = None,
    metadata: dict | None = None,
    **kwargs: Any,
) -> dict:
    """Evaluate a model on some of `TASKS`, on other tasks by their names, or on tasks by their configurations."""
    # lm-eval writes --gen_kwargs into the configuration it is given.
    tasks = [
        copy.deepcopy(TASKS.get(name, name) if isinstance(name, str) else name) for name in names
    ]
    own = TaskManager(include_defaults=False, metadata=metadata) if metadata else None
    results = lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(path), **(args or {})},
        tasks=tasks,
        task_manager=own or manager(any(isinstance(task, str) for task in tasks)),
        num_fewshot=shots,
        device="cpu",
        bootstrap_iters=0,
        **{"batch_size": 4, **kwargs},
    )
    if os.environ.get("RANK", "0") != "0":  # only the first of several processes has the results
        return {}
    assert results is not None
    return results


def responses(results: dict) -> list[Any]:
    """Every response in order: (log-likelihood, is_greedy) or text."""
    found = []
    for name in sorted(results["samples"]):
        for sample in results["samples"][name]:
            for (response,) in sample["resps"]:
                text = isinstance(response, str)
                found.append(response if text else (float(response[0]), str(response[1]) == "True"))
    return found


def assert_same(ours: list[Any], expected: list[Any], tolerance: float) -> None:
    """Equal texts and greedy flags, log-likelihoods within the tolerance."""
    assert len(ours) == len(expected) > 0
    for mine, theirs in zip(ours, expected, strict=True):
        if isinstance(mine, str):
            assert mine == theirs
        else:
            assert abs(mine[0] - theirs[0]) <= tolerance, (mine, theirs)
            assert mine[1] == theirs[1]


def shared_length(tokenizer: Any, prompt: Any) -> int:
    """How many tokens of a (byte-level) prompt come before its query, found by spelling them out."""
    ids = tokenizer.encode(str(prompt))
    before = len(prompt.prefix + "".join(prompt.demonstrations))
    return next(n for n in range(len(ids) + 1) if len(tokenizer.decode(ids[:n])) >= before)
