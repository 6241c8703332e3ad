"""Studies in which the models choose the demonstrations.

Each choice is made once, and all methods have it.
"""

import pytest
import transformers

from lm_eval_icl.demonstrations.chooser import Chooser
from lm_eval_icl.demonstrations.selectors import Herding
from lm_eval_icl.harness.model_choices import PoolOfTask
from lm_eval_icl.methods import ICL, Predictor
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.studies.unit_runner import Options
from tests.studies import running

OPTIONS = Options("cpu", 8, 3)

pytestmark = [pytest.mark.usefixtures("own_tasks"), pytest.mark.slow]


def opened(output, **keys):
    return running.opened(output, OPTIONS, **{"methods": "icl", **keys})


def conduct(output, **keys):
    return running.conduct(output, OPTIONS, **{"methods": "icl", **keys})


@pytest.fixture
def chosen(monkeypatch) -> list[tuple[str, int]]:
    """What was chosen, by which method and for which seed."""
    found = []
    choose = Chooser.choose

    def counted(self, how, n, seed):
        found.append((how.name, seed))
        return choose(self, how, n, seed)

    monkeypatch.setattr(Chooser, "choose", counted)
    return found


def test_all_methods_have_the_one_choice_of_the_model(tmp_path, chosen):
    study = conduct(
        tmp_path / "o", methods=["hf", "invicl"], orders=2, demonstrations="herding:unit=True"
    )
    assert chosen == [("herding", 0), ("herding", 1)]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path())
    predictor = Predictor(model, transformers.AutoTokenizer.from_pretrained(model_path()), ICL())
    pool = PoolOfTask(study.grid.tasks["icl_demo_short"].loaded)
    expected = Chooser(pool, predictor, 5000).choose(Herding(unit=True), 3, 1)
    rows: dict = {}
    for said in [study.facts(cell) for cell in study.cells()]:
        rows.setdefault((said["seed"], said["order"]), set()).add(tuple(said["indices"]))
        assert said["demonstrations"] == "herding:unit=True"
        assert {"picked", "tokens"} <= said["choice"].keys()
    assert len(rows) == 4 and all(len(each) == 1 for each in rows.values())  # `hf` too
    assert rows[1, 0] == {expected.indices} != rows[1, 1]
    del chosen[:]
    conduct(tmp_path / "o", methods="pcw", seeds=0, demonstrations={"herding": {"unit": True}})
    assert not chosen  # they are kept


def test_nothing_of_the_dev_set_is_chosen(tmp_path):
    study = conduct(
        tmp_path / "o",
        methods={"deepthink": {"T": [1, 2]}},
        demonstrations=["random", "herding"],
        dev={"size": 150, "choose": ["T", "seeds"]},
    )
    task = study.grid.tasks["icl_demo_short"]
    pool = task.loaded.sampler.df
    documents = list(task.dev.values())
    every = [study.facts(cell) for cell in study.cells()]
    assert {said["split"] for said in every if said["demonstrations"] == "herding"} == {
        "dev",
        "test",
    }
    assert not any(pool[i] in documents for said in every for i in said["indices"])
