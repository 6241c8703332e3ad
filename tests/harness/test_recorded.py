"""lm-eval's own recorded numbers of Pythia-70m, from a file of its tests, against `icl`.

This asks the Hub for the model and the data, and so runs only where LM_EVAL_RECORDED names the file
tests/models/test_huggingface.py of lm-eval: in the job `recorded` of .github/workflows/ci.yml.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import lm_eval
import pytest

RECORDED = os.environ.get("LM_EVAL_RECORDED", "")
NEEDED = "needs the network, and LM_EVAL_RECORDED: the file of lm-eval's tests with its numbers"
pytestmark = pytest.mark.skipif(not RECORDED, reason=NEEDED)
DOCUMENTS = 10  # as many as lm-eval has recorded
OPTIONS = 4


def recorded(name: str) -> list[Any]:
    """The values of a name in the class of lm-eval's test."""
    tree = ast.parse(Path(RECORDED).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{RECORDED} has no {name}")


def responses(task: str, **arguments: Any) -> list[Any]:
    """The responses of `icl` to a task, in the order of documents and options."""
    results = lm_eval.simple_evaluate(
        model="icl",
        model_args="pretrained=EleutherAI/pythia-70m,dtype=float32",
        tasks=[task],
        limit=DOCUMENTS,
        device="cpu",
        bootstrap_iters=0,
        **arguments,
    )
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    filters = {sample["filter"] for sample in samples}
    chosen = [sample for sample in samples if sample["filter"] == min(filters)]
    values = []
    for sample in chosen:
        for repeats in sample["resps"]:
            values += repeats
    return values


def test_log_likelihoods():
    expected = recorded("MULTIPLE_CH_RES")
    values = [value for value, _ in responses("arc_easy", num_fewshot=0)]
    assert len(values) == DOCUMENTS * OPTIONS
    assert values == pytest.approx(expected, abs=1e-2)


def test_rolling_log_likelihoods():
    assert responses("wikitext") == pytest.approx(recorded("ROLLING_RES"), abs=1e-1)


def test_texts():
    assert responses("gsm8k", gen_kwargs="max_gen_toks=10") == recorded("generate_until_RES")
