"""The requests of a run as token ids. All requests are tokenized and checked before the first one is run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task

from lm_eval_icl.errors import log, named
from lm_eval_icl.harness.distributed import total
from lm_eval_icl.harness.overflow import Documents
from lm_eval_icl.harness.requests import RequestTokenizer, by_document, fit_requests
from lm_eval_icl.inference.prefix_cache import PrefixCache
from lm_eval_icl.methods.base import Method
from lm_eval_icl.methods.limits import PromptLimits, Request
from lm_eval_icl.prompts.encoded import EncodedPrompt
from lm_eval_icl.prompts.tokens import Context, line_break_at_end

# Task -> name of a number -> number.
Counts = dict[str, dict[str, int]]


class ContextUses:
    """Tells which contexts of a run come up again."""

    def __init__(self) -> None:
        self._kinds: Counter[Context] = Counter()  # how many kinds of requests are still to come with a context
        self._first: dict[Context, tuple[str, tuple[int, ...]]] = {}  # the first query behind it, and its kind
        self._shared: set[Context] = set()  # those with other queries as well

    def add(self, kind: str, requests: Iterable[Request]) -> None:
        """Add all requests of a kind (log-likelihood, generation)."""
        contexts: set[Context] = set()
        for request in requests:
            context, use = request.prompt.context, (kind, request.prompt.query)
            contexts.add(context)
            if self._first.setdefault(context, use) != use:
                self._shared.add(context)
        self._kinds.update(contexts)

    def own(self, context: Context) -> bool:
        """Whether a single query of the run has this context. (Only such contexts run side by side with others: the
        memory of one that several queries have must be the same to the bit if a run is stopped after some of these.)"""
        return context in self._kinds and context not in self._shared

    def release(self, context: Context, store: PrefixCache) -> None:
        """Note that one kind of request no longer needs a context. After the last kind in this run, the memory is
        freed: if every document has new demonstrations, the cache would fill with memories that are not used again.
        (`batchicl` stores one memory for each demonstration, which other contexts may share; these memories stay until
        the cache is full.)
        """
        if context not in self._kinds:  # outside a run nobody knows what is asked next
            return
        self._kinds[context] -= 1
        if self._kinds[context] == 0:
            del self._kinds[context]
            store.forget(context)


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
        contexts: which contexts come up again.
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
        self.contexts = ContextUses()
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
        for kind in ("loglikelihood", "generate_until"):
            apart = [[item for item in group if item.request_type == kind] for group in _apart(tasks)]
            self.contexts.add(kind, [request for group in apart for request in self.requests(group)])
        for instance in instances:
            if instance.request_type == "loglikelihood_rolling":
                self.tokenize.check_text(instance)

    def requests(self, instances: Sequence[Instance]) -> list[Request]:
        """These instances, all of one kind, as requests that fit the model. The requests are stored until `release`.

        Raises:
            InputError: a request cannot be run.
        """
        self.check()
        new = list({id(i): i for i in instances if id(i) not in self._prepared}.values())
        if new:
            requests = fit_requests(new, self.tokenize, self.limits, self.overflow, self.documents, quiet=not self.logs)
            self._prepared |= {id(i): (i, request) for i, request in zip(new, requests, strict=True)}
            left_out, truncated = _count(new, requests)
            for task_name in left_out | truncated:  # every process, for its own documents
                done = []
                if number := left_out.get(task_name):
                    done.append("left out {demonstrations} demonstrations of {documents} documents".format(**number))
                if number := truncated.get(task_name):
                    done.append("cut {tokens} tokens off the beginning of {documents} documents".format(**number))
                what = " and ".join(done)
                log.warning("%s: overflow=%s %s, which would not have fitted.", task_name, self.overflow, what)
            if self.logs:
                _warn(self.method, new, requests)
            self.left_out = total([self.left_out, left_out])  # a task may have requests of two kinds
            self.truncated = total([self.truncated, truncated])
        return [self._prepared[id(instance)][1] for instance in instances]

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
    """Warn, in one line for all tasks, about prompts that end in a line break, about tasks without demonstrations, and
    about those that draw demonstrations for each document."""
    scored = [i for i in instances if i.request_type == "loglikelihood"]
    prompts = ((i.task_name, i.args[0]) for i in scored if not isinstance(i.args[0], EncodedPrompt))
    breaks = {str(task): why for task, prompt in prompts if (why := line_break_at_end(prompt))}
    if breaks:
        log.warning("%s: %s", named(breaks), next(iter(breaks.values())))
    if without := method.without_demonstrations:
        shots: Counter[str | None] = Counter()
        for instance, request in zip(instances, requests, strict=True):
            shots[instance.task_name] += len(request.prompt.context.demonstrations) + len(request.left_out)
        if none := [str(name) for name, number in shots.items() if not number]:
            log.warning("%s: no demonstrations: %s. Give some with --num_fewshot.", named(none), without)
    contexts, documents = defaultdict[str, set[Context]](set), defaultdict[str, set[int | None]](set)
    for instance, request in zip(instances, requests, strict=True):
        if request.prompt.context.demonstrations and not request.left_out:
            contexts[str(instance.task_name)].add(request.prompt.context)
            documents[str(instance.task_name)].add(instance.doc_id)
    if drawn := [name for name in contexts if len(contexts[name]) > 1]:
        log.warning(
            "%s: lm-eval draws other demonstrations for each document (%d contexts for %d documents), so that nearly "
            "nothing is shared, and orders cannot be compared. Add --metadata demonstrations=random (or stratified, "
            "first) to draw them once for all documents.",
            *(named(drawn), sum(len(contexts[name]) for name in drawn), sum(len(documents[name]) for name in drawn)),
        )
