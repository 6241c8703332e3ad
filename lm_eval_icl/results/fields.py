"""Which runs are one row, and which results one column: every field of a results file that is compared, as data.

Who answered is a row, what was asked is a column. A field has a path in lm-eval's file, a name, and a kind:

    row         always in the row's key: the model, the method with all its arguments, how prompts are put to it
    switch      in the row's key only if some cell would hold two values otherwise, and then for the whole board; a
                file that does not say agrees with one value
    column      always in the column's key
    repetition  the cell's own axes
    neither     in no key, for the reason that is given

Paths begin with `config`, `model_args` (which may be text), `icl` (`config.icl`), `task` (`configs.TASK`) or `file`.
What of these but the last stands in no list separates: rows under the first three, columns under `task`.
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
    """A field, or several alike."""

    kind: str  # see above
    paths: str  # in lm-eval's file; with all that is inside. Of one name, the first that is there counts
    name: str = ""  # of neither: why it does not matter
    part: str = ""  # of a row: "model", "method" or "setting". A baseline differs in the method alone


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
    Field("neither", "icl.contexts_encoded icl.contexts_reused icl.tokens_run icl.tokens_saved", "counts"),
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
          "model_args.timeout config.use_cache", "how a checkpoint or an answer is had"),
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
# What makes a task's prompts but the demonstrations; in a demonstration as in the query, where it is not said.
_TEMPLATE = ("doc_to_text", "doc_to_target", "doc_to_choice", "gen_prefix", "target_delimiter", "fewshot_delimiter")
_SHORT = 32  # texts that are shorter are compared and shown as they are, others by their digest


def digest(texts: Iterable[str]) -> str:
    """A digest of several texts: each with its length, so that nothing moves from one to the next."""
    state = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        state.update(b"%d:%b" % (len(data), data))
    return state.hexdigest()[:32]


def model_arguments(recorded: Any) -> dict[str, Any]:
    """`model_args`, which are text where Python's `simple_evaluate` was given text: `name=value,...`."""
    if not isinstance(recorded, str):
        return dict(mapping(recorded))
    arguments = {}
    for part in filter(None, recorded.split(",")):
        name, _, text = part.partition("=")
        with suppress(ValueError):
            text = json.loads(text.lower()) if text.lower() in ("true", "false") else json.loads(text)
        arguments[name.strip()] = text
    return arguments


def declared(kind: str, sources: Mapping[str, Any], task: str = "") -> dict[str, Any]:
    """The values of the declared fields of a kind, by name; those that are there and not empty. `sources` has by the
    first part of a path what is below it; of what the file has by task, the task's part is taken."""
    values: dict[str, Any] = {}
    for field in FIELDS:
        for path in field.paths.split() if field.kind == kind else ():
            value = at(sources, *path.split("."))
            value = value.get(task) if isinstance(value, dict) and path in ("file.n-shot", "file.versions") else value
            if value not in (None, "", [], {}, False):
                values.setdefault(field.name, value)
    return values


def undeclared(name: str, values: Mapping[str, Any], inside: str = "") -> dict[str, str]:
    """What stands in no list, as texts to compare, by path; empty values are as if they were not there."""
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
    """A value as text: 5 and 5.0 are one, addresses in memory are none, and what is long is its digest."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return text if len(text) < _SHORT else digest([text])


def row_fields(results: Mapping[str, Any], study: StudyFacts) -> dict[str, dict[str, str]]:
    """Who answered, as texts by name, in the parts "model", "method" and "setting"."""
    config = mapping(results.get("config"))
    icl, arguments = mapping(config.get("icl")), model_arguments(config.get("model_args"))
    task = next(iter(mapping(results.get("configs")).values()), None)  # metadata of a run are of all its tasks
    sources = {"config": config, "icl": icl, "model_args": arguments, "file": results, "task": task}
    values = declared("row", sources)
    if study.model is not None and study.training is not None:
        values["checkpoint"], values["revision"] = f"{study.model} (trained)", ""
    if values.get("revision") == "main":  # no revision: it moves
        del values["revision"]
    values["dtype"] = str(values.get("dtype", "")).removeprefix("torch.")
    if "chat" not in values:  # without a chat template there are no turns
        values.pop("multiturn", None)
    rows: dict[str, dict[str, str]] = {"model": {}, "method": {}, "setting": {}}
    for field in FIELDS:
        if field.kind == "row" and field.name in values:
            rows[field.part][field.name] = str(values[field.name])
    rows["model"] |= undeclared("config", config)
    # How a study trained its model is the switch "training"; what two models of one training differ in, their weights.
    of_icl = undeclared("icl", {**icl, "trained": None} if study.training is not None else icl)
    # What a model of this package says of itself, it says of its arguments too, defaults among them.
    given = {name: text for name, text in undeclared("model_args", arguments).items() if name not in of_icl}
    on_dev = {name: CHOSEN for name in study.chosen if name in of_icl | given or name == "seeds"}
    rows["method"] |= given | of_icl | on_dev
    return rows


def column_fields(results: Mapping[str, Any], task: str, metric: str, of_filter: str, documents: int) -> dict[str, str]:
    """What was asked, as texts by name."""
    config, arguments = mapping(at(results, "configs", task)), mapping(at(results, "config"))
    values = declared("column", {"config": arguments, "file": results, "task": config}, task)
    if own := mapping(at(config, "metadata", "unformatted")):  # in any format, it is the same task
        shots = {**mapping(config.get("fewshot_config")), **mapping(own.get("fewshot_config"))}
        config = {**config, **own, "fewshot_config": shots}
    shots = mapping(config.get("fewshot_config"))
    query = [config.get(key) for key in _TEMPLATE]
    of_shots = [config.get(key) if shots.get(key) is None else shots[key] for key in _TEMPLATE]
    template = json.dumps([query, of_shots, config.get("description") or ""], sort_keys=True, default=str)
    given = model_arguments(arguments.get("model_args"))  # lm-eval adds them to the metadata of tasks
    metadata = {key: value for key, value in mapping(config.get("metadata")).items() if key not in given}
    shots = {key: value for key, value in shots.items() if key not in (*_TEMPLATE, "sampler")}
    shots["split"] = shots.get("split") or config.get("fewshot_split")
    function = re.match(r"<function (\w+)", str(shots.get("process_docs")))
    if function and f"def {function[1]}(" in str(config.get("process_docs")):  # lm-eval does not write its code
        del shots["process_docs"]
    rest = {key: value for key, value in config.items() if key not in (*_TEMPLATE, "description")}
    rest |= {"metadata": _portable(metadata), "fewshot_config": shots}
    rest |= {key: _portable(config[key]) for key in ("dataset_path", "dataset_kwargs") if key in config}
    filters = config.get("filter_list")
    entries = [entry for entry in filters if at(entry, "name") == of_filter] if isinstance(filters, list) else []
    return {
        **{"metric": metric, "filter": as_text([of_filter, entries] if entries else of_filter)},
        **{name: as_text(value) for name, value in values.items()},
        **{"documents": str(documents), "template": digest([as_text(template)])[:6]},
        **undeclared("task", rest),
    }


def switch_fields(results: Mapping[str, Any], task: str) -> dict[str, str | None]:
    """The switches of a task's result by name; None where the file does not say."""
    config = mapping(results.get("config"))
    sources = {"config": config, "icl": mapping(config.get("icl")), "file": results,
               "task": mapping(at(results, "configs", task))}  # fmt: skip
    values = {"shots": "0", **declared("switch", sources, task)}
    if values.get("demonstrations") == "default":  # lm-eval's own sampler
        del values["demonstrations"]
    names = (field.name for field in FIELDS if field.kind == "switch")
    return {name: as_text(values[name]) if name in values else None for name in names}


def _portable(value: Any) -> Any:
    """The value with only the last name of each path that begins at the root of somebody's machine."""
    if isinstance(value, dict):
        return {name: _portable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_portable(inner) for inner in value]
    is_absolute = isinstance(value, str) and re.match(r"[/~]|[A-Za-z]:[\\/]|file:", value)
    return re.split(r"[\\/]", value.rstrip("\\/"))[-1] if is_absolute else value
