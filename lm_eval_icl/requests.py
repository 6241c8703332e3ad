"""lm-eval's requests as token ids that fit the model, or a refusal before anything is run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lm_eval.api.instance import Instance
from lm_eval.models.utils import _add_special_kwargs, has_bos_prefix, normalize_gen_kwargs
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from lm_eval_icl.errors import InputError
from lm_eval_icl.methods import Method
from lm_eval_icl.prompts import FewShotPrompt, structure_error
from lm_eval_icl.tokens import Context, Encode, PairEncoder, TokenizedPrompt, encoder

# Arguments of transformers' `generate` that cannot be had behind a memory, and why.
_NOT_GENERATED = {
    "max_length": "counts prompt and padding too; say max_gen_toks instead",
    "use_cache": "would switch off the keys and values that the demonstrations are kept in; leave it out",
    "num_return_sequences": "gives more than the one text a request is for; leave it out",
    "prompt_lookup_num_tokens": "does not work on keys and values from before; leave it out",
    "assistant_model": "does not work on keys and values from before; leave it out",
}


@dataclass(frozen=True)
class Request:
    """One request as token ids.

    Attributes:
        prompt: the prompt by part.
        answer: the continuation to score; empty where text is to be generated.
        room: how many positions it needs behind the prompt.
        without: how many of its first demonstrations are left out.
    """

    prompt: TokenizedPrompt
    answer: tuple[int, ...]
    room: int
    without: int

    @property
    def length(self) -> int:
        """How many tokens go through the model if it runs by itself."""
        return len(self.prompt) + self.room


class RequestTokenizer:
    """Tokenizes requests as `HFLM` does, and tells the parts.

    Args:
        prefix_token_id: what stands for an empty context (`HFLM.prefix_token_id`).
        add_bos_token: as given to `HFLM`; the tokenizer's own habit if None.
        max_gen_toks: what may be generated where a request does not say.
        by_part: no demonstration's ids may depend on what stands beside it (`tokens.PartSplitter`).
        canonical: the demonstrations in one order, whatever order they come in: sorted.
        rows: how many tokens the model knows; None for as many as the tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prefix_token_id: int,
        add_bos_token: bool | None,
        max_gen_toks: int,
        by_part: bool,
        canonical: bool,
        rows: int | None = None,
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

        self._pair = PairEncoder(unless_it_opens_with(str(tokenizer.decode(prefix_token_id))), bare, by_part)
        self._generation = PairEncoder(unless_it_opens_with(tokenizer.bos_token), bare, by_part)
        self._bare, self._canonical = bare, canonical
        self._tokenizer, self._rows = tokenizer, rows
        # lm-eval gives all options of a document the same object; so do we.
        nothing = FewShotPrompt("", (), "")
        self._last = nothing, 0, nothing

    def loglikelihood(self, request: Instance, without: int = 0) -> Request:
        """A context, without so many of its first demonstrations, and its continuation
        (`TemplateLM.loglikelihood`)."""
        prompt, continuation = request.args
        if prompt == "":
            with _naming(request):
                tokens, answer = self._nothing(), tuple(self._bare(continuation)[0])
            if answer[:1] == tokens.query:
                answer = answer[1:]
        else:
            prompt = self._structured(request, without)
            with _naming(request):
                tokens, answer = self._pair(prompt, continuation)
        if not answer or not tokens.query:
            raise InputError(
                f"lm-eval-icl: task {request.task_name!r}, document {request.doc_id}, option {request.idx}: the "
                f"{'context' if answer else 'continuation'} is empty, so there is nothing to score. Check the "
                "task's doc_to_text, doc_to_choice and doc_to_target for this document."
            )
        self._check_known(request, tokens, answer)
        # The last token is predicted, never read.
        return Request(tokens, answer, room=len(answer) - 1, without=without)

    def generate_until(self, request: Instance, without: int = 0) -> Request:
        """A context, without so many of its first demonstrations, to be continued (`HFLM.generate_until`)."""
        prompt, kwargs = request.args
        for name, why in _NOT_GENERATED.items():
            if name in kwargs:
                raise InputError(
                    f"lm-eval-icl: task {request.task_name!r}: generation argument {name}={kwargs[name]!r} {why}."
                )
        room = int(normalize_gen_kwargs(kwargs, self.max_gen_toks)["max_gen_toks"])
        if room < 1:
            raise InputError(f"lm-eval-icl: task {request.task_name!r}: max_gen_toks={room}: must be 1 or more.")
        if prompt == "":
            return Request(self._nothing(), (), room, without)
        prompt = self._structured(request, without)
        with _naming(request):
            tokens = self._generation.split(prompt, prompt)
        if not tokens.query:
            raise InputError(
                f"lm-eval-icl: task {request.task_name!r}, document {request.doc_id}: the context is empty, so there "
                "is nothing to continue. Check the task's doc_to_text for this document."
            )
        self._check_known(request, tokens, ())
        return Request(tokens, (), room, without)

    def check_text(self, request: Instance) -> None:
        """Refuse a text that is scored as a whole (`HFLM.loglikelihood_rolling`) and cannot be read."""
        with _naming(request):
            ids = self._bare(request.args[0])[0]
        self._check_known(request, self._nothing(), tuple(ids))

    def _check_known(self, request: Instance, tokens: TokenizedPrompt, answer: tuple[int, ...]) -> None:
        """Some tokenizers have more tokens than the model they come with; most never use them."""
        if self._rows is None or max(tokens.context.largest, *tokens.query, *answer) < self._rows:
            return
        token = next(i for i in (*tokens.context.tokens, *tokens.query, *answer) if i >= self._rows)
        raise InputError(
            f"lm-eval-icl: task {request.task_name!r}, document {request.doc_id}: token {token} "
            f"({self._tokenizer.convert_ids_to_tokens(token)!r}) is not among the {self._rows} that the model knows: "
            "the tokenizer is not the model's. Give the right one: --model_args tokenizer=..."
        )

    def _nothing(self) -> TokenizedPrompt:
        return TokenizedPrompt(Context((), ()), (self.prefix_token_id,))

    def _structured(self, request: Instance, without: int) -> FewShotPrompt:
        prompt = request.args[0]
        if not isinstance(prompt, FewShotPrompt):
            raise structure_error(request.task_name)
        if self._last[0] is not prompt or self._last[1] != without:
            demonstrations = sorted(prompt.demonstrations) if self._canonical else prompt.demonstrations
            self._last = prompt, without, FewShotPrompt(prompt.prefix, demonstrations[without:], prompt.query)
        return self._last[2]


@contextmanager
def _naming(request: Instance) -> Iterator[None]:
    """Say of which request an error is."""
    try:
        yield
    except InputError as error:
        raise InputError(f"lm-eval-icl: task {request.task_name!r}, document {request.doc_id}: {error}") from error


@dataclass(frozen=True)
class Room:
    """How much room there is, and how much a method takes of it.

    Attributes:
        method: tells how long a context becomes.
        model: its name.
        positions: the model's.
        window: how many tokens in a row the method's mask may have; None for as many as there are positions.
        switch: the position from which on the model computes all positions otherwise, if there is one, and
            whether it does so anew with every longer sequence (`positions.position_switch`).
        hint: what else than fewer demonstrations would help, said where encoding is what does not fit.
    """

    method: Method
    model: str
    positions: int
    window: int | None
    switch: tuple[int, bool] | None
    hint: str

    def needed(self, request: Request) -> int:
        """Positions."""
        extent, query = self.method.extent(request.prompt.context), len(request.prompt.query)
        encoding = extent.reach + (query if self.method.per_query else 0)
        return max(encoding, extent.query_start + query + request.room)

    def row(self, request: Request) -> int:
        """Tokens in a row, memory included."""
        extent, query = self.method.extent(request.prompt.context), len(request.prompt.query)
        return max(extent.tokens + (query if self.method.per_query else 0), extent.kept + query + request.room)

    def trouble(self, request: Request) -> str:
        """What does not fit; empty if everything does."""
        needed = self.needed(request)
        if needed > self.positions:
            return f"do not fit the model's {self.positions} positions"
        if self.switch is not None:
            switch, ever = self.switch
            least = self.method.extent(request.prompt.context).least
            if needed > switch and ever:
                return (
                    f"cross position {switch}, from which on this model computes all positions anew with every longer "
                    "sequence (rotary angles of type dynamic)"
                )
            if least <= switch < needed:  # the memory would be of one kind, what attends to it of another
                return (
                    f"cross position {switch} behind their demonstrations, from which on this model computes all "
                    "positions otherwise (rotary angles of type longrope)"
                )
        if self.window is not None and self.row(request) > self.window:
            return (
                f"do not fit the {self.window} tokens that {self.model} looks back at most (a sliding window or local "
                f"attention layers), and {self.method.name} needs a model that sees all that its mask shows"
            )
        return ""


def fit(
    instances: Sequence[Instance],
    tokenize: Callable[[Instance, int], Request],
    space: Room,
    drop: bool,
    quiet: bool = False,
) -> tuple[list[Request], dict[str, dict[str, int]]]:
    """Tokenize requests so that all fit the model.

    Args:
        tokenize: makes one of them a `Request`, without so many of its first demonstrations.
        drop: leave out whole demonstrations, first ones first, where a document would not fit: as many of all
            its prompts, so that its options stay comparable.

    Returns:
        The requests, and what was left out: task -> {"documents": n, "demonstrations": n}.

    Raises:
        InputError: documents do not fit; with `drop`, not even without demonstrations, or with fewer than the
            method's arguments allow.
    """
    requests = [tokenize(instance, 0) for instance in tqdm(instances, desc="Tokenizing inputs", disable=quiet)]
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
        while tight := [i for i in indices if space.trouble(requests[i])]:
            if not drop or dropped == most:
                too_long.append(max(tight, key=lambda i: space.needed(requests[i])))
                break
            dropped += 1
            for i in indices:
                requests[i] = tokenize(instances[i], dropped)
        else:
            if dropped and (why := space.method.refuse(most - dropped)):
                document = f"task {task!r}, document {instances[indices[0]].doc_id}"
                raise InputError(
                    f"lm-eval-icl: {space.method.name}: {document}: overflow=drop leaves "
                    f"{most - dropped} of its {most} demonstrations, and {why}."
                )
            if dropped:
                count = left_out.setdefault(str(task), {"documents": 0, "demonstrations": 0})
                count["documents"] += 1
                count["demonstrations"] += dropped
    if too_long:
        worst = max(too_long, key=lambda i: space.needed(requests[i]))
        tasks = sorted({str(instances[i].task_name) for i in too_long})
        raise _overflow(len(too_long), len(documents), tasks, requests[worst], space, drop)
    return requests, left_out


def _overflow(
    count: int, documents: int, tasks: Sequence[str], worst: Request, space: Room, dropped: bool
) -> InputError:
    context, prompt = len(worst.prompt.context.tokens), len(worst.prompt)
    needed, trouble = space.needed(worst), space.trouble(worst)
    if space.window is not None and needed <= space.positions:
        needed = max(needed, space.row(worst))
    more = ", ..." if len(tasks) > 5 else ""
    message = f"lm-eval-icl: {count} of {documents} documents (tasks: {', '.join(tasks[:5])}{more}) {trouble}; "
    message += f"the longest needs {needed} (demonstrations {context} tokens, query {prompt - context}, "
    message += f"answer {worst.room + 1}). " if worst.answer else f"max_gen_toks {worst.room}). "
    if needed > prompt + worst.room:
        message += space.hint
    if not worst.answer:
        message += "Lower max_gen_toks (--gen_kwargs max_gen_toks=N). "
    if dropped:
        return InputError(message + "No demonstration is left to leave out.")
    return InputError(
        message + "Lower --num_fewshot, or give --model_args overflow=drop, which leaves out whole demonstrations, "
        "first ones first. Nothing is ever cut in half."
    )
