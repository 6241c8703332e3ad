"""Decision rules in a study: filters of each cell's one evaluation, rows of its table, and a choice of its dev set."""

import json
import re

import pytest

from lm_eval_icl.errors import InputError
from lm_eval_icl.studies import end, grid, run, worker
from tests.studies import running
from tests.studies.running import OPTIONS, conduct, results, rows, samples

RULES = ["contextual", "batch", "domain:n=2", "batch:of=pool:m=3", {"dcpmi": {"premise": "It was:"}}]
NAMES = ["contextual", "batch", "domain:n=2", "batch:m=3:of=pool"]
TASK = "icl_demo_unseen"


pytestmark = pytest.mark.usefixtures("own_tasks")


@pytest.fixture(scope="module")
def study(tmp_path_factory, own_tasks):
    methods = ["hf", "invicl", {"deepthink": {"T": [1, 2], "eta": 0.5}}]
    folder = tmp_path_factory.mktemp("rules") / "study"
    return conduct(folder, methods=methods, tasks=TASK, seeds=1, decide=["none", *RULES])


def test_a_cell_is_lm_evals_run_with_its_rules(study):
    """To the bit, and with no token more: nothing runs twice."""
    table = rows(study)
    for cell in study.all_cells():
        found = results(study, cell)
        decide = found["configs"][TASK]["metadata"]["decide"]
        alone = running.evaluated(study, cell, metadata={"decide": decide}, bootstrap_iters=0)
        values = [
            [(each["doc_id"], each["filter"], [[*map(str, response)] for response in each["filtered_resps"]])]
            for of_run in (samples(study, cell), alone["samples"][TASK])
            for each in of_run
        ]
        half = len(values) // 2
        assert values[:half] == values[half:] and half == 6 * OPTIONS.limit
        mine, theirs = found["config"]["icl"], alone["config"]["icl"]
        assert mine["decided"] == json.loads(json.dumps(theirs["decided"]))
        if cell.variant.method == "invicl":
            assert mine["tokens_run"] == theirs["tokens_run"]
        scores = table.loc[study.folder.results(cell)].set_index("decide").score
        assert scores.to_dict() == {
            name: alone["results"][TASK][f"acc,{name}"] for name in ["none", *mine["decided"][TASK]]
        }


def test_a_row_for_each_rule(study, tmp_path):
    columns = end.columns_of(study.study, study.leaves)
    board = end.board_of(end.results_of(study, columns), columns)
    of_method = [entry for entry in board.entries if entry.method == "invicl"]
    assert {entry.rule or "none" for entry in of_method} >= {"none", *NAMES}
    table = rows(study)
    for entry in of_method:
        rule = entry.rule or "none"
        (score,) = table[(table.method == "invicl") & (table.decide == rule)].score
        assert entry.cells[TASK].estimate.mean == pytest.approx(score)
        file, ran = re.fullmatch(r"cat > \S+ <<'EOF'\n(.*)EOF\nlm-eval-icl study (.*)", entry.command, re.S).groups()
        assert "--limit 6" in ran and "metadata" not in file
        (tmp_path / "printed.yaml").write_text(file)
        printed = grid.read(str(tmp_path / "printed.yaml"), {})
        assert printed.decide == (study.study.decide if entry.rule else (None,))
        assert [*map(str, printed.seeds)] == ["1"] and printed.tasks == study.study.tasks


def test_what_was_interrupted_goes_on_with_its_responses(study, tmp_path, monkeypatch):
    keys = {"methods": "invicl", "tasks": TASK, "seeds": 1, "decide": ["none", *RULES]}

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            conduct(tmp_path / "o", **keys)
    again = conduct(tmp_path / "o", **keys)
    (cell,) = again.all_cells()
    before = next(each for each in study.all_cells() if each.variant.method == "invicl")
    assert cell.path == before.path and samples(again, cell) == samples(study, before)
    assert again.results(cell)["config"]["icl"]["tokens_run"] == 0
    with monkeypatch.context() as patch:
        patch.setattr(worker, "Models", interrupted)  # nothing is left to run
        conduct(tmp_path / "o", **keys)


def test_the_dev_set_chooses_a_rule(tmp_path):
    dev = {"size": 12, "choose": ["T", "decide"]}
    methods = ["icl", {"deepthink": {"T": [1, 3], "eta": 0.9}}]
    decide = ["none", "contextual", "batch", {"batch": {"by": "difference"}}]
    progress = conduct(tmp_path / "study", tasks=TASK, seeds=1, decide=decide, dev=dev, methods=methods)
    names = ["none", "contextual", "batch", "batch:by=difference"]
    table = rows(progress).reset_index()
    tested = [cell for cell in progress.all_cells() if cell.split == "test"]
    assert [cell.chosen for cell in tested] == [("decide",), ("T", "decide")]
    for cell, numbers in zip(tested, ([None], [1, 3]), strict=True):
        of_method = [each for each in progress.all_cells() if each.variant.method == cell.variant.method]
        curve = {
            (each.variant.arguments.get("T"), name): progress.results(each)["results"][TASK][f"acc,{name}"]
            for each in of_method
            if each.split == "dev"
            for name in names
        }
        best = next(key for key, score in curve.items() if score == max(curve.values()))
        choice = progress.record()["choices"][cell.path]
        assert [(each["arguments"].get("T"), each["arguments"]["decide"]) for each in choice["curve"]] == [*curve]
        assert [each["score"] for each in choice["curve"]] == pytest.approx([*curve.values()])
        assert (choice["chosen"].get("T"), choice["chosen"]["decide"]) == best and best[0] in numbers
        of_cell = table[(table.method == cell.variant.method) & (table.split == "test")]
        assert of_cell[of_cell.chosen].decide.tolist() == [best[1]]
        of_dev = table[(table.method == cell.variant.method) & (table.split == "dev") & table.chosen]
        assert of_dev.decide.tolist() == [best[1]] and of_dev.score.tolist() == pytest.approx([max(curve.values())])
    columns = end.columns_of(progress.study, progress.leaves)
    tested = [
        (cell, end._under_chosen_rule(progress, cell, one))
        for cell, one in end.results_of(progress, columns)
        if cell.split == "test"
    ]
    entries = end.board_of(tested, columns).entries
    said = sorted((entry.method, entry.rule or "none") for entry in entries)
    assert said == [("deepthink", "chosen on dev"), ("icl", "chosen on dev"), ("icl", "none")]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"decide": "contextal"}, "decide=contextal: .* did you mean 'contextual'"),
        ({"decide": "knn:m=2"}, "decide: knn:m=2 reads what .* lm_eval --metadata decide=knn:m=2"),
        ({"decide": ["pmi", "pmi"]}, "decide: pmi is there twice"),
        ({"decide": "batch:of=pool:m=1000"}, "task 'icl_demo_short': decide=batch:m=1000:of=pool: m=1000: only"),
        ({"metadata": {"decide": "batch"}}, r"metadata: decide=batch: .* give decide: \[none, batch\]"),
        ({"decide": "batch:by=difference", "metric": "acc_norm"}, "acc_norm means nothing under decide=batch:by="),
    ],
)
def test_what_is_refused_before_anything_runs(keys, said, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "Models", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(InputError, match=said):
        conduct(tmp_path / "o", **{"methods": "icl", **keys})
