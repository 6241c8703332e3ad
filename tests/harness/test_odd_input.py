"""Odd texts and sizes: `icl` gives what `hf` gives. (`test_fuzz.py` has every method on such texts.)"""

from __future__ import annotations

import functools

import pytest
from datasets import Dataset, DatasetDict
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.models import model_class
from tests import evaluation

# GPT-2 in float64 throughout; RMSNorm rounds to float32 in between.
TOLERANCE = {"gpt2": 1e-9, "llama": 1e-4}
FAMILY = "👩‍👩‍👧‍👦"  # seven code points, one picture
DEMONSTRATIONS = [("a dull plot", 0), ("warm", 1), ("  quick", 0)]

BLANKS = "only blanks to ask about"


def row(texts=("one film", "two"), options=("no", "yes"), demonstrations=DEMONSTRATIONS, **config):
    """Two tasks of these documents, each with these options; texts reach the model as they are."""
    labels = [label for _, label in demonstrations] or [0]
    train = [{"text": text, "label": label % len(options)} for text, label in demonstrations]
    test = [{"text": text, "label": labels[0] % len(options)} for text in texts]
    common = {
        "custom_dataset": lambda **_: DatasetDict(
            {"train": Dataset.from_list(train or test), "test": Dataset.from_list(test)}
        ),
        "num_fewshot": len(train),
        "doc_to_text": lambda doc: doc["text"],
        "doc_to_choice": lambda doc: list(options),
        **config,
    }
    choice = {**evaluation.CHOICE, **common}
    generate = {
        **common,
        "output_type": "generate_until",
        "doc_to_choice": None,
        "doc_to_target": lambda doc: options[doc["label"]],
        "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 4, "do_sample": False},
    }
    return [choice, generate]


ROWS = {
    "plain": row(),
    "equal options": row(options=["yes", "yes", "no", "no"]),
    "prefix of another option": row(options=["very", "very bad", "very bad indeed", "ver"]),
    "option of many tokens": row(options=["so " * 200, "x"]),
    "one option": row(options=["yes"]),
    "two hundred options": row(options=[f"choice {i}" for i in range(200)]),
    "blank option behind a delimiter": row(options=[" ", "  ", "x"]),
    "line break as option": row(options=["\n", "\n\n"], target_delimiter=""),
    "emoji": row(texts=["🎬", FAMILY], options=["👍", "👎🏽"]),
    "emoji cut by the boundary": row(texts=["👩‍"], options=["👩‍👧‍👦", "👧"], target_delimiter=""),
    "flag cut by the boundary": row(texts=["🇩"], options=["🇪", "🇰"], target_delimiter=""),
    "accent cut off its letter": row(texts=["cafe"], options=["\u0301", "s\u0301"], target_delimiter=""),
    "many accents on one letter": row(texts=["a" + "\u0301" * 300], options=["z\u0300" * 20, "b"]),
    "right to left": row(texts=["סרט טוב", "\u202eفيلم سيئ"], options=["כן", "لا"], demonstrations=[("מצוין", 0)]),
    "zero width": row(texts=["\u200b\u200d", "\ufeffmark"], options=["\u200b", "\u200d"]),
    "nul": row(texts=["a\0b", "\0"], options=["\0", "no"], demonstrations=[("\0\0", 0)]),
    "other control characters": row(texts=["\x1b[31m", "\x07\x7f\x85"], options=["\x08", "\u2028"]),
    "windows line ends": row(texts=["one\r\ntwo\r\n", "a\r\rb"], options=["\r\n", "x\r"]),
    "one long word": row(texts=["a" * 1500, "漢" * 500], options=["b" * 100, "字"]),
    BLANKS: row(texts=["   ", "\n\n\n", "\t"]),
    "special tokens as text": row(texts=["<|endoftext|>", "<s></s><unk>"], options=["<|endoftext|>", "</s>"]),
    "markup of templates": row(texts=["{{text}} {% if %}", "%s {0} \\n"], options=["{{", "}}"]),
    "the mark of private use": row(texts=["\U000f1c1f", "\ue000"]),
    "unassigned and last code points": row(texts=["\u0378", "\U0010ffff"], options=["\ufffd", "\uffff"]),
    "demonstrations alike": row(demonstrations=[("same", 1)] * 6),
    "demonstrations of blanks": row(demonstrations=[(" ", 1), ("\n\n", 0), ("", 1)]),
    "no demonstrations": row(demonstrations=[]),
    "no blank lines between them": row(fewshot_delimiter=""),
    "five hundred demonstrations": row(
        demonstrations=[("a", i % 2) for i in range(500)], fewshot_delimiter=" ", texts=["x"]
    ),
    "a demonstration of 5,000 characters": row(demonstrations=[("plot " * 1000, 1), ("b", 0)], texts=["x"]),
}


@pytest.fixture(scope="module")
def answers(checkpoint):
    """A function: model name, architecture -> the responses to every row, all in one run."""
    return functools.cache(lambda name, architecture: evaluate(name, checkpoint(architecture), ROWS))


def evaluate(name, path, rows):
    cls = HFLM if name == "hf" else model_class(name)
    lm = cls(str(path), device="cpu", dtype="float64", batch_size=8)
    tasks = [evaluation.task(f"{row}{i}", **ROWS[row][i]) for row in rows for i in range(2)]
    samples = evaluation.run(lm, "", tasks, None)["samples"]
    return {row: evaluation.responses({"samples": {i: samples[f"{row}{i}"] for i in range(2)}}) for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TOLERANCE)
@pytest.mark.parametrize("row", ROWS)
def test_icl_gives_what_hf_gives(answers, architecture, row):
    expected = answers("hf", architecture)[row]
    evaluation.assert_same(answers("icl", architecture)[row], expected, TOLERANCE[architecture])


@pytest.mark.parametrize("name", ["saicl", "invicl", "nbce"])
def test_blanks_alone_are_no_query_for_an_invariant_method(checkpoint, name):
    with pytest.raises(InputError, match=f"task '{BLANKS}0', document 0: the query is empty"):
        evaluate(name, checkpoint("gpt2"), [BLANKS])
