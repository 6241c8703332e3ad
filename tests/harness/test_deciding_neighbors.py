"""Rules that compare a document with labeled rows, in runs of lm-eval, against what transformers itself computes."""

import numpy as np
import pytest
import torch

from lm_eval_icl.errors import InputError
from tests import evaluation, tiny
from tests.harness.test_deciding import TASKS, before_query, run, values

RULES = "hidden:m=3+knn:m=2+knn:k=1:m=3"
BOTH = evaluation.task(
    "both", **evaluation.CHOICE, doc_to_choice=["very negative", "positive"],
    metric_list=[{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
)  # fmt: skip
PAIR = {"two": {**TASKS["described"]}, "both": BOTH}


@pytest.mark.parametrize(("name", "args"), [("two", {}), ("both", {"pack_tokens": 4})])
def test_neighbors_against_transformers(name, args, checkpoint):
    """Each text is read as a whole, and by itself, in float64."""
    path, task = checkpoint("llama"), PAIR[name]
    results, rows = run("icl", path, task, RULES, args=args)
    model, tokenizer = tiny.load(path, dtype=torch.float64)

    def read(text):
        """The state of a text's last token, and the log-probabilities of the next."""
        with torch.no_grad():
            output = model(torch.tensor([tokenizer.encode(text)]), output_hidden_states=True)
        return output.hidden_states[-1][0, -1].numpy(), output.logits[0, -1].log_softmax(-1).numpy()

    pool = evaluation.splits()["train"].to_list()
    metrics = {
        key for key in results["results"][task["task"]] if "acc_norm" in key and "stderr" not in key
    }
    assert metrics <= {"acc_norm,none"}
    for rule in RULES.split("+"):
        said = results["configs"][task["task"]]["metadata"]["decided"][rule]
        per_class = said["arguments"]["m"]
        anchors = [pool[row] for row in said["rows"]]
        labels = np.array([doc["label"] for doc in anchors])
        assert said["labels"] == len(anchors) == len(set(said["rows"])) == 2 * per_class
        assert sorted(labels) == [0] * per_class + [1] * per_class
        want = []
        for row in rows["none"]:
            state, log_probs = read(row["arguments"][0][0])
            before = before_query(row)
            assert not any(f"Review: {doc['text']}\n" in before for doc in anchors)
            states, others = zip(
                *(read(f"{before}Review: {doc['text']}\nSentiment:") for doc in anchors),
                strict=True,
            )
            if said["rule"] == "hidden":
                means = [np.array(states)[labels == y].mean(0) for y in (0, 1)]
                want.append([-np.linalg.norm(state - mean) for mean in means])
            else:
                far = [np.sum(np.exp(other) * (other - log_probs)) for other in others]
                nearest = labels[np.argsort(far)[: said["arguments"]["k"]]]
                want.append([np.sum(nearest == y) for y in (0, 1)])
        np.testing.assert_allclose(values(rows[rule]), want, rtol=0, atol=1e-6)
        assert len({tuple(value) for value in want}) > 1
        right = [
            np.argmax(value) == row["doc"]["label"]
            for value, row in zip(want, rows["none"], strict=True)
        ]
        assert results["results"][task["task"]][f"acc,{rule}"] == pytest.approx(np.mean(right))


@pytest.mark.parametrize(
    ("model", "task", "decide", "said"),
    [
        ("hf", PAIR["both"], "knn:m=2", "decide=knn:m=2: needs hidden states .*model icl"),
        ("saicl", PAIR["both"], "hidden:m=2", "a query has no single state under saicl"),
        ("icl", PAIR["both"], "hidden:m=6", "m=6: only . few-shot documents of the class ' ?"),
    ],
)
def test_what_is_refused(model, task, decide, said, checkpoint):
    with pytest.raises(InputError, match=said):
        run(model, checkpoint("llama"), task, decide)
