"""Tokenizes lm-eval's requests so that they fit the model, or refuses them before anything is run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from lm_eval_icl.errors import InputError, log
from lm_eval_icl.harness.prompts import structure_error
from lm_eval_icl.inference.generation import settings_in_force
from lm_eval_icl.methods.limits import PromptLimits
from lm_eval_icl.methods.needs import check_generates
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.encoded import EncodedPrompt
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import Context, PromptTokenizer, TokenizedPrompt

# A document: its task and its number in the run.
Document = tuple[str | None, int]
# Task -> the indices of a run's documents among all documents of the task.
Documents = Callable[[str], Sequence[int]]
# An instance and the indices of demonstrations to leave out -> the request.
Tokenize = Callable[[Instance, tuple[int, ...]], "Request"]
# How many documents that do not fit are named.
_NAMED = 10


@dataclass(frozen=True)
class Request:
    """One request as token ids.

    Attributes:
        prompt: the prompt by part.
        answer: the continuation to score; empty if text is to be generated.
        answer_positions: how many positions the answer or the generated text needs after the prompt.
        left_out: the indices of the demonstrations that were left out (in canonical order, if that is used).
        cut: how many tokens were cut off the beginning of the prompt, which then has no demonstrations.
        arguments: those of the instance.
    """

    prompt: TokenizedPrompt
    answer: tuple[int, ...]
    answer_positions: int
    left_out: tuple[int, ...] = ()
    cut: int = 0
    arguments: tuple[Any, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """The key under which a cache stores the response: the arguments, and what was left out of the prompt, which
        also depends on the other options of the document."""
        return (*self.arguments, self.left_out, self.cut)

    @property
    def length(self) -> int:
        """How many tokens are run through the model if the request is run by itself."""
        return len(self.prompt) + self.answer_positions


class RequestTokenizer:
    """Turns lm-eval's instances into requests.

    Args:
        prompts: the tokenizer of prompts.
        max_gen_toks: how many tokens may be generated if a request does not say.
        runner: what will generate the texts, which refuses settings and models that it cannot generate with; None if
            nothing is to be generated.
    """

    def __init__(self, prompts: PromptTokenizer, max_gen_toks: int, runner: MethodRunner | None = None) -> None:
        self.prompts, self.max_gen_toks, self.runner = prompts, max_gen_toks, runner
        self._checked: Any = None  # the generation arguments that were checked last

    def __call__(self, instance: Instance, left_out: tuple[int, ...] = ()) -> Request:
        """The request of an instance, without the demonstrations of these indices.

        Raises:
            InputError: the request cannot be run.
        """
        if instance.request_type == "generate_until":
            return self._generate_until(instance, left_out)
        return self._loglikelihood(instance, left_out)

    def _loglikelihood(self, instance: Instance, left_out: tuple[int, ...]) -> Request:
        prompt, continuation = instance.args
        encoded = isinstance(prompt, EncodedPrompt)
        arranged = prompt if encoded else self._arranged(instance, left_out)
        try:
            if encoded:
                tokens, answer = prompt.without(left_out), continuation.ids
                self.prompts.check_known(tokens, answer)
            else:
                tokens, answer = self.prompts.pair(arranged, continuation)
        except InputError as error:
            raise _of(instance, error) from error
        if not answer or not tokens.query:
            raise InputError(
                f"task {instance.task_name!r}, document {instance.doc_id}, option {instance.idx}: the "
                f"{'context' if answer else 'continuation'} is empty, so there is nothing to score. Check the task's "
                "doc_to_text, doc_to_choice and doc_to_target for this document."
            )
        # The answer's last token is predicted, but never an input.
        return Request(tokens, answer, len(answer) - 1, left_out, arguments=instance.args)

    def _generate_until(self, instance: Instance, left_out: tuple[int, ...]) -> Request:
        kwargs = instance.args[1]
        if self.runner is not None and kwargs != self._checked:  # nearly always those of the request before
            try:
                settings_in_force(self.runner.model, kwargs)
            except InputError as error:
                raise InputError(f"task {instance.task_name!r}: {error.message}") from error
            self._checked = kwargs
        tokens_generated = int(normalize_gen_kwargs(kwargs, self.max_gen_toks)["max_gen_toks"])
        if tokens_generated < 1:
            raise InputError(f"task {instance.task_name!r}: max_gen_toks={tokens_generated}: must be 1 or more.")
        prompt = self._arranged(instance, left_out)
        try:
            tokens = self.prompts.to_continue(prompt)
        except InputError as error:
            raise _of(instance, error) from error
        if not tokens.query:
            raise InputError(
                f"{_named(instance)}: the context is empty, so there is nothing to continue. Check the task's "
                "doc_to_text for this document."
            )
        if self.runner is not None:
            check_generates(self.runner.method, self.runner.model, self.runner.capabilities, tokens.context)
        return Request(tokens, (), tokens_generated, left_out, arguments=instance.args)

    def check_text(self, instance: Instance) -> None:
        """Check a text that is scored as a whole (`HFLM.loglikelihood_rolling`).

        Raises:
            InputError: no tokenizer can read the text, or a token is not in the model's vocabulary.
        """
        try:
            self.prompts.check_known(self.prompts.nothing, tuple(self.prompts.bare(instance.args[0])[0]))
        except InputError as error:
            raise _of(instance, error) from error

    def _arranged(self, instance: Instance, left_out: tuple[int, ...]) -> FewShotPrompt:
        prompt = instance.args[0]
        if prompt == "":
            return FewShotPrompt("", (), "")
        if not isinstance(prompt, FewShotPrompt):
            raise structure_error(instance.task_name)
        return self.prompts.arranged(prompt, left_out)


def _named(instance: Instance) -> str:
    return f"task {instance.task_name!r}, document {instance.doc_id}"


def _of(instance: Instance, error: InputError) -> InputError:
    """The error with the task and the document before its message."""
    return InputError(f"{_named(instance)}: {error.message}")


def fit_requests(
    instances: Sequence[Instance],
    tokenize: Tokenize,
    limits: PromptLimits,
    overflow: str,
    run_over: Documents | None = None,
    quiet: bool = False,
) -> list[Request]:
    """Tokenize requests so that all fit the model.

    Args:
        tokenize: turns an instance into a `Request` without the demonstrations of some indices.
        overflow: what is done with a document that does not fit (`CommonArguments.overflow`). All its prompts lose the
            same demonstrations, so that its options stay comparable.
        run_over: which documents of a task the run is over; None if this is not known.
        quiet: show no progress bar.

    Raises:
        InputError: documents do not fit, whatever `overflow` allows to leave out, or fewer demonstrations would be left
            than the method's arguments allow.
    """
    with tqdm(instances, desc="Tokenizing inputs", disable=quiet) as bar:  # closed before an error is printed
        requests = [tokenize(instance, ()) for instance in bar]
    documents = by_document(instances)
    too_long: dict[Document, list[Request]] = {}
    for document, indices in documents.items():
        found = [requests[i] for i in indices]
        if fits(limits, found):
            continue
        if overflow != "error":
            found = _shortened([instances[i] for i in indices], found, tokenize, limits, overflow)
        if not fits(limits, found):
            too_long[document] = found
        for i, request in zip(indices, found, strict=True):
            requests[i] = request
    if too_long:
        alone = too_long
        if overflow == "error":  # those that would not fit without demonstrations either
            without = {each: [_bare(instances[i], tokenize) for i in documents[each]] for each in too_long}
            alone = {each: found for each, found in without.items() if not fits(limits, found)}
        raise _refusal(too_long, alone, len(documents), limits, overflow, run_over)
    return requests


def by_document(instances: Sequence[Instance]) -> dict[Document, list[int]]:
    """(task, document) -> the indices of the document's instances."""
    documents: dict[Document, list[int]] = defaultdict(list)
    for i, instance in enumerate(instances):
        # A request that was not made by lm-eval may have no document. It is then treated as a separate document.
        document = -1 - i if instance.doc_id is None else instance.doc_id
        documents[instance.task_name, document].append(i)
    return documents


def fits(limits: PromptLimits, requests: Iterable[Request]) -> bool:
    """Whether all of these requests fit."""
    return all(limits.too_long(request.prompt, request.answer_positions) is None for request in requests)


def _shortened(
    instances: Sequence[Instance], requests: list[Request], tokenize: Tokenize, limits: PromptLimits, overflow: str
) -> list[Request]:
    """The requests of a document that does not fit, with as little left out as needed. If nothing that may be left out
    makes them fit, they are without demonstrations, and not cut."""
    most = max(map(_shots, instances))
    found = _with_fewest_left_out(instances, requests, tokenize, limits)
    if overflow == "truncate" and not fits(limits, found):
        cut = [_truncated(request, limits) for request in found]
        found = cut if fits(limits, cut) else found
    kept = most - len(found[0].left_out)
    if most != kept and fits(limits, found) and (why := limits.method.why_not(kept)):
        raise InputError(
            f"{limits.method.name}: {_named(instances[0])}: overflow={overflow} leaves {kept} of its {most} "
            f"demonstrations, and {why}."
        )
    return found


def _with_fewest_left_out(
    instances: Sequence[Instance], requests: list[Request], tokenize: Tokenize, limits: PromptLimits
) -> list[Request]:
    """The requests of a document that does not fit, with as few demonstrations left out as needed, in the order of
    `PromptLimits.leaves_out`; without any, if they do not fit then either."""
    asked: dict[TokenizedPrompt, int] = {}  # prompt -> the positions of its longest answer
    for request in requests:
        asked[request.prompt] = max(request.answer_positions, asked.get(request.prompt, 0))

    kept, left_out = list(range(max(map(_shots, instances)))), list[int]()
    now = list(asked.items())
    found = requests
    while kept and not fits(limits, found):
        left_out.append(kept.pop(limits.leaves_out(now)))
        # The numbers of tokens tell about how many to leave out, and only then it is tokenized again: tokens at a
        # boundary may become others.
        now = [(prompt.keeping(kept), answer) for prompt, answer in asked.items()]
        if not kept or all(limits.too_long(*each) is None for each in now):
            found = [tokenize(instance, tuple(sorted(left_out))) for instance in instances]
    while len(left_out) > 1 and fits(limits, found):  # and they may become fewer
        more = [tokenize(instance, tuple(sorted(left_out[:-1]))) for instance in instances]
        if not fits(limits, more):
            break
        found = more
        left_out.pop()
    return found


def _shots(instance: Instance) -> int:
    return len(getattr(instance.args[0], "demonstrations", ()))


def _bare(instance: Instance, tokenize: Tokenize) -> Request:
    """The request of an instance without demonstrations."""
    return tokenize(instance, tuple(range(_shots(instance))))


def _truncated(request: Request, limits: PromptLimits) -> Request:
    """A request without demonstrations, of whose prompt only the last tokens that fit are kept, as `hf` does."""
    tokens = (*request.prompt.context.tokens, *request.prompt.query)
    cut = min(len(tokens) + request.answer_positions - limits.positions, len(tokens) - 1)
    if cut <= 0:
        return request
    return replace(request, prompt=TokenizedPrompt(Context((), ()), tokens[cut:]), cut=cut)


def _refusal(
    too_long: dict[Document, list[Request]],
    alone: dict[Document, list[Request]],
    documents: int,
    limits: PromptLimits,
    overflow: str,
    run_over: Documents | None,
) -> InputError:
    """The error about documents that do not fit, with the numbers of the longest, and with what helps.

    Args:
        too_long: the documents that do not fit.
        alone: those of them that do not fit without demonstrations either, with their requests without demonstrations.
        documents: the number of documents.
    """
    reasons = [
        (reason, request)
        for requests in too_long.values()
        for request in requests
        if (reason := limits.too_long(request.prompt, request.answer_positions)) is not None
    ]
    reason, worst = max(reasons, key=lambda each: each[0].needed)
    tasks = sorted({str(task) for task, _ in too_long})
    answer = "answer without its last token" if worst.answer else "max_gen_toks"
    message = (
        f"{len(too_long)} of {documents} documents (tasks: {', '.join(tasks[:5])}{', ...' if len(tasks) > 5 else ''}) "
        f"{reason.why}{' even without demonstrations' if worst.left_out else ''}; the longest needs "
        f"{reason.sum(answer)}. {reason.hint}"
    )
    if not worst.answer:
        message += "Lower max_gen_toks (--gen_kwargs max_gen_toks=N). "
    if len(alone) < len(too_long):
        if reason.longest:
            message += f"A lower --num_fewshot does not help as long as the {reason.longest} stays. Give "
        else:
            message += "Lower --num_fewshot, or give "
        message += (
            "--model_args overflow=drop, which leaves out as few whole demonstrations as it takes, the "
            f"{'longest' if limits.longest_go_first else 'first'} ones first. "
        )
    if not alone:
        return InputError(message.rstrip())
    numbers = _numbers(alone, run_over)
    if numbers:
        if len(alone) < len(too_long):
            message += f"{len(alone)} of them do not fit without demonstrations either: "
        else:
            message += (
                "They do not fit without demonstrations either: "
                if worst.prompt.context.demonstrations
                else "They are "
            )
        message += f"{_listed(numbers)}. "
    if all(fits(limits, (_truncated(request, limits) for request in found)) for found in alone.values()):
        message += "--model_args overflow=truncate keeps the last tokens of such a prompt, as hf does. "
    if numbers and run_over is not None:
        message += _how_to_leave_out(numbers, run_over)
    return InputError(message.rstrip())


def _numbers(documents: Iterable[Document], run_over: Documents | None) -> dict[str, list[int]]:
    """Task -> the indices of these documents among all documents of the task. Those not made by lm-eval have none."""
    found: dict[str, list[int]] = defaultdict(list)
    for task, document in documents:
        if task is not None and document >= 0:
            # With --samples, lm-eval numbers the documents that are chosen anew.
            found[task].append(document if run_over is None else run_over(task)[document])
    return {task: sorted(numbers) for task, numbers in found.items()}


def _listed(numbers: dict[str, list[int]]) -> str:
    """The first few documents by task, and how many more there are."""
    room, found = _NAMED, []
    for task, of_task in numbers.items():
        if some := of_task[:room]:
            found.append(f"{'document' if len(some) == 1 else 'documents'} {', '.join(map(str, some))} of {task}")
        room -= len(some)
    more = sum(map(len, numbers.values())) - _NAMED
    return "; ".join(found) + (f"; and {more} more" if more > 0 else "")


def _how_to_leave_out(numbers: dict[str, list[int]], run_over: Documents) -> str:
    """How a run goes on without these documents: lm-eval's `--samples` lists those that a run is over."""
    of_run = {task: run_over(task) for task in numbers}
    kept = {task: sorted(set(of_run[task]) - set(numbers[task])) for task in numbers}
    advice = [f"leave {task} out of --tasks" for task in kept if not kept[task]]  # an empty list would mean all of them
    kept = {task: of_task for task, of_task in kept.items() if of_task}
    few = sum(map(len, numbers.values())) <= _NAMED and all(isinstance(of_run[task], range) for task in kept)
    if kept and few:
        lists = (f'"{task}": [i for i in range({len(of_run[task])}) if i not in {numbers[task]}]' for task in kept)
        command = f"import json; print(json.dumps({{{', '.join(lists)}}}))"
        advice.append(f"give --samples \"$(python -c '{command}')\" (in place of --limit)")
    elif kept:
        log.debug("--samples '%s'", json.dumps(kept))
        advice.append("list all others in --samples (with LMEVAL_LOG_LEVEL=DEBUG in the environment they are logged)")
    return f"To go on without them, {' and '.join(advice)}."
