"""The models that lm-eval finds by name: its `HFLM`, with scoring and generation after memories of
demonstrations.

Loading, dtype, quantization, PEFT, device_map, chat templates and rolling log-likelihood are
inherited from `HFLM`. `lm_eval_icl.methods.runner` runs the method; this module only connects the
two.

`lm_eval_icl.harness.models.icl` is the class of `--model icl`, and so on for every method's name.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import transformers
from lm_eval.api.task import Task

from lm_eval_icl import methods, version
from lm_eval_icl.errors import InputError, log
from lm_eval_icl.harness import patches
from lm_eval_icl.harness.arguments import CommonArguments, read_arguments
from lm_eval_icl.harness.prepared_run import PreparedRun
from lm_eval_icl.harness.requests import RequestTokenizer
from lm_eval_icl.harness.responses import RespondingLM
from lm_eval_icl.inference.devices import device_of, peak_bytes
from lm_eval_icl.inference.identity import source_digest
from lm_eval_icl.inference.memory import vocabulary_of
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.tokens import Context, PromptTokenizer
from lm_eval_icl.training import record

# Arguments of `HFLM` that are not part of a run's identity: they only say where and how fast the
# model runs, or their effect shows in the loaded model and tokenizer.
_NOT_IDENTITY = frozenset(
    "device device_map parallelize max_memory_per_gpu max_cpu_memory offload_folder batch_size "
    "max_batch_size low_cpu_mem_usage token dtype tokenizer".split()
)


class ICLModel(RespondingLM):
    """An in-context-learning method as a model of lm-eval.

    Args:
        pretrained: as for `hf`, like every argument that belongs neither to the method nor to
            `CommonArguments`. Another of these models shares its checkpoint, and all its arguments
            but its method's.
        batch_size: how many texts are generated in one batch; how many queries that cannot be
            packed are scored in one batch; and, on an accelerator, the smallest number of queries
            in a packed pass. "auto" begins with `max_batch_size`. After an out-of-memory error, the
            batch is halved and run again.

    Raises:
        InputError: an argument is unknown or outside its range, or the model cannot be used.
    """

    method_class: ClassVar[type[Method]]
    common: CommonArguments
    origin: dict[str, Any]

    def __init__(
        self,
        pretrained: str | transformers.PreTrainedModel | ICLModel | None = None,
        **kwargs: Any,
    ) -> None:
        capabilities = None
        if isinstance(pretrained, ICLModel):
            self.origin = pretrained.origin
            capabilities = pretrained.runner.capabilities
            kwargs = {**dataclasses.asdict(pretrained.common), **kwargs}
        else:
            self.origin = {"version": version.version(), "commit": version.commit()}
            # Now, since the file may be edited while the model runs.
            source = source_digest(self.method_class)
            if source:
                self.origin["source"] = source
        method, self.common, forwarded = read_arguments(
            self.method_class, {**kwargs, "pretrained": pretrained}
        )
        super().__init__(**forwarded)
        self.trained = record.read(self.config)
        # The demonstrations that the model has chosen for the tasks of a run
        # (`harness.model_choices`).
        self.chosen: dict[str, Any] = {}
        # The contexts on whose labeled rows the method is fitted: the task and the rows' numbers.
        self.fitted: dict[Context, dict[str, Any]] = {}
        if warning := record.mismatch(self.trained, method):
            log.warning("%s: %s.", method.name, warning)
        self.canonical_order = self.common.is_canonical(method)
        if self.common.plain:
            self.batch_size_per_gpu = 1  # for whole texts, which `HFLM` scores
        self.runner = MethodRunner(
            self.model,
            method,
            pack_tokens=self.common.pack_tokens,
            batch_size=self.texts,
            store_bytes=self.common.store_bytes,
            softmax_dtype=self.softmax_dtype,
            mixed_precision_dtype=self.mixed_precision_dtype,
            tensor_parallel=self.is_tensor_parallel,
            plain=self.common.plain,
            capabilities=capabilities,
        )
        if self.common.canonical_order is None:
            self.canonical_order = self.runner.invariant
        prompts = PromptTokenizer(
            self.tokenizer,
            self.prefix_token_id,
            self.add_bos_token,
            by_part=method.treats_demonstrations_alike,
            canonical=self.canonical_order,
            vocabulary=vocabulary_of(self.model),
            pieces=not self.common.plain,
            finds_answers=method.needs_answers,
        )
        self.tokenize = RequestTokenizer(prompts, self.max_gen_toks, self.runner)
        self.begin([])

    @property
    def method(self) -> Method:
        """The method, with the arguments filled in that depend on the model."""
        return self.runner.method

    @property
    def texts(self) -> int:
        """How many texts are in one batch at the beginning of a run."""
        return int(self.max_batch_size if self.batch_size == "auto" else self.batch_size)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether every forward pass is divided among several processes (tensor parallelism)."""
        return bool(self._forwarded.get("tp_plan")) and int(os.environ.get("WORLD_SIZE", "1")) > 1

    def begin(self, tasks: Sequence[Task]) -> None:
        """Begin a run over these tasks. Memories and requests of an earlier run are dropped."""
        peak_bytes(device_of(self.model), reset=True)
        self.runner.begin(self.texts)
        limits = self.runner.limits(self.max_length)
        self.run = PreparedRun(tasks, self.tokenize, limits, self.common.overflow, self.rank == 0)
        # The counts of all processes; empty until the run ends.
        self.counts: dict[str, Any] = {}
        self.responses_read = 0  # how many responses came from a cache (`ResumableLM`)

    def finish(self) -> None:
        """End a run, on every process: sum the counts of all processes.

        This is not done in `loglikelihood`, since a process with all its responses in the cache
        never calls `loglikelihood`, and the other processes would wait for it.
        """
        self.run.check()  # a process that ran nothing has not yet counted what it left out
        store = self.runner.store
        ran = self.runner.tokens_run
        learned = self.runner.encoder.learned
        self.counts = self.total(
            {
                **self.run.counts,
                "contexts_encoded": store.encoded,
                "contexts_reused": store.reused,
                "tokens_run": ran,
                "tokens_saved": self.run.tokens_alone - ran,
                "passes": self.runner.passes_run,
                "shared_demonstrations": self.runner.encoder.counts,
                **({"learned": dict(learned)} if learned else {}),
                "peak_bytes": peak_bytes(device_of(self.model)),
                "responses_read": self.responses_read,
            }
        )

    # What lm-eval writes into results files, and the identity of a run.

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes under "config" in the results file: `HFLM`'s information, and what
        was run ("icl")."""
        icl = {
            **self.origin,
            "method": self.method.name,
            **dataclasses.asdict(self.method),
            **dataclasses.asdict(self.common),
            "canonical_order": self.canonical_order,
        }
        if self.trained:
            icl["trained"] = self.trained
        if self.chosen:
            icl["chosen"] = self.chosen
        if self.fitted:
            icl["fitted"] = self._weights()
        return {**super().get_model_info(), "icl": {**icl, **self.counts}}

    def _weights(self) -> list[dict[str, Any]]:
        """For each context, its task, the rows that it was fitted on, and what was fitted."""
        return [
            {**facts, "weights": getattr(self.runner.method_of(context), "weights", None)}
            for context, facts in self.fitted.items()
        ]

    def identity(self) -> dict[str, Any]:
        """What responses depend on besides the requests. A cache (`--use_cache`) of another
        identity is refused."""
        if self.method.rows_wanted:
            raise InputError(
                "--use_cache: a cache cannot tell which rows weights were fitted on: leave it out."
            )
        model = self.model_identity()
        unknown = ""
        if not (model["model_files_digest"] or model["model_sha"]):
            unknown = "weights of this model"
        is_ours = self.method_class.__module__.partition(".")[0] == "lm_eval_icl"
        if not is_ours and "source" not in self.origin:
            unknown = "code of this method"
        if unknown:
            raise InputError(
                f"--use_cache: the {unknown} did not come from a file, so a cache could not tell "
                "them from others: leave --use_cache out."
            )
        identity: dict[str, Any] = {
            "pretrained": str(getattr(self.pretrained, "name_or_path", self.pretrained)),
            "dtype": str(self.model.dtype),
            "max_length": self.max_length,
            "canonical_order": self.canonical_order,
            "overflow": self.common.overflow,
            "plain": self.common.plain,
            **self.origin,
            "method": self.method.name,
        }
        for name, value in self._forwarded.items():
            if name not in _NOT_IDENTITY:
                identity[name] = str(value)
        for name, value in dataclasses.asdict(self.method).items():
            identity[f"{self.method.name}.{name}"] = value
        return identity | model


@functools.cache
def model_class(name: str) -> type[ICLModel]:
    """The class of `--model NAME`, for a method of this or another installed package.

    Raises:
        InputError: there is no method of that name.
    """
    method = methods.find(name)
    body = {
        "method_class": method,
        "__module__": __name__,
        "__doc__": f"`--model {name}`: `{method.__module__}.{method.__name__}`.",
    }
    return type(name, (ICLModel,), body)


def __getattr__(name: str) -> type[ICLModel]:
    if name in methods.NAMES:
        return model_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


patches.install()
