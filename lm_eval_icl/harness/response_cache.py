"""The response cache (`--use_cache`) of this package's models, with which a stopped run is resumed.

lm-eval's own cache pickles responses, so a file from elsewhere can run code, and it finds them by
the prompt's text, so two methods would read each other's numbers. Here, a file of JSON lines
belongs to one identity of a model.
"""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.models.utils import normalize_gen_kwargs

from lm_eval_icl.errors import CannotWrite, InputError, log, writing
from lm_eval_icl.files import as_json, digest
from lm_eval_icl.prompts.encoded import EncodedPrompt
from lm_eval_icl.prompts.prompt import FewShotPrompt

# How the first line of a file begins.
_FIRST = b'["run", '


class Responses(dict[str, Any]):
    """Responses by key. A response is written to the file, as one line, as soon as it is set. The
    first line of the file says what the responses depend on. A line that a killed run left
    unfinished is skipped, and computed again.

    Raises:
        InputError: another run wrote the file (the message names what differs), or it cannot be
            read.
    """

    def __init__(self, path: str, run: dict[str, Any]) -> None:
        self.path = path
        run = json.loads(json.dumps(run, default=str))
        another = "give another path to --use_cache"
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = file.read_bytes().split(b"\n") if file.is_file() else [b""]
            # A file that ends within its first line holds nothing yet, and is begun again.
            is_new = len(lines) == 1 and _FIRST.startswith(lines[0][: len(_FIRST)])
            # Open as long as the run.
            self._file = file.open("w" if is_new else "a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(
                f"the cache {path} cannot be opened: {error}. Correct that, or {another}."
            ) from error
        super().__init__(entry for line in lines if (entry := _entry(line)) is not None)
        writer = run if is_new else self.pop("run", None)
        if not isinstance(writer, dict):
            raise InputError(
                f"the cache {path} was not written by this version of lm-eval-icl: {another}."
            )
        names = [name for name in run | writer if writer.get(name) != run.get(name)]
        if names:
            differs = "; ".join(
                f"{name}={writer.get(name)} there, {run.get(name)} here" for name in names[:4]
            )
            raise InputError(f"the cache {path} was written by another run ({differs}): {another}.")
        if is_new:
            self._write(json.dumps(["run", run]))
        elif lines[-1]:
            self._write("")  # ends an unfinished line

    def __setitem__(self, key: str, response: Any) -> None:
        if key not in self:
            super().__setitem__(key, response)
            self._write(json.dumps([key, response]))

    def _write(self, line: str) -> None:
        with writing(f"the cache {self.path}", CannotWrite):
            self._file.write(f"{line}\n")


def _entry(line: bytes) -> tuple[str, Any] | None:
    """The key and the response in a line of the file; None if the line is unfinished."""
    try:
        key, value = json.loads(line)
    except (ValueError, TypeError):
        return None
    return str(key), tuple(value) if isinstance(value, list) else value


class _Hook(CacheHook):
    """Stores the responses that a model computes, except texts sampled at random, whose repeats
    would all be equal."""

    def add_partial(self, attr: str, req: Iterable[Any], res: Any) -> None:
        if key := response_key(attr, tuple(req)):
            self.dbdict[key] = res


class ResumableLM(CachingLM):
    """lm-eval's `CachingLM` for a model of this package, with responses stored in `Responses`."""

    def __init__(self, lm: Any, cache_db: str) -> None:
        self.lm = lm
        self.cache_db = cache_db
        self.dbdict = Responses(cache_db, lm.identity())
        lm.set_cache_hook(_Hook(self))

    def __getattr__(self, attr: str) -> Any:
        is_cached = attr in ("loglikelihood", "loglikelihood_rolling", "generate_until")
        return partial(self._resume, attr) if is_cached else getattr(self.lm, attr)

    def _resume(self, kind: str, requests: list[Instance]) -> list[Any]:
        """The responses in the order of the requests. Responses that are not in the file come from
        the model."""
        run = self.lm.run
        run.check()
        if kind == "loglikelihood_rolling":
            arguments = [instance.args for instance in requests]
        else:
            arguments = [request.key for request in run.requests(requests)]
        keys = [response_key(kind, args) for args in arguments]
        missing = [i for i, key in enumerate(keys) if key not in self.dbdict]
        log.info(
            "%s: %d of %d responses are in %s",
            kind,
            len(keys) - len(missing),
            len(keys),
            self.cache_db,
        )
        self.lm.responses_read += len(keys) - len(missing)
        responses = getattr(self.lm, kind)([requests[i] for i in missing]) if missing else []
        computed = dict(zip(missing, responses, strict=True))
        run.release(requests)
        return [computed[i] if i in computed else self.dbdict[key] for i, key in enumerate(keys)]


def resumable(theirs: CachingLM) -> ResumableLM:
    """A cache in PATH.jsonl, in place of the one that lm-eval has opened in PATH.db for a model of
    ours. PATH.db is not read, and removed if it is empty."""
    is_empty = len(theirs.dbdict) == 0
    theirs.dbdict.close()
    path = Path(theirs.cache_db)
    if is_empty:
        path.unlink(missing_ok=True)
    return ResumableLM(theirs.lm, str(path.with_suffix(".jsonl")))


def response_key(kind: str, args: tuple[Any, ...]) -> str:
    """The key of a response: a digest of the request with the prompt's parts, since equal texts may
    have other parts. Empty for a text that is sampled at random."""
    prompt, *rest = args
    if kind == "generate_until" and normalize_gen_kwargs(rest[0])["do_sample"]:
        return ""
    if isinstance(prompt, EncodedPrompt):
        context = prompt.tokens.context
        prompt = [prompt.ids, context.lengths, context.answers]
        rest = [getattr(part, "ids", part) for part in rest]
    elif isinstance(prompt, FewShotPrompt):
        # Methods that learn depend on where answers begin.
        answers = [getattr(part, "answer", None) for part in prompt.demonstrations]
        prompt = [prompt.prefix, prompt.demonstrations, answers, prompt.query]
    return digest(as_json([kind, prompt, *rest]))
