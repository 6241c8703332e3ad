"""Rules that compare a document with labeled rows, in runs of lm-eval, against what transformers itself computes."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_icl.errors import InputError
from tests import evaluation
from tests.harness.test_deciding import TASKS, run, values

RULES = "hidden:m=3+knn:m=2+knn:k=1:m=3"
BOTH = evaluation.task(
    "both", **evaluation.CHOICE, doc_to_choice=["very negative", "positive"],
    metric_list=[{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
)  # fmt: skip
PAIR = {"two": {**TASKS["described"]}, "both": BOTH}


@pytest.mark.parametrize(("name", "args"), [("two", {}), ("both", {}), ("both", {"pack_tokens": 4})])
def test_neighbors_against_transformers(name, args, checkpoint):
    """Each text is read as a whole, and all is computed by loops, in float64."""
    path, task = checkpoint("llama"), PAIR[name]
    results, rows = run("icl", path, task, RULES, args=args)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()

    def read(text):
        with torch.no_grad():
            output = model(torch.tensor([tokenizer.encode(text)]), output_hidden_states=True)
        return output.hidden_states[-1][0, -1].tolist(), output.logits[0, -1].log_softmax(-1).tolist()

    pool = evaluation.splits()["train"].to_list()
    metrics = {key for key in results["results"][task["task"]] if "acc_norm" in key and "stderr" not in key}
    assert metrics <= {"acc_norm,none"}
    for rule in RULES.split("+"):
        said = results["config"]["icl"]["decided"][task["task"]][rule]
        per_class = said["arguments"]["m"]
        anchors = [pool[row] for row in said["rows"]]
        assert said["labels"] == len(anchors) == len(set(said["rows"])) == 2 * per_class
        assert sorted(doc["label"] for doc in anchors) == [0] * per_class + [1] * per_class
        want = []
        for row in rows["none"]:
            context = row["arguments"][0][0]
            query = f"Review: {row['doc']['text']}\nSentiment:"
            assert context.endswith(query)
            behind = context.removesuffix(query)
            assert not any(f"Review: {doc['text']}\n" in behind for doc in anchors)
            state, log_probs = read(context)
            of_anchors = [read(behind + f"Review: {doc['text']}\nSentiment:") for doc in anchors]
            if said["rule"] == "hidden":
                value = []
                for label in (0, 1):
                    mine = [
                        vector for (vector, _), doc in zip(of_anchors, anchors, strict=True) if doc["label"] == label
                    ]
                    value.append(-math.dist(state, [sum(column) / len(mine) for column in zip(*mine, strict=True)]))
            else:
                far = [
                    sum(math.exp(p) * (p - q) for p, q in zip(theirs, log_probs, strict=True))
                    for _, theirs in of_anchors
                ]
                nearest = sorted(range(len(far)), key=far.__getitem__)[: said["arguments"]["k"]]
                value = [sum(anchors[i]["label"] == label for i in nearest) for label in (0, 1)]
            want.append(value)
        np.testing.assert_allclose(values(rows[rule]), want, rtol=0, atol=1e-6)
        assert len({tuple(value) for value in want}) > 1
        assert results["results"][task["task"]][f"acc,{rule}"] == pytest.approx(
            np.mean([np.argmax(value) == row["doc"]["label"] for value, row in zip(want, rows["none"], strict=True)])
        )


def test_a_documents_value_is_its_own(checkpoint):
    """To the bit, whichever other documents its process has."""
    path, task = checkpoint("llama"), PAIR["both"]
    _, every = run("invicl", path, task, "hidden:m=3+knn:m=2")
    for share in ([0, 2, 4], [5], [1, 3]):
        _, some = run("invicl", path, task, "hidden:m=3+knn:m=2", samples={"both": share})
        for rule in ("hidden:m=3", "knn:m=2"):
            of_document = {row["doc_id"]: row["filtered_resps"] for row in every[rule]}
            assert {row["doc_id"]: row["filtered_resps"] for row in some[rule]} == {i: of_document[i] for i in share}


@pytest.mark.parametrize(
    ("model", "task", "decide", "said"),
    [
        ("hf", PAIR["both"], "knn:m=2", "decide=knn:m=2: needs more of a model .*model icl"),
        ("saicl", PAIR["both"], "hidden:m=2", "a query has no single state under saicl"),
        ("icl", PAIR["both"], "hidden:m=6", "m=6: only . few-shot documents of the class ' ?"),
        ("icl", PAIR["both"], "knn:k=5:m=2", "k=5: there are 4 labeled documents"),
    ],
)
def test_what_is_refused(model, task, decide, said, checkpoint):
    with pytest.raises(InputError, match=said):
        run(model, checkpoint("llama"), task, decide)
