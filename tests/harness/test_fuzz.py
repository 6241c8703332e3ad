"""Any prompt: numbers or one clear line, and the same numbers whatever runs beside it.

25 prompts a run, 5 where a prompt is run many times over, and every run draws others; `pytest --hypothesis-profile=long
tests/harness/test_fuzz.py` tries 160 times as many, in about an hour.
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
from tests import tiny

CLASSES: dict[str, type[ICLModel]] = {name: model_class(name) for name in NAMES}
# RMSNorm rounds to float32 where all else is float64.
TOLERANCE = {"gpt2": 1e-8, "llama": 1e-4}

# fmt: off
PIECES = [
    "a", " ", "  ", "\n", "\n\n", "\t", "\r\n", "Review:", " positive", " film", ".", "Answer: ", "1", "12 + 30", "Q",
    "é", "e\u0301", "\u0301", "👩\u200d👩\u200d👧", "👩\u200d", "🇩", "🇪", "👍🏽", "漢字", "אב",
    "\u202e", "\u200b", "\ufeff", "ﬃ", "\0", "\x1b[0m", "\x7f", "\x85", "\u2028", "\u00a0", "\u3000", "\U0010ffff",
    "\ufffd", "\ue000", "▁", "Ġ", "<0x0A>", "<|endoftext|>", "<s>", "</s>", "<unk>", "{{text}}", "%s", "\\n", "x" * 60,
]
# fmt: on
# Two in three from those that break things; a lone surrogate now and then.
CHARACTERS = (
    st.sampled_from(PIECES) | st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"])
)
TEXT = st.lists(CHARACTERS, max_size=8).map("".join)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[FewShotPrompt, str]]:
    """Prompts with the same demonstrations, and options for each; every fourth time they may be refused."""
    prefix, demonstrations = draw(TEXT), draw(st.lists(TEXT, max_size=6))
    query, option = (
        TEXT.filter(str.strip),
        TEXT.filter(bool),
    )  # an option may melt into the end of its query
    if draw(st.integers(0, 3)) == 0:
        query = option = TEXT
    queries, options = (
        draw(st.lists(query, min_size=1, max_size=3)),
        draw(st.lists(option, min_size=1, max_size=4)),
    )
    return [
        (FewShotPrompt(prefix, demonstrations, query), option)
        for query in queries
        for option in options
    ]


@pytest.fixture(scope="module")
def loaded(checkpoint):
    """Every model, once: a function of architecture and dtype."""
    kept: dict[Any, Any] = {}
    # `hf`'s logits cache takes one request's answer for another's where the same tokens are cut elsewhere into context
    # and continuation ("a" + "aaa", "aaa" + "a").
    exact = functools.partial(HFLM, logits_cache=False)

    def load(architecture: str, dtype: str) -> dict[str, Any]:
        if (architecture, dtype) not in kept:
            kept[architecture, dtype] = {
                name: cls(
                    str(checkpoint(architecture)),
                    device="cpu",
                    dtype=dtype,
                    batch_size=1,
                    **QUICK.get(name, {}),
                )
                for name, cls in {"hf": exact, **CLASSES}.items()
            }
        return kept[architecture, dtype]

    return load


def run(lm: Any, arguments: Sequence[tuple[Any, Any]]) -> list[Any]:
    if isinstance(lm, ICLModel):
        lm.begin([])
    requests = [
        Instance("loglikelihood", {}, pair, 0, metadata=("fuzz", i, 1), task_name="fuzz", doc_id=i)
        for i, pair in enumerate(arguments)
    ]
    return lm.loglikelihood(requests, disable_tqdm=True)


def numbers_or_one_line(
    lm: Any, arguments: Sequence[tuple[Any, Any]]
) -> list[tuple[float, bool]] | str:
    try:
        found = run(lm, arguments)
    except InputError as error:
        assert str(error).startswith("lm-eval-icl: ") and "\n" not in str(error)
        return str(error)
    assert all(-math.inf < number <= 0 for number, _ in found)
    return found


def assert_near(one: Any, other: Any, tolerance: float) -> None:
    assert [greedy for _, greedy in one] == [greedy for _, greedy in other]
    assert all(abs(a - b) <= tolerance for (a, _), (b, _) in zip(one, other, strict=True)), (
        one,
        other,
    )


slowly = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    max_examples=max(1, settings.default.max_examples // 2),
)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TOLERANCE)
@slowly
@given(arguments=requests(), data=st.data())
def test_any_prompt(loaded, architecture, arguments, data):
    lms = loaded(architecture, "float64")
    order = data.draw(st.permutations(range(len(arguments[0][0].demonstrations))))
    permuted = [
        (FewShotPrompt(p.prefix, [p.demonstrations[i] for i in order], p.query), o)
        for p, o in arguments
    ]
    for name in CLASSES:
        found = numbers_or_one_line(lms[name], arguments)
        event(f"{name} {type(found).__name__}")
        if lms[name].method.invariant:
            assert found == numbers_or_one_line(lms[name], permuted)
        if name != "icl":
            continue
        plain = [(str(prompt), option) for prompt, option in arguments]
        if isinstance(found, str):  # what we refuse is nothing that `hf` can do
            with pytest.raises((AssertionError, TypeError, IndexError)):
                run(lms["hf"], plain)
        else:
            assert_near(found, run(lms["hf"], plain), TOLERANCE[architecture])


# What is left out of prompts that do not fit.

WORDS = st.lists(
    st.sampled_from(["a", " film", " dull", "!\n", " 12", "\n\n", " positive", "é", "  "]),
    max_size=9,
)
SEQUENTIAL = [
    make("icl"),
    make("deepthink"),
    make("nope"),
    make("invicl", {"positions": "sequential"}),
]
LONGEST = [make(name) for name in ("prefixicl", "pcw", "saicl", "invicl", "batchicl")]
LONGEST += [make("invicl", {"positions": "none"}), make("saicl", {"repeat": 2})]


@functools.cache
def byte_level() -> Any:
    return tiny.byte_level()


@pytest.mark.parametrize(
    "method",
    tiny.slow_but([make("icl"), make("invicl")], [*SEQUENTIAL, *LONGEST]),
    ids=repr,
)
@slowly
@given(data=st.data())
def test_the_fewest_are_left_out(method, data):
    """Tried against all that could be left out: the first ones where positions are sequential, elsewhere any."""
    first = next(n for n in range(1, 7) if not method.why_not(n))
    shots, options = (
        data.draw(st.integers(first, 6)),
        data.draw(st.lists(WORDS, min_size=1, max_size=3)),
    )
    text = WORDS.map(lambda words: "Review:" + "".join(words) + "\n\n")
    prefix, texts = (
        "Tell. " * data.draw(st.integers(0, 1)),
        st.lists(text, min_size=shots, max_size=shots),
    )
    prompts = [FewShotPrompt(prefix, data.draw(texts), data.draw(text) + "A:")]
    if method in LONGEST[:5] and data.draw(st.booleans()):  # a prompt for each option
        prompts = [FewShotPrompt(prefix, data.draw(texts), data.draw(text) + "A:") for _ in options]
    window = None
    if method.needs_mask and len(prompts) == 1:
        window = data.draw(st.none() | st.integers(10, 150))
    limits = PromptLimits(method, "GPT2", data.draw(st.integers(5, 120)), window, None, "")
    canonical = method.invariant and data.draw(st.booleans())
    by_part = method.treats_demonstrations_alike
    tokenize = RequestTokenizer(
        PromptTokenizer(byte_level(), by_part=by_part, canonical=canonical), 16
    )

    def document(order: Sequence[int]) -> list[Instance]:
        """The requests with the demonstrations in this order."""
        ordered = [
            FewShotPrompt(p.prefix, [p.demonstrations[i] for i in order], p.query) for p in prompts
        ]
        pairs = zip(itertools.cycle(ordered), options, strict=False)
        return [
            Instance("loglikelihood", {}, (prompt, "".join(["I", *words])), i, ("fuzz", 0, 1))
            for i, (prompt, words) in enumerate(pairs)
        ]

    def fitted(order: Sequence[int]) -> list[Request]:
        return fit_requests(document(order), tokenize, limits, "drop", quiet=True)

    everything = range(shots)
    tried = [some for n in range(shots + 1) for some in itertools.combinations(everything, n)]
    if method in SEQUENTIAL:
        tried = [tuple(range(n)) for n in range(shots + 1)]
    fit = (some for some in tried if fits(limits, tokenize(document(everything), some)))
    fewest = next(map(len, fit), None)
    event(f"{fewest} of {shots}")
    if fewest is None:
        bare = tokenize(document(everything), tuple(everything))
        cut = [truncated(request, limits) for request in bare]
        if fits(limits, cut):
            assert fitted(everything) == cut
            return
        with pytest.raises(InputError, match="even if their prompts are cut"):
            fitted(everything)
        return
    found = fitted(everything)
    assert {len(request.left_out) for request in found} == {fewest}
    assert fits(limits, found)
    if method in SEQUENTIAL:
        assert found[0].left_out == tuple(range(fewest))
    if method.invariant:
        shuffled = fitted(data.draw(st.permutations(everything)))
        for one, other in zip(found, shuffled, strict=True):
            assert sorted(one.prompt.context.demonstrations) == sorted(
                other.prompt.context.demonstrations
            )
