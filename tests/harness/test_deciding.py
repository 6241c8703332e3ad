"""Decision rules in runs of lm-eval, against literal computations from `hf`'s own
log-likelihoods."""

import json
import math

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.prompts import PROMPT_REGISTRY

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.rule_filters import RulesOfTask
from lm_eval_icl.harness.rule_queries import RuleQueries
from lm_eval_icl.harness.tasks import ICLTask
from tests import evaluation, tiny

RULES = "contextual+batch+batch:by=difference+domain:n=4+dcpmi+pmi+batch:m=5:of=pool"
TASKS = {
    "three": evaluation.choice("three", "no", "yes", "maybe so"),
    "described": evaluation.choice(
        "described", "no", "yes", description="Tell what it is.\n\n", **{"class": ICLTask}
    ),
}
OPTIONS = evaluation.task(
    "options",
    **evaluation.CHOICE,
    doc_to_choice="{{[other, 'no ' + other, 'yes']}}",
    metric_list=evaluation.metrics("acc", "acc_mutual_info"),
)


def run(model, path, task, decide, shots=2, *, args=None, **kwargs):
    """The results, and the samples by filter."""
    metadata = {"decide": decide} if decide else None
    args = {"dtype": "float64", **(args or {})}
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


def assert_close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def query_of(text):
    return f"Review: {text}\nSentiment:"


def contextual(literal, before, text, options, free=FREE):
    """The calibrated values of a document's options after a text: less those that content-free
    texts have there."""
    calibrated = []
    for option in options:
        of_free = [math.exp(literal(before + query_of(other), option)) for other in free]
        value = literal(before + query_of(text), option)
        calibrated.append(value - math.log(np.mean(of_free)))
    return calibrated


def before_query(row):
    """What stands before a document's query in its prompt."""
    context, _ = row["arguments"][0]
    query = query_of(row["doc"]["text"])
    assert context.endswith(query)
    return context.removesuffix(query)


class Literal:
    """Log-likelihoods that `hf` gives to a context and a continuation, each asked for alone."""

    def __init__(self, path):
        self.lm = HFLM(pretrained=str(path), dtype="float64", device="cpu", batch_size=1)
        self.known = {}

    def __call__(self, context, option):
        pair = (context, option)
        if pair not in self.known:
            request = Instance("loglikelihood", {}, pair, 0, ("t", 0, 1))
            [(logprob, _)] = self.lm.loglikelihood([request], disable_tqdm=True)
            self.known[pair] = logprob
        return self.known[pair]


def p(row):
    exps = [math.exp(value) for value in row]
    return [value / sum(exps) for value in exps]


def options_of(row):
    return [option for _, option in row["arguments"]]


def raw(literal, row):
    return [literal(context, option) for context, option in row["arguments"]]


def random_texts(said, pool):
    """The texts of the pool's words that a rule says it has used, each as long as the mean
    document."""
    words = []
    for doc in pool:
        words += doc["text"].lower().split()
    texts = [text.removeprefix("Review: ").removesuffix("\nSentiment:") for text in said["texts"]]
    for text in texts:
        own = text.removesuffix(" .").split(" ")
        assert set(own) <= set(words)
        assert len(own) == int(len(words) / len(pool)) + 1
    assert len(set(texts)) == 4
    return texts


def queries_of_pool(literal, row, pool):
    """The contexts whose queries are rows of the pool that were drawn for a document."""
    before = before_query(row)
    shown = []
    drawn = []
    for doc in pool:
        context = before + query_of(doc["text"])
        if f"Review: {doc['text']}\n" in before:
            shown.append(doc)
        elif (context, options_of(row)[0]) in literal.drawn:
            drawn.append(context)
    assert len(shown) == 2
    assert len(drawn) == 5
    return drawn


def batch(scores_of_batch, scores, by_difference):
    mean = np.mean([p(of_query) for of_query in scores_of_batch], axis=0)
    if by_difference:
        return np.array(p(scores)) - mean
    return np.array(scores) - np.log(mean)


def expected(rule, literal, rows, said, pool):
    """The values of a rule, from texts alone: the query of each prompt is cut off, and another put
    in its place."""
    free = random_texts(said, pool) if rule == "domain:n=4" else FREE
    of_all = [raw(literal, row) for row in rows]
    by_row = []
    for row, scores in zip(rows, of_all, strict=True):
        options = options_of(row)
        if rule in ("contextual", "domain:n=4"):
            text = row["doc"]["text"]
            by_row.append(contextual(literal, before_query(row), text, options, free))
            continue
        if rule in ("dcpmi", "pmi"):
            premise = "\nSentiment:" if rule == "dcpmi" else ":"
            of_premise = [literal(premise, option) for option in options]
            by_row.append(np.subtract(scores, of_premise))
            continue
        others = of_all
        if "pool" in rule:
            drawn = queries_of_pool(literal, row, pool)
            others = [[literal(context, option) for option in options] for context in drawn]
            if row is rows[0]:  # whose rows of the pool are recorded
                recorded = [pool[place]["text"] for place in said["rows"]]
                assert {before_query(row) + query_of(text) for text in recorded} == set(drawn)
        by_row.append(batch(others, scores, by_difference="difference" in rule))
    return by_row


@pytest.fixture
def made(monkeypatch):
    """The decisions of the runs of a test, in their order."""
    decisions = []
    init = RulesOfTask.__init__

    def keeping(self, *args):
        init(self, *args)
        decisions.append(self)

    monkeypatch.setattr(RulesOfTask, "__init__", keeping)
    return decisions


def asked_for(rules_of_task):
    """(context, option) of every query that the rules of a task have asked for."""
    pairs = set()
    prompts = rules_of_task.filters[0].queries.prompts
    for ((prefix, demonstrations), query), options in prompts.items():
        context = prefix + "".join(demonstrations) + query
        pairs |= {(context, option) for option in options}
    return pairs


@pytest.mark.parametrize("name", TASKS)
def test_each_rule_against_hf(name, checkpoint, made):
    path = checkpoint("llama")
    task = TASKS[name]
    literal = Literal(path)
    pool = evaluation.splits()["train"].to_list()
    rules = RULES.split("+")
    of_models = {}
    for model in ("hf", "icl"):
        results, rows = run(model, path, task, RULES)
        # Which rows of the pool are drawn is not asserted here, but that they are as many, of the
        # pool, and not shown, and that those of the first document are recorded.
        literal.drawn = asked_for(made[-1])
        assert list(rows) == ["none", *rules]
        metadata = results["configs"][task["task"]]["metadata"]
        decided = json.loads(json.dumps(metadata["decided"]))
        labels = [row["doc"]["label"] for row in rows["none"]]
        for rule in rules:
            wanted = expected(rule, literal, rows["none"], decided[rule], pool)
            assert_close(values(rows[rule]), wanted)
            accuracy = np.mean(np.argmax(wanted, axis=1) == labels)
            assert results["results"][task["task"]][f"acc,{rule}"] == pytest.approx(accuracy)
        of_models[model] = rows
        _, without = run(model, path, task, None)
        np.testing.assert_allclose(
            values(without["none"]), values(rows["none"]), rtol=0, atol=1e-10
        )
        arguments = [row["arguments"] for row in without["none"]]
        assert arguments == [row["arguments"] for row in rows["batch"]]
    for rule in rules:
        assert_close(values(of_models["hf"][rule]), values(of_models["icl"][rule]))


@pytest.mark.parametrize("model", ["invicl", "saicl", "batchicl", "deepthink"])
def test_the_queries_have_the_method_of_the_documents(model, checkpoint):
    """A rule's query is scored as a document of that text is: the pool is documents of the same
    template."""
    task = {**TASKS["three"], "custom_dataset": with_content_free}
    args = {"layer": 2} if model == "batchicl" else {}
    _, rows = run(model, checkpoint("llama"), task, "contextual+batch", args=args)
    plain = np.array(values(rows["none"]))
    of_free = np.exp(plain[-len(FREE) :])  # the last documents are the content-free texts
    assert_close(values(rows["contextual"]), plain - np.log(of_free.mean(0)))


def with_content_free(**_):
    from datasets import Dataset, DatasetDict

    texts = [{"text": text, "label": 0, "other": "film"} for text in FREE]
    test = Dataset.from_list(evaluation.documents(3, 0) + texts)
    return DatasetDict({"train": evaluation.splits()["train"], "test": test})


def test_constants_belong_to_the_context_as_it_ran(checkpoint):
    """Some documents lose demonstrations, and the constants of these are of what is left."""
    path = checkpoint("llama")
    task = TASKS["three"]
    options = [" no", " yes", " maybe so"]
    literal = Literal(path)

    def length(text):
        return len(literal.lm.tokenizer.encode(text))

    _, rows = run("icl", path, task, None, 4)
    lengths = sorted(length("".join(row["arguments"][2])) for row in rows["none"])
    args = {"overflow": "drop", "max_length": lengths[2] - 1}
    results, rows = run("icl", path, task, "contextual", 4, args=args)
    left_out = 0
    for row, calibrated in zip(rows["contextual"], values(rows["contextual"]), strict=True):
        text = row["doc"]["text"]
        shown = before_query(row).removeprefix("Review: ").removesuffix("\n\n")
        parts = [f"Review: {part}\n\n" for part in shown.split("\n\nReview: ")]
        assert len(parts) == 4
        while length("".join([*parts, query_of(text), " maybe so"])) - 1 > args["max_length"]:
            parts.pop(0)
            left_out += 1
        wanted = contextual(literal, "".join(parts), text, options)
        assert calibrated == pytest.approx(wanted, abs=1e-6)
    counts = results["config"]["icl"]
    assert left_out == counts["left_out"]["three"]["demonstrations"] > 0


def test_every_document_with_its_own_demonstrations_has_its_own_constants(checkpoint):
    path = checkpoint("llama")
    options = (" no", " yes", " maybe so")
    task = {**TASKS["three"], "fewshot_config": {"sampler": "default"}}
    literal = Literal(path)
    rule = "contextual:texts=N/A"
    for model in ("icl", "hf"):
        _, rows = run(model, path, task, rule, fewshot_random_seed=3)
        wanted = []
        for row in rows["none"]:
            before = before_query(row)
            wanted.append(contextual(literal, before, row["doc"]["text"], options, ["N/A"]))
        assert_close(values(rows[rule]), wanted)
        assert len({row["arguments"][0][0] for row in rows["none"]}) == 6


def test_options_of_their_own(checkpoint):
    """Metrics that mean nothing under a rule are left out."""
    path = checkpoint("llama")
    literal = Literal(path)
    results, rows = run("icl", path, OPTIONS, "contextual+pmi")
    for row, calibrated in zip(rows["contextual"], values(rows["contextual"]), strict=True):
        options = options_of(row)[:3]
        wanted = contextual(literal, before_query(row), row["doc"]["text"], options)
        assert calibrated[:3] == pytest.approx(wanted, abs=1e-6)
    numbers = results["results"]["options"]
    assert {"acc,none", "acc_mutual_info,none", "acc,contextual", "acc,pmi"} <= numbers.keys()
    assert "acc_mutual_info,contextual" not in numbers
    assert "acc_mutual_info,pmi" not in numbers


def test_differences_of_probabilities_have_an_accuracy_alone(checkpoint):
    metrics = ("acc", "acc_norm", "brier_score")
    task = {**TASKS["three"], "metric_list": [{"metric": name} for name in metrics]}
    results, _ = run("icl", checkpoint("llama"), task, "batch+batch:by=difference")
    kept = {key for key in results["results"]["three"] if "_stderr" not in key}
    assert {f"{name},batch" for name in metrics} <= kept
    assert {key for key in kept if "difference" in key} == {"acc,batch:by=difference"}


def test_a_cache_holds_raw_responses(checkpoint, tmp_path):
    """A run from a cache has the bits of the run that wrote it, and asks the model nothing."""
    path = checkpoint("llama")
    cached = {"use_cache": str(tmp_path / "cache")}
    task = TASKS["three"]
    _, without = run("icl", path, task, None, **cached)
    first, rows = run("icl", path, task, "contextual+batch", **cached)
    second, again = run("icl", path, task, "contextual+batch", **cached)
    assert values(without["none"]) == values(rows["none"])
    for rule in ("none", "contextual", "batch"):
        assert values(rows[rule]) == values(again[rule])
    assert first["configs"]["three"]["metadata"] == second["configs"]["three"]["metadata"]
    assert first["config"]["icl"]["tokens_run"] > 0
    assert second["config"]["icl"]["tokens_run"] == 0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"fewshot_as_multiturn": True},
        {"fewshot_as_multiturn": False, "system_instruction": "Be brief."},
    ],
    ids=["turns", "one message"],
)
def test_with_a_chat_template(chat_checkpoint, kwargs):
    """The rule's query stands in the same messages as a document's."""
    path = chat_checkpoint("llama")
    literal = Literal(path)
    rule = "contextual:texts=N/A"
    _, rows = run("icl", path, TASKS["three"], rule, apply_chat_template=True, **kwargs)
    for row in rows[rule]:
        text = row["doc"]["text"]
        context, _ = row["arguments"][0]
        at = context.rindex(query_of(text))
        without_text = context[:at] + context[at:].replace(text, "N/A")
        wanted = []
        for option in options_of(row):
            wanted.append(literal(context, option) - literal(without_text, option))
        [calibrated] = values([row])
        assert calibrated == pytest.approx(wanted, abs=1e-6)


def marked(**_):
    """A text has the mark that stands before each turn while a prompt is built."""
    splits = evaluation.splits()
    return {**splits, "test": splits["test"].map(lambda doc: {"text": f"\U000f1c1e{doc['text']}"})}


def other_options(**_):
    """The few-shot documents have another option than the evaluated ones."""
    splits = evaluation.splits()
    train = splits["train"].add_column("third", ["odd"] * 12)
    return {"train": train, "test": splits["test"].add_column("third", ["even"] * 6)}


THIRD = {"custom_dataset": other_options, "doc_to_choice": "{{['no', 'yes', third]}}"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"custom_dataset": marked}, "task 'three': a request does not say which parts of its"),
        (
            {"fewshot_split": "test"},
            "has no few-shot documents that it does not evaluate: give of=",
        ),
        (THIRD, "its few-shot documents have other options than its evaluated documents"),
    ],
    ids=["mark", "pool", "options"],
)
def test_pools_that_rules_cannot_read(changes, said, checkpoint):
    task = {**TASKS["three"], **changes}
    with pytest.raises(InputError, match=said):
        run("icl", checkpoint("llama"), task, "batch:of=pool:m=1")


def test_a_rule_has_no_value_of_no_number(checkpoint):
    model, tokenizer = tiny.load(checkpoint("llama"))
    model.lm_head.register_forward_hook(lambda module, given, logits: logits * math.nan)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu")
    with pytest.raises(InputError, match="decide: the model gave an option a log-probability of"):
        evaluation.run(lm, "", [TASKS["three"]], 1, metadata={"decide": "batch"}, limit=2)


# Content-free queries.


DOC = evaluation.documents(1, 0)[0]


def queries(**changes):
    task = evaluation.load_task(evaluation.choice("t", "no", "yes", **changes))
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


def test_a_premise_has_no_messages(chat_checkpoint):
    path = chat_checkpoint("llama")
    with pytest.raises(InputError, match="decide=dcpmi: its premise is a text without messages"):
        run("icl", path, TASKS["three"], "dcpmi", apply_chat_template=True)


def test_lists_of_options_in_the_query():
    """As in lm-eval's mmlu: the options are above the letters, which stay."""
    options = {"text": ["first", "last"], "label": ["A", "B"]}
    doc = {"question": "Which of these?", "choices": options, "label": 1}
    made = queries()
    made.task.features = ["question", "choices"]
    made.task.config.doc_to_text = (
        "{{question}}{% for t in choices.text %}\n{{choices.label[loop.index0]}}. {{t}}"
        "{% endfor %}\nAnswer:"
    )
    assert made.content_free(doc, "N/A") == "N/A\nA. N/A\nB. N/A\nAnswer:"
    assert made.premise(doc) == "\nAnswer:"


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


class OfLibrary:
    """A prompt of promptsource, as lm-eval uses it."""

    def apply(self, doc):
        return [doc["text"], doc["other"]]

    def get_answer_choices_list(self, doc):
        return ["no", "yes"]


def test_a_query_of_a_library_of_prompts(monkeypatch):
    monkeypatch.setitem(PROMPT_REGISTRY, "mine", {"first": OfLibrary()})
    of_library = queries(use_prompt="mine:first")
    assert of_library.task.doc_to_text(DOC) == DOC["text"]
    with pytest.raises(InputError, match="comes from a prompt that is not a template of fields"):
        of_library.content_free(DOC, "X y")


def test_queries_that_show_nothing_after_or_of_the_text():
    with pytest.raises(InputError, match="puts nothing after the document's text"):
        queries(doc_to_text="{{text}}").premise(DOC)
    with pytest.raises(InputError, match="its query does not show the text 'X y'"):
        queries(doc_to_text="{{text|length}} letters:").content_free(DOC, "X y")
    with pytest.raises(InputError, match="the field 'text' of the documents has no words to draw"):
        blank = queries()
        blank.task.dataset = {"test": [{"text": " "}]}
        blank._words("text", evaluated=True)


@pytest.mark.parametrize(
    ("name", "decide", "kwargs", "said"),
    [
        ("inputs", "contextual", {}, "every option of this task has its own prompt"),
        ("one_token", "batch:of=pool:m=11", {}, "m=11: only 8 few-shot documents"),
        ("one_token", "batch", {"limit": 1}, "the mean over one document is the document itself"),
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
