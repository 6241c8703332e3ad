"""What a results file says of a task: its compared fields, its metric and its value."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lm_eval_icl.demonstrations.how import WITH_ARGUMENTS, read
from lm_eval_icl.errors import InputError
from lm_eval_icl.results.compared import (
    CHOSEN,
    COLUMN,
    DECLARED,
    DEFAULTS,
    FACTS,
    METHOD,
    MODEL,
    REPETITION,
    SETTING,
    SWITCHES,
    Field,
    Fields,
)
from lm_eval_icl.results.metrics import AGGREGATIONS, CALIBRATION

# The fields that make a task's prompts, besides the demonstrations.
_TEMPLATE = (
    "doc_to_text doc_to_target doc_to_choice gen_prefix target_delimiter fewshot_delimiter".split()
)
TRAINED = " (trained)"  # ends the name of a checkpoint that a study trained
_SHORT = 32  # shorter texts are compared and shown as they are, others by their digest
# lm-eval's metrics that are not means over documents (lm_eval/api/metrics.py) -> the aggregation.
_NO_MEANS = {
    "f1": "f1",
    "mcc": "matthews_corrcoef",
    "perplexity": "perplexity",
    "bits_per_byte": "bits_per_byte",
    "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity",
}
_NO_MEANS |= dict.fromkeys("brier_score bleu chrf chrf++ ter bypass".split(), "")  # unknown


class Unusable(ValueError):
    """Something in a file that cannot be used; the message is a sentence that says why."""


def at(value: Any, *keys: str) -> Any:
    """The value under nested keys of a file; None if it is not there."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def number(value: Any) -> float | None:
    """A number whose square is finite; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e100 else None


def count(value: Any) -> int | None:
    """A whole number from 0 on; None for anything else."""
    return value if type(value) is int and 0 <= value < 2**53 else None


def mapping(value: Any) -> dict[str, Any]:
    """An object of JSON; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    """A list of JSON; an empty one for anything else."""
    return value if isinstance(value, list) else []


def has_results(value: Any) -> bool:
    """Whether the content of a file has the parts of a results file of lm-eval."""
    return all(isinstance(at(value, key), dict) for key in ("results", "configs", "config"))


def digest(texts: Iterable[str]) -> str:
    """A digest of texts. It includes their lengths, so other divisions of the same text differ."""
    state = hashlib.sha256()
    for text in texts:
        data = bytes(text, "utf-8", "surrogatepass")
        state.update(b"%d:%b" % (len(data), data))
    return state.hexdigest()[:32]


@dataclass(frozen=True)
class RuleFacts:
    """What a run reports about a decision rule of a task (`decided` in the task's metadata)."""

    name: str  # the name of the filter with the rule's values: "batch:m=64:of=pool"
    # All arguments of the rule, with defaults.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # What the rule uses besides the prompt: "transductive" (a decision depends on the other
    # documents), "labels: 2016" (labeled documents), "pool: 64" (documents of the few-shot split,
    # without labels).
    reads: tuple[str, ...] = ()
    draws: bool = False  # whether it draws documents or words by the seed

    @classmethod
    def of(cls, name: str, facts: Mapping[str, Any]) -> RuleFacts:
        """From an object of JSON."""
        arguments = mapping(facts.get("arguments"))
        numbers = {"labels": count(facts.get("labels"))}
        if arguments.get("of") == "pool":
            numbers["pool"] = count(arguments.get("m")) or count(facts.get("corpus"))
        reads = ["transductive"] if facts.get("transductive") else []
        reads += [f"{what}: {number}" for what, number in numbers.items() if number is not None]
        return cls(name, arguments, tuple(reads), "seed" in facts)


@dataclass(frozen=True)
class StudyFacts:
    """A study's facts about a cell: `config.icl.study`, and the cell's part of `study.json`."""

    split: str | None = None  # "test", or "dev": the set on which arguments are chosen
    order: int = 0  # the number of the order of the seed's demonstrations
    model: str | None = None  # the checkpoint that the study names
    training: str | None = None  # the training that made this model from the checkpoint
    # The settings that were chosen on the dev set: names of arguments, "seeds", "decide".
    chosen: tuple[str, ...] = ()
    rule: str | None = None  # the decision rule that was chosen; None for the model's own answers
    metric: str | None = None  # the metric of the task; None for the usual one
    expected: Mapping[str, Any] = field(default_factory=dict)  # the paper's numbers, by column

    @classmethod
    def of(cls, cell: Mapping[str, Any], study: Mapping[str, Any] | None = None) -> StudyFacts:
        """From the two objects of JSON, of which the study's counts. Values of a wrong type count
        as missing."""
        cell = {**cell, **(study or {})}
        names = ("split", "model", "training", "rule", "metric")
        texts = {name: cell[name] for name in names if isinstance(cell.get(name), str)}
        chosen = [name for name in listed(cell.get("chosen")) if isinstance(name, str)]
        expected = mapping(cell.get("expected"))
        order = count(cell.get("order")) or 0
        return cls(**texts, order=order, chosen=tuple(chosen), expected=expected)


@dataclass(frozen=True)
class SampleFacts:
    """The facts in a task's results that are needed to read its samples."""

    # Whether the requests of a document are options: the most probable is predicted.
    options: bool
    decided: bool  # whether documents have the prediction, decided in another way (MetaICL)
    shots: int  # how many demonstrations a prompt has
    # The texts before the demonstrations: the system instruction, a delimiter, the description.
    front: tuple[str, ...]
    delimiter: str  # the text between demonstrations
    target: str  # `doc_to_target`: the name of a column, or a template


def fields_of(results: Mapping[str, Any], task: str) -> Fields:
    """All compared fields of a task in a results file."""
    config = mapping(results.get("config"))
    icl = mapping(config.get("icl"))
    sources = {
        "config": config,
        "icl": icl,
        "model_args": model_arguments(config.get("model_args")),
        "task": mapping(at(results, "configs", task)),
        "file": results,
    }
    study = StudyFacts.of(mapping(icl.get("study")))
    setting = _values(SETTING, sources, task)
    if not setting["chat"]:  # without a chat template there are no turns
        setting["multiturn"] = ""
    switches = _values(SWITCHES, sources, task)
    switches["demonstrations"] = _way(switches["demonstrations"], task)
    facts = _texts(_values(FACTS, sources, task))
    if study.training is not None:  # the model is its base model, its method and its training
        facts = {"weights": ""}
    else:
        switches["trained weights"] = ""
    return Fields(
        model=_model(sources, task, study),
        method=_method(sources, task, study),
        setting=_texts(setting),
        switches={name: as_text(value) for name, value in switches.items()},
        facts=facts,
        column=_column(sources, task),
        seed=count(config.get("fewshot_seed")),
        order=study.order,
        format=count(_values(REPETITION, sources, task)["format"]) or 0,
        demonstration_rows=_demonstration_rows(sources, task),
    )


def model_arguments(recorded: Any) -> dict[str, Any]:
    """`model_args` as a dictionary. With `simple_evaluate`, they may be text: `name=value,...`."""
    if not isinstance(recorded, str):
        return mapping(recorded)
    arguments = {}
    for part in filter(None, recorded.split(",")):
        name, _, text = part.partition("=")
        value = text.lower() if text.lower() in ("true", "false") else text
        arguments[name.strip()] = text
        with suppress(ValueError):
            arguments[name.strip()] = json.loads(value)
    return arguments


def filter_text(results: Mapping[str, Any], task: str, name: str) -> str:
    """A filter's name, with its entries in the task's `filter_list`."""
    filters = listed(at(results, "configs", task, "filter_list"))
    entries = [entry for entry in filters if at(entry, "name") == name]
    return as_text([name, entries] if entries else name)


def as_text(value: Any) -> str:
    """A value as text: 5.0 as 5, without addresses in memory, and a long text as its digest."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = value
    if not isinstance(value, str):
        text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    if " at 0x" in text:
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return text if len(text) < _SHORT else digest([text])


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _values(fields: Sequence[Field], sources: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Name -> the field's value, or its default."""
    values: dict[str, Any] = {}
    for compared in fields:
        values[compared.name] = compared.default
        for path in compared.paths.split():
            value = at(sources, *path.split("."))
            # lm-eval writes a value for each task.
            if path in ("file.n-shot", "file.versions") and isinstance(value, dict):
                value = value.get(task)
            if not (_is_empty(value) or value == 0):
                values[compared.name] = value
                break
    return values


def _undeclared(name: str, values: Mapping[str, Any], inside: str = "") -> dict[str, str]:
    """Path -> text to compare, for all fields in no list. Empty values count as missing."""
    texts: dict[str, str] = {}
    for key, value in values.items():
        path = f"{inside}{key}"
        if f"{name}.{path}" in DECLARED:
            continue
        if isinstance(value, dict):
            texts |= _undeclared(name, value, f"{path}.")
        elif not _is_empty(value):
            texts[path] = as_text(value)
    return texts


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """The values that are not empty, as texts."""
    return {name: str(value) for name, value in values.items() if value != ""}


def _model(sources: Mapping[str, Any], task: str, study: StudyFacts) -> dict[str, str]:
    values = _values(MODEL, sources, task)
    if study.model is not None and study.training is not None:
        values["checkpoint"] = f"{study.model}{TRAINED}"
        values["revision"] = ""
    if values["revision"] == "main":  # a branch, which moves, and no revision
        values["revision"] = ""
    values["dtype"] = str(values["dtype"]).removeprefix("torch.")
    return _texts(values) | _undeclared("config", sources["config"])


def _method(sources: Mapping[str, Any], task: str, study: StudyFacts) -> dict[str, str]:
    """The method and its arguments.

    A model of this package reports all arguments, with defaults. The arguments of other models are
    added as they were given, without those that have their default.
    """
    icl = sources["icl"]
    if study.training is not None:  # a study's training is a switch
        icl = {**icl, "trained": None}
    values = _texts(_values(METHOD, sources, task))
    arguments = sources["model_args"]
    given = _undeclared("model_args", arguments)
    for name, value in arguments.items():
        if value is False and f"model_args.{name}" not in DECLARED:
            given[name] = "false"
    for name, text in given.items():
        if name not in icl and text not in DEFAULTS.get(name, ()):
            values[name] = text
    values |= _undeclared("icl", icl)
    for name in study.chosen:
        if name in values or name == "seeds":
            values[name] = CHOSEN
    return values


def _way(written: Any, task: str) -> Any:
    """How demonstrations are chosen, without the arguments that have their default."""
    if written == "default" and task.startswith("icl_"):
        return "stratified"  # the default of this package's tasks
    name = str(written).partition(":")[0]
    if isinstance(written, dict) or name in WITH_ARGUMENTS:
        with suppress(InputError):
            return str(read(written))
    return written


def _demonstration_rows(sources: Mapping[str, Any], task: str) -> str:
    """A digest of the rows of a task whose prompts are cut, as MetaICL's first demonstration is."""
    recorded = at(sources, "file", "provenance", "demonstrations", task)
    if isinstance(recorded, str):
        return recorded
    indices = at(sources, "icl", "study", "indices")
    if task.startswith("metaicl_") and isinstance(indices, list):
        return digest(sorted(map(str, [*indices, at(sources, "config", "fewshot_seed")])))
    return ""


def _column(sources: Mapping[str, Any], task: str) -> dict[str, str]:
    """The fields that say what was asked, besides the metric, the filter and the documents."""
    config = sources["task"]
    # In every format, it is the same task.
    unformatted = mapping(at(config, "metadata", "unformatted"))
    shots = mapping(config.get("fewshot_config")) | mapping(unformatted.get("fewshot_config"))
    config = {**config, **unformatted}
    values = {name: as_text(x) for name, x in _values(COLUMN, sources, task).items() if x != ""}
    values["template"] = _template(config, shots)
    rest = {name: x for name, x in config.items() if name not in (*_TEMPLATE, "description")}
    # lm-eval adds the model's arguments to the metadata of tasks.
    metadata = mapping(config.get("metadata")).items()
    rest["metadata"] = {name: x for name, x in metadata if name not in sources["model_args"]}
    for name in ("metadata", "dataset_path", "dataset_kwargs"):
        rest[name] = _portable(rest.get(name))
    shots = {name: x for name, x in shots.items() if name not in (*_TEMPLATE, "sampler")}
    shots["split"] = shots.get("split") or config.get("fewshot_split")
    function = re.match(r"<function (\w+)", str(shots.get("process_docs")))
    if function and f"def {function[1]}(" in str(config.get("process_docs")):
        del shots["process_docs"]  # lm-eval does not write its code
    rest["fewshot_config"] = shots
    return values | _undeclared("task", rest)


def _template(config: Mapping[str, Any], shots: Mapping[str, Any]) -> str:
    """A digest of the templates. Demonstrations have the query's unless they have their own."""
    query = [config.get(name) for name in _TEMPLATE]
    demonstration = [
        config.get(name) if shots.get(name) is None else shots[name] for name in _TEMPLATE
    ]
    parts = [query, demonstration, config.get("description") or ""]
    return digest([as_text(json.dumps(parts, sort_keys=True, default=str))])[:6]


def _portable(value: Any) -> Any:
    """Every absolute path reduced to its last name, since its beginning belongs to one machine."""
    if isinstance(value, dict):
        return {name: _portable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_portable(inner) for inner in value]
    if isinstance(value, str) and re.match(r"[/~]|[A-Za-z]:[\\/]|file:", value):
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return value


def reported_value(values: Mapping[str, Any], metric: str, filter_name: str) -> float:
    """The value in the results; NaN for a metric that is computed from log-likelihoods."""
    key = f"{metric},{filter_name}"
    value = number(values.get(key))
    if value is None and metric not in CALIBRATION:
        raise Unusable(f"its {key} is {str(values.get(key))[:40]!r}, which is not a number")
    return math.nan if value is None else value


def higher_is_better(
    results: Mapping[str, Any], task: str, metric: str, entry: Mapping[str, Any]
) -> bool:
    if metric in CALIBRATION:
        return CALIBRATION[metric].higher_is_better
    higher = at(results, "higher_is_better", task, metric)
    if higher is None:
        higher = entry.get("higher_is_better")
    return higher is not False


def size_of(results: Mapping[str, Any], task: str) -> int:
    """The number of documents."""
    size = count(at(results, "n-samples", task, "effective"))
    return size or count(at(results, "results", task, "sample_len")) or 0


def retrieval_marks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A mark that says from how many labeled rows demonstrations were retrieved."""
    facts = at(config, "metadata", "retrieved")
    rows = count(at(facts, "pool", "rows"))
    own = count(at(facts, "own_copies"))
    if rows is None or own is None:
        return ()
    pool = f"the {rows:,} rows of the few-shot split"
    wanted = re.search(r"pool=(\d+)", str(at(facts, "how")))
    if wanted and int(wanted[1]) < rows:
        pool = f"{int(wanted[1]):,} of {pool}"
    copies = "have no copies of documents"
    if own:
        copies = f"have copies of documents ({own}), which were left out"
    return (f"Each document's demonstrations are retrieved from {pool}, which {copies}.",)


def metric_of(
    values: Mapping[str, Any],
    config: Mapping[str, Any],
    wanted: str | None,
    rules: Mapping[str, Any],
) -> tuple[str, str, Mapping[str, Any]]:
    """The metric of a task, its first filter that is no decision rule, and its entry in
    `metric_list`."""
    filters: dict[str, str] = {}
    for key in values:
        metric, comma, filter_name = key.partition(",")
        is_value = comma and not metric.endswith("_stderr") and metric != "bypass"
        if is_value and filter_name not in rules:
            filters.setdefault(metric, filter_name)
    if wanted in CALIBRATION and filters:
        return str(wanted), next(iter(filters.values())), {}
    entries = metric_entries(config, filters)
    for metric in (wanted or "acc", "acc", "exact_match", *entries, *filters):
        if metric in filters:
            return metric, filters[metric], entries.get(metric, {})
    raise Unusable("it has no metric")


def metric_entries(
    config: Mapping[str, Any], metrics: Iterable[str]
) -> dict[str, Mapping[str, Any]]:
    """Metric -> its entry in a task's `metric_list`, in the order of that list."""
    entries: dict[str, Mapping[str, Any]] = {}
    for entry in listed(config.get("metric_list")):
        name = str(at(entry, "metric"))
        for metric in metrics:
            # A metric that is a function has its source as its name.
            if name == metric or f"def {metric}(" in name:
                entries.setdefault(metric, entry)
    return entries


def aggregation_of(metric: str, entry: Mapping[str, Any]) -> str:
    """A name of `AGGREGATIONS`, or "" if there is none for the metric."""
    if metric in CALIBRATION:
        return CALIBRATION[metric].aggregation
    name = str(entry.get("aggregation", _NO_MEANS.get(metric, "mean")))
    return name if name in AGGREGATIONS else ""


def sample_facts(results: Mapping[str, Any], task: str) -> SampleFacts:
    """The facts in a task's results about its samples."""
    config = results["configs"][task]
    system = results.get("system_instruction")
    delimiter = config.get("fewshot_delimiter", "\n\n")
    if not isinstance(delimiter, str):
        delimiter = ""
    before = [system, delimiter] if system else []
    front = [*before, config.get("description")]
    # With acc_mutual_info, there is a second request for each option, without the prompt.
    is_mutual = bool(metric_entries(config, ["acc_mutual_info"]))
    shots = at(results, "n-shot", task) or at(results, "configs", task, "num_fewshot")
    return SampleFacts(
        options=config.get("output_type") == "multiple_choice" and not is_mutual,
        decided=any(key.startswith("metaicl,") for key in mapping(results["results"][task])),
        shots=count(shots) or 0,
        front=tuple(text for text in front if isinstance(text, str)),
        delimiter=delimiter,
        target=str(config.get("doc_to_target")),
    )
