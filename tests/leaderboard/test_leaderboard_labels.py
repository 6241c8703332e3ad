"""What a person sees of a board: labels, marks, costs, commands. Through files and commands only."""

import csv
import dataclasses
import html
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from lm_eval_icl import methods
from lm_eval_icl.smoke.demo import model_path
from tests import processes
from tests.boards import write


def printed_commands(page):
    """Of each entry, the commands that the page prints."""
    (section,) = re.findall(r'<details class="commands">(.*?)</details>', page, re.DOTALL)
    return [html.unescape(text) for text in re.findall("<pre><code>(.*?)</code></pre>", section, re.DOTALL)]


def labels(lines):
    return sorted({", ".join(filter(None, [line["method"], line["arguments"], line["conditions"]])) for line in lines})


# What is said.


def test_a_column_names_the_task_that_its_order_sensitivity_is_of(board, tmp_path):
    for model in ("icl", "pcw"):
        for order in range(2):
            icl = {"study": {"order": order, "shared": {"cells": 2}}}
            says = [(number + order * (number < 4)) % 2 for number in range(40)]
            for task in ("aaa", "bbb") if model == "icl" else ("bbb",):
                folder = tmp_path / "r" / f"{model}{order}"
                write(folder, model, task=task, order=order, put={"config.icl": icl}, says=says)
    page = board(tmp_path / "r", page=True).page
    (note,) = re.findall(r"<bdi>order sensitivity</bdi></button> <small>(.*?)</small>", page)
    first = re.search(r'data-key="c0".*?<bdi>(.*?)</bdi>', page)[1]
    assert note == first and first in ("aaa", "bbb", "average")


def test_costs_of_a_study_do_not_stand_beside_those_of_a_run_alone(board, tmp_path):
    alone = {"tokens_run": 4000}
    of_study = {"tokens_run": 4000, "study": {"shared": {"cells": 10, "seconds": 1.0}}}
    for model in ("icl", "pcw", "saicl"):
        write(tmp_path / "r" / model, model, put={"config.icl": alone, "total_evaluation_time_seconds": "80"})
    for model in ("invicl", "nope", "hf"):
        write(tmp_path / "r" / model, model, put={"config.icl": of_study}, says=[0] * 40 if model == "nope" else None)
    # A study's cell does not make a run alone cheaper.
    write(tmp_path / "r/both", "icl", seed=1, put={"config.icl": of_study})
    made = board(tmp_path / "r", "--plots", tmp_path / "plots", page=True)
    costs = {line["method"]: (line["tokens"], line["seconds"], line["in_study"]) for line in made}
    assert costs["icl"] == costs["pcw"] == ("100.0", "2.0", "False")
    assert costs["invicl"] == ("10.0", "0.0025", "True")
    titles = re.findall(r"<bdi>(tokens run.*?|seconds.*?)</bdi>", made.page)
    assert titles == ["tokens run", "tokens run in a study", "seconds", "seconds in a study"]
    drawn = list(csv.DictReader((tmp_path / "plots/tokens.csv").open(encoding="utf-8")))
    # Each has a line of its own: the dearest of them has no rival among the cheap cells of the study.
    assert {line["method"] for line in drawn if line["best"] == "True"} & {"icl", "pcw", "saicl"}
    assert {line["method"] for line in drawn if line["best"] == "True"} & {"invicl", "hf"}


def test_labels_say_in_words_what_separates_rows(board, tmp_path):
    root = tmp_path / "r"
    chat = {"chat_template": "{{messages}}", "fewshot_as_multiturn": True}
    write(root / "plain")
    write(root / "limit", "pcw", put={"config.limit": 40})
    write(root / "multi", "icl", put=chat)
    write(root / "single", "icl", put=chat | {"fewshot_as_multiturn": False})
    write(root / "chosen", "saicl", metadata={"demonstrations": "herding"})
    write(root / "system", "invicl", put={"system_instruction": "Be brief."})
    trainings = {"a/b": {"method": "icl", "steps": 100}, "c/d": {"methods": ["icl", "pcw"], "steps": 30000}}
    for path, trained in trainings.items():
        write(root / path, "nope", put={"config.icl": {"trained": trained}, "config.model_args": {"pretrained": path}})
    assert labels(board(root)) == [
        "icl, 4 shots", "icl, 4 shots, chat, multiturn", "icl, 4 shots, chat, one turn",
        "invicl, 4 shots, system instruction", "nope, 4 shots, trained under icl for 100 steps",
        "nope, 4 shots, trained under icl/pcw for 30000 steps", "pcw, 4 shots, limit=40",
        "saicl, 4 shots, demonstrations=herding",
    ]  # fmt: skip


def test_a_method_that_gives_one_answer_is_marked(board, command, tmp_path):
    gold = [0] * 22 + [1] * 18
    write(tmp_path / "r/icl", "icl", gold=gold, says=[1, 0] * 20)
    write(tmp_path / "r/nope", "nope", gold=gold, says=[0] * 39 + [1])
    command("collect", tmp_path / "r", "--output", tmp_path / "collected")
    for folder in (tmp_path / "r", tmp_path / "collected"):
        made = board(folder, page=True)
        marks = {line["method"]: line["marks"] for line in made}
        assert "collapsed" in marks["nope"] and "collapsed" not in marks["icl"]
        assert {line["majority"] for line in made} == {"0.55"}
        predicted = {line["method"]: line["predicted"] for line in made}
        assert predicted == {"nope": "good 0.975; bad 0.025", "icl": "good 0.5; bad 0.5"}
        assert "Always giving the most frequent right answer would have 55.0%." in made.printed
        assert "nope (on t) has collapsed" in made.printed
        assert "<mark>collapsed</mark>" in made.page and "<small>one answer: 55.0</small>" in made.page


def test_one_answer_is_no_mark_where_it_is_right(board, tmp_path):
    write(tmp_path / "r/icl", "icl", gold=[1] * 39 + [0])
    write(tmp_path / "r/few", "pcw", n=4, gold=[1, 1, 1, 0], says=[1] * 4)
    # Under one of two sets of demonstrations alone.
    for seed in range(2):
        write(tmp_path / f"r/{seed}", "nope", seed=seed, says=[0] * 40 if seed else None)
    marks = {line["method"]: line["marks"] for line in board(tmp_path / "r")}
    assert "collapsed" not in " ".join(marks.values())
    assert "With 1 of 2 prompts it gives one answer to nearly all documents." in marks["nope"]


def test_labels_say_how_many_demonstrations_were_used(board, tmp_path):
    icl = {"overflow": "drop", "left_out": {"t": {"documents": 40, "demonstrations": 40 * 134}}}
    write(tmp_path / "r/drop", shots=256, put={"config.icl": icl})
    # Two orders that a study scores together count in both.
    study = {"shared": {"cells": 2, "orders": 2}}
    of_study = {"study": study, "left_out": {"t": {"documents": 80, "demonstrations": 240}}}
    write(tmp_path / "r/study", "pcw", shots=8, put={"config.icl": of_study})
    write(tmp_path / "r/some", "saicl", shots=8,
          put={"config.icl": {"left_out": {"t": {"documents": 10, "demonstrations": 20}}}})  # fmt: skip
    made = board(tmp_path / "r", page=True)
    assert labels(made) == ["icl, 122 of 256 shots", "pcw, 5 of 8 shots", "saicl, 7.5 of 8 shots"]
    (of_drop,) = [text for text in printed_commands(made.page) if "--model icl" in text]
    assert "--num_fewshot 256" in of_drop


# Strangers' files.


@pytest.mark.parametrize("form", [json.dumps, dict, lambda given: ",".join(f"{k}={v}" for k, v in given.items())])
def test_commands_have_known_arguments_only(board, tmp_path, form):
    given = {"pretrained": "x/y", "trust_remote_code": True, "attn_implementation": "who/kernel", "base_url": "u",
             "made_up": 1, "T": 3}  # fmt: skip
    put = {"config.model_args": form(given), "config.gen_kwargs": {"temperature": 0, "custom_generate": "who/code"}}
    write(tmp_path / "r", "deepthink", put=put)
    write(tmp_path / "r", "evil:Method")
    page = board(tmp_path / "r", page=True).page
    (text,) = [text for text in printed_commands(page) if "--model " in text]
    assert "--model_args pretrained=x/y,T=3 " in text and "--gen_kwargs temperature=0 " in text
    line = text.splitlines()[0]
    assert not re.search("trust_remote_code|who/|base_url|made_up|custom_generate", line)
    assert not [text for text in printed_commands(page) if "evil" in text]


def test_commands_have_no_path_for_a_task(board, tmp_path):
    write(tmp_path / "r", task="tasks.yaml")
    write(tmp_path / "r", task="--trust_remote_code", seed=1)
    write(tmp_path / "r", task="good", seed=2)
    (text,) = printed_commands(board(tmp_path / "r", page=True).page)
    assert re.findall("--tasks (\\S+)", text) == ["good"]
    assert "trust_remote_code" not in text.splitlines()[0]


def test_the_arguments_of_all_methods_are_known():
    from lm_eval_icl.harness.arguments import CommonArguments
    from lm_eval_icl.results import commands

    own = {name for method in methods.NAMES for name in methods.arguments_of(methods.find(method))}
    assert own | {field.name for field in dataclasses.fields(CommonArguments)} == commands._OURS


def test_no_text_in_the_plots_files_is_a_formula(board, tmp_path):
    for sign in "=+-@":
        write(tmp_path / "r", f"{sign}HYPERLINK(1)", task=f"{sign}t")
        write(tmp_path / "r", f"{sign}HYPERLINK(1)", task="second")
    board(tmp_path / "r", "--plots", tmp_path / "plots")
    cells = [cell for path in (tmp_path / "plots").glob("*.csv") for line in csv.reader(path.open()) for cell in line]
    assert any("HYPERLINK" in cell for cell in cells)
    assert not [cell for cell in cells if cell[:1] in "=+-@" and not re.fullmatch(r"-?[\d.e-]*", cell)]


# In a browser.


def test_figures_can_be_read_in_the_dark_and_their_labels_do_not_overlap(board, browser, tmp_path):
    for model in ("icl", "pcw", "saicl", "invicl", "nope"):
        for task in ("t", "u", "v"):  # differences so small that the colour bar has long numbers
            says = [(number + (number < 1 and model != "icl")) % 2 for number in range(1200)]
            write(tmp_path / "r" / model, model, task=task, n=1200, says=says)
    board(tmp_path / "r", page=True)
    for width in (390, 1440):
        view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark")
        view.goto((tmp_path / "made.html").as_uri())
        light = """(svg) => {
            const parts = (colour) => colour.match(/[0-9.]+/g).map(Number);
            const behind = (at) => parts(getComputedStyle(at).backgroundColor);
            let at = svg;
            while (behind(at)[3] === 0) at = at.parentElement;
            const mean = ([r, g, b]) => (r + g + b) / 3;
            return [mean(parts(getComputedStyle(svg).color)), mean(behind(at))];
        }"""
        for svg in view.query_selector_all("figure svg"):
            ink, ground = svg.evaluate(light)
            assert ink - ground > 120
        overlaps = """() => [...document.querySelectorAll("figure svg")].flatMap((svg) => {
            const isTurned = (text) => /rotate\\((?!-?0)/.test(text.outerHTML);
            const texts = [...svg.querySelectorAll("text")].filter((text) => !isTurned(text));
            const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect()]);
            return boxes.flatMap(([one, a], i) => boxes.slice(i + 1).filter(([other, b]) =>
                Math.min(a.right - b.left, b.right - a.left) > -a.height / 4
                && Math.min(a.bottom - b.top, b.bottom - a.top) > a.height / 4
            ).map(([other]) => [one, other]));
        })"""
        assert view.evaluate(overlaps) == []
        view.close()


# Commands that are run.


@pytest.fixture
def shell(tmp_path):
    """A function that runs commands which are pasted into a shell: bash takes them apart, into processes that wait."""
    scripts, record = tmp_path / "bin", tmp_path / "record"
    scripts.mkdir()
    for name in ("lm_eval", "lm-eval-icl"):
        (scripts / name).write_text(f"#!/bin/sh\nprintf '%s\\0' $# {name} \"$@\" >> {shlex.quote(str(record))}\n")
        (scripts / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"}

    def run(text, folder):
        folder.mkdir(exist_ok=True)
        subprocess.run(["bash", "-ec", text], cwd=folder, env=environment, check=True)
        words = iter(record.read_text().split("\0")[:-1])
        for count in words:
            program, *arguments = itertools.islice(words, int(count) + 1)
            done = processes.command(*arguments, program=program, cwd=folder)
            assert done.returncode == 0, f"{arguments}\n{done.stderr[-2000:]}"
        record.unlink()

    return run


def numbers(lines):
    """What the rows of a board say, by label and column."""
    keys = ("value", "documents", "sets", "order_sensitivity")
    return {(labels([line])[0], line["column"]): [line[key] for key in keys] for line in lines}


@pytest.mark.slow
@pytest.mark.runs
def test_printed_commands_give_the_results_of_their_rows(board, shell, tmp_path):
    """Of plain runs with several seeds, choices of demonstrations and a chat template, and of a study with `hf`."""
    chat = shutil.copytree(model_path(), tmp_path / "chat")
    settings = json.loads((chat / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    (chat / "tokenizer_config.json").write_text(json.dumps(settings))
    plain = "--tasks icl_demo_unseen,icl_demo_four --num_fewshot 4 --limit 10 --log_samples --output_path results"
    lm_eval = f"lm_eval --model deepthink --model_args pretrained={model_path()},T=2,eta=0.5 {plain}"
    with_chat = f"lm_eval --model nope --model_args pretrained={chat} {plain} --apply_chat_template"
    study = f"""
models: "pretrained={model_path()},overflow=drop"
methods: [hf, {{deepthink: {{T: 2}}}}]
tasks: [icl_demo_unseen, icl_demo_four]
num_fewshot: 4
seeds: [0, 3]
orders: 2
"""
    (tmp_path / "first").mkdir()
    (tmp_path / "first/study.yaml").write_text(study)
    shell(
        f"for seed in 1 2; do {lm_eval} --seed 0,1234,1234,$seed; done\n"
        f"{lm_eval} --seed 1 --metadata demonstrations=first\n"
        f"{with_chat} --seed 1 --fewshot_as_multiturn false\n"
        "lm-eval-icl study study.yaml --output results/study --limit 10 --device cpu",
        tmp_path / "first",
    )
    of_hf = [path for path in (tmp_path / "first/results/study").rglob("results_*.json") if "/hf/" in str(path)]
    assert len(of_hf) == 8
    for path in of_hf:
        assert json.loads(path.read_text())["config"]["model_args"] == {"pretrained": str(model_path())}
    made = board(tmp_path / "first/results", page=True)
    texts = printed_commands(made.page)
    assert len(labels(made)) == len(texts) == 5
    shell("\n".join(texts), tmp_path / "second")
    assert numbers(board(tmp_path / "second/results")) == numbers(made)
    # The same prompts, and to each of them the same answers.
    both = board(tmp_path, "--tasks", "icl_demo_unseen,icl_demo_four")
    tasks = [line for line in both if line["kind"] == "task"]
    assert len(tasks) == 10
    assert all("confirmed" in line["marks"] for line in tasks)


def test_the_pages_command_compares_its_rows(board, browser, command, tmp_path, monkeypatch):
    for model in ("icl", "pcw"):
        write(tmp_path / "my results" / model, model)
    monkeypatch.chdir(tmp_path)
    board(Path("my results"), page=True)
    view = browser.new_page()
    view.goto((tmp_path / "made.html").as_uri())
    for box in view.query_selector_all("tbody input"):
        box.check()
    view.click("#compare")
    program, *arguments = shlex.split(view.inner_text("dialog pre"))
    view.close()
    assert program == "lm-eval-icl"
    assert "same answers" in command(*arguments)
