"""The named studies: their tasks exist, and the papers' numbers are consistent.

Reading the files checks the rest.
"""

from functools import cache
from itertools import chain
from typing import Any

import pytest
import yaml
from lm_eval.tasks import TaskManager

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.studies import grid
from lm_eval_icl.studies.unit_runner import Options
from tests import commands
from tests.studies import running

STUDIES = {name: grid.read(name, {}) for name in grid.named()}
# The file of each task and group of this package.
CONFIGS = {file.stem: file for file in task_dir().rglob("*icl_*.yaml")}
EXPECTED = []
for study_name, named_study in STUDIES.items():
    for number, entry in enumerate(named_study.expected):
        EXPECTED.append(pytest.param(named_study, entry, id=f"{study_name}-{number}"))


def tasks_of(study: grid.Study) -> list[str]:
    return [task if isinstance(task, str) else task["task"] for task in study.tasks]


def averages_of(study: grid.Study) -> dict[str, tuple[str, ...]]:
    """The columns by the name of their average."""
    averages = {}
    for part, columns in study.columns.items():
        averages[f"average, {part}" if part else "average"] = columns
    return averages


@cache
def config(name: str) -> Any:
    return yaml.safe_load(CONFIGS[name].read_text(encoding="utf-8"))


def below(name: str) -> set[str]:
    """A task, or a group and all that is in it."""
    names = {name}
    if "group" in config(name):
        names.update(*map(below, config(name)["task"]))
    return names


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_tasks_are_ours(study):
    columns = list(chain(*study.columns.values()))
    names = [*tasks_of(study), *columns]
    assert {config(name).get("group", config(name)["task"]) for name in names} == set(names)
    assert set(columns) <= set().union(*map(below, tasks_of(study)))
    assert study.title
    assert study.paper or not study.expected
    assert all(text.endswith(".") for text in study.deviates)


@pytest.mark.parametrize("study, entry", EXPECTED)
def test_expected_numbers_are_of_cells_of_the_study(study, entry):
    assert entry["model"] in [model["pretrained"] for model in study.models]
    wanted = entry.get("arguments", {}).items()
    variants = [variant for variant in study.variants if variant.method == entry["method"]]
    assert any(wanted <= variant.arguments.items() for variant in variants)
    values = {name: x for name, x in entry["values"].items() if not name.endswith(" ±")}
    spreads = entry["values"].keys() - values
    assert {name.removesuffix(" ±") for name in spreads} <= values.keys()
    assert all(0 <= entry["values"][name] < 0.03 for name in spreads)
    assert values
    assert values.keys() <= {"order flips"}.union(averages_of(study), *map(below, tasks_of(study)))
    assert all(0 < value < 1 or name == "order flips" for name, value in values.items())
    assert entry.get("training") in (None, *(training.name for training in study.trainings))
    assert study.dev or "chosen" not in entry
    ways = [str(way or "stratified") for way in study.demonstrations]
    assert entry.get("demonstrations", ways[0]) in ways
    assert len(ways) == 1 or "demonstrations" in entry
    if len(values) > 2:
        # The papers round to 0.1%, averages too. (InvICL's own, of all targets, is 42.47, and the
        # paper has 42.4.)
        order = []
        for average, columns in averages_of(study).items():
            order += [*columns, average]
            mean = sum(values[column] for column in columns) / len(columns)
            assert values[average] == pytest.approx(mean, abs=0.0008)
        assert list(values) == order


def test_arguments_of_the_command_reach_the_methods_that_have_them():
    study = grid.read("deep-thinking-table2", {"model_args": "momentum=0.9,dtype=bfloat16"})
    icl, *deepthink = study.variants
    assert icl.arguments == {}
    assert len(deepthink) == 45
    assert all(variant.arguments["momentum"] == 0.9 for variant in deepthink)
    for model in study.models:
        assert model["dtype"] == "bfloat16"
        assert "momentum" not in model
    with pytest.raises(InputError, match="'layer' belongs to batchicl, not to this method"):
        grid.read("deep-thinking-table2", {"model_args": "layer=3"})


def test_the_released_codes_prompt(tmp_path, monkeypatch):
    """What the authors' README prints in front of every query."""
    folder = tmp_path / "stanfordnlp" / "sst2"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        folder.joinpath(f"{split}.jsonl").write_text('{"sentence": "fine . ", "label": 1}\n')
    monkeypatch.chdir(tmp_path)
    study = STUDIES["released-code"]
    task = {**study.tasks[0], "metadata": {"demonstrations": str(study.demonstrations[0])}}
    manager = TaskManager(include_defaults=False, include_path=str(task_dir()))
    loaded = manager.load([{"group": "study", "task": [task]}])["tasks"]["icl_sst2"]
    loaded.set_fewshot_seed(study.seeds[0])
    prompt = """
Review: at every opportunity to do something clever
Sentiment: positive

Review: been discovered , indulged in and rejected as boring before i see this piece of crap again
Sentiment: negative

Review: fine .
Sentiment:"""
    shots = study.num_fewshot[0]
    assert loaded.fewshot_context(loaded.eval_docs[0], num_fewshot=shots) == prompt.lstrip()


# What cannot be, said before a model is loaded.


CANNOT_BE = yaml.safe_load("""
"models: 'tiny': must be arguments as --model_args takes them": {models: tiny}
"methods: {3: {}}: must be a name, or a name with arguments": {methods: 3}
"methods: hf has no arguments of its own": {methods: {hf: {T: 3}}}
"train: targets: 'x' is none of the study's tasks.": {train: {t: {steps: 1, targets: [x]}}}
"metric: task 'icl_demo_short' has no 'f1', only acc": {metric: f1}
"tasks: icl_demo_short is listed twice":
  {tasks: [icl_demo_short, {task: icl_demo_short, num_fewshot: 2}]}
"orders: task 'icl_demo_short' draws other demonstrations": {demonstrations: similar, orders: 2}
"dev: task 'icl_demo_short' draws other demonstrations":
  {demonstrations: similar, dev: {size: 4}}
"dev: task 'icl_demo_short': its training split has ": {dev: {size: 4000}}
"dev: task 'icl_demo_short' has no training split":
  {tasks: [{task: icl_demo_short, training_split: null}], dev: {size: 4}}
""")


@pytest.mark.usefixtures("own_tasks")
@pytest.mark.parametrize("says", CANNOT_BE)
def test_keys_that_cannot_be_are_one_line(says, tmp_path):
    keys = {"methods": "icl", **CANNOT_BE[says]}
    with pytest.raises(InputError) as refusal:
        running.opened(tmp_path / "study", Options("cpu", 8, None), **keys)
    assert says in str(refusal.value)


def test_a_study_that_is_none_is_one_line(tmp_path):
    with pytest.raises(
        InputError, match=r"invicl-tabel2: is neither a file nor .* 'invicl-table2'"
    ):
        grid.read("invicl-tabel2", {})
    file = tmp_path / "list.yaml"
    file.write_text("[icl, invicl]")
    with pytest.raises(InputError, match="must be keys and values, such as"):
        grid.read(str(file), {})


COMMANDS = {
    "": "give a study's file or name",
    "deep-thinking-table2": "--output: give the study's folder.",
    "deep-thinking-table2 --status --dry_run": "--output the study's folder: there is no study.",
    "deep-thinking-table2 --status --output nowhere": "--output nowhere: there is no study.",
    "deep-thinking-table2 --limit 0": "--limit 0: must be above 0.",
    "deep-thinking-table2 --limit inf": "--limit inf: must be above 0, and finite.",
    "deep-thinking-table2 --include_path nowhere": "--include_path nowhere: no such folder.",
    "deep-thinking-table2 --metadata {x": "--metadata {x: must be K=V,K=V",
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_that_cannot_be_is_one_line(line):
    assert commands.refused("study", *line.split()).startswith(COMMANDS[line])


def test_the_studies_are_listed(capsys):
    commands.run("study", "--list")
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [*STUDIES]
