"""What a run records about itself: the digest of its model, and whether its answers were
computed."""

from __future__ import annotations

import json
import shutil

import pytest
import transformers

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.inference.identity import weights_digest
from tests import evaluation, tiny
from tests.inference.test_identity import other_weights


@pytest.fixture
def model(tmp_path):
    tiny.save("llama", tmp_path / "model")
    return tmp_path / "model"


def provenance(name, path, **arguments):
    return evaluation.run(name, path, ["many_tokens"], 1, limit=2, **arguments)["provenance"]


def test_the_digest_is_the_model(model, tmp_path):
    """The same tensors in another folder, in other files, and under both engines."""
    copy = shutil.copytree(model, tmp_path / "copy")
    shards = tmp_path / "shards"
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(shards)
    weights = transformers.AutoModelForCausalLM.from_pretrained(model)
    weights.save_pretrained(shards, max_shard_size="20KB")
    runs = [("hf", model), ("icl", copy), ("hf", shards)]
    digests = {provenance(name, path)["weights"] for name, path in runs}
    assert len(digests) == 1 and None not in digests
    other_weights(model)
    assert provenance("hf", model)["weights"] not in digests


def test_a_configuration_is_of_the_model(model):
    first = weights_digest(str(model))
    file = model / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "transformers_version": "9"}))
    assert weights_digest(str(model)) == first
    file.write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    assert weights_digest(str(model)) != first


def test_a_file_is_read_once(model, monkeypatch):
    first = weights_digest(str(model))
    monkeypatch.setattr("lm_eval_icl.inference.identity._digests_of_safetensors", None)
    assert weights_digest(str(model)) == first


def test_a_model_without_files_has_no_digest(model, tmp_path):
    assert weights_digest(str(tmp_path)) is weights_digest("no/model") is None
    weights, tokenizer = tiny.load(model)
    assert weights_digest(weights) is None and tokenizer


def test_answers_from_a_cache_are_counted(model, tmp_path):
    assert provenance("icl", model)["responses"] == {"read": 0}
    assert provenance("hf", model)["responses"] == {"read": 0}
    first, second = (
        provenance("icl", model, use_cache=str(tmp_path / "icl"))["responses"]["read"]
        for _ in range(2)
    )
    assert first == 0 < second
    of_hf = provenance("hf", model, use_cache=str(tmp_path / "hf"))
    assert of_hf["responses"] == {"read": None}, "lm-eval's cache leaves no counts"


def test_arguments_of_a_model_that_is_an_object_are_not_ignored(model):
    weights, tokenizer = tiny.load(model)
    ensemble = model_class("ensemble")
    with pytest.raises(InputError, match="'method': unknown for a model that is a Python object"):
        ensemble(weights, tokenizer=tokenizer, method="pcw")


def test_a_store_of_no_bytes_keeps_nothing_and_changes_nothing(model):
    results = [
        evaluation.run("icl", model, ["many_tokens"], 2, limit=4, args=args)
        for args in ({}, {"store_bytes": 0})
    ]
    first, second = map(evaluation.responses, results)
    evaluation.assert_same(first, second, 1e-5)
    assert results[1]["config"]["icl"]["contexts_reused"] == 0
