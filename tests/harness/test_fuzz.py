"""Any prompt: numbers or one clear line, and the same numbers whatever runs beside it.

25 prompts a run, 5 where a prompt is run many times over, and every run draws others; `pytest
--hypothesis-profile=long tests/harness/test_fuzz.py` tries 160 times as many, in about an hour.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.models import ICLModel, model_class
from lm_eval_icl.harness.requests import RequestTokenizer, fit_requests
from lm_eval_icl.methods import NAMES, make
from lm_eval_icl.methods.limits import PromptLimits, Request, fits, truncated
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import PromptTokenizer
from lm_eval_icl.smoke.every_method import QUICK
from tests import evaluation, tiny

CLASSES: dict[str, type[ICLModel]] = {name: model_class(name) for name in NAMES}
# RMSNorm rounds to float32 where all else is float64.
TOLERANCE = {"gpt2": 1e-8, "llama": 1e-4}

TEXTS = ["a", "Review:", " positive", " film", ".", "Answer: ", "1", "12 + 30", "Q", "x" * 60]
BLANKS = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\x85", "\u2028", "\u00a0", "\u3000", "\u200b"]
LETTERS = ["é", "e\u0301", "\u0301", "漢字", "אב", "\u202e", "\ufeff", "ﬃ", "\ue000"]
EMOJI = ["👩\u200d👩\u200d👧", "👩\u200d", "🇩", "🇪", "👍🏽"]
CONTROL = ["\0", "\x1b[0m", "\x7f", "\U0010ffff", "\ufffd"]
OF_TOKENIZERS = ["▁", "Ġ", "<0x0A>", "<|endoftext|>", "<s>", "</s>", "<unk>"]
OF_FORMATS = ["{{text}}", "%s", "\\n"]
PIECES = [*TEXTS, *BLANKS, *LETTERS, *EMOJI, *CONTROL, *OF_TOKENIZERS, *OF_FORMATS]
# Two in three from those that break things; a lone surrogate now and then.
ANY = st.characters(exclude_categories=["Cs"])
CHARACTERS = st.sampled_from(PIECES) | st.sampled_from(PIECES) | ANY
TEXT = st.lists(CHARACTERS, max_size=8).map("".join)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[FewShotPrompt, str]]:
    """Prompts with the same demonstrations, and options for each; every fourth time they may be
    refused."""
    prefix = draw(TEXT)
    demonstrations = draw(st.lists(TEXT, max_size=6))
    query = TEXT.filter(str.strip)
    option = TEXT.filter(bool)  # an option may melt into the end of its query
    if draw(st.integers(0, 3)) == 0:
        query = option = TEXT
    queries = draw(st.lists(query, min_size=1, max_size=3))
    options = draw(st.lists(option, min_size=1, max_size=4))
    prompts = [FewShotPrompt(prefix, demonstrations, query) for query in queries]
    return list(itertools.product(prompts, options))


@pytest.fixture(scope="module")
def loaded(checkpoint):
    """The models of an architecture, in float64, each loaded once."""

    @functools.cache
    def load(architecture: str) -> dict[str, Any]:
        path = str(checkpoint(architecture))
        settings = {"device": "cpu", "dtype": "float64", "batch_size": 1}
        # `hf`'s logits cache takes one request's answer for another's where the same tokens are cut
        # elsewhere into context and continuation ("a" + "aaa", "aaa" + "a").
        lms: dict[str, Any] = {"hf": HFLM(path, logits_cache=False, **settings)}
        for name, cls in CLASSES.items():
            lms[name] = cls(path, **settings, **QUICK.get(name, {}))
        return lms

    return load


def run(lm: Any, arguments: Sequence[tuple[Any, Any]]) -> list[Any]:
    if isinstance(lm, ICLModel):
        lm.begin([])
    requests = []
    for i, pair in enumerate(arguments):
        place = {"metadata": ("fuzz", i, 1), "task_name": "fuzz", "doc_id": i}
        requests.append(Instance("loglikelihood", {}, pair, 0, **place))
    return lm.loglikelihood(requests, disable_tqdm=True)


def numbers_or_one_line(
    lm: Any, arguments: Sequence[tuple[Any, Any]]
) -> list[tuple[float, bool]] | str:
    try:
        scores = run(lm, arguments)
    except InputError as error:
        line = str(error)
        assert line.startswith("lm-eval-icl: ")
        assert "\n" not in line
        return line
    for logprob, _ in scores:
        assert -math.inf < logprob <= 0
    return scores


slowly = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    max_examples=max(1, settings.default.max_examples // 2),
)


def in_order(prompt: FewShotPrompt, order: Sequence[int]) -> FewShotPrompt:
    demonstrations = [prompt.demonstrations[i] for i in order]
    return FewShotPrompt(prompt.prefix, demonstrations, prompt.query)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TOLERANCE)
@slowly
@given(arguments=requests(), data=st.data())
def test_any_prompt(loaded, architecture, arguments, data):
    lms = loaded(architecture)
    first, _ = arguments[0]
    order = data.draw(st.permutations(range(len(first.demonstrations))))
    permuted = [(in_order(prompt, order), option) for prompt, option in arguments]
    for name in CLASSES:
        outcome = numbers_or_one_line(lms[name], arguments)
        event(f"{name} {type(outcome).__name__}")
        if lms[name].method.invariant:
            assert outcome == numbers_or_one_line(lms[name], permuted)
        if name != "icl":
            continue
        plain = [(str(prompt), option) for prompt, option in arguments]
        if isinstance(outcome, str):  # what we refuse is nothing that `hf` can do
            with pytest.raises((AssertionError, TypeError, IndexError)):
                run(lms["hf"], plain)
        else:
            evaluation.assert_same(outcome, run(lms["hf"], plain), TOLERANCE[architecture])


# What is left out of prompts that do not fit.

PIECES_OF_WORDS = ["a", " film", " dull", "!\n", " 12", "\n\n", " positive", "é", "  "]
WORDS = st.lists(st.sampled_from(PIECES_OF_WORDS), max_size=9).map("".join)
SEQUENTIAL = [make("icl"), make("deepthink"), make("nope")]
LONGEST = [make(name) for name in ("prefixicl", "pcw", "saicl", "invicl", "batchicl")]
LONGEST += [make("invicl", {"positions": "none"}), make("saicl", {"repeat": 2})]


@functools.cache
def byte_level() -> Any:
    return tiny.byte_level()


SEQUENTIAL.append(make("invicl", {"positions": "sequential"}))


@pytest.mark.parametrize(
    "method",
    tiny.slow_but([make("icl"), make("invicl")], [*SEQUENTIAL, *LONGEST]),
    ids=repr,
)
@slowly
@given(data=st.data())
def test_the_fewest_are_left_out(method, data):
    """Tried against all that could be left out: the first ones where positions are sequential,
    elsewhere any."""
    first = next(n for n in range(1, 7) if not method.why_not(n))
    shots = data.draw(st.integers(first, 6))
    options = data.draw(st.lists(WORDS, min_size=1, max_size=3))
    text = WORDS.map(lambda words: f"Review:{words}\n\n")
    texts = st.lists(text, min_size=shots, max_size=shots)
    prefix = "Tell. " * data.draw(st.integers(0, 1))

    def prompt() -> FewShotPrompt:
        return FewShotPrompt(prefix, data.draw(texts), data.draw(text) + "A:")

    prompts = [prompt()]
    if method in LONGEST[:5] and data.draw(st.booleans()):  # a prompt for each option
        prompts = [prompt() for _ in options]
    window = None
    if method.needs_mask and len(prompts) == 1:
        window = data.draw(st.none() | st.integers(10, 150))
    limits = PromptLimits(method, "GPT2", data.draw(st.integers(5, 120)), window, None, "")
    canonical = method.invariant and data.draw(st.booleans())
    by_part = method.treats_demonstrations_alike
    tokenizer = PromptTokenizer(byte_level(), by_part=by_part, canonical=canonical)
    tokenize = RequestTokenizer(tokenizer, 16)

    def document(order: Sequence[int]) -> list[Instance]:
        """The requests with the demonstrations in this order."""
        ordered = itertools.cycle([in_order(prompt, order) for prompt in prompts])
        instances = []
        for i, (prompt, words) in enumerate(zip(ordered, options, strict=False)):
            pair = (prompt, f"I{words}")
            instances.append(Instance("loglikelihood", {}, pair, i, ("fuzz", 0, 1)))
        return instances

    def fitted(order: Sequence[int]) -> list[Request]:
        return fit_requests(document(order), tokenize, limits, "drop", quiet=True)

    everything = tuple(range(shots))
    numbers = range(shots + 1)
    tried = itertools.chain(*(itertools.combinations(everything, n) for n in numbers))
    if method in SEQUENTIAL:
        tried = (everything[:n] for n in numbers)
    fit = (rows for rows in tried if fits(limits, tokenize(document(everything), rows)))
    fewest = next(map(len, fit), None)
    event(f"{fewest} of {shots}")
    if fewest is None:
        bare = tokenize(document(everything), everything)
        cut = [truncated(request, limits) for request in bare]
        if fits(limits, cut):
            assert fitted(everything) == cut
            return
        with pytest.raises(InputError, match="even if their prompts are cut"):
            fitted(everything)
        return
    requests = fitted(everything)
    assert {len(request.left_out) for request in requests} == {fewest}
    assert fits(limits, requests)
    if method in SEQUENTIAL:
        assert requests[0].left_out == everything[:fewest]
    if method.invariant:
        shuffled = fitted(data.draw(st.permutations(everything)))
        assert list(map(shown, requests)) == list(map(shown, shuffled))


def shown(request: Request) -> list[tuple[int, ...]]:
    return sorted(request.prompt.context.demonstrations)
