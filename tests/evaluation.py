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

ICL = model_class("icl")
DeepThink = model_class("deepthink")
FIRST_N = {"sampler": "first_n"}
WORDS = "film plot actor music story scene joke dull warm sharp slow bright long quiet odd".split()


def documents(n: int, offset: int) -> list[dict[str, Any]]:
    """Texts of different lengths, some with blank lines, blanks at the end, digits and an
    accent."""
    docs = []
    for i in range(offset, offset + n):
        words = [WORDS[(i * 7 + j * (i % 5 + 1)) % len(WORDS)] for j in range(3 + i % 6)]
        extra = ["", "\n\nIt ends.", " 12 + 30", " café "][i % 4]
        text = " ".join(words) + extra
        docs.append({"text": text, "label": i % 2, "other": WORDS[i % len(WORDS)]})
    return docs


@functools.cache
def splits() -> dict[str, Dataset]:
    train = Dataset.from_list(documents(12, 50))
    return {"train": train, "test": Dataset.from_list(documents(6, 0))}


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
        "fewshot_config": {**FIRST_N},
        **config,
    }


def metrics(*names: str) -> list[dict[str, Any]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


CHOICE = {"output_type": "multiple_choice"}


def choice(name: str, *options: str, **config: Any) -> dict[str, Any]:
    """A task that decides among options."""
    return task(name, **CHOICE, doc_to_choice=list(options), **config)


def generation(name: str, settings: dict[str, Any], **config: Any) -> dict[str, Any]:
    """A task whose answers are texts."""
    settings = {"do_sample": False, **settings}
    config = {"output_type": "generate_until", "doc_to_target": "{{other}}", **config}
    return task(name, **config, generation_kwargs=settings)


# winogrande's kind: the options are contexts, the continuation is shared.
CONTEXTS = {"doc_to_choice": "{{[text + ' ' + other, other + ' ' + text]}}"}
# Every shape of prompt and answer that lm-eval's ConfigurableTask makes.
TASKS: dict[str, dict[str, Any]] = {
    "one_token": choice("one_token", "a", "b", "c"),
    "many_tokens": choice("many_tokens", "very negative indeed", "very negative", "positive"),
    "described": choice(
        "described", "no", "yes", description="Tell, of {{other}}, what it is.\n\nNow: "
    ),
    "spaces": choice("spaces", "no", "yes", doc_to_text="{{text}} ?  ", target_delimiter=""),
    "prefixed": choice("prefixed", "no", "yes", gen_prefix="I say"),
    "inputs": task(
        "inputs",
        **CHOICE,
        **CONTEXTS,
        doc_to_text="label",
        doc_to_target="and so on {{other}}",
        fewshot_config=FIRST_N | CONTEXTS,
    ),
    "mutual": choice("mutual", "no", "yes", metric_list=metrics("acc_mutual_info")),
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
    "generate": generation("generate", {"until": ["\n\n", "film"], "max_gen_toks": 12}),
    "samples": generation(
        "samples",
        {"until": ["?"], "max_gen_toks": 7},
        fewshot_split=None,
        training_split=None,
        fewshot_config=FIRST_N | {"samples": documents(5, 80)},
    ),
}


@functools.cache
def manager(defaults: bool) -> TaskManager:
    """lm-eval's task index: reading its 14,000 files takes seconds, and inline tasks need none of
    them."""
    return TaskManager(include_defaults=defaults)


def task_file(
    folder: Path, name: str, rows: dict[str, list[dict[str, Any]]], **config: Any
) -> Path:
    """A task's YAML file, beside JSON files of the rows of its splits."""
    files = {}
    for split, docs in rows.items():
        file = folder / f"{split}.jsonl"
        file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        files[split] = str(file)
    data: dict[str, Any] = {"task": name, **CHOICE, "test_split": "test"}
    data |= {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}
    if "train" in rows:
        data |= {"training_split": "train", "fewshot_split": "train"}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data | config))
    return path


def load_task(config, **metadata):
    """The task of an inline configuration, as lm-eval makes it with --metadata."""
    tasks = TaskManager(include_defaults=False, metadata=metadata).load([{**config}])["tasks"]
    return tasks[config["task"]]


def answers(model, path, names, shots, **kwargs):
    """Every response of an evaluation, in order."""
    return responses(run(model, path, names, shots, **kwargs))


def run(model, path, names, shots, *, args=None, metadata=None, **kwargs):
    """Evaluate a model on some of `TASKS`, on other tasks by their names, or on tasks by their
    configurations."""
    tasks = []
    for name in names:
        config = TASKS.get(name, name) if isinstance(name, str) else name
        # lm-eval writes --gen_kwargs into the configuration it is given.
        tasks.append(copy.deepcopy(config))
    if metadata:
        tasks_of = TaskManager(include_defaults=False, metadata=metadata)
    else:
        tasks_of = manager(any(isinstance(task, str) for task in tasks))
    results = lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(path), **(args or {})},
        tasks=tasks,
        task_manager=tasks_of,
        num_fewshot=shots,
        device="cpu",
        bootstrap_iters=0,
        **{"batch_size": 4, **kwargs},
    )
    if os.environ.get("RANK", "0") != "0":  # only the first of several processes has the results
        return {}
    assert results is not None
    return results


def responses(results):
    """Every response in order: (log-likelihood, is_greedy) or text."""
    in_order = []
    for name in sorted(results["samples"]):
        for sample in results["samples"][name]:
            for (response,) in sample["resps"]:
                if isinstance(response, str):
                    in_order.append(response)
                else:
                    logprob, greedy = response
                    in_order.append((float(logprob), str(greedy) == "True"))
    return in_order


def assert_same(ours, expected, tolerance):
    """Equal texts and greedy flags, log-likelihoods within the tolerance."""
    assert len(ours) == len(expected) > 0
    for mine, theirs in zip(ours, expected, strict=True):
        if isinstance(mine, str):
            assert mine == theirs
            continue
        logprob, greedy = mine
        expected_logprob, expected_greedy = theirs
        assert abs(logprob - expected_logprob) <= tolerance, (mine, theirs)
        assert greedy == expected_greedy


def shared_length(tokenizer, prompt):
    """How many tokens of a (byte-level) prompt come before its query, found by spelling them
    out."""
    ids = tokenizer.encode(str(prompt))
    before = len(prompt.prefix + "".join(prompt.demonstrations))
    return next(n for n in range(len(ids) + 1) if len(tokenizer.decode(ids[:n])) >= before)
