"""What tells one model from another: the files that it was loaded from, its commit on the Hub, its
configuration."""

import json
import shutil

import lm_eval
import peft
import pytest
import torch
import transformers

from lm_eval_icl import methods, version
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.loading import CheckedHFLM
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.inference.identity import files_digest, hub_commit, source_digest, weights_digest
from tests import evaluation, tiny
from tests.evaluation import ICL


@pytest.fixture
def model(tmp_path):
    tiny.save("llama", tmp_path / "model")
    return tmp_path / "model"


def other_weights(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    model.save_pretrained(folder)


def test_a_digest_is_of_what_is_loaded(model, tmp_path):
    first = files_digest(str(model))
    for name in (
        "README.md",
        "training_args.bin",
        "optimizer.bin",
        "trainer_state.json",
        "training.json",
    ):
        (model / name).write_text("something else")
    assert files_digest(str(shutil.copytree(model, tmp_path / "copy"))) == first
    loaded = CheckedHFLM(str(model), device="cpu")
    other_weights(model)
    # Not of what is there when the run ends.
    assert (
        loaded.get_model_info()["model_files_digest"]
        == loaded.model_identity()["model_files_digest"]
        == first
    )
    second = files_digest(str(model))
    weights = transformers.AutoModelForCausalLM.from_pretrained(model)
    weights.save_pretrained(model, max_shard_size="20KB")
    (model / "model.safetensors").unlink()
    assert len(list(model.glob("model-*.safetensors"))) > 1
    sharded = files_digest(str(model))
    last = sorted(model.glob("model-*.safetensors"))[-1]
    data = last.read_bytes()
    last.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert len({first, second, sharded, files_digest(str(model))}) == 4


def test_a_digest_is_of_pickled_weights_and_of_the_tokenizer(model):
    weights = transformers.AutoModelForCausalLM.from_pretrained(model)
    (model / "model.safetensors").unlink()
    digests = []
    for scale in (1.0, 1.5):
        torch.save(
            {name: scale * value for name, value in weights.state_dict().items()},
            model / "pytorch_model.bin",
        )
        digests.append(files_digest(str(model)))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": "left"}))
    assert len({*digests, files_digest(str(model))}) == 3


def test_a_digest_is_of_an_adapter_too(model, tmp_path):
    found = [files_digest(str(model))]
    for seed in range(2):
        torch.manual_seed(seed)
        base = transformers.AutoModelForCausalLM.from_pretrained(model)
        adapter = peft.get_peft_model(
            base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        )
        adapter.save_pretrained(tmp_path / "adapter")
        found.append(files_digest(str(model), peft=str(tmp_path / "adapter")))
    assert len(set(found)) == 3


@pytest.mark.parametrize(("role", "file"), [("tokenizer", "tokenizer"), ("peft", "adapter")])
def test_a_digest_is_of_a_tokenizer_and_an_adapter_of_the_hub(
    model, role, file, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    digests = [files_digest(str(model))]
    for name in ("one", "other"):
        cache = tmp_path / f"models--org--{name}"
        (cache / "snapshots" / name).mkdir(parents=True)
        (cache / "snapshots" / name / f"{file}_config.json").write_text(name)
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text(name)
        digests.append(files_digest(str(model), **{role: f"org/{name}"}))
    assert len(set(digests)) == 3


def test_a_model_of_the_hub_has_its_commit(checkpoint, tmp_path, monkeypatch):
    commit = "0123456789" * 4
    cache = tmp_path / "hub" / "hub" / "models--org--tiny"
    shutil.copytree(checkpoint("gpt2"), cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache.parent))
    info = ICL("org/tiny", device="cpu").get_model_info()
    assert info["model_sha"] == commit == hub_commit("org/tiny")
    assert "model_files_digest" not in info
    assert hub_commit("org/other") is hub_commit(str(tmp_path)) is None


def test_a_model_that_was_made_in_python_has_no_cache(checkpoint):
    path = checkpoint("gpt2")
    weights, tokenizer = tiny.load(path)
    for known in (tokenizer, str(path)):  # the files of a tokenizer are none of weights
        with pytest.raises(InputError, match="did not come from a file"):
            ICL(weights, tokenizer=known).identity()


@pytest.mark.parametrize("how", ["entropy", "similar:by=features"])
def test_a_model_that_was_made_in_python_gets_no_demonstrations_of_another(how):
    """Two models with one configuration, one after the other."""
    config = evaluation.choice("two", "no", "yes")
    made = []
    for scale in (1.0, -3.0):
        model = tiny.build("llama")
        model.model.embed_tokens.weight.data[:, ::2] *= scale
        lm = ICL(model, tokenizer=tiny.sentencepiece(), device="cpu")
        task = evaluation.load_task(config, demonstrations=how)
        task.set_config("num_fewshot", 2)
        task.set_fewshot_seed(1)
        results = lm_eval.evaluate(lm, {"tasks": {"two": task}, "groups": {}}, bootstrap_iters=0)
        made.append([sample["arguments"][0][0] for sample in results["samples"]["two"]])
    assert made[0] != made[1]


def test_results_have_the_version_the_commit_and_the_file_of_a_method(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_in_results.py").write_text(
        "from lm_eval_icl.methods import ICL\nclass Own(ICL):\n    pass\n"
    )
    own, ours = (
        model_class(name)(str(checkpoint("gpt2")), device="cpu").get_model_info()["icl"]
        for name in ("own_in_results:Own", "icl")
    )
    assert own["source"] == source_digest(methods.find("own_in_results:Own"))
    assert "source" not in ours
    assert ours["version"] == version.version()
    assert ours["commit"] == version.commit()


def test_what_cannot_be_read_has_no_digest(model, caplog):
    """A class without a file; with a warning, a file that is none of weights, or is gone."""
    assert source_digest(type("Own", (methods.ICL,), {"__module__": "nowhere"})) is None
    (model / "model.safetensors").write_bytes(b"no tensors")
    assert weights_digest(str(model)) is None
    assert "no digest of the weights is recorded" in caplog.messages[-1]
    assert files_digest(str(model), gguf_file="not_there.gguf") is None
    assert "no digest of the model's files is recorded" in caplog.messages[-1]
