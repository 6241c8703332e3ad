"""One clear line for what cannot be used, before any forward pass."""

import json
import logging
import re
import shutil

import pytest
import torch
from lm_eval.api.instance import Instance
from tokenizers import normalizers
from transformers import LlavaConfig, T5Config

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.inference.checkpoints import load_model
from lm_eval_icl.methods import Method, Predictor
from lm_eval_icl.prompts.layouts import Pattern, before
from lm_eval_icl.prompts.prompt import FewShotPrompt
from tests import evaluation, tiny
from tests.evaluation import ICL
from tests.smoke import model_types as smoke_models


@pytest.fixture(autouse=True)
def _no_forward(request, monkeypatch):
    """Unless a test says otherwise, only the load-time probe may run the model."""
    if "runs" in request.keywords:
        return
    from lm_eval_icl.inference import scoring
    from lm_eval_icl.methods import continuing

    def refuse(*args, **kwargs):
        raise AssertionError("a forward pass before the refusal")

    monkeypatch.setattr(scoring, "score_packed", refuse)
    monkeypatch.setattr(scoring, "score_rows", refuse)
    monkeypatch.setattr(continuing, "continue_from", refuse)


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("deepthink", {"T": 0}, "T=0: must be a whole number, 1 or more"),
        ("deepthink", {"eta": 0}, "eta=0: must be a number above 0 and at most 1"),
        (
            "deepthink",
            {"momentun": 0.1},
            "unknown model argument 'momentun': did you mean 'momentum'?",
        ),
        ("pcw", {"window": 2}, "unknown model argument 'window': did you mean 'window_size'?"),
        (
            "icl",
            {"prefix_token_id": 421},
            "prefix_token_id=421: must be one of the model's tokens, 0 to 420",
        ),
        (
            "invicl",
            {"positions": "symetric"},
            "invicl: positions='symetric': must be sequential, symmetric or none.",
        ),
        (
            "icl",
            {"device_map": "auto"},
            "device_map=auto: has no effect here (it belongs to parallelize=True)",
        ),
        (
            "batchicl",
            {"layer": 4},
            "batchicl: layer=4: must be at most 3, the depth of GPT2LMHeadModel.",
        ),
        (
            "icl",
            {"eta": 0.1},
            "model argument 'eta' belongs to deepthink and nbce, not to this method.",
        ),
    ],
)
def test_arguments(checkpoint, name, arguments, says):
    with pytest.raises(InputError, match=re.escape(says)):
        model_class(name)(str(checkpoint("gpt2")), device="cpu", **arguments)


@pytest.mark.parametrize(
    ("model", "task", "shots", "kwargs", "says"),
    [
        (
            "pcw",
            "one_token",
            3,
            {"args": {"window_size": 4}},
            "window_size=4: must not exceed the 3 demonstrations",
        ),
        (
            "icl",
            "generate",
            1,
            {"gen_kwargs": {"max_length": 99}},
            "generation argument max_length=",
        ),
        (
            "icl",
            "generate",
            1,
            {"gen_kwargs": {"max_gen_toks": 0}},
            "max_gen_toks=0: must be 1 or more",
        ),
    ],
)
def test_options_of_a_run_that_cannot_be(checkpoint, model, task, shots, kwargs, says):
    with pytest.raises(InputError, match=f"task '{task}': {says}"):
        evaluation.run(model, checkpoint("gpt2"), [task], shots, **kwargs)


def saved(model, path):
    model.save_pretrained(path)
    tiny.byte_level().save_pretrained(path)
    return str(path)


def test_models_that_are_no_decoders(tmp_path):
    T5Config().save_pretrained(tmp_path / "t5")
    smoke_models.save("bert", tmp_path / "bert")  # which transformers loads as a causal model
    for name, says in (
        ("t5", "'t5' is an encoder-decoder model"),
        ("bert", "is bidirectional: a token's result cha"),
    ):
        with pytest.raises(InputError, match=says):
            ICL(str(tmp_path / name), device="cpu")
    LlavaConfig().save_pretrained(tmp_path / "llava")
    with pytest.raises(InputError, match="llava': 'llava' is a vision model"):
        ICL(str(tmp_path / "llava"), device="cpu")
    with pytest.raises(InputError, match="t5': 't5' is an encoder-decoder model; these methods"):
        load_model({"pretrained": tmp_path / "t5"})


def test_a_chat_template_is_not_applied_where_nobody_asks_for_it(chat_checkpoint, caplog):
    path = chat_checkpoint("gpt2")
    with caplog.at_level("WARNING", logger="lm_eval.icl"):
        load_model({"pretrained": path})
    [line] = [line for line in caplog.messages if "chat template" in line]
    assert line.startswith(f"{path} has a chat template, which is not applied here: prompts are ")


def edit(file, **changes):
    """Change entries of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def with_code(folder, **config):
    """A checkpoint that brings code of its own, which tells when it runs."""
    (folder / "its_own.py").write_text("raise AssertionError('code of the checkpoint ran')")
    edit(
        folder / "config.json",
        auto_map={"AutoConfig": "its_own.C", "AutoModelForCausalLM": "its_own.M"},
        **config,
    )


def without_vocabulary(folder):
    (folder / "tokenizer.json").unlink()
    edit(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")


# What becomes of a good checkpoint -> what is said of it.
BROKEN = {
    "no folder": (shutil.rmtree, "neither a folder here nor a checkpoint"),
    "more layers": (
        lambda f: edit(f / "config.json", n_layer=4),
        "12 of the weights of GPT2LMHeadModel are not in .*random weights would replace",
    ),
    "no vocabulary": (without_vocabulary, "its tokenizer has no vocabulary: check that its files"),
    "code of its own": (
        lambda f: with_code(f, model_type="own"),
        "custom code .*argument `trust_remote_code=True`",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_checkpoint_that_cannot_be_used(tmp_path, broken):
    path = tmp_path / "model"
    tiny.save("gpt2", path)
    change, says = BROKEN[broken]
    change(path)
    with pytest.raises(InputError, match=f"^lm-eval-icl: pretrained={str(path)!r}: .*{says}"):
        ICL(str(path), device="cpu")


BOOLEANS = "sees must be booleans of shape [3, 3], and is "


@pytest.mark.parametrize(
    ("name", "pattern", "says"),
    [
        (
            "Stretched",
            lambda n: Pattern(before(1)),
            f"{BOOLEANS}torch.bool of shape [1, 1]",
        ),  # torch would stretch it
        (
            "SeesTheQuery",
            lambda n: Pattern(before(n), query=True),
            "query=True needs a class that derives from ByQuery",
        ),
    ],
)
def test_a_pattern_that_is_none(monkeypatch, name, pattern, says):
    """Refused before a model is there."""
    members = {"pattern": lambda self, n: pattern(n), "__module__": __name__}
    monkeypatch.setitem(globals(), name, type(name, (Method,), members))
    with pytest.raises(
        InputError, match=f"^lm-eval-icl: {re.escape(f'{name.lower()}: pattern: {says}')}"
    ):
        model_class(f"{__name__}:{name}")("no/such")


def test_a_token_that_the_model_does_not_know(tmp_path):
    """The tokenizer of another model: an index error deep in the model otherwise, and a dead
    GPU."""
    saved(tiny.build("gpt2", vocab_size=290, bos_token_id=0, eos_token_id=0), tmp_path)
    with pytest.raises(
        InputError,
        match=r"task 'one_token', document 0: token \d\d\d \('.*'\) is not among the 290",
    ):
        evaluation.run("icl", tmp_path, ["one_token"], 2)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    tiny.save("gpt2", folder, n_positions=220)
    return folder


def test_context_that_does_not_fit(small):
    says = (
        r"12 of 12 documents \(tasks: described, one_token\) do not fit the model's 220.*needs \d+"
    )
    advice = "Lower --num_fewshot, or leave overflow=error out"
    with pytest.raises(InputError, match=f"^lm-eval-icl: {says}: .*{advice}"):
        evaluation.run("icl", small, ["one_token", "described"], 11, args={"overflow": "error"})


@pytest.mark.runs
def test_what_is_dropped_is_said_in_one_line_a_run(small, caplog):
    logging.getLogger("lm_eval").propagate = True
    with caplog.at_level("WARNING"):
        results = evaluation.run("deepthink", small, ["many_tokens", "generate"], 11)
    left_out = results["config"]["icl"]["left_out"]
    assert set(left_out) == {"many_tokens", "generate"}
    assert results["config"]["icl"]["overflow"] == "drop"
    assert left_out["many_tokens"]["documents"] == 6 < left_out["many_tokens"]["demonstrations"]
    assert sum("do not fit" in line for line in caplog.messages) == 1
    json.dumps(results["config"]["icl"])  # what the results file will hold


@pytest.mark.runs
def test_queries_that_are_too_long_are_cut(small, caplog):
    text = "{{text * (9 if label else 1)}}"
    long = evaluation.choice("mmlu_a", "a", "b", "c", doc_to_text=text)
    logging.getLogger("lm_eval").propagate = True
    icl = evaluation.run("deepthink", small, [long], 0, args={"max_length": 60})["config"]["icl"]
    (cut,) = [line for line in caplog.messages if "do not fit" in line]
    counts = icl["truncated"]["mmlu_a"]
    assert f"and {counts['documents']} do not fit even without demonstrations" in cut
    assert f"({counts['tokens']} in all)" in cut


def test_texts_that_are_too_long_are_not_generated(small):
    says = (
        r"6 of 6 documents \(tasks: generate\) do not fit the model's 220 positions even if their "
        r"prompts are cut; .* \+ max_gen_toks 300\. Lower max_gen_toks \(--gen_kwargs"
    )
    with pytest.raises(InputError, match=says):
        evaluation.run("icl", small, ["generate"], 0, gen_kwargs={"max_gen_toks": 300})


def test_an_answer_that_is_too_long_is_not_cut(small):
    endless = evaluation.task("endless", **evaluation.CHOICE, doc_to_choice="{{['a', text * 40]}}")
    says = r"even if their prompts are cut; .* \+ answer without its last token \d+\."
    with pytest.raises(InputError, match=says):
        evaluation.run("icl", small, [endless], 1)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("position", "says"),
    [
        (3, r"GPT2LMHeadModel cannot be used: the log-probability of a few tokens is nan"),
        (100, r"task 'one_token', document \d, option \d: the log-probability is nan"),
    ],
)
def test_a_broken_checkpoint(tmp_path, position, says):
    """A position without a number: its first log-probability stops the run, before a metric takes
    it for an answer."""
    model = tiny.build("gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight[position] = float("nan")
    with pytest.raises(InputError, match=says):
        evaluation.run("icl", saved(model, tmp_path), ["one_token"], 3)


def test_a_context_without_tokens():
    """Its tokenizer strips blanks, and has no BOS."""
    tokenizer = tiny.byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    lm = ICL(tiny.build("gpt2"), tokenizer=tokenizer, device="cpu")
    request = Instance("generate_until", {}, (FewShotPrompt("", (), " "), {}), 0, ("t", 3, 1))
    says = "task 't', document 3: the context is empty, so there is nothing to continue"
    with pytest.raises(InputError, match=says):
        lm.generate_until([request])
    with pytest.raises(InputError, match="query 1: the query is empty: there is nothing to cont"):
        Predictor(lm.model, tokenizer, lm.method).generate([], ["a", " "])


def test_an_option_without_text(checkpoint):
    none = {"doc_to_target": "", "target_delimiter": ""}
    empty = evaluation.task("empty", output_type="loglikelihood", **none)
    says = "task 'empty', document 0, option 0: the continuation is empty"
    with pytest.raises(InputError, match=says):
        evaluation.run("icl", checkpoint("gpt2"), [empty], 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({}, "pretrained='': must be the name or folder"), ({"device": "cuda:7"}, "finds no GPU")],
)
def test_no_checkpoint_and_no_gpu(checkpoint, monkeypatch, arguments, says):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match=says):
        ICL(str(checkpoint("gpt2")) if arguments else "", **arguments)


def test_a_tokenizer_that_is_not_there(checkpoint):
    says = "tokenizer='no/such': its tokenizer cannot be loaded .*--model_args tokenizer=..."
    with pytest.raises(InputError, match=says):
        ICL(str(checkpoint("gpt2")), device="cpu", tokenizer="no/such")


def test_a_tokenizer_without_special_tokens(tmp_path):
    """Its prefix is given, and pads; lm-eval would pad with a token that the model has not."""
    model = tiny.build("gpt2")
    tokenizer = tiny.byte_level()
    tokenizer.bos_token = tokenizer.eos_token = None
    lm = ICL(model, tokenizer=tokenizer, device="cpu", prefix_token_id=7)
    assert lm.tokenizer.pad_token_id == lm.prefix_token_id == 7


def test_thinking_has_no_options(checkpoint):
    lm = ICL(str(checkpoint("gpt2")), device="cpu", enable_thinking=True, think_end_token=5)
    first, second, third = (lm.tok_encode(text) for text in (" so", " then", "  yes"))
    assert lm.text_of([*first, 5, *second, 5, *third], []) == "yes"
    with pytest.raises(ValueError, match="enable_thinking=True is not compatible with loglikelih"):
        lm.loglikelihood([])


def test_an_argument_without_a_value_is_no_other(checkpoint):
    """An empty subfolder is the default of `hf`."""
    assert ICL(str(checkpoint("gpt2")), device="cpu", subfolder="").pretrained
