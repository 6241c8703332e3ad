"""One clear line for what cannot be used, before any forward pass."""

import json
import logging
import subprocess
import sys

import pytest
import torch
from lm_eval.tasks import TaskManager
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from lm_eval_icl import models
from lm_eval_icl.errors import InputError
from lm_eval_icl.models import ICL, DeepThink
from lm_eval_icl.plugin import MODELS
from tests import harness, tiny


@pytest.fixture(autouse=True)
def _no_forward(request, monkeypatch):
    """Unless a test says otherwise, only the load-time probe may run the model."""
    if "runs" in request.keywords:
        return
    from lm_eval_icl import models

    def refuse(*args, **kwargs):
        raise AssertionError("a forward pass before the refusal")

    monkeypatch.setattr(models, "score_packed", refuse)
    monkeypatch.setattr(models, "score_alone", refuse)
    monkeypatch.setattr(models, "continue_from", refuse)


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("T", 0, "T=0: must be a whole number, 1 or more"),
        ("T", -3, "T=-3"),
        ("T", 2.5, "T=2.5"),
        ("T", "many", "T='many'"),
        ("T", True, "T=True"),
        ("T", float("inf"), "T=inf"),
        ("T", None, "T=None"),
        ("eta", False, "eta=False"),
        ("eta", 0, "eta=0: must be a number above 0 and at most 1"),
        ("eta", 1.01, "eta=1.01"),
        ("eta", float("nan"), "eta=nan"),
        ("eta", "small", "eta='small'"),
        ("momentum", 1, "momentum=1: must be a number from 0 to below 1"),
        ("momentum", -0.1, "momentum=-0.1"),
        ("restart_positions", 1, "restart_positions=1: must be True or False"),
        ("overflow", "truncate", "overflow='truncate': must be error or drop"),
        ("pack_tokens", 0, "pack_tokens=0"),
        ("store_bytes", "big", "store_bytes='big'"),
        ("etaa", 0.1, "unknown model argument 'etaa': did you mean 'eta'?"),
        ("momentun", 0.1, "unknown model argument 'momentun': did you mean 'momentum'?"),
        ("attn_implementatoin", "eager", "did you mean 'attn_implementation'?"),
        ("zzzzzz", 1, "unknown model argument 'zzzzzz': README lists the arguments."),
    ],
)
def test_arguments(checkpoint, argument, value, says):
    with pytest.raises(InputError) as error:
        DeepThink(str(checkpoint("gpt2")), device="cpu", **{argument: value})
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("invicl", {"positions": "symetric"}, "invicl: positions='symetric': must be sequential, symmetric or none."),
        ("icl", {"positions": "None"}, "icl: positions='None': must be"),
        ("nope", {"positions": 0}, "nope: positions=0"),
        ("prefixicl", {"repeat": 0}, "prefixicl: repeat=0: must be a whole number, 1 or more."),
        ("pcw", {"repeat": 1.5}, "pcw: repeat=1.5"),
        ("pcw", {"windows": 0}, "pcw: windows=0: must be a whole number, 1 or more."),
        ("pcw", {"windows": "all"}, "pcw: windows='all'"),
        ("batchicl", {"layer": 0}, "batchicl: layer=0: must be a whole number, 1 or more."),
        ("batchicl", {"layer": 4}, "batchicl: layer=4: must be at most 3, the depth of GPT2LMHeadModel."),
        ("batchicl", {"layer": True}, "batchicl: layer=True"),
        ("icl", {"eta": 0.1}, "model argument 'eta' belongs to deepthink, not to this method."),
        ("invicl", {"T": 5}, "model argument 'T' belongs to deepthink"),
        ("invicl", {"windows": 2}, "model argument 'windows' belongs to pcw"),
        ("saicl", {"layer": 2}, "model argument 'layer' belongs to batchicl"),
        ("invicl", {"canonical_order": "yes"}, "canonical_order='yes': must be True or False."),
        ("icl", {"canonical_order": True}, "canonical_order=True: icl depends on the order of its demonstrations"),
        ("pcw", {"canonical_order": True, "windows": 2}, "canonical_order=True: pcw depends on the order"),
        ("invicl", {"canonical_order": True, "positions": "sequential"}, "canonical_order=True: invicl depends"),
    ],
)
def test_arguments_of_the_invariant_family(checkpoint, name, arguments, says):
    with pytest.raises(InputError) as error:
        getattr(models, MODELS[name].partition(":")[2])(str(checkpoint("gpt2")), device="cpu", **arguments)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shots", [0, 3])
def test_windows_of_more_demonstrations_than_a_task_has(checkpoint, shots):
    with pytest.raises(InputError, match=f"pcw: task 'one_token': windows=4: more than the {shots} demonstrations"):
        harness.run("pcw", checkpoint("gpt2"), ["one_token"], shots, args={"windows": 4})


@pytest.mark.runs
def test_windows_with_requests_that_have_no_context(checkpoint):
    """Mutual information asks for the options alone too, where there are no demonstrations to count."""
    harness.run("pcw", checkpoint("gpt2"), ["mutual"], 3, args={"windows": 2})


def test_dropping_leaves_no_window_too_large(small):
    """What is left would be plain ICL in one window, and not what was asked for."""
    with pytest.raises(InputError, match=r"drop leaves \d+ of its 11 demonstrations, and windows=11: more than"):
        harness.run("pcw", small, ["one_token"], 11, args={"windows": 11, "overflow": "drop"})


@pytest.mark.parametrize(
    "argument", [{"max_length": 99}, {"use_cache": False}, {"num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}]
)
def test_generation_arguments_that_cannot_be(checkpoint, argument):
    (name,) = argument
    with pytest.raises(InputError, match=f"task 'generate': generation argument {name}="):
        harness.run("icl", checkpoint("gpt2"), ["generate"], 1, gen_kwargs=argument)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("name", "args"), [("batchicl", {"layer": 2.0}), ("pcw", {"windows": 2.0}), ("icl", {"repeat": 2.0})]
)
def test_whole_numbers_may_be_written_with_a_point(checkpoint, name, args):
    whole = {argument: int(value) for argument, value in args.items()}
    found = [harness.run(name, checkpoint("gpt2"), ["one_token"], 3, args=given) for given in (args, whole)]
    assert harness.responses(found[0]) == harness.responses(found[1])
    assert found[0]["config"]["icl"] == found[1]["config"]["icl"]


def test_invariant_methods_need_a_query(checkpoint):
    with pytest.raises(InputError, match="lm-eval-icl: task 'empty_query', document 0: the query is empty"):
        harness.run("invicl", checkpoint("gpt2"), ["empty_query"], 2)


def test_what_hf_forwards_still_arrives(checkpoint):
    lm = ICL(str(checkpoint("llama")), device="cpu", attn_implementation="eager", rms_norm_eps=0.5)
    assert lm.model.config._attn_implementation == "eager"
    assert lm.model.config.rms_norm_eps == 0.5


def test_encoder_decoder(tmp_path):
    config = T5Config(vocab_size=500, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tiny.byte_level().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="'t5' loads as an encoder-decoder model"):
        ICL(str(tmp_path), device="cpu")


def test_state_space_model(tmp_path):
    config = AutoConfig.for_model("mamba", vocab_size=500, hidden_size=16, num_hidden_layers=2, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny.byte_level().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"MambaForCausalLM cannot be used.*keys and values"):
        ICL(str(tmp_path), device="cpu")


def test_no_checkpoint():
    with pytest.raises(InputError, match="pretrained='/nowhere/at/all': no checkpoint there"):
        ICL("/nowhere/at/all", device="cpu")


def test_restart_positions_on_a_model_without(checkpoint):
    with pytest.raises(InputError, match="BloomForCausalLM has no positions to give"):
        DeepThink(str(checkpoint("bloom")), device="cpu", restart_positions=True)


def test_empty_continuation(checkpoint):
    choices = "{{['a', '' if label else 'b']}}"
    harness.TASKS["empty"] = harness.task("empty", **harness.CHOICE, doc_to_choice=choices, target_delimiter="")
    with pytest.raises(InputError, match="task 'empty', document 1, option 1: the continuation is empty"):
        harness.run("icl", checkpoint("gpt2"), ["empty"], 1)


SMALL = {"n_positions": 220}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    tiny.save("gpt2", folder, **SMALL)
    return folder


def test_context_that_does_not_fit(small):
    with pytest.raises(InputError) as error:
        harness.run("icl", small, ["one_token", "described"], 11)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith("lm-eval-icl: 12 of 12 documents (tasks: described, one_token) do not fit the model's 220")
    assert "Lower --num_fewshot" in text and "overflow=drop" in text


def test_passes_that_do_not_fit(small):
    with pytest.raises(InputError, match="reach twice the demonstrations; restart_positions=True does not"):
        harness.run("deepthink", small, ["one_token"], 5)


def test_another_kind_of_request_is_checked_before_the_first_runs(small):
    """Log-likelihoods fit, a generation task in the same run does not."""
    with pytest.raises(InputError, match=r"tasks: long\).*max_gen_toks 180.*--gen_kwargs max_gen_toks"):
        harness.TASKS["long"] = {**harness.TASKS["generate"], "task": "long"}
        harness.TASKS["long"]["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 180}
        harness.run("icl", small, ["one_token", "long"], 2)


@pytest.mark.runs
def test_drop_leaves_out_whole_demonstrations_first_ones_first(small, caplog):
    logging.getLogger("lm_eval").propagate = True
    with caplog.at_level("WARNING"):
        results = harness.run("icl", small, ["many_tokens", "generate"], 11, args={"overflow": "drop"})
    left_out = results["config"]["icl"]["left_out"]
    assert set(left_out) == {"many_tokens", "generate"}
    assert left_out["many_tokens"]["documents"] == 6
    assert any("overflow=drop left out" in record.getMessage() for record in caplog.records)
    json.dumps(results["config"]["icl"])  # what the results file will hold

    # The same as hf on the prompts that are left, as many demonstrations as fit.
    lm = ICL(str(small), device="cpu")
    dropped = 0
    for sample in results["samples"]["many_tokens"]:
        prompt = sample["arguments"][0][0]
        continuations = [continuation for _, continuation in sample["arguments"]]
        for n in range(len(prompt.demonstrations) + 1):
            text = "".join([prompt.prefix, *prompt.demonstrations[n:], prompt.query])
            pairs = [lm._encode_pair(text, continuation) for continuation in continuations]
            if all(len(context) + len(answer) - 1 <= 220 for context, answer in pairs):
                break
        dropped += n
        for (context, answer), (response,) in zip(pairs, sample["resps"], strict=True):
            ids = torch.tensor([context + answer])
            logits = lm.model(ids[:, :-1]).logits[0, len(context) - 1 :]
            expected = logits.log_softmax(-1)[range(len(answer)), answer].sum().item()
            assert float(response[0]) == pytest.approx(expected, abs=1e-4)
    assert left_out["many_tokens"]["demonstrations"] == dropped > 6


def test_drop_does_not_help_a_query_that_is_too_long(small):
    harness.TASKS["endless"] = harness.task(
        "endless", **harness.CHOICE, doc_to_choice=["a", "b"], doc_to_text="{{text * 40}}"
    )
    with pytest.raises(InputError, match="No demonstration is left to leave out"):
        harness.run("icl", small, ["endless"], 1, args={"overflow": "drop"})


def test_missing_dataset():
    config = {**harness.task("missing", **harness.CHOICE), "dataset_path": "nobody/nothing", "dataset_name": "x"}
    del config["custom_dataset"]
    with pytest.raises(InputError, match=r"task 'missing': dataset 'nobody/nothing' \(x\) could not be loaded.*copy"):
        TaskManager(include_defaults=False).load([config])


def test_on_the_command_line_it_is_one_line(checkpoint, tmp_path):
    command = [sys.executable, "-m", "lm_eval", "--model", "deepthink", "--tasks", "icl_sst2", "--device", "cpu"]
    command += ["--model_args", f"pretrained={checkpoint('gpt2')},T=0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "lm-eval-icl: deepthink: T=0: must be a whole number, 1 or more."
    assert "Traceback" not in done.stderr


@pytest.mark.runs
@pytest.mark.parametrize(
    ("position", "says"),
    [
        (3, r"GPT2LMHeadModel cannot be used: the log-probability of a few tokens is nan"),
        (100, r"task 'one_token', document \d, option \d: the log-probability is nan"),
    ],
)
def test_a_broken_checkpoint(tmp_path, position, says):
    """Its first log-probability stops the run, before a metric makes an ordinary wrong answer of it."""
    model = tiny.build("gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight[position] = float("nan")
    model.save_pretrained(tmp_path)
    tiny.byte_level().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=says):
        harness.run("icl", tmp_path, ["one_token"], 3)
