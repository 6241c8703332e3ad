"""The tasks on the real datasets, where they stand beside the checkout."""

import contextlib

import pytest
from lm_eval.tasks import TaskManager

from lm_eval_icl.harness.plugin import task_dir
from tests import evaluation

pytestmark = pytest.mark.slow

# Deep-Thinking, Tables 4 to 6. (Table 4 counts one too many for SST2 and AGNews.)
CLASSIFICATION = {
    "icl_sst2": 872,
    "icl_sst5": 2210,
    "icl_mr": 1066,
    "icl_trec": 500,
    "icl_agnews": 7600,
}
SHOTS = {"icl_sst2": 8, "icl_sst5": 10, "icl_mr": 8, "icl_trec": 12, "icl_agnews": 8}
BBH = {
    "date_understanding": 212,
    "disambiguation_qa": 247,
    "geometric_shapes": 200,
    "movie_recommendation": 231,
    "penguins_in_a_table": 145,
    "ruin_names": 247,
    "snarks": 177,
    "causal_judgement": 187,
}
MMLU = {
    "abstract_algebra": 100,
    "anatomy": 135,
    "moral_scenarios": 895,
    "professional_law": 1534,
    "virology": 166,
}


@pytest.fixture(autouse=True)
def _in_hub(hub, monkeypatch):
    monkeypatch.chdir(hub)


@pytest.fixture(scope="module")
def tasks(hub):
    with contextlib.chdir(hub):
        manager = TaskManager(include_defaults=False, include_path=str(task_dir()))
        return manager.load(["icl_classification", "icl_mmlu", "icl_bbh"])["tasks"]


def test_sizes_are_the_papers(tasks):
    """And documents have an answer among their choices."""
    sizes = {name: len(task.eval_docs) for name, task in tasks.items()}
    assert {name: sizes[name] for name in CLASSIFICATION} == CLASSIFICATION
    assert {name: sizes[f"icl_mmlu_{name}"] for name in MMLU} == MMLU
    assert sum(size for name, size in sizes.items() if name.startswith("icl_mmlu_")) == 14042
    bbh = {
        name.removeprefix("icl_bbh_"): size
        for name, size in sizes.items()
        if name.startswith("icl_bbh_")
    }
    assert {name: bbh[name] for name in BBH} == BBH
    assert all(size == 250 for name, size in bbh.items() if name not in BBH)
    assert {name: tasks[name].config.num_fewshot for name in SHOTS} == SHOTS
    for name, task in tasks.items():
        for doc in list(task.eval_docs)[:50]:
            assert 0 <= task.doc_to_target(doc) < len(task.doc_to_choice(doc)), name


def test_prompts_are_the_papers(tasks):
    def prompt(name, document=0):
        task = tasks[name]
        task.set_fewshot_seed(42)
        shots = task.config.num_fewshot
        text = task.fewshot_context(task.eval_docs[document], num_fewshot=shots)
        assert len(text.split("\n\n")) >= shots + 1
        return text

    text = prompt("icl_sst2")
    assert text.endswith("\n\nReview: it 's a charming and often affecting journey .\nSentiment:")
    assert text.count("Sentiment: positive") == text.count("Sentiment: negative") == 4
    text = prompt("icl_trec")
    labels = ("Abbreviation", "Entity", "Description", "Person", "Location", "Number")
    assert all(text.count(f"Type: {label}\n") == 2 for label in labels)
    assert prompt("icl_agnews").count("\nCategory:") == 9
    assert prompt("icl_sst5").count("\nSentiment: great") == 2
    assert prompt("icl_mmlu_anatomy").startswith("Question: ")
    text = prompt("icl_bbh_date_understanding")
    assert "Options" not in text and "(A)" not in text and text.count("\nA: ") == 3


REAL = ["mmlu_anatomy", "leaderboard_bbh_date_understanding", "icl_sst2", "bbh_fewshot_navigate"]


@pytest.mark.parametrize(("name", "shots"), [("gpt2", 5), ("stories260K", 3)])
def test_icl_gives_what_hf_gives(checkpoint, shared, name, shots):
    path = shared / "models" / name if name == "stories260K" else checkpoint(name)
    # The two BBH tasks come with three demonstrations and have no more to give.
    tasks = REAL if shots == 3 else ["mmlu_anatomy", "icl_sst2"]
    length = (
        4096 if name == "gpt2" else 8192
    )  # as many positions as it learned, and more where they are computed
    kwargs = {"limit": 3, "args": {"max_length": length}, "batch_size": 1}
    ours, theirs = (
        evaluation.answers(model, path, tasks, shots, **kwargs) for model in ("icl", "hf")
    )
    evaluation.assert_same(ours, theirs, tolerance=1e-4)
