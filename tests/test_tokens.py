"""Prompts as tokens: lm-eval's own ids, cut where the parts begin."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.errors import InputError
from lm_eval_icl.prompt import FewShotPrompt
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


# Parts that begin alike, so that what stands behind a demonstration is the same everywhere.
PARTS = st.sampled_from(["a", "Q", " Q", "\nb", "."]).flatmap(
    lambda start: st.lists(TEXT.map(lambda text: start + text), min_size=3, max_size=5)
)


def where_parts_begin(tokenizer, ids, parts):
    """How many ids spell the text up to each boundary; None where a token straddles one."""
    spelled = [tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1)]
    ends, text = [], ""
    for part in parts[:-1]:
        text += part
        ends.append(max((n for n, spelling in enumerate(spelled) if spelling == text), default=None))
    return ends


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(parts=PARTS)
def test_by_part_the_ids_are_those_of_the_whole_string_where_no_token_straddles(kind, parts):
    prefix, *parts, query = parts
    query = query.rstrip()
    prompt = FewShotPrompt(prefix, parts, query)
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(str(prompt))
    ends = where_parts_begin(tokenizer, ids, [prefix, *parts, query])
    assume(None not in ends)
    tokens = PairEncoder(encoder(tokenizer), encoder(tokenizer, add_special_tokens=False), by_part=True)
    context, _ = tokens(prompt, " x")
    cut = [tuple(ids[a:b]) for a, b in itertools.pairwise([0, *ends, len(ids)])]
    assert [context.context.prefix, *context.context.demonstrations, context.query] == cut


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(
    prefix=TEXT,
    parts=st.lists(TEXT.filter(bool), min_size=2, max_size=4),
    query=TEXT.filter(str.strip),
    answer=st.text(alphabet="ab Q.\né1", min_size=1, max_size=8),
    data=st.data(),
)
def test_by_part_nothing_depends_on_the_order(kind, prefix, parts, query, answer, data):
    """Blanks, line breaks and punctuation at either end of a demonstration included."""
    order = data.draw(st.permutations(range(len(parts))))
    tokenizer = TOKENIZERS[kind]
    encode = PairEncoder(encoder(tokenizer), encoder(tokenizer, add_special_tokens=False), by_part=True)
    tokens, ids = encode(FewShotPrompt(prefix, parts, query), answer)
    permuted, permuted_ids = encode(FewShotPrompt(prefix, [parts[i] for i in order], query), answer)
    assert permuted.context.prefix == tokens.context.prefix
    assert permuted.context.demonstrations == tuple(tokens.context.demonstrations[i] for i in order)
    assert permuted.query == tokens.query and permuted_ids == ids
    if kind != "sentencepiece":  # its decoder drops the blank that a text begins with
        spelled = [tokenizer.decode(part, skip_special_tokens=True) for part in tokens.context.demonstrations]
        assert spelled == parts
        assert tokenizer.decode(tokens.query) == query.rstrip()


def test_by_part_an_empty_query_is_refused():
    tokenizer = TOKENIZERS["byte_level"]
    encode = PairEncoder(encoder(tokenizer), encoder(tokenizer, add_special_tokens=False), by_part=True)
    with pytest.raises(InputError, match="the query is empty"):
        encode(FewShotPrompt("p", ["a\n\n", "b\n\n"], " "), "x")
    # Without demonstrations there is no order to depend on.
    assert encode(FewShotPrompt("p", [], " "), "x")[0] == encode(FewShotPrompt("", [], "p "), "x")[0]
