"""Training under a layout: the forward pass is scoring's, gradients are a literal one's, and runs may be killed."""

import hashlib
import itertools
import json
import random
import re
import time
from functools import partial
from pathlib import Path

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
from lm_eval_icl.prompts.tokens import Context, TokenizedPrompt
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.training import record
from lm_eval_icl.training.episodes import EpisodePool, FileTask, draw_episode, read_file
from lm_eval_icl.training.finetune import Settings, claim, train
from lm_eval_icl.training.rows import RowMaker, collate, leaks, make_row, mean_loss, target_losses
from lm_eval_icl.training.trainer import EpisodeRows, LayoutTrainer
from tests import commands, evaluation
from tests.methods import test_methods
from tests.processes import Process, ranks, run_command

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
    texts = [
        f"Review: {document['text']} {i}\nSentiment:"
        for i, document in enumerate(evaluation.documents(size, 0))
    ]
    return FileTask(
        name, tuple(Row(text, LABELS[i % 3], tuple(LABELS)) for i, text in enumerate(texts))
    )


def model_of(folder, dtype=torch.float32):
    """A checkpoint's model and tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(
        folder
    )


def loaded(folder, name="icl", **limits):
    """The model under a method."""
    return Predictor(*model_of(folder), methods.make(name), **limits)


# The forward pass.


@pytest.mark.parametrize("case", CASES, ids=test_methods.title)
def test_training_forward_is_scoring(checkpoint, case):
    """The answers' log-probabilities of a batch of rows, and those of scoring through the memory."""
    model, tokenizer = model_of(checkpoint("llama"), torch.float64)
    predictor = Predictor(model, tokenizer, getattr(methods, case[0])(**case[1]))
    make, pool = RowMaker(predictor), EpisodePool(task(), 4, 3)
    episodes = [draw_episode([pool], 0, number) for number in range(4)]
    batch = collate([make.row(episode) for episode in episodes], model.dtype)
    with predictor.runner.inference_mode():
        losses = target_losses(model, batch)
    found = torch.zeros(4, dtype=losses.dtype).index_add_(0, batch["target_row"], -losses)
    for episode, mine in zip(episodes, found.tolist(), strict=True):
        prompt = episode.example.prompt
        [[(expected, _)]] = predictor.score(
            prompt.demonstrations, [prompt.query], [episode.example.answer], prefix=prompt.prefix
        )
        assert abs(mine - expected) <= 1e-7 * max(1, abs(expected))  # RMSNorm is in float32


# Gradients.

PROMPTS = [
    (
        Context((5, 9), ((30, 31, 32, 33, 34), (40, 41, 42), (50, 51, 52, 53))),
        (60, 61, 62),
        (70, 71),
    ),
    (Context((5,), ((30, 31, 32), (40, 41, 42, 43), (50, 51))), (60, 61, 62, 63), (72,)),
]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {
        name: weights.grad for name, weights in model.named_parameters() if weights.grad is not None
    }


def assert_same_gradients(found, expected, tolerance=1e-8):
    differing = set(found.keys() ^ expected.keys())
    assert all((found | expected)[name].abs().max() == 0 for name in differing), differing
    assert max(float(of.abs().max()) for of in expected.values()) > 1e-3
    for name in found.keys() & expected.keys():
        assert (found[name] - expected[name]).abs().max() <= tolerance, name


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
@pytest.mark.parametrize("case", CASES, ids=test_methods.title)
def test_gradients_are_those_of_a_literal_pass(name, case):
    """Autograd through passes that know nothing of layouts: InvICL's, for one, is two streams, demonstration by
    demonstration."""
    model, method = test_methods.tiny_model(name), getattr(methods, case[0])(**case[1])
    batch = collate(
        [
            make_row(method, TokenizedPrompt(context, query), answer)
            for context, query, answer in PROMPTS
        ],
        model.dtype,
    )
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
    """For each demonstration, its ids, and where the ids of its answer stand among them, found by spelling out."""
    for ids in demonstrations:
        texts = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
        begin = next(n for n, text in enumerate(texts) if text.endswith("Sentiment:"))
        end = next(n for n, text in enumerate(texts) if text.endswith("tive") and n > begin)
        yield ids, begin, end


@pytest.mark.parametrize("case", [("ICL", {}), ("InvICL", {})], ids=test_methods.title)
def test_gradients_of_the_dense_loss(checkpoint, case):
    """Each demonstration's answer from those that are before it (icl), or from all others (invicl)."""
    model, tokenizer = model_of(checkpoint("gpt2"), torch.float64)
    predictor = Predictor(model, tokenizer, getattr(methods, case[0])())
    episode = draw_episode([EpisodePool(task(), 3, 0)], 0, 5)
    row = RowMaker(predictor, "all").row(episode)
    found = gradients(model, mean_loss(model, collate([row], model.dtype)))

    run, join, span = test_methods.run, test_methods.join, test_methods.span
    prompt, answer = predictor.tokenizer.pair(
        predictor.tokenizer.arranged(episode.example.prompt), episode.example.answer
    )
    parts, query = list(answers_of(tokenizer, prompt.context.demonstrations)), prompt.query
    assert len(parts) == 3 and not prompt.context.prefix
    logits, targets = [], []
    if case[0] == "ICL":
        tokens = [*(token for ids, _, _ in parts for token in ids), *query, *answer]
        out, at = run(model, tokens, span(0, tokens))[1], 0
        for ids, begin, end in parts:
            logits.append(out[at + begin - 1 : at + end - 1])
            targets += ids[begin:end]
            at += len(ids)
        logits.append(out[len(tokens) - len(answer) - 1 : -1])
    else:
        alone = [run(model, ids, span(0, ids))[0] for ids, _, _ in parts]
        second = [
            run(model, ids, span(0, ids), join(*alone[:i], *alone[i + 1 :]))
            for i, (ids, _, _) in enumerate(parts)
        ]
        for (ids, begin, end), (_, out) in zip(parts, second, strict=True):
            logits.append(out[begin - 1 : end - 1])
            targets += ids[begin:end]
        memory, start = join(*(keys for keys, _ in second)), max(len(ids) for ids, _, _ in parts)
        logits.append(test_methods.query_logits(model, memory, start)(query, answer))
    loss = torch.nn.functional.cross_entropy(torch.cat(logits), torch.tensor([*targets, *answer]))
    assert_same_gradients(found, gradients(model, loss))


def test_which_methods_leak():
    assert not any(leaks(methods.make(name)) for name in ("icl", "nope", "pcw", "invicl"))
    assert all(leaks(methods.make(name)) for name in ("prefixicl", "saicl"))
    assert leaks(methods.make("invicl", {"repeat": 2}))


# Episodes.


def test_an_episode_is_a_function_of_its_number():
    def drawn(episode):
        return episode.task.name, episode.demonstrations, episode.query

    pools, again = ([EpisodePool(task(name), 4, 3) for name in ("a", "b")] for _ in range(2))
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
    assert pools[0].held_out == again[0].held_out and len(pools[0].held_out) == 3


def test_held_out_episodes_never_show_a_row_that_is_held_out():
    """And two tasks over the same rows hold out the same ones."""
    pool = EpisodePool(task(size=200), 4, 64)
    assert len(pool.held_out) == 20 and pool.held_out == EpisodePool(task("b", 200), 3, 64).held_out
    for episode in pool.evaluation():
        assert episode.query in pool.held_out and not set(episode.demonstrations) & set(
            pool.held_out
        )


@pytest.mark.parametrize(
    "name", ["many_tokens", "described", "spaces", "prefixed", "likelihood", "generate"]
)
def test_an_episode_is_the_prompt_of_an_evaluation(name):
    """Character by character what lm-eval itself builds from the same documents, and the same options."""
    config = evaluation.TASKS[name] | {
        "test_split": "train",
        "fewshot_split": "train",
        "training_split": "train",
    }
    theirs = evaluation.manager(False).load([dict(config)])["tasks"][name]
    theirs.sampler.sample = lambda n, **kwargs: [theirs.training_docs()[i] for i in (4, 1, 7)]
    doc = theirs.training_docs()[2]
    prompt = theirs.fewshot_context(doc, 3, gen_prefix=theirs.doc_to_prefix(doc))
    requests = theirs.construct_requests(doc, prompt)
    ours = HarnessTask(evaluation.manager(False).load([dict(config)])["tasks"][name]).example(
        (4, 1, 7), 2
    )
    assert str(ours.prompt) == prompt and len(ours.prompt.demonstrations) == 3
    if name == "generate":
        assert ours.options == (" " + doc["other"],)
    elif name == "likelihood":
        assert (ours.prompt, ours.answer) == requests.args
    else:
        assert [(ours.prompt, option) for option in ours.options] == [
            request.args for request in requests
        ]
        assert ours.right == doc["label"]


def test_tasks_that_cannot_be_trained_on():
    for changed, says in (
        ({"training_split": None}, "'t' has no training split .training_split.: give others"),
        (evaluation.TASKS["inputs"], "'t' has no query with one answer"),
    ):
        config = evaluation.TASKS["one_token"] | changed | {"task": "t"}
        with pytest.raises(InputError, match=says):
            HarnessTask(evaluation.manager(False).load([config])["tasks"]["t"])


def test_only_what_fits_every_method_is_used(checkpoint):
    """As InvICL's appendix A.4: with `fits`, icl leaves out the episodes that do not fit in two copies, by the tokens
    of a row and not by their positions."""
    pools, most = [EpisodePool(task(size=60), 4, 0)], 330
    icl, invicl = (loaded(checkpoint("gpt2"), name, max_length=most) for name in ("icl", "invicl"))
    makers = [RowMaker(icl), RowMaker(invicl)]

    def tokens(episode):
        """How many a row has, with two copies of each demonstration."""
        prompt, answer = icl.tokenizer.pair(episode.example.prompt, episode.example.answer)
        return (
            len(prompt.context.prefix)
            + 2 * sum(prompt.context.lengths)
            + len(prompt.query)
            + len(answer)
            - 1
        )

    alone, together = (
        EpisodeRows(partial(draw_episode, pools, 0), makers[0], fits, 30) for fits in ([], makers)
    )
    assert 0 < sum(tokens(alone.episode(number)[0]) > most for number in range(30)) < 30
    for number in range(30):
        _, left_out = together.episode(number)
        tried = [draw_episode(pools, 0, number, attempt) for attempt in range(left_out + 1)]
        fits = [not makers[0].why_not(episode) and tokens(episode) <= most for episode in tried]
        assert (
            fits == [False] * left_out + [True]
            and together[number].ids == makers[0].row(tried[-1]).ids
        )


def test_the_training_questions_of_mmlu(tmp_path, monkeypatch):
    """`icl_mmlu_train`, from a folder laid out as the Hub's cais/mmlu is."""
    folder = tmp_path / "cais/mmlu"
    folder.mkdir(parents=True)
    files = {split: f"{split}.jsonl" for split in ("auxiliary_train", "validation", "dev", "test")}
    configs = [
        {
            "config_name": "all",
            "data_files": [{"split": split, "path": path} for split, path in files.items()],
        }
    ]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    for split, path in files.items():
        of_split = [
            {"question": f" {split} {i}?", "subject": "", "answer": i % 4} for i in range(20)
        ]
        lines = [
            json.dumps({**question, "choices": ["a", "b", "c", "d"]}) + "\n"
            for question in of_split
        ]
        (folder / path).write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    [found] = [HarnessTask(task) for task in tasks_of(["icl_mmlu_train"], None, {})]
    example = found.example((3, 5), 6)
    assert example.prompt == (
        "Question: auxiliary_train 3?\nAnswer: d\n\nQuestion: auxiliary_train 5?\nAnswer: b\n\n"
        "Question: auxiliary_train 6?\nAnswer:"
    )
    assert (example.options, example.right, len(found)) == ((" a", " b", " c", " d"), 2, 20)


# Runs.


def tiny_run(
    checkpoint,
    output,
    name="gpt2",
    method="invicl",
    tasks=None,
    loss="all",
    resume=False,
    max_length=None,
    **settings,
):
    folder = checkpoint(name)
    given = {
        "num_fewshot": 3,
        "steps": 6,
        "batch_size": 4,
        "learning_rate": 1e-3,
        "eval_steps": 3,
        "save_steps": 2,
    }
    made = Settings(**{**given, "loss": loss, **settings})
    what = (*model_of(folder), methods.make(method), tasks or [task()], output, made)
    train(*what, source=str(folder), max_length=max_length, resume=resume, cpu=True)
    return read_log(output)


def read_log(output):
    """What Trainer has logged of each step, and of what it measured."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    return [
        {name: entry[name] for name in names if name in entry}
        for entry in history
        if "train_loss" not in entry
    ]


def losses(log):
    return [entry["loss"] for entry in log if "loss" in entry]


def weights(folder):
    return hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()


def test_a_run_leaves_a_checkpoint(checkpoint, tmp_path):
    """One that transformers and lm-eval load, with the record of how it was made; and the loss falls."""
    log = tiny_run(checkpoint, tmp_path / "out", steps=30, eval_steps=10, save_steps=10)
    assert len(losses(log)) == 30 and sum(losses(log)[-5:]) < 0.8 * sum(losses(log)[:5])
    rates = [entry["learning_rate"] for entry in log if "loss" in entry]
    assert all(one - other == pytest.approx(1e-3 / 30) for one, other in itertools.pairwise(rates))
    measured = {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}
    assert list(measured) == [0, 10, 20, 30] and measured[30] < measured[0]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "trainer_state.json",
        "training.json",
    }
    assert {path.name for path in (tmp_path / "out/checkpoints").iterdir()} == {
        "checkpoint-20",
        "checkpoint-30",
    }
    config = json.loads((tmp_path / "out/config.json").read_text())
    trained = config["lm_eval_icl"]["trained"]
    assert [trained[name] for name in ("method", "positions", "num_fewshot", "steps")] == [
        "invicl",
        "symmetric",
        3,
        30,
    ]
    assert (
        trained["tasks"] == ["t"]
        and str(tmp_path) not in json.dumps(config)
        and config["use_cache"]
    )
    for model in ("hf", "invicl"):
        evaluation.run(model, tmp_path / "out", ["one_token"], 2)


def test_held_out_rows_are_answered_as_the_predictor_answers_them(checkpoint, tmp_path):
    tiny_run(checkpoint, tmp_path, loss="query")
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    logged = [entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry]
    assert len(logged) == 3  # at the beginning, in the middle and at the end
    predictor = Predictor(*model_of(tmp_path), methods.make("invicl"))
    right = []
    for episode in EpisodePool(task(), 3, 64).evaluation():
        example = episode.example
        prompt = example.prompt
        [scores] = predictor.score(prompt.demonstrations, [prompt.query], list(example.options))
        best = max(range(len(scores)), key=lambda option: scores[option][0])
        right.append(best == example.right)
    assert logged[-1] == pytest.approx(np.mean(right)) and 0 < len(right)
    drawn = (tmp_path / "loss.svg").read_text()
    assert "held-out rows" in drawn and "accuracy" in drawn


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
    assert losses(tiny_run(checkpoint, tmp_path / "o", name="llama", **saving)) == pytest.approx(
        plain, abs=1e-5
    )


@pytest.mark.slow
def test_bf16_and_lora(checkpoint, tmp_path):
    """Mixed precision runs near float32; adapters are merged, and lie beside the merged weights."""
    plain = losses(tiny_run(checkpoint, tmp_path / "plain"))
    mixed = losses(tiny_run(checkpoint, tmp_path / "bf16", bf16=True))
    assert mixed == pytest.approx(plain, rel=0.05) and mixed != plain
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").dtype == torch.float32
    adapted = losses(
        tiny_run(checkpoint, tmp_path / "lora", lora=True, learning_rate=1e-2, steps=20)
    )
    assert sum(adapted[-4:]) < sum(adapted[:4])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "lora")
    base = AutoModelForCausalLM.from_pretrained(checkpoint("gpt2"))
    adapted = evaluation.run(
        "icl", checkpoint("gpt2"), ["one_token"], 2, args={"peft": str(tmp_path / "lora/adapter")}
    )
    merged_run = evaluation.run("icl", tmp_path / "lora", ["one_token"], 2)
    evaluation.assert_same(evaluation.responses(adapted), evaluation.responses(merged_run), 1e-4)
    assert merged_run["config"]["icl"]["trained"]["lora"] == {
        "rank": 16,
        "alpha": 32,
        "targets": "all-linear",
    }
    moved = [n for n, w in merged.named_parameters() if not torch.equal(w, base.get_parameter(n))]
    assert moved and not any("ln" in name or "wte" in name for name in moved)


@pytest.mark.parametrize(
    ("trained", "method", "says"),
    [
        ({"method": "invicl"}, "pcw", "was trained under invicl, and is evaluated under pcw"),
        ({"method": "icl"}, "deepthink", ""),
        (
            {"method": "invicl", "positions": "sequential"},
            "invicl",
            "with positions=sequential, and is .* symmetric",
        ),
        (
            {"method": "invicl", "repeat": 2},
            "invicl",
            "was trained with repeat=2, and is evaluated with 1",
        ),
    ],
)
def test_evaluated_as_it_was_not_trained(trained, method, says):
    """What runs on icl's checkpoints is not another method."""
    warning = record.mismatch(trained, methods.make(method))
    assert re.search(says, warning) if says else not warning


def test_an_evaluation_says_and_records_the_training(checkpoint, tmp_path, caplog):
    tiny_run(checkpoint, tmp_path / "out", steps=2, eval_steps=0)
    other = "pcw: the checkpoint was trained under invicl, and is evaluated under pcw."
    none = "invicl: it needs a model trained under invicl, and the checkpoint records no training."
    trained, untrained = tmp_path / "out", checkpoint("gpt2")
    for model, path, warnings in (
        ("pcw", trained, [other]),
        ("invicl", trained, []),
        ("invicl", untrained, [none]),
    ):
        caplog.clear()
        results = evaluation.run(model, path, ["one_token"], 2)
        assert [message for message in caplog.messages if "trained" in message] == warnings
        assert path == untrained or results["config"]["icl"]["trained"]["num_fewshot"] == 3


# What is killed, or goes wrong.


@pytest.fixture(scope="module")
def episodes_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("episodes") / "rows.jsonl"
    lines = [
        {"task": name, "input": row.input, "output": row.output, "options": list(row.options)}
        for name in ("a", "b")
        for row in task(name, 40).rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(checkpoint, episodes_file, output, *further):
    return [
        *(
            "train",
            "invicl",
            "--model_args",
            f"pretrained={checkpoint('gpt2')}",
            "--episodes",
            str(episodes_file),
        ),
        *(
            "--num_fewshot",
            "3",
            "--steps",
            "40",
            "--batch_size",
            "4",
            "--learning_rate",
            "1e-3",
            "--device",
            "cpu",
        ),
        *(
            "--eval_steps",
            "10",
            "--save_steps",
            "3",
            "--loss",
            "all",
            "--output",
            str(output),
            *further,
        ),
    ]


def process(line):
    return Process(run_command, ["lm-eval-icl", *line])


def finish(line):
    """Run a command to its end, which is a good one."""
    code, lines = process(line).finish()
    assert code == 0, lines


@pytest.mark.slow
def test_killed_and_resumed(checkpoint, episodes_file, tmp_path):
    """The same weights bit for bit, and the same log, dropout included (GPT-2 has it)."""
    finish(arguments(checkpoint, episodes_file, tmp_path / "whole"))
    running = process(arguments(checkpoint, episodes_file, tmp_path / "killed"))
    while not (tmp_path / "killed/checkpoints/checkpoint-21").exists():
        assert running.process.is_alive(), running.finish()
        time.sleep(0.001)
    time.sleep(random.random() * 0.1)  # at any moment of the next steps, or of a save
    running.kill()
    finish(arguments(checkpoint, episodes_file, tmp_path / "killed", "--resume"))
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    logs = [read_log(tmp_path / name) for name in ("killed", "whole")]
    assert logs[0] == logs[1] and len(logs[0]) == 45


@pytest.mark.slow
def test_two_processes_do_what_one_does(checkpoint, episodes_file, tmp_path):
    """The same losses step by step at the same global batch. (A model without dropout.)"""
    line = arguments(checkpoint, episodes_file, tmp_path / "one")
    line[line.index("--model_args") + 1] = f"pretrained={checkpoint('llama')}"
    finish(line)
    line[line.index("--output") + 1] = str(tmp_path / "two")
    for done in ranks(run_command, "lm-eval-icl", *line):
        assert done.returncode == 0, done.stderr
    logs = [read_log(tmp_path / name) for name in ("one", "two")]
    assert [entry["step"] for entry in logs[0]] == [entry["step"] for entry in logs[1]] and len(
        logs[0]
    ) == 45
    for one_entry, two_entry in zip(*logs, strict=True):
        for name in ("loss", "eval_loss"):
            if name in one_entry:
                assert one_entry[name] == pytest.approx(two_entry[name], abs=1e-5)


DEMO = ["--model_args", f"pretrained={model_path()}"]
SHORT = ["--tasks", "icl_demo_short"]
TWICE = ["--gradient_accumulation_steps", "2"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["deepthink", *DEMO, *SHORT], "no model is trained under deepthink, since it is more"),
        (["saicl", *DEMO, "--tasks", "x", "--loss", "all"], "loss=all: under saicl a demonstration sees its own"),
        (["icl", *DEMO, "--tasks", "x", "--episodes", "y"], "--tasks, --episodes, --metaicl: give one of them."),
        (["icl", *DEMO, *SHORT, "--num_fewshot", "190"], "task 'icl_demo_short': 190 demonstrations"),
        (["icl", "--model_args", f"pretrained={model_path()},max_length=9", *SHORT], "task 'icl_demo_short': none of"),
        (["icl", *DEMO, *SHORT, "--batch_size", "3", *TWICE], "--batch_size 3: must be a multiple of 2: processes"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(line, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commands.refused("train", *line, "--steps", "1", "--output", "out").startswith(says)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            '{"task": "a", "input": "x"}',
            "output: Field required.",
        ),
        (
            '{"task": "a", "input": "x", "output": "y", "options": ["z"]}',
            "the output 'y' is none of the options ['z']",
        ),
    ],
)
def test_a_bad_row_is_named_by_its_number(row, says, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"task": "a", "input": "x", "output": "y"}\n\n' + row + "\n")
    with pytest.raises(InputError) as error:
        read_file(path)
    assert f"{path}, line 3: " in error.value.message and says in error.value.message


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
    output, identity = tmp_path / "out", {"model": "m", "rows": {"t": "abc"}, "steps": 10}

    def claimed(resume=False, **changes):
        return claim(output, identity | changes, resume)

    assert claimed() is None
    with pytest.raises(
        InputError, match="holds another run, with another steps: give another folder"
    ):
        claimed(resume=True, steps=20)
    for step in (5, 10, 15):
        (output / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
    assert claimed() is None  # a checkpoint is whole with Trainer's state, which is written last
    for step in (5, 10):
        (output / f"checkpoints/checkpoint-{step}/trainer_state.json").write_text("{}")
    with pytest.raises(InputError, match="holds this run already: give --resume"):
        claimed()
    assert claimed(resume=True) == output / "checkpoints/checkpoint-10"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(InputError, match="there are other files in it"):
        claim(tmp_path / "mine", identity, True)
