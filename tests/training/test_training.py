"""Training under a layout: the forward pass is scoring's, gradients are a literal one's.

Runs may be killed.
"""

import hashlib
import itertools
import json
import random
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.training import HarnessTask, tasks_of
from lm_eval_icl.metaicl.data import Row
from lm_eval_icl.methods import Predictor
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.training import finetune, record
from lm_eval_icl.training import losses as training_losses
from lm_eval_icl.training.episodes import (
    Episode,
    EpisodePool,
    Example,
    FileTask,
    RowDraw,
    draw_episode,
    read_file,
)
from lm_eval_icl.training.finetune import Settings, claim, train
from lm_eval_icl.training.rows import (
    RowMaker,
    collate,
    leaks,
    make_row,
    mean_loss,
    row_losses,
    target_losses,
)
from lm_eval_icl.training.trainer import EpisodeRows, LayoutTrainer
from tests import commands, evaluation, tiny
from tests.methods import test_methods
from tests.processes import Process, ranks, run_command

pytestmark = pytest.mark.usefixtures("own_tasks", "tried_once")

# The methods that models are trained under, with further arguments.
CASES = [
    ("ICL", {}),
    ("NoPE", {}),
    ("PrefixICL", {}),
    ("PCW", {}),
    ("PCW", {"window_size": 2}),
    ("SAICL", {}),
    ("InvICL", {}),
    ("InvICL", {"positions": "sequential"}),
]
LABELS = ["very negative", "negative", "positive"]


def task(name="t", size=30) -> FileTask:
    """Texts of different lengths."""
    rows = []
    for i, document in enumerate(evaluation.documents(size, 0)):
        text = f"Review: {document['text']} {i}\nSentiment:"
        rows.append(Row(text, LABELS[i % 3], tuple(LABELS)))
    return FileTask(name, tuple(rows))


def model_of(folder, dtype=torch.float32):
    """A checkpoint's model and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(folder)


def loaded(folder, name="icl", **limits):
    """The model under a method."""
    return Predictor(*model_of(folder), methods.make(name), **limits)


# The forward pass.


@pytest.mark.parametrize("case", CASES, ids=test_methods.title)
def test_training_forward_is_scoring(checkpoint, case):
    """The answers' log-probabilities of a batch of rows are those of scoring through the memory."""
    model, tokenizer = model_of(checkpoint("llama"), torch.float64)
    predictor = Predictor(model, tokenizer, getattr(methods, case[0])(**case[1]))
    make = RowMaker(predictor)
    pool = EpisodePool(task(), 4, 3)
    episodes = [draw_episode([pool], 0, number) for number in range(4)]
    batch = collate([make.row(episode) for episode in episodes], model.dtype)
    with predictor.runner.inference_mode():
        losses = target_losses(model, batch)
    found = torch.zeros(4, dtype=losses.dtype).index_add_(0, batch["target_row"], -losses)
    for episode, mine in zip(episodes, found.tolist(), strict=True):
        prompt = episode.example.prompt
        answer = [episode.example.answer]
        [[(expected, _)]] = predictor.score(
            prompt.demonstrations, [prompt.query], answer, prefix=prompt.prefix
        )
        assert abs(mine - expected) <= 1e-7 * max(1, abs(expected))  # RMSNorm is in float32


@pytest.mark.parametrize("case", [("ICL", {"positions": "symmetric"}), ("NoPE", {})], ids=str)
def test_training_has_the_window_that_scoring_has(checkpoint, case):
    """Rows are longer than the model's sliding window, and a batch of two is padded."""
    model, tokenizer = model_of(checkpoint("mistral_window"), torch.float64)
    predictor = Predictor(model, tokenizer, getattr(methods, case[0])(**case[1]))
    make = RowMaker(predictor)
    pool = EpisodePool(task(), 3, 3)
    episodes = [draw_episode([pool], 0, number) for number in range(2)]
    rows = [make.row(episode) for episode in episodes]
    with predictor.runner.inference_mode():
        losses = row_losses(model, collate(rows, model.dtype))
    for episode, row, loss in zip(episodes, rows, losses.tolist(), strict=True):
        assert len(row.ids) > 2 * model.config.sliding_window
        prompt = episode.example.prompt
        answer = [episode.example.answer]
        [[(expected, _)]] = predictor.score(prompt.demonstrations, [prompt.query], answer)
        assert -loss == pytest.approx(expected, rel=1e-6)


# Gradients.

THREE = ((30, 31, 32, 33, 34), (40, 41, 42), (50, 51, 52, 53))
OTHER_THREE = ((30, 31, 32), (40, 41, 42, 43), (50, 51))
# Contexts with their queries and answers.
PROMPTS = [
    (Context((5, 9), THREE), (60, 61, 62), (70, 71)),
    (Context((5,), OTHER_THREE), (60, 61, 62, 63), (72,)),
]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    named = model.named_parameters()
    return {name: weights.grad for name, weights in named if weights.grad is not None}


def assert_same_gradients(found, expected):
    differing = set(found.keys() ^ expected.keys())
    assert all((found | expected)[name].abs().max() == 0 for name in differing), differing
    assert max(float(of.abs().max()) for of in expected.values()) > 1e-3
    for name in found.keys() & expected.keys():
        assert (found[name] - expected[name]).abs().max() <= 1e-8, name


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
@pytest.mark.parametrize("case", CASES, ids=test_methods.title)
def test_gradients_are_those_of_a_literal_pass(name, case):
    """Autograd through passes that know nothing of layouts.

    InvICL's, for one, is two streams, demonstration by demonstration.
    """
    model = test_methods.tiny_model(name)
    method = getattr(methods, case[0])(**case[1])
    rows = []
    for context, query, answer in PROMPTS:
        rows.append(make_row(method, TokenizedPrompt(context, query), answer))
    batch = collate(rows, model.dtype)
    with test_methods.as_run(name, case):
        found = gradients(model, mean_loss(model, batch))
    losses = []
    for context, query, answer in PROMPTS:
        logits = test_methods.referred(name, case, context)(query, answer)
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(answer)))
    literal = test_methods.without_positions(name) if method.positions == "none" else model
    expected = gradients(literal, sum(losses) / len(losses))
    if method.positions == "none":  # the literal model has a table of zeros, which would learn
        expected.pop("transformer.wpe.weight", None)
    assert_same_gradients(found, expected)


def answers_of(tokenizer, demonstrations):
    """For each demonstration, its ids, and where its answer's ids stand, found by spelling out."""
    for ids in demonstrations:
        texts = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
        begin = next(n for n, text in enumerate(texts) if text.endswith("Sentiment:"))
        end = next(n for n, text in enumerate(texts) if text.endswith("tive") and n > begin)
        yield ids, begin, end


@pytest.mark.parametrize("case", [("ICL", {}), ("InvICL", {})], ids=test_methods.title)
def test_gradients_of_the_dense_loss(checkpoint, case):
    """Each demonstration's answer from those before it (icl), or from all others (invicl)."""
    model, tokenizer = model_of(checkpoint("gpt2"), torch.float64)
    predictor = Predictor(model, tokenizer, getattr(methods, case[0])())
    episode = draw_episode([EpisodePool(task(), 3, 0)], 0, 5)
    row = RowMaker(predictor, "all").row(episode)
    found = gradients(model, mean_loss(model, collate([row], model.dtype)))

    prompt, answer = predictor.tokenizer.pair(
        predictor.tokenizer.arranged(episode.example.prompt), episode.example.answer
    )
    parts = list(answers_of(tokenizer, prompt.context.demonstrations))
    assert len(parts) == 3
    assert not prompt.context.prefix
    literal = literal_icl if case[0] == "ICL" else literal_invicl
    logits = literal(model, parts, prompt.query, answer)
    targets = []
    for ids, begin, end in parts:
        targets += ids[begin:end]
    targets += answer
    loss = torch.nn.functional.cross_entropy(torch.cat(logits), torch.tensor(targets))
    assert_same_gradients(found, gradients(model, loss))


def literal_icl(model, parts, query, answer):
    """The logits of each demonstration's answer, and of the query's, from one pass over all."""
    tokens = list(itertools.chain(*(ids for ids, _, _ in parts), query, answer))
    out = test_methods.run(model, tokens, test_methods.span(0, tokens))[1]
    logits = []
    at = 0
    for ids, begin, end in parts:
        logits.append(out[at + begin - 1 : at + end - 1])
        at += len(ids)
    logits.append(out[len(tokens) - len(answer) - 1 : -1])
    return logits


def literal_invicl(model, parts, query, answer):
    """The same, where each demonstration is read alone, and again after all others."""
    run = test_methods.run
    join = test_methods.join
    span = test_methods.span
    alone = [run(model, ids, span(0, ids))[0] for ids, _, _ in parts]
    memories = []
    logits = []
    for i, (ids, begin, end) in enumerate(parts):
        others = join(*alone[:i], *alone[i + 1 :])
        memory, out = run(model, ids, span(0, ids), others)
        memories.append(memory)
        logits.append(out[begin - 1 : end - 1])
    start = max(len(ids) for ids, _, _ in parts)
    logits.append(test_methods.query_logits(model, join(*memories), start)(query, answer))
    return logits


def test_which_methods_leak():
    assert not any(leaks(methods.make(name)) for name in ("icl", "nope", "pcw", "invicl"))
    assert all(leaks(methods.make(name)) for name in ("prefixicl", "saicl"))
    assert leaks(methods.make("invicl", {"repeat": 2}))


# Episodes.


def test_an_episode_is_a_function_of_its_number():
    def drawn(episode):
        return episode.task.name, episode.demonstrations, episode.query

    def pools_of_two_tasks():
        return [EpisodePool(task(name), 4, 3) for name in ("a", "b")]

    pools = pools_of_two_tasks()
    again = pools_of_two_tasks()
    episodes = [draw_episode(pools, 7, number) for number in range(200)]
    for number, episode in enumerate(episodes):
        same = draw_episode(again, 7, number)
        assert drawn(same) == drawn(episode)
        rows = [*episode.demonstrations, episode.query]
        assert len(set(rows)) == 5
        pool = next(pool for pool in pools if pool.task is episode.task)
        assert not set(rows) & set(pool.held_out)
    assert len(set(map(drawn, episodes))) == 200
    assert {e.task.name for e in episodes} == {"a", "b"}
    assert draw_episode(pools, 8, 0).demonstrations != episodes[0].demonstrations
    assert pools[0].held_out == again[0].held_out
    assert len(pools[0].held_out) == 3


def test_held_out_episodes_never_show_a_row_that_is_held_out():
    """And two tasks over the same rows hold out the same ones."""
    pool = EpisodePool(task(size=200), 4, 64)
    assert len(pool.held_out) == 20
    assert pool.held_out == EpisodePool(task("b", 200), 3, 64).held_out
    for episode in pool.evaluation():
        assert episode.query in pool.held_out
        assert not set(episode.demonstrations) & set(pool.held_out)


def test_other_rows_replace_copies_of_the_query():
    rows = [*task(size=8).rows, *task(size=2).rows]
    pool = EpisodePool(FileTask("copies", tuple(rows)), 4, 0)
    shown = [8, 1, 9, 2]  # 8 and 9 have the texts of 0 and 1
    first, *rest = pool.episode(shown, 0).demonstrations
    assert rest == [1, 9, 2]
    assert first in {3, 4, 5, 6, 7}
    assert pool.episode(shown, 3).demonstrations == (8, 1, 9, 2)
    same = EpisodePool(FileTask("same", (rows[0], rows[8], rows[1])), 2, 0)
    with pytest.raises(InputError, match="'same': fewer than 2 of its rows have another text"):
        same.episode([1, 2], 0)


@pytest.mark.parametrize(
    "name", ["many_tokens", "described", "spaces", "prefixed", "likelihood", "generate"]
)
def test_an_episode_is_the_prompt_of_an_evaluation(name):
    """Character by character what lm-eval itself builds from the same documents and options."""
    splits = dict.fromkeys(("test_split", "fewshot_split", "training_split"), "train")
    config = evaluation.TASKS[name] | splits

    def loaded_task():
        return evaluation.manager(False).load([dict(config)])["tasks"][name]

    theirs = loaded_task()
    theirs.sampler.sample = lambda n, **kwargs: [theirs.training_docs()[i] for i in (4, 1, 7)]
    doc = theirs.training_docs()[2]
    prompt = theirs.fewshot_context(doc, 3, gen_prefix=theirs.doc_to_prefix(doc))
    requests = theirs.construct_requests(doc, prompt)
    ours = HarnessTask(loaded_task()).example((4, 1, 7), 2)
    assert str(ours.prompt) == prompt
    assert len(ours.prompt.demonstrations) == 3
    if name == "generate":
        assert ours.options == (" " + doc["other"],)
    elif name == "likelihood":
        assert (ours.prompt, ours.answer) == requests.args
    else:
        pairs = [(ours.prompt, option) for option in ours.options]
        assert pairs == [request.args for request in requests]
        assert ours.right == doc["label"]


def test_tasks_that_cannot_be_trained_on():
    def refused(changed, says):
        config = evaluation.TASKS["one_token"] | changed | {"task": "t"}
        with pytest.raises(InputError, match=says):
            HarnessTask(evaluation.manager(False).load([config])["tasks"]["t"])

    without = "'t' has no training split .training_split.: give others"
    refused({"training_split": None}, without)
    refused(evaluation.TASKS["inputs"], "'t' has no query with one answer")
    refused({"doc_to_target": "{{other}}"}, "'t', row 0: its answer '.*' is none of its options")
    with pytest.raises(InputError, match="'own': its own class builds its prompts"):
        HarnessTask(SimpleNamespace(config=SimpleNamespace(task="own")))


def test_answers_are_not_found_in_demonstrations_of_another_template():
    other = {**evaluation.FIRST_N, "doc_to_text": "Text: {{text}}"}
    config = evaluation.TASKS["one_token"] | {"task": "t", "fewshot_config": other}
    episode = Episode(HarnessTask(evaluation.load_task(config)), (0, 1), 2)
    says = "loss=all: the demonstrations of task 't' have another template than its queries"
    with pytest.raises(InputError, match=says):
        episode.answer_spans()


def test_other_episodes_of_a_number_are_other_rows():
    pool = EpisodePool(task(), 3, 0)
    draw = RowDraw([pool], 5)
    others = [draw(4, attempt).query for attempt in range(1, 30)]
    assert others == [RowDraw([pool], 5)(4, attempt).query for attempt in range(1, 30)]
    assert 10 < len(set(others)) <= 30
    assert len({draw(number).query for number in range(30)}) == 30


def test_why_a_row_does_not_fit(checkpoint):
    none = SimpleNamespace(example=Example(FewShotPrompt("", ["a b\n\n"], "c"), ("",), 0))
    make = RowMaker(loaded(checkpoint("gpt2")))
    assert make.why_not(none) == "have an answer of no tokens"
    model = tiny.build("llama", rope_parameters=tiny.longrope(4))
    make = RowMaker(Predictor(model, tiny.sentencepiece(), methods.make("icl")))
    beyond = FewShotPrompt("", ["a long film of a quiet plot\n\n"], "a dull joke")
    longer = SimpleNamespace(example=Example(beyond, (" yes",), 0))
    says = "cross position 4, from which on this model computes all positions in another way"
    assert make.why_not(longer) == says


def test_models_may_ignore_which_logits_a_row_asks_for(checkpoint):
    predictor = loaded(checkpoint("gpt2"))
    model = predictor.runner.model
    make = RowMaker(predictor, "all")
    batch = collate([make.row(draw_episode([EpisodePool(task(), 3, 3)], 0, 1))], model.dtype)

    def ignoring(module, args, kwargs):
        return args, {name: value for name, value in kwargs.items() if name != "logits_to_keep"}

    expected = target_losses(model, batch)
    with model.register_forward_pre_hook(ignoring, with_kwargs=True):
        torch.testing.assert_close(target_losses(model, batch), expected)


def test_a_dry_run_says_what_does_not_fit(checkpoint, tmp_path, capsys):
    """Of the held-out rows with an option that does not fit, the right answer alone is measured."""
    rows = list(task(size=40).rows)
    for place in range(0, 40, 2):
        row = rows[place]
        rows[place] = Row(row.input, row.output, (*row.options, "a very long answer " * 99))
    what = (*model_of(checkpoint("gpt2")), methods.make("icl"), [FileTask("t", tuple(rows))])
    settings = Settings(num_fewshot=3, steps=6, batch_size=4, eval_documents=4)
    measured = []
    with pytest.MonkeyPatch.context() as patch:
        summary = finetune._summary
        patch.setattr(finetune, "_summary", lambda *a: measured.append(a[1]) or summary(*a))
        train(*what, tmp_path / "out", settings, max_length=150, cpu=True, dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    [held_out] = measured
    assert lines[0].startswith(f"icl: 1 tasks with 40 rows, of which {len(held_out.choices)} are")
    assert {count for count, _ in held_out.choices} == {1, 3}
    assert all(right == 0 for count, right in held_out.choices if count == 1)
    assert re.fullmatch(r"\d+ episodes that do not fit were left out to get the first 24", lines[1])
    assert not (tmp_path / "out").exists()


def test_only_what_fits_every_method_is_used(checkpoint):
    """As InvICL's appendix A.4: with `fits`, icl leaves out what does not fit in two copies.

    It counts the tokens of a row, and not their positions.
    """
    pools = [EpisodePool(task(size=60), 4, 0)]
    most = 330
    icl = loaded(checkpoint("gpt2"), "icl", max_length=most)
    of_icl = RowMaker(icl)
    of_invicl = RowMaker(loaded(checkpoint("gpt2"), "invicl", max_length=most))

    def tokens(episode):
        """How many a row has, with two copies of each demonstration."""
        prompt, answer = icl.tokenizer.pair(episode.example.prompt, episode.example.answer)
        context = prompt.context
        shown = len(context.prefix) + 2 * sum(context.lengths)
        return shown + len(prompt.query) + len(answer) - 1

    draw = partial(draw_episode, pools, 0)
    alone = EpisodeRows(draw, of_icl, [], 30)
    too_long = sum(tokens(alone.episode(number)[0]) > most for number in range(30))
    assert 0 < too_long < 30
    together = EpisodeRows(draw, of_icl, [of_icl, of_invicl], 30)
    for number in range(30):
        _, left_out = together.episode(number)
        tried = [draw(number, attempt) for attempt in range(left_out + 1)]
        fits = [not of_icl.why_not(episode) and tokens(episode) <= most for episode in tried]
        assert fits == [False] * left_out + [True]
        assert together[number].ids == of_icl.row(tried[-1]).ids


def test_the_training_questions_of_mmlu(tmp_path, monkeypatch):
    """`icl_mmlu_train`, from a folder laid out as the Hub's cais/mmlu is."""
    folder = tmp_path / "cais/mmlu"
    folder.mkdir(parents=True)
    splits = []
    for split in ("auxiliary_train", "validation", "dev", "test"):
        splits.append({"split": split, "path": f"{split}.jsonl"})
        lines = []
        for i in range(20):
            question = {"question": f" {split} {i}?", "subject": "", "answer": i % 4}
            lines.append(json.dumps({**question, "choices": ["a", "b", "c", "d"]}) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))
    configs = {"configs": [{"config_name": "all", "data_files": splits}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(configs)}---\n")
    monkeypatch.chdir(tmp_path)
    [found] = [HarnessTask(task) for task in tasks_of(["icl_mmlu_train"], None, {})]
    example = found.example((3, 5), 6)
    assert example.prompt == (
        "Question: auxiliary_train 3?\nAnswer: d\n\nQuestion: auxiliary_train 5?\nAnswer: b\n\n"
        "Question: auxiliary_train 6?\nAnswer:"
    )
    assert example.options == (" a", " b", " c", " d")
    assert example.right == 2
    assert len(found) == 20


# Runs.


def tiny_run(checkpoint, output, name="gpt2", resume=False, **settings):
    """The log of a training of a few steps; `settings` are in place of these."""
    usual = {"num_fewshot": 3, "steps": 6, "batch_size": 4, "learning_rate": 1e-3, "loss": "all"}
    usual |= {"eval_steps": 0, "save_steps": 2}
    folder = checkpoint(name)
    what = (*model_of(folder), methods.make("invicl"), [task()], output)
    train(*what, Settings(**usual | settings), source=str(folder), resume=resume, cpu=True)
    return read_log(output)


def read_log(output):
    """What Trainer has logged of each step, and of what it measured."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    names = {"step", "loss", "grad_norm", "learning_rate", "eval_loss"}
    log = []
    for entry in history:
        if "train_loss" not in entry:
            log.append({name: entry[name] for name in names & entry.keys()})
    return log


def losses(log):
    return [entry["loss"] for entry in log if "loss" in entry]


def weights(folder):
    return hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    """The folder of a training of fifteen steps."""
    output = tmp_path_factory.mktemp("trained") / "out"
    tiny_run(checkpoint, output, steps=15, eval_steps=5, save_steps=5, learning_rate=2e-3)
    return output


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def test_the_loss_of_a_run_falls(trained):
    log = read_log(trained)
    assert len(losses(log)) == 15
    assert sum(losses(log)[-5:]) < 0.8 * sum(losses(log)[:5])
    rates = [entry["learning_rate"] for entry in log if "loss" in entry]
    for one, other in itertools.pairwise(rates):
        assert one - other == pytest.approx(2e-3 / 15)
    measured = {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}
    assert list(measured) == [0, 5, 10, 15]
    assert measured[15] < measured[0]


def test_a_run_leaves_a_checkpoint(trained):
    """One that transformers and lm-eval load, with the record of how it was made."""
    assert names_in(trained) >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert names_in(trained) >= {"trainer_state.json", "training.json"}
    assert names_in(trained / "checkpoints") == {"checkpoint-10", "checkpoint-15"}
    config = json.loads((trained / "config.json").read_text())
    record = config["lm_eval_icl"]["trained"]
    assert record["method"] == "invicl"
    assert record["positions"] == "symmetric"
    assert record["num_fewshot"] == 3
    assert record["steps"] == 15
    assert record["tasks"] == ["t"]
    assert str(trained.parent) not in json.dumps(config)
    assert config["use_cache"]
    for model in ("hf", "invicl"):
        evaluation.run(model, trained, ["one_token"], 2)


def test_held_out_rows_are_answered_as_the_predictor_answers_them(checkpoint, tmp_path):
    tiny_run(checkpoint, tmp_path, loss="query", eval_steps=3)
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    logged = [entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry]
    assert len(logged) == 3  # at the beginning, in the middle and at the end
    predictor = Predictor(*model_of(tmp_path), methods.make("invicl"))
    right = []
    for episode in EpisodePool(task(), 3, 64).evaluation():
        example = episode.example
        prompt = example.prompt
        [scores] = predictor.score(prompt.demonstrations, [prompt.query], list(example.options))
        logprobs = [logprob for logprob, _ in scores]
        right.append(np.argmax(logprobs) == example.right)
    assert logged[-1] == pytest.approx(np.mean(right))
    assert 0 < len(right)
    drawn = (tmp_path / "loss.svg").read_text()
    assert "held-out rows" in drawn
    assert "accuracy" in drawn


def test_an_interrupted_run_says_what_is_kept(checkpoint, tmp_path, monkeypatch, capsys):
    step = LayoutTrainer.training_step
    stops = [1, 3, None]

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == stops[0]:
            del stops[0]
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(LayoutTrainer, "training_step", interrupted)
    for kept in ("nothing is kept", "step 2 is kept"):
        with pytest.raises(KeyboardInterrupt):
            tiny_run(checkpoint, tmp_path / "out", resume=True)
        assert f"{tmp_path / 'out'}: {kept}" in capsys.readouterr().err
    tiny_run(checkpoint, tmp_path / "out", resume=True)
    assert "continuing from step 2" in capsys.readouterr().out


def test_what_only_saves_memory_changes_nothing(checkpoint, tmp_path):
    """Without dropout: it draws other numbers for other batches."""
    plain = losses(tiny_run(checkpoint, tmp_path / "plain", name="llama"))
    saving = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    other = losses(tiny_run(checkpoint, tmp_path / "o", name="llama", **saving))
    assert other == pytest.approx(plain, abs=1e-5)


@pytest.mark.slow
def test_mixed_precision_runs_near_float32(checkpoint, tmp_path):
    plain = losses(tiny_run(checkpoint, tmp_path / "plain"))
    mixed = losses(tiny_run(checkpoint, tmp_path / "bf16", bf16=True))
    assert mixed == pytest.approx(plain, rel=0.05)
    assert mixed != plain
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").dtype == torch.float32


@pytest.mark.slow
def test_adapters_are_merged_and_lie_beside_the_merged_weights(checkpoint, tmp_path):
    base = checkpoint("gpt2")
    log = tiny_run(checkpoint, tmp_path, lora=True, learning_rate=1e-2, steps=20)
    assert sum(losses(log)[-4:]) < sum(losses(log)[:4])
    peft = {"peft": str(tmp_path / "adapter")}
    adapted = evaluation.run("icl", base, ["one_token"], 2, args=peft)
    merged = evaluation.run("icl", tmp_path, ["one_token"], 2)
    evaluation.assert_same(evaluation.responses(adapted), evaluation.responses(merged), 1e-4)
    lora = merged["config"]["icl"]["trained"]["lora"]
    assert lora == {"rank": 16, "alpha": 32, "targets": "all-linear"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = AutoModelForCausalLM.from_pretrained(base)
    moved = []
    for name, weights in model.named_parameters():
        if not torch.equal(weights, before.get_parameter(name)):
            moved.append(name)
    assert moved
    assert not any("ln" in name or "wte" in name for name in moved)


def test_evaluated_as_it_was_not_trained():
    """What runs on icl's checkpoints is not another method."""

    def warning(evaluated, **trained):
        return record.mismatch(trained, methods.make(evaluated))

    other = "was trained under invicl, and is evaluated under pcw"
    assert other in warning("pcw", method="invicl")
    assert not warning("deepthink", method="icl")
    sequential = warning("invicl", method="invicl", positions="sequential")
    assert re.search("with positions=sequential, and is .* symmetric", sequential)
    repeated = warning("invicl", method="invicl", repeat=2)
    assert "was trained with repeat=2, and is evaluated with 1" in repeated


def test_an_evaluation_says_and_records_the_training(checkpoint, tmp_path, caplog):
    tiny_run(checkpoint, tmp_path, steps=2)

    def evaluated(model, path):
        """The results, and the warnings about the training."""
        caplog.clear()
        results = evaluation.run(model, path, ["one_token"], 2)
        return results, [message for message in caplog.messages if "trained" in message]

    results, warnings = evaluated("invicl", tmp_path)
    assert not warnings
    assert results["config"]["icl"]["trained"]["num_fewshot"] == 3
    results, warnings = evaluated("pcw", tmp_path)
    other = "pcw: the checkpoint was trained under invicl, and is evaluated under pcw."
    assert warnings == [other]
    assert results["config"]["icl"]["trained"]["num_fewshot"] == 3
    _, warnings = evaluated("invicl", checkpoint("gpt2"))
    none = "invicl: it needs a model trained under invicl, and the checkpoint records no training."
    assert warnings == [none]


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training_losses, "find_spec", lambda name: None)
    training_losses.draw_losses([], tmp_path / "loss.svg", "icl")
    says = "loss.svg is not drawn without matplotlib: pip install 'lm-eval-icl[figures]'\n"
    assert capsys.readouterr().out == says
    assert not (tmp_path / "loss.svg").exists()


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_adapters_are_not_merged_where_the_model_is_divided(name, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(InputError, match="--lora: adapters are not merged under FSDP or DeepSpeed"):
        Settings(lora=True)


# What is killed, or goes wrong.


@pytest.fixture(scope="module")
def episodes_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("episodes") / "rows.jsonl"
    lines = []
    for name in ("a", "b"):
        for row in task(name, 40).rows:
            lines.append(json.dumps({"task": name, **vars(row)}) + "\n")
    path.write_text("".join(lines))
    return path


OPTIONS = """
--num_fewshot 3 --steps 40 --batch_size 4 --learning_rate 1e-3 --device cpu --eval_steps 10
--save_steps 3 --loss all
""".split()


def arguments(folder, episodes_file, output):
    """The command that trains a checkpoint."""
    line = ["train", "invicl", "--model_args", f"pretrained={folder}"]
    return [*line, "--episodes", str(episodes_file), "--output", str(output), *OPTIONS]


def process(line):
    return Process(run_command, ["lm-eval-icl", *line])


def finish(line):
    """Run a command to its end, which is a good one."""
    code, lines = process(line).finish()
    assert code == 0, lines


@pytest.mark.slow
def test_killed_and_resumed(checkpoint, episodes_file, tmp_path):
    """The same weights bit for bit, and the same log, dropout included (GPT-2 has it)."""
    folder = checkpoint("gpt2")
    finish(arguments(folder, episodes_file, tmp_path / "whole"))
    line = arguments(folder, episodes_file, tmp_path / "killed")
    running = process(line)
    while not (tmp_path / "killed/checkpoints/checkpoint-21").exists():
        assert running.process.is_alive(), running.finish()
        time.sleep(0.001)
    time.sleep(random.random() * 0.1)  # at any moment of the next steps, or of a save
    running.kill()
    finish([*line, "--resume"])
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    log = read_log(tmp_path / "killed")
    assert log == read_log(tmp_path / "whole")
    assert len(log) == 45


@pytest.mark.slow
def test_two_processes_do_what_one_does(checkpoint, episodes_file, tmp_path):
    """The same losses step by step at the same global batch. (A model without dropout.)"""
    folder = checkpoint("llama")
    finish(arguments(folder, episodes_file, tmp_path / "one"))
    line = arguments(folder, episodes_file, tmp_path / "two")
    for done in ranks(run_command, "lm-eval-icl", *line):
        assert done.returncode == 0, done.stderr
    one = read_log(tmp_path / "one")
    two = read_log(tmp_path / "two")
    assert len(one) == 45
    for mine, theirs in zip(one, two, strict=True):
        assert mine["step"] == theirs["step"]
        for name in {"loss", "eval_loss"} & mine.keys():
            assert mine[name] == pytest.approx(theirs[name], abs=1e-5)


BAD_BATCH = "icl --tasks icl_demo_short --batch_size 3 --gradient_accumulation_steps 2"
BAD_LINES = {
    "deepthink --tasks icl_demo_short": "no model is trained under deepthink, since it is more",
    "saicl --tasks x --loss all": "loss=all: under saicl a demonstration sees its own",
    "icl --tasks x --episodes y": "--tasks, --episodes, --metaicl: give one of them.",
    "icl --tasks icl_demo_short --num_fewshot 190": "task 'icl_demo_short': 190 demonstrations",
    "icl,max_length=9 --tasks icl_demo_short": "task 'icl_demo_short': none of",
    "icl --tasks ,": "--tasks: names no task.",
    "icl --metaicl x --loss all": "--loss all: MetaICL's loss is that of the query",
    "icl --metaicl x": "--data: give the folder of MetaICL's data.",
    "icl --metaicl x --data .": "MetaICL has no setting 'x': give one of hr_to_lr",
    "icl,peft=x --tasks x": "--model_args: unknown argument 'peft'",
    "pcw,window_size=9 --tasks icl_demo_short": "pcw: window_size=9: must not exceed the 8",
    BAD_BATCH: "--batch_size 3: must be a multiple of 2: processes",
}


@pytest.mark.parametrize("text", BAD_LINES)
def test_bad_input_is_one_line(text, tmp_path, monkeypatch):
    """`icl,max_length=9`: with a model argument."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lm_eval_icl.training.trainer._ATTEMPTS", 20)
    first, *further = text.split()
    method, *limits = first.split(",")
    model_args = ",".join([f"pretrained={model_path()}", *limits])
    line = [method, "--model_args", model_args, *further, "--steps", "1", "--output", "out"]
    assert commands.refused("train", *line).startswith(BAD_LINES[text])
    assert not (tmp_path / "out").exists()


ROW = {"task": "a", "input": "x"}
WITHOUT_OUTPUT = (ROW, "output: Field required.")
NO_OPTION = (
    {**ROW, "output": "y", "options": ["z"]},
    "the output 'y' is none of the options ['z']",
)


@pytest.mark.parametrize("row, says", [WITHOUT_OUTPUT, NO_OPTION])
def test_a_bad_row_is_named_by_its_number(row, says, tmp_path):
    path = tmp_path / "rows.jsonl"
    good = json.dumps({**ROW, "output": "y"})
    path.write_text(f"{good}\n\n{json.dumps(row)}\n")
    with pytest.raises(InputError) as error:
        read_file(path)
    assert f"{path}, line 3: " in error.value.message
    assert says in error.value.message


def test_a_gradient_that_is_not_finite(checkpoint, tmp_path, monkeypatch):
    """Neither a checkpoint nor a model is saved of weights that such a gradient has made."""
    step = LayoutTrainer.training_step

    def poisoned(self, model, *args, **kwargs):
        loss = step(self, model, *args, **kwargs)
        if self.state.global_step == 3:
            next(model.parameters()).grad.fill_(float("nan"))
        return loss

    monkeypatch.setattr(LayoutTrainer, "training_step", poisoned)
    with pytest.raises(InputError, match="grad_norm is nan at step 4: train with a lower"):
        tiny_run(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out/model.safetensors").exists()
    assert [path.name for path in (tmp_path / "out/checkpoints").iterdir()] == ["checkpoint-2"]


def test_a_folder_is_of_one_run(tmp_path):
    output = tmp_path / "out"
    identity = {"model": "m", "rows": {"t": "abc"}, "steps": 10}

    def claimed(resume=False, **changes):
        return claim(output, identity | changes, resume)

    assert claimed() is None
    words = "holds another run, with another steps: give another folder"
    with pytest.raises(InputError, match=words):
        claimed(resume=True, steps=20)
    for step in (5, 10, 15):
        (output / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
    assert claimed() is None  # a checkpoint is whole with Trainer's state, which is written last
    for step in (5, 10):
        (output / f"checkpoints/checkpoint-{step}/trainer_state.json").write_text("{}")
    # Of some files, a power failure has left no end.
    for name, content, step in (
        ("model.safetensors", "half", 5),
        ("merges.txt", "", 5),
        ("merges.txt", "a b", 10),
    ):
        file = output / f"checkpoints/checkpoint-10/{name}"
        file.write_text(content)
        assert claimed(resume=True) == output / f"checkpoints/checkpoint-{step}"
        file.unlink()
    with pytest.raises(InputError, match="holds this run already: give --resume"):
        claimed()
    assert claimed(resume=True) == output / "checkpoints/checkpoint-10"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(InputError, match="there are other files in it"):
        claim(tmp_path / "mine", identity, True)
