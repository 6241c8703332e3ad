"""Decision rules in a study.

They are filters of each cell's one evaluation, rows of its table, and a choice of its dev set.
"""

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


pytestmark = pytest.mark.usefixtures("own_tasks", "tried_once")


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
            pairs = zip(one["filtered_resps"], other["filtered_resps"], strict=True)
            for (value, greedy), (their_value, their_greedy) in pairs:
                assert float(value) == pytest.approx(float(their_value), abs=1e-5)
                assert str(greedy) == str(their_greedy)
        decided = found["configs"][TASK]["metadata"]["decided"]
        assert decided.keys() == alone["configs"][TASK]["metadata"]["decided"].keys()
        if cell.variant.method == "invicl":
            assert found["config"]["icl"]["tokens_run"] == alone["config"]["icl"]["tokens_run"]
        for name in ["none", *decided]:
            assert study.score(cell, name) == alone["results"][TASK][f"acc,{name}"]


CHOSEN_RULES = ["none", "contextual", "batch", "batch:by=difference"]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory, own_tasks):
    """A study whose dev set chooses the rule and T, of icl and deepthink in this order."""
    folder = tmp_path_factory.mktemp("chosen") / "study"
    return conduct(
        folder,
        tasks=TASK,
        seeds=1,
        decide=["none", "contextual", "batch", {"batch": {"by": "difference"}}],
        dev={"size": 12, "choose": ["T", "decide"]},
        methods=["icl", {"deepthink": {"T": [1, 3], "eta": 0.9}}],
    )


def scores_on_dev(study, method):
    """(T, rule) -> the accuracy on the dev set, in the order of the candidates."""
    scores = {}
    for cell in study.cells(split="dev"):
        if cell.variant.method == method:
            for rule in CHOSEN_RULES:
                scores[cell.variant.arguments.get("T"), rule] = study.score(cell, rule)
    return scores


def test_the_dev_set_chooses_a_rule(chosen):
    icl, deepthink = chosen.cells(split="test")
    assert icl.chosen == ("decide",)
    assert deepthink.chosen == ("T", "decide")
    for cell, numbers in ((icl, {None}), (deepthink, {1, 3})):
        scores = scores_on_dev(chosen, cell.variant.method)
        assert {T for T, _ in scores} == numbers
        T, rule = max(scores, key=lambda candidate: scores[candidate])  # of equals, the first
        assert (cell,) in chosen.choices()
        assert cell.variant.arguments.get("T") == T
        assert (cell.rule or "none") == rule
        facts = chosen.facts(cell)
        assert facts["chosen"] == list(cell.chosen)
        assert facts.get("rule", "none") == rule


def test_rows_under_a_chosen_rule(chosen):
    columns = end.columns_of(chosen.study, chosen.grid.tasks)
    results, _ = end.results_of(chosen.folder, chosen.cells(split="test"))
    entries = end.board_of(results, columns).entries
    rows = sorted((entry.method, entry.rule or "none") for entry in entries)
    assert rows == [("deepthink", "chosen on dev"), ("icl", "chosen on dev"), ("icl", "none")]
