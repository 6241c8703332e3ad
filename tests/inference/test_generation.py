"""Generation after a memory that all rows of a batch share."""

from __future__ import annotations

import itertools
import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lm_eval_icl.errors import InputError, Unsupported
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.inference import attention, generation
from lm_eval_icl.inference.attention import Part, install, keys_on_memory
from lm_eval_icl.inference.caches import MemoryLayer
from lm_eval_icl.inference.generation import _inputs, continue_from, settings_in_force
from lm_eval_icl.inference.memory import read_causally
from lm_eval_icl.inference.trials import probe
from lm_eval_icl.prompts.prompt import FewShotPrompt
from tests import evaluation, tiny
from tests.inference.test_many_shots import NoSquare
from tests.smoke import model_types as smoke_models

CONTEXT = [5 + 3 * i % 90 for i in range(30)]
QUERIES = [[7, 8, 9, 10, 11, 12, 13], [20, 21], [30, 31, 32], [40, 41, 42, 43, 44]]


@pytest.fixture
def always_shared(monkeypatch):
    """Small memories are shared, too; returns how many layers' attention was to a shared memory."""
    calls = []
    attend = attention.on_shared_memory

    def counting(*args):
        calls.append(args)
        return attend(*args)

    monkeypatch.setattr(generation, "SHARED_FROM", 0)
    monkeypatch.setattr(attention, "on_shared_memory", counting)
    return lambda: len(calls)


def attend(query, key, value, memory, mask, scaling=None):
    module = nn.Module()
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    keys = keys_on_memory([Part(*memory)], key)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    attended, _ = sdpa(module, query, keys, value, mask, scaling=scaling)
    return attended


def after_a_copy(shared, own):
    """Keys or values of a memory, copied for each row, and the row's own after them."""
    return torch.cat([shared.expand(len(own), -1, -1, -1), own], dim=2)


@pytest.mark.parametrize("masked", ["not", "boolean", "additive"])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("n", [1, 4])
def test_a_shared_memory_is_a_copy_for_each_row(
    n, heads, masked, device="cpu", dtype=torch.float64, tolerance=1e-12
):
    assert install()
    rows = 5
    entries = 200
    tokens = n + 3
    of_queries, of_keys = heads
    query = torch.randn(rows, n, of_queries, 8, dtype=dtype, device=device).transpose(1, 2)
    memory = tuple(9 * torch.randn(2, 1, of_keys, entries, 8, dtype=dtype, device=device))
    key, value = 9 * torch.randn(2, rows, of_keys, tokens, 8, dtype=dtype, device=device)
    mask = None
    if masked != "not" or n > 1:
        mask = torch.ones(rows, 1, n, entries + tokens, dtype=torch.bool, device=device)
        mask = mask.tril(entries + 3)
        mask[1, ..., entries : entries + 2] = False
        mask[2, ..., entries : entries + tokens] = False  # padding, whose result nobody reads
    given_mask = mask
    if masked == "additive" and mask is not None:
        given_mask = torch.zeros_like(mask, dtype=dtype)
        given_mask.masked_fill_(~mask, torch.finfo(dtype).min)
    with NoSquare(rows * memory[0].nbytes - 1):  # the memory is not copied
        attended = attend(query, key, value, memory, given_mask, scaling=0.3)
    keys = after_a_copy(memory[0], key).double()
    values = after_a_copy(memory[1], value).double()
    expected = scaled_dot_product_attention(
        query.double(), keys, values, mask, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(attended.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu  # the numbers are about 30: a few units in the last place of that are tolerated
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float16, 0.02), (torch.bfloat16, 0.1)]
)
def test_a_shared_memory_on_a_gpu(dtype, tolerance):
    for n, heads, masked in itertools.product(
        [1, 4], [(3, 3), (6, 2), (4, 1)], ["not", "boolean", "additive"]
    ):
        test_a_shared_memory_is_a_copy_for_each_row(n, heads, masked, "cuda", dtype, tolerance)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 6), (torch.bfloat16, 8)])
def test_what_cannot_be_divided_runs_on_copies(dtype, width):
    """Half precision, and values that are not as wide as keys, are computed by the library's
    function."""
    query = torch.randn(3, 2, 1, 8, dtype=dtype)
    key = torch.randn(3, 2, 4, 8, dtype=dtype)
    value = torch.randn(3, 2, 4, width, dtype=dtype)
    shared_key = torch.randn(1, 2, 20, 8, dtype=dtype)
    shared_value = torch.randn(1, 2, 20, width, dtype=dtype)
    attended = attend(query, key, value, (shared_key, shared_value), None)
    keys = after_a_copy(shared_key, key)
    values = after_a_copy(shared_value, value)
    expected = scaled_dot_product_attention(query, keys, values).transpose(1, 2)
    assert torch.equal(attended, expected)


def test_somebody_elses_attention_function_gets_copies():
    """It knows nothing of keys that follow a memory."""
    memory = read_causally(tiny.build("gpt2"), CONTEXT)
    assert all(layer.shared for layer in memory.cache(shared=True).layers)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda *args, **kwargs: None
    try:
        assert not any(layer.shared for layer in memory.cache(shared=True).layers)
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "shares"), [("llama3", True), ("mistral_window", False), ("diffllama", False)]
)
@torch.no_grad()
def test_who_shares(name, shares, dtype):
    """Not who has a window shorter than the row, or attention of its own (DiffLlama); in every
    precision."""
    if name in tiny.ARCHITECTURES:
        model = tiny.build(name, dtype)
    else:
        model = smoke_models.build(name).to(dtype)
    capabilities = probe(model)
    assert (capabilities.can_share and capabilities.sees_all_of(60)) == shares
    assert (capabilities.window == 24) == name.endswith("_window")


def build(name: str) -> Any:
    model = tiny.build(name, torch.float64)
    model.generation_config.eos_token_id = None
    return model


def count_rows(model: Any) -> list[int]:
    """How many rows each forward pass has, from now on."""
    rows: list[int] = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    return rows


def run(
    model: Any, queries: Any, new: int = 6, settings: Any = None, **ways: Any
) -> tuple[list[list[int]], list[int]]:
    """The texts, and how many rows each forward pass had."""

    def generate(context: Any, **inputs: Any) -> Any:
        everything = {"do_sample": False, **(settings or {}), **inputs}
        return model.generate(context, max_new_tokens=new, pad_token_id=0, **everything)

    memory = read_causally(model, CONTEXT)
    rows = count_rows(model)
    texts = continue_from(model, generate, [memory], queries, **ways)
    return texts, rows


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"repetition_penalty": 1.5}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama3", "gpt_neox"])
@torch.no_grad()
def test_texts_on_a_shared_memory_are_those_on_copies(name, settings, always_shared):
    model = build(name)
    beams = settings.get("num_beams", 1)
    expected, _ = run(model, QUERIES, settings=settings, beams=beams)
    assert not always_shared()
    texts, passes = run(model, QUERIES, settings=settings, beams=beams, shared=True)
    assert always_shared() == model.config.num_hidden_layers * len(passes)
    assert texts == expected
    assert len(set(map(tuple, texts))) > 1


def test_stop_strings_end_texts(checkpoint, always_shared):
    """Each of several stop strings ends the texts that reach it, and a batch's texts are those of
    single prompts."""
    lm = model_class("icl")(str(checkpoint("gpt2")), device="cpu", dtype="float64")
    rows = count_rows(lm.model)
    prompts = []
    for doc in evaluation.documents(6, 0):
        prompts.append(FewShotPrompt("", ["a film. dull\n\n"] * 3, f"{doc['text']}:"))

    def texts(until: list[str], batch: int) -> list[str]:
        lm.batch_size_per_gpu = batch
        lm.begin([])
        rows.clear()
        settings = {"until": until, "max_gen_toks": 12, "do_sample": False}
        requests = [Instance("generate_until", {}, (prompt, settings), 0) for prompt in prompts]
        return lm.generate_until(requests, disable_tqdm=True)

    plain = texts([], 1)
    stops = []
    for text in plain[:2]:
        stops.append(next(character for character in text[2:] if character.isalnum()))
    expected = texts(stops, 1)
    assert expected != plain
    assert texts(stops, 6) == expected
    assert always_shared()
    assert rows[:2] == [1, 6]


def test_entries_are_appended_in_place():
    """The layer's entries are those of transformers' layer, also of rows that were selected, and in
    a copy."""
    torch.manual_seed(0)
    memory = torch.randn(2, 1, 2, 5, 4)
    ours = MemoryLayer([Part(*memory)])
    theirs = DynamicCache()
    for step in range(12):
        rows = 3 if step < 8 else 2
        tokens = 4 if step == 0 else 1
        keys, values = torch.randn(2, rows, 2, tokens, 4)
        entries = ours.update(keys, values)
        own = theirs.update(keys, values, 0)
        assert torch.equal(entries[0], after_a_copy(memory[0], own[0]))
        assert torch.equal(entries[1], after_a_copy(memory[1], own[1]))
        if step == 3:
            deepcopy(ours).update(keys, values)  # does not write into the original
        if step == 5:
            ours.reorder_cache(torch.tensor([2, 0, 0]))
            theirs.reorder_cache(torch.tensor([2, 0, 0]))
        if step == 7:
            ours.batch_select_indices(torch.tensor([2, 0]))
            theirs.batch_select_indices(torch.tensor([2, 0]))
    assert ours.get_seq_length() == 5 + 15


# Against lm-eval's `hf`, one text at a time.

DEMONSTRATIONS = [
    "Review: a dull film\nSentiment: no\n\n",
    "Review: warm , 12 + 30\nSentiment: yes\n\n",
]
PROMPTS = [
    FewShotPrompt("Tell. ", DEMONSTRATIONS, f"Review: {text}\nSentiment:")
    for text in ("odd", "a sharp , slow and funny film", "the plot is flat", "quiet jokes")
]


def saved(folder: Path, model: Any, tokenizer: Any, **settings: Any) -> Path:
    """A checkpoint with these settings in its generation_config.json."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text()) | settings
    path.write_text(json.dumps(config))
    return folder


def to_generate(prompt: Any, settings: dict, number: int = 0) -> Instance:
    return Instance("generate_until", {}, (prompt, settings), 0, ("a task", number, 1))


def texts_of(lm: Any, prompts: Any = PROMPTS, **settings: Any) -> list[str]:
    settings = {"until": [], "max_gen_toks": 8, **settings}
    requests = [to_generate(prompt, settings, i) for i, prompt in enumerate(prompts)]
    return lm.generate_until(requests, disable_tqdm=True)


def hf(path: Path) -> Any:
    return HFLM(str(path), device="cpu", dtype="float64", batch_size=1)


def icl(path: Path, method: str = "icl", batch_size: int = 8) -> Any:
    return model_class(method)(str(path), device="cpu", dtype="float64", batch_size=batch_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"use_cache": False},  # as gradient checkpointing leaves it, and as MPT has it
        {"num_beams": 3},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[45], [60, 61]]},
        {"do_sample": True, "temperature": 0.5, "top_k": 5},  # which lm-eval sets to greedy
    ],
    ids=str,
)
def test_settings_of_a_checkpoint(settings, tmp_path):
    path = saved(tmp_path, tiny.build("gpt2"), tiny.byte_level(), **settings)
    expected = texts_of(hf(path))
    assert len(set(expected)) > 1
    assert texts_of(icl(path)) == expected


def test_arguments_go_before_the_settings_of_a_checkpoint(tmp_path):
    settings = {"num_beams": 3, "repetition_penalty": 2.0}
    path = saved(tmp_path, tiny.build("gpt2"), tiny.byte_level(), **settings)
    expected = texts_of(hf(path), repetition_penalty=1.3)
    assert texts_of(icl(path), repetition_penalty=1.3) == expected


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"prompt_lookup_num_tokens": 3}, "does not work on existing keys and values"),
        ({"num_return_sequences": 2, "num_beams": 2}, "gives more than one text for a prompt"),
    ],
)
def test_settings_of_a_checkpoint_that_are_refused(setting, says, tmp_path):
    """Before anything is run, also what is scored: nobody waits for hours for this line."""
    path = saved(tmp_path, tiny.build("gpt2"), tiny.byte_level(), **setting)
    name, value = next(iter(setting.items()))
    where = "the checkpoint's generation_config.json"
    line = f"{where}: {name}={value!r} {says}; take it out of that file\\.$"
    lm = icl(path)
    passes = count_rows(lm.model)
    request = to_generate(PROMPTS[0], {"until": []})
    scored = Instance("loglikelihood", {}, (PROMPTS[0], " no"), 0, ("a task", 0, 1))
    with pytest.raises(InputError, match=f"^lm-eval-icl: task 'a task': {line}"):
        lm.begin([SimpleNamespace(instances=[scored, request])])
        lm.loglikelihood([scored], disable_tqdm=True)
    assert not passes


@torch.no_grad()
def test_padding_is_no_part_of_a_row():
    """Processors that ask which tokens a row has find no others; where their order counts, rows are
    not padded."""
    model = tiny.build("gpt2")
    inputs = _inputs([read_causally(model, CONTEXT)], QUERIES, torch.device("cpu"))
    for row, mask, query in zip(inputs["context"], inputs["attention_mask"], QUERIES, strict=True):
        tokens = [*CONTEXT, *query]
        assert row[mask.bool()].tolist() == tokens
        assert set(row.tolist()) == set(tokens)
    for setting in ({"no_repeat_ngram_size": 2}, {"bad_words_ids": [[45]]}, {"min_length": 15}):
        assert settings_in_force(model, setting).reads_rows
    assert not settings_in_force(model, {"repetition_penalty": 1.5}).reads_rows


def test_positions_that_begin_after_the_padding_token(tmp_path, monkeypatch):
    """`generate` gives RoBERTa's decoders positions from 0 on, and in scoring they count from 2
    on."""
    monkeypatch.setitem(smoke_models.TYPES, "roberta", {"is_decoder": True})
    smoke_models.save("roberta", tmp_path)
    expected = texts_of(hf(tmp_path))
    assert len(set(expected)) > 1
    assert texts_of(icl(tmp_path)) == expected
    why = "transformers' generate does not continue from its cache"
    with pytest.raises(Unsupported, match=f"deepthink generates no text with .*: {why}"):
        texts_of(icl(tmp_path, "deepthink"))


def test_settings_of_a_checkpoint_do_not_hide_what_the_model_can_do(tmp_path):
    """With these, the texts that are tried are not the likeliest ones."""
    model = tiny.build("llama3")
    tokenizer = tiny.llama3()
    plain = saved(tmp_path / "plain", model, tokenizer)
    settings = {"repetition_penalty": 5.0, "num_beams": 2}
    settings |= {"use_cache": False, "forced_eos_token_id": 1}
    other = saved(tmp_path / "other", model, tokenizer, **settings)
    assert icl(other).runner.capabilities == icl(plain).runner.capabilities
