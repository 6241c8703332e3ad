"""The Python API gives what lm-eval's model gives, without any of it."""

import functools
import itertools
import logging
import math
import re
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from lm_eval.api.instance import Instance

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError, Unsupported
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.methods import Predictor, deepthink
from lm_eval_icl.methods.limits import PromptLimits
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from tests import processes, tiny

DEMONSTRATIONS = [
    "Review: dull and long\nSentiment: no\n\n",
    "Review: warm\nSentiment: yes\n\n",
    "Review: odd\nSentiment: no\n\n",
]
QUERIES = ["Review: a film\nSentiment:", "Review: sharp and bright\nSentiment:", "Review: quiet, slow\nSentiment:"]
OPTIONS = [" no", " yes", " yes indeed"]


load = functools.partial(tiny.load, dtype=torch.float64)


@pytest.mark.parametrize("name", tiny.slow_but(["icl", "invicl", "deepthink", "saicl", "nbce"], methods.NAMES))
def test_it_gives_what_the_lm_eval_model_gives(checkpoint, name):
    path = checkpoint("llama")
    predictor = Predictor(*load(path), methods.make(name))
    lm = model_class(name)(str(path), device="cpu", dtype="float64", batch_size=8)
    prompts = [FewShotPrompt("Tell. ", DEMONSTRATIONS, query) for query in QUERIES]
    scored = [Instance("loglikelihood", {}, pair, 0) for pair in itertools.product(prompts, OPTIONS)]
    found = predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS, prefix="Tell. ")
    assert [score for scores in found for score in scores] == lm.loglikelihood(scored, disable_tqdm=True)

    texts = [Instance("generate_until", {}, (prompt, {"until": ["e"], "max_gen_toks": 6}), 0) for prompt in prompts]
    assert predictor.generate(DEMONSTRATIONS, QUERIES, prefix="Tell. ", max_new_tokens=6, stop=["e"]) == (
        lm.generate_until(texts, disable_tqdm=True)
    )


def test_one_memory_for_many_calls(checkpoint):
    predictor = Predictor(*load(checkpoint("gpt2")), methods.make("invicl"))
    first = predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)
    again = predictor.score(DEMONSTRATIONS[::-1], QUERIES[:1], OPTIONS)  # in any order
    predictor.generate(DEMONSTRATIONS, QUERIES)
    assert predictor.runner.store.encoded == 1
    assert [score for score, _ in again[0]] == pytest.approx([score for score, _ in first[0]], abs=1e-12)


def test_options_without_their_blank(checkpoint, caplog, monkeypatch):
    """Said once, of what would be tokenized as another text than the prompt's."""
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    model = load(checkpoint("gpt2"))
    for queries, options in ((QUERIES, ["no", "yes"]), (["a film"], ["no"])):
        caplog.clear()
        predictor = Predictor(*model, methods.make("icl"))
        for _ in range(2):
            predictor.score(DEMONSTRATIONS, queries, options)
        (line,) = [line for line in caplog.messages if "without a blank" in line]
        assert line.startswith(
            f"option 'no' follows {queries[0][-20:]!r} without a blank: options begin with the blank"
        )
    caplog.clear()
    predictor = Predictor(*model, methods.make("icl"))
    predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)
    predictor.score(DEMONSTRATIONS, ["a film ", "a film ("], ["no", "\nyes"])
    predictor.score(DEMONSTRATIONS, ["a film"], [", no", "\nno"])
    assert not caplog.messages


SLOW = """
import sys, time
from transformers import AutoModelForCausalLM, AutoTokenizer
from lm_eval_icl.methods import Predictor, make
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
predictor = Predictor(model, tokenizer, make(sys.argv[2]))
for block in model.transformer.h:
    block.register_forward_pre_hook(lambda *_: time.sleep(float(sys.argv[4])))
demonstrations = ["Review: dull and long\\nSentiment: no\\n\\n"] * int(sys.argv[3])
print(predictor.score(demonstrations, ["Review: a\\nSentiment:"], [" no"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "demonstrations", "tokens", "rank"),
    [
        ("invicl", 60, 2, "0"),
        ("deepthink", 60, 5, "0"),
        ("invicl", 60, 0, "1"),
        ("invicl", 4, 0, "0"),
    ],
)
def test_a_bar_while_a_long_context_is_encoded(checkpoint, name, demonstrations, tokens, rank):
    """On standard error, with the time that is left; for all passes together; of one process; not for a short one."""
    seconds = 0.25 if name == "deepthink" else 0.8  # of each block in each pass: more than two in all
    done = processes.python(SLOW, checkpoint("gpt2"), name, demonstrations, seconds, env={"RANK": rank})
    assert done.returncode == 0 and "Encoding" not in done.stdout, done.stderr
    bars = re.findall(r"Encoding ([\d,]+) tokens: +(\d+)%\|[^|]*\| \d\d:\d\d<(\d\d:\d\d)", done.stderr)
    assert bool(bars) == bool(tokens)
    if tokens:
        length = len(load(checkpoint("gpt2"))[1](DEMONSTRATIONS[0]).input_ids)
        assert {int(number.replace(",", "")) // (60 * length) for number, _, _ in bars} == {tokens}
        percent = [int(share) for _, share, _ in bars]
        assert percent == sorted(percent) and percent[-1] <= 100


@pytest.mark.parametrize("name", tiny.slow_but(["llama"], ["gpt2", "llama", "bloom"]))
def test_a_query_longer_than_a_piece_of_a_pass(checkpoint, name):
    """Of what runs in several passes, the last one has the query's last token."""
    model, query = load(checkpoint(name)), f"Review: {'a long film ' * 200}\nSentiment:"
    predictors = [Predictor(*model, methods.make("batchicl"), **pack) for pack in ({}, {"pack_tokens": 20_000})]
    assert len(model[1](query).input_ids) > 512
    ours, whole = (predictor.score(DEMONSTRATIONS, [query], OPTIONS)[0] for predictor in predictors)
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in whole], abs=1e-5)
    assert predictors[0].generate(DEMONSTRATIONS, [query], max_new_tokens=2)


@pytest.mark.parametrize(("name", "needed"), [("icl", 11), ("pcw", 9), ("invicl", 9)])
def test_a_prompt_may_take_every_position_of_the_model(name, needed):
    """Beside the prefix and the query, symmetric positions take those of the longest demonstration."""
    prompt = TokenizedPrompt(Context((1,), ((5, 6, 7), (8, 9))), (3, 4))
    for positions in (needed, needed - 1):
        limits = PromptLimits(methods.make(name), "GPT2", positions, None, None, "")
        assert (limits.too_long(prompt, 3) is None) == (positions == needed)


def test_options_of_each_query_and_no_demonstrations(checkpoint):
    predictor = Predictor(*load(checkpoint("llama")), methods.make("icl"))
    same = predictor.score([], QUERIES[:2], OPTIONS)
    each = predictor.score([], QUERIES[:2], [OPTIONS[:1], OPTIONS[1:]])
    assert [len(scores) for scores in each] == [1, 2]
    assert [score for score, _ in each[0] + each[1]] == pytest.approx(
        [same[0][0][0], same[1][1][0], same[1][2][0]], abs=1e-12
    )
    assert predictor.score([], [], OPTIONS) == predictor.generate([], []) == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p: p.score(DEMONSTRATIONS, QUERIES, [OPTIONS]), "options: 1 lists for 3 queries"),
        (lambda p: p.score(DEMONSTRATIONS, QUERIES, ["a", ""]), "query 0, option 1: the option is empty"),
        (
            lambda p: p.score(["many " * 3000] * 2, QUERIES, OPTIONS),
            r"query 0, option 0: prompts do not fit the model's 4096 positions; this one needs \d+: "
            r"demonstrations \d+ \+ query \d+( \+ answer without its last token \d+)?\. Give fewer demonstrations\.$",
        ),
        (lambda p: p.generate(DEMONSTRATIONS, QUERIES, max_new_tokens=5000), "query 0: prompts do not fit"),
        (lambda p: p.score(DEMONSTRATIONS, ["half \ud83d"], OPTIONS), "query 0: .*half a character"),
        (lambda p: p.generate([], ["half \ud83d"]), "query 0: .*half a character"),
        (lambda p: p.generate([], ["a"], num_return_sequences=2), "generation argument num_return_sequences=2 gives"),
        (lambda p: p.generate([], ["a"], use_cache=False), "generation argument use_cache=False would switch off"),
        (lambda p: p.generate([], ["a"], prompt_lookup_num_tokens=3), "generation argument prompt_lookup_num_tokens=3"),
        (lambda p: p.generate([], ["a"], return_dict_in_generate=True), "generation argument return_dict_in_generate"),
        (lambda p: p.generate([], ["a"], nonsense=1), "generation arguments .*refused by transformers"),
        (lambda p: p.score([], ["a"], " yes"), "options=' yes': must be a list of texts"),
        (lambda p: p.score("Review", ["a"], [" yes"]), "demonstrations='Review': must be a list of texts"),
        (lambda p: p.generate([], "a"), "queries='a': must be a list of texts"),
        (lambda p: p.generate([("a", "b")], ["a"]), r"demonstrations=\[\('a', 'b'\)\]: must be a list of texts"),
        (lambda p: p.generate({"a": "b"}, ["a"]), "demonstrations={'a': 'b'}: must be a list of texts"),
        (lambda p: p.generate([], [None]), r"queries=\[None\]: must be a list of texts"),
        (lambda p: p.generate([], ["a"], stop=[5]), r"stop=\[5\]: must be a list of texts"),
        (lambda p: p.generate([], ["a"], prefix=None), "prefix=None: must be a text"),
        (lambda p: p.generate([], ["a"], max_new_tokens="5"), "max_new_tokens='5': must be a whole number, 1 or more"),
        (lambda p: p.score([], ["a", "b"], [" c", [" d"]]), r"options=\[' c', \[' d'\]\]: must be a list of texts"),
        (lambda p: p.score([], ["a"], None), "options=None: must be a list of texts"),
    ],
)
def test_bad_input_is_one_line(checkpoint, call, says):
    predictor = Predictor(*load(checkpoint("gpt2")), methods.make("icl"))
    with pytest.raises(InputError, match=f"^lm-eval-icl: {says}"):
        call(predictor)


@pytest.mark.parametrize(
    "argument", [{"pack_tokens": 0}, {"batch_size": 0}, {"store_bytes": "a"}, {"max_length": "9"}, {"max_length": 0}]
)
def test_arguments_out_of_range(checkpoint, argument):
    ((name, value),) = argument.items()
    with pytest.raises(InputError, match=f"{name}={value!r}: must be a whole number, 1 or more"):
        Predictor(*load(checkpoint("gpt2")), methods.make("icl"), **argument)


def test_what_is_no_model_or_no_tokenizer(checkpoint):
    model, tokenizer = load(checkpoint("gpt2"))
    for pair in (("gpt2", tokenizer), (model, "gpt2"), (tokenizer, model), (model, None)):
        with pytest.raises(InputError, match=r"Predictor\(.*, ...\): must be a model and its tokenizer, both loaded"):
            Predictor(*pair, methods.make("icl"))


@pytest.mark.parametrize(("name", "arguments"), [(None, {}), ("pcw", "window_size=2"), ("pcw", ["window_size"])])
def test_a_method_that_cannot_be_made(name, arguments):
    with pytest.raises(InputError, match=r"must be the name of one|must be a dictionary"):
        methods.make(name, arguments)


def test_methods_that_cannot_be_used(checkpoint):
    for method in ("invicl", methods.InvICL):
        with pytest.raises(InputError, match=r"method=.*: must be a method with its arguments, such as InvICL\(\)"):
            Predictor(*load(checkpoint("gpt2")), method)
    with pytest.raises(Unsupported, match="invicl hides tokens"):
        Predictor(*load(checkpoint("bloom")), methods.make("invicl"))
    with pytest.raises(InputError, match="pcw: window_size=2: more than the 1 demonstrations"):
        predictor = Predictor(*load(checkpoint("gpt2")), methods.make("pcw", {"window_size": 2}))
        predictor.score(DEMONSTRATIONS[:1], QUERIES, OPTIONS)


def test_whole_numbers_may_be_written_with_a_point(checkpoint):
    predictor = Predictor(*load(checkpoint("gpt2")), methods.make("icl"), batch_size=2.0, pack_tokens=64.0)
    texts = predictor.generate(DEMONSTRATIONS, QUERIES, max_new_tokens=2)
    predictor.forget()
    assert predictor.generate(DEMONSTRATIONS, QUERIES, max_new_tokens=2) == texts


def test_weights_that_changed(checkpoint):
    model, tokenizer = load(checkpoint("gpt2"), attn_pdrop=0.5)
    predictor = Predictor(model, tokenizer, methods.make("icl"))
    before = predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    predictor.forget()
    after = predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)
    fresh = Predictor(model, tokenizer, methods.make("icl"))
    assert after == fresh.score(DEMONSTRATIONS, QUERIES, OPTIONS) != before


def test_numbers_that_break(checkpoint):
    model, tokenizer = load(checkpoint("gpt2"))
    predictor = Predictor(model, tokenizer, methods.make("icl"))
    with torch.no_grad():
        model.transformer.wte.weight[tokenizer.encode("x")[0]] = math.nan
    with pytest.raises(InputError, match=r"query 0, option 0: the log-probability is nan \(torch.float64\)"):
        predictor.score([], ["a", "x", "a"], [" b"])
    with pytest.raises(InputError, match="query 0: the scores of the next token are nan"):
        predictor.generate([], ["x"])


def test_a_model_that_somebody_owns_is_left_as_it_was(checkpoint):
    model, tokenizer = load(checkpoint("gpt2"))
    model.generation_config.cache_implementation = "static"
    ids = torch.tensor([tokenizer.encode(QUERIES[0])])
    before = model(ids).logits
    predictor = Predictor(model, tokenizer, methods.make("nope"))
    predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)
    predictor.generate(DEMONSTRATIONS, QUERIES, max_new_tokens=2)
    assert model.generation_config.cache_implementation == "static"
    assert torch.equal(model(ids).logits, before)


@pytest.mark.slow
def test_threads_share_models(checkpoint):
    """Methods that change a model while it runs, on two models, with long queries, whose attention is computed in
    parts: from many threads, the scores of one thread."""
    models = [load(checkpoint(name)) for name in ("gpt2", "llama")]
    predictors = [
        Predictor(*model, methods.make(name)) for model in models for name in ("icl", "nope", "invicl", "deepthink")
    ]
    long = [f"Review: {'warm and odd ' * n}\nSentiment:" for n in (20, 25, 30)]
    calls = [(predictor, queries) for predictor in predictors for queries in (long, long[:1], QUERIES)]

    def score(call):
        predictor, queries = call
        return predictor.score(DEMONSTRATIONS, queries, OPTIONS)

    expected = [score(call) for call in calls]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            assert list(pool.map(score, calls)) == expected


def test_an_adapter_and_its_model_share_a_lock(checkpoint):
    """They share their modules, on which positions are switched off."""
    model, tokenizer = load(checkpoint("gpt2"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False))
    predictors = [
        Predictor(adapted, tokenizer, methods.make("nope")),
        Predictor(model, tokenizer, methods.make("icl")),
    ]
    expected = [predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS) for predictor in predictors]
    for predictor in predictors:
        predictor.forget()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: predictors[i % 2].score(DEMONSTRATIONS, QUERIES, OPTIONS), range(24)))
    assert found == expected * 12


def test_deepthink_leaves_earlier_memories_alone():
    model = tiny.build("gpt2", torch.float64)
    context = Context((1,), ((5, 6, 7), (8, 9)))
    kept = []
    causal_pass = deepthink.causal_pass

    def keep(model, tokens, memory, positions):
        kept.append([(keys, keys.clone()) for keys, _ in memory.layers])
        return causal_pass(model, tokens, memory, positions)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(deepthink, "causal_pass", keep)
        methods.make("deepthink", {"T": 3, "eta": 0.5, "momentum": 0.9}).encode(model, [context])
    assert len(kept) == 2
    assert all(torch.equal(keys, before) for layers in kept for keys, before in layers)


def test_demonstrations_without_their_delimiter(checkpoint, caplog):
    predictor = Predictor(*load(checkpoint("gpt2")), methods.make("icl"))
    predictor.score(DEMONSTRATIONS, QUERIES, OPTIONS)
    predictor.score(["Review: dull\nSentiment: no ###"], QUERIES, OPTIONS)  # a delimiter of its own
    assert not caplog.messages
    for _ in range(2):
        predictor.score([text.strip() for text in DEMONSTRATIONS], QUERIES, OPTIONS)
    (line,) = caplog.messages
    assert line.startswith("demonstration 'd long\\nSentiment: no' ends without a delimiter")
