"""A run with `--use_cache` that is stopped at any moment ends, started again, as if nothing had
happened."""

import dataclasses
import itertools
import json
import math
import pickle
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict
from lm_eval.api.instance import Instance
from sqlitedict import SqliteDict

from lm_eval_icl import methods, version
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness import response_cache as cache
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.harness.response_cache import Responses, ResumableLM
from lm_eval_icl.inference import scoring
from lm_eval_icl.methods import continuing
from lm_eval_icl.prompts.prompt import FewShotPrompt
from tests import evaluation, tiny
from tests.evaluation import ICL
from tests.processes import Process

NAMES = ["resume_choice", "resume_text", "resume_rolling"]


def load(**_):
    splits = {"train": evaluation.documents(12, 50), "test": evaluation.documents(40, 0)}
    return DatasetDict({name: Dataset.from_list(docs) for name, docs in splits.items()})


ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
for name, config in zip(
    NAMES, [evaluation.TASKS["many_tokens"], evaluation.TASKS["generate"], ROLLING], strict=True
):
    evaluation.TASKS[name] = evaluation.task(
        name, **{**config, "task": name, "custom_dataset": load}
    )


def run(path, where, out=None, model="deepthink", **kwargs):
    """Evaluate in small passes, each stored; write what came out, and how much of it was
    computed."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    computed = []
    add = cache._Hook.add_partial
    cache._Hook.add_partial = lambda self, *args: (computed.append(args), add(self, *args))
    results = evaluation.run(
        model,
        path,
        NAMES,
        2,
        args={"pack_tokens": 64},
        batch_size=2,
        use_cache=where and str(where),
        **kwargs,
    )
    if out is not None:
        found = {key: results[key] for key in ("results", "samples")}
        out.write_text(json.dumps([found, len(computed)], default=str))
    return results


def stored(where):
    """How many responses are in a cache (and the line that says whose they are)."""
    path = Path(where)
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    path = tmp_path_factory.mktemp("resume") / "gpt2"
    tiny.save("gpt2", path)
    return path


@pytest.fixture(scope="module")
def undisturbed(gpt2):
    """What a run without a cache finds, and the number of its responses."""
    out = gpt2.parent / "undisturbed.json"
    status, _ = Process(run, gpt2, None, out).finish()
    assert status == 0
    found, _ = json.loads(out.read_text())
    samples = itertools.chain(*found["samples"].values())
    return found, sum(len(sample["resps"]) for sample in samples)


@pytest.mark.slow
def test_killed_and_started_again(gpt2, undisturbed, tmp_path):
    """Killed at any moment of computing or writing."""
    expected, total = undisturbed
    where = tmp_path / "c_rank0.jsonl"
    out = tmp_path / "out.json"
    process = Process(run, gpt2, tmp_path / "c", out)
    while stored(where) < total // 2:
        assert process.process.is_alive()
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.004))
    process.kill()
    before = stored(where)
    assert before < total
    status, _ = Process(run, gpt2, tmp_path / "c", out).finish()
    assert status == 0
    found, computed = json.loads(out.read_text())
    assert_same(found, expected)
    assert computed <= total - before + 1  # the kill may leave an unfinished line


def assert_same(found, expected):
    """Texts and predictions are equal, log-likelihoods up to rounding: packs are others."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5, nan_ok=True)
    else:
        assert found == expected


# Whose responses they are.


def change_weight(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[7, 11] += 1e-3
    model.save_pretrained(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (change_weight, r"\(model_files_digest=[0-9a-f]{16} there, [0-9a-f]{16} here\)"),
        ({"positions": "none"}, r"icl.positions=sequential there, none here"),
        ({"add_bos_token": True}, r"\(add_bos_token=None there, True here\)"),
        ("version", r"version=.* there, 99.* here"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, change, says):
    """A checkpoint changed in place, and arguments that the prompts do not show."""
    path = tmp_path / "m"
    tiny.save("gpt2", path)

    def cached(**args):
        return ResumableLM(ICL(str(path), device="cpu", **args), str(tmp_path / "c"))

    cached()
    cached()  # else it proves nothing
    args = change if isinstance(change, dict) else {}
    if callable(change):
        change(path)
    if change == "version":
        monkeypatch.setattr(version, "VERSION", "99")
    with pytest.raises(InputError, match=says):
        cached(**args)


def test_code_that_no_file_has(gpt2, monkeypatch):
    mine = type("Mine", (methods.ICL,), {"__module__": "mine"})
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(Mine=mine))
    lm = model_class("mine:Mine")(str(gpt2), device="cpu")
    says = "--use_cache: the code of this method did not come from a file, so a cache could not"
    with pytest.raises(InputError, match=says):
        lm.identity()


# What is in the file.


def test_prompts_cut_otherwise_are_other_prompts():
    cut = [
        FewShotPrompt("a", ["b", "c"], "d"),
        FewShotPrompt("ab", ["c"], "d"),
        FewShotPrompt("", ["ab", "c"], "d"),
    ]
    assert len({*cut}) == 1
    keys = {cache.response_key("loglikelihood", (prompt, " e")) for prompt in (*cut, "abcd")}
    assert len(keys) == 4


@pytest.mark.parametrize(
    "response",
    [(-0.1 - 0.2, True), (-math.inf, False), -1234.5678901234567, "café \ud800 \x00\n"],
)
def test_responses_read_back_to_the_bit(tmp_path, response):
    for _ in range(2):
        responses = Responses(str(tmp_path / "c"), {})
        responses["key"] = response
        assert responses["key"] == response
        assert type(responses["key"]) is type(response)


def test_nothing_is_unpickled(gpt2, tmp_path, monkeypatch):
    """lm-eval's own caches are pickles, which may run any code: one of another model stays as it
    is, and the file that lm-eval opens for our model is removed."""
    with SqliteDict(str(tmp_path / "c_rank0.db"), autocommit=True) as theirs:
        theirs["lm-eval-icl"] = "text"
    monkeypatch.setattr(pickle, "loads", None)
    for name in ("c", "d"):
        run(gpt2, tmp_path / name, limit=4)
        assert stored(tmp_path / f"{name}_rank0.jsonl") > 0
    monkeypatch.undo()
    with SqliteDict(str(tmp_path / "c_rank0.db")) as theirs:
        assert dict(theirs) == {"lm-eval-icl": "text"}
    assert not (tmp_path / "d_rank0.db").exists()


def test_a_line_that_was_not_finished_is_computed_again(tmp_path):
    file = tmp_path / "c"

    def opened(method="icl"):
        return Responses(str(file), {"method": method})

    responses = opened()
    responses["a"] = (-1.5, True)
    responses["b"] = "text"
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    again = opened()
    assert again == {"a": (-1.5, True)}
    again["b"] = "text"
    assert opened() == responses
    with pytest.raises(InputError, match=r"another run .*method=icl there, pcw here"):
        opened("pcw")
    file.write_bytes(whole[:10])  # it ends in the line that says whose it is
    assert opened("pcw") == {}
    for content in (b"\x00" * 50, b"[1, 2]\n"):
        file.write_bytes(content)
        with pytest.raises(InputError, match="was not written by this version"):
            opened()


def test_sampled_texts_are_not_stored(gpt2, tmp_path):
    for kwargs, n in (({"do_sample": True, "temperature": 0.7}, 0), ({}, 6)):
        evaluation.run(
            "icl", gpt2, ["generate"], 2, use_cache=str(tmp_path / "c"), gen_kwargs=kwargs
        )
        assert stored(tmp_path / "c_rank0.jsonl") == n


def test_what_was_left_out_is_part_of_the_request(gpt2):
    """Two documents alike but for an option, which makes one leave out demonstrations: the option
    they share has two log-likelihoods, and a cache must not take one for the other."""
    shown = ("a film of some length, good\n\n", "another one, bad\n\n")
    prompt = FewShotPrompt("", shown, "a third, ")
    long = "bad and worse than all that was ever seen in a house of that kind"
    lm = model_class("icl")(str(gpt2), device="cpu", max_length=60, overflow="drop")
    instances = []
    for document, other in enumerate(("bad", long)):
        for i, option in enumerate(("good", other)):
            place = ("odd", document, 1)
            instances.append(Instance("loglikelihood", {}, (prompt, option), i, metadata=place))
    requests = lm.run.requests(instances)
    first, second, third, _ = requests
    assert first.left_out == second.left_out == () != third.left_out
    # As many, but others, or more tokens cut, would be other responses.
    for change in ({"left_out": (1,)}, {"left_out": (0,)}, {"cut": 3}, {"cut": 4}):
        requests.append(dataclasses.replace(first, **change))
    assert len({cache.response_key("loglikelihood", request.key) for request in requests}) == 8


# Whole runs.


def test_a_second_run_computes_nothing(checkpoint, tmp_path, monkeypatch):
    path = checkpoint("gpt2")
    cached = {"use_cache": str(tmp_path / "c")}
    names = ["one_token", "generate"]
    ours = evaluation.answers("deepthink", path, names, 2, **cached)
    # What would be called if anything were computed.
    monkeypatch.setattr(scoring, "score_packed", None)
    monkeypatch.setattr(continuing, "continue_from", None)
    assert evaluation.answers("deepthink", path, names, 2, **cached) == ours
