"""Which runs share a row, and which results share a column: every compared field of a results file, as data.

A row says who answered, and a column says what was asked. A field has a path in lm-eval's file, a name, and a kind:

    row         always in the row's key: the model, the method with all its arguments, how prompts are put to it
    switch      in the row's key only if some cell would hold two values otherwise, and then for the whole board; a
                file without the field agrees with a single value
    column      always in the column's key
    repetition  tells apart the results inside a cell
    neither     in no key, for the reason that is given

Paths begin with `config`, `model_args` (which may be text), `icl` (`config.icl`), `task` (`configs.TASK`) or `file`.
A field that is not listed separates rows if its path begins with one of the first three, and columns under `task`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lm_eval_icl.results.records import StudyFacts, at, mapping

CHOSEN = "chosen on dev"


@dataclass(frozen=True)
class Field:
    """A field, or several fields of the same kind and name."""

    kind: str  # see above
    paths: str  # in lm-eval's file, with everything inside. The first path that is there gives the value
    name: str = ""  # for the kind "neither": why the field does not matter
    part: str = ""  # for the kind "row": "model", "method" or "setting". Only its method tells a row from its baseline


FIELDS = (
    Field("row", "model_args.pretrained model_args.model model_args.path model_args.engine file.model_name",
          "checkpoint", "model"),
    Field("row", "config.model_sha model_args.revision config.model_revision", "revision", "model"),
    Field("row", "config.model_dtype model_args.dtype", "dtype", "model"),
    Field("row", "icl.method config.model", "method", "method"),
    Field("row", "file.chat_template_sha file.chat_template", "chat", "setting"),
    Field("row", "file.fewshot_as_multiturn", "multiturn", "setting"),
    Field("row", "file.system_instruction_sha file.system_instruction", "system", "setting"),
    Field("row", "task.metadata.labels", "labels", "setting"),
    Field("switch", "file.n-shot task.num_fewshot", "shots"),
    Field("switch", "icl.study.demonstrations task.metadata.demonstrations task.fewshot_config.sampler",
          "demonstrations"),
    Field("switch", "icl.study.training", "training"),
    Field("switch", "config.model_files_digest icl.study.weights", "weights"),
    Field("column", "file.versions", "version"),
    Field("column", "config.limit", "limit"),
    Field("repetition", "config.fewshot_seed", "seed"),
    Field("repetition", "icl.study.order", "order"),
    Field("repetition", "task.metadata.format", "format"),
    Field("neither", "icl.version icl.commit icl.form", "code"),
    Field("neither", "icl.left_out icl.truncated icl.overflow model_args.overflow", "what was left out marks the cell"),
    Field("neither", "icl.own_demonstrations task.metadata.retrieved", "where demonstrations are from marks the cell"),
    Field("neither", "icl.contexts_encoded icl.contexts_reused icl.tokens_run icl.tokens_saved icl.passes "
          "icl.shared_demonstrations icl.peak_bytes", "counts"),
    Field("neither", "icl.pack_tokens icl.store_bytes model_args.pack_tokens model_args.store_bytes "
          "model_args.batch_size model_args.max_batch_size model_args.attn_implementation config.batch_size "
          "config.batch_sizes", "rounding"),
    Field("neither", "task.metadata.decided icl.study config.icl config.model_args",
          "read, and compared, entry by entry"),
    Field("neither", "model_args.device model_args.parallelize model_args.device_map model_args.max_memory_per_gpu "
          "model_args.max_cpu_memory model_args.offload_folder model_args.tensor_parallel_size "
          "model_args.data_parallel_size model_args.gpu_memory_utilization model_args.tp_plan "
          "model_args.num_concurrent config.device", "where it ran"),
    Field("neither", "model_args.cache_dir model_args.token model_args.trust_remote_code model_args.max_retries "
          "model_args.timeout config.use_cache", "how a checkpoint or an answer is obtained"),
    Field("neither", "config.random_seed config.numpy_seed config.torch_seed config.bootstrap_iters", "draws"),
    Field("neither", "config.gen_kwargs", "lm-eval writes them into the tasks that generate"),
    Field("neither", "task.task task.task_alias task.tag task.group task.class", "names"),
    Field("neither", "task.fewshot_split task.metric_list task.filter_list task.metadata.version",
          "stand elsewhere: in fewshot_config, as the column's own, in versions"),
    Field("neither", "task.should_decontaminate task.doc_to_decontamination_query task.unsafe_code "
          "task.metadata.config_source", "not of the numbers"),
    Field("neither", "task.metadata.decide", "further values of the same run"),
    Field("neither", "task.metadata.relabeled task.metadata.unformatted", "follow from the labels and the format"),
)  # fmt: skip
_DECLARED = {path: field for field in FIELDS for path in field.paths.split()}
# The fields that make a task's prompts, besides the demonstrations. Demonstrations have the query's unless they differ.
_TEMPLATE = (
    "doc_to_text",
    "doc_to_target",
    "doc_to_choice",
    "gen_prefix",
    "target_delimiter",
    "fewshot_delimiter",
)
_SHORT = 32  # shorter texts are compared and shown as they are, others by their digest


def digest(texts: Iterable[str]) -> str:
    """A digest of several texts. It includes their lengths, so that other divisions of the same text differ."""
    state = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        state.update(b"%d:%b" % (len(data), data))
    return state.hexdigest()[:32]


def model_arguments(recorded: Any) -> dict[str, Any]:
    """`model_args` as a dictionary. They are text (`name=value,...`) if Python's `simple_evaluate` was given text."""
    if not isinstance(recorded, str):
        return dict(mapping(recorded))
    arguments = {}
    for part in filter(None, recorded.split(",")):
        name, _, text = part.partition("=")
        with suppress(ValueError):
            text = (
                json.loads(text.lower()) if text.lower() in ("true", "false") else json.loads(text)
            )
        arguments[name.strip()] = text
    return arguments


def declared(kind: str, sources: Mapping[str, Any], task: str = "") -> dict[str, Any]:
    """Name -> value of the declared fields of a kind that are there and not empty. `sources` has the contents of the
    file by the first part of a path. If the file has a value for each task, the value of `task` is taken."""
    values: dict[str, Any] = {}
    for field in FIELDS:
        for path in field.paths.split() if field.kind == kind else ():
            value = at(sources, *path.split("."))
            value = (
                value.get(task)
                if isinstance(value, dict) and path in ("file.n-shot", "file.versions")
                else value
            )
            if value not in (None, "", [], {}, False):
                values.setdefault(field.name, value)
    return values


def undeclared(name: str, values: Mapping[str, Any], inside: str = "") -> dict[str, str]:
    """Path -> text to compare, for all fields that are not declared. Empty values count as missing."""
    texts: dict[str, str] = {}
    for key, value in values.items():
        path = f"{inside}{key}"
        if f"{name}.{path}" in _DECLARED:
            continue
        if isinstance(value, dict):
            texts |= undeclared(name, value, f"{path}.")
        elif value is not None and value is not False and value not in ("", []):
            texts[path] = as_text(value)
    return texts


def as_text(value: Any) -> str:
    """A value as text: 5.0 is written as 5, addresses in memory are removed, and a long text becomes its digest."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = (
        value
        if isinstance(value, str)
        else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    )
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return text if len(text) < _SHORT else digest([text])


def row_fields(results: Mapping[str, Any], study: StudyFacts) -> dict[str, dict[str, str]]:
    """The fields that say who answered, as texts by name, in the parts "model", "method" and "setting"."""
    config = mapping(results.get("config"))
    icl, arguments = mapping(config.get("icl")), model_arguments(config.get("model_args"))
    task = next(
        iter(mapping(results.get("configs")).values()), None
    )  # all tasks of a run have its metadata
    sources = {"config": config, "icl": icl, "model_args": arguments, "file": results, "task": task}
    values = declared("row", sources)
    if study.model is not None and study.training is not None:
        values["checkpoint"], values["revision"] = f"{study.model} (trained)", ""
    if values.get("revision") == "main":  # a branch, which moves, and no revision
        del values["revision"]
    values["dtype"] = str(values.get("dtype", "")).removeprefix("torch.")
    if "chat" not in values:  # without a chat template there are no turns
        values.pop("multiturn", None)
    rows: dict[str, dict[str, str]] = {"model": {}, "method": {}, "setting": {}}
    for field in FIELDS:
        if field.kind == "row" and field.name in values:
            rows[field.part][field.name] = str(values[field.name])
    rows["model"] |= undeclared("config", config)
    # A study's training is a switch; `trained` would also tell apart the models that it has trained.
    reported = undeclared("icl", {**icl, "trained": None} if study.training is not None else icl)
    # A model of this package reports all its arguments, with defaults. The arguments of other models are added.
    given = {
        name: text
        for name, text in undeclared("model_args", arguments).items()
        if name not in reported
    }
    on_dev = {name: CHOSEN for name in study.chosen if name in reported | given or name == "seeds"}
    rows["method"] |= given | reported | on_dev
    return rows


def column_fields(
    results: Mapping[str, Any], task: str, metric: str, filter_name: str, size: int
) -> dict[str, str]:
    """The fields that say what was asked, as texts by name."""
    config, arguments = mapping(at(results, "configs", task)), mapping(at(results, "config"))
    values = declared("column", {"config": arguments, "file": results, "task": config}, task)
    if unformatted := mapping(
        at(config, "metadata", "unformatted")
    ):  # in every format, it is the same task
        shots = {
            **mapping(config.get("fewshot_config")),
            **mapping(unformatted.get("fewshot_config")),
        }
        config = {**config, **unformatted, "fewshot_config": shots}
    shots = mapping(config.get("fewshot_config"))
    query = [config.get(key) for key in _TEMPLATE]
    demonstration = [config.get(key) if shots.get(key) is None else shots[key] for key in _TEMPLATE]
    template = json.dumps(
        [query, demonstration, config.get("description") or ""], sort_keys=True, default=str
    )
    given = model_arguments(
        arguments.get("model_args")
    )  # lm-eval adds them to the metadata of tasks
    metadata = {
        key: value for key, value in mapping(config.get("metadata")).items() if key not in given
    }
    shots = {key: value for key, value in shots.items() if key not in (*_TEMPLATE, "sampler")}
    shots["split"] = shots.get("split") or config.get("fewshot_split")
    function = re.match(r"<function (\w+)", str(shots.get("process_docs")))
    if function and f"def {function[1]}(" in str(
        config.get("process_docs")
    ):  # lm-eval does not write its code
        del shots["process_docs"]
    rest = {key: value for key, value in config.items() if key not in (*_TEMPLATE, "description")}
    rest |= {"metadata": _portable(metadata), "fewshot_config": shots}
    rest |= {
        key: _portable(config[key]) for key in ("dataset_path", "dataset_kwargs") if key in config
    }
    filters = config.get("filter_list")
    entries = (
        [entry for entry in filters if at(entry, "name") == filter_name]
        if isinstance(filters, list)
        else []
    )
    return {
        **{"metric": metric, "filter": as_text([filter_name, entries] if entries else filter_name)},
        **{name: as_text(value) for name, value in values.items()},
        **{"documents": str(size), "template": digest([as_text(template)])[:6]},
        **undeclared("task", rest),
    }


def switch_fields(results: Mapping[str, Any], task: str) -> dict[str, str | None]:
    """The switches of a task's result by name; None for a switch that the file does not have."""
    config = mapping(results.get("config"))
    sources = {"config": config, "icl": mapping(config.get("icl")), "file": results,
               "task": mapping(at(results, "configs", task))}  # fmt: skip
    values = {"shots": "0", **declared("switch", sources, task)}
    if values.get("demonstrations") == "default":  # lm-eval's own sampler
        del values["demonstrations"]
    names = (field.name for field in FIELDS if field.kind == "switch")
    return {name: as_text(values[name]) if name in values else None for name in names}


def _portable(value: Any) -> Any:
    """The value, with every absolute path reduced to its last name, since its beginning belongs to one machine."""
    if isinstance(value, dict):
        return {name: _portable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_portable(inner) for inner in value]
    is_absolute = isinstance(value, str) and re.match(r"[/~]|[A-Za-z]:[\\/]|file:", value)
    return re.split(r"[\\/]", value.rstrip("\\/"))[-1] if is_absolute else value
