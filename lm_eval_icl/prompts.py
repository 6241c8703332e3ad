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
from lm_eval_icl.wrapping import wrap

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
    wrap(ConfigurableTask, "build_qa_turn", _build_qa_turn)
    wrap(ConfigurableTask, "fewshot_context", _fewshot_context)


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
