"""Independence of company through lm-eval: a document's numbers do not depend on the documents and
tasks beside it.

Rules that say that they read other documents (`Rule.is_transductive`) are left out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from lm_eval_icl import methods
from lm_eval_icl.decisions.rules import RULES, read
from lm_eval_icl.smoke.every_method import QUICK
from tests import evaluation, processes, tiny

BOUND = 1e-5  # float32
DECIDE = "contextual+domain:n=3+batch:of=pool:m=4+dcpmi+pmi+hidden:m=2+knn:m=2"
KINDS = {
    "options": {**evaluation.CHOICE, "doc_to_choice": ["no", "yes"]},
    "texts": {
        "output_type": "generate_until",
        "doc_to_target": "{{other}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 5, "do_sample": False},
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}
DOCUMENTS = evaluation.documents(8, 0)
# Rules draw from the few-shot documents that are not evaluated, so no document may be in both.
POOL = [row for row in evaluation.documents(40, 50) if row not in DOCUMENTS]


def task(kind: str, rows: list[dict]) -> dict:
    def load(**_: object) -> DatasetDict:
        return DatasetDict(train=Dataset.from_list(POOL), test=Dataset.from_list(rows))

    return evaluation.task(kind, **{**KINDS[kind], "custom_dataset": load})


UNRELATED = {
    **task("options", evaluation.documents(5, 70)),
    "task": "unrelated",
    "doc_to_choice": ["very negative indeed", "positive"],
}


def answers(
    model: str, path: Path, kinds: list[str], rows: list[dict], beside=(), **options: object
) -> dict:
    """(task, filter, document's text) -> its responses."""
    tasks = [*beside, *(task(kind, rows) for kind in kinds)]
    results = evaluation.run(model, path, tasks, 2, **options)
    responses: dict = {}
    if not results:
        return responses  # this is not the first of several processes
    for kind in kinds:
        for sample in results["samples"][kind]:
            key = (kind, sample["filter"], sample["doc"]["text"])
            responses[key] = sample["filtered_resps"]
    return responses


def number(response: object) -> tuple[float, str]:
    """A log-likelihood, and whether the option is the greedy one (empty for a whole text)."""
    if isinstance(response, list | tuple):
        return float(response[0]), str(response[1])
    return float(str(response)), ""


def assert_same(found: dict, expected: dict) -> None:
    assert found
    for key, responses in found.items():
        kind, *_ = key
        if kind == "texts":
            assert responses == expected[key], key
            continue
        ours = list(map(number, responses))
        theirs = list(map(number, expected[key]))
        for (mine, greedy), (other, expected_greedy) in zip(ours, theirs, strict=True):
            assert abs(mine - other) <= BOUND * max(1, abs(other)), key
            assert greedy == expected_greedy, key
        assert ours.index(max(ours)) == theirs.index(max(theirs)), key


def in_any_company(model: str, path: Path, kinds: list[str], args=None, **options: object) -> None:
    args = args or {}
    expected = answers(model, path, kinds, DOCUMENTS, args=args, **options)

    def check(rows: list[dict] = DOCUMENTS, beside=(), **settings: object) -> None:
        changed = {"args": args, **options, **settings}
        assert_same(answers(model, path, kinds, rows, beside, **changed), expected)

    check(DOCUMENTS[::-1])
    check([*DOCUMENTS, DOCUMENTS[2]])
    check(DOCUMENTS[1::2])
    for batch_size in (1, 7, 64):
        check(batch_size=batch_size)
    check(args={**args, "pack_tokens": 64})
    check(args={**args, "plain": True})
    check(beside=[UNRELATED])


def test_every_rule_that_reads_no_other_document_is_here():
    rules = read(DECIDE)
    assert {rule.name for rule in rules} == set(RULES)
    assert not any(rule.is_transductive for rule in rules)


def test_the_values_of_rules_are_the_same_in_any_company(checkpoint):
    in_any_company("icl", checkpoint("llama"), ["options"], metadata={"decide": DECIDE})


@pytest.mark.parametrize("model", tiny.slow_but(["icl", "invicl"], methods.NAMES))
def test_documents_of_every_kind_have_the_same_responses_in_any_company(checkpoint, model):
    in_any_company(model, checkpoint("llama"), list(KINDS), args=QUICK.get(model, {}))


@pytest.mark.slow
def test_retrieved_demonstrations_are_the_same_in_any_company(checkpoint):
    metadata = {"demonstrations": "similar"}
    in_any_company("icl", checkpoint("llama"), ["options", "texts"], metadata=metadata)


def all_methods(folder: Path) -> list:
    """The responses under every method, and the values of the rules."""
    path = folder / "llama"
    runs = []
    for name in methods.NAMES:
        runs.append(answers(name, path, list(KINDS), DOCUMENTS, args=QUICK.get(name, {})))
    runs.append(answers("icl", path, ["options"], DOCUMENTS, metadata={"decide": DECIDE}))
    return [list(by_key.items()) for by_key in runs]


def all_methods_of_two(line: list[str]) -> None:
    """What each of two processes runs. The first writes what came out."""
    (folder,) = map(Path, line)
    found = all_methods(folder)
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.slow
def test_two_processes_are_company_like_any_other(tmp_path):
    tiny.save("llama", tmp_path / "llama")
    for done in processes.ranks(all_methods_of_two, tmp_path):
        assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for two, one in zip(found, all_methods(tmp_path), strict=True):
        of_two = {tuple(key): responses for key, responses in two}
        of_one = {key: json.loads(json.dumps(responses)) for key, responses in one}
        assert of_two.keys() == of_one.keys()
        assert_same(of_two, of_one)
