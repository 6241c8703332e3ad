"""What a model does is found out by trying: every method works on it exactly, or is refused in one
line."""

from dataclasses import replace

import peft
import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError, Unsupported
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.inference import scoring
from lm_eval_icl.inference.caches import cache_name
from lm_eval_icl.inference.capabilities import Capabilities
from lm_eval_icl.inference.generation import settings_in_force
from lm_eval_icl.inference.trials import probe
from lm_eval_icl.methods import NAMES, needs
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context
from lm_eval_icl.smoke.tiny import configuration
from tests import evaluation, tiny
from tests.inference.test_invariance import answers
from tests.smoke import model_types as smoke_models

HIDING = ["prefixicl", "pcw", "saicl", "invicl"]
CLASSES = {name: model_class(name) for name in NAMES}


def refusal(name, path, **args):
    with pytest.raises(Unsupported) as error:
        CLASSES[name](str(path), device="cpu", **args)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        *((name, {}, f"{name} hides tokens from each other, which") for name in HIDING),
        (
            "nope",
            {},
            "nope (positions=none) needs a model that obeys given positions, "
            "and BloomForCausalLM has no",
        ),
        (
            "icl",
            {"positions": "symmetric"},
            "icl (positions=symmetric) needs a model that obeys given positions",
        ),
        ("deepthink", {"restart_positions": True}, "deepthink (positions=sequential) needs"),
    ],
)
def test_positions_on_a_model_without(checkpoint, name, args, says):
    """ALiBi: BLOOM counts its tokens by itself."""
    assert says in refusal(name, checkpoint("bloom"), **args)


@pytest.mark.parametrize("architecture", ["mistral_window", "gemma2_window"])
@pytest.mark.parametrize("name", HIDING)
def test_a_window_shorter_than_the_prompt(checkpoint, name, architecture):
    model = type(tiny.build(architecture)).__name__
    says = f"do not fit the 24 tokens of a row that {model} sees as a whole"
    with pytest.raises(InputError, match=f"{says}.*, as {name} needs it"):
        evaluation.run(name, checkpoint(architecture), ["one_token"], 3, args={"overflow": "error"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("invicl", "mistral_window"),
        ("saicl", "gemma2_window"),
        ("nope", "mistral_window"),
        ("pcw", "gpt_neo"),
    ],
)
def test_a_window_longer_than_the_prompt_hides_nothing(tmp_path, name, architecture):
    """The same weights with a window of 700 and of 4,000 tokens, on prompts of some 300."""
    window = "window_size" if architecture == "gpt_neo" else "sliding_window"
    found = []
    for length in (700, 4000):
        tiny.save(architecture, tmp_path / str(length), **{window: length})
        args = {
            "dtype": "float64",
            "pack_tokens": 600,
        }  # the same passes, of fewer tokens than either window
        found.append(answers(name, tmp_path / str(length), [0, 1, 2, 3], args=args)[0])
    evaluation.assert_same(*found, 1e-9)


@pytest.fixture
def flash():
    """Attention that takes no mask of ours, as flash_attention_2 does: causal whatever it is
    given."""

    def attend(module, query, key, value, attention_mask, **kwargs):
        if attention_mask is not None:
            raise ValueError("flash attention takes no 4-D mask")
        length = query.shape[-2]
        past = key.shape[-2] - length
        causal = torch.ones(length, length + past, dtype=torch.bool).tril(past)[None, None]
        return sdpa_attention_forward(module, query, key, value, causal, **kwargs)

    def given_mask(*args, attention_mask=None, **kwargs):
        return attention_mask

    AttentionInterface.register("causal_only", attend)
    AttentionMaskInterface.register("causal_only", given_mask)
    return "causal_only"


@pytest.mark.parametrize("name", HIDING)
def test_attention_without_masks(checkpoint, flash, name):
    text = refusal(name, checkpoint("llama"), attn_implementation=flash)
    model = "LlamaForCausalLM (attn_implementation=causal_only)"
    assert f"{name} hides tokens from each other, which {model}" in text


@pytest.mark.parametrize("name", ["icl", "deepthink", "batchicl", "nope"])
def test_what_hides_nothing_runs_without_masks(checkpoint, flash, name):
    """Query by query, with the same numbers."""
    path = checkpoint("llama")
    names = ["many_tokens"]
    answers = evaluation.answers(name, path, names, 3, args={"attn_implementation": flash})
    evaluation.assert_same(answers, evaluation.answers(name, path, names, 3), 1e-4)


@pytest.mark.parametrize(
    "architecture", ["gpt2", "opt", "gpt_neo", "gpt_neox", "llama", "qwen3", "gemma2_window", "phi"]
)
@torch.no_grad()
def test_abilities(architecture):
    abilities = probe(tiny.build(architecture))
    assert abilities.obeys_mask and abilities.obeys_positions
    assert abilities.window == {"gpt_neo": 24, "gemma2_window": 24}.get(architecture)
    assert abilities.keeps_window == (architecture == "gpt_neo")


@pytest.mark.parametrize(
    "architecture", tiny.slow_but(["gpt2", "llama"], ["gpt2", "opt", "llama", "phi"])
)
def test_without_positions_none_is_left(checkpoint, architecture):
    """Inside `_forward` a given position changes not a bit; outside the model is as it was."""
    lm = model_class("nope")(str(checkpoint(architecture)), device="cpu", dtype="float64")
    with lm.runner.inference_mode():
        assert not probe(lm.model).obeys_positions
    # What was taken away comes back: the same model is then plain again.
    assert probe(lm.model).obeys_positions


@pytest.mark.slow
def test_no_positions_inside_an_adapter(tmp_path, checkpoint):
    """PEFT's generate runs the model inside; an adapter that does nothing must change nothing."""
    path = checkpoint("llama")
    names = ["one_token", "generate"]
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    peft.get_peft_model(tiny.build("llama"), config).save_pretrained(tmp_path)
    for name in ("invicl", "deepthink"):
        adapted = evaluation.answers(name, path, names, 3, args={"peft": str(tmp_path)})
        evaluation.assert_same(adapted, evaluation.answers(name, path, names, 3), 1e-5)


@torch.no_grad()
def test_blocks_that_are_not_found():
    model = tiny.build("gpt2")
    model.config.n_layer = 7  # so that no list of its modules is that long
    with pytest.raises(Unsupported, match="batchicl needs blocks that hand on one residual stream"):
        methods.BatchICL(layer=1).bind(model)


def test_a_position_that_is_not_taken_away():
    """A layer adds the positions that the model was given to its states."""
    model = tiny.build("gpt2")
    given = []

    def keep(module, args, kwargs):
        given.append(kwargs.get("position_ids"))

    def add(module, args, output):
        return output if given[-1] is None else output + 0.1 * given[-1][..., None]

    model.register_forward_pre_hook(keep, with_kwargs=True)
    model.transformer.drop.register_forward_hook(add)
    says = "nope needs a model whose positions can be taken away, and GPT2LMHeadModel still tells"
    with pytest.raises(Unsupported, match=says):
        MethodRunner(model, methods.make("nope"))


def test_attention_with_sinks_is_not_read_in_parts():
    model = tiny.build("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "s_aux": torch.zeros(4)}),
            with_kwargs=True,
        )
    says = r"which LlamaForCausalLM does not allow \(ValueError: its attention has sinks, caps its"
    with pytest.raises(Unsupported, match=says):
        MethodRunner(model, methods.make("ape"))

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.register_forward_pre_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        needs.check_parts(methods.make("ape"), model)


@torch.no_grad()
def test_layers_without_linear_layers_get_no_adapters():
    model = tiny.build("gpt2")
    for block in model.transformer.h:
        block.attn = block.mlp = nn.Identity()
    with pytest.raises(Unsupported, match="GPT2LMHeadModel has no linear layers in its blocks"):
        methods.make("ttt").bind(model)


def test_texts_on_several_memories_need_padding():
    model = tiny.build("gpt2")
    context = Context((1,), ((5, 6), (7, 8, 9)))
    method = methods.make("ensemble")
    settings = settings_in_force(model, {})
    pads = Capabilities(can_generate=True, can_pad=True)
    needs.check_generates(method, model, pads, context, settings)
    says = "ensemble generates no text with GPT2LMHeadModel: its rows have memories of different"
    with pytest.raises(Unsupported, match=says):
        needs.check_generates(method, model, replace(pads, can_pad=False), context, settings)


# What the probe sees.


@torch.no_grad()
def test_models_that_do_not_run_or_have_no_room_or_another_cache():
    model = tiny.build("gpt2")

    def fail(error):
        def hook(*args):
            raise error

        return model.register_forward_pre_hook(hook)

    says = "GPT2LMHeadModel cannot be used: it does not run on a row of tokens .KeyError: 'no'"
    with fail(KeyError("no")), pytest.raises(InputError, match=says):
        probe(model)
    full = torch.OutOfMemoryError("CUDA out of memory.")
    with fail(full), pytest.raises(torch.OutOfMemoryError):
        probe(model)
    model._supports_default_dynamic_cache = lambda: False
    assert probe(model).no_memory == "ValueError: its cache is of a class that is not known here"


@torch.no_grad()
@pytest.mark.parametrize("entries", [0, 5])
def test_a_cache_that_does_not_hold_every_token(entries):
    model = tiny.build("gpt2")

    cache = cache_name(model)

    def without_cache(module, args, kwargs):
        return args, {**kwargs, cache: None, "use_cache": False}

    def shorten(module, args, kwargs, output):
        if kwargs.get(cache) is not None:
            kwargs[cache].crop(-entries)

    if entries:
        model.register_forward_hook(shorten, with_kwargs=True)
    else:
        model.register_forward_pre_hook(without_cache, with_kwargs=True)
    says = "ValueError: its cache does not hold one key and one value for each token"
    assert probe(model).no_memory == says


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3_next"])
def test_answers_that_see_each_other_are_noticed(monkeypatch, architecture):
    """Every answer goes on from a copy of the cache. Without copies the second answer would see the
    first."""
    monkeypatch.setattr(scoring, "select_rows", lambda cache, batch, rows: cache)
    with torch.no_grad():
        assert "continued from its cache, it gives" in probe(tiny.build(architecture)).no_memory


@pytest.mark.parametrize("share", [1e-4, 1e-6])
def test_a_mask_that_leaks_a_little_is_not_obeyed(share):
    """A layer that adds a small part of the tokens before to every token, hidden ones too."""
    model = tiny.build("gpt2", torch.float64)

    def leak(module, args, output):
        stream = output[0] if isinstance(output, tuple) else output
        leaked = stream + share * stream.cumsum(dim=1)
        return (leaked, *output[1:]) if isinstance(output, tuple) else leaked

    with torch.no_grad():
        assert probe(model).obeys_mask
        model.transformer.h[1].register_forward_hook(leak)
        assert not probe(model).obeys_mask


@torch.no_grad()
def test_a_model_that_never_looks_ahead():
    """GPT-Neo hides what comes after a token whatever the mask shows; its masks can only hide
    more."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert probe(tiny.build("llama", dtype)).sees_ahead
        model = tiny.build("gpt_neo", dtype)
        abilities = probe(model)
        assert abilities.obeys_mask and not abilities.sees_ahead
    for name in ("prefixicl", "saicl"):
        with pytest.raises(Unsupported, match=f"{name} lets tokens see later tokens"):
            MethodRunner(model, methods.make(name))
    for name in ("invicl", "pcw"):
        MethodRunner(model, methods.make(name))


@torch.no_grad()
def test_positions_that_do_not_begin_at_zero():
    """RoBERTa counts from its padding token's number, so positions that are counted from 0 are not
    its own."""
    model = AutoModelForCausalLM.from_config(configuration("roberta", 500, is_decoder=True)).eval()
    assert not probe(model).obeys_positions
    MethodRunner(model, methods.make("icl"))
    with pytest.raises(Unsupported, match=r"invicl .*needs a model that obeys given positions"):
        MethodRunner(model, methods.make("invicl"))


@torch.no_grad()
def test_attention_that_is_scaled_by_index():
    """Llama 4 scales queries by their index from some index on, whatever their position."""
    model = smoke_models.build("llama4_text")
    abilities = probe(model)
    first = abilities.scaled_from
    assert first == model.config.floor_scale - 1
    assert abilities.can_pack_to(first)
    assert not abilities.can_pack_to(first + 1)
    for name, longest in (("icl", None), ("nope", first), ("invicl", first)):
        assert MethodRunner(model, methods.make(name)).limits(512).window == longest


@pytest.mark.parametrize(("kind", "pads"), [("whisper", False), ("git", False), ("opt", True)])
@torch.no_grad()
def test_batches_whose_padding_shifts_tokens(kind, pads):
    """Whisper's decoder counts padding, and GIT masks other tokens than the padding if it has a
    cache."""
    abilities = probe(smoke_models.build(kind))
    assert abilities.can_pad == pads and abilities.can_pack and abilities.sees_ahead


@torch.no_grad()
def test_a_model_is_tried_in_few_passes():
    passes = []
    model = tiny.build("llama")
    model.register_forward_pre_hook(lambda *args: passes.append(args))
    probe(model)
    assert len(passes) == 32
