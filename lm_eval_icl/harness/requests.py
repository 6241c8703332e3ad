"""Tokenizes lm-eval's requests so that they fit the model, or refuses them before anything is
run."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.harness.prompts import structure_error
from lm_eval_icl.inference.generation import settings_in_force
from lm_eval_icl.methods.limits import PromptLimits, Request, fits, shortened
from lm_eval_icl.methods.needs import check_generates
from lm_eval_icl.methods.runner import MethodRunner
from lm_eval_icl.prompts.encoded import EncodedPrompt
from lm_eval_icl.prompts.prompt import FewShotPrompt
from lm_eval_icl.prompts.tokens import Ids, PromptTokenizer

# A document: its task and its number in the run.
Document = tuple[str | None, int]


class RequestTokenizer:
    """Turns lm-eval's instances into requests.

    Args:
        prompts: the tokenizer of prompts.
        max_gen_toks: how many tokens may be generated if a request does not say it.
        runner: generates the texts; settings and models that it cannot generate with are refused.
            None if no texts are generated.
    """

    def __init__(
        self, prompts: PromptTokenizer, max_gen_toks: int, runner: MethodRunner | None = None
    ) -> None:
        self.prompts = prompts
        self.max_gen_toks = max_gen_toks
        self.runner = runner
        self._checked: Any = None  # the generation arguments that were checked last

    def __call__(
        self, instances: Sequence[Instance], left_out: tuple[int, ...] = ()
    ) -> list[Request]:
        """The requests of instances of one kind, without the demonstrations with the indices
        `left_out`.

        Raises:
            InputError: a request cannot be run.
        """
        if instances[0].request_type == "generate_until":
            return [self._generate_until(instance, left_out) for instance in instances]
        # All options of a document have the same prompt object, which is tokenized once.
        requests = list[Request]()
        for _, same in groupby(instances, key=lambda instance: id(instance.args[0])):
            requests += self._loglikelihood(list(same), left_out)
        return requests

    def _loglikelihood(
        self, instances: Sequence[Instance], left_out: tuple[int, ...]
    ) -> Iterator[Request]:
        """The requests of instances that have one prompt."""
        prompt = instances[0].args[0]
        continuations = [instance.args[1] for instance in instances]
        answers: Sequence[Ids]
        if isinstance(prompt, EncodedPrompt):
            with naming(named(instances[0])):
                tokens = prompt.without(left_out)
                answers = [continuation.ids for continuation in continuations]
                self.prompts.check_known(tokens, *answers)
        else:
            arranged = self._arranged(instances[0], left_out)
            with naming(named(instances[0])):
                tokens, answers = self.prompts.pairs(arranged, continuations)
        for instance, answer in zip(instances, answers, strict=True):
            if not answer or not tokens.query:
                empty = "context" if answer else "continuation"
                raise InputError(
                    f"{named(instance)}, option {instance.idx}: the {empty} is empty, so there is "
                    "nothing to score. Check the task's doc_to_text, doc_to_choice and "
                    "doc_to_target for this document."
                )
            # The answer's last token is predicted, but never an input.
            yield Request(tokens, answer, len(answer) - 1, left_out, arguments=instance.args)

    def _generate_until(self, instance: Instance, left_out: tuple[int, ...]) -> Request:
        kwargs = instance.args[1]
        # The arguments are nearly always those of the last request.
        if self.runner is not None and kwargs != self._checked:
            with naming(f"task {instance.task_name!r}"):
                settings_in_force(self.runner.model, kwargs)
            self._checked = kwargs
        tokens_generated = int(normalize_gen_kwargs(kwargs, self.max_gen_toks)["max_gen_toks"])
        if tokens_generated < 1:
            raise InputError(
                f"task {instance.task_name!r}: max_gen_toks={tokens_generated}: must be 1 or more."
            )
        prompt = self._arranged(instance, left_out)
        with naming(named(instance)):
            tokens = self.prompts.to_continue(prompt)
        if not tokens.query:
            raise InputError(
                f"{named(instance)}: the context is empty, so there is nothing to continue. Check the task's "
                "doc_to_text for this document."
            )
        if self.runner is not None:
            check_generates(
                self.runner.method, self.runner.model, self.runner.capabilities, tokens.context
            )
        return Request(tokens, (), tokens_generated, left_out, arguments=instance.args)

    def check_text(self, instance: Instance) -> None:
        """Refuse a text to score as a whole (`HFLM.loglikelihood_rolling`) that the tokenizer
        cannot encode, or with a token that is not in the model's vocabulary."""
        with naming(named(instance)):
            self.prompts.check_known(
                self.prompts.nothing, tuple(self.prompts.bare(instance.args[0])[0])
            )

    def _arranged(self, instance: Instance, left_out: tuple[int, ...]) -> FewShotPrompt:
        prompt = instance.args[0]
        if prompt == "":
            return FewShotPrompt("", (), "")
        if not isinstance(prompt, FewShotPrompt):
            raise structure_error(instance.task_name)
        return self.prompts.arranged(prompt, left_out)


def named(instance: Instance) -> str:
    return f"task {instance.task_name!r}, document {instance.doc_id}"


def fit_requests(
    instances: Sequence[Instance],
    tokenize: RequestTokenizer,
    limits: PromptLimits,
    overflow: str,
    quiet: bool = False,
) -> list[Request]:
    """Tokenize requests of one kind so that all fit the model.

    Raises:
        InputError: documents do not fit even after `overflow` has left out all that it may, or the
            method's arguments do not allow as many demonstrations as a prompt has.
    """
    requests: dict[int, Request] = {}
    too_long: dict[Document, list[Request]] = {}
    documents = by_document(instances)
    for (task_name, _), indices in documents.items():
        prompt = instances[indices[0]].args[0]
        if isinstance(prompt, FewShotPrompt):
            why = limits.method.why_not(len(prompt.demonstrations))
            if why:
                raise InputError(f"{limits.method.name}: task {task_name!r}: {why}.")
    with tqdm(total=len(instances), desc="Tokenizing inputs", disable=quiet) as bar:
        for document, indices in documents.items():
            tokenize_document = partial(tokenize, [instances[i] for i in indices])
            document_requests = tokenize_document()
            does_fit = fits(limits, document_requests)
            if not does_fit and overflow == "drop":
                document_requests = shortened(document_requests, tokenize_document, limits)
                does_fit = fits(limits, document_requests)
            if not does_fit:
                too_long[document] = document_requests
            requests |= zip(indices, document_requests, strict=True)
            bar.update(len(indices))
    if too_long:
        raise _refusal(too_long, len(documents), limits, overflow)
    return [requests[i] for i in range(len(instances))]


def _refusal(
    too_long: Mapping[Document, Sequence[Request]],
    documents: int,
    limits: PromptLimits,
    overflow: str,
) -> InputError:
    """The error about documents that do not fit even after `overflow` has left out all that it may.
    It gives the numbers of tokens of the longest document."""
    faults = []
    for requests in too_long.values():
        for request in requests:
            reason = limits.too_long(request.prompt, request.answer_positions)
            if reason:
                faults.append((reason, request))
    reason, worst = max(faults, key=lambda fault: fault[0].needed)
    tasks = some(sorted({str(task) for task, _ in too_long}))
    advice = ""
    even = ""
    if overflow == "error":
        advice = "Lower --num_fewshot, or leave overflow=error out."
    else:
        even = " even if their prompts are cut"
    answer = "answer without its last token"
    if not worst.answer:
        answer = "max_gen_toks"
        advice = f"Lower max_gen_toks (--gen_kwargs max_gen_toks=N). {advice}"
    what = (
        f"{len(too_long)} of {documents} documents (tasks: {tasks}) {reason.why}{even}; the longest "
        f"needs {reason.sum(answer)}."
    )
    return InputError(f"{what} {reason.hint}{advice}".strip())


def some(names: Iterable[object], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    listed = list(map(str, names))
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def by_document(instances: Sequence[Instance]) -> dict[Document, list[int]]:
    """(task, document) -> the indices of the document's instances."""
    documents: dict[Document, list[int]] = defaultdict(list)
    for i, instance in enumerate(instances):
        # A request that was not made by lm-eval may have no document number. It is then a document
        # by itself.
        document = -1 - i if instance.doc_id is None else instance.doc_id
        documents[instance.task_name, document].append(i)
    return documents
