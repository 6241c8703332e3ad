"""Which runs share a row, and which results share a column: every compared field, as data.

A row says who answered, and a column says what was asked. The lists below have a line for each
field: its name, and its paths in lm-eval's file. The first path with a value gives the value. A
field without a value has its default, which is a value like any other.

    MODEL, METHOD, SETTING   Settings that are always in the row's key. Only its method tells a row
                             from its baseline.
    SWITCHES                 Settings that are in the row's key if some cell would hold two values
                             otherwise, and then for the whole board.
    FACTS                    What was found out while the run was made. A fact that is not recorded
                             differs from every recorded one.
    COLUMN                   Always in the column's key.
    REPETITION               The axes inside a cell.
    NEITHER                  In no key, for the reason that is given.

Paths begin with `config`, `model_args` (which may be text), `icl` (`config.icl`), `task`
(`configs.TASK`) or `file`. A field in no list separates rows if its path begins with one of the
first three, and columns under `task`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CHOSEN = "chosen on dev"
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Field:
    """A compared field of a results file."""

    name: str
    paths: str  # separated by spaces
    default: str = ""


MODEL = [
    Field(
        "checkpoint",
        "model_args.pretrained model_args.model model_args.path model_args.engine file.model_name",
    ),
    Field("revision", "config.model_sha model_args.revision config.model_revision"),
    Field("dtype", "config.model_dtype model_args.dtype"),
]
METHOD = [
    Field("method", "icl.method config.model"),
]
SETTING = [
    Field("chat", "file.chat_template_sha file.chat_template"),
    Field("multiturn", "file.fewshot_as_multiturn"),
    Field("system", "file.system_instruction_sha file.system_instruction"),
    Field("labels", "task.metadata.labels"),
]
SWITCHES = [
    Field("shots", "file.n-shot task.num_fewshot", "0"),
    Field(
        "demonstrations",
        "icl.study.demonstrations task.metadata.demonstrations task.fewshot_config.sampler",
        "default",  # lm-eval's own sampler
    ),
    Field("training", "icl.study.training"),
    Field("training options", "icl.study.options"),
    Field("trained weights", "icl.study.weights"),
]
FACTS = [
    Field(
        "weights",
        "file.provenance.weights config.model_files_digest icl.study.weights",
        NOT_RECORDED,
    ),
]
COLUMN = [
    Field("version", "file.versions"),
    Field("limit", "config.limit"),
]
REPETITION = [
    Field("seed", "config.fewshot_seed"),
    Field("order", "icl.study.order"),
    Field("format", "task.metadata.format"),
]
# Reason -> paths, separated by spaces.
NEITHER = {
    "code": "icl.version icl.commit icl.form",
    "what was left out marks the cell": """
        icl.left_out icl.truncated icl.overflow model_args.overflow""",
    "where demonstrations are from marks the cell": """
        icl.own_demonstrations task.metadata.retrieved""",
    "counts": """
        icl.contexts_encoded icl.contexts_reused icl.tokens_run icl.tokens_saved
        icl.responses_read icl.passes icl.peak_bytes icl.shared_demonstrations
        icl.learned icl.fitted""",
    "rounding": """
        icl.plain model_args.plain icl.pack_tokens icl.store_bytes
        model_args.pack_tokens model_args.store_bytes
        model_args.batch_size model_args.max_batch_size model_args.attn_implementation
        config.batch_size config.batch_sizes""",
    "read elsewhere": """
        task.metadata.decided task.metadata.decide icl.study config.icl config.model_args""",
    "where it ran": """
        model_args.device model_args.parallelize model_args.device_map
        model_args.max_memory_per_gpu model_args.max_cpu_memory model_args.offload_folder
        model_args.tensor_parallel_size model_args.data_parallel_size
        model_args.gpu_memory_utilization model_args.tp_plan model_args.num_concurrent
        config.device""",
    "how a checkpoint or an answer is obtained": """
        model_args.cache_dir model_args.token model_args.trust_remote_code
        model_args.max_retries model_args.timeout model_args.logits_cache config.use_cache""",
    "draws": """
        config.random_seed config.numpy_seed config.torch_seed config.bootstrap_iters""",
    "lm-eval writes them into the tasks that generate": "config.gen_kwargs",
    "names": "task.task task.task_alias task.tag task.group task.class",
    "recorded under other names": """
        task.fewshot_split task.metric_list task.filter_list task.metadata.version""",
    "does not change scores": """
        task.should_decontaminate task.doc_to_decontamination_query task.unsafe_code
        task.metadata.config_source""",
    "follow from the labels and the format": """
        task.metadata.relabeled task.metadata.unformatted""",
}
_KINDS = [*MODEL, *METHOD, *SETTING, *SWITCHES, *FACTS, *COLUMN, *REPETITION]
DECLARED = set(" ".join([*NEITHER.values(), *(field.paths for field in _KINDS)]).split())
# The arguments of lm-eval's `hf` whose default is a value, as they are when nobody gives them.
DEFAULTS = {
    "backend": ("default", "causal"),
    "use_fast_tokenizer": ("true",),
    "enable_thinking": ("true",),
    "truncation": ("false",),
    "load_in_4bit": ("false",),
    "load_in_8bit": ("false",),
    "autogptq": ("false",),
    "gptqmodel": ("false",),
}


@dataclass(frozen=True, eq=False)
class Fields:
    """The compared fields of a task in a results file, as texts by name (`results.fields`)."""

    model: Mapping[str, str]
    method: Mapping[str, str]
    setting: Mapping[str, str]
    switches: Mapping[str, str]
    facts: Mapping[str, str]
    column: Mapping[str, str]
    seed: int | None = None  # the seed of the demonstrations (`fewshot_seed`)
    order: int = 0  # the number of the order of this seed's demonstrations, in a study
    format: int = 0  # the format of the prompts; 0 is the task's own
    demonstration_rows: str = ""  # digest of the demonstrations' rows before any cut, if recorded
