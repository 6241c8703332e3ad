"""A run's requests as token ids: all of them made, and refused where they do not fit, before the first one runs."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task

from lm_eval_icl.errors import InputError
from lm_eval_icl.prompts import FewShotPrompt
from lm_eval_icl.requests import Request, RequestTokenizer, Room, fit
from lm_eval_icl.tokens import Context

# A child of lm-eval's logger, for its handler and its level.
log = logging.getLogger("lm_eval.icl")


class Run:
    """The requests of one run over some tasks, or of a model that is asked without one.

    Args:
        tasks: those that the run has; none where nobody knows what is to come.
        drop: leave out demonstrations that do not fit; else they are refused.
        speaks: say what concerns all processes, and show progress: one of them does.

    Attributes:
        left_out: task -> documents of which demonstrations were left out, and how many.
    """

    def __init__(self, tasks: Sequence[Task], tokenize: RequestTokenizer, room: Room, drop: bool, speaks: bool):
        self.tokenize, self.room, self.drop, self.speaks = tokenize, room, drop, speaks
        self.method = room.method
        self.left_out: dict[str, dict[str, int]] = {}
        self._unchecked = list(tasks)
        # By the instance's id, which stays its own as long as the instance is kept.
        self._made: dict[int, tuple[Instance, Request]] = {}
        # How many kinds of request are to come with a context.
        self._uses: Counter[Context] = Counter()

    def check(self) -> None:
        """Tokenize the requests of all tasks; once.

        lm-eval hands a model one kind of request after another; a prompt that does not fit is found here,
        not after hours of work on another kind.

        Raises:
            InputError: a request cannot be run.
        """
        tasks, self._unchecked = self._unchecked, []
        instances = [instance for task in tasks for instance in task.instances or ()]
        for kind in ("loglikelihood", "generate_until"):
            of_kind = [instance for instance in instances if instance.request_type == kind]
            self._uses.update({request.prompt.context for request in self.requests(of_kind)})
        for instance in instances:
            if instance.request_type == "loglikelihood_rolling":
                self.tokenize.check_text(instance)

    def requests(self, instances: Sequence[Instance]) -> list[Request]:
        """These requests, all of a kind, as token ids that fit.

        Raises:
            InputError: one cannot be run.
        """
        new = list({id(i): i for i in instances if id(i) not in self._made}.values())
        if new:
            self._refuse(new)
            tokenize = getattr(self.tokenize, new[0].request_type)
            requests, left_out = fit(new, tokenize, self.room, self.drop, quiet=not self.speaks)
            self._made |= {id(i): (i, request) for i, request in zip(new, requests, strict=True)}
            self._warn(new, requests, left_out)
            self.left_out |= left_out
        return [self._made[id(instance)][1] for instance in instances]

    def done(self, context: Context) -> bool:
        """One kind of request is through with a context; whether it was the last that the run has."""
        self._uses[context] -= 1
        return self._uses[context] == 0

    def _refuse(self, instances: Sequence[Instance]) -> None:
        """Refuse prompts whose number of demonstrations the method's arguments do not allow."""
        prompts = ((i.task_name, i.args[0]) for i in instances)
        numbers = {(task, len(prompt.demonstrations)) for task, prompt in prompts if isinstance(prompt, FewShotPrompt)}
        for task_name, n in sorted(numbers, key=str):
            if why := self.method.refuse(n):
                raise InputError(f"lm-eval-icl: {self.method.name}: task {task_name!r}: {why}.")

    def _warn(
        self, instances: Sequence[Instance], requests: Sequence[Request], left_out: dict[str, dict[str, int]]
    ) -> None:
        """Say, once a task, what was left out and where the method had nothing to work on."""
        for task_name, count in left_out.items():  # every process of its own documents
            log.warning(
                "%s: overflow=drop left out %d demonstrations of %d documents, which would not have fitted.",
                *(task_name, count["demonstrations"], count["documents"]),
            )
        without = self.method.without_demonstrations
        if not (self.speaks and without):
            return
        demonstrations: dict[str | None, int] = defaultdict(int)
        for instance, request in zip(instances, requests, strict=True):
            demonstrations[instance.task_name] += len(request.prompt.context.demonstrations)
        for name in (name for name, number in demonstrations.items() if number == 0):
            log.warning("%s: no demonstrations: %s. Give some with --num_fewshot.", name, without)
