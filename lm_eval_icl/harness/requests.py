"""Tokenizes lm-eval's requests so that they fit the model, or refuses them before anything is run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.prompts import structure_error
from lm_eval_icl.inference.generation import check_arguments
from lm_eval_icl.methods.limits import PromptLimits
from lm_eval_icl.prompt import FewShotPrompt
from lm_eval_icl.tokens import PromptTokenizer, TokenizedPrompt


@dataclass(frozen=True)
class Request:
    """One request as token ids.

    Attributes:
        prompt: the prompt by part.
        answer: the continuation to score; empty if text is to be generated.
        answer_positions: how many positions the answer or the generated text needs after the prompt.
        dropped: how many demonstrations were left out at the beginning of the prompt.
    """

    prompt: TokenizedPrompt
    answer: tuple[int, ...]
    answer_positions: int
    dropped: int

    @property
    def length(self) -> int:
        """How many tokens are run through the model if the request is run by itself."""
        return len(self.prompt) + self.answer_positions


class RequestTokenizer:
    """Turns lm-eval's instances into requests.

    Args:
        prompts: the tokenizer of prompts.
        max_gen_toks: how many tokens may be generated if a request does not say.
    """

    def __init__(self, prompts: PromptTokenizer, max_gen_toks: int) -> None:
        self.prompts, self.max_gen_toks = prompts, max_gen_toks

    def __call__(self, instance: Instance, dropped: int = 0) -> Request:
        """The request of an instance, without the first `dropped` demonstrations.

        Raises:
            InputError: the request cannot be run.
        """
        if instance.request_type == "generate_until":
            return self._generate_until(instance, dropped)
        return self._loglikelihood(instance, dropped)

    def _loglikelihood(self, instance: Instance, dropped: int) -> Request:
        prompt = self._arranged(instance, dropped)
        with _naming(instance):
            tokens, answer = self.prompts.pair(prompt, instance.args[1])
        if not answer or not tokens.query:
            raise InputError(
                f"task {instance.task_name!r}, document {instance.doc_id}, option {instance.idx}: the "
                f"{'context' if answer else 'continuation'} is empty, so there is nothing to score. Check the task's "
                "doc_to_text, doc_to_choice and doc_to_target for this document."
            )
        # The answer's last token is predicted, but never an input.
        return Request(tokens, answer, answer_positions=len(answer) - 1, dropped=dropped)

    def _generate_until(self, instance: Instance, dropped: int) -> Request:
        kwargs = instance.args[1]
        try:
            check_arguments(kwargs)
        except InputError as error:
            raise InputError(f"task {instance.task_name!r}: {error.message}") from error
        tokens_generated = int(normalize_gen_kwargs(kwargs, self.max_gen_toks)["max_gen_toks"])
        if tokens_generated < 1:
            raise InputError(f"task {instance.task_name!r}: max_gen_toks={tokens_generated}: must be 1 or more.")
        prompt = self._arranged(instance, dropped)
        with _naming(instance):
            tokens = self.prompts.to_continue(prompt)
        if not tokens.query:
            raise InputError(
                f"{_named(instance)}: the context is empty, so there is nothing to continue. Check the task's "
                "doc_to_text for this document."
            )
        return Request(tokens, (), tokens_generated, dropped)

    def check_text(self, instance: Instance) -> None:
        """Check a text that is scored as a whole (`HFLM.loglikelihood_rolling`).

        Raises:
            InputError: no tokenizer can read the text, or a token is not in the model's vocabulary.
        """
        with _naming(instance):
            self.prompts.check_known(self.prompts.nothing, tuple(self.prompts.bare(instance.args[0])[0]))

    def _arranged(self, instance: Instance, dropped: int) -> FewShotPrompt:
        prompt = instance.args[0]
        if prompt == "":
            return FewShotPrompt("", (), "")
        if not isinstance(prompt, FewShotPrompt):
            raise structure_error(instance.task_name)
        return self.prompts.arranged(prompt, dropped)


def _named(instance: Instance) -> str:
    return f"task {instance.task_name!r}, document {instance.doc_id}"


@contextmanager
def _naming(instance: Instance) -> Iterator[None]:
    """Put the task and the document before an error's message."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{_named(instance)}: {error.message}") from error


def fit_requests(
    instances: Sequence[Instance],
    tokenize: Callable[[Instance, int], Request],
    limits: PromptLimits,
    drop: bool,
    quiet: bool = False,
) -> tuple[list[Request], dict[str, dict[str, int]]]:
    """Tokenize requests so that all fit the model.

    Args:
        tokenize: turns an instance into a `Request` without its first n demonstrations.
        drop: if a document does not fit, leave out whole demonstrations from the first on; the same number for all
            prompts of the document, so that its options stay comparable.
        quiet: show no progress bar.

    Returns:
        The requests, and what was left out: task -> {"documents": n, "demonstrations": n}.

    Raises:
        InputError: documents do not fit. With `drop`: they do not fit without demonstrations either, or fewer
            demonstrations would be left than the method's arguments allow.
    """
    with tqdm(instances, desc="Tokenizing inputs", disable=quiet) as bar:  # closed before an error is printed
        requests = [tokenize(instance, 0) for instance in bar]
    left_out: dict[str, dict[str, int]] = {}
    too_long: list[int] = []  # for each document that does not fit, its longest request
    documents = _by_document(instances)
    for (task, _), indices in documents.items():
        here = [instances[i] for i in indices]
        found, fits = _fit_document(here, [requests[i] for i in indices], tokenize, limits, drop)
        for i, request in zip(indices, found, strict=True):
            requests[i] = request
        if not fits:
            tight = [i for i in indices if limits.why_not(requests[i].prompt, requests[i].answer_positions)]
            too_long.append(max(tight, key=lambda i: _needed(limits, requests[i])))
        elif dropped := found[0].dropped:
            count = left_out.setdefault(str(task), {"documents": 0, "demonstrations": 0})
            count["documents"] += 1
            count["demonstrations"] += dropped
    if too_long:
        worst = max(too_long, key=lambda i: _needed(limits, requests[i]))
        tasks = sorted({str(instances[i].task_name) for i in too_long})
        raise _overflow(len(too_long), len(documents), tasks, requests[worst], limits, drop)
    return requests, left_out


def _by_document(instances: Sequence[Instance]) -> dict[tuple[str | None, int | None], list[int]]:
    """(task, document) -> the indices of the document's instances."""
    documents: dict[Any, list[int]] = defaultdict(list)
    for i, instance in enumerate(instances):
        # A request that was not made by lm-eval may have no document. It is then treated as a separate document.
        document = -1 - i if instance.doc_id is None else instance.doc_id
        documents[instance.task_name, document].append(i)
    return documents


def _fit_document(
    instances: Sequence[Instance],
    requests: list[Request],
    tokenize: Callable[[Instance, int], Request],
    limits: PromptLimits,
    drop: bool,
) -> tuple[list[Request], bool]:
    """The requests of a document, with as few demonstrations left out as needed to fit, and whether they fit."""
    most = max(len(getattr(instance.args[0], "demonstrations", ())) for instance in instances)
    for dropped in range(most + 1 if drop else 1):
        if dropped:
            requests = [tokenize(instance, dropped) for instance in instances]
        if any(limits.why_not(request.prompt, request.answer_positions) for request in requests):
            continue
        if dropped and (why := limits.method.why_not(most - dropped)):
            raise InputError(
                f"{limits.method.name}: {_named(instances[0])}: overflow=drop leaves {most - dropped} of its {most} "
                f"demonstrations, and {why}."
            )
        return requests, True
    return requests, False


def _needed(limits: PromptLimits, request: Request) -> int:
    return limits.positions_needed(request.prompt, request.answer_positions)


def _overflow(
    count: int, documents: int, tasks: Sequence[str], worst: Request, limits: PromptLimits, dropped: bool
) -> InputError:
    context, prompt = len(worst.prompt.context.tokens), len(worst.prompt)
    needed, behind = _needed(limits, worst), worst.answer_positions
    trouble = limits.why_not(worst.prompt, behind)
    if limits.window is not None and needed <= limits.positions:
        needed = max(needed, limits.tokens_needed(worst.prompt, behind))
    more = ", ..." if len(tasks) > 5 else ""
    message = f"{count} of {documents} documents (tasks: {', '.join(tasks[:5])}{more}) {trouble}; "
    message += f"the longest needs {needed} (demonstrations {context} tokens, query {prompt - context}, "
    message += f"answer {behind + 1}). " if worst.answer else f"max_gen_toks {behind}). "
    if needed > prompt + behind:
        message += limits.hint
    if not worst.answer:
        message += "Lower max_gen_toks (--gen_kwargs max_gen_toks=N). "
    if dropped:
        return InputError(message + "No demonstration is left to leave out.")
    return InputError(
        message + "Lower --num_fewshot, or give --model_args overflow=drop, which leaves out whole demonstrations, "
        "first ones first. Nothing is ever cut in half."
    )
