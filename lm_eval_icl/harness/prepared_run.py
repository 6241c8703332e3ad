"""The requests of a run as token ids. All requests are tokenized and checked before the first one
is run."""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task

from lm_eval_icl.errors import InputError, log
from lm_eval_icl.harness.distributed import total
from lm_eval_icl.harness.requests import RequestTokenizer, by_document, fit_requests, some
from lm_eval_icl.harness.samplers import RetrievingSampler, pool_sampler
from lm_eval_icl.methods.limits import PromptLimits, Request
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import Context

# Task -> name of a number -> number.
Counts = dict[str, dict[str, int]]


class Prepared(NamedTuple):
    """A request of lm-eval's, and its token ids."""

    instance: Instance
    request: Request


class PreparedRun:
    """The requests of one run over some tasks, or of calls to a model outside of a run.

    Args:
        tasks: the tasks of the run; empty if the requests are not known in advance.
        overflow: "drop" or "error", for prompts that do not fit (`CommonArguments.overflow`).
        logs: whether this process shows progress and logs messages for all processes. Only one
            process does.

    Attributes:
        once: whether all requests are known in advance, so that no context is needed in two calls
            of the same kind.
        counts: the counts of prompts that are not as asked for (`counts_of_prompts`).
        tokens_alone: the number of tokens that would run through the model if each log-likelihood
            request ran by itself.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        tokenize: RequestTokenizer,
        limits: PromptLimits,
        overflow: str,
        logs: bool,
    ) -> None:
        self.tokenize = tokenize
        self.method = limits.method
        self.limits = limits
        self.overflow = overflow
        self.logs = logs
        self.once = bool(tasks)
        self.counts = counts_of_prompts([], [])
        self.tokens_alone = 0
        self._unchecked = list(tasks)
        # The tasks whose documents all have other demonstrations, as is meant.
        self._retrieved = {
            str(task.config.task)
            for task in tasks
            if isinstance(pool_sampler(task), RetrievingSampler)
        }
        # By id(instance), which is unique only as long as the instance exists, and is kept here.
        self._prepared: dict[int, Prepared] = {}
        self._shortened: dict[int, Prepared] = {}

    def check(self) -> None:
        """Tokenize and check the requests of all tasks, once.

        lm-eval gives a model one kind of request after another. A prompt that does not fit is found
        here, not after hours of work on another kind.

        Raises:
            InputError: a request cannot be run.
        """
        if not self._unchecked:
            return
        tasks = self._unchecked
        self._unchecked = []
        groups = _grouped(tasks)
        new = list[Prepared]()
        for kind in ("loglikelihood", "generate_until"):
            for group in groups:
                new += self._prepare([i for i in group if i.request_type == kind])
        if self.method.learns:
            for task in tasks:
                self._check_learned(task)
        self._warn(new)
        for group in groups:
            for instance in group:
                if instance.request_type == "loglikelihood_rolling":
                    self.tokenize.check_text(instance)

    def _check_learned(self, task: Task) -> None:
        """Refuse a task whose documents have many contexts, each of which the method would learn in
        many passes, unless the user wants it."""
        contexts = dict[Context, None]()
        for instance in task.instances or ():
            if id(instance) in self._prepared:
                request = self._prepared[id(instance)].request
                if request.prompt.context.demonstrations and not request.left_out:
                    contexts[request.prompt.context] = None
        if len(contexts) < 2:
            return
        tokens = sum(len(context.tokens) for context in contexts)
        cost = (
            f"task {task.config.task!r}: its documents have {len(contexts)} descriptions or sets "
            f"of demonstrations ({tokens:,} tokens), and {self.method.name} learns from each of them"
        )
        # Prompts that are too long have a part of the demonstrations.
        largest = max(contexts, key=lambda context: len(context.demonstrations))
        parts = {largest.prefix, *largest.demonstrations}
        drawn = any(not {context.prefix, *context.demonstrations} <= parts for context in contexts)
        if drawn and not getattr(self.method, "per_document", False):
            raise InputError(
                f"{cost}, which takes many passes: draw one set for all documents (--metadata "
                "demonstrations=stratified), or give per_document=True."
            )
        log.warning("%s.", cost)

    def requests(self, instances: Sequence[Instance]) -> list[Request]:
        """These instances, all of one kind, as requests that fit the model. The requests are stored
        until `release`.

        Raises:
            InputError: a request cannot be run.
        """
        self.check()
        self._warn(self._prepare(instances))
        return [self._prepared[id(instance)].request for instance in instances]

    def _prepare(self, instances: Sequence[Instance]) -> list[Prepared]:
        """Tokenize, check and count the new ones among some instances of one kind."""
        unknown = {id(i): i for i in instances if id(i) not in self._prepared}
        if not unknown:
            return []
        requests = fit_requests(
            list(unknown.values()), self.tokenize, self.limits, self.overflow, quiet=not self.logs
        )
        new = list(map(Prepared, unknown.values(), requests))
        for place, prepared in zip(unknown, new, strict=True):
            self._prepared[place] = prepared
            if prepared.request.left_out or prepared.request.cut:
                self._shortened[place] = prepared
        # A task may have requests of two kinds.
        self.counts = total([self.counts, counts_of_prompts(list(unknown.values()), new)])
        return new

    def counts_of(self, instances: Sequence[Instance]) -> dict[str, Counts]:
        """The counts of some instances, since a study runs several cells over one task together."""
        shortened = [self._shortened[id(i)] for i in instances if id(i) in self._shortened]
        return counts_of_prompts(instances, shortened)

    def take(self, instances: Sequence[Instance]) -> list[Request]:
        """The requests of these instances, which the caller runs now: they are counted, and no
        longer stored."""
        requests = self.requests(instances)
        self.tokens_alone += tokens_of(request for request in requests if request.answer)
        self.release(instances)
        return requests

    def release(self, instances: Sequence[Instance]) -> None:
        """Drop the stored requests of these instances, which run now or already have their
        responses."""
        for instance in instances:
            self._prepared.pop(id(instance), None)

    # Warnings about new requests, with one line for all tasks each.

    def _warn(self, new: Sequence[Prepared]) -> None:
        if not new:
            return
        self._warn_of_long_prompts(new)  # each process warns about its own requests
        if not self.logs:
            return
        shots = Counter[str]()
        contexts = defaultdict[str, set[object]](set)
        for instance, request in new:
            name = str(instance.task_name)
            context = request.prompt.context
            shots[name] += len(context.demonstrations) + len(request.left_out)
            if context.demonstrations and not request.left_out:
                contexts[name].add(context)
        self._warn_of_no_demonstrations(shots)
        counted = self.counts["own_demonstrations"]
        copies = {name: counts["documents"] for name, counts in counted.items() if name in shots}
        if copies:
            log.warning(
                "%s: %d documents are among their own demonstrations, with the answer, since "
                "lm-eval's sampler does not exclude them. Add --metadata demonstrations=random, or "
                "another way of choosing, to leave them out.",
                some(copies),
                sum(copies.values()),
            )
        drawn = {
            name: len(different)
            for name, different in contexts.items()
            if len(different) > 1 and name not in self._retrieved
        }
        if drawn:
            log.warning(
                "%s: lm-eval draws new demonstrations for each document (%d contexts), so documents "
                "share nearly no computation, and orders cannot be compared. Add --metadata "
                "demonstrations=random (or stratified, first) to draw them once for all documents.",
                some(drawn),
                sum(drawn.values()),
            )

    def _warn_of_long_prompts(self, new: Sequence[Prepared]) -> None:
        counts = counts_of_shortened(new)
        left_out = counts["left_out"]
        truncated = counts["truncated"]
        if not left_out and not truncated:
            return
        window = self.limits.window
        log.warning(
            "Some prompts do not fit the model's %d positions%s. Of %d documents, %d lose "
            "demonstrations (%d in all), and %d do not fit even without demonstrations and lose "
            "their first tokens, as under hf (%d in all). Tasks: %s. %s--model_args overflow=error "
            "refuses such a run.",
            self.limits.positions,
            f", or the {window} tokens that some layers look back at most" if window else "",
            len(by_document([prepared.instance for prepared in new])),
            _sum(left_out, "documents"),
            _sum(left_out, "demonstrations"),
            _sum(truncated, "documents"),
            _sum(truncated, "tokens"),
            some(sorted({*left_out, *truncated})),
            self.limits.hint if left_out else "",
        )

    def _warn_of_no_demonstrations(self, shots: Counter[str]) -> None:
        """
        Args:
            shots: task -> the number of demonstrations in all its prompts.
        """
        bare = [name for name, number in shots.items() if not number]
        why = self.limits.method.without_demonstrations
        if not bare or not why:
            return
        papers = [f"icl_{name}" for name in ("mmlu", "bbh") if f" {name}" in f" {' '.join(shots)}"]
        how = ""
        if papers:
            how = f" 5, or take --tasks {','.join(papers)}, the setting of the papers"
        if any(task.startswith("bbh_cot") for task in shots):
            how += (
                " (lm-eval's bbh generates chains of thought, and has three demonstrations at most)"
            )
        log.warning(
            "%s no demonstrations (%s): %s. Give some with --num_fewshot%s.",
            f"{len(bare)} of {len(shots)} tasks have" if len(shots) > 1 else "The task has",
            some(bare),
            why,
            how,
        )


def _grouped(tasks: Sequence[Task]) -> list[list[Instance]]:
    """The instances of these tasks, in groups in which no two tasks have the same name. A study has
    a task several times, in several orders of its demonstrations, and a document may lose other
    demonstrations in each order."""
    groups: list[list[Instance]] = []
    often = Counter[str | None]()  # name -> the number of groups that have it
    for task in tasks:
        instances = task.instances or []
        names = {instance.task_name for instance in instances}
        place = max((often[name] for name in names), default=0)
        if place == len(groups):
            groups.append([])
        groups[place] += instances
        often.update(dict.fromkeys(names, 1))
    return groups


def tokens_of(requests: Iterable[Request]) -> int:
    """The number of tokens of different requests, each by itself."""
    return sum({id(request): request.length for request in requests}.values())


def _sum(counts: Counts, name: str) -> int:
    return sum(of_task[name] for of_task in counts.values())


def counts_of_prompts(
    instances: Sequence[Instance], prepared: Sequence[Prepared]
) -> dict[str, Counts]:
    """The counts of prompts that are not as asked for, by task: "left_out" and "truncated" (see
    `counts_of_shortened`), and "own_demonstrations", the documents that are, by their text, among
    their demonstrations."""
    return {**counts_of_shortened(prepared), "own_demonstrations": _own(instances)}


def counts_of_shortened(new: Sequence[Prepared]) -> dict[str, Counts]:
    """The counts of prompts that did not fit the model, by task: "left_out", the documents and the
    demonstrations that they lost; "truncated", the documents that did not fit without
    demonstrations either, and the tokens that they lost (of the option that lost most)."""
    left_out = list[Counts]()
    truncated = list[Counts]()
    # Most runs have no such prompts.
    shorter = [prepared for prepared in new if prepared.request.left_out or prepared.request.cut]
    documents = by_document([prepared.instance for prepared in shorter])
    for (task_name, _), places in documents.items():
        requests = [shorter[place].request for place in places]
        if number := len(requests[0].left_out):
            left_out.append({str(task_name): {"documents": 1, "demonstrations": number}})
        if number := max(request.cut for request in requests):
            truncated.append({str(task_name): {"documents": 1, "tokens": number}})
    return {"left_out": total(left_out), "truncated": total(truncated)}


def _own(instances: Sequence[Instance]) -> Counts:
    """Count the documents of which some demonstration begins with the query and one of the options,
    in lower case and with blanks collapsed."""
    documents = set[tuple[str, object]]()
    # The options of a document have one prompt.
    for _, same in groupby(instances, key=lambda instance: id(instance.args[0])):
        options = list(same)
        first = options[0]
        prompt = first.args[0]
        if not isinstance(prompt, FewShotPrompt) or not prompt.query.strip():
            continue
        shown = _collapsed(prompt.demonstrations)
        if _collapsed((prompt.query,)) not in shown:  # nearly always
            continue
        answers = [option.args[1] for option in options]
        texts = [prompt.query + (answer if isinstance(answer, str) else "") for answer in answers]
        if any(_collapsed((text,)) in shown for text in texts):
            documents.add((str(first.task_name), first.doc_id))
    numbers = Counter(name for name, _ in documents)
    return {name: {"documents": number} for name, number in numbers.items()}


@functools.lru_cache(maxsize=8)  # successive documents mostly have the same demonstrations
def _collapsed(texts: tuple[str, ...]) -> str:
    return "".join("\0" + " ".join(text.lower().split()) for text in texts)
