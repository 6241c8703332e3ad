"""The error about documents that do not fit the model, with what helps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from lm_eval_icl.errors import InputError, log
from lm_eval_icl.methods.limits import PromptLimits, Request, fits, truncated

# A document: its task and its number in the run.
Document = tuple[str | None, int]
# Task -> the indices of a run's documents among all documents of the task.
Documents = Callable[[str], Sequence[int]]
# How many documents that do not fit are named.
_NAMED = 10


def refusal(
    too_long: Mapping[Document, Sequence[Request]],
    bare: Mapping[Document, Sequence[Request]],
    documents: int,
    limits: PromptLimits,
    run_over: Documents | None,
) -> InputError:
    """The error about documents that do not fit, with the numbers of the longest.

    Args:
        too_long: the requests of the documents that do not fit.
        bare: the same documents' requests without demonstrations.
        documents: the number of documents.
        run_over: as for `fit_requests`.
    """
    requests_too_long = [request for requests in too_long.values() for request in requests]
    reasons = [(limits.too_long(request.prompt, request.answer_positions), request) for request in requests_too_long]
    reason, worst = max(((reason, request) for reason, request in reasons if reason), key=lambda pair: pair[0].needed)
    tasks = sorted({str(task) for task, _ in too_long})
    answer = "answer without its last token" if worst.answer else "max_gen_toks"
    sentences = [
        f"{len(too_long)} of {documents} documents (tasks: {', '.join(tasks[:5])}{', ...' if len(tasks) > 5 else ''}) "
        f"{reason.why}{' even without demonstrations' if worst.left_out else ''}; the longest needs "
        f"{reason.sum(answer)}.",
        reason.hint.rstrip(),
    ]
    if not worst.answer:
        sentences.append("Lower max_gen_toks (--gen_kwargs max_gen_toks=N).")
    never = {document: requests for document, requests in bare.items() if not fits(limits, requests)}
    bare_fit = len(never) < len(too_long)
    if bare_fit:
        lead = "Lower --num_fewshot, or give"
        if reason.longest:
            lead = f"A lower --num_fewshot does not help as long as the {reason.longest} stays. Give"
        sentences.append(
            f"{lead} --model_args overflow=drop, which leaves out as few whole demonstrations as it takes, the "
            f"{'longest' if limits.longest_go_first else 'first'} ones first."
        )
    if numbers := _numbers(never, run_over):
        lead = "They do not fit without demonstrations either:" if worst.prompt.context.demonstrations else "They are"
        lead = f"{len(never)} of them do not fit without demonstrations either:" if bare_fit else lead
        sentences.append(f"{lead} {_listed(numbers)}.")
    last_tokens = [truncated(request, limits) for requests in never.values() for request in requests]
    if last_tokens and fits(limits, last_tokens):
        sentences.append("--model_args overflow=truncate keeps the last tokens of such a prompt, as hf does.")
    if numbers and run_over is not None:
        sentences.append(_how_to_leave_out(numbers, run_over))
    return InputError(" ".join(filter(None, sentences)))


def _numbers(documents: Iterable[Document], run_over: Documents | None) -> dict[str, list[int]]:
    """Task -> the indices of these documents among all documents of the task. Those not made by lm-eval have none."""
    numbers_of: dict[str, list[int]] = defaultdict(list)
    for task, document in documents:
        if task is not None and document >= 0:
            # With --samples, lm-eval numbers the documents that are chosen anew.
            numbers_of[task].append(document if run_over is None else run_over(task)[document])
    return {task: sorted(numbers) for task, numbers in numbers_of.items()}


def _listed(numbers: dict[str, list[int]]) -> str:
    """The first few documents by task, and how many more there are."""
    room, listed = _NAMED, []
    for task, of_task in numbers.items():
        if documents := of_task[:room]:
            which = ", ".join(map(str, documents))
            listed.append(f"document{'s' * (len(documents) > 1)} {which} of {task}")
        room -= len(documents)
    more = sum(map(len, numbers.values())) - _NAMED
    return "; ".join(listed) + (f"; and {more} more" if more > 0 else "")


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
