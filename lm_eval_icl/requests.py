"""lm-eval's requests as token ids that fit the model, or a refusal before anything is run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lm_eval.api.instance import Instance
from lm_eval.models.utils import _add_special_kwargs, has_bos_prefix, normalize_gen_kwargs
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from lm_eval_icl.errors import InputError
from lm_eval_icl.prompts import FewShotPrompt, structure_error
from lm_eval_icl.tokens import Context, Encode, PairEncoder, TokenizedPrompt, encoder, split


@dataclass(frozen=True)
class Request:
    """One request as token ids.

    Attributes:
        prompt: the prompt by part.
        answer: the continuation to score; empty where text is to be generated.
        room: how many positions it needs behind the prompt.
    """

    prompt: TokenizedPrompt
    answer: tuple[int, ...]
    room: int


class RequestTokenizer:
    """Tokenizes requests exactly as `HFLM` does, and tells the parts.

    Args:
        prefix_token_id: what stands for an empty context (`HFLM.prefix_token_id`).
        add_bos_token: as given to `HFLM`; the tokenizer's own habit if None.
        max_gen_toks: what may be generated where a request does not say.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prefix_token_id: int,
        add_bos_token: bool | None,
        max_gen_toks: int,
    ):
        if not tokenizer.is_fast:
            raise InputError(
                f"lm-eval-icl: {type(tokenizer).__name__} does not tell which characters a token stands for, "
                "and a prompt's parts are found by them: use a fast tokenizer (use_fast_tokenizer=True)."
            )
        self.prefix_token_id, self.max_gen_toks = prefix_token_id, max_gen_toks
        bare = encoder(tokenizer, add_special_tokens=False)
        default = encoder(tokenizer, **_add_special_kwargs(None, add_bos_token))

        def unless_it_opens_with(bos: str | None) -> Encode:
            # A text that opens with BOS already (a chat template's) gets none of the tokenizer's.
            return lambda text: (bare if has_bos_prefix(text, bos) else default)(text)

        self._pair = PairEncoder(unless_it_opens_with(str(tokenizer.decode(prefix_token_id))), bare)
        self._context = unless_it_opens_with(tokenizer.bos_token)
        self._bare = bare

    def loglikelihood(self, request: Instance) -> Request:
        """A context and its continuation (`TemplateLM.loglikelihood`)."""
        prompt, continuation = request.args
        if prompt == "":
            tokens, answer = self._nothing(), tuple(self._bare(continuation)[0])
            if answer[:1] == tokens.query:
                answer = answer[1:]
        else:
            tokens, answer = self._pair(self._structured(request), continuation)
        if not answer or not tokens.query:
            raise InputError(
                f"lm-eval-icl: task {request.task_name!r}, document {request.doc_id}, option {request.idx}: the "
                f"{'context' if answer else 'continuation'} is empty, so there is nothing to score. Check the "
                "task's doc_to_text, doc_to_choice and doc_to_target for this document."
            )
        return Request(tokens, answer, room=len(answer) - 1)  # the last token is predicted, never read

    def generate_until(self, request: Instance) -> Request:
        """A context to be continued (`HFLM.generate_until`)."""
        prompt, kwargs = request.args
        if "max_length" in kwargs:
            raise InputError(
                f"lm-eval-icl: task {request.task_name!r}: generation argument max_length={kwargs['max_length']!r} "
                "counts prompt and padding too; say max_gen_toks instead."
            )
        room = int(normalize_gen_kwargs(kwargs, self.max_gen_toks)["max_gen_toks"])
        if prompt == "":
            return Request(self._nothing(), (), room)
        return Request(split(self._structured(request), prompt, self._context), (), room)

    def _nothing(self) -> TokenizedPrompt:
        return TokenizedPrompt(Context((), ()), (self.prefix_token_id,))

    @staticmethod
    def _structured(request: Instance) -> FewShotPrompt:
        if not isinstance(request.args[0], FewShotPrompt):
            raise structure_error(request.task_name)
        return request.args[0]


@dataclass(frozen=True)
class Positions:
    """How many positions there are, and how many a context takes while it is encoded.

    Attributes:
        available: the model's positions.
        switch: the position from which on the model computes all positions otherwise, if there is one
            (rotary angles of type longrope or dynamic, which look at the longest sequence so far).
        reach: positions that encoding a context takes (`methods.ICL.reach`).
        hint: what else than fewer demonstrations would help, said where encoding is what does not fit.
    """

    available: int
    switch: int | None
    reach: Callable[[Context], int]
    hint: str

    def needed(self, request: Request) -> int:
        return max(self.reach(request.prompt.context), len(request.prompt) + request.room)

    def fit(self, request: Request) -> bool:
        needed = self.needed(request)
        if self.switch is not None and len(request.prompt.context.tokens) <= self.switch < needed:
            return False  # the memory would be of one kind, what attends to it of another
        return needed <= self.available


def fit(
    instances: Sequence[Instance],
    tokenize: Callable[[Instance], Request],
    positions: Positions,
    drop: bool,
    quiet: bool = False,
) -> tuple[list[Request], dict[str, dict[str, int]]]:
    """Tokenize requests so that all fit the model.

    Args:
        tokenize: makes one of them a `Request`.
        drop: leave out whole demonstrations, first ones first, where a document would not fit: as many of all
            its prompts, so that its options stay comparable.

    Returns:
        The requests, and what was left out: task -> {"documents": n, "demonstrations": n}.

    Raises:
        InputError: documents do not fit; with `drop`, not even without demonstrations.
    """
    requests = [tokenize(instance) for instance in tqdm(instances, desc="Tokenizing inputs", disable=quiet)]
    documents: dict[tuple[str | None, int | None], list[int]] = defaultdict(list)
    for i, instance in enumerate(instances):
        # A request made by hand may name no document; it then stands for itself.
        document = -1 - i if instance.doc_id is None else instance.doc_id
        documents[instance.task_name, document].append(i)

    left_out: dict[str, dict[str, int]] = {}
    too_long: list[int] = []  # of each document that does not fit, the request that needs most
    for (task, _), indices in documents.items():
        dropped = 0
        most = max(len(getattr(instances[i].args[0], "demonstrations", ())) for i in indices)
        while not all(positions.fit(requests[i]) for i in indices):
            if not drop or dropped == most:
                too_long.append(max(indices, key=lambda i: positions.needed(requests[i])))
                break
            dropped += 1
            for i in indices:
                requests[i] = tokenize(_without(instances[i], dropped))
        else:
            if dropped:
                count = left_out.setdefault(str(task), {"documents": 0, "demonstrations": 0})
                count["documents"] += 1
                count["demonstrations"] += dropped
    if too_long:
        worst = max(too_long, key=lambda i: positions.needed(requests[i]))
        tasks = sorted({str(instances[i].task_name) for i in too_long})
        raise _overflow(len(too_long), len(documents), tasks, requests[worst], positions, drop)
    return requests, left_out


def _without(instance: Instance, n: int) -> Instance:
    """The request without its first n demonstrations."""
    prompt, *rest = instance.args
    if not isinstance(prompt, FewShotPrompt):  # the empty context
        return instance
    return replace(instance, arguments=(FewShotPrompt(prompt.prefix, prompt.demonstrations[n:], prompt.query), *rest))


def _overflow(
    count: int, documents: int, tasks: Sequence[str], worst: Request, positions: Positions, dropped: bool
) -> InputError:
    context, prompt = len(worst.prompt.context.tokens), len(worst.prompt)
    needed = positions.needed(worst)
    trouble = f"do not fit the model's {positions.available} positions"
    if needed <= positions.available:
        trouble = (
            f"cross position {positions.switch} behind their demonstrations, from which on this model computes all "
            "positions otherwise (rotary angles of type longrope or dynamic)"
        )
    more = ", ..." if len(tasks) > 5 else ""
    message = f"lm-eval-icl: {count} of {documents} documents (tasks: {', '.join(tasks[:5])}{more}) {trouble}; "
    message += f"the longest needs {needed} (demonstrations {context} tokens, query {prompt - context}, "
    message += f"answer {worst.room + 1}). " if worst.answer else f"max_gen_toks {worst.room}). "
    if needed > prompt + worst.room:
        message += positions.hint
    if not worst.answer:
        message += "Lower max_gen_toks (--gen_kwargs max_gen_toks=N). "
    if dropped:
        return InputError(message + "No demonstration is left to leave out.")
    return InputError(
        message + "Lower --num_fewshot, or give --model_args overflow=drop, which leaves out whole demonstrations, "
        "first ones first. Nothing is ever cut in half."
    )
