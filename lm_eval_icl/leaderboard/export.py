"""Results as logs of Every Eval Ever: https://github.com/evaleval/every_eval_ever

    data/TASK/OWNER/MODEL/ID.json             a log for each run and task
    data/TASK/OWNER/MODEL/ID_samples.jsonl    what was asked and answered, document by document

Nothing is uploaded. Names of models and tasks come from other people's files, and only letters, digits, ".", "_" and
"-" of them become names of files and folders.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_icl.errors import InputError, one_line, writing
from lm_eval_icl.files import replacing
from lm_eval_icl.results.board import TaskRun
from lm_eval_icl.results.entries import unused
from lm_eval_icl.results.form import at, number, reads_in_words
from lm_eval_icl.results.read import samples_file
from lm_eval_icl.results.records import Answers, LeftOutFile, Run, TaskResult
from lm_eval_icl.results.samples import Unusable, lines

RELATIONSHIPS = ("first_party", "third_party", "collaborative", "other")
# The version of the schemas in tests/schemas.
EEE_VERSION = "0.3.0"
# The least and the greatest value of lm-eval's metrics. Every Eval Ever calls no metric continuous without them.
PROPORTIONS = frozenset("acc acc_norm acc_mutual_info acc_bytes exact_match em f1 mc1 mc2".split())
BOUNDS: Mapping[str, tuple[float | str, float | str]] = {
    **dict.fromkeys(PROPORTIONS, (0.0, 1.0)),
    "mcc": (-1.0, 1.0),
    "brier_score": (0.0, 2.0),
    "perplexity": (1.0, "Infinity"),
    "word_perplexity": (1.0, "Infinity"),
    "byte_perplexity": (1.0, "Infinity"),
    "bits_per_byte": (0.0, "Infinity"),
}
# Every Eval Ever's identifiers of metrics; others have the harness before their name.
METRIC_IDS = {
    "acc": "accuracy",
    "exact_match": "exact-match",
    "em": "exact-match",
    "f1": "f1",
    "perplexity": "perplexity",
}
ENGINES = {"hf": "transformers", "vllm": "vllm", "sglang": "sglang", "gguf": "llama.cpp"}

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?|data|unknown|", re.IGNORECASE)
_UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)  # of a file's content
_LONGEST = 80  # characters of a name of a file or folder


@dataclass(frozen=True)
class Exported:
    """What `export` wrote, and what it did not.

    Attributes:
        files: all files that there are now, those that were there before with the same content too.
        left_out: runs' tasks that the format has no place for, and why.
    """

    files: tuple[Path, ...]
    left_out: tuple[LeftOutFile, ...]


def export(
    runs: Sequence[Run],
    folder: Path,
    *,
    organization: str = "",
    relationship: str = "third_party",
    developer: str = "local",
) -> Exported:
    """Write runs as logs of Every Eval Ever. Run again, it writes the same bytes.

    Args:
        folder: is made if it does not exist. Files of the same runs in it are replaced.
        organization: who ran the evaluation; by default "unknown".
        relationship: of that organization to the model's developer, one of `RELATIONSHIPS`.
        developer: the owner of checkpoints that are folders, or have no owner in their name.

    Raises:
        InputError: an argument is wrong, or a file cannot be written.
    """
    if relationship not in RELATIONSHIPS:
        raise InputError(f"--relationship {relationship}: must be one of {', '.join(RELATIONSHIPS)}.")
    files: list[Path] = []
    left_out: list[LeftOutFile] = []
    for run in list({run.digest: run for run in reversed(runs)}.values())[::-1]:  # copies of a run count once
        # The owner and the name of the checkpoint's repository; of a folder `developer` and the end of its path.
        owner, name = run.pretrained.split("/") if _is_hub_id(run.pretrained) else (developer, run.pretrained)
        name = next(filter(None, reversed(re.split(r"[/\\]", name))), "")
        identity = _plain(owner), _plain(name)
        without_documents = 0
        for task, result in run.tasks.items():
            if not _possible(result):
                left_out.append(
                    LeftOutFile(run.path, f"{task}: {result.metric} is {result.value}, which it cannot be.")
                )
                continue
            log = _log(run, result, identity, organization, relationship)
            # Identifiers of Every Eval Ever are random; this has their form and is the same for copies of a run.
            digest = hashlib.sha256(f"{run.digest}\0{task}".encode(errors="replace")).digest()
            path = "/".join(["data", _plain(task), *identity, str(uuid.UUID(bytes=digest[:16], version=4))])
            rows: list[dict[str, Any]] = []
            try:
                rows = _rows(run, result, log)
            except _UNUSABLE as error:
                why = str(error) if isinstance(error, Unusable) else one_line(error)
                left_out.append(LeftOutFile(run.path, f"{task}: its samples cannot be used: {why}."))
            else:
                without_documents += not rows
            samples = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
            if samples:
                log["detailed_evaluation_results"] = {
                    "format": "jsonl",
                    "file_path": f"{path}_samples.jsonl",
                    "hash_algorithm": "sha256",
                    "checksum": hashlib.sha256(samples.encode()).hexdigest(),
                    "total_rows": len(rows),
                }
            # Samples come before the log that points to them. Those of an earlier export that no log points to go.
            whole = json.dumps(log, indent=2, allow_nan=False) + "\n"
            for name, text in ((f"{path}_samples.jsonl", samples), (f"{path}.json", whole)):
                if _write(folder, name, text):
                    files.append(folder / name)
        if without_documents:
            tasks = f"{without_documents} of {len(run.tasks)} tasks have no documents in the export"
            why = f"{tasks}: there is no samples file beside the results, or no answer is right or wrong."
            left_out.append(LeftOutFile(run.path, why))
    return Exported(tuple(files), tuple(left_out))


def _write(folder: Path, path: str, text: str) -> bool:
    """Write a file below the folder, unless it has this content already; without any content, remove the file.

    Returns:
        whether there is a file now.
    """
    file = folder / path
    with writing(file):
        if not file.resolve().is_relative_to(folder.resolve()):  # through a link in the folder
            raise InputError(f"--output {folder}: {path} leads out of the folder; remove the link.")
        if not text:
            file.unlink(missing_ok=True)
        elif not (file.is_file() and file.read_bytes() == text.encode()):
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as half:
                half.write_bytes(text.encode())
    return bool(text)


def _log(
    run: Run, result: TaskResult, identity: tuple[str, str], organization: str, relationship: str
) -> dict[str, Any]:
    """A log, without its samples. Values of all `additional_details` are strings."""
    owner, name = identity
    arguments = ", ".join(f"{name}={_text(value)}" for name, value in run.arguments.items())
    label = _text(f"{run.model} {arguments}".strip())
    config = at(run.results, "config")
    engine = ENGINES.get("hf" if run.icl else run.model)
    version = at(run.results, "transformers_version") if engine == "transformers" else None
    return {
        "schema_version": EEE_VERSION,
        "evaluation_id": f"{_text(result.task)}/{owner}/{name}/{run.digest}",
        "evaluation_timestamp": str(int(run.date)),
        # When this file was made would be another time at every export.
        "retrieved_timestamp": str(int(run.date)),
        "source_metadata": {
            "source_name": "lm-evaluation-harness",
            "source_type": "evaluation_run",
            "source_organization_name": _text(organization or "unknown"),
            "evaluator_relationship": relationship,
        },
        "eval_library": {
            "name": "lm_eval",
            "version": _text(at(run.results, "lm_eval_version") or "unknown"),
            "additional_details": _details(
                git_hash=at(run.results, "git_hash"),
                lm_eval_icl_version=run.icl.get("version"),
                lm_eval_icl_commit=run.icl.get("commit"),
            ),
        },
        "model_info": {
            "name": f"{name} ({label if len(label) <= 300 else label[:297] + '...'})",
            "id": f"{owner}/{name}",
            "developer": owner,
            **({"inference_engine": {"name": engine, **_details(version=version)}} if engine else {}),
            "additional_details": {
                "deployment_type": "self_deployed" if engine else "unknown",
                "model_availability": "unknown",
                **_details(revision=run.revision, dtype=run.dtype, num_parameters=at(config, "model_num_parameters")),
            },
        },
        "evaluation_results": [
            _evaluation(run, evaluated) for evaluated in _metrics(run, result) if _possible(evaluated)
        ],
    }


def _evaluation(run: Run, result: TaskResult) -> dict[str, Any]:
    """One metric of a task, by itself or under a decision rule."""
    config = at(run.results, "configs", result.task)
    answers, rule = result.answers, result.rule
    bounds = BOUNDS.get(result.metric)
    uncertainty = _uncertainty(run, result)
    # Of lm-eval's arguments of the generation, those that the schema has a name for.
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_gen_toks": "max_tokens"}
    arguments = {name: at(config, "generation_kwargs", theirs) for theirs, name in names.items()}
    generation = {name: value for name, value in arguments.items() if number(value) is not None}
    if type(most := generation.get("max_tokens", 1)) is not int or most <= 0:
        del generation["max_tokens"]
    return {
        **_names(result),
        "evaluation_timestamp": str(int(run.date)),
        "source_data": _source(run, result),
        "metric_config": {
            "metric_id": METRIC_IDS.get(result.metric, f"lm-evaluation-harness.{_text(result.metric)}"),
            "metric_name": _text(result.metric),
            "lower_is_better": not result.higher_is_better,
            **({"metric_unit": "proportion"} if result.metric in PROPORTIONS else {}),
            **({"score_type": "continuous", "min_score": bounds[0], "max_score": bounds[1]} if bounds else {}),
            "additional_details": _details(aggregation=result.aggregation, filter=result.reported_filter),
        },
        "score_details": {
            "score": float(result.value),
            "details": _details(
                standard_error="over documents, for these demonstrations" if "standard_error" in uncertainty else None,
                marks=" ".join(result.marks),
            ),
            "uncertainty": uncertainty,
        },
        "generation_config": {
            "generation_args": generation,
            "additional_details": _details(
                method=run.model,
                method_arguments=run.arguments,
                num_fewshot=result.shots,
                num_fewshot_used=result.shots - n if (n := unused(TaskRun(run, result))) else None,
                fewshot_seed=run.seed,
                demonstrations_order=run.order,
                demonstrations_drawn=result.drawn,
                demonstrations_digest=answers and answers.demonstrations,
                prompts_digest=answers and answers.prompts,
                documents_digest=answers and answers.documents,
                template_digest=result.template,
                decision_rule=rule and rule.name,
                decision_rule_arguments=rule and rule.arguments,
                decision_rule_reads=rule and ", ".join(reads_in_words([rule])),
                lm_eval_icl=dict(run.icl) or None,
            ),
        },
    }


def _names(result: TaskResult) -> dict[str, str]:
    """A task's metric as the converter of Every Eval Ever names it."""
    metric, task = result.metric, result.task
    if (of_filter := result.reported_filter) != "none":
        metric, task = f"{metric}:{of_filter}", f"{task}/{of_filter}"
    return {"evaluation_result_id": _text(metric), "evaluation_name": _text(task)}


def _metrics(run: Run, result: TaskResult) -> Iterator[TaskResult]:
    """The metric that stands for the task, the same under decision rules, then its others as lm-eval's results have
    them: those under a rule only if it is known what the rule reads."""
    of_task = {decided.reported_filter: decided for decided in (result, *run.decided) if decided.task == result.task}
    yield from of_task.values()
    rules = at(run.results, "config", "icl", "decided", result.task)
    values = at(run.results, "results", result.task)
    listed = at(run.results, "configs", result.task, "metric_list")
    listed = listed if isinstance(listed, Sequence) else ()
    for key, value in values.items() if isinstance(values, Mapping) else ():
        metric, _, filter_ = key.partition(",")
        higher = at(run.results, "higher_is_better", result.task, metric)
        score = number(value)
        is_known = metric == result.metric and filter_ in of_task
        is_unknown_rule = isinstance(rules, Mapping) and filter_ in rules and filter_ not in of_task
        if is_known or is_unknown_rule or score is None or not isinstance(higher, bool):
            continue
        named = [at(entry, "aggregation") for entry in listed if at(entry, "metric") == metric]
        yield replace(
            of_task.get(filter_, result),
            metric=metric,
            value=score,
            stderr=number(values.get(f"{metric}_stderr,{filter_}")),
            higher_is_better=higher,
            aggregation=named[0] if named and isinstance(named[0], str) else "",
            marks=(),
            **({} if filter_ in of_task else {"filter": filter_}),
        )


def _possible(result: TaskResult) -> bool:
    """Whether the value can be one of this metric."""
    low, high = BOUNDS.get(result.metric, ("-Infinity", "Infinity"))
    return number(result.value) is not None and float(low) <= result.value <= float(high)


def _uncertainty(run: Run, result: TaskResult) -> dict[str, Any]:
    """lm-eval's standard error: over documents alone, for the demonstrations of the run."""
    uncertainty: dict[str, Any] = {"num_samples": int(result.documents)}
    if (error := number(result.stderr)) is not None and error >= 0:
        uncertainty["standard_error"] = {"value": error}
        if result.aggregation in ("mean", "acc_all"):
            uncertainty["standard_error"]["method"] = "analytic"
        # For all other aggregations lm-eval has either this or no standard error.
        elif result.aggregation not in ("", "unknown"):
            uncertainty["standard_error"]["method"] = "bootstrap"
            draws = at(run.results, "config", "bootstrap_iters")
            if type(draws) is int and result.aggregation not in ("bleu", "chrf", "ter"):  # lm-eval takes fewer
                uncertainty["num_bootstrap_samples"] = draws
    return uncertainty


def _source(run: Run, result: TaskResult) -> dict[str, Any]:
    """Where the documents are from."""
    config = at(run.results, "configs", result.task)
    dataset = at(config, "dataset_path")
    split = at(config, "test_split") or at(config, "validation_split")
    original = at(run.results, "n-samples", result.task, "original")
    source: dict[str, Any] = {"dataset_name": _text(result.task), "source_type": "other"}
    if _is_hub_id(dataset):
        source |= {"source_type": "hf_dataset", "hf_repo": dataset}
        source |= {"hf_split": _text(split)} if split else {}
        source |= {"samples_number": original} if type(original) is int else {}
    details = _details(dataset_config=at(config, "dataset_name"), task_version=result.version, limit=run.limit)
    return {**source, "additional_details": details}


# ---------------------------------------------------------------------------------------------------------------
# Document by document.


def _rows(run: Run, result: TaskResult, log: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each document, with what lm-eval's samples file beside the results says of it.

    There are none without that file: a row must have the text of its document, which a `Run` has not. Nor are there
    any for a metric like perplexity, where no answer is right or wrong. If the file does not have the answers of the
    run, one of the errors `_UNUSABLE` is raised.
    """
    answers = result.answers
    if answers is None or result.metric not in PROPORTIONS:
        return []
    if not (file := samples_file(run.path, result.task)).is_file():
        return []
    positions = {int(doc_id): position for position, doc_id in enumerate(answers.doc_ids)}
    rows: dict[int, dict[str, Any]] = {}
    for sample in lines(file):
        if sample.get("filter", result.filter) == result.filter:
            position = positions[sample["doc_id"]]
            if position in rows:
                raise Unusable(f"document {sample['doc_id']} is in {file.name} twice")
            rows[position] = _row(result, answers, position, sample, log)
    if len(rows) != len(positions):
        raise Unusable(f"{file.name} has {len(rows)} of the {len(positions)} documents")
    return [rows[position] for position in range(len(positions))]


def _row(
    result: TaskResult, answers: Answers, position: int, sample: Mapping[str, Any], log: Mapping[str, Any]
) -> dict[str, Any]:
    item = answers.items[position]
    if not np.array_equal(np.asarray(sample[result.metric], dtype=float), item):
        raise Unusable(f"its {result.metric} of document {sample['doc_id']} is not that of the results")
    score = float(item if np.ndim(item) == 0 else item[0] == item[1])
    requests = list(sample["arguments"].values())
    requests = [request for request in requests if request["arg_0"]] or requests  # without `acc_mutual_info`'s others
    prompt, target = _text(requests[0]["arg_0"]), _text(sample["target"])
    hashed = json.dumps({"raw": prompt, "reference": target}, sort_keys=True)
    choices = predicted = None
    if answers.predictions is None:
        output, extracted = _text(sample["resps"][0][0]), _text(sample["filtered_resps"][0])
        how = _text(result.filter)
    else:
        choices = [_text(request["arg_1"]).strip() for request in requests]
        predicted = int(answers.predictions[position])
        output = extracted = choices[predicted]
        how = "highest log-likelihood"
    hashes = {name: sample.get(name) for name in ("doc_hash", "prompt_hash", "target_hash")}
    return {
        "schema_version": EEE_VERSION,
        "evaluation_id": log["evaluation_id"],
        "model_id": log["model_info"]["id"],
        **_names(result),
        "sample_id": str(sample["doc_id"]),
        # As the converter of Every Eval Ever makes it, so that runs converted by either can be joined.
        "sample_hash": hashlib.sha256(hashed.encode()).hexdigest(),
        "interaction_type": "single_turn",
        "input": {"raw": prompt, "reference": [target], "choices": choices},
        "output": {"raw": [output]},
        "answer_attribution": [
            {
                "turn_idx": 0,
                "source": "output.raw",
                "extracted_value": extracted,
                "extraction_method": how,
                "is_terminal": True,
            }
        ],
        "evaluation": {"score": score, "is_correct": score == 1},
        "metadata": _details(**hashes, predicted_option=predicted),
    }


# ---------------------------------------------------------------------------------------------------------------
# Names and texts.


def _is_hub_id(name: Any) -> bool:
    """Whether a name can be one of a repository on the Hub: owner/name."""
    return isinstance(name, str) and len(name) <= 96 and _HUB_ID.fullmatch(name) is not None and ".." not in name


def _plain(name: str) -> str:
    """A name as one of a file or folder on every system, and as a part of a path of Every Eval Ever."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:_LONGEST].rstrip(".-")
    return f"x-{plain}" if _RESERVED.fullmatch(plain) else plain


def _details(**values: Any) -> dict[str, str]:
    """Strings, as the schemas want them, of what is known."""
    return {name: _text(value) for name, value in values.items() if value is not None and value != ""}


def _text(value: Any) -> str:
    """A string that is valid in UTF-8."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text.encode(errors="replace").decode()
