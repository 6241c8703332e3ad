"""`demonstrations=HOW` in a run: its model chooses, once for all methods, before anything else is
run."""

import functools
import re
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from lm_eval_icl.demonstrations.chooser import Chooser
from lm_eval_icl.demonstrations.how import read
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness import model_choices as choosing
from lm_eval_icl.harness.model_choices import PoolOfTask
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.methods import ICL, Predictor
from tests import evaluation, tiny

TASK = evaluation.choice("chosen", "no", "yes")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LM_EVAL_ICL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "demonstrations"


@pytest.fixture
def chosen(monkeypatch) -> list[str]:
    """The methods that have chosen, one entry a choice."""
    methods = []
    choose = Chooser.choose

    def counted(self, how, *args, **kwargs):
        methods.append(how)
        return choose(self, how, *args, **kwargs)

    monkeypatch.setattr(Chooser, "choose", counted)
    return methods


def loaded(how, task=TASK):
    return evaluation.load_task(task, demonstrations=how)


@functools.cache
def model(name, path, batch_size=4):
    return model_class(name)(str(path), device="cpu", batch_size=batch_size)


def choose(lm, how, *, task=TASK, n=3, seed=0):
    """What a run's model chooses at its start."""
    of_task = loaded(how, task)
    of_task.set_config("num_fewshot", n)
    of_task.set_fewshot_seed(seed)
    return choosing.give_chosen(lm, [of_task]).get(task["task"])


def run(name, path, how):
    """A whole run: what is said of the choice, and the prompts."""
    metadata = {"demonstrations": how}
    results = evaluation.run(
        name, path, [TASK], 3, metadata=metadata, limit=2, fewshot_random_seed=0
    )
    prompts = [sample["arguments"][0][0] for sample in results["samples"]["chosen"]]
    return results["config"].get("icl", {}).get("chosen", {}).get("chosen"), prompts


@pytest.fixture(scope="module")
def pool():
    return PoolOfTask(loaded("stratified"))


def test_what_select_chooses_and_once_for_all_methods(checkpoint, cache, chosen, pool):
    path = checkpoint("gpt2")
    how = read("herding")
    first, prompts = run("invicl", path, "herding")
    expected = Chooser(pool, Predictor(*tiny.load(path), ICL()), 5000).choose(how, 3, 0)
    assert chosen == [how] * 2
    assert first["indices"] == list(expected.indices) and first["picked"] == list(expected.picked)
    assert (
        first["how"] == "herding" and first["made_now"] and first["tokens"] == expected.tokens > 0
    )
    text = "".join(pool.demonstration(row) for row in expected.indices)
    assert all(prompt.startswith(text) for prompt in prompts)
    second, again = run("icl", path, {"herding": {}})
    assert len(chosen) == 2 and again == prompts
    assert not second.pop("made_now") and second == {
        key: value for key, value in first.items() if key != "made_now"
    }
    assert len(list(cache.iterdir())) == 1


def test_anything_that_matters_makes_another_choice(checkpoint, cache, chosen):
    lm = model("icl", checkpoint("gpt2"))

    def another(expected, *args, **kwargs):
        before = len(chosen)
        choose(*args, **kwargs)
        assert len(chosen) - before == expected, (args, kwargs)

    another(1, lm, "herding:unit=True")
    another(0, lm, "herding:unit=true:balance=True:pool=5000")  # the same, with its defaults
    another(1, lm, "herding")
    another(1, lm, "herding:pool=9")
    another(1, lm, "herding", seed=1)
    another(1, lm, "herding", n=2)
    another(1, lm, "herding", task={**TASK, "doc_to_text": "{{text}}\nThis is:"})
    another(1, lm, "herding", task={**TASK, "task": "another"})
    another(1, model("icl", checkpoint("llama")), "herding")
    another(0, lm, "herding")


def test_a_model_that_is_not_ours_is_told_to_use_a_file():
    """Before its first request: whoever asks for the demonstrations is told."""
    task = loaded("herding")
    task.set_config("num_fewshot", 3)
    task.set_fewshot_seed(0)
    with pytest.raises(
        InputError, match=r"demonstrations=herding needs a model of this package.*select herding"
    ):
        task.build_all_requests(limit=1, fewshot_as_multiturn=False)


def test_the_name_is_checked_before_the_model_is_loaded():
    """And before lm-eval reads the files of its tasks."""
    with pytest.raises(InputError, match="did you mean 'graph_cut'"):
        TaskManager(metadata={"demonstrations": "graphcut"})


# The text of a method.


def test_one_text_for_one_method(tmp_path):
    assert read("lens:rho=3:m=50") == read({"lens": {"m": 50, "rho": 3.0}})
    assert (
        str(read("lens:rho=3:m=50:pool=100:balance=false"))
        == "lens:balance=False:m=50:pool=100:rho=3.0"
    )
    assert str(read("herding:unit=False:pool=5000")) == "herding" and read(
        str(read("cal:k=3"))
    ) == read({"cal": {"k": 3}})
    file = tmp_path / "chosen.json"
    file.write_text("[]")
    assert [read(each) for each in ("stratified", "random", "first", str(file))] == [None] * 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("xyz", "there are stratified, random, first, best_random, herding, "),
        ("nothing.json", "a JSON file of indices that exists"),
        ("lens:m", "'m': must be KEY=VALUE, as in lens:KEY=VALUE."),
        ({"lens": 3}, "lens=3: must be arguments and their values."),
        ({"lense": {}}, "'lense': did you mean 'lens'?"),
        ({"lens": {}, "cal": {}}, "must be one method with its arguments"),
    ],
)
def test_a_text_that_cannot_be(given, says):
    with pytest.raises(InputError, match=re.escape(says)):
        read(given)
