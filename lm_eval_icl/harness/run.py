"""The requests of a run as token ids. All requests are tokenized and checked before the first one is run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task

from lm_eval_icl.errors import log
from lm_eval_icl.harness.distributed import total
from lm_eval_icl.harness.overflow import Documents, some, warn
from lm_eval_icl.harness.requests import RequestTokenizer, by_document, fit_requests
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.limits import PromptLimits, Request

# Task -> name of a number -> number.
Counts = dict[str, dict[str, int]]


class PreparedRun:
    """The requests of one run over some tasks, or of calls to a model outside of a run.

    Args:
        tasks: the tasks of the run; empty if the requests are not known in advance.
        tokenize: turns instances into requests.
        limits: the limits that prompts have to stay within.
        overflow: what is done with prompts that do not fit (`CommonArguments.overflow`).
        logs: whether this process shows progress, and logs what concerns all processes. Only one process does.
        documents: which documents of a task the run is over; None if this is not known.

    Attributes:
        once: all requests are known, and nothing is asked in a later call behind the contexts of one kind of them.
        left_out: task -> {"documents": n, "demonstrations": n}: how many demonstrations were left out, and in how many
            documents.
        truncated: task -> {"documents": n, "tokens": n}: how many documents without a demonstration left were cut at
            the beginning, and by how many tokens (of options that lost different numbers, the largest counts).
        tokens_alone: how many tokens would be run through the model if each log-likelihood request ran by itself.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        tokenize: RequestTokenizer,
        limits: PromptLimits,
        overflow: str,
        logs: bool,
        documents: Documents | None = None,
    ) -> None:
        self.tokenize, self.limits, self.overflow, self.logs = tokenize, limits, overflow, logs
        self.method, self.documents = limits.method, documents
        self.once = bool(tasks)
        self.left_out: Counts = {}
        self.truncated: Counts = {}
        self.tokens_alone = 0
        self._unchecked = list(tasks)
        # By id(instance). The instance is stored too, since an id is unique only as long as its object exists.
        self._prepared: dict[int, tuple[Instance, Request]] = {}

    def check(self) -> None:
        """Tokenize and check the requests of all tasks, once.

        lm-eval gives a model one kind of request after another. A prompt that does not fit is found here, not after
        hours of work on another kind.

        Raises:
            InputError: a request cannot be run.
        """
        if not self._unchecked:
            return
        tasks, self._unchecked = self._unchecked, []
        instances = [instance for task in tasks for instance in task.instances or ()]
        prepared: list[tuple[Instance, Request]] = []
        for kind in ("loglikelihood", "generate_until"):
            apart = [[item for item in group if item.request_type == kind] for group in _apart(tasks)]
            prepared += [pair for group in apart for pair in self._prepare(group)]
        self._warn(prepared)
        for instance in instances:
            if instance.request_type == "loglikelihood_rolling":
                self.tokenize.check_text(instance)

    def requests(self, instances: Sequence[Instance]) -> list[Request]:
        """These instances, all of one kind, as requests that fit the model. The requests are stored until `release`.

        Raises:
            InputError: a request cannot be run.
        """
        self.check()
        self._warn(self._prepare(instances))
        return [self._prepared[id(instance)][1] for instance in instances]

    def _prepare(self, instances: Sequence[Instance]) -> list[tuple[Instance, Request]]:
        """Tokenize, check and count those of these instances, all of one kind, that are new."""
        new = list({id(i): i for i in instances if id(i) not in self._prepared}.values())
        requests = fit_requests(
            new, self.tokenize, self.limits, self.overflow, self.documents, quiet=not self.logs or not new
        )
        self._prepared |= {id(i): (i, request) for i, request in zip(new, requests, strict=True)}
        left_out, truncated = _count(new, requests)
        self.left_out = total([self.left_out, left_out])  # a task may have requests of two kinds
        self.truncated = total([self.truncated, truncated])
        return list(zip(new, requests, strict=True))

    def _warn(self, prepared: Sequence[tuple[Instance, Request]]) -> None:
        """Warn about requests that are new, in one line for all tasks."""
        if prepared:
            instances, requests = zip(*prepared, strict=True)
            warn(self.limits, len(by_document(instances)), *_count(instances, requests))  # each process its own
            if self.logs:
                _warn(self.method, instances, requests)

    def take(self, instances: Sequence[Instance]) -> list[Request]:
        """`requests`, for whoever runs them: they are counted, and not stored any more."""
        requests = self.requests(instances)
        self.tokens_alone += sum({id(request): request.length for request in requests if request.answer}.values())
        self.release(instances)
        return requests

    def release(self, instances: Sequence[Instance]) -> None:
        """Drop the stored requests of these instances, which are run, or have their responses."""
        for instance in instances:
            self._prepared.pop(id(instance), None)


def _apart(tasks: Sequence[Task]) -> list[list[Instance]]:
    """The instances of these tasks, those of two tasks of one name apart: a study has a task in several orders of its
    demonstrations, and what is left out of a document in one order is nothing to the others."""
    groups: list[tuple[set[str | None], list[Instance]]] = []
    for task in tasks:
        instances = task.instances or []
        names = {instance.task_name for instance in instances}
        free = next((group for group in groups if not group[0] & names), None)
        if free is None:
            groups.append(free := (set(), []))
        free[0].update(names)
        free[1].extend(instances)
    return [together for _, together in groups]


def _count(instances: Sequence[Instance], requests: Sequence[Request]) -> tuple[Counts, Counts]:
    """Count what was left out, as in `PreparedRun.left_out` and `PreparedRun.truncated`."""
    left_out: list[Counts] = []
    truncated: list[Counts] = []
    for (task_name, _), indices in by_document(instances).items():
        if number := len(requests[indices[0]].left_out):
            left_out.append({str(task_name): {"documents": 1, "demonstrations": number}})
        if number := max(requests[i].cut for i in indices):
            truncated.append({str(task_name): {"documents": 1, "tokens": number}})
    return total(left_out), total(truncated)


def _warn(method: Method, instances: Sequence[Instance], requests: Sequence[Request]) -> None:
    """Warn, in one line for all tasks, about tasks without demonstrations, and about those that draw demonstrations for
    each document."""
    if without := method.without_demonstrations:
        shots: Counter[str | None] = Counter()
        for instance, request in zip(instances, requests, strict=True):
            shots[instance.task_name] += len(request.prompt.context.demonstrations) + len(request.left_out)
        if bare := [str(name) for name, number in shots.items() if not number]:
            n = f"{len(bare)} of {len(shots)} tasks have" if len(shots) > 1 else "The task has"
            log.warning("%s no demonstrations (%s): %s. %s", n, some(bare), without, _give_some(bare, shots))
    contexts, documents = defaultdict[str, set[object]](set), defaultdict[str, set[object]](set)
    for instance, request in zip(instances, requests, strict=True):
        if request.prompt.context.demonstrations and not request.left_out:
            contexts[str(instance.task_name)].add(request.prompt.context)
            documents[str(instance.task_name)].add(instance.doc_id)
    if drawn := [name for name in contexts if len(contexts[name]) > 1]:
        drawn_for = [sum(len(numbers[name]) for name in drawn) for numbers in (contexts, documents)]
        log.warning(
            "%s: lm-eval draws other demonstrations for each document (%d contexts for %d documents), so that nearly "
            "nothing is shared, and orders cannot be compared. Add --metadata demonstrations=random (or stratified, "
            "first) to draw them once for all documents.",
            *(some(drawn), *drawn_for),
        )


def _give_some(bare: Sequence[str], tasks: Iterable[str | None]) -> str:
    """How tasks without demonstrations get some: what to type for the papers' settings, if they have the task."""
    papers = [f"icl_{name}" for name in ("mmlu", "bbh") if any(str(task).startswith(name) for task in tasks)]
    if not papers:
        return "Give some with --num_fewshot."
    chains = any(str(task).startswith("bbh_cot") for task in tasks)
    bbh = " (lm-eval's bbh generates chains of thought, and has three demonstrations at most)" if chains else ""
    return f"Give some with --num_fewshot 5, or take --tasks {','.join(papers)}, the setting of the papers{bbh}."
