"""Arguments of `hf`'s loading do here what they do there: `icl` gives `hf`'s numbers with each of
them."""

import json

import peft
import pytest
from transformers import AutoModelForCausalLM

from lm_eval_icl.errors import InputError
from tests import evaluation, tiny
from tests.evaluation import ICL

NAMES = ["one_token", "many_tokens", "generate"]


def run(model, path, **args):
    return evaluation.answers(model, path, NAMES, 3, args=args)


def assert_as_hf(path, tolerance=1e-4, **args):
    evaluation.assert_same(run("icl", path, **args), expected := run("hf", path, **args), tolerance)
    return expected


def layers(*devices):
    """A device for each of the three layers; what is beside them on the CPU."""
    places = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb"], "cpu")
    places["lm_head"] = "cpu"
    for i, device in enumerate(devices):
        places[f"model.layers.{i}"] = device
    return places


@pytest.mark.slow
@pytest.mark.parametrize("name", ["icl", "invicl", "batchicl", "deepthink", "ape"])
def test_layers_on_devices_of_their_own(checkpoint, tmp_path, name):
    """accelerate's hooks move what goes from one device to the next."""
    path = checkpoint("llama")
    places = {"device_map": layers("cpu", "disk", "disk"), "offload_folder": str(tmp_path)}
    args = {"parallelize": True, **places}
    assert any(weight.is_meta for weight in ICL(str(path), device="cpu", **args).model.parameters())
    assert run(name, path, **args) == run(name, path)


@pytest.mark.parametrize(
    "name", tiny.slow_but(["invicl"], ["icl", "invicl", "batchicl", "deepthink"])
)
def test_adapter(checkpoint, tmp_path, name):
    """As the model into which the adapter was merged."""
    path = checkpoint("llama")
    adapter = tmp_path / "adapter"
    merged = tmp_path / "merged"
    settings = {"task_type": "CAUSAL_LM", "r": 4, "init_lora_weights": False}
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], **settings)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)
    model.save_pretrained(adapter)
    tiny.save("llama", merged)  # for its tokenizer
    model.merge_and_unload().save_pretrained(merged)
    answers = run(name, path, peft=str(adapter))
    evaluation.assert_same(answers, run(name, merged), 1e-4)
    assert answers != run(name, path)


def test_code_of_the_checkpoint_s_own(tmp_path):
    tiny.save("llama", tmp_path)
    (tmp_path / "modeling_halved.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\n"
        "class HalvedForCausalLM(LlamaForCausalLM):\n"
        "    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):\n"
        "        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)\n"
        "        output.logits = output.logits / 2\n"
        "        return output\n"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_halved.HalvedForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert assert_as_hf(tmp_path, trust_remote_code=True) != run(
        "icl", tmp_path, trust_remote_code=False
    )


@pytest.mark.parametrize(
    "args", [{"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}]
)
def test_quantization_is_handed_on(checkpoint, monkeypatch, args):
    """As the configuration that transformers takes. (`hf` itself fails, with transformers 5.)"""
    given = {}

    def load(*names, **kwargs):
        given.update(kwargs)
        raise ValueError("as far as it goes\nwithout a GPU")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(
        InputError, match=r"^lm-eval-icl: pretrained=.* as far as it goes without a GPU\)\."
    ):
        ICL(str(checkpoint("llama")), device="cpu", **args)
    assert {name: getattr(given["quantization_config"], name) for name in args} == args
    assert not args.keys() & given.keys()
