"""The parts of a few-shot prompt, recorded where lm-eval joins them.

lm-eval gives a model only the joined string. Inside `recording`, its
`ConfigurableTask.fewshot_context` therefore returns a `FewShotPrompt`, a string that also gives its
parts. The parts are never guessed from the text: a mark is put before every turn that
`build_qa_turn` makes, and the marks are found again in the joined prompt. So the code that joins
the turns (concatenation, `multiple_input_context`, a chat template) need not be copied here.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import Template
from lm_eval import utils
from lm_eval.api.utils import Message

from lm_eval_icl.errors import InputError
from lm_eval_icl.prompts.prompt import Demonstration, FewShotPrompt

# The mark that is put before every turn while lm-eval joins the turns, and is removed afterwards: a
# code point of Unicode's private use area. If a document contains it, there are more marks than
# turns, and the prompt is left without parts instead of being divided at the wrong place.
_MARK = "\U000f1c1e"
# The mark before and after the answer of a demonstration.
_ANSWER = "\U000f1c20"
_MARKS = re.compile(f"[{_MARK}{_ANSWER}]")


def structure_error(task_name: str | None) -> InputError:
    """The error for a prompt whose parts are not known."""
    return InputError(
        f"task {task_name!r}: a request does not say which parts of its prompt are demonstrations. "
        "Call lm_eval.evaluate, or build requests inside lm_eval_icl.harness.prompts.recording(). "
        "A task whose own class builds its prompts runs under --model hf only."
    )


# Whether prompts are recorded.
_recording: ContextVar[bool] = ContextVar("recording", default=False)
# The number of turns so far in the prompt that is being built; None outside of recorded prompts.
_turns: ContextVar[int | None] = ContextVar("turns", default=None)
# The document whose prompt is being built, or was built last.
_document: ContextVar[dict[str, Any]] = ContextVar("document")
# Reading a signature takes longer than dividing a prompt, and thousands of prompts come from one
# function.
_signature = functools.cache(inspect.signature)


@contextmanager
def recording() -> Iterator[None]:
    """Inside this context manager, lm-eval's tasks build `FewShotPrompt`s. `lm_eval.evaluate`
    enters it for this package's models."""
    from lm_eval_icl.harness import patches

    patches.install()
    token = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(token)


def current_document() -> dict[str, Any]:
    """The document whose prompt is being built, for samplers, which lm-eval does not tell it."""
    return _document.get()


def marked_turn(
    original: Callable[..., list[Message]], task: Any, *args: Any, **kwargs: Any
) -> list[Message]:
    """Wrapper of `ConfigurableTask.build_qa_turn`: put a mark before the turn, and two around its
    answer."""
    messages = original(task, *args, **kwargs)
    turns = _turns.get()
    if turns is not None:
        _turns.set(turns + 1)
        messages[0].content = _MARK + messages[0].content
        if kwargs.get("a") not in (None, ""):
            content = messages[1].content
            # The prefix of generated texts stands before the answer. Templates may strip blanks.
            answer = content.removeprefix(kwargs.get("gen_prefix") or "")
            if inner := answer.strip():
                marked = answer.replace(inner, f"{_ANSWER}{inner}{_ANSWER}", 1)
                messages[1].content = content.removesuffix(answer) + marked
    return messages


def with_parts(
    original: Callable[..., str | list[str]], task: Any, *args: Any, **kwargs: Any
) -> str | list[str]:
    """Wrapper of `ConfigurableTask.fewshot_context`: inside `recording`, return the prompt as a
    `FewShotPrompt`. A sampler may ask for the document (`current_document`)."""
    call = _signature(original).bind(task, *args, **kwargs)
    _document.set(call.arguments["doc"])
    if not _recording.get():
        return original(task, *args, **kwargs)
    if call.arguments.get("chat_template") is not None:
        call.arguments["chat_template"] = functools.partial(
            _render, call.arguments["chat_template"]
        )
    token = _turns.set(0)
    try:
        joined = original(*call.args, **call.kwargs)
        turns = _turns.get() or 0
    finally:
        _turns.reset(token)
    if isinstance(joined, list):  # one prompt for each option, all with the same demonstrations
        return [_with_parts(text, turns - len(joined) + 1) for text in joined]
    return _with_parts(joined, turns)


def compiled_once(original: Callable[..., str], template: str, doc: dict[str, Any]) -> str:
    """Wrapper of `apply_template`: inside `recording`, a Jinja template is compiled only once."""
    return _compiled(template).render(**doc) if _recording.get() else original(template, doc)


@functools.lru_cache  # the last 128 templates: the templates of a task are used together
def _compiled(template: str) -> Template:
    return utils.env.from_string(template)


def _with_parts(marked: str, turns: int) -> str:
    """The prompt without its marks: a `FewShotPrompt`, or a plain string if there is not one mark
    for each turn."""
    if not isinstance(
        marked, str
    ):  # the result of another model's chat template, which `_render` did not change
        return marked
    prefix, *parts = marked.split(_MARK)
    if not parts or len(parts) != turns:
        return _MARKS.sub("", marked)
    demonstrations = [_with_answer(part) for part in parts[:-1]]
    return FewShotPrompt(_MARKS.sub("", prefix), demonstrations, _MARKS.sub("", parts[-1]))


def _with_answer(marked: str) -> str:
    """A demonstration without the marks around its answer. The blanks before the answer belong to
    it, as to the options that lm-eval scores."""
    pieces = marked.split(_ANSWER)
    if len(pieces) != 3:
        return "".join(pieces)
    before, answer, end = pieces
    query = before.rstrip()
    return Demonstration(query, before[len(query) :] + answer, end)


def _render(
    chat_template: Callable[..., str], messages: list[dict[str, str]], **kwargs: Any
) -> str:
    """Apply a chat template to marked messages. The result has no marks if marks would change the rest of the text."""

    def rendered(change: Callable[[str], str]) -> str:
        return chat_template([{**m, "content": change(m["content"])} for m in messages], **kwargs)

    plain = rendered(lambda content: _MARKS.sub("", content))
    if not isinstance(plain, str):  # some other models of lm-eval return messages
        return plain

    # Templates often strip a message, so the mark is moved after the blanks at the beginning of the message.
    def moved(content: str) -> str:
        return re.sub(rf"^{_MARK}(\s+)", rf"\1{_MARK}", content)

    # If a template does not take the marks around answers, the parts of the prompt are still found.
    for change in (moved, lambda content: moved(content.replace(_ANSWER, ""))):
        marked = rendered(change)
        if _MARKS.sub("", marked) == plain:
            return marked
    return plain
