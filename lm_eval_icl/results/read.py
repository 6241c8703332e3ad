"""Results files of lm-eval, with their samples, as `Run`s.

The files come from anyone: what is damaged, foreign or contradictory is left out or marked, with the reason, and never
stops the others.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lm_eval_icl.errors import InputError, one_line, refusing
from lm_eval_icl.results.collect import KEY, packed_marks, unpack
from lm_eval_icl.results.records import Answers, LeftOut, Run, TaskResult
from lm_eval_icl.results.samples import Asked, Unusable, digest, lines, read_answers, unique_keys

RESULTS_BYTES = 32 * 2**20
DEPTH = 64

# lm-eval's metrics whose aggregation is not the mean, or of which less is better (lm_eval/api/metrics.py).
_METRICS: Mapping[str, tuple[str, bool]] = {
    "f1": ("f1", True),
    "mcc": ("matthews_corrcoef", True),
    "perplexity": ("perplexity", False),
    "word_perplexity": ("weighted_perplexity", False),
    "byte_perplexity": ("weighted_perplexity", False),
    "bits_per_byte": ("bits_per_byte", False),
    "brier_score": ("brier_score", False),
    "bleu": ("bleu", True),
    "chrf": ("chrf", True),
    "chrf++": ("chrf++", True),
    "ter": ("ter", False),
    "bypass": ("bypass", True),
}
# Those that are computed from a number, or a pair of numbers, of each document; of these, the statistics are known.
_OF_NUMBERS = ("mean", "nanmean", "perplexity")
_OF_PAIRS = ("f1", "matthews_corrcoef", "weighted_perplexity", "bits_per_byte", "macro_f1")
AGGREGATIONS = (*_OF_NUMBERS, *_OF_PAIRS)
# Of a task's configuration: what is compared as something else, or is known not to matter.
_NOT_SETTINGS = {
    *("task", "task_alias", "tag", "group", "class"),  # names
    *("num_fewshot", "fewshot_split"),  # the number of demonstrations; the split is in fewshot_config
    *("description", "fewshot_config", "metric_list", "filter_list", "metadata"),  # parts of them are compared
    *("should_decontaminate", "doc_to_decontamination_query"),  # lm-eval reports decontamination beside the scores
    "unsafe_code",  # allows a metric to run, and does not change it
}
# Of a task's metadata: the version, the choice of demonstrations and `pmi` are compared as such; the task's file is a
# path of somebody's machine.
_NOT_METADATA = {
    *("version", "demonstrations", "pmi", "config_source"),
    *("demonstrations_replaced", "demonstrations_evaluated"),  # counts that depend on the seed
}
# Of lm-eval's `config`: what does not say which model it was.
_NOT_OF_MODEL = {
    *("model", "model_args", "icl"),  # the method and its arguments, compared one by one
    *("model_dtype", "model_revision", "model_sha"),  # parts of the checkpoint's name
    *("batch_size", "batch_sizes", "device", "use_cache"),  # where and how fast it was run
    *("random_seed", "numpy_seed", "torch_seed", "fewshot_seed"),  # draws: runs of other seeds are one row
    "limit",  # compared as such
    "gen_kwargs",  # lm-eval writes them into the configurations of the tasks that generate
    "bootstrap_iters",  # of lm-eval's standard errors alone
}
_SHORT = 32  # texts that are shorter are compared and shown as they are, others by their digest, which is that long
_TEMPLATE = ("doc_to_text", "doc_to_target", "doc_to_choice", "gen_prefix", "target_delimiter", "fewshot_delimiter")


@dataclass(frozen=True)
class _File:
    """A file that may hold results.

    Attributes:
        given: it was named itself, not found in a folder.
        root: links out of this folder are not followed.
        beside: the names of all files in its folder.
    """

    path: Path
    given: bool
    root: Path
    beside: frozenset[str]


def read(paths: Sequence[Path], quiet: bool = False, dev: bool = False) -> tuple[list[Run], list[LeftOut]]:
    """Read results files of any of lm-eval's models, and files that `collect` has made.

    Args:
        paths: files, or folders, which are searched with all folders in them. A results file is known by its content.
            Its samples are the files in the same folder whose names end in the same time, or digest.
        quiet: show no progress bar.
        dev: read runs on the dev set of a study too.

    Returns:
        The runs, each of them once, and what was left out: files, and tasks of files that are otherwise used.

    Raises:
        InputError: a path does not exist.
    """
    runs: dict[str, Run] = {}
    left_out: list[LeftOut] = []
    for file in tqdm(_files(paths, left_out), "Reading results", disable=quiet, unit=" files"):
        try:
            with np.errstate(all="ignore"):  # strangers' numbers may be as large as a float can be
                if (results := _load(file)) is not None:
                    _add(file, results, runs, left_out, dev)
        except Unusable as error:
            left_out.append(LeftOut(file.path, _sentence(error)))
        except Exception as error:  # whatever a stranger's file has in it, the others are read
            left_out.append(LeftOut(file.path, f"cannot be understood ({one_line(error)})."))
    return list(runs.values()), list(dict.fromkeys(left_out))


def _files(paths: Sequence[Path], left_out: list[LeftOut]) -> list[_File]:
    found: dict[Path, _File] = {}
    for path in paths:
        with refusing(f"{_printable(str(path))} cannot be read", kinds=(OSError, ValueError)):
            if path.is_dir():
                files = list(_walk(path, left_out))
            elif path.is_file():
                files = [_File(path, True, path.parent.resolve(), _names(path.parent))]
            else:
                kind = "is neither a file nor a folder" if path.exists() else "does not exist"
                raise InputError(f"{_printable(str(path))} {kind}: give results files of lm-eval, or their folders.")
        for file in files:
            found.setdefault(file.path.resolve(), file)
    return list(found.values())


def _walk(root: Path, left_out: list[LeftOut]) -> Iterator[_File]:
    """The JSON files of a folder, none of them hidden."""

    def failed(error: OSError) -> None:
        left_out.append(LeftOut(Path(_printable(str(error.filename))), f"cannot be read ({error.strerror})."))

    inside = root.resolve()
    for folder, folders, names in os.walk(root, onerror=failed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if folders and len(Path(folder).relative_to(root).parts) == DEPTH:
            left_out.append(LeftOut(Path(_printable(folder)), f"its folders are more than {DEPTH} deep."))
            folders.clear()
        beside = frozenset(names)
        times = {Path(name).stem.rpartition("_")[2] for name in names if name.endswith(".json")}
        for name in sorted(name for name in names if not name.startswith(".")):
            path = Path(folder, name)
            if path.suffix == ".jsonl" and name.startswith("samples_") and path.stem.rpartition("_")[2] not in times:
                left_out.append(
                    LeftOut(Path(_printable(str(path))), "the results of these samples are not beside them.")
                )
            if path.suffix != ".json":
                continue
            if _printable(str(path)) != str(path):
                left_out.append(LeftOut(Path(_printable(str(path))), "its name is not UTF-8."))
            elif not _is_inside(path, inside):
                left_out.append(LeftOut(path, "is not a file in this folder but a link out of it, or a device."))
            else:
                yield _File(path, False, inside, beside)


def _is_inside(path: Path, root: Path) -> bool:
    try:
        return path.is_file() and (not path.is_symlink() or path.resolve().is_relative_to(root))
    except (OSError, RuntimeError):  # a link to itself
        return False


def _names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(path.name for path in folder.iterdir())
    except OSError:
        return frozenset()


def _load(file: _File) -> dict[str, Any] | None:
    """The results in a file; None for a JSON file of something else, of which nobody would think that it has results.

    Raises:
        Unusable: it is damaged, too large or foreign.
    """
    try:
        with file.path.open("rb") as opened:
            data = opened.read(RESULTS_BYTES + 1)
    except OSError as error:
        raise Unusable(f"cannot be read ({error.strerror})") from error
    if not file.given and not file.path.name.startswith("results") and b'"results"' not in data:
        return None
    if len(data) > RESULTS_BYTES:
        raise Unusable(f"has more than {RESULTS_BYTES:,} bytes")
    try:
        text = data.decode("utf-8-sig")
        results = json.loads(text, object_pairs_hook=unique_keys)
    except Unusable:  # a ValueError too
        raise
    except RecursionError:
        raise Unusable(f"is nested more than {DEPTH} deep") from None
    except ValueError as error:
        raise Unusable(f"is damaged, half-written or no JSON file ({one_line(error)})") from error
    if not _is_shallow(results):
        raise Unusable(f"is nested more than {DEPTH} deep")
    if not isinstance(results, dict) or not all(isinstance(results.get(key), dict) for key in ("results", "configs")):
        raise Unusable("is no results file of lm-eval, which has 'results' and 'configs'")
    if not isinstance(results.get("config"), dict):
        raise Unusable("does not say which model its results are of: lm-eval's 'config' is missing")
    # An escape is the only way to half of a surrogate pair in JSON, and Python cannot print or write one.
    return _without_surrogates(results) if re.search(r"\\u[dD][89a-fA-F]", text) else results


def _is_shallow(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _ in range(DEPTH + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for values in inner for each in values if isinstance(each, (dict, list))]
        if not level:
            return True
    return False


def _sentence(text: object) -> str:
    """On one line and not too long, whatever names a file has."""
    words = " ".join(str(text).split()).removesuffix(".")
    return f"{words[:600]}..." if len(words) > 600 else f"{words}."


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _printable(value)
    if isinstance(value, dict):
        return {_printable(key): _without_surrogates(each) for key, each in value.items()}
    return [_without_surrogates(each) for each in value] if isinstance(value, list) else value


def _add(file: _File, results: dict[str, Any], runs: dict[str, Run], left_out: list[LeftOut], dev: bool) -> None:
    """Add a file's run to the others; of two files of one run, that with more answers is kept."""
    scores = _mapping(results.pop(KEY, None))
    results.pop("samples", None)  # of Python's `simple_evaluate`, never of lm-eval's own files: these are large
    name = digest([json.dumps(results, sort_keys=True)])
    known = runs.get(name)
    if known is not None and all(result.answers is not None for result in known.tasks.values()):
        raise Unusable(f"is the same run as {known.path}")
    notes: list[str] = []
    if not dev and _mapping(_mapping(results["config"].get("icl")).get("study")).get("split") == "dev":
        raise Unusable("is of the dev set of a study, on which its hyperparameters were chosen")
    run = _run(file, results, scores, name, notes)
    if known is not None and _answered(known) >= _answered(run):
        raise Unusable(f"is the same run as {known.path}")
    runs[name] = run
    if known is not None:
        left_out[:] = [each for each in left_out if each.path != known.path]
        left_out.append(LeftOut(known.path, f"is the same run as {run.path}, with fewer samples."))
    left_out += [LeftOut(file.path, _sentence(note)) for note in notes]


def _answered(run: Run) -> int:
    return sum(result.answers is not None for result in run.tasks.values())


def _run(file: _File, results: dict[str, Any], scores: Mapping[str, Any], name: str, notes: list[str]) -> Run:
    """A results file as a run.

    Args:
        scores: what `collect` has added.
        name: the digest.
        notes: sentences on tasks and groups that are left out are added to it.

    Raises:
        Unusable: there is no task with a number, or a number is one that lm-eval does not write.
    """
    config = results["config"]
    icl = _mapping(config.get("icl"))
    study = _mapping(icl.get("study"))
    groups = _groups(results)
    tasks = {}
    for task, values in results["results"].items():
        if task in groups or task not in results["configs"]:
            continue
        _check_numbers(results, task, _mapping(values))
        try:
            tasks[task] = _task(file, results, scores.get(task), task, _mapping(values))
        except Unusable as error:
            notes.append(f"task {task!r} is left out: {error}")
    if not tasks:
        raise Unusable("has no result of a task" + (f" ({notes[0]})" if notes else ""))
    arguments = model_arguments(config.get("model_args"))
    checkpoint = next((key for key in ("pretrained", "model", "path", "engine") if key in arguments), "pretrained")
    pretrained = arguments.pop(checkpoint, results.get("model_name") or "")
    revision, dtype = arguments.pop("revision", None), arguments.pop("dtype", None)
    revision = config.get("model_sha") or revision or config.get("model_revision") or ""
    order = study.get("order")
    seed = config.get("fewshot_seed")
    date = _number(results.get("date"))
    return Run(
        path=file.path,
        digest=name,
        model=str(config.get("model") or ""),
        pretrained=str(pretrained),
        revision="" if revision == "main" else str(revision),  # "main" is no revision: it moves
        dtype=str(config.get("model_dtype") or dtype or "").removeprefix("torch."),
        arguments=arguments,
        icl=icl,
        seed=seed if type(seed) is int else None,
        order=order if type(order) is int else 0,
        date=date if date is not None and 0 <= date < 253_402_300_800 else 0.0,  # before the year 10000
        limit=_number(config.get("limit")),
        tasks=tasks,
        groups=_weights(results, groups, tasks, notes),
        results=results,
        model_facts=_model_facts(results, icl),
    )


def _model_facts(results: Mapping[str, Any], icl: Mapping[str, Any]) -> dict[str, str]:
    """What a file says of the model beside the checkpoint's name, revision and dtype."""
    said = {name: value for name, value in results["config"].items() if name not in _NOT_OF_MODEL}
    # Beside the tokens that have an effect there is the padding token, which is masked.
    tokens = ("tokenizer_bos_token", "tokenizer_eos_token", "eot_token_id")
    said |= {name: results.get(name) for name in tokens}
    return _texts({**said, "trained": icl.get("trained"), "study.weights": _mapping(icl.get("study")).get("weights")})


def _settings(
    results: Mapping[str, Any], config: Mapping[str, Any], metric: Mapping[str, Any], of_filter: str
) -> dict[str, str]:
    """What a task's configuration says of its numbers, but what is compared as something else.

    Args:
        metric: what the configuration says of the metric that stands for the task.
        of_filter: the filter that stands for it.
    """
    settings = {name: value for name, value in config.items() if name not in (*_NOT_SETTINGS, *_TEMPLATE)}
    of_shots = _mapping(config.get("fewshot_config"))
    shots = {name: value for name, value in of_shots.items() if name not in (*_TEMPLATE, "sampler")}
    # lm-eval before 0.4.10 does not write these out; and it never writes the code of a function in `fewshot_config`.
    shots["split"] = shots.get("split") or config.get("fewshot_split")
    function = re.match(r"<function (\w+)", str(shots.get("process_docs")))
    if function and f"def {function[1]}(" in str(config.get("process_docs")):
        del shots["process_docs"]
    filters = config.get("filter_list")
    metadata, arguments = _mapping(config.get("metadata")), model_arguments(results["config"].get("model_args"))
    settings |= {
        "fewshot_config": shots,
        "metric": metric,
        "filter": [each for each in filters if _mapping(each).get("name") == of_filter]
        if isinstance(filters, list)
        else filters,
        # lm-eval adds the model's arguments.
        "metadata": {key: value for key, value in metadata.items() if key not in (*_NOT_METADATA, *arguments)},
    }
    for name in ("dataset_path", "dataset_kwargs", "metadata"):
        settings[name] = _portable(settings.get(name))
    return _texts(settings)


def _texts(values: Mapping[str, Any], of: str = "") -> dict[str, str]:
    """Values as texts to compare, by name; those in a mapping by both names. Without what is empty, which is as if it
    were not there, and without addresses of memory, which differ between runs."""
    texts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            texts |= _texts(value, f"{of}{name}.")
        elif value is not None and value is not False and value not in ("", []):
            text = value if isinstance(value, str) else json.dumps(whole(value), sort_keys=True, ensure_ascii=False)
            text = _without_addresses(text)
            texts[f"{of}{name}"] = text if len(text) < _SHORT else digest([text])
    return texts


def _without_addresses(text: str) -> str:
    """Without where an object was in memory: lm-eval writes a function as "<function clean at 0x7f08c8b1>"."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def whole(value: Any) -> Any:
    """A number that is whole as an integer: 5 and 5.0 are one value."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _portable(value: Any) -> Any:
    """With the last name alone of paths that begin at the root of somebody's machine."""
    if isinstance(value, dict):
        return {name: _portable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_portable(each) for each in value]
    is_absolute = isinstance(value, str) and re.match(r"[/~]|[A-Za-z]:[\\/]|file:", value)
    return re.split(r"[\\/]", value.rstrip("\\/"))[-1] if is_absolute else value


def _task(file: _File, results: Mapping[str, Any], packed: Any, task: str, values: Mapping[str, Any]) -> TaskResult:
    """A task's result.

    Raises:
        Unusable: it has no number.
    """
    config = _mapping(results["configs"][task])
    of_study = _mapping(_mapping(results["config"].get("icl")).get("study")).get("metric")
    metric, of_filter, entry = _metric(values, config, of_study)
    value = _number(values[f"{metric},{of_filter}"])
    if value is None:
        raise Unusable(f"its {metric} is {str(values[f'{metric},{of_filter}'])[:40]!r}, which is not a number")
    known = _METRICS.get(metric, ("mean", True))
    aggregation = entry.get("aggregation", known[0])
    if aggregation == "bypass":
        raise Unusable("it was run with --predict_only, without a metric")
    higher = _of(results, "higher_is_better", task).get(metric, entry.get("higher_is_better", known[1]))
    of_samples = _of(results, "n-samples", task)
    documents = _count(of_samples.get("effective")) or _count(values.get("sample_len"))
    shots = _mapping(results.get("n-shot")).get(task)
    versions = _mapping(results.get("versions"))
    result = TaskResult(
        task=task,
        metric=metric,
        filter=of_filter,
        value=value,
        stderr=_number(values.get(f"{metric}_stderr,{of_filter}")),
        higher_is_better=higher is not False,
        aggregation=aggregation if aggregation in (*AGGREGATIONS, *dict(_METRICS.values())) else "unknown",
        shots=_count(config.get("num_fewshot") if shots is None else shots),
        documents=documents,
        version=str(versions.get(task, "")),
        template=_template(results, config),
        drawn=_drawn(results, config),
        answers=None,
        settings=_settings(results, config, entry, of_filter),
    )
    return _answer(file, results, packed, result)


def _check_numbers(results: Mapping[str, Any], task: str, values: Mapping[str, Any]) -> None:
    """Check the numbers of a task that would be taken for others.

    Raises:
        Unusable: a number of demonstrations, or a standard error, is none.
    """
    shots = {
        "n-shot": _mapping(results.get("n-shot")).get(task),
        "num_fewshot": _mapping(results["configs"][task]).get("num_fewshot"),
    }
    for name, number in shots.items():
        if number is not None and (type(number) is not int or number < 0):
            raise Unusable(f"the {name} of task {task!r} is {number!r:.40}, which is not a number of demonstrations")
    for name, value in values.items():
        if "_stderr," in name and (number := _number(value)) is not None and number < 0:
            raise Unusable(
                f"the {name.partition(',')[0]} of task {task!r} is {number:g}: no standard error is negative"
            )


def _metric(values: Mapping[str, Any], config: Mapping[str, Any], of_study: Any) -> tuple[str, str, Mapping[str, Any]]:
    """The metric that stands for a task, its first filter, and what the task's configuration says of it.

    Args:
        of_study: the metric that a study names, which comes first.
    """
    filters: dict[str, str] = {}
    for key in values:
        metric, comma, of_filter = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            filters.setdefault(metric, of_filter)
    entries = _entries(config)
    # A metric that is a Python function has its source as its name.
    named = {metric: entry for entry in reversed(entries) for metric in filters if _is_named(entry, metric)}
    first = [metric for entry in entries for metric in filters if named.get(metric) is entry]
    for metric in (*([of_study] if isinstance(of_study, str) else ()), "acc", "exact_match", *first, *filters):
        if metric in filters:
            return metric, filters[metric], named.get(metric, {})
    raise Unusable("it has no metric")


def _is_named(entry: Mapping[str, Any], metric: str) -> bool:
    name = entry.get("metric")
    return name == metric or (isinstance(name, str) and f"def {metric}(" in name)


def _answer(file: _File, results: Mapping[str, Any], packed: Any, result: TaskResult) -> TaskResult:
    """The result with its answers, or with a mark that says why they are not used."""
    marks = []
    if _is_accuracy(result) and not 0 <= result.value <= 1:
        marks.append(f"its {result.metric} of {result.value:g} is not between 0 and 1")
    if result.aggregation not in AGGREGATIONS:
        marks.append(
            f"its {result.metric} is not computed from numbers of single documents, so it is shown as reported"
        )
    answers = None
    try:
        answers = _answers(file, results, packed, result)
        if answers is not None and answers.items.ndim == 2 and result.metric == "metaicl":  # of classification
            result = replace(result, aggregation="macro_f1")
        if not marks and answers is not None:
            _check(answers, result)
        marks += packed_marks(packed)
    except Unusable as error:
        marks.append(f"its samples are not used: {error}")
    marks = [_sentence(mark) for mark in marks]
    if marks or answers is None:
        return replace(result, marks=tuple(dict.fromkeys(marks)))
    return replace(result, documents=len(answers.items), answers=answers)


def _answers(file: _File, results: Mapping[str, Any], packed: Any, result: TaskResult) -> Answers | None:
    if packed is not None:
        return unpack(packed, f"{result.metric},{result.filter}")
    if result.aggregation not in AGGREGATIONS:
        return None
    path = samples_file(file.path, result.task)
    if path.name not in file.beside:
        return None
    if not _is_inside(path, file.root):
        raise Unusable(f"{path.name} is a link out of its folder, or a device")
    return read_answers(lines(path), asked(results, result))


def samples_file(results: Path, task: str) -> Path:
    """The file beside a results file in which lm-eval puts the samples of a task.

    Raises:
        Unusable: the task's name leads to another folder.
    """
    name = f"samples_{task}_{results.stem.rpartition('_')[2]}.jsonl"
    if Path(name).name != name:
        raise Unusable("its name is none of a file")
    return results.with_name(name)


def asked(results: Mapping[str, Any], result: TaskResult) -> Asked:
    """What a task's results say about its samples."""
    config = _mapping(results["configs"][result.task])
    system, description, delimiter = results.get("system_instruction"), config.get("description"), _delimiter(config)
    return Asked(
        metric=result.metric,
        filter=result.filter,
        options=config.get("output_type") == "multiple_choice",
        decided=f"metaicl,{result.filter}" in _of(results, "results", result.task),
        unconditional=any(entry.get("metric") == "acc_mutual_info" for entry in _entries(config)),
        shots=result.shots,
        front=tuple(
            text for text in ((system, delimiter, description) if system else (description,)) if isinstance(text, str)
        ),
        delimiter=delimiter,
    )


def _is_accuracy(result: TaskResult) -> bool:
    return result.metric.startswith("acc") or result.metric == "exact_match"


def _check(answers: Answers, result: TaskResult) -> None:
    """Check that answers are those that the result is of.

    Raises:
        Unusable: they are not.
    """
    items = answers.items
    if result.documents and len(items) != result.documents:
        raise Unusable(f"they are of {len(items)} documents, the results of {result.documents}")
    if np.isinf(items).any() or (np.isnan(items).any() and result.aggregation != "nanmean"):
        raise Unusable(f"the {result.metric} of a document is not a finite number")
    if _is_accuracy(result) and (items.min() < 0 or items.max() > 1):
        raise Unusable(f"the {result.metric} of a document is not between 0 and 1")
    if (items.ndim == 2) != (result.aggregation in _OF_PAIRS):
        raise Unusable(f"the {result.metric} of a document is not what lm-eval's {result.aggregation} is computed from")
    if result.aggregation in ("mean", "nanmean") and not np.isnan(items).all():
        mean = float(np.nanmean(items))
        if not math.isclose(mean, result.value, rel_tol=1e-9, abs_tol=1e-12):
            raise Unusable(f"their mean {result.metric} is {mean:.6g}, in the results it is {result.value:.6g}")


def _template(results: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """A digest of what makes the prompts but the demonstrations.

    What a demonstration's template does not say is as in the query's: lm-eval before 0.4.10 does not write it out.
    """
    of_shots = _mapping(config.get("fewshot_config"))
    chat = results.get("chat_template") or results.get("chat_template_sha")
    parts = {
        "query": [config.get(name) for name in _TEMPLATE],
        "shots": [config.get(name) if of_shots.get(name) is None else of_shots[name] for name in _TEMPLATE],
        "description": config.get("description") or "",
        "system": results.get("system_instruction") or results.get("system_instruction_sha"),
        "chat": [chat, bool(results.get("fewshot_as_multiturn"))] if chat else None,
        # MetaICL's: the options are compared by other scores.
        **({"pmi": True} if _mapping(config.get("metadata")).get("pmi") is True else {}),
    }
    return digest([_without_addresses(json.dumps(parts, sort_keys=True))])


def _drawn(results: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """How the demonstrations were chosen: as a study says, or a task of this package, or lm-eval's sampler."""
    of_study = _mapping(_mapping(results["config"].get("icl")).get("study")).get("demonstrations")
    of_task = _mapping(config.get("metadata")).get("demonstrations")
    sampler = _mapping(config.get("fewshot_config")).get("sampler")
    drawn = of_study or of_task or (None if sampler == "default" else sampler)
    return drawn if isinstance(drawn, str) else None


def _groups(results: Mapping[str, Any]) -> dict[str, list[str]]:
    """The groups of a run with what is in them; before lm-eval 0.4.10, a task is among them as a group of nothing."""
    found = _mapping(results.get("group_subtasks"))
    return {
        name: [inner for inner in inside if isinstance(inner, str)]
        for name, inside in found.items()
        if isinstance(inside, list) and inside
    }


def _leaves(name: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks in a group and in the groups in it."""
    found: dict[str, None] = {}
    waiting, seen = [name], {name}
    while waiting:
        for inner in groups[waiting.pop()]:
            if inner not in groups:
                found[inner] = None
            elif inner not in seen:
                seen.add(inner)
                waiting.append(inner)
    return list(found)


def _weights(
    results: Mapping[str, Any], groups: Mapping[str, list[str]], tasks: Mapping[str, TaskResult], notes: list[str]
) -> dict[str, dict[str, float]]:
    """The weights of tasks in groups.

    lm-eval's value of a group is the mean over all tasks in it, however deep, by their documents or with equal weights,
    and it does not say which: the one that gives its value, or if both do, its standard error too.
    """
    found = {}
    for name in groups:
        values = _mapping(_mapping(results.get("groups")).get(name)) or _mapping(results["results"].get(name))
        members = _leaves(name, groups)
        reported = [key for key, value in values.items() if "," in key and _number(value) is not None]
        if not reported or not members:
            continue  # it has no value: it is only a name for several tasks
        missing = [task for task in members if task not in tasks]
        if missing:
            notes.append(f"group {name!r} is left out: it has no result of its task {missing[0]!r}")
            continue
        of = [tasks[task] for task in members]
        kinds = {(task.metric, task.filter) for task in of}
        metric, of_filter = min(kinds)
        value = _number(values.get(f"{metric},{of_filter}"))
        if len(kinds) > 1 or value is None:
            notes.append(f"group {name!r} is left out: its value is not of the metric that stands for its tasks")
            continue
        sizes = np.array([_size(results, task) for task in of])
        scores = np.array([task.value for task in of])
        choices = [sizes / sizes.sum()] if sizes.all() else []
        choices.append(np.full(len(of), 1 / len(of)))
        fitting = [each for each in choices if math.isclose(each @ scores, value, rel_tol=1e-9, abs_tol=1e-12)]
        if not fitting:
            notes.append(f"group {name!r} is left out: its {metric} is no mean of its tasks', by documents or equal")
            continue
        if len(fitting) > 1 and not np.array_equal(*fitting):
            fitting = _of_error(fitting, of, sizes, _number(values.get(f"{metric}_stderr,{of_filter}"))) or fitting
        found[name] = {task.task: float(weight) for task, weight in zip(of, fitting[0], strict=True)}
    return found


def _size(results: Mapping[str, Any], task: TaskResult) -> float:
    """How many documents of a task lm-eval counts for its groups."""
    return float(_count(_of(results, "results", task.task).get("sample_len")) or task.documents)


def _of_error(
    choices: list[np.ndarray], of: Sequence[TaskResult], sizes: np.ndarray, reported: float | None
) -> list[np.ndarray]:
    """Those of the two kinds of weights, by documents and equal, that give the standard error that is reported."""
    if reported is None or any(task.stderr is None for task in of) or sizes.sum() == len(of):
        return []
    squares = np.array([task.stderr for task in of], dtype=float) ** 2
    pooled = math.sqrt(((sizes - 1) * sizes * squares).sum() / (sizes.sum() - len(of)) / sizes.sum())
    equal = math.sqrt(squares.sum()) / len(of)
    errors = zip(choices, (pooled, equal), strict=True)
    return [each for each, error in errors if math.isclose(error, reported, rel_tol=1e-9)]


def model_arguments(given: Any) -> dict[str, Any]:
    """`model_args`, which are text in results of older versions of lm-eval: `name=value,...`, or JSON."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            given = json.loads(given)
    if isinstance(given, dict):
        return dict(given)
    pairs = (part.partition("=") for part in given.split(",") if part) if isinstance(given, str) else ()
    return {name.strip(): _value(text.strip()) for name, _, text in pairs}


def _value(text: str) -> Any:
    """An argument's value, as lm-eval reads it."""
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _entries(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a task's configuration says of its metrics."""
    listed = config.get("metric_list")
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def _delimiter(config: Mapping[str, Any]) -> str:
    delimiter = config.get("fewshot_delimiter", "\n\n")
    return delimiter if isinstance(delimiter, str) else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _of(results: Mapping[str, Any], key: str, task: str) -> Mapping[str, Any]:
    return _mapping(_mapping(results.get(key)).get(task))


def _number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floats
        return None


def _count(value: Any) -> int:
    """How many; 0 for what is no number of things."""
    return value if type(value) is int and 0 <= value < 2**53 else 0
