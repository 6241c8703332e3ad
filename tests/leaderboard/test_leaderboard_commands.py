"""The commands leaderboard, compare and collect, on files as lm-eval writes them."""

import re
import shutil

import pytest

from lm_eval_icl.leaderboard import numbers, tables
from lm_eval_icl.results import build
from lm_eval_icl.results.collect import collect
from lm_eval_icl.results.entries import shown
from lm_eval_icl.results.read import read
from tests import boards

RIGHT = {"icl": 0.5, "deepthink": 0.55, "invicl": 0.9}
TASKS = ("icl_first", "icl_second")
EVIL = "\x1b[31mred\x07 [bold]text\u202e"
N = 60


def write(folder, model="icl", seed=0, tasks=TASKS, evil="", **arguments):
    """A results file with its samples: demonstrations are of the seed, answers of the seed and the model."""
    put = {"config.model_args": {"pretrained": "org/model", **arguments}}
    boards.write(folder, model, seed, task=tasks, n=N, right=RIGHT.get(model, 0.5), shots=1, evil=evil, put=put)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Three methods with four seeds each, on two tasks."""
    root = tmp_path_factory.mktemp("results")
    for model in RIGHT:
        for seed in range(4):
            write(root / model, model, seed, **({"T": 4} if model == "deepthink" else {}))
    return root


def unwrapped(text):
    return " ".join(text.split())


def test_leaderboard_prints_sentences_and_a_table_of_80_columns(command, results):
    printed = command("leaderboard", results)
    board = build.build(*read([results], quiet=True))
    assert max(map(len, printed.splitlines())) <= 80
    for sentence in board.summary:
        assert sentence in unwrapped(printed)
    assert "average (org/model, 1 shot)" in printed
    for entry in board.entries:
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{entry.method} ")]
        cell = entry.cells["average"]
        assert f" {numbers.value(cell.estimate.mean, board.columns[0], unit=True)} " in line
        if cell.difference:
            assert numbers.p_value(cell.p_holm) in line
    assert "left out" not in printed


def test_leaderboard_names_what_it_left_out(command, tmp_path):
    write(tmp_path / "run")
    (tmp_path / "run" / "results_half.json").write_text('{"results": {"a')
    printed = command("leaderboard", tmp_path)
    assert re.search(r"left out: .*results_half.json: is damaged", printed)
    shutil.copytree(tmp_path / "run", tmp_path / "copies/first")
    shutil.copytree(tmp_path / "run", tmp_path / "copies/second")
    lines = [line for line in command("leaderboard", tmp_path / "copies").splitlines() if line.startswith("left out")]
    assert len(lines) == 2  # one for each reason: the copy, and both half-written files
    assert any(re.fullmatch(r"left out: .*first/results_half.json and 1 more: is damaged.*", line) for line in lines)


def test_tables_and_choice_of_columns(command, results, tmp_path):
    files = [tmp_path / name for name in ("b.csv", "b.md", "b.tex")]
    printed = command("leaderboard", results, "--tasks", "icl_first", "--baseline", "deepthink T=4, 1 shot",
                      *(part for file in files for part in (f"--{file.suffix[1:]}", file)))  # fmt: skip
    board = build.build(*read([results], quiet=True), baseline="deepthink T=4, 1 shot", tasks=["icl_first"])
    assert [column.name for column in board.columns] == ["icl_first"]
    for file, made in zip(files, (tables.as_csv, tables.as_markdown, tables.as_tex), strict=True):
        assert file.read_text(encoding="utf-8") == made(board)
        assert f"written: {file}" in printed


def test_compare_two_entries(command, results):
    printed = command("compare", "invicl", "deepthink T=4, 1 shot", "--results", results)
    board = build.build(*read([results], quiet=True))
    (pair,) = [found for names, found in board.pairs.items()
               if {build.named(board.entries, name).method for name in names} == {"invicl", "deepthink"}]  # fmt: skip
    assert max(map(len, printed.splitlines())) <= 80
    for column in board.columns:
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{column.name} ")]
        d = pair[column.name]
        texts = [numbers.signed(d.mean, column, unit=True), numbers.value(d.detectable, column, unit=True)]
        assert all(text in line.split() for text in [*texts, numbers.p_value(d.p), f"{d.documents}"])
        assert numbers.interval(d, column, sign=True, unit=True) in line
    # The documents that differ most, with the ends of their prompts.
    number = re.search(r"document (\d+): A 1, B 0\n *(.*)\n", printed)
    assert number[2].endswith(f"Text: document {number[1]} Label:")
    assert len(re.findall("document [0-9]+: A", printed)) == 6
    without = command("compare", "invicl", "icl", "--results", results, "--documents", 0)
    assert not re.findall("document [0-9]+: A", without)


def test_compare_two_runs(command, tmp_path):
    """A folder and a file, in place of two entries of a board."""
    for model in ("icl", "invicl"):
        write(tmp_path / model, model, 2)
    file = next((tmp_path / "icl").glob("results_*.json"))
    printed = [
        command("compare", tmp_path / "invicl", file),
        command("compare", "invicl", "icl", "--results", tmp_path),
    ]
    (rows, expected) = ([line for line in text.splitlines() if line.count("%") > 1] for text in printed)
    assert rows == expected and len(rows) == 1 + len(TASKS)


def test_collected_runs_have_no_texts_to_show(command, results, tmp_path):
    command("collect", results, "--output", tmp_path)
    printed = command("compare", "invicl", "icl", "--results", tmp_path)
    assert re.search(r"document \d+: A 1, B 0", printed)
    assert "Label:" not in printed


def test_texts_and_names_of_strangers_do_not_reach_the_terminal(command, tmp_path):
    for model in ("icl", EVIL):
        for seed in range(2):
            write(tmp_path / str(len(model)), model, seed, evil=EVIL, x=EVIL)
    (tmp_path / f"results_{EVIL}.json").write_text("{")
    printed = command("leaderboard", tmp_path)
    printed += command("compare", "icl", shown(EVIL), "--results", tmp_path)
    for name in map(str, map(len, ("icl", EVIL))):
        next((tmp_path / name).glob("results_*T10-00-01.*.json")).unlink()
    printed += command("compare", *(tmp_path / str(len(model)) for model in ("icl", EVIL)))
    assert len(re.findall("A: ", printed)) == 2
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", printed)
    assert "[bold]text" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["leaderboard", "{no}"], "leaderboard: .*no does not exist"),
        (["leaderboard", "{empty}"], r"leaderboard: no results that can be used were found\.$"),
        (["leaderboard", "{half}"],
         r"leaderboard: no results that can be used were found\. .*results_1\.json: is damaged"),
        (["leaderboard", "{results}", "--baseline", "x"],
         "leaderboard: --baseline x: there is no such entry. There are "),
        (["leaderboard", "{results}", "--tasks", "x"],
         "leaderboard: --tasks: no result of 'x'; there are icl_first, icl_second"),
        (["leaderboard", "{results}", "--tasks", ","], "leaderboard: --tasks: give at least one task"),
        (["leaderboard", "{results}", "--csv", "{no}/x.csv"], "leaderboard: .*x.csv: the folder .*no is not there"),
        (["leaderboard", "{results}", "--md", "{empty}"], "leaderboard: .*empty: is a folder; give the name of a file"),
        (["leaderboard", "{results}", "--csv", "{file}"], "leaderboard: .*results_.*json: is one of the results"),
        (["leaderboard", "{results}", "--csv", "{samples}"], "leaderboard: .*samples_.*jsonl: may be a file of sample"),
        (["leaderboard", "{file}", "--tex", "{file}"], "leaderboard: .*results_.*json: is one of the results"),
        (["leaderboard", "{results}", "--csv", "{empty}/x", "--md", "{empty}/x"],
         "leaderboard: two of the files to write"),
        (["leaderboard", "{results}", "--plots", "{file}"], "leaderboard: --plots .*json: is no folder"),
        (["compare", "{no}", "{file}"], "compare: .*no: no such file or folder. To compare entries of a board, give"),
        (["compare", "{empty}", "{file}"], "compare: .*empty: no results that can be used were found"),
        (["compare", "{file}", "{file}"], "compare: .* are the same; give two"),
        (["compare", "{file}", "{results}"],
         r"compare: .* holds 3 entries \(invicl, 1 shot; .*\)\. Name two of them, with"),
        (["compare", "icl", "icl, 1 shot", "--results", "{results}"],
         "compare: icl and icl, 1 shot are the same; give two"),
        (["compare", "icl", "x", "--results", "{results}"], "compare: x: there is no such entry. There are "),
        (["compare", "{file}", "{other}"], "compare: .* have no task in common"),
        (["compare", "{file}", "{other}", "--documents", "-1"], "compare: --documents -1: must be 0 or more"),
        (["collect", "{empty}", "--output", "{empty}/out"], "collect: no results that can be used were found"),
        (["collect", "{results}", "--output", "{file}"], "collect: --output .*: cannot be written"),
        (["leaderboard", "{results}", "--output", "{loop}"], "leaderboard: .*loop: cannot be written"),
        (["collect", "{results}"], "collect: one of the arguments --output --check is required"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_said_in_a_line(command, results, tmp_path, arguments, says):
    for name in ("empty", "half"):
        (tmp_path / name).mkdir()
    (tmp_path / "half" / "results_1.json").write_text('{"results"')
    write(tmp_path / "other", tasks=("third",))
    (tmp_path / "loop").symlink_to("loop")
    places = {name: tmp_path / name for name in ("no", "empty", "half", "other", "loop")}
    places["file"] = next((results / "icl").glob("results_*.json"))
    places["samples"] = next((results / "icl").glob("samples_*.jsonl"))
    before = {path: path.read_bytes() for path in results.rglob("*") if path.is_file()}
    assert re.search(f"lm-eval-icl: {says}", command(*(each.format(results=results, **places) for each in arguments)))
    assert {path: path.read_bytes() for path in results.rglob("*") if path.is_file()} == before


@pytest.fixture(scope="module")
def collected(results, tmp_path_factory):
    """A folder of collected runs."""
    (folder,) = {file.parent for file in collect(read([results], quiet=True)[0], tmp_path_factory.mktemp("board"))}
    return folder


def test_collected_runs_pass_the_check(command, collected):
    assert command("collect", collected, "--check") == "12 runs are as they should be.\n"


def put(pattern, value):
    """A change of a text: the value stands behind the first place where the pattern does."""
    return lambda text: re.sub(rf'({pattern})[^",]+', lambda found: f"{found[1]}{value}", text, count=1)


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        (None, put('"acc,none": ', "0.9999"), "was changed after `lm-eval-icl collect` wrote it"),
        # All answers to one task are right ones.
        (
            None,
            put('"items": {[^}]*"base64": "', "//////////A="),
            "task 'icl_first': its samples are not used: their mean acc is",
        ),
        (None, lambda text: text[: len(text) // 2], "is damaged"),
        ("results_of_mine.json", lambda text: text, "is the same run as"),
        ("notes.json", lambda text: "{}", "is no results file of lm-eval."),
        ("samples_t_2026.jsonl", lambda text: "{}", "the results of these samples are not beside them."),
        ("more/run\x1b[31m.txt", lambda text: text, "is no results file of lm-eval."),
    ],
)
def test_the_check_names_what_does_not_belong_on_a_board(command, collected, name, fault, says, capsys, tmp_path):
    board = shutil.copytree(collected, tmp_path / "runs")
    run = sorted(board.iterdir())[3]
    file = run if name is None else board / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(fault(run.read_text()))
    refused = command("collect", board, "--check")
    assert re.fullmatch(r"lm-eval-icl: collect: 1 of 1[23] files cannot be used as they are\.", refused)
    (line,) = capsys.readouterr().out.splitlines()
    assert says in line and line.startswith(str(board)) and "\x1b" not in line
