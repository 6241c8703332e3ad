"""The command `lm-eval-icl samples`: the documents behind one number, or behind two."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lm_eval_icl.cli import add_options
from lm_eval_icl.cli.compare import only_entry
from lm_eval_icl.cli.reading import read_runs
from lm_eval_icl.errors import InputError
from lm_eval_icl.leaderboard import numbers
from lm_eval_icl.leaderboard.samples import Sample, answered, samples_of
from lm_eval_icl.results.board import Column, Entry, shown
from lm_eval_icl.results.build import build
from lm_eval_icl.results.rivals import named

_WIDTH = 80
_QUERY = 600  # the most characters of a query that are shown without --full


_OPTIONS = {
    "seed": ("SEED", int, "the seed of the demonstrations (default: the first)"),
    "document": ("ID", int, "show only this document"),
    "full": ("", bool, "print whole prompts"),
}


def command(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Run `lm-eval-icl samples`."""
    parser.description = (
        "Show the documents behind a number: prompt, options, log-likelihoods, answer and right "
        "answer. With two rows, only documents that they answer differently are shown."
    )
    parser.add_argument(
        "first",
        metavar="A",
        help="a results file or folder of one run; or, with --results, an entry of the table",
    )
    parser.add_argument(
        "second", metavar="B", nargs="?", help="another one, which is shown beside A"
    )
    parser.add_argument(
        "--results",
        nargs="+",
        type=Path,
        metavar="RESULTS",
        help="results files, or folders, with the entries A and B",
    )
    parser.add_argument("--task", required=True, metavar="T", help="the task (a column)")
    for name, what in (("right", "rightly"), ("wrong", "wrongly")):
        parser.add_argument(
            f"--{name}",
            choices=["A", "B"],
            help=f"show only documents that this one answers {what}: --right A --wrong B",
        )
    parser.add_argument(
        "--order", type=int, default=0, help="the order of the demonstrations (default: 0)"
    )
    parser.add_argument(
        "--most", type=int, default=3, metavar="N", help="documents to show (default: 3)"
    )
    add_options(parser, _OPTIONS)
    args = parser.parse_args(arguments)
    if args.most < 0:
        raise InputError(f"--most {args.most}: must be 0 or more.")
    names = [name for name in (args.first, args.second) if name is not None]
    entries, columns = _entries(names, args.results, args.task)
    by_title = _samples(entries, columns, args.seed, args.order)
    sides = list(by_title.values())
    common = [doc_id for doc_id in sides[0] if all(doc_id in side for side in sides)]
    documents = [[side[doc_id] for side in sides] for doc_id in common]
    chosen = [samples for samples in documents if _is_asked(samples, args)]
    console = Console(width=_WIDTH, highlight=False)
    for title in by_title:
        console.print(Text(title, style="bold"))
    console.print(f"{len(chosen)} of {len(common)} documents match")
    for samples in chosen[: args.most]:
        console.print(_document(samples, args.full))
    if len(chosen) > args.most:
        console.print(f"\n{len(chosen) - args.most} more: --most {len(chosen)}")


def _entries(
    names: Sequence[str], results: Sequence[Path] | None, task: str
) -> tuple[list[Entry], Sequence[Column]]:
    """The entries of these names, and their columns of the task."""
    if results:
        board = build(read_runs(results)[0], tasks=[task])
        return [named(board.entries, name) for name in names], board.columns
    found = [only_entry(name, [task], None) for name in names]
    return [entry for entry, _ in found], found[0][1]


def _samples(
    entries: Sequence[Entry], columns: Sequence[Column], seed: int | None, order: int
) -> dict[str, dict[int, Sample]]:
    """The title of each entry -> its samples, under the same seed if there is one that all entries
    have. Where an entry has several runs, its title says whose samples these are."""
    if [column.kind for column in columns] != ["task"]:
        names = ", ".join(column.name for column in columns)
        raise InputError(f"--task: must be one column of a task, and not {names}.")
    # Of each entry: its results by seed and order.
    results = [answered(entry.cells[columns[0].name]) for entry in entries]
    alike = [key for key in results[0] if all(key in others for others in results)]
    if seed is not None or order:
        alike = [key for key in alike if seed in (None, key[0]) and key[1] == order]
        if not alike:
            raise InputError(f"--seed {seed} --order {order}: not all entries have these results.")
    sides = {}
    documents = set()
    for name, entry, of_entry in zip("AB", entries, results, strict=False):
        title = f"{name}: {entry.label} on {shown(entry.on)}"
        key = next(iter(alike or of_entry), None)
        samples = {}
        if key is not None:
            samples = samples_of(of_entry[key])
            documents.add(of_entry[key].answers.documents)
            if len(of_entry) > 1:
                title += f" (seed {key[0]}, order {key[1]}: one of {len(of_entry)} runs)"
        if not samples:
            raise InputError(
                f"{entry.label}: there are no samples beside its results (--log_samples); files of "
                "`lm-eval-icl collect` have none, since published prompts contaminate."
            )
        sides[title] = samples
    if len(documents) > 1:
        raise InputError("A and B did not answer the same documents.")
    return sides


def _is_asked(samples: Sequence[Sample], args: argparse.Namespace) -> bool:
    """Whether a document passes the filters."""
    if args.document is not None:
        return samples[0].doc_id == args.document
    by_name = dict(zip("AB", samples, strict=False))
    filtered = False
    for name, wanted in ((args.right, True), (args.wrong, False)):
        if name is None:
            continue
        if name not in by_name:
            raise InputError(f"{name}: there is no second entry.")
        if by_name[name].is_right is not wanted:
            return False
        filtered = True
    return filtered or len(samples) == 1 or samples[0].answer != samples[1].answer


def _document(samples: Sequence[Sample], full: bool) -> Group:
    """A document: the right answer, the options with their values, and the prompts."""
    first = samples[0]
    parts: list[Text | Table] = [
        Text(f"\ndocument {first.doc_id}, right answer: {first.gold}", "bold")
    ]
    options = Table(box=None, pad_edge=False)
    options.add_column("option", max_width=40, overflow="fold")
    for name in "AB"[: len(samples)]:
        options.add_column(name, justify="right")
    for place, option in enumerate(first.options):
        row = [Text(option)]
        for sample in samples:
            chosen = sample.options[place] == sample.answer
            value = numbers.number(sample.values[place], 4) if sample.values else ""
            row.append(Text(f"{value} {'◀' if chosen else ' '}", "bold" if chosen else ""))
        options.add_row(*row)
    if first.options:
        parts.append(options)
    for name, sample in zip("AB", samples, strict=False):
        verdict = "right" if sample.is_right else "wrong"
        parts.append(Text(f"{name} answers {sample.answer}: {verdict}"))
    prompts = [_prompt(sample, full) for sample in samples]
    if len(set(prompts)) == 1:
        title = "prompt" if len(prompts) == 1 else "the prompt of both"
        return Group(*parts, Text(title, "dim"), Text(prompts[0]))
    side_by_side = Table(box=None, pad_edge=False, expand=True)
    for name in "AB":
        side_by_side.add_column(f"prompt of {name}", ratio=1, overflow="fold")
    side_by_side.add_row(*map(Text, prompts))
    return Group(*parts, side_by_side)


def _prompt(sample: Sample, full: bool) -> str:
    """The prompt of a document; without `full`, its demonstrations are only counted."""
    if full:
        return sample.demonstrations + sample.query
    size = len(sample.demonstrations)
    before = f"({size:,} characters of demonstrations: --full)\n" if size else ""
    return before + sample.query[-_QUERY:]
