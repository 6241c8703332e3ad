"""One clear line for what cannot be used, before any forward pass."""

import json
import logging
import re
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from lm_eval_icl import cli
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.methods import Method
from lm_eval_icl.prompts.layouts import Pattern, before
from tests import evaluation, processes, tiny
from tests.evaluation import ICL


@pytest.fixture(autouse=True)
def _no_forward(request, monkeypatch):
    """Unless a test says otherwise, only the load-time probe may run the model."""
    if "runs" in request.keywords:
        return
    from lm_eval_icl.methods import runner

    def refuse(*args, **kwargs):
        raise AssertionError("a forward pass before the refusal")

    monkeypatch.setattr(runner, "score_packed", refuse)
    monkeypatch.setattr(runner, "score_rows", refuse)
    monkeypatch.setattr(runner, "continue_from", refuse)


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("deepthink", {"T": 0}, "T=0: must be a whole number, 1 or more"),
        ("deepthink", {"T": 2.5}, "T=2.5"),
        ("deepthink", {"T": True}, "T=True"),
        ("deepthink", {"T": None}, "T=None"),
        ("deepthink", {"eta": 0}, "eta=0: must be a number above 0 and at most 1"),
        ("deepthink", {"eta": float("nan")}, "eta=nan"),
        ("deepthink", {"momentum": 1}, "momentum=1: must be a number from 0 to below 1"),
        ("deepthink", {"restart_positions": 1}, "restart_positions=1: must be True or False"),
        ("deepthink", {"overflow": "cut"}, "overflow='cut': must be drop or error."),
        ("deepthink", {"pack_tokens": 0}, "pack_tokens=0"),
        ("deepthink", {"store_bytes": "big"}, "store_bytes='big'"),
        ("deepthink", {"momentun": 0.1}, "unknown model argument 'momentun': did you mean 'momentum'?"),
        ("deepthink", {"t": 5}, "unknown model argument 't': did you mean 'T'?"),
        ("deepthink", {"attn_implementatoin": "eager"}, "unexpected keyword argument 'attn_implementatoin'"),
        ("icl", {"prefix_token_id": 421}, "prefix_token_id=421: must be one of the model's tokens, 0 to 420"),
        ("icl", {"attn_implementation": "flash"}, ", attn_implementation='flash': the model cannot be loaded"),
        ("icl", {"tokenizer": "/no/such"}, "tokenizer='/no/such': its tokenizer cannot be loaded"),
        ("invicl", {"positions": "symetric"}, "invicl: positions='symetric': must be sequential, symmetric or none."),
        ("icl", {"truncation": True}, "truncation=True: has no effect here (overflow=drop"),
        ("icl", {"device_map": "auto"}, "device_map=auto: has no effect here (it belongs to parallelize=True)"),
        ("icl", {"positions": "None"}, "icl: positions='None': must be"),
        ("prefixicl", {"repeat": 0}, "prefixicl: repeat=0: must be a whole number, 1 or more."),
        ("pcw", {"repeat": 1.5}, "pcw: repeat=1.5"),
        ("pcw", {"window_size": "all"}, "pcw: window_size='all'"),
        ("batchicl", {"layer": 0}, "batchicl: layer=0: must be a whole number, 1 or more."),
        ("batchicl", {"layer": 4}, "batchicl: layer=4: must be at most 3, the depth of GPT2LMHeadModel."),
        ("icl", {"eta": 0.1}, "model argument 'eta' belongs to deepthink and nbce, not to this method."),
        ("invicl", {"T": 5}, "model argument 'T' belongs to deepthink"),
        ("invicl", {"window_size": 2}, "model argument 'window_size' belongs to pcw"),
        ("saicl", {"layer": 2}, "model argument 'layer' belongs to batchicl"),
        ("invicl", {"canonical_order": "yes"}, "canonical_order='yes': must be True or False."),
    ],
)
def test_arguments(checkpoint, name, arguments, says):
    with pytest.raises(InputError, match=re.escape(says)):
        model_class(name)(str(checkpoint("gpt2")), device="cpu", **arguments)


@pytest.mark.parametrize(
    ("model", "task", "shots", "kwargs", "says"),
    [
        ("pcw", "one_token", 0, {"args": {"window_size": 4}}, "window_size=4: more than the 0 demonstrations"),
        ("pcw", "one_token", 3, {"args": {"window_size": 4}}, "window_size=4: more than the 3 demonstrations"),
        ("icl", "generate", 1, {"gen_kwargs": {"max_length": 99}}, "generation argument max_length="),
        ("icl", "generate", 1, {"gen_kwargs": {"use_cache": False}}, "generation argument use_cache="),
        ("icl", "generate", 1, {"gen_kwargs": {"num_return_sequences": 2}}, "generation argument num_return_sequences"),
        ("icl", "generate", 1, {"gen_kwargs": {"prompt_lookup_num_tokens": 3}}, "generation argument prompt_lookup"),
        ("icl", "generate", 1, {"gen_kwargs": {"max_gen_toks": 0}}, "max_gen_toks=0: must be 1 or more"),
        ("icl", "generate", 1, {"gen_kwargs": {"max_gen_toks": -5}}, "max_gen_toks=-5: must be 1 or more"),
    ],
)
def test_options_of_a_run_that_cannot_be(checkpoint, model, task, shots, kwargs, says):
    with pytest.raises(InputError, match=f"task '{task}': {says}"):
        evaluation.run(model, checkpoint("gpt2"), [task], shots, **kwargs)


def saved(model, path):
    model.save_pretrained(path)
    tiny.byte_level().save_pretrained(path)
    return str(path)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def causal(kind, **settings):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=500, **{**SMALL, **settings}))


def t5():
    config = T5Config(vocab_size=500, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    return T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (t5, "'t5' is an encoder-decoder model"),
        # transformers loads encoders as causal models, too. Their tokens see those behind them.
        (
            lambda: causal("bert", pad_token_id=0),
            "is bidirectional: a token's result changes with the tokens behind it",
        ),
    ],
    ids=["t5", "bert"],
)
def test_models_that_are_no_decoders(tmp_path, make, says):
    with pytest.raises(InputError, match=says):
        ICL(saved(make(), tmp_path), device="cpu")


def edit(file, **changes):
    """Change entries of a JSON file; None takes one out."""
    entries = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in entries.items() if value is not None}))


def cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


def as_pickle(folder, content):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")


class Printing:
    """What runs code where a pickle is read without care."""

    def __reduce__(self):
        return print, ("the pickle ran",)


def with_code(folder, **config):
    """A checkpoint that brings code of its own, which tells when it runs."""
    (folder / "its_own.py").write_text("raise AssertionError('code of the checkpoint ran')")
    edit(folder / "config.json", auto_map={"AutoConfig": "its_own.C", "AutoModelForCausalLM": "its_own.M"}, **config)


def without_weights_of(folder, part):
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: w for name, w in weights.items() if part not in name}, folder / "model.safetensors", {"format": "pt"}
    )


# What becomes of a good checkpoint -> what is said of it.
BROKEN = {
    "no folder": (shutil.rmtree, "neither a folder here nor a checkpoint"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "no checkpoint there.*Unrecognized model"),
    "configuration not JSON": (lambda f: cut(f / "config.json", 9), "config.json' is not a valid JSON file"),
    "unknown kind": (lambda f: edit(f / "config.json", model_type="gpt9"), "`gpt9` but Transformers does not recogn"),
    "other sizes": (lambda f: edit(f / "config.json", n_embd=64), "the model cannot be loaded.*mismatched_sizes"),
    "more layers": (lambda f: edit(f / "config.json", n_layer=4), "12 of the weights of GPT2LMHeadModel are not in"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "the model cannot be loaded.*no file named model.s"),
    "empty weights": (lambda f: cut(f / "model.safetensors", 0), r"the model cannot be loaded \(SafetensorError"),
    "a layer missing": (lambda f: without_weights_of(f, "h.1."), "h.1.attn.c_attn.bias, .*random ones would stand in"),
    "a pickle with code": (lambda f: as_pickle(f, {"w": Printing()}), "UnpicklingError: Weights only load failed"),
    "no tokenizer": (lambda f: [file.unlink() for file in f.glob("tok*")], "its tokenizer has no vocabulary: are its"),
    "tokenizer not JSON": (lambda f: cut(f / "tokenizer.json", 99), "its tokenizer cannot be loaded"),
    "code of its own": (lambda f: with_code(f, model_type="own"), "custom code .*argument `trust_remote_code=True`"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_checkpoint_that_cannot_be_used(tmp_path, capsys, broken):
    path = tmp_path / "model"
    tiny.save("gpt2", path)
    change, says = BROKEN[broken]
    change(path)
    with pytest.raises(InputError, match=f"^lm-eval-icl: pretrained={str(path)!r}: .*{says}") as error:
        ICL(str(path), device="cpu")
    assert "\x1b" not in str(error.value)
    assert "the pickle ran" not in capsys.readouterr().out


def test_a_name_that_nothing_has():
    says = "lm-eval-icl: pretrained='no/such': neither a folder here nor a checkpoint that could be had from the Hub"
    with pytest.raises(InputError, match=says):
        ICL("no/such", device="cpu")


BOOLEANS = "sees must be booleans of shape [3, 3], and is "


@pytest.mark.parametrize(
    ("name", "pattern", "says"),
    [
        ("Stretched", lambda n: Pattern(before(1)), f"{BOOLEANS}torch.bool of shape [1, 1]"),  # torch would stretch it
        ("Numbers", lambda n: Pattern(torch.ones(n, n).tril()), f"{BOOLEANS}torch.float32 of shape"),
        ("Doubled", lambda n: Pattern(before(n), copies=2), "sees must be booleans of shape [6, 6], and is"),
        ("SeesTheQuery", lambda n: Pattern(before(n), query=True), "query=True needs memory_depends_on_query"),
    ],
)
def test_a_pattern_that_is_none(monkeypatch, name, pattern, says):
    """Refused before a model is there."""
    members = {"pattern": lambda self, n: pattern(n), "__module__": __name__}
    monkeypatch.setitem(globals(), name, type(name, (Method,), members))
    with pytest.raises(InputError, match=f"^lm-eval-icl: {re.escape(f'{name.lower()}: pattern: {says}')}"):
        model_class(f"{__name__}:{name}")("no/such")


def vision_model():
    text = LlamaConfig(vocab_size=600, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen = CLIPVisionConfig(**vision, image_size=8, patch_size=4)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=seen, text_config=text))


def test_a_vision_model(tmp_path, capsys, monkeypatch):
    """Said in one short line, to those who evaluate and to those who train."""
    saved(vision_model(), tmp_path)
    says = "'llava' is a vision model (images and text), and these methods are defined for causal language models only"
    with pytest.raises(InputError) as error:
        ICL(str(tmp_path), device="cpu")
    line = error.value.message
    assert line.startswith(f"pretrained={str(tmp_path)!r}: {says}") and len(line) < 350 + len(str(tmp_path))
    command = ["train", "icl", "--model_args", f"pretrained={tmp_path}", "--tasks", "icl_demo_short"]
    monkeypatch.setattr(sys, "argv", ["lm-eval-icl", *command, "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert says in str(stopped.value)


@pytest.mark.runs
def test_code_of_a_checkpoint_that_transformers_knows_does_not_run_either(tmp_path):
    """`auto_map` beside a model type of transformers' own: its class is taken; asked for, the code is."""
    tiny.save("gpt2", tmp_path)
    with_code(tmp_path)
    evaluation.run("icl", tmp_path, ["one_token"], 1)
    with pytest.raises(InputError, match="code of the checkpoint ran"):
        ICL(str(tmp_path), device="cpu", trust_remote_code=True)


@pytest.mark.runs
def test_weights_in_a_pickle(checkpoint, tmp_path):
    """Tensors alone are read, by torch's reader that makes nothing else."""
    tiny.save("gpt2", tmp_path)
    as_pickle(tmp_path, load_file(tmp_path / "model.safetensors"))
    found = evaluation.answers("icl", tmp_path, ["one_token"], 1)
    assert found == evaluation.answers("icl", checkpoint("gpt2"), ["one_token"], 1)


def rows(path, number):
    """A checkpoint whose model knows the first tokens of its tokenizer only."""
    return saved(tiny.build("gpt2", vocab_size=number, bos_token_id=0, eos_token_id=0), path)


ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
evaluation.TASKS["rolling"] = evaluation.task(
    "rolling",
    **ROLLING,
    fewshot_split=None,
    metric_list=[{"metric": "byte_perplexity", "aggregation": "weighted_perplexity"}],
)


@pytest.mark.parametrize("task", ["one_token", "generate", "rolling"])
def test_a_token_that_the_model_does_not_know(tmp_path, task):
    """The tokenizer of another model: an index error deep in the model otherwise, and a dead GPU."""
    rows(tmp_path, 290)
    with pytest.raises(InputError, match=rf"task '{task}', document 0: token \d\d\d \('.*'\) is not among the 290"):
        evaluation.run("icl", tmp_path, [task], 2)


def without_special_tokens(path):
    tiny.save("gpt2", path)
    edit(path / "tokenizer_config.json", bos_token=None, eos_token=None, unk_token=None, pad_token=None)
    edit(path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def test_a_tokenizer_that_names_no_special_token(tmp_path):
    without_special_tokens(tmp_path)
    with pytest.raises(InputError, match=r"prefix_token_id=None: must be.*names no BOS and no EOS token"):
        ICL(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("changes", "shots", "says"),
    [
        (
            {"doc_to_choice": "{{['a', '' if label else 'b']}}", "target_delimiter": ""},
            1,
            "document 1, option 1: the continuation is empty",
        ),
    ],
)
def test_a_task_that_cannot_be_run(checkpoint, changes, shots, says):
    task = evaluation.task("odd", **{**evaluation.CHOICE, "doc_to_choice": ["a", "b"], **changes})
    with pytest.raises(InputError, match=f"^lm-eval-icl: task 'odd'[:,] {says}"):
        evaluation.run("icl", checkpoint("gpt2"), [task], shots)


@pytest.mark.runs
@pytest.mark.parametrize(
    "argument", [{"temperatur": 1.0}, {"temperature": -1.0, "do_sample": True}, {"num_beams": 0}, {"top_k": -2}]
)
def test_generation_arguments_that_transformers_refuses(checkpoint, argument):
    (name, *_) = argument
    with pytest.raises(InputError, match=f"task 'generate': generation arguments .*'{name}'.*refused by transformers"):
        evaluation.run("icl", checkpoint("gpt2"), ["generate"], 1, gen_kwargs={"do_sample": True, **argument})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    tiny.save("gpt2", folder, n_positions=220)
    return folder


def test_context_that_does_not_fit(small):
    says = r"12 of 12 documents \(tasks: described, one_token\) do not fit the model's 220.*needs \d+: .*"
    with pytest.raises(InputError, match=f"^lm-eval-icl: {says}Lower --num_fewshot, or leave overflow=error out"):
        evaluation.run("icl", small, ["one_token", "described"], 11, args={"overflow": "error"})


def test_another_kind_of_request_is_checked_before_the_first_runs(small):
    """Log-likelihoods fit, a generation task in the same run does not."""
    long = {**evaluation.TASKS["generate"], "task": "long"}
    long["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 220}
    with pytest.raises(InputError, match=r"tasks: long\).*max_gen_toks 220.*--gen_kwargs max_gen_toks"):
        evaluation.run("icl", small, ["one_token", long], 2)


@pytest.mark.runs
def test_what_is_dropped_is_said_in_one_line_a_run(small, caplog):
    logging.getLogger("lm_eval").propagate = True
    with caplog.at_level("WARNING"):
        results = evaluation.run("deepthink", small, ["many_tokens", "generate"], 11)
    left_out = results["config"]["icl"]["left_out"]
    assert set(left_out) == {"many_tokens", "generate"} and results["config"]["icl"]["overflow"] == "drop"
    assert left_out["many_tokens"]["documents"] == 6 < left_out["many_tokens"]["demonstrations"]
    (line,) = [line for line in caplog.messages if "do not fit" in line]
    n = sum(count["demonstrations"] for count in left_out.values())
    assert f"of 12 documents, 12 lose demonstrations ({n} in all) and 0" in line
    assert "tasks: generate, many_tokens. The passes" in line
    json.dumps(results["config"]["icl"])  # what the results file will hold


@pytest.mark.runs
def test_queries_that_are_too_long_are_cut(small, caplog):
    """And tasks without demonstrations are named in one line."""
    long = {**evaluation.TASKS["one_token"], "task": "mmlu_a", "doc_to_text": "{{text * (9 if label else 1)}}"}
    logging.getLogger("lm_eval").propagate = True
    icl = evaluation.run("deepthink", small, [long], 0, args={"max_length": 60})["config"]["icl"]
    (cut,) = [line for line in caplog.messages if "do not fit" in line]
    counts = icl["truncated"]["mmlu_a"]
    assert f"and {counts['documents']} do not fit without any either" in cut and f"({counts['tokens']} in all)" in cut
    (bare,) = [line for line in caplog.messages if "no demonstrations" in line]
    assert bare.startswith("The task has no demonstrations (mmlu_a): nothing to")
    assert bare.endswith("Give some with --num_fewshot 5, or take --tasks icl_mmlu, the setting of the papers.")


def test_an_answer_that_is_too_long_is_not_cut(small):
    endless = evaluation.task("endless", **evaluation.CHOICE, doc_to_choice="{{['a', text * 40]}}")
    says = r"even if their prompts are cut; .* \+ answer without its last token \d+\."
    with pytest.raises(InputError, match=says):
        evaluation.run("icl", small, [endless], 1)


@pytest.mark.parametrize(
    ("args", "options", "says"),
    [
        ("T=0", ["--tasks", "icl_sst2"], "lm-eval-icl: deepthink: T=0: must be a whole number, 1 or more."),
    ],
)
def test_on_the_command_line_it_is_one_line(checkpoint, tmp_path, args, options, says):
    line = ["--model", "deepthink", "--device", "cpu", "--model_args", f"pretrained={checkpoint('gpt2')},{args}"]
    done = processes.command(*line, *options, program="lm_eval", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(says)
    assert "Traceback" not in done.stderr
    if "icl_sst2" in options:  # arguments are refused before lm-eval reads the files of all tasks
        assert "Selected Tasks" not in done.stderr


def without_numbers(path, places):
    """A checkpoint whose model has no number for these positions."""
    model = tiny.build("gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight[places] = float("nan")
    return saved(model, path)


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
    with pytest.raises(InputError, match=says):
        evaluation.run("icl", without_numbers(tmp_path, position), ["one_token"], 3)
