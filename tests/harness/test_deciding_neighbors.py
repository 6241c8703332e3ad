"""Rules that compare a document with labeled rows, in runs of lm-eval, against what transformers
itself computes."""

import numpy as np
import pytest
import torch

from lm_eval_icl.errors import InputError
from tests import evaluation, tiny
from tests.harness.test_deciding import TASKS, assert_close, before_query, query_of, run, values

RULES = "hidden:m=3+knn:m=2+knn:k=1:m=3"
METRICS = evaluation.metrics("acc", "acc_norm")
BOTH = evaluation.choice("both", "very negative", "positive", metric_list=METRICS)
ODD = {**BOTH, "doc_to_target": "odd"}
PAIR = {"two": TASKS["described"], "both": BOTH}


def literal_values(said, state, log_probs, anchors, labels):
    """The values of a rule for one document.

    Args:
        state: of the last token of the document's prompt; and the log-probabilities of the next.
        anchors: the same of every labeled row.
    """
    states, others = zip(*anchors, strict=True)
    if said["rule"] == "hidden":
        means = [np.array(states)[labels == label].mean(0) for label in (0, 1)]
        return [-np.linalg.norm(state - mean) for mean in means]
    divergences = [np.sum(np.exp(other) * (other - log_probs)) for other in others]
    nearest = labels[np.argsort(divergences)[: said["arguments"]["k"]]]
    return [np.sum(nearest == label) for label in (0, 1)]


@pytest.mark.parametrize(("name", "args"), [("two", {}), ("both", {"pack_tokens": 4})])
def test_neighbors_against_transformers(name, args, checkpoint):
    """Each text is read as a whole, and by itself, in float64."""
    path = checkpoint("llama")
    task = PAIR[name]
    results, rows = run("icl", path, task, RULES, args=args)
    model, tokenizer = tiny.load(path, dtype=torch.float64)

    def read(text):
        """The state of a text's last token, and the log-probabilities of the next."""
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            output = model(ids, output_hidden_states=True)
        log_probs = output.logits[0, -1].log_softmax(-1)
        return output.hidden_states[-1][0, -1].numpy(), log_probs.numpy()

    pool = evaluation.splits()["train"].to_list()
    numbers = results["results"][task["task"]]
    of_lengths = {key for key in numbers if "acc_norm" in key and "stderr" not in key}
    assert of_lengths <= {"acc_norm,none"}
    gold = [row["doc"]["label"] for row in rows["none"]]
    for rule in RULES.split("+"):
        said = results["configs"][task["task"]]["metadata"]["decided"][rule]
        per_class = said["arguments"]["m"]
        anchors = [pool[row] for row in said["rows"]]
        labels = np.array([doc["label"] for doc in anchors])
        assert said["labels"] == len(anchors) == len(set(said["rows"])) == 2 * per_class
        assert sorted(labels) == [0] * per_class + [1] * per_class
        wanted = []
        for row in rows["none"]:
            before = before_query(row)
            assert not any(f"Review: {doc['text']}\n" in before for doc in anchors)
            read_anchors = [read(before + query_of(doc["text"])) for doc in anchors]
            context, _ = row["arguments"][0]
            wanted.append(literal_values(said, *read(context), read_anchors, labels))
        assert_close(values(rows[rule]), wanted)
        assert len(set(map(tuple, wanted))) > 1
        accuracy = np.mean(np.argmax(wanted, axis=1) == gold)
        assert numbers[f"acc,{rule}"] == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("model", "task", "decide", "said"),
    [
        ("hf", PAIR["both"], "knn:m=2", "decide=knn:m=2: needs hidden states .*model icl"),
        ("saicl", PAIR["both"], "hidden:m=2", "a query has no single state under saicl"),
        ("icl", ODD, "hidden:m=2", "a few-shot document has no class among its options: 'odd'"),
        ("icl", PAIR["both"], "hidden:m=6", "m=6: only . few-shot documents of the class ' ?"),
    ],
)
def test_what_is_refused(model, task, decide, said, checkpoint):
    with pytest.raises(InputError, match=said):
        run(model, checkpoint("llama"), task, decide)
