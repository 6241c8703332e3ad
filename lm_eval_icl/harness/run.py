"""The requests of a run as token ids. All requests are tokenized and checked before the first one is run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task

from lm_eval_icl.errors import InputError, log
from lm_eval_icl.harness.distributed import total
from lm_eval_icl.harness.requests import Request, RequestTokenizer, fit_requests
from lm_eval_icl.inference.store import MemoryStore
from lm_eval_icl.methods.limits import PromptLimits
from lm_eval_icl.prompt import FewShotPrompt
from lm_eval_icl.tokens import Context


class PreparedRun:
    """The requests of one run over some tasks, or of calls to a model outside of a run.

    Args:
        tasks: the tasks of the run; empty if the requests are not known in advance.
        tokenize: turns an instance into a request.
        limits: the limits that prompts have to stay within.
        drop: leave out demonstrations that do not fit; else such prompts are refused.
        logs: this process shows progress, and logs what concerns all processes. Only one process does.

    Attributes:
        left_out: task -> {"documents": n, "demonstrations": n}: how many demonstrations were left out, and in how many
            documents.
        tokens_alone: how many tokens would be run through the model if each log-likelihood request ran by itself.
    """

    def __init__(self, tasks: Sequence[Task], tokenize: RequestTokenizer, limits: PromptLimits, drop: bool, logs: bool):
        self.tokenize, self.limits, self.drop, self.logs = tokenize, limits, drop, logs
        self.method = limits.method
        self.left_out: dict[str, dict[str, int]] = {}
        self.tokens_alone = 0
        self._unchecked = list(tasks)
        # By id(instance). The instance is stored too, since an id is unique only as long as its object exists.
        self._prepared: dict[int, tuple[Instance, Request]] = {}
        # How many kinds of requests (log-likelihood, generation) are still to come with a context.
        self._uses: Counter[Context] = Counter()

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
            of_kind = [instance for instance in instances if instance.request_type == kind]
            self._uses.update({request.prompt.context for request in self.requests(of_kind)})
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
            self._refuse(new)
            requests, left_out = fit_requests(new, self.tokenize, self.limits, self.drop, quiet=not self.logs)
            self._prepared |= {id(i): (i, request) for i, request in zip(new, requests, strict=True)}
            self._warn(new, requests, left_out)
            self.left_out = total([self.left_out, left_out])  # a task may have requests of two kinds
        return [self._prepared[id(instance)][1] for instance in instances]

    def release(self, instances: Sequence[Instance]) -> None:
        """Drop the stored requests of these instances, which have their responses."""
        for instance in instances:
            self._prepared.pop(id(instance), None)

    def release_context(self, context: Context, store: MemoryStore) -> None:
        """Note that one kind of request no longer needs a context. After the last kind in this run, the memory
        is freed: if every document has new demonstrations, the store would fill with memories that are not used again.
        (`batchicl` stores one memory for each demonstration, which other contexts may share; these memories stay until
        the store is full.)
        """
        if context not in self._uses:  # outside a run nobody knows what is asked next
            return
        self._uses[context] -= 1
        if self._uses[context] == 0:
            del self._uses[context]
            store.forget(context)

    def cache_keys(self, kind: str, instances: Sequence[Instance]) -> list[tuple[Any, ...]]:
        """The keys under which a cache stores the responses to these requests: the arguments of a request, and how many
        of its demonstrations overflow=drop left out, which also depends on the other options of the document."""
        self.check()
        if kind == "loglikelihood_rolling":
            return [instance.args for instance in instances]
        requests = self.requests(instances)
        return [(*instance.args, request.dropped) for instance, request in zip(instances, requests, strict=True)]

    def _refuse(self, instances: Sequence[Instance]) -> None:
        """Refuse prompts whose number of demonstrations the method's arguments do not allow."""
        prompts = ((i.task_name, i.args[0]) for i in instances)
        numbers = {(task, len(prompt.demonstrations)) for task, prompt in prompts if isinstance(prompt, FewShotPrompt)}
        for task_name, n in sorted(numbers, key=str):
            if why := self.method.why_not(n):
                raise InputError(f"{self.method.name}: task {task_name!r}: {why}.")

    def _warn(
        self, instances: Sequence[Instance], requests: Sequence[Request], left_out: dict[str, dict[str, int]]
    ) -> None:
        """Warn, once for each task, about demonstrations that were left out and about tasks without demonstrations."""
        for task_name, count in left_out.items():  # every process, for its own documents
            log.warning(
                "%s: overflow=drop left out %d demonstrations of %d documents, which would not have fitted.",
                *(task_name, count["demonstrations"], count["documents"]),
            )
        without = self.method.without_demonstrations
        if not (self.logs and without):
            return
        demonstrations: dict[str | None, int] = defaultdict(int)
        for instance, request in zip(instances, requests, strict=True):
            demonstrations[instance.task_name] += len(request.prompt.context.demonstrations)
        for name in (name for name, number in demonstrations.items() if number == 0):
            log.warning("%s: no demonstrations: %s. Give some with --num_fewshot.", name, without)
