"""The named studies: their methods, arguments and tasks exist, and the papers' numbers in them are consistent."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval.tasks import TaskManager

import lm_eval_icl
from lm_eval_icl import methods
from lm_eval_icl.demonstrations import how
from lm_eval_icl.demonstrations.select import SELECTORS
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.metaicl.files import SETTINGS
from lm_eval_icl.studies import grid

FILES = sorted(Path(lm_eval_icl.__file__).parent.joinpath("studies", "named").glob("*.yaml"))
STUDIES: dict[str, dict[str, Any]] = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in FILES}
KEYS = set(
    "title paper deviates models methods tasks num_fewshot seeds orders demonstrations decide train dev metric "
    "metadata columns figures expected".split()
)
# The file of each task and group of this package.
CONFIGS = {file.stem: file for pattern in ("icl_*", "metaicl_*") for file in task_dir().rglob(f"{pattern}.yaml")}
EXPECTED = [
    pytest.param(name, entry, id=f"{name}-{number}")
    for name, study in STUDIES.items()
    for number, entry in enumerate(study.get("expected", []))
]
# The five tasks of Deep-Thinking's tables, which the tables' last column averages.
CLASSIFICATION = ["icl_sst2", "icl_sst5", "icl_trec", "icl_mr", "icl_agnews"]


@pytest.fixture(params=STUDIES)
def study(request: pytest.FixtureRequest) -> dict[str, Any]:
    return STUDIES[request.param]


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def values(value: Any) -> list[Any]:
    """What a value, a list of them, or a range such as 1..15 stands for."""
    if isinstance(value, str) and (ends := re.fullmatch(r"(\d+)\.\.(\d+)", value)):
        return list(range(int(ends[1]), int(ends[2]) + 1))
    return listed(value)


def methods_of(study: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each method of a study, with its arguments as the file has them."""
    return [
        (method, {}) if isinstance(method, str) else next(iter(method.items())) for method in listed(study["methods"])
    ]


def tasks_of(study: dict[str, Any]) -> list[str]:
    return [task if isinstance(task, str) else task["task"] for task in listed(study["tasks"])]


def columns_of(study: dict[str, Any]) -> dict[str, list[str]]:
    """The columns by the name of their average."""
    columns = study.get("columns", [])
    parts = columns if isinstance(columns, dict) else {"": listed(columns)}
    return {f"average, {part}" if part else "average": some for part, some in parts.items()}


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(CONFIGS[name].read_text(encoding="utf-8"))
    return found


def below(name: str) -> set[str]:
    """A task, or a group and all that is in it."""
    return {name}.union(*(below(task) for task in config(name)["task"])) if "group" in config(name) else {name}


def pretrained(model: str) -> str:
    return dict(argument.split("=") for argument in model.split(","))["pretrained"]


def test_there_are_studies_of_both_papers_and_of_the_released_code():
    assert {name.rsplit("-", 1)[0] for name in STUDIES} >= {"deep-thinking", "invicl", "released"}
    assert len(STUDIES) >= 15


def test_what_a_study_has(study):
    assert study.keys() <= KEYS
    assert all(study[key] for key in ("title", "models", "methods", "tasks"))
    assert "paper" in study or "expected" not in study
    assert all(isinstance(text, str) and text.endswith(".") for text in study["deviates"])
    assert all("/" in pretrained(model) for model in listed(study["models"]))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_line_length(file):
    assert max(map(len, file.read_text(encoding="utf-8").splitlines())) <= 120


def test_methods_and_their_arguments_are_known(study):
    for name, arguments in methods_of(study):
        if name == "hf":
            assert not arguments
        for argument, given in arguments.items():
            for value in values(given):
                methods.make(name, {argument: value})


def test_tasks_are_ours(study):
    columns = [column for some in columns_of(study).values() for column in some]
    names = [*tasks_of(study), *columns]
    assert set(names) <= CONFIGS.keys()
    assert {config(name).get("group", config(name)["task"]) for name in names} == set(names)
    assert set(columns) <= set().union(*map(below, tasks_of(study)))


def test_what_is_chosen_on_dev_is_there(study):
    arguments = {argument for _, given in methods_of(study) for argument in given}
    assert set(study.get("dev", {}).get("choose", [])) <= arguments | {"seeds"}


@pytest.mark.parametrize(("name", "entry"), EXPECTED)
def test_expected_numbers_are_of_cells_of_the_study(name, entry):
    study = STUDIES[name]
    assert entry["model"] in map(pretrained, listed(study["models"]))
    given = [arguments for method, arguments in methods_of(study) if method == entry["method"]]
    asked = entry.get("arguments", {}).items()
    assert any(all(value in values(arguments.get(key)) for key, value in asked) for arguments in given)
    assert entry["values"].keys() <= set().union(columns_of(study), *map(below, tasks_of(study)))
    assert all(0 < value < 1 for value in entry["values"].values())
    assert "dev" in study or "chosen" not in entry


def test_ways_of_choosing_demonstrations_are_known(study):
    """Drawn, given by their rows, or chosen by a method; and the paper's numbers are of some of them."""
    ways = listed(study.get("demonstrations", "stratified"))
    drawn = {way for way in ways if way in how.DRAWN}
    assert all(how.read(way) is not None for way in ways if way not in drawn)
    assert {entry.get("demonstrations", ways[0]) for entry in study.get("expected", [])} <= set(ways)
    if len(ways) > 1:
        assert all("demonstrations" in entry for entry in study["expected"])


def test_the_methods_of_table_1_are_all_there():
    without, with_dev = STUDIES["deep-thinking-table1-no-dev"], STUDIES["deep-thinking-table1"]
    assert set(without["demonstrations"]) == {"stratified", *SELECTORS}
    assert set(with_dev["demonstrations"]) == {"stratified", "lens"}


@pytest.mark.parametrize(("name", "entry"), [case for case in EXPECTED if len(case.values[1]["values"]) > 2])
def test_averages_are_the_means_of_their_rows(name, entry):
    """The papers round to 0.1%, averages too. (InvICL's own, of all targets, is 42.47, and the paper has 42.4.)"""
    row, columns = entry["values"], columns_of(STUDIES[name])
    assert [*row] == [each for average, some in columns.items() for each in (*some, average)]
    for average, some in columns.items():
        assert row[average] == pytest.approx(sum(row[column] for column in some) / len(some), abs=0.0008)


def test_rows_of_a_table_are_complete():
    """As many rows as the papers' tables have for these methods, none of them twice."""
    rows = {
        name: [
            (row["model"], row["method"], str(row.get("arguments")), row.get("demonstrations"))
            for row in STUDIES[name]["expected"]
        ]
        for name in STUDIES
        if "table" in name and "expected" in STUDIES[name]
    }
    counts = {"1": 3, "1-no-dev": 12, "2": 16, "3": 14}
    counts = {f"deep-thinking-table{table}": count for table, count in counts.items()}
    counts |= {f"invicl-table{table}": count for table, count in {"2": 7, "5": 2, "6": 2, "7": 4, "8": 7}.items()}
    assert {name: len(set(found)) for name, found in rows.items()} == counts
    assert all(len(found) == len(set(found)) for found in rows.values())


@pytest.mark.parametrize("table", [2, 5, 6])
def test_metaicls_settings_are_trained_and_evaluated_on(table):
    """Each on all its targets and those in unseen domains, which are its own columns."""
    study = grid.read(f"invicl-table{table}", {})
    assert [training.name for training in study.trainings] == [*SETTINGS]
    for training, *columns in zip(study.trainings, *study.columns.values(), strict=True):
        name = f"metaicl_{training.name}"
        assert training.options["metaicl"] == training.name
        assert [*training.targets] == columns == [name, f"{name}_unseen"]


def test_the_released_codes_accuracies_are_whole_numbers_of_right_answers():
    found = STUDIES["released-code"]["expected"]
    assert [entry["arguments"] for entry in found] == [{"T": T} for T in range(1, 16)]
    for entry in found:
        right = entry["values"]["icl_sst2"] * 872
        assert right == pytest.approx(round(right), abs=872 * 0.5e-6)


def test_the_released_codes_prompt(tmp_path, monkeypatch):
    """What the authors' README prints in front of every query."""
    folder = tmp_path / "stanfordnlp" / "sst2"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        folder.joinpath(f"{split}.jsonl").write_text('{"sentence": "fine . ", "label": 1}\n')
    monkeypatch.chdir(tmp_path)
    study = STUDIES["released-code"]
    task = {**study["tasks"][0], "metadata": {"demonstrations": study["demonstrations"]}}
    manager = TaskManager(include_defaults=False, include_path=str(task_dir()))
    loaded = manager.load([{"group": "study", "task": [task]}])["tasks"]["icl_sst2"]
    loaded.set_fewshot_seed(study["seeds"])
    assert loaded.fewshot_context(loaded.eval_docs[0], num_fewshot=study["num_fewshot"]) == (
        "Review: at every opportunity to do something clever\nSentiment: positive\n\n"
        "Review: been discovered , indulged in and rejected as boring before i see this piece of crap again\n"
        "Sentiment: negative\n\nReview: fine .\nSentiment:"
    )


def test_instructions_name_all_labels_of_their_task():
    study, without = STUDIES["invicl-figure1-instructions"], STUDIES["invicl-figure1"]
    assert (study["tasks"], without["tasks"]) == ("icl_classification_instruction", "icl_classification")
    assert all(study[key] == without[key] for key in ("models", "methods", "num_fewshot", "seeds"))
    with_instruction = below("icl_classification_instruction") - {"icl_classification_instruction"}
    assert with_instruction == {f"{name}_instruction" for name in CLASSIFICATION}
    for name in with_instruction:
        *most, last = config(name.removesuffix("_instruction"))["doc_to_choice"]
        assert config(name)["description"].endswith(f" with answers({', '.join(most)} or {last}).\n\n")
