"""Which runs share a row, and which results share a column: every compared field of a results file, as data.

A row says who answered, and a column says what was asked. The lists below have a line for each field: its name, and
its paths in lm-eval's file. The first path with a value gives the value. A field without a value has its default, which
is a value like any other.

    MODEL, METHOD, SETTING   Settings that are always in the row's key. Only its method tells a row from its baseline.
    SWITCHES                 Settings that are in the row's key if some cell would hold two values otherwise, and then
                             for the whole board.
    FACTS                    What was found out while the run was made. A fact that is not recorded differs from every
                             recorded one.
    COLUMN                   Always in the column's key.
    REPETITION               The axes inside a cell.
    NEITHER                  In no key, for the reason that is given.

Paths begin with `config`, `model_args` (which may be text), `icl` (`config.icl`), `task` (`configs.TASK`) or `file`.
A field in no list separates rows if its path begins with one of the first three, and columns under `task`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lm_eval_icl.demonstrations.how import METHODS, read
from lm_eval_icl.errors import InputError
from lm_eval_icl.results.records import (
    CHOSEN,
    NOT_RECORDED,
    Fields,
    StudyFacts,
    at,
    count,
    mapping,
)


@dataclass(frozen=True)
class Field:
    """A compared field of a results file."""

    name: str
    paths: Sequence[str]
    default: str = ""


MODEL = [
    Field(
        "checkpoint",
        [
            "model_args.pretrained",
            "model_args.model",
            "model_args.path",
            "model_args.engine",
            "file.model_name",
        ],
    ),
    Field("revision", ["config.model_sha", "model_args.revision", "config.model_revision"]),
    Field("dtype", ["config.model_dtype", "model_args.dtype"]),
]
METHOD = [
    Field("method", ["icl.method", "config.model"]),
]
SETTING = [
    Field("chat", ["file.chat_template_sha", "file.chat_template"]),
    Field("multiturn", ["file.fewshot_as_multiturn"]),
    Field("system", ["file.system_instruction_sha", "file.system_instruction"]),
    Field("labels", ["task.metadata.labels"]),
]
SWITCHES = [
    Field("shots", ["file.n-shot", "task.num_fewshot"], "0"),
    Field(
        "demonstrations",
        [
            "icl.study.demonstrations",
            "task.metadata.demonstrations",
            "task.fewshot_config.sampler",
        ],
        "default",  # lm-eval's own sampler
    ),
    Field("training", ["icl.study.training"]),
]
FACTS = [
    Field(
        "weights",
        ["file.provenance.weights", "config.model_files_digest", "icl.study.weights"],
        NOT_RECORDED,
    ),
]
COLUMN = [
    Field("version", ["file.versions"]),
    Field("limit", ["config.limit"]),
]
REPETITION = [
    Field("seed", ["config.fewshot_seed"]),
    Field("order", ["icl.study.order"]),
    Field("format", ["task.metadata.format"]),
]
NEITHER = {
    "code": ["icl.version", "icl.commit", "icl.form"],
    "what was left out marks the cell": [
        "icl.left_out",
        "icl.truncated",
        "icl.overflow",
        "model_args.overflow",
    ],
    "where demonstrations are from marks the cell": [
        "icl.own_demonstrations",
        "task.metadata.retrieved",
    ],
    "counts": [
        "icl.contexts_encoded",
        "icl.contexts_reused",
        "icl.tokens_run",
        "icl.tokens_saved",
        "icl.passes",
        "icl.peak_bytes",
        "icl.shared_demonstrations",
        "icl.responses_read",
        "icl.passes",
        "icl.peak_bytes",
    ],
    "rounding": [
        "icl.plain",
        "model_args.plain",
        "icl.pack_tokens",
        "icl.store_bytes",
        "model_args.pack_tokens",
        "model_args.store_bytes",
        "model_args.batch_size",
        "model_args.max_batch_size",
        "model_args.attn_implementation",
        "config.batch_size",
        "config.batch_sizes",
    ],
    "read elsewhere": [
        "task.metadata.decided",
        "task.metadata.decide",
        "icl.study",
        "config.icl",
        "config.model_args",
    ],
    "where it ran": [
        "model_args.device",
        "model_args.parallelize",
        "model_args.device_map",
        "model_args.max_memory_per_gpu",
        "model_args.max_cpu_memory",
        "model_args.offload_folder",
        "model_args.tensor_parallel_size",
        "model_args.data_parallel_size",
        "model_args.gpu_memory_utilization",
        "model_args.tp_plan",
        "model_args.num_concurrent",
        "config.device",
    ],
    "how a checkpoint or an answer is obtained": [
        "model_args.cache_dir",
        "model_args.token",
        "model_args.trust_remote_code",
        "model_args.max_retries",
        "model_args.timeout",
        "model_args.logits_cache",
        "config.use_cache",
    ],
    "draws": [
        "config.random_seed",
        "config.numpy_seed",
        "config.torch_seed",
        "config.bootstrap_iters",
    ],
    "lm-eval writes them into the tasks that generate": ["config.gen_kwargs"],
    "names": ["task.task", "task.task_alias", "task.tag", "task.group", "task.class"],
    "recorded under other names": [
        "task.fewshot_split",
        "task.metric_list",
        "task.filter_list",
        "task.metadata.version",
    ],
    "does not change scores": [
        "task.should_decontaminate",
        "task.doc_to_decontamination_query",
        "task.unsafe_code",
        "task.metadata.config_source",
    ],
    "follow from the labels and the format": [
        "task.metadata.relabeled",
        "task.metadata.unformatted",
    ],
}
KINDS = (MODEL, METHOD, SETTING, SWITCHES, FACTS, COLUMN, REPETITION)
# The arguments of lm-eval's `hf` whose default is a value, as they are when nobody gives them.
_DEFAULTS = {
    "backend": ("default", "causal"),
    "use_fast_tokenizer": ("true",),
    "enable_thinking": ("true",),
    "truncation": ("false",),
    "load_in_4bit": ("false",),
    "load_in_8bit": ("false",),
    "autogptq": ("false",),
    "gptqmodel": ("false",),
}
_DECLARED = {path for kind in KINDS for field in kind for path in field.paths}
_DECLARED.update(path for paths in NEITHER.values() for path in paths)
_BY_TASK = ("file.n-shot", "file.versions")  # lm-eval writes a value for each task
# The fields that make a task's prompts, besides the demonstrations.
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


def fields_of(results: Mapping[str, Any], task: str) -> Fields:
    """All compared fields of a task in a results file."""
    config = mapping(results.get("config"))
    icl = mapping(config.get("icl"))
    arguments = model_arguments(config.get("model_args"))
    task_config = mapping(at(results, "configs", task))
    sources = {
        "config": config,
        "icl": icl,
        "model_args": arguments,
        "task": task_config,
        "file": results,
    }
    study = StudyFacts.of(mapping(icl.get("study")))
    repetition = _values(REPETITION, sources, task)
    seed = repetition["seed"]
    if config.get("fewshot_seed") == 0:
        seed = 0
    return Fields(
        model=_model(sources, task, study),
        method=_method(sources, task, study),
        setting=_setting(sources, task),
        switches=_switches(sources, task),
        facts=_facts(sources, task, study),
        column=_column(sources, task),
        seed=count(seed),
        order=study.order,
        format=count(repetition["format"]) or 0,
        demonstration_rows=_demonstration_rows(sources, task),
    )


def model_arguments(recorded: Any) -> dict[str, Any]:
    """`model_args` as a dictionary. They are text (`name=value,...`) if Python's `simple_evaluate` was given text."""
    if not isinstance(recorded, str):
        return dict(mapping(recorded))
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
    filters = at(results, "configs", task, "filter_list")
    entries = []
    if isinstance(filters, list):
        entries = [entry for entry in filters if at(entry, "name") == name]
    return as_text([name, entries] if entries else name)


def as_text(value: Any) -> str:
    """A value as text: 5.0 is written as 5, addresses in memory are removed, and a long text becomes its digest."""
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
    for field in fields:
        values[field.name] = field.default
        for path in field.paths:
            value = at(sources, *path.split("."))
            if path in _BY_TASK and isinstance(value, dict):
                value = value.get(task)
            if not (_is_empty(value) or value == 0):
                values[field.name] = value
                break
    return values


def _undeclared(name: str, values: Mapping[str, Any], inside: str = "") -> dict[str, str]:
    """Path -> text to compare, for all fields in no list. Empty values count as missing."""
    texts: dict[str, str] = {}
    for key, value in values.items():
        path = f"{inside}{key}"
        if f"{name}.{path}" in _DECLARED:
            continue
        if isinstance(value, dict):
            texts |= _undeclared(name, value, f"{path}.")
        elif not _is_empty(value):
            texts[path] = as_text(value)
    return texts


def _model(sources: Mapping[str, Any], task: str, study: StudyFacts) -> dict[str, str]:
    values = _values(MODEL, sources, task)
    if study.model is not None and study.training is not None:
        values["checkpoint"] = f"{study.model} (trained)"
        values["revision"] = ""
    if values["revision"] == "main":  # a branch, which moves, and no revision
        values["revision"] = ""
    values["dtype"] = str(values["dtype"]).removeprefix("torch.")
    return _texts(values) | _undeclared("config", sources["config"])


def _method(sources: Mapping[str, Any], task: str, study: StudyFacts) -> dict[str, str]:
    """The method and its arguments. A model of this package reports all arguments, with defaults. The arguments of
    other models are added as they were given."""
    icl = sources["icl"]
    if study.training is not None:  # a study's training is a switch
        icl = {**icl, "trained": None}
    values = _texts(_values(METHOD, sources, task))
    values |= _given(sources["model_args"], icl)
    values |= _undeclared("icl", icl)
    chosen = [name for name in study.chosen if name in values or name == "seeds"]
    return values | dict.fromkeys(chosen, CHOSEN)


def _given(arguments: Mapping[str, Any], icl: Mapping[str, Any]) -> dict[str, str]:
    """The model arguments that the model does not report, without those that have their default."""
    texts = _undeclared("model_args", arguments)
    for name, value in arguments.items():
        if value is False and f"model_args.{name}" not in _DECLARED:
            texts[name] = "false"
    return {
        name: text
        for name, text in texts.items()
        if name not in icl and text not in _DEFAULTS.get(name, ())
    }


def _setting(sources: Mapping[str, Any], task: str) -> dict[str, str]:
    values = _values(SETTING, sources, task)
    if not values["chat"]:  # without a chat template there are no turns
        values["multiturn"] = ""
    return _texts(values)


def _switches(sources: Mapping[str, Any], task: str) -> dict[str, str]:
    values = _values(SWITCHES, sources, task)
    values["demonstrations"] = _way(values["demonstrations"], task)
    return {name: as_text(value) for name, value in values.items()}


def _way(written: Any, task: str) -> Any:
    """How demonstrations are chosen, without the arguments that have their default."""
    if written == "default" and task.startswith("icl_"):
        return "stratified"  # the default of this package's tasks
    name = str(written).partition(":")[0]
    if isinstance(written, dict) or name in (*METHODS, "similar"):
        with suppress(InputError):
            return str(read(written))
    return written


def _facts(sources: Mapping[str, Any], task: str, study: StudyFacts) -> dict[str, str]:
    if study.training is not None:  # the model is its base model, its method and its training
        return {"weights": ""}
    return _texts(_values(FACTS, sources, task))


def _demonstration_rows(sources: Mapping[str, Any], task: str) -> str:
    """A digest of the rows of a task whose prompts are cut: MetaICL's cut shortens the first demonstration."""
    recorded = at(sources["file"], "provenance", "demonstrations", task)
    if isinstance(recorded, str):
        return recorded
    indices = at(sources["icl"], "study", "indices")
    if task.startswith("metaicl_") and isinstance(indices, list):
        return digest(sorted(map(str, [*indices, sources["config"].get("fewshot_seed")])))
    return ""


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """The values that are not empty, as texts."""
    return {name: str(value) for name, value in values.items() if value != ""}


def _column(sources: Mapping[str, Any], task: str) -> dict[str, str]:
    """The fields that say what was asked, besides the metric, the filter and the documents."""
    config = sources["task"]
    # In every format, it is the same task.
    unformatted = mapping(at(config, "metadata", "unformatted"))
    shots = {
        **mapping(config.get("fewshot_config")),
        **mapping(unformatted.get("fewshot_config")),
    }
    config = {**config, **unformatted}
    template = _template(config, shots)
    # lm-eval adds the model's arguments to the metadata of tasks.
    given = sources["model_args"]
    metadata = mapping(config.get("metadata"))
    metadata = {name: value for name, value in metadata.items() if name not in given}
    shots = {name: value for name, value in shots.items() if name not in (*_TEMPLATE, "sampler")}
    shots["split"] = shots.get("split") or config.get("fewshot_split")
    function = re.match(r"<function (\w+)", str(shots.get("process_docs")))
    if function and f"def {function[1]}(" in str(config.get("process_docs")):
        del shots["process_docs"]  # lm-eval does not write its code
    rest = {name: config[name] for name in config if name not in (*_TEMPLATE, "description")}
    rest["metadata"] = _portable(metadata)
    rest["fewshot_config"] = shots
    for name in ("dataset_path", "dataset_kwargs"):
        if name in config:
            rest[name] = _portable(config[name])
    values = {name: as_text(x) for name, x in _values(COLUMN, sources, task).items() if x != ""}
    return {**values, "template": template, **_undeclared("task", rest)}


def _template(config: Mapping[str, Any], shots: Mapping[str, Any]) -> str:
    """A digest of the task's templates. Demonstrations have the query's unless they have their own."""
    query = [config.get(name) for name in _TEMPLATE]
    demonstration = [
        config.get(name) if shots.get(name) is None else shots[name] for name in _TEMPLATE
    ]
    parts = [query, demonstration, config.get("description") or ""]
    return digest([as_text(json.dumps(parts, sort_keys=True, default=str))])[:6]


def _portable(value: Any) -> Any:
    """The value, with every absolute path reduced to its last name, since its beginning belongs to one machine."""
    if isinstance(value, dict):
        return {name: _portable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_portable(inner) for inner in value]
    if isinstance(value, str) and re.match(r"[/~]|[A-Za-z]:[\\/]|file:", value):
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return value
