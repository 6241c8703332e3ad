"""The response cache (`--use_cache`) of this package's models, from which a run that was stopped is resumed.

lm-eval's own cache pickles responses, so a file from elsewhere can run code; it finds responses by the prompt's text
alone, so two methods would read each other's numbers; and it writes in a separate thread, which reports a full disk too
late. `ResumableLM` replaces it for this package's models only. It stores JSON; a file belongs to one run, and responses
are found by the parts of their prompts.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.models.utils import normalize_gen_kwargs

from lm_eval_icl.errors import CannotWrite, InputError, log
from lm_eval_icl.prompts.encoded import EncodedPrompt
from lm_eval_icl.prompts.prompt import FewShotPrompt

# How many seconds may pass before finished responses are written. Not every forward pass should wait for the disk.
SECONDS = 1.0
# How many seconds to wait while another process is writing.
_PATIENCE = 60.0
# The key of the entry that says what the responses depend on; the keys of responses are digests.
_RUN = "run"
_CREATE = "CREATE TABLE lm_eval_icl (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL)"


class Responses:
    """Responses by key, in a file: an SQLite database of JSON texts, which are all checked when the file is opened.

    The responses of one forward pass are written together (see `finished`). The responses that are missing from the
    file are therefore those of whole passes. A resumed run repeats exactly these passes, and its results are those of
    an uninterrupted run, bit for bit.

    Args:
        path: the file, which is created if it does not exist.
        run: what the responses depend on, JSON values by name.

    Raises:
        InputError: another run wrote the file (the message names what differs), or it cannot be read or written.
    """

    def __init__(self, path: str, run: dict[str, Any]) -> None:
        self.path = path
        run = json.loads(json.dumps(run, default=str))
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"the cache {path} cannot be made: {error}.") from error
        why = "Give another path to --use_cache, or remove that file."
        with _database(path, "cannot be opened", why, create=True) as database:
            # In one transaction, so that of two runs that begin at the same time, one finds the other's entry. A file
            # is new only if it is empty: one with a damaged beginning may look as if it had no tables.
            new = Path(path).stat().st_size == 0
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if new:
                database.execute(_CREATE)
                _write(database, {_RUN: json.dumps(run)})
            elif tables and "lm_eval_icl" not in tables:
                raise InputError(
                    f"the cache {path} was written by another model or an older lm-eval-icl: give another "
                    "path to --use_cache."
                )
            self._known = _read(database)
        writer = json.loads(self._known.pop(_RUN))
        differs = [
            f"{name}={writer.get(name)} there, {run.get(name)} here"
            for name in run | writer
            if writer.get(name) != run.get(name)
        ]
        if differs:
            more = f"; and {len(differs) - 4} more" if len(differs) > 4 else ""
            raise InputError(
                f"the cache {path} was written by another run ({'; '.join(differs[:4])}{more}): give another "
                "path to --use_cache."
            )
        self._pass: dict[str, str] = {}  # responses of the present forward pass
        self._unsaved: dict[str, str] = {}  # responses of earlier passes that are not yet written
        self._saved = time.monotonic()
        # Writes the remaining responses when the run ends in any way, unless the process is killed.
        weakref.finalize(self, _save_at_last, path, self._unsaved)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        response = json.loads(self._known[key])
        return tuple(response) if isinstance(response, list) else response

    def __setitem__(self, key: str, response: Any) -> None:
        if key not in self._known:
            if isinstance(response, (tuple, list)):
                logprob, greedy = response
                response = [float(logprob), bool(greedy)]
            # Python writes floats so that they are read back exactly.
            self._known[key] = self._pass[key] = json.dumps(response)

    def finished(self) -> None:
        """Note the end of a forward pass. The responses that were set since the last call are written all or none."""
        self._unsaved |= self._pass
        self._pass.clear()
        if time.monotonic() - self._saved >= SECONDS:
            self.save()

    def save(self) -> None:
        """Write the responses of all finished passes.

        Raises:
            CannotWrite: the file cannot be written.
        """
        _save(self.path, self._unsaved)
        self._saved = time.monotonic()


class _Hook(CacheHook):
    """Stores the responses that a model computes, except random ones."""

    def __init__(self, responses: Responses) -> None:
        super().__init__(None)
        self.responses = responses

    def add_partial(self, attr: str, req: Iterable[Any], res: Any) -> None:
        args = tuple(req)
        if not _sampled(attr, args):
            self.responses[response_key(attr, args)] = res


def finished(hook: CacheHook) -> None:
    """Tell the cache, if there is one, that a forward pass has ended (`Responses.finished`)."""
    if isinstance(hook, _Hook):
        hook.responses.finished()


class ResumableLM(CachingLM):
    """lm-eval's `CachingLM`, with responses stored in `Responses`.

    Args:
        lm: a model of this package.
        cache_db: the path of the file.

    Raises:
        InputError: as for `Responses`, or the run cannot have a cache.
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
        """The responses in the order of the requests: stored ones from the file, the others from the model."""
        self.lm.run.check()
        if kind == "loglikelihood_rolling":
            arguments = [request.args for request in requests]
        else:
            arguments = [prepared.key for prepared in self.lm.run.requests(requests)]
        keys = ["" if _sampled(kind, args) else response_key(kind, args) for args in arguments]
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
        self.lm.run.release(requests)
        return [computed[i] if i in computed else stored[key] for i, key in enumerate(keys)]


def _sampled(kind: str, args: tuple[Any, ...]) -> bool:
    """Whether a response is sampled at random. Such a response is not stored, since all repeats would be the same."""
    return kind == "generate_until" and bool(normalize_gen_kwargs(args[1])["do_sample"])


def response_key(kind: str, args: tuple[Any, ...]) -> str:
    """The key of a response: a digest of the request with the prompt's parts, since equal texts may differ in parts."""
    prompt, *rest = args
    if isinstance(prompt, EncodedPrompt):
        prompt, rest = [prompt.ids, prompt.tokens.context.lengths], [getattr(part, "ids", part) for part in rest]
    elif isinstance(prompt, FewShotPrompt):
        prompt = [prompt.prefix, prompt.demonstrations, prompt.query]
    return hashlib.sha256(json.dumps([kind, prompt, *rest], sort_keys=True, default=str).encode()).hexdigest()


def _crc(key: str, value: str) -> int:
    return zlib.crc32(f"{key} {value}".encode())


@contextmanager
def _database(
    path: str, failure: str, advice: str, kind: type[InputError] = InputError, create: bool = False
) -> Iterator[sqlite3.Connection]:
    """A transaction during which no other process can write. If the process ends inside it, the file is unchanged.

    Every transaction opens the database anew, so that no open connection disturbs another process or a fork of this
    one. SQLite uses its rollback journal, since its write-ahead log does not work on network file systems.

    Raises:
        InputError: an SQLite error, with `failure` and `advice` in the message; of this kind.
    """
    try:
        uri = f"{Path(path).resolve().as_uri()}?mode={'rwc' if create else 'rw'}"
        with closing(sqlite3.connect(uri, uri=True, timeout=_PATIENCE, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")
    except sqlite3.Error as error:
        raise kind(f"the cache {path} {failure}: {' '.join(str(error).split())}. {advice}") from error


def _read(database: sqlite3.Connection) -> dict[str, str]:
    """All entries, after the file and every entry have been checked for damage."""
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
    """Write responses, and empty `unsaved`."""
    if unsaved:
        why = "What was stored before stays there: when this is mended, the same command goes on from it."
        with _database(path, "cannot be written", why, CannotWrite) as database:
            _write(database, unsaved)
        unsaved.clear()


def _save_at_last(path: str, unsaved: dict[str, str]) -> None:
    with suppress(InputError):  # an earlier attempt to write has raised it
        _save(path, unsaved)
