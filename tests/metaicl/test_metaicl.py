"""MetaICL's tasks, against a literal version of its evaluation.

It was written from notes about its code alone.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import random
import re
import runpy
from collections import Counter

import lm_eval.evaluator
import numpy as np
import pytest
import torch
from lm_eval.models.dummy import DummyLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_icl import methods
from lm_eval_icl.cli import train as train_command
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness import patches
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.harness.response_cache import response_key
from lm_eval_icl.metaicl.data import SEEDS, TASKS, MetaICLFolder, Row
from lm_eval_icl.metaicl.reading import Reader, reader
from lm_eval_icl.metaicl.strings import Sequences, decision, macro_f1, mean_losses, texts
from lm_eval_icl.prompts.encoded import EncodedPrompt, EncodedText
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from lm_eval_icl.training.episodes import EpisodePool, RowDraw
from lm_eval_icl.training.finetune import Settings, train
from lm_eval_icl.training.metaicl_tasks import SettingTask, load_rows
from lm_eval_icl.training.rows import RowMaker

pytestmark = pytest.mark.usefixtures("tried_once")

# Ten tasks that are there whole: both kinds, few and many options, long and short rows, one class
# among the demonstrations (ethos-race), rows of different numbers of options (ai2_arc).
REAL = """
ai2_arc codah ethos-race financial_phrasebank glue-rte openbookqa poem_sentiment qasc quarel
superglue-copa
""".split()
# How many tokens a model takes where losses are compared; ids are compared at MetaICL's 1,024 too.
SHORT = 400
MADE = ("poem_sentiment", "openbookqa", "glue-rte")


# The literal version.


def literal_pieces(row, option, channel, first):
    """The two pieces of a row with an option.

    A line break stands between them, and three before all rows but the first.
    """
    free = not any(row["options"])
    if channel:
        given = option
        said = row["input"]
        if said != "" and not free:
            said = "\n" + said
        if not first:
            given = "\n\n\n" + given
        return given, said
    given = row["input"]
    said = option
    if not free:
        said = "\n" + said
    if not first:
        given = ("\n\n" if given == "" else "\n\n\n") + given
    return given, said


def literal_example(tokenize, row, options, channel, first):
    """For each option the ids of its two pieces.

    The end of the input is cut so that the longest option fits in 256.
    """
    pieces = [literal_pieces(row, option, channel, first) for option in options]
    inputs = [tokenize(said if channel else given) for given, said in pieces]
    outputs = [tokenize(given if channel else said) for given, said in pieces]
    room = 256 - 2 - max(map(len, outputs))
    inputs = [ids[:room] for ids in inputs]
    pieces = (outputs, inputs) if channel else (inputs, outputs)
    return list(zip(*pieces, strict=True))


def literal_sequences(tokenize, shown, row, channel, max_length, options=None):
    """For each option (context, target). Tokens too many are dropped from the context's start."""
    context = []
    for i, example in enumerate(shown):
        [(given, said)] = literal_example(tokenize, example, [example["output"]], channel, i == 0)
        context += given + said
    found = []
    options = options or row["options"]
    for given, said in literal_example(tokenize, row, options, channel, not shown):
        before = context + given
        if shown:
            most = min(256 * len(shown), 1024, max_length)
            before = before[max(0, len(before) + len(said) - most) :]
        found.append((before, said))
    return found


def literal_losses(model, sequences):
    """The mean cross-entropy of each target, one forward pass a sequence."""
    return [literal_loss(model, tuple(context), tuple(target)) for context, target in sequences]


@functools.cache
def literal_loss(model, context, target):
    with torch.inference_mode():
        logits = model(torch.tensor([context + target])).logits[0, len(context) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(target)).item()


def literal_f1(predictions, groundtruths):
    f1s = []
    pairs = list(zip(predictions, groundtruths, strict=True))
    for label in set(groundtruths):
        predicted_of_label = [p == label for p, g in pairs if g == label]
        right_of_predicted = [g == label for p, g in pairs if p == label]
        recall = np.mean(predicted_of_label)
        precision = np.mean(right_of_predicted) if right_of_predicted else 1.0
        both = precision + recall
        f1s.append(0 if both == 0 else 2 * precision * recall / both)
    return np.mean(f1s)


# Rows.

WORDS = """
a gripping film the plot is dull what capital of France Paris jokes fall flat positive negative
sentence plausible
""".split()


def made_options(rnd, number):
    options = []
    for j in range(number):
        words = rnd.choices(WORDS, k=rnd.randrange(1, 8))
        options.append(f"{' '.join(words)} {j}")
    return options


def made_rows(task, n, seed, kind="test"):
    """Rows as the task has them, some longer than an example may be, some with odd blanks."""
    rnd = random.Random(f"{task} {seed} {kind}")
    rows = []
    for i in range(n):
        words = rnd.choices(WORDS, k=rnd.choice([3, 12, 40, 40, 180]))
        options = TASKS[task]["options"]
        if options is None:
            options = made_options(rnd, 3 + i % 2)
        text = rnd.choice(["", "", " "]) + " ".join(words) + rnd.choice([".", "?", " [SEP] so: 12"])
        output = rnd.choice(options)
        rows.append({"task": task, "input": text, "output": output, "options": options})
    return rows


def write(folder, task, k, seed, split, rows):
    path = folder / task / f"{task}_{k}_{seed}_{split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of MetaICL's data with made-up rows."""
    folder = tmp_path_factory.mktemp("metaicl")
    for task in MADE:
        for seed in SEEDS:
            write(folder, task, 16, seed, "train", made_rows(task, 16, seed, "train"))
            write(folder, task, 16, seed, "test", made_rows(task, 6, 0))
    for task in ("ethos-gender", "sciq"):
        write(folder, task, 40, 100, "train", made_rows(task, 20, 1, "train"))
    free = made_rows("sciq", 20, 1, "train")
    for row in free:
        row |= {"task": "hotpot_qa", "options": []}
    write(folder, "hotpot_qa", 40, 100, "train", free)
    return folder


@pytest.fixture(scope="module")
def real(shared, tmp_path_factory):
    out = tmp_path_factory.mktemp("real")
    lay_out = runpy.run_path(str(shared / "tools/metaicl_data.py"))["lay_out"]
    lay_out(out)
    return out / "data"


@pytest.fixture(scope="module")
def model(checkpoint):
    """A random GPT-2 of 1,024 positions, and its folder."""
    folder = checkpoint("gpt2")
    model = AutoModelForCausalLM.from_pretrained(folder)
    return folder, model, AutoTokenizer.from_pretrained(folder)


def ids_of(model):
    """The function by which the literal version gets the ids of a text."""
    return lambda text: model[2](text)["input_ids"]


def read(folder, task, seed, split):
    path = folder / task / f"{task}_16_{seed}_{split}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@functools.cache
def manager(folder, metadata):
    patches.install("lm_eval.tasks.manager")
    metadata = {"metaicl": str(folder), **dict(metadata)}
    return TaskManager(
        include_defaults=False, include_path=str(task_dir() / "metaicl"), metadata=metadata
    )


def load(names, folder, **metadata):
    """The tasks and groups of these names."""
    return manager(folder, tuple(metadata.items())).load(list(names))


def evaluate(lm, names, folder, seed=100, shots=16, limit=None, **metadata):
    """As lm-eval's `simple_evaluate`, without a look at the machine."""
    for module in ("lm_eval.evaluator", "lm_eval.api.model"):
        patches.install(module)
    loaded = load(names, folder, **metadata)
    for task in loaded["tasks"].values():
        task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(seed)
    return lm_eval.evaluator.evaluate(lm, loaded, limit=limit, bootstrap_iters=0)


def built(lm, name, folder, seed=100, shots=16, limit=None, **metadata):
    """The requests of a task, by document."""
    [task] = load([name], folder, **metadata)["tasks"].values()
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(seed)
    task.bind(lm)
    task.build_all_requests(limit=limit)
    found = {}
    for instance in task.instances:
        found.setdefault(instance.doc_id, []).append(instance.args)
    return list(found.values()), task


def hf(model, **kwargs):
    return HFLM(pretrained=model[1], tokenizer=model[2], batch_size=4, device="cpu", **kwargs)


def ours(name, model, **kwargs):
    return model_class(name)(pretrained=model[1], tokenizer=model[2], device="cpu", **kwargs)


# Sequences.


@pytest.mark.parametrize("channel", [False, True], ids=["direct", "channel"])
@pytest.mark.parametrize("shots, most", [(16, 1024), (2, 1024), (0, 1024), (16, 300)])
def test_sequences_are_the_literal_ones(made, model, channel, shots, most):
    """Id by id, also those that are cut; and the models of this package get the same ones as hf."""
    cut = 0
    for lm in (hf(model, max_length=most), ours("icl", model, max_length=most)):
        for task in MADE[:2]:
            documents, _ = built(lm, f"metaicl_{'channel_' * channel}{task}", made, 13, shots)
            shown = read(made, task, 13, "train")[:shots]
            for row, requests in zip(read(made, task, 13, "test"), documents, strict=True):
                expected = literal_sequences(ids_of(model), shown, row, channel, most)
                assert [(prompt.ids, list(answer.ids)) for prompt, answer in requests] == expected
                lengths = [len(context) + len(target) for context, target in expected]
                cut += min(most, 1024) in lengths
    assert (cut > 0) == (shots > 2)


def test_texts_are_what_is_said():
    """With line breaks: two before a blank input, in free text none between input and answer."""
    assert texts(Row("", "me", ("me", "you")), "you", False, False) == ("\n\n", "", "\nyou")
    assert texts(Row("Who?", "me", ()), "me", False, False) == ("\n\n\n", "Who?", "me")
    assert texts(Row("Who?", "me", ()), "me", True, False) == ("\n\n\n", "me", "Who?")


@pytest.mark.parametrize("channel, between_and_source, target", [(False, 248, 6), (True, 8, 246)])
def test_the_longest_option_and_two_tokens_more_fit_after_an_input(
    channel, between_and_source, target
):
    """Of 256 tokens, here characters: a separator of three, and a line break before the target."""

    def encode(text, _):
        return [*map(ord, text)], [*range(len(text))]

    characters = Reader(encode, lambda ids: "x" * len(ids), (), 1024)
    row = Row("x" * 300, "maybe", ("no", "maybe"))
    _, longest = Sequences(characters, channel).encoded_options(row, False)
    assert len(longest.between) + len(longest.source) == between_and_source
    assert len(longest.target) == target


@pytest.mark.parametrize(
    ("output", "says"),
    [("maybe", "no token is left before the target"), ("", "the target is empty")],
)
def test_a_target_that_cannot_be_scored_is_one_line(output, says):
    """Of a model with five positions. The tokens are characters, without line breaks."""

    def encode(text, _):
        characters = text.replace("\n", "")
        return [*map(ord, characters)], [*range(len(characters))]

    sequences = Sequences(Reader(encode, lambda ids: "x" * len(ids), (), 5), False)
    options = sequences.encoded_options(Row("x", output, (output,)), False)
    with pytest.raises(InputError, match=f"{says}: the sequence has .* and may have 5"):
        sequences.join([], options)


@pytest.mark.parametrize("name", ["sentencepiece", "llama3"])
def test_pieces_of_other_tokenizers_join_to_the_text(made, checkpoint, name):
    """No blank is put between pieces, and BOS stands at the beginning."""
    folder = checkpoint("llama" if name == "sentencepiece" else name)
    lm = HFLM(pretrained=str(folder), device="cpu")
    documents, _ = built(lm, "metaicl_openbookqa", made, shots=2)
    for [(prompt, answer), *_] in documents:
        assert prompt.ids[0] == lm.tokenizer.bos_token_id
        text = lm.tokenizer.decode([*prompt.ids[1:], *answer.ids])
        assert text.strip() == (str(prompt) + str(answer)).strip()


@pytest.mark.parametrize("channel", [False, True], ids=["direct", "channel"])
def test_whole_demonstrations_leave_where_none_may_be_cut(made, model, channel):
    """The longest first, the same for all options, none more than needed, whatever their order."""
    lm = ours("invicl", model, max_length=700)
    most = 700
    name = f"metaicl_{'channel_' * channel}openbookqa"
    documents, task = built(lm, name, made)
    encoded = task._sequences.encoded_demonstrations(task._rows)  # with nothing left out
    everything = [each.source + each.target + each.between for each in encoded]
    for requests in documents:
        [kept] = {prompt.tokens.context.demonstrations for prompt, _ in requests}
        gone = list((Counter(everything) - Counter(kept)).elements())
        assert not Counter(kept) - Counter(everything)
        assert gone
        longest = max(len(prompt.tokens.query) + len(answer.ids) for prompt, answer in requests)
        total = sum(map(len, kept)) + longest
        assert total <= most < total + min(map(len, gone))
        assert min(map(len, gone)) >= max(map(len, kept))
    task._rows = task._rows[::-1]
    task._shown.clear()
    task.build_all_requests()
    before = list(itertools.chain(*documents))
    assert [instance.args for instance in task.instances] == before


@pytest.mark.parametrize("method", ["icl", "invicl", "ctkv"])
def test_the_answers_of_demonstrations_are_their_targets(made, model, method):
    """Also where the beginning is cut, or whole demonstrations leave."""
    lm = ours(method, model, max_length=700)
    documents, task = built(lm, "metaicl_openbookqa", made)
    encoded = task._sequences.encoded_demonstrations(task._rows)
    targets = {example.target for example in encoded}
    for requests in documents:
        for prompt, _ in requests:
            context = prompt.tokens.context
            assert 0 < len(context.answers) == len(context.demonstrations) < 16
            pairs = list(zip(context.demonstrations, context.answers, strict=True))
            for number, (ids, (begin, end)) in enumerate(pairs):
                answer = ids[begin:end]
                if number or method != "icl":
                    assert answer in targets
                else:
                    assert any(target[len(target) - len(answer) :] == answer for target in targets)


def test_what_is_learned_from_metaicls_demonstrations(made, model):
    """One context, or a few where documents are too long for all demonstrations."""
    lm = ours("ctkv", model, steps=1)
    evaluate(lm, ["metaicl_openbookqa"], made, limit=3)
    learned = lm.counts["learned"]
    assert 1 <= learned["contexts"] == learned["steps"] <= 3


# Decision and metric.


def test_the_metric():
    by_hand = [("a", "a"), ("b", "a"), ("b", "b"), ("b", "c")]
    assert macro_f1(by_hand) == pytest.approx(0.5833, abs=1e-4)
    rnd = random.Random(0)
    for _ in range(20):
        groundtruths = rnd.choices("abc", k=9)
        predictions = rnd.choices("abcd", k=9)
        pairs = list(zip(groundtruths, predictions, strict=True))
        assert macro_f1(pairs) == pytest.approx(literal_f1(predictions, groundtruths))
    assert decision(mean_losses([-3.0, -4.0, -2.0], [3, 8, 4])) == 1
    assert decision([1.0, 1.0]) == 0


def assert_as_literal(results, name, task, folder, model, channel, seed, limit=None, shots=16):
    """Losses of every option, decisions and metric are those of the literal version."""
    shown = read(folder, task, seed, "train")[:shots]
    rows = read(folder, task, seed, "test")[:limit]
    predictions = []
    for row, sample in zip(rows, results["samples"][name], strict=True):
        sequences = literal_sequences(ids_of(model), shown, row, channel, SHORT)
        expected = literal_losses(model[1], sequences)
        scored = []
        for response, (_, target) in zip(sample["resps"], sequences, strict=True):
            scored.append(-float(response[0][0]) / len(target))
        assert scored == pytest.approx(expected, abs=1e-4)
        predictions.append(row["options"][expected.index(min(expected))])
    right = [row["output"] for row in rows]
    if TASKS[task]["task_type"] == "classification":
        value = literal_f1(predictions, right)
    else:
        pairs = zip(predictions, right, strict=True)
        value = np.mean([said.strip() == output.strip() for said, output in pairs])
    assert results["results"][name]["metaicl,none"] == pytest.approx(value)


@pytest.mark.parametrize("channel", [False, True], ids=["direct", "channel"])
def test_evaluation_is_the_literal_one(made, model, channel):
    names = {f"metaicl_{'channel_' * channel}{task}": task for task in MADE[:2]}
    for lm in (hf(model, max_length=SHORT), ours("icl", model, max_length=SHORT)):
        results = evaluate(lm, names, made, 21, limit=2)
        for name, task in names.items():
            assert_as_literal(results, name, task, made, model, channel, 21, 2)


def test_real_rows_are_as_the_literal_version_has_them(real, model):
    """Ten tasks, direct and channel: every id of some documents."""
    lm = ours("icl", model)
    for i, task in enumerate(REAL):
        seed = SEEDS[i % 5]
        shown = read(real, task, seed, "train")
        for channel in (False, True):
            documents, _ = built(lm, f"metaicl_{'channel_' * channel}{task}", real, seed, limit=3)
            for row, requests in zip(read(real, task, seed, "test"), documents, strict=False):
                expected = literal_sequences(ids_of(model), shown, row, channel, 1024)
                assert [(prompt.ids, list(answer.ids)) for prompt, answer in requests] == expected


def test_pmi_subtracts_the_loss_without_the_input(made, model):
    """The input is "N/A" and the demonstrations stay."""
    name = "metaicl_openbookqa"
    task = "openbookqa"
    results = evaluate(ours("icl", model, max_length=SHORT), [name], made, limit=2, pmi=True)
    shown = read(made, task, 100, "train")
    right = []

    def losses(query):
        sequences = literal_sequences(ids_of(model), shown, query, False, SHORT)
        return np.array(literal_losses(model[1], sequences))

    for row in read(made, task, 100, "test")[:2]:
        differences = losses(row) - losses(row | {"input": "N/A"})
        right.append(row["options"][differences.argmin()] == row["output"])
    assert results["results"][name]["metaicl,none"] == pytest.approx(np.mean(right))


def test_a_group_is_the_mean_of_its_tasks(made, model, caplog):
    group = "metaicl_hr_to_lr"
    results = evaluate(ours("icl", model), [group], made, limit=2, shots=1, missing="skip")
    values = [results["results"][f"metaicl_{task}"]["metaicl,none"] for task in MADE]
    assert results["results"][group]["metaicl,none"] == pytest.approx(np.mean(values))
    words = (
        "the test tasks of hr_to_lr: the run goes on without quarel, financial_phrasebank, codah"
    )
    assert words in caplog.text


# What cannot be used.


def test_bad_folders_and_metadata(made):
    name = "metaicl_openbookqa"
    with pytest.raises(InputError, match="nowhere: not a folder of MetaICL's data"):
        load([name], made, metaicl="nowhere")
    with pytest.raises(InputError, match=r"demonstrations=random: .* leave it out"):
        load([name], made, demonstrations="random")
    with pytest.raises(InputError, match=r"quarel_16_100_test\.jsonl: cannot be read"):
        load(["metaicl_quarel"], made)
    with pytest.raises(InputError, match=r"pmi=no: must be .*, or be left out"):
        load([name], made, pmi="no")
    with pytest.raises(InputError, match="missinq=skip: did you mean 'missing'"):
        load([name], made, missinq="skip")
    with pytest.raises(InputError, match="need the folder of its data"):
        load([name], made, metaicl=None)
    with pytest.raises(
        InputError, match=r"61 of the 61 training tasks of hr_to_lr .* have no files"
    ):
        load_rows("hr_to_lr", MetaICLFolder(made, "--data"), 3, skip_missing=True)


def test_bad_rows(tmp_path):
    rows = made_rows("glue-rte", 3, 0)
    rows[1] |= {"options": ["entailment", "no"], "output": "no"}
    write(tmp_path, "glue-rte", 16, 100, "test", rows)
    # More of these: tests/training.
    with pytest.raises(InputError, match="line 2: has other options than glue-rte"):
        MetaICLFolder(tmp_path, "--data").test("glue-rte", 100)
    write(tmp_path, "glue-rte", 16, 100, "train", rows[:1])
    with pytest.raises(InputError, match="has 1 rows, and MetaICL's training files"):
        MetaICLFolder(tmp_path, "--data").shown("glue-rte", 100)
    write(tmp_path, "quarel", 16, 100, "test", [{**rows[0], "options": ["no"], "output": "no"}])
    with pytest.raises(InputError, match="line 1: has 1 options, and a row to choose from"):
        MetaICLFolder(tmp_path, "--data").test("quarel", 100)
    write(tmp_path, "quarel", 16, 13, "test", [])
    with pytest.raises(InputError, match="has no rows"):
        MetaICLFolder(tmp_path, "--data").test("quarel", 13)


def test_bad_seeds_and_runs(made, model):
    name = "metaicl_openbookqa"
    with pytest.raises(InputError, match=r"--seed 1234: .* 100, 13, 21, 42, 87"):
        evaluate(hf(model), [name], made, 1234)
    with pytest.raises(InputError, match=r"num_fewshot=17: .* have 16 rows"):
        evaluate(hf(model), [name], made, shots=17)
    own_way = "MetaICL's tasks decide in their own way .pmi=True.: leave the task out of --tasks"
    with pytest.raises(InputError, match=f"'{name}': decide=pmi: {own_way}"):
        evaluate(hf(model), [name], made, decide="pmi")
    with pytest.raises(InputError, match=f"'{name}': moicl: {own_way}"):
        evaluate(ours("moicl", model), [name], made)
    with pytest.raises(InputError, match=f"'{name}': labels=random: its own class makes its seq"):
        load([name], made, labels="random")


def test_a_model_that_does_not_tell_its_tokens(made, model):
    [task] = load(["metaicl_openbookqa"], made)["tasks"].values()
    with pytest.raises(InputError, match="its sequences are cut by the model's tokenizer, which"):
        task.build_all_requests()
    dummy = DummyLM()
    dummy.tokenizer = None
    with pytest.raises(InputError, match="which DummyLM does not report: take hf, or a method"):
        task.bind(dummy)
    task.bind(hf(model))
    with pytest.raises(InputError, match=r"--seed None: .* 100, 13, 21, 42, 87"):
        task.build_all_requests()
    for option in ("apply_chat_template", "system_instruction", "cache_requests"):
        with pytest.raises(InputError, match=f"--{option}: MetaICL's sequences are fixed"):
            task.build_all_requests(**{option: True})


def test_a_response_in_a_cache_is_that_of_the_token_ids(made, model):
    """Whether a text or another makes the same ids."""
    [first, *_], _ = built(hf(model), "metaicl_openbookqa", made, shots=2, limit=1)
    (prompt, option), *others = first

    def key(tokens, ids):
        same_text = EncodedPrompt(prompt.demonstrations, prompt.query, tokens)
        return response_key("loglikelihood", (same_text, EncodedText("option", ids)))

    own = key(prompt.tokens, option.ids)
    assert own == response_key("loglikelihood", (prompt, option))
    assert own not in {response_key("loglikelihood", other) for other in others}
    fewer = prompt.tokens.keeping([1])
    whole = TokenizedPrompt(
        Context((), (tuple(prompt.tokens.context.tokens),)), prompt.tokens.query
    )
    keys = {own, key(fewer, option.ids), key(whole, option.ids), key(prompt.tokens, (5,))}
    assert len(keys) == 4


# Training.


def setting_tasks(made, tokenizer, channel=False, alike=False, most=1024):
    folder = MetaICLFolder(made, "--data")
    how = dataclasses.replace(reader(tokenizer, None, most), alike=alike)
    names = ("ethos-gender", "hotpot_qa", "sciq")
    return [SettingTask(name, folder.train(name, 40), how, channel) for name in names]


@pytest.mark.parametrize("channel", [False, True], ids=["direct", "channel"])
def test_training_rows_are_the_literal_ones(made, model, channel):
    """Free text included, which has no line break before it; the target alone is learnt."""
    maker = RowMaker(methods.Predictor(model[1], model[2], methods.make("icl")))
    for task in setting_tasks(made, model[2], channel):
        rows = [vars(row) for row in task.rows]
        for i in range(3):
            episode = EpisodePool(task, 5, 0).draw(random.Random(i))
            prompt, answer = maker.tokens(episode)
            shown = [rows[i] for i in episode.demonstrations]
            query = rows[episode.query]
            output = [query["output"]]
            [(before, said)] = literal_sequences(ids_of(model), shown, query, channel, 1024, output)
            assert [*prompt.context.tokens, *prompt.query] == before
            assert list(answer) == said
            row = maker.row(episode)
            assert [token for _, token in row.targets] == said
            assert row.ids == [*before, *said][:-1]


def test_every_row_is_drawn_once_an_epoch(made, model):
    """With other rows of its task, the same in every epoch; if asked for, only rows that remain."""
    tasks = setting_tasks(made, model[2], alike=True, most=400)
    pools = [EpisodePool(task, 4, 0) for task in tasks]
    icl = methods.make("icl")
    invicl = methods.make("invicl")
    draw = RowDraw(pools, 3, (icl, invicl))
    one = [draw(number) for number in range(60)]
    two = [draw(number) for number in range(60, 120)]
    demonstrations = {(episode.task, episode.query): episode.demonstrations for episode in one}
    assert len(demonstrations) == 60
    for episode in two:
        assert demonstrations[episode.task, episode.query] == episode.demonstrations
        assert episode.query not in episode.demonstrations
        assert len(set(episode.demonstrations)) == 4
    assert one != two
    assert one != sorted(one, key=lambda episode: episode.query)
    assert RowDraw(pools, 3)(7) == draw(7) != RowDraw(pools, 4)(7)

    def tokens(episode, copies):
        sequences = Sequences(episode.task.reader, False)
        rows = episode.task.rows
        query = episode.task.rows[episode.query]
        shown = sequences.encoded_demonstrations([rows[i] for i in episode.demonstrations])
        [joined] = sequences.join(shown, sequences.encoded_options(query, False, [query.output]))
        whole = sum(map(len, joined.demonstrations))
        return None if len(joined.demonstrations) < 4 else copies * whole + len(joined) - whole

    for name, copies in (("icl", 1), ("invicl", 2)):
        lengths = [tokens(episode, copies) for episode in one]
        fitting = sum(length is not None and length + 3 <= 400 for length in lengths)
        assert draw.shares[name] == pytest.approx(fitting / 60)
    assert 0 < draw.shares["invicl"] < draw.shares["icl"] < 1
    kept = RowDraw(pools, 3, (icl, invicl), all_remain=True)
    assert len(kept.rows) == round(60 * draw.shares["invicl"])


def test_a_task_of_which_no_row_remains_stops_no_training(made, model, tmp_path, capsys):
    """InvICL, appendix A.4: rows of which something would be cut are left out."""
    long, *others = setting_tasks(made, model[2], most=400)
    rows = [dataclasses.replace(row, input=row.input + " so" * 200) for row in long.rows]
    long = dataclasses.replace(long, rows=tuple(rows))
    settings = Settings(num_fewshot=4, steps=2, batch_size=2, draw="row", eval_steps=0)
    icl = methods.make("icl")
    how = {"fits": [methods.make("invicl")], "max_length": 400, "cpu": True}
    train(*model[1:], icl, [long, *others], tmp_path / "out", settings, **how)
    said = capsys.readouterr().out
    kept = json.loads((tmp_path / "out/training.json").read_text())["kept"]
    used = int(re.search(r"(\d+) rows are used", said)[1])
    assert used == round(60 * kept["invicl"]) > 0
    assert kept["invicl"] < kept["icl"] < 1
    assert json.loads((tmp_path / "out/trainer_state.json").read_text())["global_step"] == 2
    assert "not fit" not in said
    words = "no row is short enough under icl, invicl: lower --num_fewshot"
    with pytest.raises(InputError, match=words):
        train(*model[1:], icl, [long], tmp_path / "none", settings, **how)


def test_defaults_of_training_are_metaicls():
    line = ["icl", "--metaicl", "hr_to_lr"]
    options = train_command.read_options(argparse.ArgumentParser(), line)
    assert "num_fewshot" not in options
    settings = train_command.Settings(**train_command.METAICL)
    assert settings.num_fewshot == 16
    assert settings.batch_size == 8
    assert settings.learning_rate == 1e-5
    assert settings.steps == 30_000
    assert settings.warmup_steps == 0
    assert settings.weight_decay == 0.0
    assert settings.max_grad_norm == 1.0
    assert settings.draw == "row"
    assert settings.loss == "query"
