"""The parts of a few-shot prompt, recorded where lm-eval joins them.

A prompt is `prefix | demonstration 1 | ... | demonstration n | query`. lm-eval hands a model the joined
string alone, so `record_prompts` lets `ConfigurableTask.fewshot_context` return a `FewShotPrompt`, a
string that knows where its parts begin. The parts are never guessed from the text.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from lm_eval.api.task import ConfigurableTask
from lm_eval.api.utils import Message

from lm_eval_icl.errors import InputError

# Stands before every turn while lm-eval joins the turns, and is taken out again: a code point that
# Unicode leaves to private use. A document that holds it itself makes the count of turns wrong, and the
# prompt is then left without structure rather than cut in the wrong place.
_MARK = "\U000f1c1e"


class FewShotPrompt(str):
    """A prompt, equal to the string that lm-eval made, which knows its parts.

    Attributes:
        prefix: what precedes the first demonstration: task description, system text, a chat template's
            opening. A chat template's header of a turn ("<|user|>") stands at the end of the part
            before the turn, so that every demonstration ends as the prefix does.
        demonstrations: each with its answer and the delimiter that follows it.
        query: the document to answer, up to where the answer begins.
    """

    prefix: str
    demonstrations: tuple[str, ...]
    query: str

    def __new__(cls, prefix: str, demonstrations: Sequence[str], query: str) -> FewShotPrompt:
        self = super().__new__(cls, prefix + "".join(demonstrations) + query)
        self.prefix, self.demonstrations, self.query = prefix, tuple(demonstrations), query
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # Pickled (lm-eval's --cache_requests, results gathered from several processes) it is a plain string.
        return str, (str(self),)


def structure_error(task_name: str | None) -> InputError:
    """The error for a prompt whose parts are not known."""
    return InputError(
        f"lm-eval-icl: task {task_name!r}: a prompt arrived without its structure (which part is a "
        "demonstration, which the query), and it is never guessed. If it was read from lm-eval's request "
        "cache, run without --cache_requests (or with --cache_requests refresh); if it was built before the "
        "model was created, create the model first; if the task's own class builds its prompts, only "
        "`--model hf` can run it."
    )


def record_prompts() -> None:
    """Make lm-eval's `ConfigurableTask` return `FewShotPrompt`s. Doing it twice changes nothing.

    Turns are marked where `build_qa_turn` makes them, and the marks are read back from the joined prompt,
    so that whatever joins the turns in between (concatenation, `multiple_input_context`, a chat template)
    needs no copy here.
    """
    for name, wrapper in (
        ("build_qa_turn", _build_qa_turn),
        ("fewshot_context", _fewshot_context),
        # And what lm-eval itself fails on, far from where it was asked for, is refused in one line.
        ("download", _download),
        ("__init__", _init),
        ("build_all_requests", _build_all_requests),
    ):
        original = getattr(ConfigurableTask, name)
        if getattr(original, "wrapper", None) is not wrapper:
            setattr(ConfigurableTask, name, _wrapped(original, wrapper))


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: ConfigurableTask, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    method.wrapper = wrapper  # type: ignore[attr-defined]
    return method


# How many turns the fewshot_context that runs now has built; None outside it, where no turn is marked.
_turns: ContextVar[int | None] = ContextVar("turns", default=None)


def _build_qa_turn(original: Callable[..., list[Message]], task: Any, *args: Any, **kwargs: Any) -> list[Message]:
    messages = original(task, *args, **kwargs)
    turns = _turns.get()
    if turns is not None:
        _turns.set(turns + 1)
        messages[0].content = _MARK + messages[0].content
    return messages


def _fewshot_context(original: Callable[..., str | list[str]], *args: Any, **kwargs: Any) -> str | list[str]:
    call = inspect.signature(original).bind(*args, **kwargs)
    if call.arguments.get("chat_template") is not None:
        call.arguments["chat_template"] = functools.partial(_render, call.arguments["chat_template"])
    token = _turns.set(0)
    try:
        joined = original(*call.args, **call.kwargs)
        turns = _turns.get() or 0
    except (AssertionError, ValueError) as error:
        _check_shots(call.arguments["self"], call.arguments["num_fewshot"], error)
        raise
    finally:
        _turns.reset(token)
    if isinstance(joined, list):  # one prompt an option, all with the same demonstrations
        return [_with_parts(text, turns - len(joined) + 1) for text in joined]
    return _with_parts(joined, turns)


def _with_parts(marked: str, turns: int) -> str:
    """The prompt without its marks: with its parts, or a plain string where the marks do not tell them."""
    if not isinstance(marked, str):  # a chat template of another model's, which `_render` left alone
        return marked
    prefix, *parts = marked.split(_MARK)
    if not parts or len(parts) != turns:
        return prefix + "".join(parts)
    return FewShotPrompt(prefix, parts[:-1], parts[-1])


def _render(chat_template: Callable[..., str], messages: list[dict[str, str]], **kwargs: Any) -> str:
    """Apply a chat template to marked messages; without marks where they would change what it makes."""
    plain = chat_template([{**m, "content": m["content"].replace(_MARK, "")} for m in messages], **kwargs)
    if not isinstance(plain, str):  # what some other models of lm-eval take instead
        return plain
    # Templates often strip a message, so a mark stands behind the blanks that a message begins with.
    moved = [{**m, "content": re.sub(rf"^{_MARK}(\s+)", rf"\1{_MARK}", m["content"])} for m in messages]
    marked = chat_template(moved, **kwargs)
    return marked if marked.replace(_MARK, "") == plain else plain


def _download(original: Callable[..., None], task: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(task, *args, **kwargs)
    except (FileNotFoundError, ConnectionError, RuntimeError) as error:
        if task.DATASET_PATH is None:  # the task's own loader failed, and knows why
            raise
        raise InputError(
            f"lm-eval-icl: task {task.config.task!r}: dataset {task.DATASET_PATH!r}"
            f"{f' ({task.DATASET_NAME})' if task.DATASET_NAME else ''} could not be loaded "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}). "
            "Check the network and HF_HUB_OFFLINE, or put a copy into a folder of that name "
            f"(./{task.DATASET_PATH}) and start the command beside it."
        ) from error


def _init(original: Callable[..., None], task: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(task, *args, **kwargs)
    except Exception as error:
        if why := _unusable(task):
            raise InputError(f"lm-eval-icl: task {task.config.task!r}: {why}.") from error
        raise


def _unusable(task: Any) -> str:
    """Why lm-eval could not make a task of its documents, where it tried its first one; empty if for another reason."""
    documents = getattr(task, "task_docs", None)
    if documents is None:
        return ""
    if len(documents) == 0:
        split = "test" if task.has_test_docs() else "validation"
        return f"no documents to evaluate: its {split} split is empty, or process_docs leaves none"
    if task.config.doc_to_choice is not None and "" in task.doc_to_choice(documents[0]):
        return "an option of its first document is empty, so there is nothing to score: check doc_to_choice"
    return ""


def _build_all_requests(original: Callable[..., None], task: Any, **kwargs: Any) -> None:
    limit, shots = kwargs.get("limit"), task.config.num_fewshot
    if limit is not None and limit < 1:
        raise InputError(f"lm-eval-icl: task {task.config.task!r}: --limit leaves no documents: it must be above 0.")
    if shots is not None and shots < 0:
        raise InputError(f"lm-eval-icl: task {task.config.task!r}: num_fewshot={shots}: must be 0 or more.")
    original(task, **kwargs)


def _check_shots(task: Any, shots: int, error: Exception) -> None:
    """Whether more demonstrations were asked for than there are: the error of a sampler says neither."""
    there = len(list(task.fewshot_docs())) if shots else 0
    if shots and shots >= there:
        raise InputError(
            f"lm-eval-icl: task {task.config.task!r}: num_fewshot={shots}: its few-shot split has {there} documents "
            "(and none may be its own demonstration): lower --num_fewshot."
        ) from error
