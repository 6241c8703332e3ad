"""`lm-eval-icl collect --check` finds files whose parts contradict each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_eval_icl.errors import InputError
from lm_eval_icl.results.collect import _KEY, collect, faults, load
from lm_eval_icl.results.fields import Unusable
from lm_eval_icl.results.read import read
from tests import commands
from tests.boards import write, write_samples
from tests.results.files import samples_in

CONSTANTS = [-0.5, -1.5]
RULE = {"rule": "contextual", "arguments": {}, "transductive": True, "constants": CONSTANTS}
CHECKED = {"contextual": {**RULE, "says": [0, 1] * 20}}


def collected(folder: Path, change: Any = None, **keys: Any) -> Path:
    """The file of a run, whose results and samples are changed before it is collected."""
    file = write(folder / "run", "icl", says=[0, 1] * 20, **keys)
    samples = samples_in(file)
    for sample in samples:
        if sample["filter"] != "none":
            raw = raw_of(samples, sample)
            shifted = np.array([float(logprob) for logprob, _ in raw]) - CONSTANTS
            sample["filtered_resps"] = [[str(value), "False"] for value in shifted]
            sample["acc"] = float(shifted.argmax() == int(sample["target"]))
    results = json.loads(file.read_text())
    of_task = results["results"]["t"]
    for name in keys.get("rules") or ():
        scores = [sample["acc"] for sample in samples if sample["filter"] == name]
        of_task[f"acc,{name}"] = float(np.mean(scores))
        error = np.std(scores, ddof=1) / len(scores) ** 0.5
        of_task[f"acc_stderr,{name}"] = float(error)
    if change is not None:
        change(results, samples)
    file.write_text(json.dumps(results))
    write_samples(file, "t", samples)
    (path,) = collect(read([folder / "run"], quiet=True)[0], folder)
    return path


def raw_of(samples: list[dict[str, Any]], sample: dict[str, Any]) -> Any:
    return next(
        other["filtered_resps"]
        for other in samples
        if other["doc_id"] == sample["doc_id"] and other["filter"] == "none"
    )


def positive(results, samples):
    samples[3]["filtered_resps"][0][0] = "0.5"


def missing(results, samples):
    samples[0]["filtered_resps"][1][0] = "nan"


def other_answer(results, samples):
    samples[0]["filtered_resps"].reverse()


def other_error(results, samples):
    results["results"]["t"]["acc_stderr,none"] += 0.01


def other_limit(results, samples):
    results["config"]["limit"] = 30


def other_constants(results, samples):
    results["configs"]["t"]["metadata"]["decided"]["contextual"]["constants"] = [0.0, 0.0]


def two_right_answers(results, samples):
    ruled = next(sample for sample in samples if sample["filter"] == "contextual")
    ruled["target"] = "1"
    ruled["acc"] = 1.0 - ruled["acc"]
    scores = [sample["acc"] for sample in samples if sample["filter"] == "contextual"]
    results["results"]["t"]["acc,contextual"] = float(np.mean(scores))


@pytest.mark.parametrize("rules", [None, CHECKED])
def test_a_whole_run_has_no_fault(tmp_path, rules):
    assert faults(collected(tmp_path, rules=rules)) == []


@pytest.mark.parametrize(
    "change, words",
    [
        (positive, "a log-likelihood above 0"),
        (missing, "a log-likelihood above 0 or none"),
        (other_answer, "a score that differs from its answer"),
        (other_error, "the answers do not give its acc_stderr,none"),
        (other_limit, "has 40 documents, and its limit gives 30"),
        (other_constants, "'contextual': has values that differ from its constants"),
        (two_right_answers, "two right answers"),
    ],
)
def test_what_contradicts_is_found(tmp_path, change, words):
    sentences = faults(collected(tmp_path, change, rules=CHECKED))
    assert any(words in sentence for sentence in sentences), sentences


@pytest.mark.parametrize(
    ("forged", "words"),
    [
        ({"logprobs": (-1.0,)}, "document 0, 'none': has an option without log-likelihood"),
        ({"prediction": 1}, "document 0, 'none': has an answer that differs from its log-like"),
    ],
)
def test_a_forged_row_is_found(tmp_path, monkeypatch, forged, words):
    file = collected(tmp_path)
    results, documents = load(file)
    first, *others = documents["t"]
    rows = {"t": [first._replace(**forged), *others]}
    monkeypatch.setattr("lm_eval_icl.results.collect.load", lambda path: (results, rows))
    assert any(words in sentence for sentence in faults(file))


@pytest.mark.parametrize(("recorded", "is_sound"), [([-1.0, -1.0], True), ([0.0, -3.0], False)])
def test_a_rule_by_difference_shifts_probabilities(tmp_path, recorded, is_sound):
    def by_difference(results, samples):
        for sample in samples:
            if sample["filter"] == "batch":
                raw = np.exp([float(logprob) for logprob, _ in raw_of(samples, sample)])
                shifted = raw / raw.sum() - np.exp([-1.0, -1.0])
                sample["filtered_resps"] = [[str(value), "False"] for value in shifted]
                sample["acc"] = 1.0
        results["results"]["t"] |= {"acc,batch": 1.0, "acc_stderr,batch": 0.0}

    rule = {"rule": "batch", "arguments": {"by": "difference"}, "transductive": True}
    rules = {"batch": {**rule, "constants": recorded, "says": [0, 1] * 20}}
    sentences = faults(collected(tmp_path, by_difference, rules=rules))
    assert is_sound == (sentences == [])
    assert is_sound or "'batch': has values that differ from its constants" in sentences[0]


def test_a_metric_that_documents_do_not_give_is_no_fault(tmp_path):
    assert faults(collected(tmp_path, put={"results.t.perplexity,none": 3.0})) == []


def test_a_table_of_others_is_no_file_of_collect(tmp_path):
    file = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({_KEY: b"{}"}), file)
    with pytest.raises(Unusable, match="it has no results of lm-eval"):
        load(file)


def test_an_empty_folder_is_told_so(tmp_path):
    with pytest.raises(InputError, match="there are no files to check"):
        commands.run("collect", "--check", tmp_path)


def test_files_of_lm_eval_are_not_those_of_collect(tmp_path, capsys):
    write(tmp_path, "icl")
    assert "2 of 2 files have faults" in commands.refused("collect", "--check", tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert "or not a file of `lm-eval-icl collect`" in said
