"""Prompts as tokens: lm-eval's own ids, cut where the parts begin."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.prompts import FewShotPrompt
from lm_eval_icl.tokens import PairEncoder, encoder, split
from tests import tiny

TEXT = st.text(alphabet="ab Q:.\n\té12", max_size=12)
TOKENIZERS = {name: make() for name, make in tiny.TOKENIZERS.items()}


class Reference(HFLM):
    """`HFLM`'s tokenization alone."""

    def __init__(self, tokenizer):
        self.tokenizer, self.add_bos_token, self.custom_prefix_token_id = tokenizer, None, None
        self.backend = "causal"


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(
    prefix=TEXT,
    parts=st.lists(TEXT, max_size=3),
    query=st.one_of(TEXT, TEXT.map(lambda text: text + "\nAnswer:")),
    answers=st.lists(st.text(alphabet="ab Q.\né1", min_size=1, max_size=8), min_size=1, max_size=3),
)
def test_ids_are_those_of_the_whole_string(kind, prefix, parts, query, answers):
    prompt = FewShotPrompt(prefix, parts, query)
    if not prompt.strip():
        return  # lm-eval treats the empty context by itself
    tokenizer = TOKENIZERS[kind]
    bare = encoder(tokenizer, add_special_tokens=False)
    encode = PairEncoder(encoder(tokenizer), bare)
    for answer in answers:
        context, continuation = Reference(tokenizer)._encode_pair(str(prompt), answer)
        tokens, ids = encode(prompt, answer)
        assert [*tokens.context.tokens, *tokens.query] == context
        assert list(ids) == continuation
        assert len(tokens.query) >= 1
        assert len(tokens.context.demonstrations) == len(parts)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_parts_decode_to_the_parts(kind):
    """Where no token straddles a boundary, a part's tokens spell the part."""
    tokenizer = TOKENIZERS[kind]
    prompt = FewShotPrompt(
        "Task:\n", ["Review: dull film\nSentiment: no\n\n", "Review: café\nSentiment: yes\n\n"], "Q:"
    )
    tokens = split(prompt, prompt, encoder(tokenizer))

    def spell(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    assert spell(tokens.context.prefix) == prompt.prefix
    assert [spell(part).lstrip(" ") for part in tokens.context.demonstrations] == list(prompt.demonstrations)
    assert spell(tokens.query).lstrip(" ") == "Q:"


@pytest.mark.parametrize("kind", ["sentencepiece", "llama3"])
def test_bos_belongs_to_the_prefix_even_if_its_text_is_empty(kind):
    tokenizer = TOKENIZERS[kind]
    tokens = split(FewShotPrompt("", ["a b\n\n"], "c"), "a b\n\nc", encoder(tokenizer))
    assert tokens.context.prefix == (tokenizer.bos_token_id,)


def test_a_token_over_a_boundary_belongs_to_where_it_begins():
    """GPT-2's kind merges a description's last blank with the first word behind it."""
    tokenizer = TOKENIZERS["byte_level"]
    prompt = FewShotPrompt("is: ", ["the plot\n\n"], "x")
    tokens = split(prompt, prompt, encoder(tokenizer))
    assert tokenizer.decode(tokens.context.prefix) == "is: the"
    assert tokenizer.decode(tokens.context.demonstrations[0]) == " plot\n\n"


def test_equal_contexts_are_one_object():
    """Fourteen thousand documents of MMLU have 57 sets of demonstrations."""
    encode = encoder(TOKENIZERS["byte_level"])
    first, second = (split(FewShotPrompt("p ", ["d\n\n"], query), f"p d\n\n{query}", encode) for query in ("a", "b"))
    assert first.context is second.context
