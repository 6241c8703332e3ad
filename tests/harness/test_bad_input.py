"""One clear line for what cannot be used, before any forward pass."""

import importlib.util
import inspect
import json
import logging
import re
import shutil
import sys
from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset, DatasetDict
from lm_eval.models.huggingface import HFLM
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
from lm_eval_icl.harness import hf_arguments
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.methods import Method, Predictor, make
from lm_eval_icl.prompts.layouts import Pattern, before
from tests import evaluation, processes, tiny
from tests.evaluation import ICL, DeepThink


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
        ("deepthink", {"momentun": 0.1, "trust_remote_code": True}, "'momentun': did you mean 'momentum'?"),
        ("deepthink", {"t": 5}, "unknown model argument 't': did you mean 'T'?"),
        ("deepthink", {"attn_implementatoin": "eager"}, "did you mean 'attn_implementation'?"),
        ("icl", {"zzzzzz": 1}, "'zzzzzz': there are canonical_order, overflow, pack_tokens, positions, pretrained"),
        ("invicl", {"positions": "symetric"}, "invicl: positions='symetric': must be sequential, symmetric or none."),
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
        ("icl", {"canonical_order": True}, "canonical_order=True: icl depends on the order of its demonstrations"),
        ("pcw", {"canonical_order": True, "window_size": 2}, "canonical_order=True: pcw depends on the order"),
    ],
)
def test_arguments(checkpoint, name, arguments, says):
    with pytest.raises(InputError, match=re.escape(says)):
        model_class(name)(str(checkpoint("gpt2")), device="cpu", **arguments)


def test_whole_numbers_may_be_written_with_a_point():
    for name, argument in (("batchicl", "layer"), ("pcw", "window_size"), ("icl", "repeat")):
        assert make(name, {argument: 2.0}) == make(name, {argument: 2})


@pytest.mark.runs
def test_windows_with_requests_that_have_no_context(checkpoint):
    """Mutual information asks for the options alone too, where there are no demonstrations to count."""
    evaluation.run("pcw", checkpoint("gpt2"), ["mutual"], 3, args={"window_size": 2})


@pytest.mark.parametrize(
    ("model", "task", "shots", "kwargs", "says"),
    [
        ("pcw", "one_token", 0, {"args": {"window_size": 4}}, "window_size=4: more than the 0 demonstrations"),
        ("pcw", "one_token", 3, {"args": {"window_size": 4}}, "window_size=4: more than the 3 demonstrations"),
        ("icl", "one_token", 1, {"limit": 0}, "--limit leaves no documents"),
        ("icl", "one_token", 1, {"limit": -1}, "--limit leaves no documents"),
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


def test_what_hf_forwards_still_arrives(checkpoint):
    lm = ICL(str(checkpoint("llama")), device="cpu", attn_implementation="eager", rms_norm_eps=0.5)
    assert lm.model.config._attn_implementation == "eager"
    assert lm.model.config.rms_norm_eps == 0.5


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


def test_an_encoder_that_is_used_as_a_decoder(tmp_path):
    ICL(saved(causal("bert", pad_token_id=0, is_decoder=True), tmp_path), device="cpu")


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
    "no folder": (shutil.rmtree, r"no checkpoint there \(no such folder\)"),
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


@pytest.mark.parametrize("argument", ["pretrained", "tokenizer", "peft", "delta"])
@pytest.mark.parametrize("path", ["./no", "../no/such", "~/no", "no/such/folder", "no/", "/no/such"])
def test_a_path_where_nothing_is(checkpoint, argument, path):
    """transformers would take most of them for names on the Hub."""
    with pytest.raises(InputError) as error:
        ICL(**{"pretrained": str(checkpoint("gpt2")), "device": "cpu", argument: path})
    home = " (~ stands for nothing here: write the path in full)" if path == "~/no" else ""
    assert str(error.value) == f"lm-eval-icl: {argument}={path!r}: no checkpoint there (no such folder){home}."


def test_a_file_in_place_of_its_folder(checkpoint):
    file = str(checkpoint("gpt2") / "model.safetensors")
    with pytest.raises(InputError, match=f"pretrained='{file}': a file: give the folder that it is in"):
        ICL(file, device="cpu")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"truncation": True}, "truncation=True has no effect here: prompts that do not fit lose whole"),
        ({"logits_cache": False}, "logits_cache=False has no effect here: queries that are equal always run once"),
        ({"use_fast_tokenizer": False}, "use_fast_tokenizer=False has no effect here: the parts of a prompt are found"),
        ({"max_batch_size": 8}, "max_batch_size=8 has an effect only with batch_size=auto"),
        ({"device_map": "auto"}, "device_map='auto' has an effect only with parallelize=True"),
        ({"max_cpu_memory": "1GiB"}, "max_cpu_memory='1GiB' has an effect only with parallelize=True"),
        ({"max_memory_per_gpu": 1}, "max_memory_per_gpu=1 has an effect only with parallelize=True"),
        ({"offload_folder": "x"}, "offload_folder='x' has an effect only with parallelize=True"),
        ({"trust_remote_code": "maybe"}, "trust_remote_code='maybe': must be True or False."),
        ({"parallelize": "yes"}, "parallelize='yes': must be True or False."),
        ({"add_bos_token": 1}, "add_bos_token=1: must be True or False."),
        ({"dtype": "fp16"}, "dtype='fp16': must be auto or a floating-point type of torch's, such as bfloat16."),
        ({"softmax_dtype": "int8"}, "softmax_dtype='int8': must be a floating-point type of torch's, such as float32."),
        ({"mixed_precision_dtype": "float64"}, "mixed_precision_dtype='float64': must be float16 or bfloat16."),
        ({"max_length": 0}, "max_length=0: must be a whole number, 1 or more."),
        ({"max_length": "99"}, "max_length='99': must be a whole number, 1 or more."),
        ({"backend": "seq2seq"}, "backend='seq2seq': must be causal"),
        ({"backend": "cusal"}, "backend='cusal': must be causal"),
        *(
            ({"batch_size": size}, f"batch_size={size!r}: must be a whole number, 1 or more, or auto")
            for size in (0, "-2", "many", 2.5, True, "auto:x")
        ),
        *(
            ({"prefix_token_id": token}, f"prefix_token_id={token!r}: must be one of the model's tokens, 0 to 420")
            for token in (421, -1, "the", 0.5)
        ),
        ({"device": "gpu"}, "device='gpu': there is no such device here: give cpu, cuda"),
        ({"device": "cuda:99"}, "device='cuda:99': (there is no such device here|here is no GPU)"),
    ],
)
def test_arguments_of_hf(checkpoint, args, says):
    with pytest.raises(InputError, match=f"^lm-eval-icl: (model argument )?{says}"):
        ICL(str(checkpoint("gpt2")), **{"device": "cpu", **args})


def test_every_argument_of_hf_has_an_effect_or_is_refused():
    """A new one has to be looked at: does it do here what it does in `hf`?"""
    used = set(
        "pretrained backend revision subfolder tokenizer max_length device dtype softmax_dtype mixed_precision_dtype "
        "batch_size trust_remote_code add_bos_token prefix_token_id parallelize tp_plan peft delta autogptq gptqmodel "
        "gguf_file think_end_token enable_thinking chat_template_args".split()
    )
    assert set(inspect.signature(HFLM.__init__).parameters) - {"self", "kwargs"} == (
        used | hf_arguments._NO_EFFECT.keys() | hf_arguments._NEEDS.keys() - {"device_map"}
    )


def test_a_model_that_is_loaded_is_not_loaded_otherwise(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint("gpt2"))
    tokenizer = str(checkpoint("gpt2"))
    ICL(model, tokenizer=tokenizer, device="cpu")
    for args in ({"dtype": "float64"}, {"peft": str(checkpoint("gpt2"))}, {"attn_implementation": "eager"}):
        (name,) = args
        with pytest.raises(InputError, match=f"model argument {name}=.*: says how to load a model"):
            ICL(model, tokenizer=tokenizer, device="cpu", **args)


def test_chat_templates_that_are_not_there_or_not_applied(checkpoint, chat_checkpoint):
    path = checkpoint("gpt2")
    says = f"--apply_chat_template: the tokenizer of {path} has no chat template: leave the option out"
    with pytest.raises(InputError, match=says):
        evaluation.run("icl", path, ["one_token"], 1, apply_chat_template=True)
    with pytest.raises(InputError, match=says):  # where the command asks for it
        ICL(str(path), device="cpu").chat_template(True)
    assert ICL(str(chat_checkpoint("gpt2")), device="cpu").chat_template(True)
    for name, value in (("chat_template_args", {"a": 1}), ("enable_thinking", False)):
        with pytest.raises(InputError, match=f"model argument {name} has an effect only with --apply_chat_template"):
            evaluation.run("icl", path, ["one_token"], 1, args={name: value})


@pytest.mark.parametrize(
    ("config", "args", "library"),
    [
        (None, {"load_in_8bit": True}, "bitsandbytes"),
        (None, {"autogptq": True}, "auto.gptq"),
        (None, {"gptqmodel": True}, "gptqmodel"),
        ({"quant_method": "gptq", "bits": 4}, {}, "optimum"),
        ({"quant_method": "awq", "bits": 4}, {}, "gptqmodel"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, {}, "compressed.tensors"),
    ],
)
def test_a_library_that_is_missing(tmp_path, config, args, library):
    if importlib.util.find_spec(library.replace(".", "_")):
        pytest.skip(f"{library} is installed")
    tiny.save("gpt2", tmp_path)
    edit(tmp_path / "config.json", quantization_config=config)
    with pytest.raises(InputError, match=f"model cannot be .*, since a library is missing .*{library}") as error:
        ICL(str(tmp_path), device="cpu", **args)
    assert "pip install" in str(error.value) and "cut short" not in str(error.value)


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


class Late(Method):
    """Right for the three demonstrations that are tried."""

    def pattern(self, n):
        return Pattern(before(min(n, 4)))


def test_a_pattern_that_is_none_for_a_prompt(checkpoint):
    """Refused before its first pass."""
    says = r"late: pattern: sees must be booleans of shape \[5, 5\]"
    with pytest.raises(InputError, match=says):
        evaluation.run(f"{__name__}:Late", checkpoint("gpt2"), ["one_token"], 5)
    predictor = Predictor(*tiny.load(checkpoint("gpt2")), Late())
    with pytest.raises(InputError, match=says):
        predictor.score(["a b"] * 5, ["c"], [" d"])


@dataclass(frozen=True)
class Careless(Method):
    """Its arguments are compared without a look at their type, and those of all methods are not checked."""

    hubs: int = 1

    def __post_init__(self):
        self._check("hubs", fine=self.hubs > 0, must="above 0")

    def pattern(self, n):
        return Pattern(before(n))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"hubs": "many"}, "careless: TypeError: "),
        ({"positions": "symetric"}, "careless: positions='symetric': must be sequential, symmetric or none"),
        ({"repeat": 0}, "careless: repeat=0: must be a whole number"),
    ],
)
def test_arguments_that_a_method_of_ones_own_does_not_check(arguments, says):
    with pytest.raises(InputError, match=says):
        Careless.from_arguments(arguments)
    assert Careless.from_arguments({"positions": None}).positions == "none"


def test_a_check_cannot_be_written_the_wrong_way_round():
    with pytest.raises(TypeError):
        Late()._check("repeat", "1 or more", False)
    with pytest.raises(InputError, match=r"late: repeat=1: must be 2 or more\."):
        Late()._check("repeat", fine=False, must="2 or more")


@pytest.mark.parametrize(
    "pretrained", [{}, {"pretrained": None}, {"pretrained": 7}, {"pretrained": ["gpt2"]}, {"pretrained": ""}]
)
def test_nothing_to_load(pretrained):
    with pytest.raises(InputError, match=r"lm-eval-icl: pretrained=.*: must be the name or folder of a checkpoint"):
        ICL(**pretrained, device="cpu")


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


def test_arguments_that_loading_fails_on(checkpoint, tmp_path):
    for args, says in (
        ({"attn_implementation": "flash"}, ", attn_implementation='flash': the model cannot be loaded"),
        ({"peft": str(tmp_path)}, f", peft='{tmp_path}': the model cannot be loaded"),
        ({"enable_thinking": True}, r"cannot be made of these arguments \(ValueError: .*think_end_token"),
        ({"tokenizer": str(tmp_path)}, f"tokenizer='{tmp_path}': its tokenizer cannot be loaded"),
        ({"tp_plan": "auto", "parallelize": True}, "mutually exclusive"),
        ({"gguf_file": "none.gguf"}, "none.gguf"),
    ):
        with pytest.raises(InputError, match=f"^lm-eval-icl: .*{says}"):
            ICL(str(checkpoint("gpt2")), device="cpu", **args)


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


@pytest.mark.runs
@pytest.mark.parametrize("number", [420, 640])
def test_tokens_and_rows_that_are_never_used(tmp_path, number):
    """Many tokenizers have a few more tokens than their models, many models more rows than their tokenizers."""
    rows(tmp_path, number)
    assert len(tiny.byte_level()) == 421
    evaluation.TASKS["short"] = evaluation.task(
        "short", **evaluation.CHOICE, doc_to_choice=["no", "yes"], doc_to_text="a{{label}}"
    )
    assert len(evaluation.answers("icl", tmp_path, ["short"], 2)) == 12


def without_special_tokens(path):
    tiny.save("gpt2", path)
    edit(path / "tokenizer_config.json", bos_token=None, eos_token=None, unk_token=None, pad_token=None)
    edit(path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def test_a_tokenizer_that_names_no_special_token(tmp_path):
    without_special_tokens(tmp_path)
    with pytest.raises(InputError, match=r"names no BOS and no EOS token.*prefix_token_id=N"):
        ICL(str(tmp_path), device="cpu")


@pytest.mark.runs
def test_a_prefix_token_given_by_hand(checkpoint, tmp_path):
    """lm-eval adds a padding token that the model does not know; padding changes nothing."""
    without_special_tokens(tmp_path)
    names = ["mutual", "generate"]
    found = evaluation.answers("icl", tmp_path, names, 1, args={"prefix_token_id": 0})
    assert len(found) == 30
    assert found == evaluation.answers("icl", checkpoint("gpt2"), names, 1)


@pytest.mark.parametrize(
    ("changes", "shots", "says"),
    [
        (
            {"doc_to_choice": "{{['a', '' if label else 'b']}}", "target_delimiter": ""},
            1,
            "document 1, option 1: the continuation is empty",
        ),
        ({}, 13, "num_fewshot=13: its few-shot split has 12 documents .*lower --num_fewshot"),
        ({"fewshot_config": {"sampler": "default"}}, 13, "num_fewshot=13: its few-shot split has 12 documents"),
        ({"fewshot_split": "test", "fewshot_config": {"sampler": "default"}}, 6, "num_fewshot=6: .* has 6 documents"),
        ({}, -1, "num_fewshot=-1: must be 0 or more"),
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


def test_restart_positions_on_a_model_without(checkpoint):
    with pytest.raises(InputError, match="BloomForCausalLM has no positions to give"):
        DeepThink(str(checkpoint("bloom")), device="cpu", restart_positions=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    tiny.save("gpt2", folder, n_positions=220)
    return folder


def test_context_that_does_not_fit(small):
    says = r"12 of 12 documents \(tasks: described, one_token\) do not fit the model's 220.*Lower --num_fewshot, or"
    with pytest.raises(InputError, match=f"^lm-eval-icl: {says} leave overflow=error out"):
        evaluation.run("icl", small, ["one_token", "described"], 11, args={"overflow": "error"})


@pytest.mark.parametrize(
    ("name", "args", "parts", "advice"),
    [
        ("icl", {}, "prefix and demonstrations, query, answer", "Lower --num_fewshot, or leave.* the first ones first"),
        ("invicl", {}, "prefix and demonstrations, query, answer", "longest ones first"),
        ("batchicl", {}, "prefix and demonstrations, query", "longest ones first"),
        ("deepthink", {}, "prefix and demonstrations", "restart_positions=True does not. Lower --num_fewshot"),
    ],
)
def test_the_numbers_of_the_refusal_add_up(checkpoint, name, args, parts, advice):
    choices = ["no", "yes, of course it is"]
    task = {**evaluation.TASKS["described"], "task": "long_label", "doc_to_choice": choices}
    with pytest.raises(InputError, match=advice) as error:
        evaluation.run(name, checkpoint("gpt2"), [task], 5, args={"max_length": 90, "overflow": "error", **args})
    needed, sum_of = re.search(r"the longest needs (\d+): ([^.]*)\. ", str(error.value)).groups()
    terms = [re.fullmatch(r"(.*?)(?: without its last token)? (\d+)", term).groups() for term in sum_of.split(" + ")]
    assert ", ".join(part for part, _ in terms) == parts
    assert sum(int(number) for _, number in terms) == int(needed) > 90


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
    assert f"of 12 documents, 12 lose demonstrations ({n} in all); tasks: generate, many_tokens. The passes" in line
    json.dumps(results["config"]["icl"])  # what the results file will hold


@pytest.mark.runs
@pytest.mark.parametrize("chat", [False, True])
def test_tasks_without_demonstrations_are_one_line(chat_checkpoint, chat, caplog):
    names = ["mmlu_a", "mmlu_b", "bbh_cot_c", "one_token"]
    tasks = [{**evaluation.TASKS["one_token"], "task": name} for name in names]
    logging.getLogger("lm_eval").propagate = True
    with caplog.at_level("WARNING", "lm_eval"):
        evaluation.run("deepthink", chat_checkpoint("llama3"), tasks, 0, apply_chat_template=chat)
    ours = [line for line in caplog.messages if "demonstrations" in line]
    assert len(ours) == 1
    assert ours[-1].startswith("4 of 4 tasks have no demonstrations (mmlu_a, mmlu_b, bbh_cot_c and 1 more): nothing to")
    assert "--num_fewshot 5, or take --tasks icl_mmlu,icl_bbh," in ours[-1] and "chains of thought" in ours[-1]


def two_long_queries_in_six():
    """A task of which documents 1 and 4 are too long for 60 positions without demonstrations too."""
    docs = [{"text": "x " * (90 if i % 3 == 1 else 5), "label": 0, "other": ""} for i in range(6)]
    samples = [{"text": text, "label": 0, "other": ""} for text in ("a film", "b", "c")]
    return evaluation.task(
        "uneven",
        **evaluation.CHOICE,
        custom_dataset=lambda **_: DatasetDict({"test": Dataset.from_list(docs)}),
        training_split=None,
        fewshot_split=None,
        fewshot_config={"sampler": "first_n", "samples": samples},
        doc_to_choice=["a", "b"],
    )


@pytest.mark.runs
@pytest.mark.parametrize("shots", tiny.slow_but([3], [0, 3]))
def test_queries_that_are_too_long_are_cut_or_named(small, shots, caplog):
    evaluation.TASKS["uneven"] = two_long_queries_in_six()
    args = {"max_length": 60, "overflow": "error"}
    with pytest.raises(InputError, match=r"They are document 1 of uneven, document 4 of uneven\."):
        evaluation.run("icl", small, ["uneven"], shots, args=args)
    # Where documents are chosen already, lm-eval gives them other numbers.
    with pytest.raises(InputError, match=r"They are document 4 of uneven\."):
        evaluation.run("icl", small, ["uneven"], shots, args=args, samples={"uneven": [0, 3, 4]})
    logging.getLogger("lm_eval").propagate = True
    caplog.clear()
    icl = evaluation.run("icl", small, ["uneven"], shots, args={"max_length": 60})["config"]["icl"]
    (line,) = [line for line in caplog.messages if "do not fit" in line]
    left_out = "2 lose demonstrations (6 in all), and " if shots else ""
    cut, tokens = (
        "do not fit without any either and lose their first tokens, as under hf",
        icl["truncated"]["uneven"]["tokens"],
    )
    assert f"of 6 documents, {left_out}2 {cut} ({tokens} in all); tasks: uneven." in line


WINDOWS = ["pcw", "ensemble", "star", "ape", "structured", "nbce"]


@pytest.mark.parametrize("name", tiny.slow_but(WINDOWS[:2], WINDOWS))
@pytest.mark.runs
def test_a_window_that_does_not_fit_has_fewer_demonstrations(small, name):
    icl = evaluation.run(name, small, ["one_token"], 11, args={"window_size": 11})["config"]["icl"]
    left_out = icl["left_out"]["one_token"]
    assert left_out["documents"] and left_out["demonstrations"] < 11 * left_out["documents"]


def test_an_answer_that_is_too_long_is_not_cut(small):
    endless = evaluation.task("endless", **evaluation.CHOICE, doc_to_choice="{{['a', text * 40]}}")
    says = r"even if their prompts are cut; .* \+ answer without its last token \d+\. They are document"
    with pytest.raises(InputError, match=says):
        evaluation.run("icl", small, [endless], 1)


@pytest.mark.parametrize(
    ("args", "options", "says"),
    [
        ("T=0", ["--tasks", "icl_sst2"], "lm-eval-icl: deepthink: T=0: must be a whole number, 1 or more."),
        ("batch_size=4", ["--tasks", "icl_sst2"], "lm-eval-icl: model argument 'batch_size': lm-eval has an option"),
        ("T=1", ["--tasks", "icl_demo_short", "--limit", "0"], "lm-eval-icl: task 'icl_demo_short': --limit leaves no"),
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


@pytest.mark.runs
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}, {"num_beams": 2}])
def test_numbers_that_break_while_text_is_generated(tmp_path, sampling):
    """The greatest of scores that are no numbers is a token like any other."""
    evaluation.TASKS["odd"] = {**evaluation.TASKS["generate"], "task": "odd"}
    lengths = [
        len(tiny.byte_level()(f"Review: {doc['text']}\nSentiment:").input_ids) for doc in evaluation.documents(6, 0)
    ]
    # The longest prompt reaches it with the second token it generates; with more than one line of beams a document.
    path = without_numbers(tmp_path, slice(max(lengths) + 1, None))
    says = f"task 'odd', document {lengths.index(max(lengths))}: the scores of the next token are nan .*torch"
    with pytest.raises(InputError, match=says):
        evaluation.run("icl", path, ["odd"], 0, gen_kwargs={"until": ["none"], "max_gen_toks": 4, **sampling})


@pytest.mark.runs
def test_numbers_that_break_in_a_rolling_log_likelihood(tmp_path):
    evaluation.TASKS["long"] = {**evaluation.TASKS["rolling"], "task": "long", "doc_to_target": "{{text * 20}}"}
    with pytest.raises(InputError, match=r"task 'long', document 0, .*the log-probability is nan"):
        evaluation.run("icl", without_numbers(tmp_path, 100), ["long"], 0)


def test_any_length_where_positions_are_computed(checkpoint):
    for name in ("llama", "bloom"):
        model_class("icl")(str(checkpoint(name)), device="cpu", max_length=65536)


def test_it_is_an_ordinary_exception():
    """A SystemExit would tear down an event loop in which one of many evaluations is refused."""
    assert issubclass(InputError, ValueError) and not issubclass(InputError, SystemExit)
    with pytest.raises(ValueError) as error:
        make("deepthink", {"T": 0})
    assert str(error.value) == f"lm-eval-icl: {error.value.message}"
    assert error.value.message == "deepthink: T=0: must be a whole number, 1 or more."
