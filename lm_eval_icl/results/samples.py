"""What a run answered, document by document, from the samples that lm-eval writes with `--log_samples`."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_icl.results.records import Answers

# A line of a samples file repeats the whole prompt for every option, so it may have some MB.
LINE_BYTES = 64 * 2**20
DOCUMENTS = 1_000_000


class Unusable(ValueError):
    """Something in a file that cannot be used; the message is a sentence that says why."""


@dataclass(frozen=True)
class Asked:
    """What a task's results say about its samples.

    Attributes:
        metric: the metric whose values are read.
        filter: only samples of this filter are read.
        options: the requests of a document are options, of which the one with the highest log-likelihood is predicted.
        decided: the task decides otherwise, and its documents say which option it predicts (MetaICL's).
        unconditional: there may be a second request for each option, without the prompt (`acc_mutual_info`).
        shots: demonstrations a prompt.
        front: texts before the demonstrations, in this order: the system instruction, a delimiter, the description.
        delimiter: between demonstrations.
    """

    metric: str
    filter: str
    options: bool
    decided: bool
    unconditional: bool
    shots: int
    front: tuple[str, ...]
    delimiter: str


@dataclass(frozen=True)
class _Row:
    """A sample without its texts."""

    item: tuple[float, ...] | tuple[str, ...]
    document: str
    prompt: str
    target: str
    demonstrations: bytes
    prediction: int | None
    options: int
    gold: int | None


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a file, one at a time: all of them together may have some GB.

    Raises:
        Unusable: the file cannot be read, or a line is no sample.
    """
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > LINE_BYTES:
                    raise Unusable(f"line {number} of {path.name} has more than {LINE_BYTES:,} bytes")
                if line.strip():
                    yield _sample(line, f"line {number} of {path.name}")
    except OSError as error:
        raise Unusable(f"{path.name} cannot be read ({error.strerror})") from error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON (`object_pairs_hook`).

    Raises:
        Unusable: a key is there twice. Python would take the last value, other readers the first.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise Unusable(f"has the key {twice!r} twice in one object")
    return values


def _sample(line: bytes, where: str) -> dict[str, Any]:
    try:
        sample = json.loads(line, object_pairs_hook=unique_keys)
    except Unusable as error:
        raise Unusable(f"{where} {error}") from None
    except RecursionError:
        raise Unusable(f"{where} is nested too deeply") from None
    except ValueError:
        raise Unusable(f"{where} is cut off or damaged") from None
    if not isinstance(sample, dict):
        raise Unusable(f"{where} is no sample of lm-eval")
    return sample


def read_answers(samples: Iterable[Mapping[str, Any]], asked: Asked) -> Answers:
    """The answers of a task.

    Raises:
        Unusable: a sample has not what is needed, or a document is there twice.
    """
    rows: dict[int, _Row] = {}
    split = _Demonstrations(asked)
    for sample in samples:
        if sample.get("filter", asked.filter) != asked.filter:
            continue
        number = sample.get("doc_id")
        if type(number) is not int or not 0 <= number < 2**53:
            raise Unusable("a sample has no document id")
        if number in rows:
            raise Unusable(f"document {number} is in the samples twice")
        if len(rows) == DOCUMENTS:
            raise Unusable(f"the samples are of more than {DOCUMENTS:,} documents")
        try:
            rows[number] = _row(sample, asked, split)
        except RecursionError:
            raise Unusable(f"the sample of document {number} is nested too deeply") from None
    if not rows:
        raise Unusable(f"the samples file has no sample of the filter {asked.filter!r}")
    numbers = sorted(rows)
    ordered = [rows[number] for number in numbers]
    if len({len(row.item) for row in ordered}) > 1:
        raise Unusable(f"{asked.metric} is a pair for some samples and a number for others")
    items = _numbered([row.item for row in ordered])
    known = asked.options and all(row.prediction is not None for row in ordered)
    pairs = list(zip(map(str, numbers), ordered, strict=True))
    return Answers(
        doc_ids=np.array(numbers),
        documents=digest(text for number, row in pairs for text in (number, row.document, row.target)),
        prompts=digest(text for number, row in pairs for text in (number, row.document, row.prompt, row.target)),
        demonstrations=digest(row.demonstrations.hex() for row in ordered) if asked.shots else None,
        items=items[:, 0] if items.shape[1] == 1 else items,
        predictions=np.array([row.prediction for row in ordered]) if known else None,
        chance=float(np.mean([1 / row.options for row in ordered])) if known else None,
        golds=np.array([row.gold for row in ordered]) if known and None not in [row.gold for row in ordered] else None,
    )


def document_rows(samples: Iterable[Mapping[str, Any]], asked: Asked) -> Iterator[dict[str, Any]]:
    """The samples of a task as rows of a table, one a document and filter, with every metric that they have.

    Args:
        asked: of the metric that stands for the task; here, samples of all filters are read.

    Raises:
        Unusable: a sample has not what is needed.
    """
    for sample in samples:
        number = sample.get("doc_id")
        if type(number) is not int:
            raise Unusable("a sample has no document id")
        names = sample.get("metrics")  # older versions of lm-eval do not list them
        metrics = [name for name in names if name in sample] if isinstance(names, list) else [asked.metric]
        prediction: int | str | None = (_decision(sample.get("doc")) if asked.decided else _likeliest(sample, asked))[0]
        texts = sample.get("filtered_resps")
        if prediction is None and isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], str):
            (prediction,) = texts
        items = {name: _item(sample.get(name), name, number) for name in metrics}
        yield {
            "filter": str(sample.get("filter", asked.filter)),
            "doc_id": number,
            "document": _document_hash(sample, asked),
            "target": sample.get("target"),
            "prediction": prediction,
            **{name: item[0] if len(item) == 1 else item for name, item in items.items()},
        }


def digest(texts: Iterable[str]) -> str:
    """A digest of several texts: each with its length, so that nothing moves from one to the next."""
    state = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        state.update(b"%d:%b" % (len(data), data))
    return state.hexdigest()[:32]


def _row(sample: Mapping[str, Any], asked: Asked, split: _Demonstrations) -> _Row:
    prompt = first_prompt(sample.get("arguments"))
    prediction, options = _decision(sample.get("doc")) if asked.decided else _likeliest(sample, asked)
    return _Row(
        item=_item(sample.get(asked.metric), asked.metric, sample["doc_id"]),
        document=_document_hash(sample, asked),
        prompt=_hash(sample, "prompt_hash", lambda: prompt),
        target=_hash(sample, "target_hash", lambda: str(sample.get("target"))),
        demonstrations=split.digest(prompt) if asked.shots else b"",
        prediction=prediction,
        options=options,
        gold=_gold(sample, options, asked.decided),
    )


def _decision(document: Any) -> tuple[int | None, int]:
    """The option that a document says was predicted, and how many there are; None if it says none."""
    said = document if isinstance(document, dict) else {}
    prediction, options = said.get("prediction"), said.get("options")
    if type(prediction) is int and isinstance(options, list) and 0 <= prediction < len(options):
        return prediction, len(options)
    return None, 0


def _gold(sample: Mapping[str, Any], options: int, decided: bool) -> int | None:
    """The option that is right: lm-eval writes its number, or else its text; None for neither, as for several."""
    target = str(sample.get("target"))
    if decided:
        said = sample["doc"]["options"] if options else []
        return said.index(target) if target in said else None
    if re.fullmatch("[0-9]{1,9}", target):
        return int(target) if int(target) < options else None
    requests = sample.get("arguments")
    requests = list(requests.values() if isinstance(requests, dict) else requests or [])[:options]
    texts = [_continuation(request) for request in requests]
    return texts.index(target.strip()) if texts.count(target.strip()) == 1 else None


def _continuation(request: Any) -> str | None:
    parts = list(request.values()) if isinstance(request, dict) else request
    text = parts[1] if isinstance(parts, list) and len(parts) > 1 else None
    return text.strip() if isinstance(text, str) else None


def _likeliest(sample: Mapping[str, Any], asked: Asked) -> tuple[int | None, int]:
    """The option with the highest log-likelihood, and how many there are; None if there are no options."""
    scores = _log_likelihoods(sample.get("filtered_resps"), asked) if asked.options else []
    return scores.index(max(scores)) if scores else None, len(scores)  # the first of equals, as lm-eval's `acc`


def _document_hash(sample: Mapping[str, Any], asked: Asked) -> str:
    """The same for all runs: where documents say what was predicted, lm-eval's hash is of that too."""
    if asked.decided and isinstance(document := sample.get("doc"), dict):
        text = json.dumps({name: value for name, value in document.items() if name != "prediction"}, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return _hash(sample, "doc_hash", lambda: json.dumps(sample.get("doc"), indent=2, ensure_ascii=False))


def _hash(sample: Mapping[str, Any], name: str, text: Callable[[], str]) -> str:
    """A hash that lm-eval has written, or else the same one made here."""
    written = sample.get(name)
    if isinstance(written, str) and written:
        return written
    return hashlib.sha256(text().encode("utf-8", "surrogatepass")).hexdigest()


def _numbered(items: Sequence[tuple[float, ...] | tuple[str, ...]]) -> np.ndarray:
    """The items as numbers: names of classes by their places among the right ones in the order of the alphabet, so that
    runs on the same documents agree; -1 for a class that is right nowhere."""
    if not any(isinstance(name, str) for item in items for name in item):
        return np.array(items)
    right = {name: place for place, name in enumerate(sorted({str(item[0]) for item in items}))}
    return np.array([[right.get(str(name), -1) for name in item] for item in items], dtype=float)


def _item(value: Any, metric: str, number: int) -> tuple[float, ...] | tuple[str, ...]:
    """What lm-eval aggregates of a document: a number, a pair of them, or the names of the right class and of the
    predicted one."""
    values = value if isinstance(value, list) and len(value) == 2 else [value]
    try:
        if all(isinstance(each, (int, float)) for each in values):  # a boolean is an integer, as for lm-eval
            return tuple(float(each) for each in values)
        if len(values) == 2 and all(isinstance(each, str) for each in values):
            return tuple(values)
    except OverflowError:
        pass
    raise Unusable(f"the sample of document {number} has no {metric} that is a number or a pair of them")


def first_prompt(arguments: Any) -> str:
    """The prompt of a document's first request, of which lm-eval's `prompt_hash` is; a chat's messages as JSON."""
    first = next(iter(arguments.values()), None) if isinstance(arguments, dict) else arguments
    while isinstance(first, (dict, list)) and first:  # {"arg_0": prompt}, before lm-eval 0.4.3 [[prompt, option], ...]
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    return first if isinstance(first, str) else json.dumps(first)


def _log_likelihoods(responses: Any, asked: Asked) -> list[float]:
    """Of the options; nothing if a response is no log-likelihood."""
    try:
        found = [float(response[0]) for response in responses]
    except (TypeError, ValueError, LookupError, OverflowError):
        return []
    return found[: len(found) // 2] if asked.unconditional else found


class _Demonstrations:
    """Digests of the demonstrations of prompts, whatever their order.

    A prompt without what is in front of the demonstrations is split at the delimiter; the last piece is the query. A
    delimiter inside of a demonstration or query makes more pieces, the same ones in any order. Where the pieces are not
    the demonstrations alone, two orders count as two sets: with a chat template, whose first and last pieces have its
    special tokens and whose turns may not be delimited, and with a description that differs between documents.
    """

    def __init__(self, asked: Asked) -> None:
        self.front, self.delimiter = asked.front, asked.delimiter
        self._last: tuple[str, bytes] = ("", b"")

    def digest(self, prompt: str) -> bytes:
        # Without a delimiter there are no pieces, and the whole prompt stands for its demonstrations.
        before = prompt[: prompt.rfind(self.delimiter)] if self.delimiter in prompt and self.delimiter else prompt
        if before != self._last[0] or not self._last[1]:  # most often, all documents of a task have the same
            self._last = before, self._digest(before)
        return self._last[1]

    def _digest(self, text: str) -> bytes:
        for front in self.front:
            text = text.removeprefix(front)
        pieces = sorted(text.split(self.delimiter)) if self.delimiter else [text]
        return bytes.fromhex(digest(pieces))
