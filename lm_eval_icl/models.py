"""The models that lm-eval knows by name: its own `HFLM`, scoring and generating from a memory.

Loading, dtype, quantization, PEFT, device_map, chat templates and rolling log-likelihood are `HFLM`'s;
what is ours is how requests run.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
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
from lm_eval_icl.arguments import check_names
from lm_eval_icl.cache import claim
from lm_eval_icl.errors import InputError, Unsupported, is_whole, refusing
from lm_eval_icl.generation import continue_from
from lm_eval_icl.memory import Memory, MemoryStore
from lm_eval_icl.positions import no_positions, position_embeddings, position_switch
from lm_eval_icl.probe import probe
from lm_eval_icl.prompts import FewShotPrompt, record_prompts
from lm_eval_icl.requests import Request, RequestTokenizer, Room, fit
from lm_eval_icl.scoring import Pair, Queries, Score, cost, packs, score_alone, score_packed
from lm_eval_icl.tokens import Context

# A child of lm-eval's logger, for its handler and its level.
log = logging.getLogger("lm_eval.icl")


class MemoryLM(HFLM):
    """An in-context-learning method as a model of lm-eval.

    Args:
        pretrained: as for `hf`, like every argument that is not named here.
        pack_tokens: how many tokens of queries and options share one forward pass when log-likelihoods are
            scored. (`batch_size` is the number of texts generated side by side.)
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
        pack_tokens: int = 512,
        store_bytes: int = 2**31,
        overflow: str = "error",
        canonical_order: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if pretrained is None or not (isinstance(pretrained, str) or hasattr(pretrained, "config")):
            raise InputError(
                f"lm-eval-icl: pretrained={pretrained!r}: must be the name or folder of a checkpoint: --model_args "
                "pretrained=..."
            )
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
        self._forwarded = kwargs
        if not isinstance(pretrained, str):
            self._check_names(pretrained.config)
        with refusing("the model cannot be made of these arguments"):
            super().__init__(pretrained, **kwargs)
        if self.batch_size != "auto" and self.batch_size < 1:
            raise InputError(f"lm-eval-icl: batch_size={self.batch_size}: must be a whole number, 1 or more, or auto.")
        self._check_tokenizer()

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
        """How `HFLM` runs its model: without gradients, in mixed precision if asked; and without positions if asked."""
        dtype = getattr(self, "mixed_precision_dtype", None)
        positions = nullcontext() if self._without is None else no_positions(self.model, self._without)
        with torch.no_grad(), torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None), positions:
            yield

    # What can be refused while the checkpoint is loaded.

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        path = Path(pretrained)
        if path.is_absolute() and not path.is_dir() and not kwargs.get("gguf_file"):
            raise InputError(f"lm-eval-icl: pretrained={pretrained!r}: no checkpoint there (no such folder).")
        with refusing(f"pretrained={pretrained!r}: no checkpoint there that transformers can read"):
            super()._get_config(pretrained, **kwargs)
        self._check_names(self._config)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        where = f"tokenizer={tokenizer!r}" if isinstance(tokenizer, str) else f"pretrained={pretrained!r}"
        advice = "Give the folder or name of one that fits: --model_args tokenizer=..."
        with refusing(f"{where}: its tokenizer cannot be loaded", advice):
            super()._create_tokenizer(pretrained, tokenizer, *args, **kwargs)
        # Some tokenizers are made without their files, and then know no text.
        if set(self.tokenizer.get_vocab()) <= set(self.tokenizer.all_special_tokens):
            raise InputError(f"lm-eval-icl: {where}: its tokenizer has no vocabulary: are its files there? {advice}")

    def _create_model(self, *args: Any, pretrained: str, **kwargs: Any) -> None:
        # What was given for loading alone is as likely at fault as the files.
        given = [k for k in ("attn_implementation", "dtype", "peft", "delta", "device_map") if k in self._forwarded]
        what = ", ".join([f"pretrained={pretrained!r}", *(f"{name}={self._forwarded[name]!r}" for name in given)])
        advice = "" if given else "Check the files: is one cut short, or missing?"
        with refusing(f"{what}: the model cannot be loaded", advice):
            super()._create_model(*args, pretrained=pretrained, **kwargs)

    def _check_tokenizer(self) -> None:
        prefix, pad, rows = self.prefix_token_id, self.tokenizer.pad_token_id, self._rows()
        if prefix is None:
            raise InputError(
                "lm-eval-icl: the tokenizer names no BOS and no EOS token, one of which stands for an empty context: "
                "say which token to take, --model_args prefix_token_id=N."
            )
        if not is_whole(prefix) or not 0 <= prefix < rows:
            raise InputError(
                f"lm-eval-icl: prefix_token_id={prefix!r}: must be one of the model's tokens, 0 to {rows - 1}."
            )
        if pad is None or pad >= rows:
            # lm-eval adds one where a tokenizer has none; padding is masked, so that any token will do.
            self.tokenizer.pad_token_id = prefix

    def _rows(self) -> int:
        """How many tokens the model knows: ids from here on would fail in the middle of a forward pass."""
        embedding: Any = self.model.get_input_embeddings()
        return int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])

    def _check_names(self, config: transformers.PreTrainedConfig) -> None:
        ours = {*inspect.signature(MemoryLM.__init__).parameters} - {"self", "kwargs"}
        ours |= {field.name for field in dataclasses.fields(self.method_class)}
        others = {
            field.name: name.lower()
            for name in methods.__all__
            for field in dataclasses.fields(getattr(methods, name))
            if field.name not in ours
        }
        check_names(self._forwarded, ours, others, config, any_name=bool(self._forwarded.get("trust_remote_code")))

    def _get_backend(self, *args: Any, **kwargs: Any) -> None:
        super()._get_backend(*args, **kwargs)
        self.AUTO_MODEL_CLASS = _Complete
        if self.backend != "causal":
            raise InputError(
                f"lm-eval-icl: {self.config.model_type!r} loads as an encoder-decoder model; these methods are defined "
                "for decoders (causal language models) only."
            )

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take lm-eval's response cache, unless something else wrote it: its keys know the prompts alone."""
        super().set_cache_hook(cache_hook)
        if cache_hook.dbdict is not None:
            run = {
                "version": __version__,
                "pretrained": str(getattr(self.pretrained, "name_or_path", self.pretrained)),
                "dtype": str(self.model.dtype),
                "max_length": self.max_length,
                # Whatever was given, but for what only says where and how fast.
                **{
                    k: str(v) for k, v in self._forwarded.items() if k not in ("device", "batch_size", "max_batch_size")
                },
            }
            claim(cache_hook.dbdict, run | self._run_arguments())

    def _run_arguments(self) -> dict[str, Any]:
        return {
            "method": self.method.name,
            **dataclasses.asdict(self.method),
            "canonical_order": self.canonical_order,
            "overflow": self.overflow,
        }

    # What can be refused before the first forward pass.

    def begin(self, tasks: Sequence[Task]) -> None:
        """A run over these tasks begins: nothing of an earlier one is kept."""
        self._tasks = list(tasks)
        # By the instance's id, which stays its own as long as the instance is kept.
        self._prepared: dict[int, tuple[Instance, Request]] = {}
        # What overflow=drop left out: task -> documents concerned, and demonstrations.
        self.left_out: dict[str, dict[str, int]] = {}
        self.store = MemoryStore(lambda context: self.method.encode(self.model, context), self.store_bytes)

    def check_run(self) -> None:
        """Tokenize the requests of all the run's tasks, before the first of them runs.

        lm-eval hands a model one kind of request after another; a prompt that does not fit is found here,
        not after hours of work on another kind.
        """
        tasks, self._tasks = self._tasks, []
        for kind in ("loglikelihood", "generate_until"):
            self._prepare([i for task in tasks for i in task.instances or () if i.request_type == kind])

    def _prepare(self, instances: Sequence[Instance]) -> list[Request]:
        """These requests, all of a kind, as token ids that fit."""
        new = list({id(i): i for i in instances if id(i) not in self._prepared}.values())
        if new:
            self._refuse(new)
            room = Room(
                self.method,
                model=type(self.model).__name__,
                positions=self.max_length,
                window=self.abilities.window if self.method.masks else None,
                switch=position_switch(self.model),
                hint=self.method.reach_hint if self.abilities.places else "",
            )
            tokenize = getattr(self.tokenize, new[0].request_type)
            requests, left_out = fit(new, tokenize, room, self.overflow == "drop", quiet=self.rank != 0)
            self._prepared |= {id(i): (i, request) for i, request in zip(new, requests, strict=True)}
            self._warn(new, requests, left_out)
            self.left_out |= left_out
        return [self._prepared[id(instance)][1] for instance in instances]

    def _refuse(self, instances: Sequence[Instance]) -> None:
        """Refuse prompts whose number of demonstrations the method's arguments do not allow."""
        prompts = ((i.task_name, i.args[0]) for i in instances)
        numbers = {(task, len(prompt.demonstrations)) for task, prompt in prompts if isinstance(prompt, FewShotPrompt)}
        for task_name, n in sorted(numbers, key=str):
            if why := self.method.refuse(n):
                raise InputError(f"lm-eval-icl: {self.method.name}: task {task_name!r}: {why}.")

    def _warn(
        self, instances: Sequence[Instance], requests: Sequence[Request], left_out: dict[str, dict[str, int]]
    ) -> None:
        """Say, once a task, what was left out and where the method had nothing to work on."""
        if self.rank != 0:
            return
        for task_name, count in left_out.items():
            log.warning(
                "%s: overflow=drop left out %d demonstrations of %d documents, which would not have fitted.",
                *(task_name, count["demonstrations"], count["documents"]),
            )
        if without := self.method.without_demonstrations:
            demonstrations: dict[str | None, int] = defaultdict(int)
            for instance, request in zip(instances, requests, strict=True):
                demonstrations[instance.task_name] += len(request.prompt.context.demonstrations)
            for name in (name for name, number in demonstrations.items() if number == 0):
                log.warning("%s: no demonstrations: %s. Give some with --num_fewshot.", name, without)

    # Running.

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Score]:
        """Summed log-probability of every continuation, and whether it is the greedy one."""
        if not requests:
            return []
        if self.enable_thinking:
            return super().loglikelihood(requests, disable_tqdm)  # which refuses it
        self.check_run()
        prepared = self._prepare(requests)
        # Each distinct context, query and answer once: context -> query -> answer -> requests.
        work: dict[Context, dict[Any, dict[Any, list[int]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for i, request in enumerate(prepared):
            work[request.prompt.context][request.prompt.query][request.answer].append(i)

        results: dict[int, Score] = {}
        bar = tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm or self.rank != 0)
        with bar, self._forward():
            # The longest context first: what does not fit the machine's memory shows at once.
            for context, queries in sorted(work.items(), key=lambda item: -len(item[0].tokens)):
                for pairs, scores in self._score(context, {query: list(of) for query, of in queries.items()}):
                    for (query, answer), score in zip(pairs, scores, strict=True):
                        for i in queries[query][answer]:
                            self._check_score(requests[i], score)
                            results[i] = score
                            self.cache_hook.add_partial("loglikelihood", requests[i].args, score)
                            bar.update(1)
        return [results[i] for i in range(len(requests))]

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
            yield from self._score_on(self.store[context], queries)
            return
        for query, answers in queries.items():
            memory, rest = self.method.encode_query(self.model, context, query, self.store.__getitem__)
            for pairs, scores in self._score_on(memory, {rest: answers}):
                yield [(query, answer) for _, answer in pairs], scores

    def _score_on(self, memory: Memory, queries: Queries) -> Iterator[tuple[Sequence[Pair], list[Score]]]:
        for pack in packs(queries, self.pack_tokens):
            pairs = [(query, answer) for query, answers in pack for answer in answers]
            tokens = sum(cost(*item) for item in pack)
            # A query longer than a pack gains nothing from a mask as large as its square.
            if self.abilities.packs_to(len(memory) + tokens) and tokens <= self.pack_tokens:
                yield pairs, score_packed(self.model, memory, pairs, self.softmax_dtype)
                continue
            for query, answers in pack:
                scores = score_alone(self.model, memory, query, answers, self.softmax_dtype)
                yield [(query, answer) for answer in answers], scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """`HFLM`'s: rolling windows over a text, in which there are no demonstrations."""
        self.check_run()
        if without := self.method.without_demonstrations:
            for task_name in {request.task_name for request in requests}:
                log.warning("%s: rolling log-likelihood has no demonstrations: %s.", task_name, without)
        for request in requests:
            self.tokenize.check_text(request)
        with self._forward():
            scores: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
        for request, score in zip(requests, scores, strict=True):
            self._check_score(request, (score, False))
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each prompt, up to a stop sequence or `max_gen_toks`."""
        if not requests:
            return []
        self.check_run()
        prepared = self._prepare(requests)
        batch_size = self._detect_batch_size() if self.batch_size == "auto" else self.batch_size
        work: dict[tuple[Context, str], list[int]] = defaultdict(list)
        for i, request in enumerate(prepared):
            work[request.prompt.context, json.dumps(requests[i].args[1], sort_keys=True, default=str)].append(i)

        results: dict[int, str] = {}
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
                    texts = self._generate(context, queries, [requests[i] for i in batch])
                    for i, text in zip(batch, texts, strict=True):
                        results[i] = text
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
                        bar.update(1)
        return [results[i] for i in range(len(requests))]

    def _batch(self, indices: list[int], prepared: Sequence[Request], batch_size: int) -> list[int]:
        """The first requests of `indices` that can be generated side by side."""
        longest = prepared[indices[0]]
        batch = indices[:batch_size]
        if self.method.per_query:
            return batch[:1]  # each its own memory
        if not self.abilities.packs_to(
            self.method.extent(longest.prompt.context).kept + len(longest.prompt.query) + longest.room
        ):
            # Padding would shift a query's index: only queries of one length, which need none.
            length = len(longest.prompt.query)
            batch = [i for i in batch if len(prepared[i].prompt.query) == length]
        return batch

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
            numbers = [_Numbers(requests, self.model.dtype)]
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
        self.check_run()  # all responses may have come from lm-eval's cache, and some demonstrations been left out
        return super().get_model_info() | {
            "icl": {
                "version": __version__,
                **self._run_arguments(),
                "pack_tokens": self.pack_tokens,
                "store_bytes": self.store_bytes,
                "left_out": self.left_out,
                "contexts_encoded": self.store.encoded,
                "contexts_reused": self.store.reused,
            }
        }


class _Complete:
    """`AutoModelForCausalLM` for whole checkpoints: transformers makes up at random what one lacks, and goes on."""

    @staticmethod
    def from_pretrained(pretrained: str, **kwargs: Any) -> transformers.PreTrainedModel:
        kwargs["output_loading_info"] = True
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(pretrained, **kwargs)
        model, report = loaded
        if missing := sorted(report["missing_keys"]):
            raise InputError(
                f"lm-eval-icl: pretrained={pretrained!r}: {len(missing)} of the weights of {type(model).__name__} are "
                f"not in the checkpoint ({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}), and random "
                "ones would stand in for them: is it the checkpoint of another kind of model, or not whole?"
            )
        return model


class _Numbers(transformers.LogitsProcessor):
    """Stops a generation whose next token is chosen by numbers that are none: the greatest of NaNs is a token too."""

    def __init__(self, requests: Sequence[Instance], dtype: torch.dtype) -> None:
        self.requests, self.dtype = requests, dtype

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        greatest = scores.amax(-1)  # NaN where there is one
        if not greatest.isfinite().all():
            row = int(greatest.isfinite().int().argmin()) * len(self.requests) // len(scores)  # several beams a request
            request = self.requests[row]
            raise InputError(
                f"lm-eval-icl: task {request.task_name!r}, document {request.doc_id}: the scores of the next token are "
                f"{float(greatest[~greatest.isfinite()][0])} ({self.dtype}): the checkpoint is broken, or its numbers "
                "overflow. Try --model_args dtype=float32."
            )
        return scores


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
    """Let `lm_eval.evaluate` tell a `MemoryLM` which tasks a run has (see `check_run`). Twice changes nothing."""
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
