"""What must hold from one run to the next, and in runs out of the ordinary."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.tasks import TaskManager
from transformers import AutoConfig, AutoModelForCausalLM

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness import patches
from lm_eval_icl.harness.arguments import checked_first, read_arguments
from lm_eval_icl.harness.run import PreparedRun
from lm_eval_icl.inference.capabilities import probe
from lm_eval_icl.prompts.prompt import FewShotPrompt
from tests import evaluation, tiny
from tests.evaluation import ICL, DeepThink


def evaluate(lm, names, shots=2):
    return evaluation.run(lm, "", names, shots)


def test_a_model_that_changed_between_runs_is_read_anew(checkpoint):
    """Evaluation during training: nothing of the old weights may be left."""
    path = checkpoint("gpt2")
    model, tokenizer = tiny.load(path, attn_pdrop=0.5)
    lm = DeepThink(model, tokenizer=tokenizer, T=2)
    before = evaluation.responses(evaluate(lm, ["one_token"]))
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    after = evaluation.responses(evaluate(lm, ["one_token"]))
    fresh = DeepThink(model, tokenizer=tokenizer, T=2)
    assert after == evaluation.responses(evaluate(fresh, ["one_token"])) != before
    assert lm.get_model_info()["icl"]["contexts_encoded"] == 1


def test_requests_made_by_hand(checkpoint):
    """Objects that come and go: one's tokens are never taken for another's."""
    lm = ICL(str(checkpoint("gpt2")), device="cpu")
    scores = []
    for text in ("a", "b", "a", "c", "a"):
        request = Instance("loglikelihood", {}, (FewShotPrompt("", ["dull film\n"], text), " x"), 0)
        scores += lm.loglikelihood([request], disable_tqdm=True)
        del request
    assert scores[0] == scores[2] == scores[4]
    assert len(set(scores)) == 3


def test_nothing_of_a_call_stays(checkpoint, tmp_path):
    """A model that is asked without `evaluate`, as long as it lives."""
    lm = ICL(str(checkpoint("gpt2")), device="cpu")
    prompt = FewShotPrompt("", ["dull film\n"], "a")
    scored = [Instance("loglikelihood", {}, (prompt, option), i) for i, option in enumerate([" x", " y"])]
    texts = [Instance("generate_until", {}, (prompt, {"max_gen_toks": 2}), 0)]
    for model in (lm, CachingLM(lm, str(tmp_path / "cache"))):
        for _ in range(2):
            model.loglikelihood(scored)
            model.generate_until(texts)
            assert not lm.run._prepared


def test_options_lose_the_same_demonstrations(tmp_path, monkeypatch):
    """In a multiple-input task every option has a prompt of its own; they stay comparable."""
    tiny.save("gpt2", tmp_path, n_positions=120)
    config = evaluation.task(
        "uneven",
        **evaluation.CHOICE,
        doc_to_text="label",
        doc_to_choice="{{[text, text + ' and so on and on and on for a long while' ]}}",
        doc_to_target="then {{other}}",
        fewshot_config={"sampler": "first_n", "doc_to_choice": "{{[text, other]}}"},
    )
    monkeypatch.setattr(PreparedRun, "release", lambda *_: None)  # else nothing would be left to look at
    lm = ICL(str(tmp_path), device="cpu", overflow="drop")
    results = evaluate(lm, [config], 10)
    kept = {}
    for instance, request in lm.run._prepared.values():
        kept.setdefault(instance.doc_id, set()).add(len(request.prompt.context.demonstrations))
    assert all(len(numbers) == 1 for numbers in kept.values())
    assert len({number for numbers in kept.values() for number in numbers}) > 1
    assert lm.run.left_out["uneven"]["documents"] == len(kept) == 6
    assert len(evaluation.responses(results)) == 12


def test_what_was_left_out_is_known_from_a_cache_too(tmp_path):
    tiny.save("gpt2", tmp_path, n_positions=220)
    kwargs = {"args": {"overflow": "drop"}, "use_cache": str(tmp_path / "c")}
    runs = [evaluation.run("icl", tmp_path, ["many_tokens"], 11, **kwargs) for _ in range(2)]
    first, second = (results["config"]["icl"]["left_out"] for results in runs)
    assert first == second != {}


def test_a_rolling_task_waits_for_the_check(tmp_path, monkeypatch):
    tiny.save("gpt2", tmp_path, n_positions=220)
    rolling = evaluation.task("rolling", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}")
    monkeypatch.setattr(ICL, "_loglikelihood_tokens", lambda *args, **kwargs: pytest.fail("ran before the check"))
    with pytest.raises(InputError, match="do not fit"):
        evaluation.run("icl", tmp_path, [rolling, "one_token"], 11, args={"overflow": "error"})


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_checkpoint_that_asks_for_a_cache_of_its_own(checkpoint, tmp_path, kind):
    expected = evaluation.answers("icl", checkpoint("llama"), ["generate"], 2)
    tiny.save("llama", tmp_path)
    model, _ = tiny.load(tmp_path)
    model.generation_config.cache_implementation = kind
    model.save_pretrained(tmp_path)
    assert evaluation.answers("icl", tmp_path, ["generate"], 2) == expected


@pytest.mark.parametrize("rope", tiny.slow_but(["longrope"], ["longrope", "dynamic"]))
def test_angles_that_change_with_length_are_not_mixed(tmp_path, rope):
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 8.0}
    longest = 150  # where "dynamic" looks
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6, "original_max_position_embeddings": 150}
        longest = 1200
    tiny.save("llama", tmp_path, rope_parameters=parameters, max_position_embeddings=longest)
    names, args = ["one_token", "many_tokens"], {"max_length": 1200}
    fits, refused = ((1, 8), (3,)) if rope == "longrope" else ((1,), (3, 8))  # "dynamic" changes with every length
    for shots in refused:
        with pytest.raises(InputError, match="cross position 150"):
            evaluation.run("icl", tmp_path, names, shots, args=args | {"overflow": "error"})
    for shots in fits:  # all on one side, as hf
        theirs = evaluation.answers("hf", tmp_path, names, shots, batch_size=1, args=args)
        evaluation.assert_same(evaluation.answers("icl", tmp_path, names, shots, args=args), theirs, 1e-4)


@pytest.mark.parametrize("dtype", [{"dtype": "bfloat16"}, {"mixed_precision_dtype": "bfloat16"}])
@pytest.mark.parametrize("name", tiny.slow_but(["llama"], ["gpt2", "llama", "opt", "gpt_neox", "bloom"]))
def test_half_precision_is_probed_as_float32_is(checkpoint, name, dtype):
    lm = ICL(str(checkpoint(name)), device="cpu", **dtype)
    assert lm.runner.capabilities.can_pack == (name != "bloom")
    evaluation.run("icl", checkpoint(name), ["one_token", "generate"], 2, args=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "packs", "config"),
    [
        ("mpt", False, {"d_model": 48, "n_heads": 4, "n_layers": 2}),
        ("falcon", False, {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "alibi": True}),
        ("falcon", True, {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "alibi": False}),
        ("bloom", False, {"hidden_size": 48, "n_head": 4, "n_layer": 2}),
        ("gpt2", True, {"n_embd": 48, "n_head": 4, "n_layer": 2}),
    ],
)
def test_probe_on_weights_of_usual_size(kind, packs, config, dtype):
    """Freshly initialised weights hardly tell one token from another; the probe does not depend on how much."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=500, **config)).to(dtype).eval()
    with torch.no_grad():
        assert probe(model).can_pack is packs


def test_the_task_manager_takes_what_it_took():
    """By position too."""
    patches.install_early("lm_eval.tasks.manager")
    assert TaskManager(None, None, False, {"a": 1}).metadata == {"a": 1}


def test_argument_names_by_which_a_configuration_is_also_known(checkpoint):
    lm = ICL(str(checkpoint("gpt2")), device="cpu", max_position_embeddings=4096)
    assert lm.max_length == 4096


def test_an_argument_called_method_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Mine(methods.ICL):
        method: str = "icl"

    with pytest.raises(InputError, match="Mine: results files have its name under 'method'"):
        read_arguments(Mine, {})


def test_one_line_of_demonstrations_that_differ_by_document(checkpoint, caplog):
    """lm-eval's own tasks draw anew for each document unless they are told not to."""
    tasks = [
        evaluation.task(name, **evaluation.CHOICE, doc_to_choice=["a", "b"], fewshot_config={"sampler": "default"})
        for name in ("one", "two", "three", "four", "five")
    ]
    evaluation.run("icl", checkpoint("gpt2"), tasks, 2)
    (line,) = [line for line in caplog.messages if "--metadata demonstrations=" in line]
    assert line.startswith("one, two, three and 2 more: lm-eval draws other demonstrations for each document (")
    assert "contexts for 30 documents" in line
    caplog.clear()
    results = evaluation.run("icl", checkpoint("gpt2"), tasks, 2, metadata={"demonstrations": "random"})
    assert results["config"]["icl"]["contexts_encoded"] <= 5
    evaluation.run("icl", checkpoint("gpt2"), tasks, 0)
    assert not [line for line in caplog.messages if "--metadata demonstrations=" in line]


def test_one_line_for_all_tasks_of_a_group(checkpoint, caplog):
    names = [f"task_{i}" for i in range(6)]
    tasks = [
        evaluation.task(name, **evaluation.CHOICE, doc_to_choice=["a", "b"], doc_to_text="{{text}}:\n")
        for name in names
    ]
    evaluation.run("invicl", checkpoint("gpt2"), tasks, 0)
    assert len([line for line in caplog.messages if "no demonstrations" in line]) == 1
    (of_all,) = [line for line in caplog.messages if "task_0" in line and line.count("task_") > 1]
    assert "task_0, task_1, task_2 and 3 more" in of_all


@pytest.mark.parametrize("gpu", [True, False])
def test_the_device_that_is_recorded_is_the_one_that_is_used(gpu, monkeypatch):
    """lm-eval's command records what it is given, by default cuda:0, and not what runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    none = dict.fromkeys(("include_path", "output_path", "batch_size", "max_batch_size", "metadata"))
    config = SimpleNamespace(model="icl", model_args={"pretrained": "gpt2"}, device="cuda:0", **none)
    assert checked_first(lambda config: config.device, config) == ("cuda:0" if gpu else "cpu")
