"""lm-eval's response cache (`--use_cache`) for our models: a run that was stopped goes on where it was.

lm-eval's own pickles responses, so that a file from elsewhere can run code; finds them by the prompt's text alone, so
that two methods read each other's numbers; and writes from a thread of its own, which tells of a full disk too late.
`ResumableLM` takes its place for our models, and for them alone: JSON, kept by run and by the prompt's parts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CacheHook, CachingLM
from lm_eval.models.utils import normalize_gen_kwargs

from lm_eval_icl.errors import InputError
from lm_eval_icl.prompts import FewShotPrompt

# A child of lm-eval's logger, for its handler and its level.
log = logging.getLogger("lm_eval.icl")

# How many seconds of finished work may wait to be written: a write waits for the disk, which a pass need not.
SECONDS = 1.0
# How many seconds to wait for another process that writes.
_PATIENCE = 60.0
# The key of what the responses depend on; those of responses are digests.
_RUN = "run"
_CREATE = "CREATE TABLE lm_eval_icl (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL)"


class Responses:
    """Responses in a file, by key: an SQLite database of JSON texts, each checked when the file is opened.

    Responses of one forward pass are stored together (see `finished`). What a resumed run finds missing is then
    made of whole passes, it runs the same ones again, and its numbers are those of an undisturbed run to the bit.

    Args:
        path: the file; made if there is none.
        run: what the responses depend on, JSON values by name.

    Raises:
        InputError: another run wrote the file (the line names what differs), or it cannot be read or written.
    """

    def __init__(self, path: str, run: dict[str, Any]) -> None:
        self.path = path
        run = json.loads(json.dumps(run, default=str))
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"lm-eval-icl: the cache {path} cannot be made: {error}.") from error
        why = "Give another path to --use_cache, or remove that file."
        with _database(path, "cannot be opened", why, create=True) as database:
            # In one transaction: of two runs that begin at once, one finds what the other has written.
            # New is what has no bytes: a file with a damaged beginning may look as if there were no table in it.
            new = Path(path).stat().st_size == 0
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if new:
                database.execute(_CREATE)
                _write(database, {_RUN: json.dumps(run)})
            elif tables and "lm_eval_icl" not in tables:
                raise InputError(
                    f"lm-eval-icl: the cache {path} was written by another model or an older lm-eval-icl: give another "
                    "path to --use_cache."
                )
            self._known = _read(database)
        _check(path, json.loads(self._known.pop(_RUN)), run)
        self._pass: dict[str, str] = {}  # of the forward pass that runs
        self._unsaved: dict[str, str] = {}  # of those before it
        self._saved = time.monotonic()
        # When the run ends, whatever ends it but a kill.
        weakref.finalize(self, _save_at_last, path, self._unsaved)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return _decode(self._known[key])

    def __setitem__(self, key: str, response: Any) -> None:
        if key not in self._known:
            self._known[key] = self._pass[key] = _encode(response)

    def finished(self) -> None:
        """A forward pass is over: what was set since the last one is to be kept, or lost, together."""
        self._unsaved |= self._pass
        self._pass.clear()
        if time.monotonic() - self._saved >= SECONDS:
            self.save()

    def save(self) -> None:
        """Write what is finished."""
        _save(self.path, self._unsaved)
        self._saved = time.monotonic()


class _Hook(CacheHook):
    """Where a model's responses go as they come."""

    def __init__(self, responses: Responses) -> None:
        super().__init__(None)
        self.responses = responses

    def add_partial(self, attr: str, req: Iterable[Any], res: Any) -> None:
        args = tuple(req)
        if not _sampled(attr, args):
            self.responses[_key(attr, args)] = res


def finished(hook: CacheHook) -> None:
    """Tell a cache, if there is one, that a forward pass is over (`Responses.finished`)."""
    if isinstance(hook, _Hook):
        hook.responses.finished()


class ResumableLM(CachingLM):
    """lm-eval's `CachingLM` over `Responses`.

    Args:
        lm: a model with `identity()`: what its responses depend on beside what was asked; and `asked(kind, requests)`:
            that, request by request.
        cache_db: the file.
    """

    def __init__(self, lm: Any, cache_db: str) -> None:
        self.lm, self.cache_db = lm, cache_db
        self.responses = Responses(cache_db, lm.identity())
        lm.set_cache_hook(_Hook(self.responses))

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return self._resume("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return self._resume("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return self._resume("generate_until", requests)

    def _resume(self, kind: str, requests: list[Instance]) -> list[Any]:
        """Responses in order, the stored ones from the file and the others from the model."""
        asked = self.lm.asked(kind, requests)
        keys = ["" if _sampled(kind, args) else _key(kind, args) for args in asked]
        stored = {key: self.responses[key] for key in keys if key in self.responses}
        missing = [i for i, key in enumerate(keys) if key not in stored]
        log.info("%s: %d of %d responses are in %s", kind, len(keys) - len(missing), len(keys), self.cache_db)
        computed = {}
        if missing:
            try:
                responses = getattr(self.lm, kind)([requests[i] for i in missing])
                self.responses.finished()
            finally:
                self.responses.save()
            computed = dict(zip(missing, responses, strict=True))
        return [computed[i] if i in computed else stored[key] for i, key in enumerate(keys)]


def resume(models: type[LM]) -> None:
    """Let whoever makes a `CachingLM` over one of these models get a `ResumableLM`. Twice changes nothing."""

    def new(cls: type[CachingLM], lm: Any = None, *_: Any, **__: Any) -> CachingLM:
        return object.__new__(ResumableLM if isinstance(lm, models) else cls)

    CachingLM.__new__ = new


def _sampled(kind: str, args: tuple[Any, ...]) -> bool:
    """Whether a response is drawn at random: stored, all repeats of it would be the same."""
    return kind == "generate_until" and bool(normalize_gen_kwargs(args[1])["do_sample"])


def _key(kind: str, args: tuple[Any, ...]) -> str:
    """What a response is found by: the prompt with its parts, for the same text may be cut in several ways."""
    prompt, *rest = args
    if isinstance(prompt, FewShotPrompt):
        prompt = [prompt.prefix, prompt.demonstrations, prompt.query]
    return hashlib.sha256(json.dumps([kind, prompt, *rest], sort_keys=True, default=str).encode()).hexdigest()


def _encode(response: Any) -> str:
    """A response as JSON, in which Python writes floats so that they read back to the bit."""
    if isinstance(response, (tuple, list)):
        logprob, greedy = response
        response = [float(logprob), bool(greedy)]
    return json.dumps(response)


def _decode(text: str) -> Any:
    response = json.loads(text)
    return tuple(response) if isinstance(response, list) else response


def _crc(key: str, value: str) -> int:
    return zlib.crc32(f"{key} {value}".encode())


@contextmanager
def _database(path: str, failure: str, advice: str, create: bool = False) -> Iterator[sqlite3.Connection]:
    """A transaction that alone may write. Whatever ends the process in it, the file is as before it.

    Opened for each: nothing is held open that another process, or a fork of this one, could stumble on.
    SQLite's rollback journal and not its write-ahead log, which network file systems do not bear.
    """
    try:
        uri = f"{Path(path).resolve().as_uri()}?mode={'rwc' if create else 'rw'}"
        with closing(sqlite3.connect(uri, uri=True, timeout=_PATIENCE, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")
    except sqlite3.Error as error:
        raise InputError(
            f"lm-eval-icl: the cache {path} {failure}: {' '.join(str(error).split())}. {advice}"
        ) from error


def _read(database: sqlite3.Connection) -> dict[str, str]:
    """All entries, if every one of them, and the file, is whole."""
    (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if state != "ok":
        raise sqlite3.DatabaseError(f"the file is damaged ({state})")
    entries = {}
    for key, value, crc in database.execute("SELECT key, value, crc FROM lm_eval_icl"):
        if not isinstance(key, str) or not isinstance(value, str) or crc != _crc(key, value):
            raise sqlite3.DatabaseError("the file is damaged (an entry is not what was written)")
        entries[key] = value
    if _RUN not in entries:
        raise sqlite3.DatabaseError("the file is damaged (it does not say which run it belongs to)")
    return entries


def _write(database: sqlite3.Connection, entries: dict[str, str]) -> None:
    rows = [(key, value, _crc(key, value)) for key, value in entries.items()]
    database.executemany("INSERT OR IGNORE INTO lm_eval_icl VALUES (?, ?, ?)", rows)


def _save(path: str, unsaved: dict[str, str]) -> None:
    """Write responses and forget them."""
    if unsaved:
        why = "What was stored before stays there: when this is mended, the same command goes on from it."
        with _database(path, "cannot be written", why) as database:
            _write(database, unsaved)
        unsaved.clear()


def _save_at_last(path: str, unsaved: dict[str, str]) -> None:
    with suppress(InputError):  # was said before
        _save(path, unsaved)


def _check(path: str, writer: dict[str, Any], run: dict[str, Any]) -> None:
    """Refuse a cache that another run wrote."""
    differs = [
        f"{name}={writer.get(name)} there, {run.get(name)} here"
        for name in run | writer
        if writer.get(name) != run.get(name)
    ]
    if differs:
        more = f"; and {len(differs) - 4} more" if len(differs) > 4 else ""
        raise InputError(
            f"lm-eval-icl: the cache {path} was written by another run ({'; '.join(differs[:4])}{more}): give another "
            "path to --use_cache."
        )
