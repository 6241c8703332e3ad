"""Decision rules in runs of lm-eval, against literal computations from `hf`'s own log-likelihoods."""

import json
import math

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.rule_filters import RulesOfTask
from lm_eval_icl.harness.rule_queries import RuleQueries
from lm_eval_icl.harness.tasks import ICLTask
from tests import evaluation

RULES = "contextual+batch+batch:by=difference+domain:n=4+dcpmi+pmi+batch:m=5:of=pool"
TASKS = {
    "three": evaluation.task("three", **evaluation.CHOICE, doc_to_choice=["no", "yes", "maybe so"]),
    "described": {
        **evaluation.task(
            "described",
            **evaluation.CHOICE,
            doc_to_choice=["no", "yes"],
            description="Tell what it is.\n\n",
        ),
        "class": ICLTask,
    },
}
OPTIONS = evaluation.task(
    "options",
    **evaluation.CHOICE,
    doc_to_choice="{{[other, 'no ' + other, 'yes']}}",
    metric_list=[
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_mutual_info")
    ],
)


def run(model, path, task, decide, shots=2, *, args=None, **kwargs):
    """The results, and the samples by filter."""
    metadata, args = {"decide": decide} if decide else None, {"dtype": "float64", **(args or {})}
    results = evaluation.run(model, path, [task], shots, args=args, metadata=metadata, **kwargs)
    (rows,) = results["samples"].values()
    by_filter = {}
    for row in rows:
        by_filter.setdefault(row["filter"], []).append(row)
    return results, by_filter


def values(rows):
    """(D, C) of a filter's rows."""
    return [[float(value) for value, _ in row["filtered_resps"]] for row in rows]


FREE = ("N/A", "", "[MASK]")


def contextual(literal, before, text, options, free=FREE):
    """The calibrated values of a document's options after a text: less those that content-free texts have there."""

    def value(text, option):
        return literal(f"{before}Review: {text}\nSentiment:", option)

    return [
        value(text, y) - math.log(np.mean([math.exp(value(other, y)) for other in free]))
        for y in options
    ]


def before_query(row):
    """What stands before a document's query in its prompt."""
    context, query = row["arguments"][0][0], f"Review: {row['doc']['text']}\nSentiment:"
    assert context.endswith(query)
    return context.removesuffix(query)


class Literal:
    """Log-likelihoods that `hf` gives to a context and a continuation, each asked for alone."""

    def __init__(self, path):
        self.lm = HFLM(pretrained=str(path), dtype="float64", device="cpu", batch_size=1)
        self.known = {}

    def __call__(self, context, option):
        if (context, option) not in self.known:
            request = Instance("loglikelihood", {}, (context, option), 0, ("t", 0, 1))
            ((self.known[context, option], _),) = self.lm.loglikelihood(
                [request], disable_tqdm=True
            )
        return self.known[context, option]


def p(row):
    exps = [math.exp(value) for value in row]
    return [value / sum(exps) for value in exps]


def expected(rule, literal, rows, said, pool):
    """The values of a rule, from texts alone: the query of each prompt is cut off, and another put in its place."""
    contexts = [row["arguments"][0][0] for row in rows]
    options = [[option for _, option in row["arguments"]] for row in rows]
    raw = [[literal(context, y) for y in ys] for context, ys in zip(contexts, options, strict=True)]
    free = FREE
    if rule == "domain:n=4":
        free = [
            text.removeprefix("Review: ").removesuffix("\nSentiment:") for text in said["texts"]
        ]
        every = [word for doc in pool for word in doc["text"].lower().split()]
        for text in free:
            words = text.removesuffix(" .").split(" ")
            assert set(words) <= set(every) and len(words) == int(len(every) / len(pool)) + 1
        assert len(set(free)) == 4
    found = []
    for row, scores, ys in zip(rows, raw, options, strict=True):
        before, of = before_query(row), raw
        if rule in ("contextual", "domain:n=4"):
            found.append(contextual(literal, before, row["doc"]["text"], ys, free))
        elif rule in ("dcpmi", "pmi"):
            premise = "\nSentiment:" if rule == "dcpmi" else ":"
            found.append([score - literal(premise, y) for score, y in zip(scores, ys, strict=True)])
        else:
            if "pool" in rule:
                shown = [doc for doc in pool if f"Review: {doc['text']}\n" in before]
                assert len(shown) == 2
                rest = [
                    f"{before}Review: {doc['text']}\nSentiment:" for doc in pool if doc not in shown
                ]
                others = [context for context in rest if (context, ys[0]) in literal.drawn]
                assert len(others) == 5
                if row is rows[0]:  # whose rows of the pool are recorded
                    recorded = [pool[place]["text"] for place in said["rows"]]
                    texts = {f"{before}Review: {text}\nSentiment:" for text in recorded}
                    assert texts == set(others)
                of = [[literal(context, y) for y in ys] for context in others]
            mean = np.mean([p(each) for each in of], axis=0)
            by_difference = "difference" in rule
            found.append(
                np.array(p(scores)) - mean if by_difference else np.array(scores) - np.log(mean)
            )
    return found


@pytest.fixture
def made(monkeypatch):
    """The decisions of the runs of a test, in their order."""
    kept = []
    init = RulesOfTask.__init__

    def keeping(self, *args):
        init(self, *args)
        kept.append(self)

    monkeypatch.setattr(RulesOfTask, "__init__", keeping)
    return kept


@pytest.mark.parametrize("name", TASKS)
def test_each_rule_against_hf(name, checkpoint, made):
    path, task = checkpoint("llama"), TASKS[name]
    literal = Literal(path)
    pool = evaluation.splits()["train"].to_list()
    of_models = {}
    for model in ("hf", "icl"):
        results, rows = run(model, path, task, RULES)
        # Which rows of the pool are drawn is not asserted here, but that they are as many, of the
        # pool, and not shown, and that those of the first document are recorded.
        literal.drawn = {
            (place[0] + "".join(place[1]) + query, y)
            for (place, query), of in made[-1].filters[0].queries.prompts.items()
            for y in of
        }
        assert list(rows) == ["none", *RULES.split("+")]
        decided = json.loads(json.dumps(results["configs"][task["task"]]["metadata"]["decided"]))
        for rule in RULES.split("+"):
            want = expected(rule, literal, rows["none"], decided[rule], pool)
            np.testing.assert_allclose(values(rows[rule]), want, rtol=0, atol=1e-6)
            accuracy = np.mean(
                [
                    int(np.argmax(row)) == doc["doc"]["label"]
                    for row, doc in zip(want, rows["none"], strict=True)
                ]
            )
            assert results["results"][task["task"]][f"acc,{rule}"] == pytest.approx(accuracy)
        of_models[model] = rows
        _, raw = run(model, path, task, None)
        np.testing.assert_allclose(values(raw["none"]), values(rows["none"]), rtol=0, atol=1e-10)
        assert [row["arguments"] for row in raw["none"]] == [
            row["arguments"] for row in rows["batch"]
        ]
    for rule in RULES.split("+"):
        np.testing.assert_allclose(
            values(of_models["hf"][rule]), values(of_models["icl"][rule]), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("model", ["invicl", "saicl", "batchicl", "deepthink"])
def test_the_queries_have_the_method_of_the_documents(model, checkpoint):
    """A rule's query is scored as a document of that text is: the pool is documents of the same template."""
    task = {**TASKS["three"], "custom_dataset": with_content_free}
    args = {"layer": 2} if model == "batchicl" else {}
    _, rows = run(model, checkpoint("llama"), task, "contextual+batch", args=args)
    raw = np.array(values(rows["none"]))
    # The last documents are the content-free texts themselves.
    np.testing.assert_allclose(
        values(rows["contextual"]), raw - np.log(np.exp(raw[-3:]).mean(0)), rtol=0, atol=1e-6
    )


def with_content_free(**_):
    from datasets import Dataset, DatasetDict

    texts = [{"text": text, "label": 0, "other": "film"} for text in FREE]
    test = Dataset.from_list(evaluation.documents(3, 0) + texts)
    return DatasetDict({"train": evaluation.splits()["train"], "test": test})


def test_constants_belong_to_the_context_as_it_ran(checkpoint):
    """Some documents lose demonstrations, and the constants of these are of what is left."""
    path, task, options = checkpoint("llama"), TASKS["three"], [" no", " yes", " maybe so"]
    literal = Literal(path)
    tokens = literal.lm.tokenizer.encode
    results, rows = run("icl", path, task, None, 4)
    lengths = sorted(len(tokens("".join(row["arguments"][2]))) for row in rows["none"])
    args = {"overflow": "drop", "max_length": lengths[2] - 1}
    results, rows = run("icl", path, task, "contextual", 4, args=args)
    left = 0
    for row, found in zip(rows["contextual"], values(rows["contextual"]), strict=True):
        query = f"Review: {row['doc']['text']}\nSentiment:"
        shown = (
            before_query(row).removeprefix("Review: ").removesuffix("\n\n").split("\n\nReview: ")
        )
        parts = [f"Review: {part}\n\n" for part in shown]
        assert len(parts) == 4
        while len(tokens("".join(parts) + query + " maybe so")) - 1 > args["max_length"]:
            parts.pop(0)
            left += 1
        assert found == pytest.approx(
            contextual(literal, "".join(parts), row["doc"]["text"], options), abs=1e-6
        )
    icl = results["config"]["icl"]
    assert left == icl["left_out"]["three"]["demonstrations"] > 0


def test_every_document_with_its_own_demonstrations_has_its_own_constants(checkpoint):
    path, options = checkpoint("llama"), (" no", " yes", " maybe so")
    task = {**TASKS["three"], "fewshot_config": {"sampler": "default"}}
    literal = Literal(path)
    for model in ("icl", "hf"):
        _, rows = run(model, path, task, "contextual:texts=N/A", fewshot_random_seed=3)
        want = [
            contextual(literal, before_query(row), row["doc"]["text"], options, ["N/A"])
            for row in rows["none"]
        ]
        np.testing.assert_allclose(values(rows["contextual:texts=N/A"]), want, rtol=0, atol=1e-6)
        assert len({row["arguments"][0][0] for row in rows["none"]}) == 6


def test_options_of_their_own_and_metrics_that_mean_nothing(checkpoint):
    path = checkpoint("llama")
    literal = Literal(path)
    results, rows = run("icl", path, OPTIONS, "contextual+pmi")
    for row, found in zip(rows["contextual"], values(rows["contextual"]), strict=True):
        options = [option for _, option in row["arguments"][:3]]
        wanted = contextual(literal, before_query(row), row["doc"]["text"], options)
        assert found[:3] == pytest.approx(wanted, abs=1e-6)
    numbers = results["results"]["options"]
    assert {"acc,none", "acc_mutual_info,none", "acc,contextual", "acc,pmi"} <= numbers.keys()
    assert not {"acc_mutual_info,contextual", "acc_mutual_info,pmi"} & numbers.keys()

    metrics = ("acc", "acc_norm", "brier_score")
    task = {**TASKS["three"], "metric_list": [{"metric": name} for name in metrics]}
    results, rows = run("icl", path, task, "batch+batch:by=difference")
    kept = {key for key in results["results"]["three"] if "_stderr" not in key}
    assert {f"{name},batch" for name in metrics} <= kept
    assert {key for key in kept if "difference" in key} == {"acc,batch:by=difference"}


def test_a_cache_holds_raw_responses(checkpoint, tmp_path):
    """A run from a cache has the bits of the run that wrote it, and asks the model nothing."""
    path, cache = checkpoint("llama"), str(tmp_path / "cache")
    _, without = run("icl", path, TASKS["three"], None, use_cache=cache)
    runs = [run("icl", path, TASKS["three"], "contextual+batch", use_cache=cache) for _ in range(2)]
    (first, rows), (second, again) = runs
    assert values(rows["none"]) == values(without["none"]) == values(again["none"])
    for rule in ("contextual", "batch"):
        assert values(rows[rule]) == values(again[rule])
    assert first["configs"]["three"]["metadata"] == second["configs"]["three"]["metadata"]
    assert first["config"]["icl"]["tokens_run"] > 0 == second["config"]["icl"]["tokens_run"]


def test_with_a_chat_template(chat_checkpoint):
    """The rule's query stands in the same messages as a document's."""
    path = chat_checkpoint("llama")
    literal = Literal(path)
    for kwargs in (
        {"fewshot_as_multiturn": True},
        {"fewshot_as_multiturn": False, "system_instruction": "Be brief."},
    ):
        _, rows = run(
            "icl", path, TASKS["three"], "contextual:texts=N/A", apply_chat_template=True, **kwargs
        )
        for row in rows["contextual:texts=N/A"]:
            text = row["doc"]["text"]
            context = row["arguments"][0][0]
            at = context.rindex(f"Review: {text}\nSentiment:")
            without_text = context[:at] + context[at:].replace(text, "N/A")
            for (_, y), (value, _) in zip(row["arguments"], row["filtered_resps"], strict=True):
                assert float(value) == pytest.approx(
                    literal(context, y) - literal(without_text, y), abs=1e-6
                )
    with pytest.raises(InputError, match="decide=dcpmi: its premise is a text without messages"):
        run("icl", path, TASKS["three"], "dcpmi", apply_chat_template=True)


# Content-free queries.


CHOICES = {"doc_to_choice": ["no", "yes"]}


DOC = evaluation.documents(1, 0)[0]


def queries(**changes):
    task = evaluation.load_task(evaluation.task("t", **evaluation.CHOICE, **CHOICES | changes))
    task._instances = []
    return RuleQueries(task, None, {}, seed=0)


@pytest.mark.parametrize(
    ("template", "query"),
    [
        ("Review: {{text}}\nSentiment:", "Review: X y\nSentiment:"),
        ("text", "X y"),
        ("{{text|upper}} of {{other}}:", "X Y of X y:"),
        ("{{label}} {{text}}", "0 X y"),
        (lambda doc: f"{doc['text']} ({doc['label']})\nQ:", "X y (0)\nQ:"),
    ],
)
def test_content_free_queries(template, query):
    assert queries(doc_to_text=template).content_free(DOC, "X y") == query


def test_lists_of_options_in_the_query():
    """As in lm-eval's mmlu: the options are above the letters, which stay."""
    doc = {
        "question": "Which of these?",
        "choices": {"text": ["first", "last"], "label": ["A", "B"]},
        "label": 1,
    }
    task = queries()
    template = "{{question}}{% for t in choices.text %}\n{{choices.label[loop.index0]}}. {{t}}{% endfor %}\nAnswer:"
    task.task.features, task.task.config.doc_to_text = ["question", "choices"], template
    assert task.content_free(doc, "N/A") == "N/A\nA. N/A\nB. N/A\nAnswer:"
    assert task.premise(doc) == "\nAnswer:"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("Answer:", "made from no text of a document"),
        ("{{text.split(' ')[2]}}:", "cannot be filled in"),
    ],
)
def test_templates_that_no_text_can_be_taken_from(template, said):
    with pytest.raises(InputError, match=said):
        queries(doc_to_text=template).content_free(DOC, "X y")


@pytest.mark.parametrize(
    ("name", "decide", "kwargs", "said"),
    [
        ("inputs", "contextual", {}, "every option of this task has its own prompt"),
        ("one_token", "batch:of=pool:m=11", {}, "m=11: only 8 few-shot documents"),
        ("options", "batch", {}, "needs the same options for all, and document 1 has"),
    ],
)
def test_what_is_refused(name, decide, kwargs, said, checkpoint):
    task = OPTIONS if name == "options" else evaluation.TASKS[name]
    with pytest.raises(InputError, match=said):
        run("hf", checkpoint("llama"), task, decide, **kwargs)


def test_queries_that_do_not_fit_are_refused(checkpoint):
    path = checkpoint("llama")
    with pytest.raises(InputError, match="hf would cut it to 60"):
        run("hf", path, TASKS["three"], "contextual", args={"max_length": 60}, shots=5)
    long = {"contextual": {"texts": ["word " * 200]}}
    with pytest.raises(InputError, match=r"decide=contextual.*its query 'Review: word"):
        run("icl", path, TASKS["three"], long, args={"max_length": 300})
