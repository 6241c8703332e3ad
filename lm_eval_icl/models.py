"""The models that lm-eval knows by name: its own `HFLM`, scoring and generating from a memory.

Loading, dtype, quantization, PEFT, device_map, chat templates and rolling log-likelihood are `HFLM`'s;
what is ours is how requests run.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import lm_eval.evaluator
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CacheHook, CachingLM
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from lm_eval_icl import __version__, methods
from lm_eval_icl.errors import InputError, is_whole
from lm_eval_icl.generation import continue_from
from lm_eval_icl.memory import MemoryStore
from lm_eval_icl.probe import probe
from lm_eval_icl.prompts import record_prompts
from lm_eval_icl.requests import Positions, Request, RequestTokenizer, fit
from lm_eval_icl.scoring import Pair, Score, score_alone, score_packed
from lm_eval_icl.tokens import Context

# A child of lm-eval's logger, for its handler and its level.
log = logging.getLogger("lm_eval.icl")

# What transformers' `from_pretrained` takes without naming it in its signature.
FROM_PRETRAINED = set(
    "adapter_kwargs adapter_name attn_implementation commit_hash device_map device_mesh disable_mmap "
    "distributed_config dtype experts_implementation generation_config gguf_file key_mapping kernel_config "
    "load_in_4bit load_in_8bit low_cpu_mem_usage max_memory offload_buffers offload_folder offload_state_dict "
    "output_loading_info proxies quantization_config state_dict torch_dtype tp_size use_kernels variant".split()
)


class MemoryLM(HFLM):
    """An in-context-learning method as a model of lm-eval.

    Args:
        pretrained: as for `hf`, like every argument that is not named here.
        pack_tokens: how many tokens of queries and options share one forward pass when log-likelihoods are
            scored. (`batch_size` is the number of texts generated side by side.)
        store_bytes: how many bytes of keys and values are kept for contexts that come up again.
        overflow: what becomes of a prompt that does not fit the model's positions: "error" refuses the run,
            "drop" leaves out whole demonstrations, first ones first, and records how many.
        **kwargs: the method's own arguments, and `hf`'s.

    Raises:
        InputError: an argument is unknown or outside its range, or the model cannot be used.
    """

    method_class: ClassVar[type[methods.ICL]]

    def __init__(
        self,
        pretrained: str | transformers.PreTrainedModel,
        *,
        pack_tokens: int = 512,
        store_bytes: int = 2**31,
        overflow: str = "error",
        **kwargs: Any,
    ) -> None:
        for name, value in (("pack_tokens", pack_tokens), ("store_bytes", store_bytes)):
            if not is_whole(value) or value < 1:
                raise InputError(f"lm-eval-icl: {name}={value!r}: must be a whole number, 1 or more.")
        if overflow not in ("error", "drop"):
            raise InputError(f"lm-eval-icl: overflow={overflow!r}: must be error or drop.")
        own = {field.name for field in dataclasses.fields(self.method_class)} & kwargs.keys()
        self.method = self.method_class(**{name: kwargs.pop(name) for name in own})
        self.pack_tokens, self.overflow = pack_tokens, overflow
        self._forwarded = kwargs
        if not isinstance(pretrained, str):
            self._check_names(pretrained.config)
        super().__init__(pretrained, **kwargs)

        with self._forward():
            self.abilities = probe(self.model)
        if not self.abilities.packs:
            if getattr(self.method, "restart_positions", False):
                raise InputError(
                    f"lm-eval-icl: {type(self.model).__name__} does not obey given positions, which "
                    "restart_positions=True needs: leave it at False."
                )
            log.warning(
                "%s places or hides tokens by their index in the cache: queries are scored one by one instead of "
                "packed into one pass, exactly but more slowly.",
                type(self.model).__name__,
            )
        self.store = MemoryStore(lambda context: self.method.encode(self.model, context), store_bytes)
        self.tokenize = RequestTokenizer(self.tokenizer, self.prefix_token_id, self.add_bos_token, self.max_gen_toks)
        self.begin([])

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """How `HFLM` runs its model: without gradients, in mixed precision if asked."""
        dtype = getattr(self, "mixed_precision_dtype", None)
        with torch.no_grad(), torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            yield

    # What can be refused before weights are loaded.

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        try:
            super()._get_config(pretrained, **kwargs)
        except OSError as error:
            raise InputError(
                f"lm-eval-icl: pretrained={pretrained!r}: no checkpoint there ({str(error).splitlines()[0]})."
            ) from error
        self._check_names(self._config)

    def _check_names(self, config: transformers.PreTrainedConfig) -> None:
        if self._forwarded.get("trust_remote_code"):
            return  # the checkpoint's own code may take any argument
        known = FROM_PRETRAINED | set(config.to_dict())
        known |= {field.name for field in dataclasses.fields(self.method_class)}
        for function in (
            MemoryLM.__init__,
            HFLM.__init__,
            transformers.PreTrainedModel.from_pretrained,
            transformers.BitsAndBytesConfig.__init__,
        ):
            known |= set(inspect.signature(function).parameters) - {"self", "cls", "kwargs", "model_args"}
        for name in self._forwarded.keys() - known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            raise InputError(
                f"lm-eval-icl: unknown model argument {name!r}"
                + (f": did you mean {near[0]!r}?" if near else ": README lists the arguments.")
            )

    def _get_backend(self, *args: Any, **kwargs: Any) -> None:
        super()._get_backend(*args, **kwargs)
        if self.backend != "causal":
            raise InputError(
                f"lm-eval-icl: {self.config.model_type!r} is an encoder-decoder model; these methods are defined "
                "for decoders (causal language models) only."
            )

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take lm-eval's response cache, unless something else wrote it: its keys know the prompts alone."""
        super().set_cache_hook(cache_hook)
        cache = cache_hook.dbdict
        if cache is None:
            return
        mine = {
            "version": __version__,
            "pretrained": str(getattr(self.pretrained, "name_or_path", self.pretrained)),
            "revision": self.revision,
            "dtype": str(self.model.dtype),
            "max_length": self.max_length,
            **self._run_arguments(),
        }
        writer = json.loads(cache["lm-eval-icl"]) if "lm-eval-icl" in cache else {}
        if writer != mine and len(cache):
            differs = [
                f"{name}={writer.get(name)} there, {mine.get(name)} here"
                for name in mine | writer
                if writer.get(name) != mine.get(name)
            ]
            raise InputError(
                f"lm-eval-icl: the cache {cache.filename} was written by "
                + (f"another run ({'; '.join(differs)})" if writer else "another model")
                + ": give another path to --use_cache."
            )
        cache["lm-eval-icl"] = json.dumps(mine)

    def _run_arguments(self) -> dict[str, Any]:
        return {
            "method": type(self.method).__name__.lower(),
            **dataclasses.asdict(self.method),
            "overflow": self.overflow,
        }

    # What can be refused before the first forward pass.

    def begin(self, tasks: Sequence[Task]) -> None:
        """A run over these tasks begins: their prompts are all checked before the first is run."""
        self._unchecked = list(tasks)
        self._warned: set[str] = set()
        # What overflow=drop left out: task -> documents concerned, and demonstrations.
        self.left_out: dict[str, dict[str, int]] = {}

    def _prepare(self, instances: Sequence[Instance]) -> list[Request]:
        """These requests as token ids, all of a kind; of the first call, the run's other kinds checked too."""
        other = defaultdict(list)
        for task in self._unchecked:
            for instance in task.instances or ():
                if instance.request_type != instances[0].request_type:
                    other[instance.request_type].append(instance)
        self._unchecked = []
        for kind in ("loglikelihood", "generate_until"):
            if other[kind]:
                self._tokenize_and_fit(other[kind], left_out={})
        requests = self._tokenize_and_fit(instances, self.left_out)
        for task_name, count in self.left_out.items():
            self._warn_once(
                f"{task_name}: overflow=drop left out {count['demonstrations']} demonstrations of "
                f"{count['documents']} documents, which would not have fitted {self.max_length} positions."
            )
        if without := self.method.without_demonstrations:
            tasks: dict[str | None, bool] = defaultdict(bool)
            for instance, request in zip(instances, requests, strict=True):
                tasks[instance.task_name] |= bool(request.prompt.context.demonstrations)
            for name in (name for name, has_demonstrations in tasks.items() if not has_demonstrations):
                self._warn_once(f"{name}: no demonstrations: {without}. Give some with --num_fewshot.")
        return requests

    def _tokenize_and_fit(self, instances: Sequence[Instance], left_out: dict[str, dict[str, int]]) -> list[Request]:
        tokenize = getattr(self.tokenize, instances[0].request_type)
        positions = Positions(self.max_length, self.method.reach, self.method.reach_hint)
        return fit(instances, tokenize, positions, self.overflow == "drop", left_out, quiet=self.rank != 0)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned and self.rank == 0:
            self._warned.add(message)
            log.warning(message)

    # Running.

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Score]:
        """Summed log-probability of every continuation, and whether it is the greedy one."""
        if not requests:
            return []
        if self.enable_thinking:
            return super().loglikelihood(requests, disable_tqdm)  # which refuses it
        prepared = self._prepare(requests)
        # Each distinct context, query and answer once: context -> query -> answer -> requests.
        work: dict[Context, dict[Any, dict[Any, list[int]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for i, request in enumerate(prepared):
            work[request.prompt.context][request.prompt.query][request.answer].append(i)

        results: list[Score | None] = [None] * len(requests)
        bar = tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm or self.rank != 0)
        with bar:
            # The longest context first: what does not fit the machine's memory shows at once.
            for context, queries in sorted(work.items(), key=lambda item: -len(item[0].tokens)):
                for pairs, scores in self._score(context, {query: list(of) for query, of in queries.items()}):
                    for (query, answer), score in zip(pairs, scores, strict=True):
                        for i in queries[query][answer]:
                            results[i] = score
                            self.cache_hook.add_partial("loglikelihood", requests[i].args, score)
                            bar.update(1)
        return results  # type: ignore[return-value]

    def _score(self, context: Context, queries: dict[Any, list[Any]]) -> Iterator[tuple[Sequence[Pair], list[Score]]]:
        """All answers of all queries of one context, some pairs at a time."""
        with self._forward():
            memory = self.store[context]
            for pack in self._packs(queries):
                pairs = [(query, answer) for query, answers in pack for answer in answers]
                if self.abilities.packs_to(len(memory) + sum(_cost(*item) for item in pack)):
                    yield pairs, score_packed(self.model, memory, pairs, self.softmax_dtype)
                    continue
                for query, answers in pack:
                    scores = score_alone(self.model, memory, query, answers, self.softmax_dtype)
                    yield [(query, answer) for answer in answers], scores

    def _packs(self, queries: dict[Any, list[Any]]) -> Iterator[list[tuple[Any, list[Any]]]]:
        """Queries with their answers, as many at a time as `pack_tokens` takes, long ones first."""
        pack: list[tuple[Any, list[Any]]] = []
        tokens = 0
        for item in sorted(queries.items(), key=lambda item: -_cost(*item)):
            if pack and tokens + _cost(*item) > self.pack_tokens:
                yield pack
                pack, tokens = [], 0
            pack.append(item)
            tokens += _cost(*item)
        if pack:
            yield pack

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each prompt, up to a stop sequence or `max_gen_toks`."""
        if not requests:
            return []
        prepared = self._prepare(requests)
        batch_size = self._detect_batch_size() if self.batch_size == "auto" else self.batch_size
        work: dict[tuple[Context, str], list[int]] = defaultdict(list)
        for i, request in enumerate(prepared):
            work[request.prompt.context, json.dumps(requests[i].args[1], sort_keys=True, default=str)].append(i)

        results = [""] * len(requests)
        bar = tqdm(
            total=len(requests),
            desc="Running generate_until requests",
            disable=disable_tqdm or self.rank != 0,
        )
        with bar:
            for (context, _), indices in sorted(work.items(), key=lambda item: -len(item[0][0].tokens)):
                indices.sort(key=lambda i: -len(prepared[i].prompt.query))
                while indices:
                    batch = self._batch(indices, prepared, batch_size)
                    indices = indices[len(batch) :]
                    queries = [prepared[i].prompt.query for i in batch]
                    texts = self._generate(context, queries, requests[batch[0]].args[1])
                    for i, text in zip(batch, texts, strict=True):
                        results[i] = text
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
                        bar.update(1)
        return results

    def _batch(self, indices: list[int], prepared: Sequence[Request], batch_size: int) -> list[int]:
        """The first requests of `indices` that can be generated side by side."""
        longest = prepared[indices[0]]
        batch = indices[:batch_size]
        if not self.abilities.packs_to(len(longest.prompt) + longest.room):
            # Padding would shift a query's index: only queries of one length, which need none.
            length = len(longest.prompt.query)
            batch = [i for i in batch if len(prepared[i].prompt.query) == length]
        return batch

    def _generate(self, context: Context, queries: Sequence[Sequence[int]], gen_kwargs: dict[str, Any]) -> list[str]:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(kwargs.pop("until", None), eos=eos)
        max_gen_toks = kwargs.pop("max_gen_toks")
        kwargs.pop("max_length", None)  # the room that was checked is max_gen_toks

        def generate(context: torch.Tensor, **cache: Any) -> torch.Tensor:
            length = context.shape[1] + max_gen_toks
            return self._model_generate(context, length, until, **cache, **kwargs)

        with self._forward():
            rows = continue_from(generate, self.store[context], queries, self.tokenizer.pad_token_id, self.device)
        return [self._text(row, until) for row in rows]

    def _text(self, tokens: list[int], until: list[str]) -> str:
        """Generated ids as text, without the stop sequence and what follows it, as `HFLM` makes it."""
        end = self.think_end_token
        if isinstance(end, int) and end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        text = self.tok_decode(tokens)
        if isinstance(end, int):
            text = text.lstrip()
        return postprocess_generated_text(text, until, end if isinstance(end, str) else None)

    def get_model_info(self) -> dict[str, Any]:
        """`HFLM`'s, and what was run: it stands under "config" in the results file."""
        return super().get_model_info() | {
            "icl": {
                "version": __version__,
                **self._run_arguments(),
                "left_out": self.left_out,
                "contexts_encoded": self.store.encoded,
                "contexts_reused": self.store.reused,
            }
        }


def _cost(query: Sequence[int], answers: Sequence[Sequence[int]]) -> int:
    """Tokens that run through the model for one query, at most."""
    return len(query) + sum(len(answer) - 1 for answer in answers)


class ICL(MemoryLM):
    """`--model icl`: `lm_eval_icl.methods.ICL`."""

    method_class = methods.ICL


class DeepThink(MemoryLM):
    """`--model deepthink`: `lm_eval_icl.methods.DeepThink`."""

    method_class = methods.DeepThink


def announce_runs() -> None:
    """Let `lm_eval.evaluate` tell a `MemoryLM` which tasks a run has, before it asks for the first results.

    lm-eval hands a model one kind of request after another; a prompt that does not fit should be found
    before hours of work on another kind. Doing it twice changes nothing.
    """
    original = lm_eval.evaluator.evaluate
    if hasattr(original, "announces"):
        return

    @functools.wraps(original)
    def evaluate(lm: LM, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
        model = lm.lm if isinstance(lm, CachingLM) else lm
        if isinstance(model, MemoryLM):
            model.begin(list(task_dict.get("tasks", {}).values()))
        return original(lm, task_dict, *args, **kwargs)

    evaluate.announces = True  # type: ignore[attr-defined]
    lm_eval.evaluator.evaluate = evaluate


record_prompts()
announce_runs()
