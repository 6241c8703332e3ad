"""Prompts as tokens: lm-eval's own ids, cut where the parts begin."""

import bisect
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.prompts.prompt import Demonstration, FewShotPrompt
from lm_eval_icl.prompts.splitting import encoder, tokenizes_by_line
from lm_eval_icl.prompts.tokens import Context, PairEncoder, PromptTokenizer
from tests import evaluation, tiny

TEXT = st.text(alphabet="ab Q:.\n\té12", max_size=12)
ANSWER = st.text(alphabet="ab Q.\né1", min_size=1, max_size=8)
TOKENIZERS = {name: make() for name, make in tiny.TOKENIZERS.items()}


def unigram(normalizer=None):
    """SentencePiece's Unigram: words begin with "▁" and may hold a line break."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<s>", "<unk>"], unk_token="<unk>"
    )
    trainer.show_progress = False
    tokenizer.train_from_iterator(tiny.CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def word_piece():
    """BERT's kind, special tokens at both ends."""
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", *"abq:.12é", *(f"##{letter}" for letter in "abq12é")]
    tokenizer = Tokenizer(
        models.WordPiece({each: i for i, each in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="[CLS]")


def with_prefix_space():
    """RoBERTa's kind: a blank is put before a text."""
    tokenizer = tiny.byte_level()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def without_lines():
    """T5's kind: a line break is a blank, and the blank is a part of the word after it."""
    return unigram(
        normalizers.Sequence(
            [normalizers.Replace("\n", " "), normalizers.Replace(Regex(" {2,}"), " ")]
        )
    )


def over_lines():
    """BPE over the whole text, with an entry that holds a line break."""
    vocabulary = {each: i for i, each in enumerate(["<s>", *"ab Q:.\n\té12", "\nb", "a\nb"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("\n", "b"), ("a", "\nb")]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


BY_LINE = {**TOKENIZERS, "with_prefix_space": with_prefix_space()}
OTHERS = (word_piece, unigram, without_lines, over_lines)
OF_EVERY_KIND = {**BY_LINE, **{make.__name__: make() for make in OTHERS}}


class Reference(HFLM):
    """`HFLM`'s tokenization alone."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.add_bos_token = None
        self.custom_prefix_token_id = None
        self.backend = "causal"


def pairs(tokenizer, by_part=False, by_line=True):
    """What tokenizes prompts and continuations, as `PromptTokenizer` makes it."""
    bare = encoder(tokenizer, add_special_tokens=False)
    return PairEncoder(encoder(tokenizer), bare, by_part, by_line and tokenizes_by_line(tokenizer))


def assert_as_hf(tokenizer, prompt, tokens, answer, ids):
    """The tokens of a prompt and of an answer are those of the whole string."""
    context, continuation = Reference(tokenizer)._encode_pair(str(prompt), answer)
    assert [*tokens.context.tokens, *tokens.query] == context
    assert list(ids) == continuation


@pytest.mark.parametrize("kind", tiny.slow_but(["sentencepiece", "llama3"], TOKENIZERS))
@settings(max_examples=40, deadline=None)
@given(
    prefix=TEXT,
    parts=st.lists(TEXT, max_size=3),
    query=st.one_of(TEXT, TEXT.map(lambda text: text + "\nAnswer:")),
    answers=st.lists(ANSWER, min_size=1, max_size=3),
)
def test_ids_are_those_of_the_whole_string(kind, prefix, parts, query, answers):
    prompt = FewShotPrompt(prefix, parts, query)
    if not prompt.strip():
        return  # lm-eval treats the empty context by itself
    tokenizer = TOKENIZERS[kind]
    encode = pairs(tokenizer)
    for answer in answers:
        tokens, (ids,) = encode(prompt, [answer])
        assert_as_hf(tokenizer, prompt, tokens, answer, ids)
        assert len(tokens.query) >= 1
        assert len(tokens.context.demonstrations) == len(parts)


@pytest.mark.parametrize("kind", OF_EVERY_KIND)
@settings(max_examples=12, deadline=None)
@given(
    prefix=TEXT,
    parts=st.lists(TEXT.map(lambda text: text + "\nA: b\n\n"), min_size=1, max_size=2),
    end=st.sampled_from(["", "\n", "a", " "]),
    queries=st.lists(
        st.one_of(TEXT, st.just("  "), TEXT.map(lambda text: text + "\nA:")), min_size=2, max_size=5
    ),
)
def test_after_a_shared_context_the_ids_are_those_of_the_whole_string(
    kind, prefix, parts, end, queries
):
    tokenizer = OF_EVERY_KIND[kind]
    encode = pairs(tokenizer)
    alone = pairs(tokenizer, by_line=False)
    parts = [*parts[:-1], parts[-1] + end]
    for query in queries:
        prompt = FewShotPrompt(prefix, parts, query)
        tokens, (ids,) = encode(prompt, [" b"])
        assert_as_hf(tokenizer, prompt, tokens, " b", ids)
        assert (tokens, [ids]) == alone(prompt, [" b"])


def test_what_another_caller_of_the_tokenizer_sets_is_taken_back():
    tokenizer = TOKENIZERS["sentencepiece"]
    encode = encoder(tokenizer)
    text = "Q: a warm and sharp film\nA:"
    expected = encode(text)
    tokenizer(text, truncation=True, max_length=3)
    tokenizer.backend_tokenizer.enable_padding(length=99)
    assert encode(text) == expected
    assert len(expected[0]) > 3


@pytest.mark.parametrize("kind", OF_EVERY_KIND)
def test_a_shared_context_is_tokenized_once(kind):
    """But for its last line, by tokenizers that go line by line and put nothing at the end of a
    text."""
    tokenizer = OF_EVERY_KIND[kind]
    whole = []
    plain = encoder(tokenizer)
    bare = encoder(tokenizer, add_special_tokens=False)

    def counted(text):
        whole.append(text)
        return plain(text)

    encode = PairEncoder(counted, bare, by_line=tokenizes_by_line(tokenizer))
    whole.clear()  # what the tokenizer was tried on
    prompts = []
    for query in ("Q: 1\nA:", "Q: 2\nA:", "Q: 3\nA:"):
        prompts.append(FewShotPrompt("Tell.\n\n", ["Q: a\nA: b\n\n"], query))
    for prompt in prompts:
        encode.split(prompt, prompt)
    assert whole == (prompts[:1] if kind in BY_LINE else prompts)


def test_after_a_shared_context_a_line_break_may_be_a_part_of_an_unknown_word():
    """WordPiece of words that begin with a line break: an unknown word is one token as a whole."""
    vocabulary = {piece: i for i, piece in enumerate(["[UNK]", "\n", "Q", "##Q", "##a"])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "merged_with_next")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    encode = pairs(tokenizer)
    for query, ids in (("a", [2, 1, 3, 4]), ("é", [2, 0])):
        prompt = FewShotPrompt("", ["Q\nQ"], query)
        tokens = encode.split(prompt, prompt)
        assert [*tokens.context.tokens, *tokens.query] == ids == tokenizer(str(prompt)).input_ids


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_parts_decode_to_the_parts(kind):
    """Where no token straddles a boundary, a part's tokens spell the part. BOS belongs to the
    prefix."""
    tokenizer = TOKENIZERS[kind]
    for prefix in ("Task:\n", ""):
        shots = ["Review: dull film\nSentiment: no\n\n", "Review: café\nSentiment: yes\n\n"]
        prompt = FewShotPrompt(prefix, shots, "Q:")
        tokens = pairs(tokenizer).split(prompt, prompt)
        spelled = [
            tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens.context.demonstrations
        ]
        assert tokenizer.decode(tokens.context.prefix, skip_special_tokens=True) == prefix
        assert [text.lstrip(" ") for text in spelled] == shots
        assert tokenizer.decode(tokens.query).lstrip(" ") == "Q:"
        assert (tokenizer.bos_token_id in tokens.context.prefix) == (kind != "byte_level")


def test_a_token_over_a_boundary_belongs_to_where_it_begins():
    """GPT-2's kind merges a description's last blank with the first word after it."""
    tokenizer = TOKENIZERS["byte_level"]
    prompt = FewShotPrompt("is: ", ["the plot\n\n"], "x")
    encode = pairs(tokenizer)
    tokens = encode.split(prompt, prompt)
    assert tokenizer.decode(tokens.context.prefix) == "is: the"
    assert tokenizer.decode(tokens.context.demonstrations[0]) == " plot\n\n"
    # Equal contexts are one object: fourteen thousand documents of MMLU have 57 sets of
    # demonstrations.
    other = FewShotPrompt("is: ", ["the plot\n\n"], "y")
    assert encode.split(other, other).context is tokens.context


# Parts that begin alike, so that what follows a demonstration is the same everywhere.
PARTS = st.sampled_from(["a", "Q", " Q", "\nb", "."]).flatmap(
    lambda start: st.lists(TEXT.map(lambda text: start + text), min_size=3, max_size=5)
)


def where_parts_begin(tokenizer, ids, parts):
    """How many ids spell the text up to each boundary; None where a token straddles one."""
    boundaries = dict.fromkeys(itertools.accumulate(parts[:-1]))
    for n in range(len(ids) + 1):
        spelled = tokenizer.decode(ids[:n], skip_special_tokens=True)
        if spelled in boundaries:
            boundaries[spelled] = n
    return [boundaries[text] for text in itertools.accumulate(parts[:-1])]


@pytest.mark.parametrize("kind", tiny.slow_but(["sentencepiece", "llama3"], TOKENIZERS))
@settings(max_examples=40, deadline=None)
@given(parts=PARTS)
def test_by_part_the_ids_are_those_of_the_whole_string_where_no_token_straddles(kind, parts):
    prefix, *parts, query = parts
    query = query.rstrip()
    prompt = FewShotPrompt(prefix, parts, query)
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(str(prompt))
    ends = where_parts_begin(tokenizer, ids, [prefix, *parts, query])
    assume(None not in ends)
    tokens = pairs(tokenizer, by_part=True)
    context, _ = tokens(prompt, " x")
    cut = [tuple(ids[a:b]) for a, b in itertools.pairwise([0, *ends, len(ids)])]
    assert [context.context.prefix, *context.context.demonstrations, context.query] == cut


@pytest.mark.parametrize("kind", tiny.slow_but(["sentencepiece", "llama3"], TOKENIZERS))
@settings(max_examples=40, deadline=None)
@given(
    prefix=TEXT,
    parts=st.lists(TEXT.filter(bool), min_size=2, max_size=4),
    query=TEXT.filter(str.strip),
    answer=ANSWER,
    data=st.data(),
)
def test_by_part_nothing_depends_on_the_order(kind, prefix, parts, query, answer, data):
    """Blanks, line breaks and punctuation at either end of a demonstration included."""
    order = data.draw(st.permutations(range(len(parts))))
    tokenizer = TOKENIZERS[kind]
    encode = pairs(tokenizer, by_part=True)
    tokens, ids = encode(FewShotPrompt(prefix, parts, query), [answer])
    in_order = [parts[i] for i in order]
    permuted, permuted_ids = encode(FewShotPrompt(prefix, in_order, query), [answer])
    shown = tokens.context.demonstrations
    assert permuted.context.prefix == tokens.context.prefix
    assert permuted.context.demonstrations == tuple(shown[i] for i in order)
    assert permuted.query == tokens.query
    assert permuted_ids == ids
    if kind != "sentencepiece":  # its decoder drops the blank that a text begins with
        assert [tokenizer.decode(part, skip_special_tokens=True) for part in shown] == parts
        assert tokenizer.decode(tokens.query) == query.rstrip()


def test_by_part_an_empty_query_is_refused():
    encode = pairs(TOKENIZERS["byte_level"], by_part=True)
    with pytest.raises(InputError, match="the query is empty"):
        encode(FewShotPrompt("p", ["a\n\n", "b\n\n"], " "), ["x"])
    # Without demonstrations there is no order to depend on.
    after_a_prefix, _ = encode(FewShotPrompt("p", [], " "), ["x"])
    alone, _ = encode(FewShotPrompt("", [], "p "), ["x"])
    assert after_a_prefix == alone


def test_by_part_a_part_that_merges_with_all_before_it_is_tokenized_alone():
    """Behind a line break, an x and a point, "b" is a part of another token; and behind the
    prefix."""
    before = [*"\nx.a"]
    vocabulary = ["<s>", "b", *before, *(f"{letter}b" for letter in before)]
    ids = {text: number for number, text in enumerate(vocabulary)}
    backend = Tokenizer(models.BPE(ids, [(letter, "b") for letter in before]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    prompt = FewShotPrompt("a", ["ba", "bx"], "b.")
    tokens = pairs(tokenizer, by_part=True).split(prompt, prompt)
    assert tokens.context.prefix == (ids["a"],)
    assert tokens.context.demonstrations == ((ids["b"], ids["a"]), (ids["b"], ids["x"]))
    assert tuple(tokens.query) == (ids["b"], ids["."])


# Tokenizers whose offsets and ends of texts are unlike those of GPT-2's and Llama's.


def dropping_blanks(pre_tokenizer):
    """WordPiece that drops the blanks and line breaks between words."""
    letters = sorted(set("".join("".join(tiny.CORPUS).split())))
    pieces = ["[UNK]", "[BOS]", *letters, *(f"##{letter}" for letter in letters)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="[BOS]")


def marking_words():
    """XLM-RoBERTa's kind: blanks are dropped, and then words begin with a mark that is no character
    of the text."""
    tokenizer = unigram()
    split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    return tokenizer


def stripping_the_end():
    """Keeps line breaks, but not at the end of a text."""
    return unigram(normalizers.Strip(left=False, right=True))


def closing(tokenizer, end):
    """The tokenizer with a token at the end of every text."""
    special = [(end, tokenizer.convert_tokens_to_ids(end))]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        f"$A {end}", special_tokens=special
    )
    return tokenizer


ODD = {
    "BertPreTokenizer": lambda: dropping_blanks(pre_tokenizers.BertPreTokenizer()),
    "WhitespaceSplit": lambda: dropping_blanks(pre_tokenizers.WhitespaceSplit()),
    "marking_words": marking_words,
    "stripping_the_end": stripping_the_end,
}
WORDS = [["Review:", "dull"], ["Review:", "warm", "and", "funny"], ["Review:", "odd"]]
DEMONSTRATIONS = [f"{' '.join(words)}\nSentiment: no\n\n" for words in WORDS]


def ids_of_parts(kind, tokenizer, prompt):
    """Prefix, demonstrations and query, word by word or letter by letter."""
    parts = [prompt.prefix, *prompt.demonstrations, prompt.query]
    if kind != "stripping_the_end":
        return [tuple(tokenizer(part, add_special_tokens=False).input_ids) for part in parts]
    # Every token spells itself, but for a mark in front.
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    ends = list(itertools.accumulate(map(len, parts)))
    spelled = -1
    by_part = [()] * len(parts)
    for token in ids:
        part = bisect.bisect_right(ends, spelled)
        by_part[part] += (token,)
        spelled += len(tokenizer.convert_ids_to_tokens(token))
    return by_part


@pytest.mark.parametrize("by_part", [False, True])
@pytest.mark.parametrize("kind", ODD)
def test_tokens_belong_to_the_parts_that_they_spell(kind, by_part):
    tokenizer = ODD[kind]()
    prompt = FewShotPrompt("Tell.\n\n", DEMONSTRATIONS, "Review: quiet\nSentiment:")
    prefix, *parts, query = ids_of_parts(kind, tokenizer, prompt)
    before = len(prefix) + sum(map(len, parts)) + len(query)
    expected = tokenizer(prompt + " yes", add_special_tokens=False).input_ids[before:]
    tokens, (answer,) = pairs(tokenizer, by_part)(prompt, [" yes"])
    assert tokens.context == Context(prefix, tuple(parts))
    assert tuple(tokens.query) == query
    assert list(answer) == expected != []


def check_scores_are_those_of_hf(path, tokenizer, prompt, answers):
    """Of a model with as many tokens as the tokenizer has."""
    tokenizer.save_pretrained(path)
    tiny.build("gpt2", vocab_size=len(tokenizer)).save_pretrained(path)
    instances = [Instance("loglikelihood", {}, (prompt, answer), 0) for answer in answers]

    def scores(make):
        model = make(str(path), device="cpu", dtype="float64")
        return model.loglikelihood(instances, disable_tqdm=True)

    evaluation.assert_same(scores(model_class("icl")), scores(HFLM), 1e-9)


@pytest.mark.parametrize("query", ["Review: odd</s>", "Review: odd\nSentiment:"])
@pytest.mark.parametrize("make", [unigram, tiny.sentencepiece])
def test_scores_of_a_tokenizer_that_ends_every_text_are_those_of_hf(make, query, tmp_path):
    """The prompt may end with the same token."""
    tokenizer = make()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    prompt = FewShotPrompt("", DEMONSTRATIONS, query)
    check_scores_are_those_of_hf(
        tmp_path, closing(tokenizer, "</s>"), prompt, (" no", "yes indeed", "\nyes")
    )


def test_scores_of_a_tokenizer_whose_words_reach_over_line_breaks_are_those_of_hf(tmp_path):
    """Unigram with a token in which the context's last line, a line break and the answer's first
    letters are one."""
    pieces = ["<s>", "<unk>", *"abcdQ\n", "a\nbc"]
    scores = [0.0, -10.0, *[-3.0] * 6, -1.0]
    backend = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=1))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="<unk>"
    )
    check_scores_are_those_of_hf(
        tmp_path, tokenizer, FewShotPrompt("", ["Qd\n"], "a\nb"), ("cdddd",)
    )


@pytest.mark.parametrize("by_part", [False, True])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_tokens_of_answers_are_found(kind, by_part):
    """Also after demonstrations are sorted or left out; and they are those of the option itself."""
    tokenizer = TOKENIZERS[kind]
    parts = [
        Demonstration("Review: the plot is dull\nSentiment:", " negative", "\n\n"),
        Demonstration("Review: a gripping film\nSentiment:", " positive", "\n\n"),
        Demonstration("Review: warm\nAnswer:\n", "12 + 30", "\n\n"),
    ]
    prompts = PromptTokenizer(tokenizer, by_part=by_part, canonical=True, finds_answers=True)
    prompt = prompts.arranged(FewShotPrompt("Tell. ", parts, "Review: odd\nSentiment:"), (1,))
    tokens, _ = prompts.pair(prompt, " negative")
    first, _, last = sorted(parts)
    context = tokens.context
    assert len(context.answers) == 2
    shown = zip((first, last), context.demonstrations, context.answers, strict=True)
    for part, ids, (begin, end) in shown:
        answer = part[slice(*part.answer)]
        assert tokenizer.decode(ids[begin:end]).strip() == answer.strip()
        assert 0 < begin < end < len(ids)
    assert tokens.keeping([1]).context.answers == context.answers[1:]
    same = PromptTokenizer(tokenizer, by_part=by_part, canonical=True)
    without, _ = same.pair(prompt, " negative")
    assert without.context.demonstrations == context.demonstrations
    assert without.context.answers == ()


def test_unknown_answers_are_refused():
    prompts = PromptTokenizer(tiny.byte_level(), finds_answers=True)
    parts = [Demonstration("q:", " a", "\n"), "q: b\n"]
    with pytest.raises(InputError, match=r"answer of demonstration 2 is not known \('q: b"):
        prompts.pair(FewShotPrompt("", parts, "q:"), " a")
    tokens, _ = prompts.pair(FewShotPrompt("", (), "q:"), " a")
    assert tokens.context.answers == ()


def test_a_tokenizer_without_offsets_is_refused():
    with pytest.raises(InputError, match="use a fast tokenizer"):
        PromptTokenizer(SimpleNamespace(is_fast=False))


def test_the_end_of_a_text_stands_for_a_beginning_that_is_not_there():
    tokenizer = tiny.byte_level()
    tokenizer.eos_token = tokenizer.bos_token or tokenizer.eos_token
    tokenizer.bos_token = None
    assert PromptTokenizer(tokenizer).prefix_token_id == tokenizer.eos_token_id


def test_a_text_that_begins_with_bos_gets_no_second_one():
    """A chat template writes BOS itself."""
    tokenizer = TOKENIZERS["sentencepiece"]
    prompts = PromptTokenizer(tokenizer)
    bos = tokenizer.bos_token
    prompt = FewShotPrompt(bos, ("a: b\n\n",), "b:")
    tokens, _ = prompts.pair(prompt, " a")
    assert (*tokens.context.tokens, *tokens.query).count(tokenizer.bos_token_id) == 1
