"""The commands that make the runs of an entry again, safe to be pasted into a shell.

Results files come from strangers, and what they say of a model may have it load code (`trust_remote_code`,
`attn_implementation=OWNER/KERNEL`, `custom_generate`, a `base_url` that is sent one's key). So only arguments of these
lists are printed, and names that are plain names; what is left out is said in a comment.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lm_eval_icl import methods
from lm_eval_icl.results.entries import grouped
from lm_eval_icl.results.form import StudyFacts, at
from lm_eval_icl.results.records import Run
from lm_eval_icl.results.settings import model_arguments

# Of this package's models, but not of `hf`. (Importing the methods takes seconds. A test compares these with them.)
_OURS = {
    *("pack_tokens", "store_bytes", "overflow", "canonical_order"),
    *("positions", "repeat", "window_size", "layer", "T", "eta", "momentum", "restart_positions"),
    *("layout", "reads", "temperature", "scale", "weight", "factor", "align"),
    *("combine", "method", "weights", "beta", "top_p", "truncate", "choose"),
}
# Of lm-eval's models.
_MODEL = {
    *("pretrained", "model", "path", "engine", "revision", "subfolder", "tokenizer", "gguf_file", "variant"),
    *("peft", "delta", "dtype", "load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type"),
    *("bnb_4bit_use_double_quant", "quantization", "attn_implementation"),
    *("max_length", "max_gen_toks", "max_model_len"),
    *("truncation", "add_bos_token", "prefix_token_id", "softmax_dtype", "mixed_precision_dtype", "logits_cache"),
    *("think_end_token", "enable_thinking", "backend", "batch_size", "max_batch_size", "device", "parallelize"),
    *("device_map", "max_memory_per_gpu", "max_cpu_memory", "tp_plan", "use_fast_tokenizer", "low_cpu_mem_usage"),
    *("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "enforce_eager", "max_num_seqs"),
    *("num_concurrent", "max_retries", "timeout", "tokenized_requests", "tokenizer_backend"),
}
# Arguments whose value names code, unless it is one word.
_WORDS = {"attn_implementation", "backend", "device_map", "quantization", "tokenizer_backend", "tp_plan"}
_GENERATION = {
    *("until", "max_gen_toks", "max_new_tokens", "max_length", "min_new_tokens", "do_sample", "temperature", "top_k"),
    *("top_p", "min_p", "typical_p", "num_beams", "length_penalty", "early_stopping", "repetition_penalty", "seed"),
    *("no_repeat_ngram_size", "penalty_alpha"),
}
# What `--metadata` changes of this package's tasks, and of all tasks.
_METADATA = ("demonstrations", "metaicl", "pmi", "missing", "shuffle")
_NAME = r"\w[\w.-]*"
_TASK = r"(?!.*\.ya?ml$)\w[\w .+:()&'-]*"  # a path could be a file with code in it


def commands(runs: Sequence[Run], decided: bool = False) -> str:
    """The commands, a line for each, or some lines for a study's file.

    Runs that differ in the seed of the demonstrations alone are one loop. A study's runs are a study of their own, as
    lm-eval has no orders of the demonstrations.

    Args:
        runs: of an entry, by date.
        decided: with the decision rules of these runs.
    """
    left_out: dict[str, None] = {}
    # A task has what it was run with, even where only its values under decision rules are left.
    runs = [replace(run, tasks={result.task: result for result in (*run.decided, *run.tasks.values())}) for run in runs]
    alone, of_studies = ([run for run in runs if (run.study != StudyFacts()) is has] for has in (False, True))
    printed = [*_lm_eval(alone, decided, left_out), *_studies(of_studies, decided, left_out)]
    if left_out:
        printed.append(f"# Left out, as not all that a file says is safe to paste: {', '.join(left_out)}")
    return "\n".join(printed)


def _lm_eval(runs: Iterable[Run], decided: bool, left_out: dict[str, None]) -> list[str]:
    """Commands of lm-eval, those with one seed after another as a loop."""
    printed = []
    lines = [(line, run.seed) for run in runs for line in _lines(run, decided, left_out)]
    for line, same in grouped(lines, lambda seeded: seeded[0]).items():
        match sorted({seed for _, seed in same if seed is not None}):
            case []:
                printed.append(line)
            case [seed]:
                printed.append(f"{line},{seed}")
            case seeds:
                printed.append(f"for seed in {' '.join(map(str, seeds))}; do {line},$seed; done")
    return printed


def _lines(run: Run, decided: bool, left_out: dict[str, None]) -> list[str]:
    """The commands of a run, each up to the seed of its demonstrations; none if it has no safe names."""
    config, results = run.results["config"], run.results
    parts = ["lm_eval", "--model", run.model, "--model_args", _pairs(_model_arguments(run, left_out))]
    others: list[str] = []
    if run.limit is not None:
        others += ["--limit", f"{run.limit:.15g}"]
    generation = _allowed("gen_kwargs", model_arguments(config.get("gen_kwargs")), _GENERATION, left_out)
    if generation:
        others += ["--gen_kwargs", _pairs(generation)]
    if results.get("chat_template"):  # lm-eval's default is several turns
        multiturn = "true" if results.get("fewshot_as_multiturn") else "false"
        others += ["--apply_chat_template", "--fewshot_as_multiturn", multiturn]
    if isinstance(instruction := results.get("system_instruction"), str):
        others.append(f"--system_instruction={_printable(instruction)}")
    if metadata := _metadata(run, run.tasks, decided):
        others += ["--metadata", _pairs(metadata)]
    others += ["--log_samples", "--output_path", "results"]
    if run.seed is not None:
        seeds = [config.get(f"{name}_seed") for name in ("random", "numpy", "torch")]
        seeds = [seed if type(seed) is int else default for seed, default in zip(seeds, (0, 1234, 1234), strict=True)]
        others += ["--seed", ",".join(map(str, seeds))]
    shots = {result.shots for result in run.tasks.values()}
    # A task with 0 keeps it whatever the command says. Of other numbers, each task has its own.
    apart = [{task for task in run.tasks if run.tasks[task].shots == n} for n in sorted(shots)]
    printed = []
    for tasks in apart if len(shots) == 2 and 0 in shots else [set(run.tasks)]:
        few = {run.tasks[task].shots for task in tasks}
        names = _safe(_asked(run, tasks), _TASK, "task", left_out)
        if names and _safe([run.model], _NAME, "model", left_out):
            of_shots = ["--num_fewshot", str(*few)] if len(few) == 1 else []
            printed.append(shlex.join([*parts, "--tasks", ",".join(names), *of_shots, *others]))
    return printed


def _studies(runs: Iterable[Run], decided: bool, left_out: dict[str, None]) -> list[str]:
    """Studies, each as its file and the command that runs it."""
    of_tasks: dict[str, dict[str, set[tuple[int, int]]]] = {}
    for run in runs:
        arguments = _model_arguments(run, left_out)
        of_method = {name: arguments.pop(name) for name in run.study.arguments if name in arguments}
        drawn = run.study.demonstrations
        if run.study.changes:
            left_out["what the study's file changes of the tasks"] = None
        for task, result in run.tasks.items():
            if not (_safe([run.model], _NAME, "model", left_out) and _safe([task], _TASK, "task", left_out)):
                continue
            metadata = _metadata(run, [task], decided)
            rules = metadata.pop("decide", [])
            file = {
                "models": [arguments],
                "methods": [{run.model: of_method} if of_method else run.model],
                "num_fewshot": [result.shots],
                **({"demonstrations": [drawn]} if drawn is not None else {}),
                **({"decide": ["none", *(rules if isinstance(rules, list) else [rules])]} if rules else {}),
                **({"metadata": metadata} if metadata else {}),
            }
            key = json.dumps([file, run.limit], ensure_ascii=False, default=str)
            of_tasks.setdefault(key, {}).setdefault(task, set()).add((run.seed or 0, run.order))
    printed = []
    for key, tasks in of_tasks.items():
        for cells, same in grouped(tasks.items(), lambda item: frozenset(item[1])).items():
            file, limit = json.loads(key)
            file |= {"tasks": [task for task, _ in same], "seeds": sorted({seed for seed, _ in cells})}
            file["orders"] = 1 + max(order for _, order in cells)
            lines = [f"{name}: {_printable(json.dumps(value, ensure_ascii=False))}\n" for name, value in file.items()]
            text = re.sub(r"(?<=: )(-?\d+)(?=e[+-]\d+[,}])", r"\1.0", "".join(lines))  # 1e-05 is no number in YAML
            name = f"study-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
            limited = "" if limit is None else f" --limit {limit:.15g}"
            printed.append(f"cat > {name}.yaml <<'EOF'\n{text}EOF")
            printed.append(f"lm-eval-icl study {name}.yaml --output results/{name}{limited}")
    return printed


def _model_arguments(run: Run, left_out: dict[str, None]) -> dict[str, Any]:
    names = _MODEL | _OURS if run.model in methods.NAMES else _MODEL
    arguments = model_arguments(run.results["config"].get("model_args"))
    if run.model == "hf":  # older studies say of it what they gave to this package's models
        arguments = {name: value for name, value in arguments.items() if name not in _OURS}
    return _allowed("model_args", arguments, names, left_out)


def _allowed(what: str, arguments: Mapping[str, Any], names: set[str], left_out: dict[str, None]) -> dict[str, Any]:
    """The arguments of these names with plain values."""

    def is_plain(name: str, value: Any) -> bool:
        if isinstance(value, list):
            return name == "until" and all(isinstance(text, str) for text in value)
        if isinstance(value, str):
            return name not in _WORDS or re.fullmatch(r"\w*", value) is not None
        return value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))

    allowed = {name: value for name, value in arguments.items() if name in names and is_plain(name, value)}
    left_out |= {f"{_in_comment(name)} of {what}": None for name in arguments if name not in allowed}
    return allowed


def _safe(names: Iterable[str], pattern: str, what: str, left_out: dict[str, None]) -> list[str]:
    """The names that are plain names."""
    names = list(names)
    left_out |= {f"the {what} {_in_comment(name)}": None for name in names if not re.fullmatch(pattern, name)}
    return [name for name in names if re.fullmatch(pattern, name)]


def _in_comment(name: str) -> str:
    """A name as the comment has it: some shells would run what else stands there."""
    return name if re.fullmatch(r"[\w.-]{1,50}", name) else "of another name"


def _metadata(run: Run, tasks: Collection[str], decided: bool) -> dict[str, Any]:
    """What `--metadata` changes, of what all of these tasks have: lm-eval gives it to every task."""
    common = {}
    for name in (*_METADATA, *(["decide"] if decided else [])):
        values = [at(run.results, "configs", task, "metadata", name) for task in tasks]
        # A list: decision rules, where names joined by "+" would be read as something else.
        kinds = (str, int, dict, list) if name == "decide" else (str, int, dict)
        if isinstance(values[0], kinds) and values.count(values[0]) == len(values):
            common[name] = values[0]
    return common


def _asked(run: Run, tasks: set[str]) -> list[str]:
    """The tasks that were asked for: a group in place of its tasks."""
    groups = {name: frozenset(members) for name, members in run.groups.items() if members.keys() <= tasks}
    # Of two groups with the same tasks, the first.
    names = {members: name for name, members in reversed(list(groups.items()))}
    tops = [name for members, name in reversed(names.items()) if not any(members < other for other in names)]
    inside = {task for members in names for task in members}
    return [*tops, *(task for task in run.tasks if task in tasks - inside)] or sorted(tasks)


def _pairs(arguments: Mapping[str, Any]) -> str:
    """Arguments as lm-eval takes them: `name=value,...`, or JSON where that would be read as something else."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, str):
            return bool(re.fullmatch(r"(?!(?i:true|false|none)$)[A-Za-z_./~][\w./:@~-]*", value))
        # lm-eval reads "-1" as -1.0
        return (isinstance(value, int) and value >= 0) or (isinstance(value, float) and math.isfinite(value))

    if all(is_plain(value) for value in arguments.values()):
        return ",".join(f"{name}={value}" for name, value in arguments.items())
    return _printable(json.dumps(arguments, ensure_ascii=False))


def _printable(text: str) -> str:
    """Without what a terminal would obey. A line break stays, in quotes: a system instruction may have some."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
