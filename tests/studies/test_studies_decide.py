"""Decision rules in a study: filters of each cell's one evaluation, rows of its table, and a choice of its dev set."""

import pytest

from lm_eval_icl.studies import end
from tests.studies import running
from tests.studies.running import OPTIONS, conduct

RULES = [
    "contextual",
    "batch",
    "domain:n=2",
    "batch:of=pool:m=3",
    {"dcpmi": {"premise": "It was:"}},
]
NAMES = ["contextual", "batch", "domain:n=2", "batch:m=3:of=pool"]
TASK = "icl_demo_unseen"


pytestmark = pytest.mark.usefixtures("own_tasks")


@pytest.fixture(scope="module")
def study(tmp_path_factory, own_tasks):
    methods = ["hf", "invicl", {"deepthink": {"T": [1, 2], "eta": 0.5}}]
    folder = tmp_path_factory.mktemp("rules") / "study"
    return conduct(folder, methods=methods, tasks=TASK, seeds=1, decide=["none", *RULES])


def test_a_cell_is_lm_evals_run_with_its_rules(study):
    """Up to rounding, and with no token more: nothing runs twice."""
    for cell in study.cells():
        found = study.results(cell)
        decide = found["configs"][TASK]["metadata"]["decide"]
        alone = running.evaluated(study, cell, metadata={"decide": decide}, bootstrap_iters=0)
        mine = study.samples(cell)
        theirs = alone["samples"][TASK]
        assert len(mine) == 6 * OPTIONS.limit
        for one, other in zip(mine, theirs, strict=True):
            assert one["doc_id"] == other["doc_id"]
            assert one["filter"] == other["filter"]
            for (value, greedy), (their, said) in zip(
                one["filtered_resps"], other["filtered_resps"], strict=True
            ):
                assert float(value) == pytest.approx(float(their), abs=1e-5)
                assert str(greedy) == str(said)
        decided = found["configs"][TASK]["metadata"]["decided"]
        assert decided.keys() == alone["configs"][TASK]["metadata"]["decided"].keys()
        if cell.variant.method == "invicl":
            assert found["config"]["icl"]["tokens_run"] == alone["config"]["icl"]["tokens_run"]
        for name in ["none", *decided]:
            assert study.score(cell, name) == alone["results"][TASK][f"acc,{name}"]


def test_the_dev_set_chooses_a_rule(tmp_path):
    dev = {"size": 12, "choose": ["T", "decide"]}
    methods = ["icl", {"deepthink": {"T": [1, 3], "eta": 0.9}}]
    decide = ["none", "contextual", "batch", {"batch": {"by": "difference"}}]
    progress = conduct(
        tmp_path / "study", tasks=TASK, seeds=1, decide=decide, dev=dev, methods=methods
    )
    names = ["none", "contextual", "batch", "batch:by=difference"]
    tested = [cell for cell in progress.cells() if cell.split == "test"]
    assert [cell.chosen for cell in tested] == [("decide",), ("T", "decide")]
    for cell, numbers in zip(tested, ([None], [1, 3]), strict=True):
        of_this_method = [
            each for each in progress.cells() if each.variant.method == cell.variant.method
        ]
        curve = {
            (each.variant.arguments.get("T"), name): progress.results(each)["results"][TASK][
                f"acc,{name}"
            ]
            for each in of_this_method
            if each.split == "dev"
            for name in names
        }
        best = next(key for key, score in curve.items() if score == max(curve.values()))
        assert (cell,) in progress.choices()
        assert (cell.variant.arguments.get("T"), cell.rule or "none") == best
        assert best[0] in numbers
        said = progress.facts(cell)
        assert said["chosen"] == list(cell.chosen)
        assert said.get("rule", "none") == best[1]
    columns = end.columns_of(progress.study, progress.grid.tasks)
    entries = end.board_of(end.results_of(progress.folder, tested), columns).entries
    said = sorted((entry.method, entry.rule or "none") for entry in entries)
    assert said == [("deepthink", "chosen on dev"), ("icl", "chosen on dev"), ("icl", "none")]
