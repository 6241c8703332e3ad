"""What a run answered, document by document, from the samples that lm-eval writes with `--log_samples`."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from lm_eval_icl.results.form import DOCUMENTS, Sample, Unusable, parse, refusal
from lm_eval_icl.results.records import Answers

# A line of a samples file repeats the whole prompt for every option, so it may have some MB.
LINE_BYTES = 64 * 2**20


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


class _Row(NamedTuple):
    """A sample without its texts."""

    item: tuple[float, ...] | tuple[str, ...]
    document: str
    prompt: str
    target: str
    demonstrations: str
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
                where = f"line {number} of {path.name}"
                if len(line) > LINE_BYTES:
                    raise Unusable(f"{where} has more than {LINE_BYTES:,} bytes")
                if not line.strip():
                    continue
                try:
                    sample = parse(line)
                    Sample.model_validate(sample)
                except ValidationError as error:
                    raise Unusable(f"{where} is no sample of lm-eval ({refusal(error)})") from None
                except Unusable as error:
                    raise Unusable(f"{where} {error}") from None
                yield sample
    except OSError as error:
        raise Unusable(f"{path.name} cannot be read ({error.strerror})") from error


def read_answers(samples: Iterable[Mapping[str, Any]], asked: Sequence[Asked]) -> list[Answers | Unusable]:
    """The answers of a task, under several filters.

    Args:
        asked: of each filter; a sample that names no filter is of the first.

    Returns:
        For each, the answers, or why they cannot be used: a sample has not what is needed, or a document is there
        twice.
    """
    by_filter = {of_filter.filter: of_filter for of_filter in asked}
    rows: dict[str, dict[int, _Row]] = {name: {} for name in by_filter}
    answers: dict[str, Answers | Unusable] = {}
    for sample in samples:
        name = sample.get("filter", asked[0].filter)
        if name in by_filter and name not in answers:
            try:
                _add(rows[name], sample, by_filter[name])
            except Unusable as error:
                answers[name] = error
    for name in by_filter.keys() - answers.keys():
        try:
            answers[name] = _answers(rows[name], by_filter[name])
        except Unusable as error:
            answers[name] = error
    return [answers[name] for name in by_filter]


def _add(rows: dict[int, _Row], sample: Mapping[str, Any], asked: Asked) -> None:
    """Add a sample to the rows of its filter. Raises `Unusable` if it lacks something or its document is there."""
    number = sample["doc_id"]
    if number in rows:
        raise Unusable(f"document {number} is in the samples twice")
    if len(rows) == DOCUMENTS:
        raise Unusable(f"the samples are of more than {DOCUMENTS:,} documents")
    try:
        prompt = first_prompt(sample.get("arguments"))
        rows[number] = _Row(
            _item(sample.get(asked.metric), asked.metric, number),
            _document_hash(sample, asked),
            _hash(sample, "prompt_hash", lambda: prompt),
            _hash(sample, "target_hash", lambda: str(sample.get("target"))),
            _demonstrations(prompt, asked.front, asked.delimiter) if asked.shots else "",
            *_choice(sample, asked),
        )
    except RecursionError:
        raise Unusable(f"the sample of document {number} is nested too deeply") from None


def _answers(rows: dict[int, _Row], asked: Asked) -> Answers:
    """The samples of a filter as arrays. Raises `Unusable` if there are none, or they do not go together."""
    if not rows:
        raise Unusable(f"the samples file has no sample of the filter {asked.filter!r}")
    rows = dict(sorted(rows.items()))
    item, document, prompts, target, demonstrations, predictions, options, golds = zip(*rows.values(), strict=True)
    if len(set(map(len, item))) > 1:
        raise Unusable(f"{asked.metric} is a pair for some samples and a number for others")
    items, numbers = _numbered(item), list(map(str, rows))
    known = asked.options and None not in predictions
    return Answers(
        doc_ids=np.array(list(rows)),
        documents=digest(itertools.chain(*zip(numbers, document, target, strict=True))),
        prompts=digest(itertools.chain(*zip(numbers, document, prompts, target, strict=True))),
        demonstrations=digest(demonstrations) if asked.shots else None,
        items=items[:, 0] if items.shape[1] == 1 else items,
        predictions=np.array(predictions) if known else None,
        chance=float(np.mean([1 / count for count in options])) if known else None,
        golds=np.array(golds) if known and None not in golds else None,
    )


def document_rows(samples: Iterable[Mapping[str, Any]], asked: Asked) -> Iterator[dict[str, Any]]:
    """The samples of a task as rows of a table, one a document and filter, with every metric that they have.

    Args:
        asked: of the metric that stands for the task; here, samples of all filters are read.

    Raises:
        Unusable: a sample has not what is needed.
    """
    for sample in samples:
        number, names = sample["doc_id"], sample.get("metrics")
        metrics = [asked.metric] if names is None else [name for name in names if name in sample]
        prediction: int | str | None = _choice(sample, asked)[0]
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


def first_prompt(arguments: Any) -> str:
    """The prompt of a document's first request, of which lm-eval's `prompt_hash` is; a chat's messages as JSON."""
    first = next(iter(arguments.values()), None) if isinstance(arguments, dict) else arguments
    while isinstance(first, (dict, list)) and first:  # {"arg_0": prompt}, before lm-eval 0.4.3 [[prompt, option], ...]
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    return first if isinstance(first, str) else json.dumps(first)


def _choice(sample: Mapping[str, Any], asked: Asked) -> tuple[int | None, int, int | None]:
    """The option that was predicted, how many there are, and the one that is right.

    None, 0 and None if there are no options; the last is None too where that is not known, as if several are right.
    lm-eval writes the right option's number, or else its text.
    """
    target = str(sample.get("target"))
    if asked.decided:
        document = sample.get("doc")
        content = document if isinstance(document, dict) else {}
        prediction, options = content.get("prediction"), content.get("options")
        if type(prediction) is not int or not isinstance(options, list) or not 0 <= prediction < len(options):
            return None, 0, None
        return prediction, len(options), options.index(target) if target in options else None
    try:
        scores = [float(response[0]) for response in sample["filtered_resps"]] if asked.options else []
    except (TypeError, ValueError, LookupError, OverflowError):  # a response is no log-likelihood
        scores = []
    if asked.unconditional:
        scores = scores[: len(scores) // 2]
    if not scores:
        return None, 0, None
    if re.fullmatch("[0-9]{1,9}", target):
        gold = int(target) if int(target) < len(scores) else None
    else:
        requests = sample.get("arguments")
        requests = list(requests.values()) if isinstance(requests, dict) else requests
        requests = requests[: len(scores)] if isinstance(requests, list) else []
        pairs = [list(request.values()) if isinstance(request, dict) else request for request in requests]
        texts = [pair[1] if isinstance(pair, list | tuple) and len(pair) > 1 else None for pair in pairs]
        texts = [text.strip() if isinstance(text, str) else None for text in texts]
        gold = texts.index(target.strip()) if texts.count(target.strip()) == 1 else None
    return scores.index(max(scores)), len(scores), gold  # the first of equals, as lm-eval's `acc`


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
        if all(isinstance(element, (int, float)) for element in values):  # a boolean is an integer, as for lm-eval
            return tuple(float(element) for element in values)
        if len(values) == 2 and all(isinstance(element, str) for element in values):
            return tuple(values)
    except OverflowError:
        pass
    raise Unusable(f"the sample of document {number} has no {metric} that is a number or a pair of them")


def _demonstrations(prompt: str, front: tuple[str, ...], delimiter: str) -> str:
    """A digest of the demonstrations of a prompt, whatever their order.

    A prompt without what is in front of the demonstrations is split at the delimiter; the last piece is the query. A
    delimiter inside of a demonstration or query makes more pieces, the same ones in any order. Where the pieces are not
    the demonstrations alone, two orders count as two sets: with a chat template, whose first and last pieces have its
    special tokens and whose turns may not be delimited, and with a description that differs between documents.
    """
    # Without a delimiter there are no pieces, and the whole prompt stands for its demonstrations.
    before = prompt[: prompt.rfind(delimiter)] if delimiter in prompt and delimiter else prompt
    return _of_pieces(before, front, delimiter)


@functools.lru_cache(maxsize=1)  # most often, all documents of a task have the same
def _of_pieces(text: str, front: tuple[str, ...], delimiter: str) -> str:
    for before in front:
        text = text.removeprefix(before)
    return digest(sorted(text.split(delimiter)) if delimiter else [text])
