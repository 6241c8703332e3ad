"""What is said of documents that do not fit the model: one warning a run, or the error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from lm_eval_icl.errors import InputError, log
from lm_eval_icl.methods.limits import PromptLimits, Request

# A document: its task and its number in the run.
Document = tuple[str | None, int]
# Task -> the indices of a run's documents among all documents of the task.
Documents = Callable[[str], Sequence[int]]
# Task -> name of a number -> number.
Counts = Mapping[str, Mapping[str, int]]
# How many documents that do not fit are named.
_NAMED = 10


def some(names: Iterable[object], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    listed = list(map(str, names))
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def warn(limits: PromptLimits, documents: int, left_out: Counts, truncated: Counts) -> None:
    """Say in one line what `overflow=drop` left out of the prompts of all tasks, if anything.

    Args:
        documents: how many documents this process runs.
        left_out, truncated: as of `harness.run.PreparedRun`.
    """
    dropped = sum(count["documents"] for count in left_out.values())
    cut = sum(count["documents"] for count in truncated.values())
    done = []
    if dropped:
        demonstrations = sum(count["demonstrations"] for count in left_out.values())
        done.append(f"{dropped} lose demonstrations ({demonstrations} in all)")
    if cut:
        tokens = sum(count["tokens"] for count in truncated.values())
        done.append(f"{cut} do not fit without any either and lose their first tokens, as under hf ({tokens} in all)")
    if done:
        window = "" if limits.window is None else f", or the {limits.window} tokens that some layers look back at most"
        log.warning(
            "Prompts that do not fit the model's %d positions%s: of %d documents, %s; tasks: %s. %s"
            "--model_args overflow=error refuses such a run.",
            limits.positions,
            window,
            documents,
            ", and ".join(done),
            some(sorted(set(left_out) | set(truncated))),
            limits.hint if dropped else "",
        )


def refusal(
    too_long: Mapping[Document, Sequence[Request]],
    documents: int,
    limits: PromptLimits,
    overflow: str,
    run_over: Documents | None,
) -> InputError:
    """The error about documents that do not fit, with the numbers of the longest.

    Args:
        too_long: the requests of the documents that do not fit, after all that `overflow` allows to leave out.
        documents: the number of documents.
        run_over: as for `fit_requests`.
    """
    requests = [request for of_document in too_long.values() for request in of_document]
    reasons = [(limits.too_long(request.prompt, request.answer_positions), request) for request in requests]
    reason, worst = max(((reason, request) for reason, request in reasons if reason), key=lambda pair: pair[0].needed)
    answer = "answer without its last token" if worst.answer else "max_gen_toks"
    tasks = some(sorted({str(task) for task, _ in too_long}), 5)
    sentences = [
        f"{len(too_long)} of {documents} documents (tasks: {tasks}) {reason.why}"
        f"{' even if their prompts are cut' if overflow == 'drop' else ''}; the longest needs {reason.sum(answer)}.",
        reason.hint.rstrip(),
        "" if worst.answer else "Lower max_gen_toks (--gen_kwargs max_gen_toks=N).",
        _advice(limits) if overflow == "error" else "",
    ]
    numbers = _numbers(too_long, run_over)
    sentences.append(f"They are {some(numbers, _NAMED)}." if numbers else "")
    return InputError(" ".join(filter(None, sentences)))


def _advice(limits: PromptLimits) -> str:
    return (
        "Lower --num_fewshot, or leave overflow=error out: as few whole demonstrations as it takes are then left out, "
        f"the {'longest' if limits.longest_go_first else 'first'} ones first, and what does not fit without any is cut "
        "from the left."
    )


def _numbers(documents: Iterable[Document], run_over: Documents | None) -> list[str]:
    """The documents by task. Those not made by lm-eval have no number."""
    numbers_of: dict[str, list[int]] = defaultdict(list)
    for task, document in documents:
        if task is not None and document >= 0:
            # With --samples, lm-eval numbers the documents that are chosen anew.
            numbers_of[task].append(document if run_over is None else run_over(task)[document])
    return [f"document {number} of {task}" for task, numbers in numbers_of.items() for number in sorted(numbers)]
