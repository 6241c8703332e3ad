"""Methods that learn, in runs of lm-eval."""

import logging
import threading

import lm_eval
import pytest
import torch
from datasets import Dataset, DatasetDict
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lm_eval_icl import methods
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.models import model_class
from lm_eval_icl.methods import Predictor
from lm_eval_icl.methods.learned import Learned
from tests import evaluation, tiny
from tests.methods.test_moicl import literal_weights


def facts(results):
    return results["config"]["icl"]


def learned(results):
    counts = facts(results)["learned"]
    assert counts.pop("seconds") > 0
    return counts


def test_a_context_is_learned_once_for_all_documents_and_rules(checkpoint):
    path = checkpoint("llama")
    args = {"steps": 2, "lr": 0.1}
    plain = evaluation.run("icl", path, ["one_token"], 2)
    ruled = evaluation.run(
        "ctkv", path, ["one_token"], 2, args=args, metadata={"decide": "contextual+batch"}
    )
    alone = evaluation.run("ctkv", path, ["one_token"], 2, args=args)
    assert learned(ruled) == learned(alone) == {"contexts": 1, "steps": 2}
    assert evaluation.responses(alone) != evaluation.responses(plain)
    start = evaluation.run("ctkv", path, ["one_token", "generate"], 2, args={"steps": 0})
    same = evaluation.run("icl", path, ["one_token", "generate"], 2)
    evaluation.assert_same(evaluation.responses(start), evaluation.responses(same), 1e-5)


@pytest.mark.parametrize(
    ("method", "args"), [("ctkv", {"steps": 1}), ("ttt", {"permutations": 1, "rank": 2})]
)
def test_a_context_for_each_document_is_refused_unless_it_is_wanted(
    checkpoint, caplog, method, args
):
    path = checkpoint("llama")
    why = (
        r"'described': its documents have 6 descriptions or sets of demonstrations \([\d,]+ "
        rf"tokens\), and {method} learns from each of them, which takes many passes: "
        ".*per_document=True"
    )
    with pytest.raises(InputError, match=why):
        evaluation.run(method, path, ["described"], 2, args=args)
    with caplog.at_level(logging.WARNING):
        args = {**args, "per_document": True}
        results = evaluation.run(method, path, ["described"], 2, args=args)
    assert learned(results) == {"contexts": 6, "steps": 6}
    assert "6 descriptions or sets of demonstrations" in caplog.text


def test_ttt_answers_all_documents_of_a_task_with_one_adapter(checkpoint):
    path = checkpoint("llama")
    args = {"permutations": 4, "batch": 2, "rank": 2, "lr": 0.1, "dtype": "float64"}
    tasks = ["one_token", "many_tokens", "generate"]
    results = evaluation.run("ttt", path, tasks, 2, args=args)
    # The tasks differ in the texts of their answers. A context's adapter is learned once.
    assert learned(results) == {"contexts": 3, "steps": 6}
    plain = evaluation.run("ttt", path, tasks, 2, args={**args, "plain": True})
    evaluation.assert_same(evaluation.responses(results), evaluation.responses(plain), 1e-6)
    icl = evaluation.run("icl", path, tasks, 2, args={"dtype": "float64"})
    start = evaluation.run("ttt", path, tasks, 2, args={**args, "epochs": 0})
    evaluation.assert_same(evaluation.responses(start), evaluation.responses(icl), 1e-9)
    assert evaluation.responses(results) != evaluation.responses(icl)


def test_a_cache_tells_where_answers_begin(checkpoint, tmp_path):
    """Two templates of demonstrations with the same texts, of which other parts are learned."""
    path = checkpoint("llama")
    task = evaluation.choice("one", "no", "yes")
    shots = {"doc_to_text": "Review: {{text}}\n", "target_delimiter": "", "doc_to_choice": None}
    shots["doc_to_target"] = "Sentiment: {{['no', 'yes'][label]}}"
    other = {**task, "fewshot_config": evaluation.FIRST_N | shots}
    args = {"permutations": 1, "rank": 2, "lr": 0.1}
    cache = str(tmp_path / "cache")
    first = evaluation.answers("ttt", path, [task], 2, args=args, use_cache=cache)
    second = evaluation.answers("ttt", path, [other], 2, args=args, use_cache=cache)
    assert second == evaluation.answers("ttt", path, [other], 2, args=args) != first


def test_an_hf_object_that_shares_the_model_keeps_its_numbers(checkpoint, monkeypatch):
    """Before, after, and from another thread while an adapter is on."""
    args = {"permutations": 2, "batch": 2, "rank": 2, "lr": 0.1}
    lm = model_class("ttt")(pretrained=str(checkpoint("gpt2")), device="cpu", **args)
    hf = HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=1)
    request = Instance("loglikelihood", {}, ("Review: dull\nSentiment:", " a"), 0)
    numbers = []

    def ask():
        numbers.append(hf.loglikelihood([request], disable_tqdm=True))

    def ask_in_a_thread(method, *arguments):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return scored(method, *arguments)

    ask()
    scored = Learned.scored
    monkeypatch.setattr(Learned, "scored", ask_in_a_thread)
    task = evaluation.load_task(evaluation.TASKS["one_token"])
    task.set_config("num_fewshot", 2)
    lm_eval.evaluate(lm, {"tasks": {"one_token": task}, "groups": {}}, bootstrap_iters=0)
    ask()
    assert len(numbers) > 2 and all(number == numbers[0] for number in numbers)
    assert lm.runner.encoder.learned["contexts"] == 1


def test_moicl_is_fitted_on_rows_that_are_read_nowhere_else(checkpoint):
    path = checkpoint("llama")
    args = {"rows": 5, "epochs": 2, "dtype": "float64"}
    results = evaluation.run("moicl", path, ["one_token"], 3, args=args)
    [fitted] = facts(results)["fitted"]
    assert fitted["task"] == "one_token" and len(set(fitted["labels"])) == 5
    pool = evaluation.splits()["train"].to_list()
    queries = [f"Review: {doc['text']}\nSentiment:" for doc in pool]
    options = [" a", " b", " c"]
    # In canonical order.
    answers = [options[doc["label"]] for doc in pool]
    windows = sorted(f"{queries[i]}{answers[i]}\n\n" for i in range(3))
    assert not set(fitted["labels"]) & {0, 1, 2}  # the demonstrations
    # Demonstrations are tokenized each by itself, as under pcw, which has one window here.
    alone = Predictor(
        *tiny.load(path, dtype=torch.float64), methods.make("pcw", {"positions": "sequential"})
    )

    def by_window(query):
        return [
            [score for score, _ in alone.score([window], [query], options)[0]] for window in windows
        ]

    scores = [by_window(queries[row]) for row in fitted["labels"]]
    labels = [pool[row]["label"] for row in fitted["labels"]]
    weights = literal_weights(scores, labels, 2, 0.1, 0)
    assert fitted["weights"] == pytest.approx(weights, abs=1e-6)
    for sample in results["samples"]["one_token"]:
        table = by_window(f"Review: {sample['doc']['text']}\nSentiment:")
        expected = [sum(w * row[y] for w, row in zip(weights, table, strict=True)) for y in (0, 1)]
        found = [float(response[0][0]) for response in sample["resps"][:2]]
        assert found == pytest.approx(expected, abs=1e-4)
    assert learned(results) == {"contexts": 1, "rows": 5}


def test_what_moicl_refuses(checkpoint):
    path = checkpoint("llama")
    # The answers of its documents are none of the options.
    odd = {**evaluation.TASKS["one_token"], "doc_to_target": "odd"}
    for task, args, why in (
        ("generate", {}, r"'generate': moicl: it decides among options, and this task has none"),
        ("one_token", {"rows": 50}, r"rows=50: only \d few-shot documents are neither"),
        ("inputs", {}, r"every option of this task has its own prompt"),
        (odd, {}, r"rows=4: only 0 few-shot documents are neither"),
    ):
        with pytest.raises(InputError, match=why):
            evaluation.run("moicl", path, [task], 3, args={"rows": 4, **args})
    with pytest.raises(InputError, match=r"--use_cache: a cache cannot tell which rows weights"):
        evaluation.run("moicl", path, ["one_token"], 3, args={"rows": 4}, use_cache="unused")


def test_moicl_does_not_fit_a_task_on_the_rows_of_another(checkpoint):
    """Two tasks of a run have one set of demonstrations, and different documents and so rows."""
    train = Dataset.from_list(evaluation.documents(12, 50))
    test = Dataset.from_list(evaluation.documents(4, 56))  # rows of the training split
    splits = DatasetDict({"train": train, "test": test})
    other = {**evaluation.TASKS["one_token"], "task": "other", "custom_dataset": lambda **_: splits}
    lm = model_class("moicl")(pretrained=str(checkpoint("llama")), device="cpu", rows=4)

    def evaluate(*configs):
        tasks = {config["task"]: evaluation.load_task(config) for config in configs}
        for task in tasks.values():
            task.set_config("num_fewshot", 3)
            task.set_fewshot_seed(1234)
        return lm_eval.evaluate(lm, {"tasks": tasks, "groups": {}}, bootstrap_iters=0)

    says = "'other': moicl: task 'one_token' has the same demonstrations and is fitted on other"
    with pytest.raises(InputError, match=says):
        evaluate(evaluation.TASKS["one_token"], other)
    for config in (evaluation.TASKS["one_token"], other):
        evaluate(config)
        assert [facts["task"] for facts in lm.get_model_info()["icl"]["fitted"]] == [config["task"]]
