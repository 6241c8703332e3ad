"""Studies: every cell is the cell run alone, and what is shared is shared.

What was interrupted goes on.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.tasks import ICLTask
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.studies import cell_tasks, plan, unit_runner
from lm_eval_icl.studies.conduct import READY
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.unit_runner import Options, UnitRunner
from tests import commands
from tests.studies import running
from tests.studies.running import COUNTS, DEMO, Ran, conduct, opened, write

pytestmark = [pytest.mark.usefixtures("own_tasks"), pytest.mark.slow]


@pytest.fixture(scope="module")
def study(tmp_path_factory, own_tasks) -> Ran:
    """A study with everything that is shared: methods, orders, passes; and lm-eval's own models."""
    deepthink = {"deepthink": {"T": "1..3", "eta": [0.1, 0.5]}}
    methods = ["hf", "icl", "invicl", "saicl", "batchicl", deepthink]
    return conduct(tmp_path_factory.mktemp("study") / "study", methods=methods, orders=2)


def test_every_cell_is_that_cell_run_alone(study, tmp_path):
    """Also through a task that draws the demonstrations; and those of another order by indices."""
    assert len(study.cells()) == (5 + 6) * 2 * 2
    for cell in study.cells(seed=1):
        results = study.results(cell)
        facts = study.facts(cell)
        assert facts["seed"] == cell.seed
        assert facts["order"] == cell.order
        assert facts["split"] == "test"
        file = tmp_path / "demonstrations.json"
        file.write_text(json.dumps(facts["indices"]))
        metadata = {"demonstrations": str(file)} if cell.order else {}
        alone = running.evaluated(study, cell, metadata=metadata)
        assert results["results"][cell.task]["acc,none"] == alone["results"][cell.task]["acc,none"]
        mine = study.samples(cell)
        theirs = alone["samples"][cell.task]
        running.assert_alike(mine, theirs)
        for key in ("doc_id", "doc_hash", "prompt_hash", "target_hash", "target", "acc"):
            values = [str(sample[key]) for sample in mine]
            assert values == [str(sample[key]) for sample in theirs], key
        # All that a run alone says is said here too.
        icl = alone["config"].get("icl", {})
        for key in icl.keys() - COUNTS:
            assert results["config"]["icl"][key] == icl[key], key


def test_invariant_methods_encode_and_score_orders_once(study):
    """Two forward passes for an invariant method, and twice as many for one that is not."""
    passes = {}
    for cell in study.cells():
        shared = study.facts(cell)["shared"]
        if cell.variant.arguments.get("T") != 1:
            passes[cell.variant.method] = (shared.get("passes"), shared["cells"])
    assert passes["invicl"] == (2, 2)
    assert passes["icl"] == (4, 2)
    # Of two orders, the context is read once for each T, since each goes on from the one before.
    # T=1 runs by itself.
    assert passes["deepthink"] == (2 * (3 + 2), 2 * 2)


def test_the_number_of_passes_is_each_cells_own(tmp_path, checkpoint):
    """Also if texts are generated, if one pass has other prompts than several, and of some T."""
    folder = Path(own_task(tmp_path, "said")).parent
    texts_too = [{"metric": "exact_match"}]
    progress = conduct(
        tmp_path / "o",
        Options("cpu", 4, 3),
        str(folder),
        models=f"pretrained={checkpoint('llama')},overflow=drop,max_length=360",
        methods={"deepthink": {"T": [1, 3, 5], "eta": 0.9}},
        tasks=[{"task": "icl_demo_long", "metric_list": texts_too}, "said"],
        metric="exact_match",
    )
    left_out = {}
    for cell in progress.cells():
        T = cell.variant.arguments["T"]
        icl = progress.results(cell)["config"]["icl"]
        alone = running.evaluated(progress, cell, folder if cell.task == "said" else "demo")
        assert icl["T"] == alone["config"]["icl"]["T"] == T
        assert icl["left_out"] == alone["config"]["icl"]["left_out"]
        mine = progress.samples(cell)
        theirs = alone["samples"][cell.task]
        if cell.task == "said":
            texts = [sample["resps"] for sample in mine]
            assert texts == [sample["resps"] for sample in theirs]
        else:
            running.assert_alike(mine, theirs)
            left_out[T] = icl["left_out"]
    assert left_out[1] != left_out[3] == left_out[5] != {}


def test_prompts_fit_under_all_methods(tmp_path):
    """With `fits`, every method and every order loses the same demonstrations of a long prompt."""
    keys = {
        "models": f"{DEMO['models']},max_length=100",
        "tasks": "icl_demo_long",
        "methods": ["icl", "pcw", {"invicl": {"positions": "sequential"}}],
        "orders": 2,
        "seeds": 0,
    }

    def lost(study):
        return [study.results(cell)["config"]["icl"].get("left_out") for cell in study.cells()]

    apart = lost(conduct(tmp_path / "apart", **keys))
    together = conduct(tmp_path / "o", **keys, fits={"invicl": {"positions": "sequential"}})
    assert apart[0] != apart[-1] != {}
    assert lost(together) == [apart[-1]] * 6
    facts = together.results(together.cells()[0])["config"]["icl"]
    assert facts["fits"] == "invicl,positions=sequential"
    # Their orders can then be compared, since both have the same demonstrations.
    shown = {}
    for cell in together.cells():
        prompts = [sample["arguments"]["gen_args_0"]["arg_0"] for sample in together.samples(cell)]
        shown.setdefault(cell.order, prompts)
    assert shown[0] != shown[1]


# The dev set.

DEV = {
    "dev": {"size": 12, "choose": ["T", "eta"]},
    "methods": ["icl", {"deepthink": {"T": "1..4", "eta": [0.2, 0.9]}}],
}


def test_the_dev_set_decides_and_the_test_labels_do_not(tmp_path, monkeypatch):
    progress = conduct(tmp_path / "study", tasks="icl_demo_unseen", **DEV)
    choices = progress.choices()
    several = [candidates for candidates in progress.grid.alternatives if len(candidates) > 1]
    assert len(choices) == 2  # of deepthink, one a seed
    for (cell,), candidates in zip(choices, several, strict=True):
        assert len(candidates) == 8
        # Of equal ones, the first.
        best = max(candidates, key=lambda candidate: progress.score(candidate.dev[0]))
        assert cell.variant.name == best.test[0].variant.name
        assert cell.seed == candidates[0].test[0].seed
    tested = progress.cells(split="test")
    assert len(tested) == 2 + 2
    for cell in tested:
        chosen = progress.facts(cell).get("chosen")
        assert chosen == (["T", "eta"] if cell.variant.method == "deepthink" else None)

    before = ICLTask.test_docs

    def wrong_labels(task):
        rows = before(task)
        if task.config.test_split == "dev":
            return rows
        return rows.map(lambda _: {"label": rows[0]["label"]})

    monkeypatch.setattr(ICLTask, "test_docs", wrong_labels)
    other = conduct(tmp_path / "other", tasks="icl_demo_unseen", **DEV)
    assert [cell.variant for (cell,) in other.choices()] == [cell.variant for (cell,) in choices]
    scores = [progress.score(cell) for cell in tested]
    assert scores != [other.score(cell) for cell in other.cells(split="test")]


def test_dev_documents_are_of_the_training_split_and_no_demonstrations(tmp_path):
    def task_of(size):
        keys = {"methods": "icl", "seeds": "0..5", "dev": {"size": size}}
        return opened(tmp_path / "o", Options("cpu", 8), **keys).grid.tasks["icl_demo_short"]

    task = task_of(20)
    pool = list(task.loaded.sampler.df)
    rows = task.loaded.training_docs()
    used = []
    for seed in range(6):
        used += [pool[i] for i in cell_tasks.draw(task, 3, None, seed)]
    assert len(task.dev) == 20
    for i, document in task.dev.items():
        assert rows[i] == document
        assert document not in used
    assert list(task_of(7).dev.items()) == list(task.dev.items())[:7]


FOLDER_TASK = r"""
dataset_path: json
dataset_kwargs: {data_files: {train: FOLDER/data.jsonl, test: FOLDER/test.jsonl}}
training_split: train
test_split: test
fewshot_split: train
"""
OWN = r"""
task: own
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [bad, good]
doc_to_target: label
"""
SAID = r"""
task: said
class: !function lm_eval_icl.harness.tasks.ICLTask
output_type: generate_until
doc_to_text: "Review: {{text}}\nSentiment:"
doc_to_target: "{{label}}"
generation_kwargs: {until: ["\n\n"], max_gen_toks: 4, do_sample: false}
"""


def own_task(folder: Path, name: str) -> str:
    """The file of a task.

    It is lm-eval's, "own", with new demonstrations for every document; or ours, "said".
    """
    for file, first in (("data", 0), ("test", 20)):
        rows = [json.dumps({"text": f"film {i}", "label": i % 2}) for i in range(first, first + 20)]
        (folder / f"{file}.jsonl").write_text("\n".join(rows))
    data = FOLDER_TASK.replace("FOLDER", str(folder))
    (folder / "own.yaml").write_text(data + OWN)
    (folder / "said.yaml").write_text(data + SAID)
    return str(folder / f"{name}.yaml")


def test_a_dev_set_needs_demonstrations_that_are_not_in_it(tmp_path):
    keys = {"tasks": own_task(tmp_path, "own"), "methods": "icl", "dev": {"size": 5}}
    refused = "dev: task 'own' draws other demonstrations for every doc"
    with pytest.raises(InputError, match=refused):
        opened(tmp_path / "o", **keys)
    assert len(opened(tmp_path / "o", **keys, num_fewshot=0).grid.tasks["own"].dev) == 5


# A study that is there, grows, or was stopped.


def command(file: str, output: Path) -> list[str]:
    return ["study", file, "--output", str(output), "--device", "cpu", "--limit", "6"]


def test_a_task_that_has_changed_has_other_cells(tmp_path):
    """Of its documents, its prompts, or the rows that a file says are its demonstrations."""
    task = Path(own_task(tmp_path, "own"))
    data = tmp_path / "data.jsonl"
    file = tmp_path / "rows.json"
    file.write_text("[5, 6, 7]")

    def cells_after(**keys) -> int:
        conduct(tmp_path / "o", methods="icl", seeds=0, **keys)
        return len(list((tmp_path / "o").glob("cells/**/results_*")))

    assert cells_after(tasks=str(task)) == 1
    assert cells_after(tasks=str(task)) == 1
    assert cells_after(demonstrations=str(file)) == 2
    assert cells_after(demonstrations=str(file)) == 2
    file.write_text("[5, 7, 6]")
    assert cells_after(demonstrations=str(file)) == 3
    was = data.read_text()
    data.write_text(was.replace("film 2", "movie 2"))
    assert cells_after(tasks=str(task)) == 4
    data.write_text(was)
    assert cells_after(tasks=str(task)) == 4
    task.write_text(task.read_text().replace("{{text}}", "{{text}}!"))
    assert cells_after(tasks=str(task)) == 5


def times(study: Path) -> dict[Path, int]:
    """When the files of the cells were written."""
    return {path: path.stat().st_mtime_ns for path in study.glob("cells/**/*.json*")}


def test_a_finished_cell_is_never_written_again(tmp_path):
    """Not by the end of a study, nor by another with other numbers of a paper; --rerun does."""
    output = tmp_path / "o"

    def run(expected: float, *more: str) -> None:
        keys = {"methods": ["icl", "pcw"], "expected": {"values": {"icl_demo_short": expected}}}
        commands.run(*command(write(tmp_path / "s.yaml", seeds=0, **keys), output), *more)

    run(0.5)
    before = times(output)
    cells = json.loads((output / "study.json").read_text())["cells"]
    results = {path for path in before if path.suffix == ".json"}
    assert {output / path for path in cells} == results
    for facts in cells.values():
        assert facts == {"expected": {"icl_demo_short": 0.5}, "metric": "acc"}
    run(0.6)
    assert times(output) == before
    assert "0.6" in (output / "study.json").read_text()
    run(0.6, "--rerun", "cells/*/pcw/*")
    again = {path for path, when in times(output).items() if before.get(path) != when}
    assert again == {path for path in before if "/pcw/" in str(path)}
    assert len(again) == 2


def test_other_methods_by_the_command(tmp_path, capsys):
    """Those of the file stay as they are there; and nothing is run."""
    methods = ["icl", {"deepthink": {"T": [1, 2]}}, "pcw"]
    file = write(tmp_path / "s.yaml", methods=methods, dev={"choose": "T", "size": 5})
    line = ["study", file, "--dry_run", "--verbose", "--limit", "6"]
    commands.run(*line, "--methods", "deepthink,invicl")
    said = capsys.readouterr().out
    assert "6 cells on the dev set: missing" in said
    assert "2 cells on the test set: waiting for others" in said
    # Two cells on the dev set, and the two that stand for the chosen ones: the last candidate's.
    assert said.count("/deepthink,T=2/") == 2 + 2
    assert said.count("/invicl/") == 2 + 2
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


# What fails.


def test_a_rerun_that_fails_loses_nothing(tmp_path, monkeypatch):
    line = command(write(tmp_path / "s.yaml", methods="icl", seeds=0), tmp_path / "o")
    commands.run(*line)
    before = running.files_of(tmp_path / "o")
    with monkeypatch.context() as patched:
        patched.setattr(unit_runner, "answer", lambda *_: 1 / 0)
        assert "1 of 1 cells failed" in commands.refused(*line, "--rerun")
    assert running.files_of(tmp_path / "o") == before != {}


def test_a_failed_study_ends_with_status_1_and_says_why(tmp_path, monkeypatch, capsys):
    def broken(self, *args, **kwargs):
        raise RuntimeError("no room")

    file = write(tmp_path / "s.yaml", methods=["icl", "hf"], seeds=0)
    line = command(file, tmp_path / "o")
    with monkeypatch.context() as patched:
        patched.setattr(MethodRunner, "score", broken)
        said = commands.refused(*line)
    assert said.startswith("1 of 2 cells failed; the first: RuntimeError: no room")
    assert "hf" in capsys.readouterr().out
    ((path, why),) = json.loads((tmp_path / "o/study.json").read_text())["failures"].items()
    assert path.startswith("cells/")
    assert "/icl/" in path
    assert "no room" in why
    commands.run(*line, "--status")
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["1 cells on the test set: failed", "1 cells on the test set: done"]
    assert said[2].startswith(f"failed: {path}: RuntimeError: no room")
    commands.run(*line)
    assert json.loads((tmp_path / "o/study.json").read_text())["failures"] == {}


def test_one_process_at_a_time_writes_a_folder(tmp_path, capsys):
    """`--status` goes on."""
    file = write(tmp_path / "s.yaml", methods="icl", seeds=0)
    line = command(file, tmp_path / "o")
    (tmp_path / "o/cells").mkdir(parents=True)
    with StudyFolder(tmp_path / "o").locked():
        assert "another process runs a study in this folder" in commands.refused(*line)
        commands.run(*line, "--status")
        assert capsys.readouterr().out == "1 cells on the test set: missing\n"
    commands.run(*line)
    commands.run(*line, "--status")
    assert capsys.readouterr().out.endswith("1 cells on the test set: done\n")


# Named studies, and what cannot be.


REFUSED = yaml.safe_load("""
"models: give it in the file, or --model_args pretrained=....":
  {models: null}
"seeds='x': must be a whole number, 0 or more.":
  {seeds: x}
"methods: invcl: unknown method 'invcl': did you mean 'invicl'?":
  {methods: invcl}
"methods: deepthink: the range 3..1 is empty.":
  {methods: {deepthink: {T: 3..1}}}
"dev: choose: no method of this study has the argument 'T'.":
  {dev: {choose: T}}
"dev: choose: 'T': deepthink is listed twice with several values: list them once.":
  {methods: [{deepthink: {T: 1..2}}, {deepthink: {T: 3..4}}], dev: {choose: T}}
"expected: methox: 'hf': there is no such key; docs/studies.md has all keys.":
  {expected: {methox: hf, values: {icl_demo_short: 0.5}}}
"models: resources: gpus: ":
  {models: {pretrained: m, resources: {gpus: 1}}}
"metadata: decide: is a key of the study itself: give it there.":
  {metadata: {decide: batch}}
"models: model argument 'momentum' belongs to deepthink, not to this method.":
  {models: "pretrained=m,momentum=0.9"}
"fits: hf cuts long prompts in its own way: leave hf out of the study.":
  {methods: hf, fits: icl}
"taskz: 't': there is no such key; did you mean 'tasks'?":
  {tasks: null, taskz: t}
""")


def test_a_key_that_is_given_twice_is_refused(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("methods: icl\nseeds: 0\nmethods: pcw\n")
    said = commands.refused("study", file, "--output", tmp_path / "o")
    assert said == f"{file}: cannot be read as YAML (YAMLError: methods is given twice)."


@pytest.mark.parametrize("says", REFUSED)
def test_a_file_that_cannot_be_is_refused_in_one_line(tmp_path, says):
    file = write(tmp_path / "s.yaml", **{"methods": "icl", **REFUSED[says]})
    assert commands.refused("study", file, "--output", tmp_path / "o").startswith(f"{file}: {says}")
    assert not (tmp_path / "o").exists()


NOT_RUN = yaml.safe_load("""
"tasks: there is no task 'icl_demo_shrt': did you mean 'icl_demo_short'?":
  {tasks: icl_demo_shrt}
"tasks: icl_demo: is a group: change each of its tasks by itself.":
  {tasks: {task: icl_demo, num_fewshot: 2}}
"columns: 'icl_demo_shrt': did you mean 'icl_demo_short'?":
  {columns: icl_demo_shrt}
"orders: 7: task 'icl_demo_short' has 3 demonstrations: give fewer orders.":
  {orders: 7}
"decide: knn:m=2 needs more than a study keeps":
  {decide: "knn:m=2"}
""")


@pytest.mark.parametrize("says", NOT_RUN)
def test_a_study_that_cannot_be_run_is_refused_before_a_model_is_loaded(
    tmp_path, monkeypatch, says
):
    monkeypatch.setattr(UnitRunner, "load", lambda *_: pytest.fail("a model was loaded"))
    file = write(tmp_path / "s.yaml", methods="icl", seeds=0, **NOT_RUN[says])
    assert says in commands.refused("study", file, "--output", tmp_path / "o", "--device", "cpu")
    assert not list(tmp_path.glob("o/cells/*"))


def test_a_dry_run_is_what_is_run(tmp_path, capsys):
    """Cells and documents of what is missing; nothing is written."""
    methods = ["hf", "icl", {"deepthink": {"T": "1..4"}}]
    file = write(tmp_path / "s.yaml", methods=methods, orders=2)
    line = ["study", file, "--limit", "9", "--device", "cpu"]
    line += ["--output", tmp_path / "o", "--dry_run"]
    commands.run(*line)
    said = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]
    assert "24 cells on the test set: missing" in said
    planned = re.search(r": 24 cells, (\d+) documents, ([\d.]+) to ([\d.]+) minutes by two", said)
    assert int(planned[1]) == 24 * 9
    assert 0 <= float(planned[2]) <= float(planned[3]) < 10
    conduct(tmp_path / "o", Options("cpu", 8, 9), methods=methods, orders=2)
    commands.run(*line)
    assert capsys.readouterr().out == "24 cells on the test set: done\n"


def test_the_seconds_of_a_plan(tmp_path, monkeypatch):
    """A unit takes 2 seconds for demonstrations and 0.5 for each document: at least 2 + 0.5 n.

    At most it takes n times the 0.75 that each of eight documents took.
    """
    methods = ["icl", "pcw"]
    study = running.opened(tmp_path / "o", Options("cpu", 8, 40), methods=methods, seeds=[0])
    seconds = {"icl": (4.0, 6.0), "pcw": (1.0, 1.0)}

    def trial(runner, unit, documents):
        return seconds[unit[0].variant.method][documents == 8]

    monkeypatch.setattr(plan, "trial", trial)
    n = plan.documents_of(study.grid, study.cells(READY)[0])
    assert n == 40
    low, high = plan.seconds(study.grid, None, study.cells(READY))
    assert low == pytest.approx(2 + 0.5 * n + 1.0)
    assert high == pytest.approx((6 + 1) * n / 8)


def test_a_plan_tries_one_step_of_learning(tmp_path, monkeypatch):
    """A step of both orders takes 7 seconds; the last queries run after 20 of 30 steps."""
    methods = [{"ctkv": {"steps": 30, "after": [5, 20]}}]
    options = Options("cpu", 8, 8)
    study = running.opened(tmp_path / "o", options, methods=methods, seeds=[0], orders=2)
    tried = []

    def trial(runner, unit, documents):
        afters = {cell.variant.make().after for cell in unit}
        tried.append((afters, [cell.order for cell in unit], documents))
        return 3 + 7 * max(afters)

    monkeypatch.setattr(plan, "trial", trial)
    low, high = plan.seconds(study.grid, None, study.cells(READY))
    assert tried == [({0}, [0, 1], 4), ({0}, [0, 1], 8), ({1}, [0, 1], 4)]
    assert low == high == 3 + 7 * 20


def test_a_dry_run_refuses_what_cannot_be_run(tmp_path, capsys):
    """And says the rest: prompts that do not fit, under overflow=error and a method of our own."""
    gated = tmp_path / "gated"
    gated.mkdir()
    narrow = f"{DEMO['models']},max_length=60,overflow=error"
    models = [narrow, f"pretrained={gated}"]
    keys = {"models": models, "num_fewshot": 6, "methods": ["icl", "pcw"]}
    said = commands.refused("study", write(tmp_path / "s.yaml", **keys), "--dry_run", "--limit", 6)
    assert said.endswith(f"{gated}: cannot be run as it is, for the reasons above.")
    said = capsys.readouterr().out
    assert "do not fit the model's 60 positions" in said
    assert "gated: 4 cells, 24 documents that cannot be run" in said
    assert f"pretrained='{gated}': the folder has no checkpoint" in said


def test_a_method_that_the_model_cannot_run_fails_its_cells_alone(tmp_path, monkeypatch):
    """And the same command tries again."""
    answer = unit_runner.answer

    def fails(lm, *args):
        if getattr(lm, "method", None) is not None and lm.method.name == "invicl":
            raise InputError("needs another model")
        return answer(lm, *args)

    keys = {"methods": ["icl", "invicl", "pcw"], "orders": 2}
    with monkeypatch.context() as patched:
        patched.setattr(unit_runner, "answer", fails)
        study = conduct(tmp_path / "o", may_fail=True, **keys)
    assert {cell.variant.method for cell in study.cells()} == {"icl", "pcw"}
    assert len(study.cells()) == 8
    assert len(study.failed) == 4
    assert all(why.endswith("invicl: needs another model") for why in study.failed.values())
    assert len(conduct(tmp_path / "o", **keys).cells()) == 12
