"""Deep-Thinking against a literal computation, pass by pass, without caches of ours or packing."""

import pytest
import torch
from transformers import DynamicCache

from lm_eval_icl import methods
from lm_eval_icl.inference.scoring import score_packed, score_rows
from lm_eval_icl.prompts.tokens import Context
from tests import evaluation, tiny

FAMILIES = ["gpt2", "opt", "gpt_neo", "gpt_neox", "llama", "qwen2", "qwen3", "mistral", "mistral_window"]
# Their layers that look back a few tokens count by index, so their queries are packed up to that window only.
WINDOWED = ["gpt_neo", "mistral_window"]
CONTEXT = Context((5, 9), ((30, 31, 32, 33, 34), (40, 41, 42), (50, 51, 52, 53)))
QUERIES = {(60, 61, 62, 63): [(70,), (71, 72, 73), (71, 72)], (64, 65): [(70,), (74, 75)]}


def literal(model, context, T, eta, momentum=0.0, restart_positions=False):
    """Section 3.1 and Appendix D as they stand: one list of keys and one of values a layer."""
    ids = torch.tensor([context])
    length = ids.shape[1]
    first = model(ids, past_key_values=DynamicCache(), use_cache=True).past_key_values
    keys = [layer.keys for layer in first.layers]
    values = [layer.values for layer in first.layers]
    velocity = None
    for _ in range(T - 1):
        cache = DynamicCache([(k.clone(), v.clone()) for k, v in zip(keys, values, strict=True)])
        start = 0 if restart_positions else length
        position_ids = torch.arange(start, start + length)[None]
        out = model(ids, past_key_values=cache, position_ids=position_ids, use_cache=True).past_key_values
        assert out.get_seq_length() == 2 * length
        gradient = [
            (layer.keys[:, :, length:] - k, layer.values[:, :, length:] - v)
            for layer, k, v in zip(out.layers, keys, values, strict=True)
        ]
        if velocity is None:
            velocity = gradient
        else:
            velocity = [
                (gk + momentum * mk, gv + momentum * mv) for (gk, gv), (mk, mv) in zip(gradient, velocity, strict=True)
            ]
        keys = [k + eta * mk for k, (mk, _) in zip(keys, velocity, strict=True)]
        values = [v + eta * mv for v, (_, mv) in zip(values, velocity, strict=True)]
    return keys, values


def literal_score(model, keys, values, query, answer):
    """One query and one answer in one row behind the memory."""
    cache = DynamicCache([(k.clone(), v.clone()) for k, v in zip(keys, values, strict=True)])
    length = keys[0].shape[-2]
    ids = torch.tensor([[*query, *answer]])
    position_ids = torch.arange(length, length + ids.shape[1])[None]
    logits = model(ids, past_key_values=cache, position_ids=position_ids, use_cache=True).logits[0]
    predicted = logits[len(query) - 1 : -1]
    logprobs = predicted.log_softmax(-1)[range(len(answer)), list(answer)]
    return logprobs.sum().item(), predicted.argmax(-1).tolist() == list(answer)


@pytest.mark.parametrize(
    "arguments",
    [
        {"T": 1, "eta": 0.01},
        {"T": 2, "eta": 1.0},
        {"T": 5, "eta": 0.01},
        {"T": 4, "eta": 0.3, "momentum": 0.9},
        {"T": 3, "eta": 0.3, "restart_positions": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_literal(name, arguments):
    model = tiny.build(name, torch.float64)
    method = methods.DeepThink(**arguments)
    (memory,) = method.encode(model, [CONTEXT])
    keys, values = literal(model, CONTEXT.tokens, **arguments)
    for (k, v), expected_keys, expected_values in zip(memory.layers, keys, values, strict=True):
        torch.testing.assert_close(k, expected_keys, rtol=0, atol=1e-6)
        torch.testing.assert_close(v, expected_values, rtol=0, atol=1e-6)
    for query, answers in QUERIES.items():
        expected = [literal_score(model, keys, values, query, answer) for answer in answers]
        evaluation.assert_same(score_rows(model, memory, [(query, answers)]), expected, 1e-6)
        if name not in WINDOWED:
            pairs = [(query, answer) for query, answers in QUERIES.items() for answer in answers]
            packed = dict(zip(pairs, score_packed(model, [(memory, pairs)]), strict=True))
            evaluation.assert_same([packed[query, answer] for answer in answers], expected, 1e-6)


@torch.no_grad()
def test_it_changes_the_answer():
    """The settings above are no accident of an update that does nothing."""
    model = tiny.build("llama", torch.float64)

    def score(**arguments):
        (memory,) = methods.DeepThink(**arguments).encode(model, [CONTEXT])
        return score_rows(model, memory, [((60, 61), [(70,)])])[0][0]

    scores = [score(T=T, eta=0.01) for T in (1, 2, 5)]
    scores += [score(T=5, eta=0.01, momentum=0.9), score(T=5, eta=0.01, restart_positions=True)]
    assert len({round(value, 9) for value in scores}) == len(scores)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_iteration_is_icl(checkpoint, name):
    """Bit for bit, log-likelihoods and generated text."""
    names = ["many_tokens", "described", "inputs", "likelihood", "generate"]
    plain = evaluation.responses(evaluation.run("icl", checkpoint(name), names, 3))
    thought = evaluation.responses(evaluation.run("deepthink", checkpoint(name), names, 3, args={"T": 1}))
    assert plain == thought


def test_generation_continues_from_the_memory(checkpoint):
    """Greedy text behind the refined memory, token by token from the literal computation."""
    path = checkpoint("gpt2")
    results = evaluation.run("deepthink", path, ["generate"], 3, args={"T": 4, "eta": 0.5, "dtype": "float64"})
    model = tiny.build("gpt2", torch.float64)
    tokenizer = tiny.TOKENIZERS["byte_level"]()
    plain = evaluation.responses(evaluation.run("icl", path, ["generate"], 3, args={"dtype": "float64"}))
    different = False
    for sample, other in zip(results["samples"]["generate"], plain, strict=True):
        prompt = sample["arguments"][0][0]
        ids, shared = tokenizer.encode(str(prompt)), evaluation.shared_length(tokenizer, prompt)
        context, query = ids[:shared], ids[shared:]
        with torch.no_grad():
            keys, values = literal(model, context, 4, 0.5)
            cache = DynamicCache(list(zip(keys, values, strict=True)))
            tokens = []
            feed = torch.tensor([query])
            for _ in range(12):
                token = model(feed, past_key_values=cache, use_cache=True).logits[0, -1].argmax()
                tokens.append(token.item())
                feed = token[None, None]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        for stop in ["\n\n", "film", "<|endoftext|>"]:
            text = text.split(stop)[0]
        assert sample["resps"][0][0] == text
        different |= text != other
    assert different


def test_half_precision_keeps_small_steps():
    """In bfloat16 a step of eta=0.001 is below half a unit in the last place; the running sum is not."""
    model = tiny.build("llama", torch.bfloat16)
    with torch.no_grad():
        (start,) = methods.ICL().encode(model, [CONTEXT])
        (moved,) = methods.DeepThink(T=30, eta=0.001).encode(model, [CONTEXT])
    assert moved.layers[0][0].dtype == torch.bfloat16
    assert any(
        not torch.equal(a, b)
        for x, y in zip(start.layers, moved.layers, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_without_demonstrations_it_is_zero_shot_and_says_so_once(checkpoint, caplog):
    names = ["one_token", "generate"]
    with caplog.at_level("WARNING", logger="lm_eval.icl"):
        import logging

        logging.getLogger("lm_eval").propagate = True
        thought = evaluation.responses(evaluation.run("deepthink", checkpoint("gpt2"), names, None))
    plain = evaluation.responses(evaluation.run("icl", checkpoint("gpt2"), names, None))
    assert thought == plain
    warnings = [record.getMessage() for record in caplog.records if "--num_fewshot" in record.getMessage()]
    assert len(warnings) == 2
    assert any(text.startswith("one_token:") for text in warnings)
