"""lm-eval's response cache: read again by the same run, refused where something else wrote it."""

import pytest

from lm_eval_icl.errors import InputError
from tests import evaluation

NAMES = ["one_token", "generate"]


def test_a_second_run_reads_the_cache(checkpoint, tmp_path, monkeypatch):
    path, cache = checkpoint("gpt2"), str(tmp_path / "cache")
    first = evaluation.responses(evaluation.run("deepthink", path, NAMES, 2, use_cache=cache))

    from lm_eval_icl.methods import runner

    monkeypatch.setattr(runner, "score_packed", None)  # what would be called if anything were computed
    monkeypatch.setattr(runner, "continue_from", None)
    assert evaluation.responses(evaluation.run("deepthink", path, NAMES, 2, use_cache=cache)) == first


@pytest.mark.parametrize(
    ("model", "args", "says"),
    [
        ("deepthink", {"T": 6}, "T=5 there, 6 here"),
        ("deepthink", {"momentum": 0.9}, "momentum=0.0 there, 0.9 here"),
        ("icl", {}, "method=deepthink there, icl here"),
    ],
)
def test_another_run_s_cache_is_refused(checkpoint, tmp_path, model, args, says):
    path, cache = checkpoint("gpt2"), str(tmp_path / "cache")
    evaluation.run("deepthink", path, NAMES, 2, use_cache=cache)
    with pytest.raises(InputError, match=says):
        evaluation.run(model, path, NAMES, 2, use_cache=cache, args=args)


def test_a_cache_of_hf_is_refused(checkpoint, tmp_path):
    path, cache = checkpoint("gpt2"), str(tmp_path / "cache")
    evaluation.run("hf", path, NAMES, 2, use_cache=cache)
    with pytest.raises(InputError, match="was written by another model"):
        evaluation.run("icl", path, NAMES, 2, use_cache=cache)


def test_hf_finds_nothing_in_ours(checkpoint, tmp_path):
    """And ours stay where they are."""
    path, cache = checkpoint("gpt2"), str(tmp_path / "cache")
    ours = evaluation.responses(evaluation.run("deepthink", path, NAMES, 2, use_cache=cache))
    theirs = evaluation.responses(evaluation.run("hf", path, NAMES, 2))
    assert evaluation.responses(evaluation.run("hf", path, NAMES, 2, use_cache=cache)) == theirs != ours
    assert evaluation.responses(evaluation.run("deepthink", path, NAMES, 2, use_cache=cache)) == ours
