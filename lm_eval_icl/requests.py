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
        reach: positions that encoding a context takes (`methods.ICL.reach`).
        hint: what else than fewer demonstrations would help, said where encoding is what does not fit.
    """

    available: int
    reach: Callable[[Context], int]
    hint: str

    def needed(self, request: Request) -> int:
        return max(self.reach(request.prompt.context), len(request.prompt) + request.room)


def fit(
    instances: Sequence[Instance],
    tokenize: Callable[[Instance], Request],
    positions: Positions,
    drop: bool,
    left_out: dict[str, dict[str, int]],
    quiet: bool = False,
) -> list[Request]:
    """Tokenize requests so that all fit the model.

    Args:
        tokenize: makes one of them a `Request`.
        drop: leave out whole demonstrations, first ones first, where a prompt would not fit.
        left_out: counts what was left out: task -> {"documents": n, "demonstrations": n}.

    Raises:
        InputError: prompts do not fit, counted by document; with `drop`, not even without demonstrations.
    """
    requests = [tokenize(instance) for instance in tqdm(instances, desc="Tokenizing inputs", disable=quiet)]
    # The options of one document share one prompt object.
    documents: dict[int, list[int]] = defaultdict(list)
    for i, instance in enumerate(instances):
        documents[id(instance.args[0])].append(i)

    too_long: dict[int, Instance] = {}
    for indices in documents.values():
        most = max(indices, key=lambda i: positions.needed(requests[i]))
        prompt, dropped = instances[most].args[0], 0
        while positions.needed(requests[most]) > positions.available:
            if not drop or dropped == len(getattr(prompt, "demonstrations", ())):
                too_long[most] = instances[most]
                break
            dropped += 1
            shorter = FewShotPrompt(prompt.prefix, prompt.demonstrations[dropped:], prompt.query)
            for i in indices:
                requests[i] = tokenize(replace(instances[i], arguments=(shorter, *instances[i].args[1:])))
        if dropped and most not in too_long:
            count = left_out.setdefault(str(instances[most].task_name), {"documents": 0, "demonstrations": 0})
            count["documents"] += 1
            count["demonstrations"] += dropped
    if too_long:
        worst = max(too_long, key=lambda i: positions.needed(requests[i]))
        raise _overflow([*too_long.values()], len(documents), requests[worst], positions, drop)
    return requests


def _overflow(
    instances: Sequence[Instance], documents: int, worst: Request, positions: Positions, dropped: bool
) -> InputError:
    tasks = sorted({str(instance.task_name) for instance in instances})
    context, prompt = len(worst.prompt.context.tokens), len(worst.prompt)
    message = (
        f"lm-eval-icl: {len(instances)} of {documents} documents (tasks: {', '.join(tasks[:5])}"
        f"{', ...' if len(tasks) > 5 else ''}) do not fit the model's {positions.available} positions; the longest "
        f"needs {positions.needed(worst)} (demonstrations {context} tokens, query {prompt - context}, "
    )
    message += f"answer {worst.room + 1}). " if worst.answer else f"max_gen_toks {worst.room}). "
    if positions.needed(worst) > prompt + worst.room:
        message += positions.hint
    if not worst.answer:
        message += "Lower max_gen_toks (--gen_kwargs max_gen_toks=N). "
    if dropped:
        return InputError(message + "No demonstration is left to leave out.")
    return InputError(
        message + "Lower --num_fewshot, or give --model_args overflow=drop, which leaves out whole demonstrations, "
        "first ones first. Nothing is ever cut in half."
    )
