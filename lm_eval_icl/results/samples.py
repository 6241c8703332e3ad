"""What a run answered, document by document, from the samples that lm-eval writes with `--log_samples`.

A document of a task under a filter becomes a row without its texts (`DocumentRow`): `collect` keeps these rows, tables
show them, and `answers_of` makes arrays of them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm_eval_icl.results.calibration import METRICS
from lm_eval_icl.results.fields import digest
from lm_eval_icl.results.records import Answers, Unusable

_HASH = 16  # hexadecimal digits that are kept of a hash


class DocumentRow(NamedTuple):
    """A document of a task under a filter."""

    filter: str
    doc_id: int  # its number in the task
    document: str  # digest of it and its right answer
    prompt: str  # digest of the prompt
    demonstrations: str  # digest of the prompt's demonstrations, whatever their order; "" without any
    options: int  # the texts of the options are as many as this; 0 if there are none
    prediction: int | str | None  # the number of the option that is predicted, or the text that the filter left
    gold: int | None  # the option that is right; None where that is not known
    logprobs: tuple[float, ...]  # the options' log-likelihoods, or what a decision rule makes of them
    metrics: Mapping[str, Any]  # by lm-eval's name, the value that it aggregates
    target: str = ""  # the right answer, as lm-eval writes it; `collect` keeps no such text


@dataclass(frozen=True)
class Asked:
    """What a task's results say about its samples."""

    filter: str  # that of samples which name none
    # The requests of a document are options, of which the one with the highest log-likelihood is predicted.
    options: bool
    decided: bool  # the task decides otherwise, and its documents say which option it predicts (MetaICL's)
    unconditional: bool  # there may be a second request for each option, without the prompt (`acc_mutual_info`)
    shots: int  # demonstrations a prompt
    # Texts before the demonstrations, in this order: the system instruction, a delimiter, the description.
    front: tuple[str, ...]
    delimiter: str  # between demonstrations
    metrics: Collection[str]  # their names, for samples that do not list them


def parse(data: bytes) -> Any:
    """JSON; `Unusable` is raised if it is damaged."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise Unusable("is nested too deeply") from None
    except ValueError as error:
        raise Unusable(f"is damaged, half-written or no JSON ({' '.join(str(error).split())})") from error


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a file, one at a time: all of them together may have some GB.

    Raises:
        Unusable: the file cannot be read, or a line is no sample.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"line {number} of {path.name}"
                try:
                    sample = parse(line)
                except Unusable as error:
                    raise Unusable(f"{where} {error}") from None
                if not isinstance(sample, dict) or type(sample.get("doc_id")) is not int or sample["doc_id"] < 0:
                    raise Unusable(f"{where} is no sample of lm-eval, which has the number of its document, doc_id")
                yield sample
    except OSError as error:
        raise Unusable(f"{path.name} cannot be read ({error.strerror})") from error


def rows_of(samples: Iterable[Mapping[str, Any]], asked: Asked) -> Iterator[DocumentRow]:
    """The samples of a task as rows, one a document and filter.

    Raises:
        Unusable: a sample has not what is needed.
    """
    for sample in samples:
        prompt = first_prompt(sample.get("arguments"))
        prediction: int | str | None
        prediction, options, gold, logprobs = _choice(sample, asked)
        texts = sample.get("filtered_resps")
        if prediction is None and isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], str):
            prediction = texts[0]
        names = sample.get("metrics")
        names = names if isinstance(names, list) else [name for name in asked.metrics if name in sample]
        target = _hash(sample, "target_hash", lambda sample=sample: str(sample.get("target")))  # type: ignore[misc]
        yield DocumentRow(
            str(sample.get("filter", asked.filter)),
            sample["doc_id"],
            _document_hash(sample, asked)[:_HASH] + target[:8],
            _hash(sample, "prompt_hash", lambda prompt=prompt: prompt)[:_HASH],  # type: ignore[misc]
            _demonstrations(prompt, asked.front, asked.delimiter)[:_HASH] if asked.shots else "",
            options,
            prediction,
            gold,
            logprobs,
            {name: sample[name] for name in names if isinstance(name, str) and name in sample},
            str(sample.get("target")),
        )


def answers_of(rows: Iterable[DocumentRow], metric: str, shots: int) -> Answers:
    """The rows of one filter as arrays.

    Raises:
        Unusable: there are none, a document is there twice, or they do not have the metric.
    """
    rows = sorted(rows, key=lambda row: row.doc_id)
    if not rows:
        raise Unusable("the samples have none of this filter")
    for one, other in itertools.pairwise(rows):
        if one.doc_id == other.doc_id:
            raise Unusable(f"document {one.doc_id} is in the samples twice")
    known = all(row.options and isinstance(row.prediction, int) for row in rows)
    golds = [row.gold for row in rows]
    if metric in METRICS:
        if not known or None in golds or any(len(row.logprobs) != row.options for row in rows):
            raise Unusable(f"{metric} needs the options' log-likelihoods, and which option is right")
        items = METRICS[metric].items([row.logprobs for row in rows], golds)  # type: ignore[arg-type]
    else:
        values = [_item(row.metrics.get(metric), metric, row.doc_id) for row in rows]
        if len(set(map(len, values))) > 1:
            raise Unusable(f"{metric} is a pair for some samples and a number for others")
        items = _numbered(values)
        items = items[:, 0] if items.shape[1] == 1 else items
    numbers, documents = [str(row.doc_id) for row in rows], [row.document for row in rows]
    return Answers(
        doc_ids=np.array([row.doc_id for row in rows]),
        documents=digest(itertools.chain(*zip(numbers, documents, strict=True))),
        prompts=digest(itertools.chain(*zip(numbers, documents, [row.prompt for row in rows], strict=True))),
        demonstrations=digest(row.demonstrations for row in rows) if shots else None,
        items=items,
        predictions=np.array([row.prediction for row in rows]) if known else None,
        chance=float(np.mean([1 / row.options for row in rows])) if known else None,
        golds=np.array(golds) if known and None not in golds else None,
    )


def first_prompt(arguments: Any) -> str:
    """The prompt of a document's first request, of which lm-eval's `prompt_hash` is; a chat's messages as JSON."""
    first = next(iter(arguments.values()), None) if isinstance(arguments, dict) else arguments
    while isinstance(first, (dict, list)) and first:  # {"arg_0": prompt}, before lm-eval 0.4.3 [[prompt, option], ...]
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    return first if isinstance(first, str) else json.dumps(first)


def _choice(sample: Mapping[str, Any], asked: Asked) -> tuple[int | None, int, int | None, tuple[float, ...]]:
    """The option that was predicted, how many there are, the one that is right, and their log-likelihoods.

    None, 0 and None if there are no options; the gold is None too where it is not known, as if several are right.
    lm-eval writes the right option's number, or else its text.
    """
    target = str(sample.get("target"))
    try:
        scores = [float(response[0]) for response in sample["filtered_resps"]] if asked.options else []
    except (TypeError, ValueError, LookupError, OverflowError):  # a response is no log-likelihood
        scores = []
    if asked.decided:
        content = sample.get("doc") if isinstance(sample.get("doc"), dict) else {}
        prediction, options = content.get("prediction"), content.get("options")  # type: ignore[union-attr]
        if type(prediction) is not int or not isinstance(options, list) or not 0 <= prediction < len(options):
            return None, 0, None, ()
        logprobs = tuple(scores) if len(scores) == len(options) else ()
        return prediction, len(options), options.index(target) if target in options else None, logprobs
    if asked.unconditional:
        scores = scores[: len(scores) // 2]
    if not scores:
        return None, 0, None, ()
    if re.fullmatch("[0-9]{1,9}", target):
        gold = int(target) if int(target) < len(scores) else None
    else:
        texts = [text.strip() for text in option_texts(sample)[: len(scores)]]
        gold = texts.index(target.strip()) if texts.count(target.strip()) == 1 else None
    return scores.index(max(scores)), len(scores), gold, tuple(scores)  # the first of equals, as lm-eval's `acc`


def option_texts(sample: Mapping[str, Any]) -> list[str]:
    """The continuations of a document's requests; "" for one that has none."""
    requests = sample.get("arguments")
    requests = list(requests.values()) if isinstance(requests, dict) else requests
    pairs = [list(r.values()) if isinstance(r, dict) else r for r in (requests if isinstance(requests, list) else [])]
    texts = [pair[1] if isinstance(pair, list | tuple) and len(pair) > 1 else None for pair in pairs]
    return [text if isinstance(text, str) else "" for text in texts]


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
    if all(isinstance(element, (int, float)) for element in values):  # a boolean is an integer, as for lm-eval
        return tuple(float(element) for element in values)
    if len(values) == 2 and all(isinstance(element, str) for element in values):
        return tuple(values)
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
