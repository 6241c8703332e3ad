"""What a results file says of the model and of a task's setting, as texts: runs with other texts are other rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lm_eval_icl.results.form import Results, TaskConfig
from lm_eval_icl.results.samples import digest

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
    "decide",  # further values of the same run
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


def model_facts(results: Mapping[str, Any], file: Results) -> dict[str, str]:
    """What a file says of the model beside the checkpoint's name, revision and dtype."""
    facts = {name: value for name, value in results["config"].items() if name not in _NOT_OF_MODEL}
    # Beside the tokens that have an effect there is the padding token, which is masked.
    tokens = ("tokenizer_bos_token", "tokenizer_eos_token", "eot_token_id")
    facts |= {name: results.get(name) for name in tokens}
    icl = file.config.icl
    return _texts({**facts, "trained": icl.trained, "study.weights": icl.study.weights})


def settings(
    results: Mapping[str, Any], config: Mapping[str, Any], metric: Mapping[str, Any], of_filter: str
) -> dict[str, str]:
    """What a task's configuration says of its numbers, but what is compared as something else.

    Args:
        metric: what the configuration says of the metric that stands for the task.
        of_filter: the filter that stands for it.
    """
    task = TaskConfig.model_validate(config)
    parts = {key: value for key, value in config.items() if key not in (*_NOT_SETTINGS, *_TEMPLATE)}
    shots = {key: value for key, value in task.fewshot_config.items() if key not in (*_TEMPLATE, "sampler")}
    # lm-eval before 0.4.10 does not write these out; and it never writes the code of a function in `fewshot_config`.
    shots["split"] = shots.get("split") or config.get("fewshot_split")
    function = re.match(r"<function (\w+)", str(shots.get("process_docs")))
    if function and f"def {function[1]}(" in str(config.get("process_docs")):
        del shots["process_docs"]
    filters = config.get("filter_list")
    if isinstance(filters, list):
        filters = [entry for entry in filters if isinstance(entry, dict) and entry.get("name") == of_filter]
    arguments = model_arguments(results["config"].get("model_args"))  # lm-eval adds them to the metadata
    metadata = {key: value for key, value in task.metadata.items() if key not in (*_NOT_METADATA, *arguments)}
    parts |= {"fewshot_config": shots, "metric": metric, "filter": filters, "metadata": metadata}
    for key in ("dataset_path", "dataset_kwargs", "metadata"):
        parts[key] = _portable(parts.get(key))
    return _texts(parts)


def template(results: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """A digest of what makes a task's prompts but the demonstrations.

    What a demonstration's template does not say is as in the query's: lm-eval before 0.4.10 does not write it out.
    """
    task = TaskConfig.model_validate(config)
    of_shots = task.fewshot_config
    chat = results.get("chat_template") or results.get("chat_template_sha")
    parts = {
        "query": [config.get(key) for key in _TEMPLATE],
        "shots": [config.get(key) if of_shots.get(key) is None else of_shots[key] for key in _TEMPLATE],
        "description": config.get("description") or "",
        "system": results.get("system_instruction") or results.get("system_instruction_sha"),
        "chat": [chat, bool(results.get("fewshot_as_multiturn"))] if chat else None,
        # MetaICL's: the options are compared by other scores.
        **({"pmi": True} if task.metadata.get("pmi") is True else {}),
    }
    return digest([_without_addresses(json.dumps(parts, sort_keys=True))])


def model_arguments(recorded: Any) -> dict[str, Any]:
    """`model_args`, which are text in results of older versions of lm-eval: `name=value,...`, or JSON."""
    if isinstance(recorded, str) and recorded.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            recorded = json.loads(recorded)
    if isinstance(recorded, dict):
        return dict(recorded)

    def value(text: str) -> Any:
        """As lm-eval reads it."""
        if text.lower() in ("true", "false", "none"):
            return {"true": True, "false": False, "none": None}[text.lower()]
        for kind in (int, float):
            with suppress(ValueError):
                return kind(text)
        return text

    pairs = (part.partition("=") for part in recorded.split(",") if part) if isinstance(recorded, str) else ()
    return {name.strip(): value(text.strip()) for name, _, text in pairs}


def whole(value: Any) -> Any:
    """A number that is whole as an integer: 5 and 5.0 are one value."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _texts(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Values as texts to compare, by name; those in a mapping by both names. Without what is empty, which is as if it
    were not there, and without addresses of memory, which differ between runs."""
    texts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            texts |= _texts(value, f"{prefix}{name}.")
        elif value is not None and value is not False and value not in ("", []):
            text = value if isinstance(value, str) else json.dumps(whole(value), sort_keys=True, ensure_ascii=False)
            text = _without_addresses(text)
            texts[f"{prefix}{name}"] = text if len(text) < _SHORT else digest([text])
    return texts


def _without_addresses(text: str) -> str:
    """The text without the addresses of objects in memory: lm-eval writes "<function clean at 0x7f08c8b1>"."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _portable(value: Any) -> Any:
    """The value with only the last name of each path that begins at the root of somebody's machine."""
    if isinstance(value, dict):
        return {name: _portable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_portable(inner) for inner in value]
    is_absolute = isinstance(value, str) and re.match(r"[/~]|[A-Za-z]:[\\/]|file:", value)
    return re.split(r"[\\/]", value.rstrip("\\/"))[-1] if is_absolute else value
