"""The requests of a run as token ids. All requests are tokenized and checked before the first one is run."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task

from lm_eval_icl.errors import InputError, log
from lm_eval_icl.harness.distributed import total
from lm_eval_icl.harness.requests import RequestTokenizer, by_document, fit_requests, some
from lm_eval_icl.methods.limits import PromptLimits, Request
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import Context

# Task -> name of a number -> number.
Counts = dict[str, dict[str, int]]


class PreparedRun:
    """The requests of one run over some tasks, or of calls to a model outside of a run.

    Args:
        tasks: the tasks of the run; empty if the requests are not known in advance.
        overflow: "drop" or "error", for prompts that do not fit (`CommonArguments.overflow`).
        logs: whether this process shows progress and logs messages for all processes. Only one process does.

    Attributes:
        once: whether all requests are known in advance, so that no context is needed in two calls of the same kind.
        left_out: task -> {"documents": n, "demonstrations": n}: how many demonstrations were left out, and in how many
            documents.
        truncated: task -> {"documents": n, "tokens": n}: how many documents did not fit even without demonstrations and
            were cut at the beginning, and by how many tokens (the largest number among a document's options).
        own_demonstrations: task -> {"documents": n}: how many documents are, by their text, among their demonstrations.
        tokens_alone: how many tokens would run through the model if each log-likelihood request ran by itself.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        tokenize: RequestTokenizer,
        limits: PromptLimits,
        overflow: str,
        logs: bool,
    ) -> None:
        self.tokenize, self.limits, self.overflow, self.logs = tokenize, limits, overflow, logs
        self.method = limits.method
        self.once = bool(tasks)
        self.left_out: Counts = {}
        self.truncated: Counts = {}
        self.own_demonstrations: Counts = {}
        self.tokens_alone = 0
        self._shortened: list[tuple[Instance, Request]] = []
        self._unchecked = list(tasks)
        self._retrieved = {
            str(t.config.task) for t in tasks if hasattr(getattr(t, "sampler", None), "document")
        }
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
            groups = [
                [item for item in group if item.request_type == kind] for group in _grouped(tasks)
            ]
            prepared += [pair for group in groups for pair in self._prepare(group)]
        if self.method.learns:
            for task in tasks:
                self._check_learned(task)
        self._warn(prepared)
        for instance in instances:
            if instance.request_type == "loglikelihood_rolling":
                self.tokenize.check_text(instance)

    def _check_learned(self, task: Task) -> None:
        """Refuse a task whose documents have many contexts, each of which the method would learn in
        many passes, unless the user wants it."""
        contexts = dict[Context, None]()
        for instance in task.instances or ():
            if id(instance) in self._prepared:
                request = self._prepared[id(instance)][1]
                if request.prompt.context.demonstrations and not request.left_out:
                    contexts[request.prompt.context] = None
        if len(contexts) < 2:
            return
        tokens = sum(len(context.tokens) for context in contexts)
        cost = (
            f"task {task.config.task!r}: its documents have {len(contexts)} descriptions or sets "
            f"of demonstrations ({tokens:,} tokens), and {self.method.name} learns from each"
        )
        # Prompts that are too long have a part of the demonstrations.
        largest = max(contexts, key=lambda context: len(context.demonstrations))
        parts = {largest.prefix, *largest.demonstrations}
        drawn = any(not {context.prefix, *context.demonstrations} <= parts for context in contexts)
        if drawn and not getattr(self.method, "per_document", False):
            raise InputError(
                f"{cost}, in many passes: draw one set (--metadata demonstrations=stratified), or "
                "give per_document=True."
            )
        log.warning("%s.", cost)

    def requests(self, instances: Sequence[Instance]) -> list[Request]:
        """These instances, all of one kind, as requests that fit the model. The requests are stored until `release`.

        Raises:
            InputError: a request cannot be run.
        """
        self.check()
        self._warn(self._prepare(instances))
        return [self._prepared[id(instance)][1] for instance in instances]

    def _prepare(self, instances: Sequence[Instance]) -> list[tuple[Instance, Request]]:
        """Tokenize, check and count the new ones among some instances of one kind."""
        new = list({id(i): i for i in instances if id(i) not in self._prepared}.values())
        requests = fit_requests(
            new, self.tokenize, self.limits, self.overflow, quiet=not self.logs or not new
        )
        self._prepared |= {id(i): (i, request) for i, request in zip(new, requests, strict=True)}
        for instance, request in zip(new, requests, strict=True):
            if request.left_out or request.cut:
                self._shortened.append((instance, request))
        left_out, truncated = _count(new, requests)
        self.left_out = total([self.left_out, left_out])  # a task may have requests of two kinds
        self.truncated = total([self.truncated, truncated])
        self.own_demonstrations = total([self.own_demonstrations, _count_own_demonstrations(new)])
        return list(zip(new, requests, strict=True))

    def _warn(self, prepared: Sequence[tuple[Instance, Request]]) -> None:
        """Warn about new requests, with one line for all tasks about each of: prompts that do not fit, tasks without
        demonstrations, documents among their own demonstrations, and tasks that draw demonstrations per document."""
        if not prepared:
            return
        instances, requests = zip(*prepared, strict=True)
        left_out, truncated = _count(instances, requests)
        if left_out or truncated:  # each process warns about its own requests
            without, cut = (
                sum(c["documents"] for c in counts.values()) for counts in (left_out, truncated)
            )
            window = self.limits.window
            log.warning(
                "Prompts that do not fit the model's %d positions%s: of %d documents, %d lose demonstrations (%d in "
                "all) and %d do not fit without any either and lose their first tokens, as under hf (%d in all); "
                "tasks: %s. %s--model_args overflow=error refuses such a run.",
                self.limits.positions,
                f", or the {window} tokens that some layers look back at most" if window else "",
                *(len(by_document(instances)), without),
                *(sum(c["demonstrations"] for c in left_out.values()), cut),
                *(
                    sum(c["tokens"] for c in truncated.values()),
                    some(sorted({*left_out, *truncated})),
                ),
                self.limits.hint if left_out else "",
            )
        if not self.logs:
            return
        shots, contexts = Counter[str](), defaultdict[str, set[object]](set)
        for instance, request in prepared:
            name, context = str(instance.task_name), request.prompt.context
            shots[name] += len(context.demonstrations) + len(request.left_out)
            if context.demonstrations and not request.left_out:
                contexts[name].add(context)
        bare = [name for name, number in shots.items() if not number]
        if bare and (why := self.method.without_demonstrations):
            tasks = f"{len(bare)} of {len(shots)} tasks have" if len(shots) > 1 else "The task has"
            papers = [
                f"icl_{name}"
                for name in ("mmlu", "bbh")
                if any(task.startswith(name) for task in shots)
            ]
            how = (
                f" 5, or take --tasks {','.join(papers)}, the setting of the papers"
                if papers
                else ""
            )
            if any(task.startswith("bbh_cot") for task in shots):
                how += " (lm-eval's bbh generates chains of thought, and has three demonstrations at most)"
            log.warning(
                "%s no demonstrations (%s): %s. Give some with --num_fewshot%s.",
                tasks,
                some(bare),
                why,
                how,
            )
        if copies := {
            name: counts for name, counts in self.own_demonstrations.items() if name in shots
        }:
            log.warning(
                "%s: %d documents stand among their own demonstrations, with the answer (lm-eval's sampler leaves that "
                "to chance). Add --metadata demonstrations=random, or another way, to leave them out.",
                *(some(copies), sum(counts["documents"] for counts in copies.values())),
            )
        if drawn := [
            name for name in contexts if len(contexts[name]) > 1 and name not in self._retrieved
        ]:
            log.warning(
                "%s: lm-eval draws other demonstrations for each document (%d contexts), so that nearly nothing is "
                "shared, and orders cannot be compared. Add --metadata demonstrations=random (or stratified, first) to "
                "draw them once for all documents.",
                *(some(drawn), sum(len(contexts[name]) for name in drawn)),
            )

    def counts_of(self, instances: Sequence[Instance]) -> dict[str, Counts]:
        """The counts of some instances by name, since a study runs several cells over one task together."""
        ids = set(map(id, instances))
        shortened = [pair for pair in self._shortened if id(pair[0]) in ids]
        left_out, truncated = _count(
            [instance for instance, _ in shortened], [request for _, request in shortened]
        )
        own_demonstrations = _count_own_demonstrations(instances)
        return {
            "left_out": left_out,
            "truncated": truncated,
            "own_demonstrations": own_demonstrations,
        }

    def take(self, instances: Sequence[Instance]) -> list[Request]:
        """The requests of these instances, which the caller runs now: they are counted, and no longer stored."""
        requests = self.requests(instances)
        self.tokens_alone += sum(
            {id(request): request.length for request in requests if request.answer}.values()
        )
        self.release(instances)
        return requests

    def release(self, instances: Sequence[Instance]) -> None:
        """Drop the stored requests of these instances, which run now or already have their responses."""
        for instance in instances:
            self._prepared.pop(id(instance), None)


def _grouped(tasks: Sequence[Task]) -> list[list[Instance]]:
    """The instances of these tasks, in groups in which no two tasks have the same name. A study has a task several
    times, in several orders of its demonstrations, and a document may lose other demonstrations in each order."""
    groups: list[tuple[set[str | None], list[Instance]]] = []
    for task in tasks:
        instances = task.instances or []
        names = {instance.task_name for instance in instances}
        group = next((group for group in groups if not group[0] & names), None)
        if group is None:
            groups.append(group := (set(), []))
        group[0].update(names)
        group[1].extend(instances)
    return [members for _, members in groups]


def _count(instances: Sequence[Instance], requests: Sequence[Request]) -> tuple[Counts, Counts]:
    """Count the demonstrations and tokens that were left out (`PreparedRun.left_out`, `PreparedRun.truncated`)."""
    left_out, truncated = list[Counts](), list[Counts]()
    shorter = [
        i for i, request in enumerate(requests) if request.left_out or request.cut
    ]  # none in most runs
    for (task_name, _), indices in by_document([instances[i] for i in shorter]).items():
        document_requests = [requests[shorter[i]] for i in indices]
        if number := len(document_requests[0].left_out):
            left_out.append({str(task_name): {"documents": 1, "demonstrations": number}})
        if number := max(request.cut for request in document_requests):
            truncated.append({str(task_name): {"documents": 1, "tokens": number}})
    return total(left_out), total(truncated)


def _count_own_demonstrations(instances: Sequence[Instance]) -> Counts:
    """Count the documents among their own demonstrations (`PreparedRun.own_demonstrations`): some demonstration begins
    with the query and one of the options, in lower case and with blanks collapsed."""
    documents = set[tuple[str, object]]()
    for _, same in groupby(
        instances, key=lambda instance: id(instance.args[0])
    ):  # the options of a document
        options = list(same)
        prompt = options[0].args[0]
        if isinstance(prompt, FewShotPrompt) and prompt.demonstrations and prompt.query.strip():
            among, answers = (
                _collapsed(prompt.demonstrations),
                [option.args[1] for option in options],
            )
            texts = [
                prompt.query + (answer if isinstance(answer, str) else "") for answer in answers
            ]
            # The query of most documents is not in their demonstrations.
            if _collapsed((prompt.query,)) in among and any(
                _collapsed((text,)) in among for text in texts
            ):
                documents |= {(str(option.task_name), option.doc_id) for option in options}
    return {
        name: {"documents": number}
        for name, number in Counter(name for name, _ in documents).items()
    }


@functools.lru_cache(maxsize=8)  # successive documents mostly have the same demonstrations
def _collapsed(texts: tuple[str, ...]) -> str:
    return "".join("\0" + " ".join(text.lower().split()) for text in texts)
