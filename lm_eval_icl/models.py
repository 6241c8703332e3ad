"""The models that lm-eval knows by name: its own `HFLM`, scoring and generating from a memory.

Loading, dtype, quantization, PEFT, device_map, chat templates and rolling log-likelihood are `HFLM`'s;
what is ours is how requests run, and that a run of days comes to its end.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeVar

import lm_eval.evaluator
import torch
import transformers
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CacheHook, CachingLM
from lm_eval.api.task import Task
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from lm_eval_icl import __version__, methods
from lm_eval_icl.activations import fused_gelu
from lm_eval_icl.arguments import check_names
from lm_eval_icl.cache import finished, resume
from lm_eval_icl.commit import commit
from lm_eval_icl.errors import InputError, Unsupported, is_whole, refusing
from lm_eval_icl.fingerprint import fingerprint
from lm_eval_icl.generation import Finite, continue_from
from lm_eval_icl.loading import LoadedLM
from lm_eval_icl.memory import Memory, MemoryStore
from lm_eval_icl.positions import no_positions, position_embeddings, position_switch
from lm_eval_icl.probe import probe
from lm_eval_icl.processes import by_filter, check_shares, in_order, leave_in_order, total
from lm_eval_icl.prompts import record_prompts
from lm_eval_icl.requests import Request, RequestTokenizer, Room
from lm_eval_icl.run import Run
from lm_eval_icl.saving import report_failures
from lm_eval_icl.scoring import Pair, Queries, Query, Score, cost, first_pack, score_alone, score_packed
from lm_eval_icl.task_errors import refuse_unusable_tasks
from lm_eval_icl.tokens import Context
from lm_eval_icl.wrapping import wrap

# A child of lm-eval's logger, for its handler and its level.
log = logging.getLogger("lm_eval.icl")

T = TypeVar("T")


class MemoryLM(LoadedLM):
    """An in-context-learning method as a model of lm-eval.

    Args:
        pretrained: as for `hf`, like every argument that is not named here.
        batch_size: how many texts are generated side by side, and on an accelerator how many queries at least share
            one forward pass when log-likelihoods are scored. "auto" begins with `max_batch_size`. Whatever does not
            fit the device's memory is halved and run again.
        pack_tokens: how many tokens of queries and options share one forward pass when log-likelihoods are scored.
        store_bytes: how many bytes of keys and values are kept for contexts that come up again.
        overflow: what becomes of a prompt that does not fit the model's positions: "error" refuses the run,
            "drop" leaves out whole demonstrations, first ones first (in canonical order, where that is on), and
            records how many.
        canonical_order: encode a set of demonstrations in one order, whatever order they come in, so that their
            order changes no bit of a result. By default where the method does not depend on the order.
        **kwargs: the method's own arguments, and `hf`'s.

    Raises:
        InputError: an argument is unknown or outside its range, or the model cannot be used.
    """

    method_class: ClassVar[type[methods.Method]]

    def __init__(
        self,
        pretrained: str | transformers.PreTrainedModel | None = None,
        *,
        pack_tokens: int = 1024,
        store_bytes: int = 2**31,
        overflow: str = "error",
        canonical_order: bool | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in (("pack_tokens", pack_tokens), ("store_bytes", store_bytes)):
            if not is_whole(value) or value < 1:
                raise InputError(f"lm-eval-icl: {name}={value!r}: must be a whole number, 1 or more.")
        if overflow not in ("error", "drop"):
            raise InputError(f"lm-eval-icl: overflow={overflow!r}: must be error or drop.")
        own = {field.name for field in dataclasses.fields(self.method_class)} & kwargs.keys()
        self.method = self.method_class(**{name: kwargs.pop(name) for name in own})
        if canonical_order is not None and not isinstance(canonical_order, bool):
            raise InputError(f"lm-eval-icl: canonical_order={canonical_order!r}: must be True or False.")
        if canonical_order and not self.method.invariant:
            raise InputError(
                f"lm-eval-icl: canonical_order=True: {self.method.name} depends on the order of its demonstrations "
                "with these arguments, and one order for all would hide it."
            )
        self.canonical_order = self.method.invariant if canonical_order is None else canonical_order
        self.pack_tokens, self.overflow = int(pack_tokens), overflow
        super().__init__(pretrained, **kwargs)

        self._without: list[torch.nn.Embedding] | None = None
        with self._forward():
            self.abilities = probe(self.model)
        self._check_abilities()
        with self._forward():
            self.method = self.method.bind(self.model)
        # A checkpoint may ask for a cache of a kind of its own; ours begins with a memory.
        self.model.generation_config.cache_implementation = None
        self.store_bytes = int(store_bytes)
        self.tokenize = RequestTokenizer(
            self.tokenizer,
            self.prefix_token_id,
            self.add_bos_token,
            self.max_gen_toks,
            by_part=self.method.symmetric_mask,
            canonical=self.canonical_order,
            rows=self._rows(),
        )
        self.begin([])

    def _check_abilities(self) -> None:
        """Refuse what the method needs and the model does not do; take the positions away if that is asked."""
        model, method = type(self.model).__name__, self.method
        if method.masks and not self.abilities.hides:
            raise Unsupported(
                f"lm-eval-icl: {method.name} hides tokens from each other, which {model} (attn_implementation="
                f"{self.model.config._attn_implementation}) does not obey: a token that the mask hides changes the "
                "result. Use another attn_implementation (sdpa, eager) or another model."
            )
        if method.places and not self.abilities.places:
            asked = " with restart_positions=True" if getattr(method, "restart_positions", False) else ""
            asked = f" with positions={method.positions}" if method.positions != "sequential" else asked
            raise Unsupported(
                f"lm-eval-icl: {method.name}{asked} needs a model that obeys given positions, and {model} has no "
                "positions to give: it counts tokens by itself."
            )
        if not self.abilities.packs:
            log.warning(
                "%s (attn_implementation=%s) does not take a mask or positions given by hand: queries are scored one "
                "by one instead of packed into one pass, exactly but more slowly.",
                *(model, self.model.config._attn_implementation),
            )
        if method.positions == "none":
            with self._forward():
                self._without = position_embeddings(self.model)
            with self._forward():  # now without them
                if probe(self.model).places:
                    raise Unsupported(
                        f"lm-eval-icl: {method.name} needs a model whose positions can be taken away, and "
                        f"{model} still tells them apart with rotary angles and learned positions switched off."
                    )

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """How `HFLM` runs its model: without gradients, in mixed precision if asked; and without positions if asked.
        Its GELU may be a faster one."""
        dtype = getattr(self, "mixed_precision_dtype", None)
        positions = nullcontext() if self._without is None else no_positions(self.model, self._without)
        mixed = torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)
        with torch.no_grad(), mixed, positions, fused_gelu(self.model):
            yield

    def _check_config(self, config: transformers.PreTrainedConfig) -> None:
        """Refuse arguments that nobody takes, before weights are loaded."""
        ours = {*inspect.signature(MemoryLM.__init__).parameters} - {"self", "kwargs"}
        ours |= {field.name for field in dataclasses.fields(self.method_class)}
        others = {
            field.name: name.lower()
            for name in methods.__all__
            for field in dataclasses.fields(getattr(methods, name))
            if field.name not in ours
        }
        check_names(self._forwarded, ours, others, config, any_name=bool(self._forwarded.get("trust_remote_code")))

    def identity(self) -> dict[str, Any]:
        """What responses depend on beside the prompts: a cache (`--use_cache`) of another run is refused by it.

        Raises:
            InputError: a run like this one cannot have a cache.
        """
        if self._forwarded.get("tp_plan") and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(
                "lm-eval-icl: tp_plan and --use_cache do not go together: the processes share every pass, and each has "
                "a cache of its own, which may hold other responses after an interruption. Leave one of them out."
            )
        # Of what was given not what only says where and how fast, nor what the model and the tokenizer tell themselves.
        aside = {"device", "device_map", "parallelize", "max_memory_per_gpu", "max_cpu_memory", "offload_folder"}
        aside |= {"batch_size", "max_batch_size", "low_cpu_mem_usage", "token", "dtype", "tokenizer"}
        return {
            "version": __version__,
            **self._run_arguments(),
            "pretrained": str(getattr(self.pretrained, "name_or_path", self.pretrained)),
            "dtype": str(self.model.dtype),
            "max_length": self.max_length,
            **{k: str(v) for k, v in self._forwarded.items() if k not in aside},
            **fingerprint(self.model, self.tokenizer),
        }

    def asked(self, kind: str, requests: Sequence[Instance]) -> list[tuple[Any, ...]]:
        """What a cache keeps the responses to these requests by."""
        self.run.check()
        if kind == "loglikelihood_rolling":
            return [request.args for request in requests]
        return [_asked(*pair) for pair in zip(requests, self.run.requests(requests), strict=True)]

    def _run_arguments(self) -> dict[str, Any]:
        return {
            "method": self.method.name,
            **dataclasses.asdict(self.method),
            "canonical_order": self.canonical_order,
            "overflow": self.overflow,
        }

    # A run begins and ends.

    def begin(self, tasks: Sequence[Task]) -> None:
        """A run over these tasks begins: nothing of an earlier one is kept."""
        room = Room(
            self.method,
            model=type(self.model).__name__,
            positions=self.max_length,
            window=self.abilities.window if self.method.masks else None,
            switch=position_switch(self.model),
            hint=self.method.reach_hint if self.abilities.places else "",
        )
        self.run = Run(tasks, self.tokenize, room, self.overflow == "drop", self.rank == 0)
        self.store = MemoryStore(lambda context: self.method.encode(self.model, context), self.store_bytes)
        # How much runs at once, until memory runs out (`_fitting`).
        self._texts = self.max_batch_size if self.batch_size == "auto" else self.batch_size
        self._pack_tokens = self.pack_tokens
        # On a CPU packs of more tokens take longer: most of their attention is masked out.
        self._side_by_side = 1 if self.device.type == "cpu" else self._texts
        # Tokens of log-likelihood requests: that went through the model, and that would if each ran by itself.
        self._tokens_run = self._tokens_alone = 0
        # What all processes did, once they have done it.
        self.counts: dict[str, Any] = {}

    def finish(self) -> None:
        """A run ends, on every process: count what all of them did.

        Not in `loglikelihood`: a process that has all its responses from lm-eval's cache never calls it, and
        the others would wait for it.
        """
        self.run.check()  # for such a process: some of its demonstrations may have been left out
        share = {
            "left_out": self.run.left_out,
            "contexts_encoded": self.store.encoded,
            "contexts_reused": self.store.reused,
            "tokens_run": self._tokens_run,
            "tokens_saved": self._tokens_alone - self._tokens_run,
        }
        self.counts = total(super().gather_object(share) or [share])

    # Among processes.

    def all_gather(self, number: torch.Tensor) -> torch.Tensor:
        """This process's number in place of everybody's.

        lm-eval gathers how many requests each process has, to repeat the last one where there are fewer (and its
        response in the samples), and which batch size, to take the smallest. That is for models whose passes wait
        for each other; these do not.
        """
        return number.flatten().repeat(self.world_size)

    def barrier(self) -> None:
        """Wait for the other processes, and end with one line where one of them is gone: it has said why."""
        try:
            super().barrier()
        except RuntimeError as error:
            why = " ".join(str(error).split())
            raise InputError(f"lm-eval-icl: process {self.rank} stops, as another one did ({why}).") from error

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """What all processes have of every task, on one of them: in the order of the documents, as a single share."""
        shares = super().gather_object(obj, dst)
        if shares is None:
            return None
        if all(isinstance(of_task, list) for of_task in obj.values()):  # samples; the other kind is metrics
            shares = [{task: by_filter(samples) for task, samples in share.items()} for share in shares]
            joined = in_order(shares)
            return [{task: list(chain.from_iterable(of.values())) for task, of in joined.items()}]
        return [in_order(shares)]

    # Running.

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Score]:
        """Summed log-probability of every continuation, and whether it is the greedy one."""
        if not requests:
            return []
        if self.enable_thinking:
            return super().loglikelihood(requests, disable_tqdm)  # which refuses it
        self.run.check()
        prepared = self.run.requests(requests)
        # Each distinct context, query and answer once: context -> query -> answer -> requests.
        work: dict[Context, dict[Any, dict[Any, list[int]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for i, request in enumerate(prepared):
            work[request.prompt.context][request.prompt.query][request.answer].append(i)

        results: dict[int, Score] = {}
        bar = tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm or self.rank != 0)
        self._tokens_alone += sum({id(request): request.length for request in prepared}.values())
        with bar, self._forward(), self._counting():
            # The longest context first: what does not fit the machine's memory shows at once.
            for context, queries in sorted(work.items(), key=lambda item: -len(item[0].tokens)):
                for pairs, scores in self._score(context, {query: list(of) for query, of in queries.items()}):
                    for (query, answer), score in zip(pairs, scores, strict=True):
                        for i in queries[query][answer]:
                            self._check_score(requests[i], score)
                            results[i] = score
                            self.cache_hook.add_partial("loglikelihood", _asked(requests[i], prepared[i]), score)
                            bar.update(1)
                    finished(self.cache_hook)
                self._done(context)
        return [results[i] for i in range(len(requests))]

    def _done(self, context: Context) -> None:
        """One kind of request is through with a context. With the last that the run has, its memory goes: new
        demonstrations for every document would fill the store with what never comes up again. (`batchicl`'s, one a
        demonstration, may come up in other contexts, and go when the store is full.)"""
        if self.run.done(context):
            self.store.forget(context)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the tokens that go through the model."""

        def count(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._tokens_run += kwargs["input_ids"].numel()

        handle = self.model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _check_score(self, request: Instance, score: Score) -> None:
        """Stop at the first number that is none: metrics would make an ordinary wrong answer of it."""
        if not math.isfinite(score[0]):
            raise InputError(
                f"lm-eval-icl: task {request.task_name!r}, document {request.doc_id}, option {request.idx}: the "
                f"log-probability is {score[0]} ({self.model.dtype}): the checkpoint is broken, or its numbers "
                "overflow. Try --model_args dtype=float32."
            )

    def _score(self, context: Context, queries: Queries) -> Iterator[tuple[Sequence[Pair], list[Score]]]:
        """All answers of all queries of one context, some pairs at a time."""
        if not self.method.per_query:
            yield from self._score_on(context, self._fitting(lambda: self.store[context]), queries)
            return
        for query, answers in queries.items():
            memory, rest = self._encode_query(context, query)
            for pairs, scores in self._score_on(context, memory, {rest: answers}):
                yield [(query, answer) for _, answer in pairs], scores

    def _score_on(
        self, context: Context, memory: Memory, queries: Queries
    ) -> Iterator[tuple[Sequence[Pair], list[Score]]]:
        # Those that begin alike stand side by side: in one pack what they share runs once.
        waiting = sorted(queries.items(), key=lambda item: item[0])
        while waiting:
            pack, scores = self._fitting(
                partial(self._score_first, memory, waiting), partial(self._halve_pack, memory, waiting), context
            )
            waiting = waiting[len(pack) :]
            yield [(query, answer) for query, answers in pack for answer in answers], scores

    def _pack(self, memory: Memory, waiting: Sequence[Query]) -> tuple[list[Query], bool]:
        """The first of the waiting queries that run together, and whether in one pass instead of ordinary ones."""
        pack = first_pack(waiting, self._pack_tokens, self._side_by_side)
        tokens = cost(pack)
        # A query longer than a pack gains nothing from a mask as large as its square.
        together = len(pack) > 1 or tokens <= self._pack_tokens
        together = together and self.abilities.packs_to(len(memory) + tokens)
        return (pack, True) if together else (pack[:1], False)

    def _score_first(self, memory: Memory, waiting: Sequence[Query]) -> tuple[list[Query], list[Score]]:
        pack, together = self._pack(memory, waiting)
        if together:
            pairs = [(query, answer) for query, answers in pack for answer in answers]
            return pack, score_packed(self.model, memory, pairs, self.softmax_dtype, self.abilities.cuts)
        ((query, answers),) = pack
        return pack, score_alone(self.model, memory, query, answers, self.softmax_dtype)

    def _halve_pack(self, memory: Memory, waiting: Sequence[Query]) -> str:
        pack, together = self._pack(memory, waiting)
        if not together:
            return ""
        self._pack_tokens, self._side_by_side = cost(pack) // 2, 1
        return f"log-likelihoods are scored in packs of {self._pack_tokens} tokens from here on"

    def _encode_query(self, context: Context, query: tuple[int, ...]) -> tuple[Memory, tuple[int, ...]]:
        return self._fitting(lambda: self.method.encode_query(self.model, context, query, self.store.__getitem__))

    def _fitting(self, run: Callable[[], T], halve: Callable[[], str] = str, context: Context | None = None) -> T:
        """What `run` returns. Where the device's memory does not suffice, room is made and it runs again: the memories
        kept for later go, and then `halve` makes it run less at once, and says so, or has nothing to halve.

        Args:
            context: the one whose memory is in use.

        Raises:
            InputError: even the least does not fit.
        """
        while True:
            try:
                return run()
            except RuntimeError as error:
                if not should_reduce_batch_size(error):
                    raise
                trouble = str(error).split(". ")[0]
            # Here, where the error no longer holds what the pass had made.
            clear_device_cache(garbage_collection=True)
            if self.store.shrink(context):
                log.warning("%s: %d bytes of memories are kept from here on", trouble, self.store.max_bytes)
            elif less := halve():
                log.warning("%s: %s", trouble, less)
            else:
                raise InputError(
                    f"lm-eval-icl: {trouble}: {type(self.model).__name__} with one prompt is more than {self.device} "
                    "holds. Lower --num_fewshot, or spread the model over devices (--model_args parallelize=True). "
                    "What --use_cache has stored is kept."
                )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """`HFLM`'s: rolling windows over a text, in which there are no demonstrations."""
        self.run.check()
        if without := self.method.without_demonstrations:
            for task_name in {request.task_name for request in requests}:
                log.warning("%s: rolling log-likelihood has no demonstrations: %s.", task_name, without)
        for request in requests:
            self.tokenize.check_text(request)
        # One call of `HFLM`'s gives nothing before its last text is done: so many at a time as one batch takes. Not
        # where the batch size is measured anew in every call.
        given = self.batch_size
        whole = given == "auto"
        size = len(requests) if whole else int(given)
        run = super().loglikelihood_rolling
        results: list[float] = []
        try:
            with self._forward():
                for i in range(0, len(requests), size):
                    texts = requests[i : i + size]
                    scores = self._fitting(partial(run, texts, disable_tqdm or not whole), self._halve_rolling)
                    for request, score in zip(texts, scores, strict=True):
                        self._check_score(request, (score, False))
                    results += scores
                    finished(self.cache_hook)
        finally:
            self.batch_size_per_gpu = given
        return results

    def _halve_rolling(self) -> str:
        if self.batch_size == "auto" or self.batch_size == 1:
            return ""
        self.batch_size_per_gpu = int(self.batch_size) // 2
        return f"{self.batch_size} windows of rolling log-likelihoods run side by side from here on"

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each prompt, up to a stop sequence or `max_gen_toks`."""
        if not requests:
            return []
        self.run.check()
        prepared = self.run.requests(requests)
        # context -> generation arguments -> requests.
        work: dict[Context, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i, request in enumerate(prepared):
            work[request.prompt.context][json.dumps(requests[i].args[1], sort_keys=True, default=str)].append(i)

        results: dict[int, str] = {}
        bar = tqdm(
            total=len(requests),
            desc="Running generate_until requests",
            disable=disable_tqdm or self.rank != 0,
        )
        with bar:
            for context, of_kind in sorted(work.items(), key=lambda item: -len(item[0].tokens)):
                for indices in of_kind.values():
                    waiting = sorted(indices, key=lambda i: -len(prepared[i].prompt.query))
                    while waiting:
                        batch, texts = self._fitting(
                            partial(self._generate_first, context, waiting, prepared, requests),
                            partial(self._halve_batch, waiting, prepared),
                            context,
                        )
                        waiting = waiting[len(batch) :]
                        for i, text in zip(batch, texts, strict=True):
                            results[i] = text
                            self.cache_hook.add_partial("generate_until", _asked(requests[i], prepared[i]), text)
                            bar.update(1)
                        finished(self.cache_hook)
                self._done(context)
        return [results[i] for i in range(len(requests))]

    def _batch(self, indices: Sequence[int], prepared: Sequence[Request]) -> Sequence[int]:
        """The first requests of `indices` that can be generated side by side."""
        longest = prepared[indices[0]]
        batch = indices[: self._texts]
        if self.method.per_query:
            return batch[:1]  # each its own memory
        if not self.abilities.packs_to(
            self.method.extent(longest.prompt.context).kept + len(longest.prompt.query) + longest.room
        ):
            # Padding would shift a query's index: only queries of one length, which need none.
            length = len(longest.prompt.query)
            batch = [i for i in batch if len(prepared[i].prompt.query) == length]
        return batch

    def _halve_batch(self, indices: Sequence[int], prepared: Sequence[Request]) -> str:
        self._texts = len(self._batch(indices, prepared)) // 2
        return f"{self._texts} texts are generated side by side from here on" if self._texts else ""

    def _generate_first(
        self, context: Context, indices: Sequence[int], prepared: Sequence[Request], requests: Sequence[Instance]
    ) -> tuple[Sequence[int], list[str]]:
        batch = self._batch(indices, prepared)
        queries = [prepared[i].prompt.query for i in batch]
        return batch, self._generate(context, queries, [requests[i] for i in batch])

    def _generate(
        self, context: Context, queries: Sequence[tuple[int, ...]], requests: Sequence[Instance]
    ) -> list[str]:
        given = requests[0].args[1]
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        eos = None if self.eot_token_id is None else self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(kwargs.pop("until", None), eos=eos)
        max_gen_toks = kwargs.pop("max_gen_toks")
        kwargs.pop("cache_implementation", None)

        def generate(context: torch.Tensor, **cache: Any) -> torch.Tensor:
            length = context.shape[1] + max_gen_toks
            numbers = [Finite(requests, self.model.dtype)]
            what = f"task {requests[0].task_name!r}: generation arguments {given}: refused by transformers"
            with refusing(what, kinds=(TypeError, ValueError)):
                return self._model_generate(context, length, until, logits_processor=numbers, **cache, **kwargs)

        with self._forward():
            # Queries of one batch share a memory (see `_batch`).
            memory, first = self.method.encode_query(self.model, context, queries[0], self.store.__getitem__)
            pad = self.tokenizer.pad_token_id
            rows = continue_from(self.model, generate, memory, [first, *queries[1:]], pad)
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
                "commit": commit(),
                **self._run_arguments(),
                "pack_tokens": self.pack_tokens,
                "store_bytes": self.store_bytes,
                **self.counts,
            }
        }


def _asked(instance: Instance, request: Request) -> tuple[Any, ...]:
    """A request's arguments, and what they do not tell: how many demonstrations overflow=drop left out of it, in which
    its document's other options have a say."""
    return (*instance.args, request.without)


def _model(method: type[methods.Method]) -> type[MemoryLM]:
    """The class that lm-eval registers for a method."""
    body = {
        "method_class": method,
        "__module__": __name__,
        "__doc__": f"`--model`: `lm_eval_icl.methods.{method.__name__}`.",
    }
    return type(method.__name__, (MemoryLM,), body)


ICL = _model(methods.ICL)
NoPE = _model(methods.NoPE)
PrefixICL = _model(methods.PrefixICL)
PCW = _model(methods.PCW)
SAICL = _model(methods.SAICL)
BatchICL = _model(methods.BatchICL)
InvICL = _model(methods.InvICL)
DeepThink = _model(methods.DeepThink)


def announce_runs() -> None:
    """Let `lm_eval.evaluate` tell a `MemoryLM` that a run begins, over which tasks (see `Run.check`), and that it
    ends. Twice changes nothing."""
    wrap(lm_eval.evaluator, "evaluate", _evaluate)


def _evaluate(original: Callable[..., Any], lm: LM, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
    model = lm.lm if isinstance(lm, CachingLM) else lm
    if not isinstance(model, MemoryLM):
        return original(lm, task_dict, *args, **kwargs)
    tasks = task_dict.get("tasks", {})
    check_shares(tasks, kwargs.get("limit"), kwargs.get("samples"), model.world_size)
    if lm is model:
        model.set_cache_hook(CacheHook(None))  # of an earlier run, whose weights may have been others
    model.begin(list(tasks.values()))
    results = original(lm, task_dict, *args, **kwargs)
    model.finish()
    return results


record_prompts()
refuse_unusable_tasks()
announce_runs()
resume(MemoryLM)
report_failures()
leave_in_order()
