"""The sentences at the top of a board: which entries are best, and what comparisons decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lm_eval_icl.results.board import BoardCell, Column, Entry, grouped, rule_in_words, shown
from lm_eval_icl.results.statistics import Difference

_LISTED = 6  # the most entries in a sentence
_SAME = 1e-12  # means that differ by no more are equal
Compared = Sequence[tuple[Entry, Difference]]


def summarize(
    entries: Sequence[Entry], columns: Sequence[Column], baselines: Mapping[str, str]
) -> tuple[str, ...]:
    """Sentences about the first column, of entries that are sorted from the best for each rule."""
    column = columns[0]
    cells = {entry: entry.cells[column.name] for entry in entries if column.name in entry.cells}
    writer = _Writer(column, cells, several_models=len({entry.on for entry in entries}) > 1)
    methods = {entry.name: entry.method for entry in entries}
    by_rule = grouped(cells, lambda entry: entry.rule)
    sentences = []
    for rule, rule_entries in by_rule.items():
        compared = [entry for entry in rule_entries if cells[entry].difference is not None]
        bases = dict.fromkeys(methods[baselines[entry.name]] for entry in compared)
        base = " or ".join(bases)
        against: dict[str, list[tuple[Entry, Difference]]] = {base: [], "without the rule": []}
        for entry in rule_entries:
            cell = cells[entry]
            if cell.difference is not None:
                against[base].append((entry, cell.difference))
            if cell.to_raw is not None:
                against["without the rule"].append((entry, cell.to_raw))
            for words, difference in cell.conditions:
                against.setdefault(f"the same with {words}", []).append((entry, difference))
        text = writer.best(rule_entries)
        for words, pairs in against.items():
            text += writer.verdicts(pairs, words)
        if len(by_rule) > 1:
            text = f"{rule_in_words(rule)}, {text}"
        sentences.append(text[0].upper() + text[1:])
    return (*sentences, *writer.ends())


@dataclass(frozen=True)
class _Writer:
    """Writes about the entries of a column."""

    column: Column
    cells: Mapping[Entry, BoardCell]
    several_models: bool

    def best(self, entries: Sequence[Entry]) -> str:
        """Which entry is best, and which are not distinguishable from it."""
        column = self.column
        best = self.cells[entries[0]].estimate
        ties = [e for e in entries if abs(self.cells[e].estimate.mean - best.mean) <= _SAME]
        near = [e for e in entries if e not in ties and self.cells[e].is_worse is False]
        where = f"value on {column.name}"
        if column.kind == "average":
            where = f"average over {len(column.weights)} tasks"
        text = (
            f"the {'highest' if column.higher_is_better else 'lowest'} {shown(where)} is "
            f"{self.number(best.mean)} (its own 95% interval: {self.number(best.low)} to "
            f"{self.number(best.high)}): {_list(map(self.full, ties))}"
        )
        if near:
            text += f", not distinguishable from {_list(map(self.full, near))}"
        to_one = self.cells[ties[0]].to_majority
        if len(ties) > 1 or to_one is None:
            return f"{text}."
        verdict = column.judged(to_one)
        than = "not distinguishable from" if verdict == "undecided" else f"{verdict} than"
        return f"{text}. The best is {than} always giving one answer ({self.signed(to_one)})."

    def verdicts(self, compared: Compared, against: str) -> str:
        """Sentences that list the better and the worse entries, with their differences."""
        judged = grouped(compared, lambda pair: self.column.judged(pair[1]))
        sentences = []
        for verdict in ("better", "worse"):
            words = [f"{self.full(e)} ({self.signed(x)})" for e, x in judged.get(verdict, ())]
            if words:
                sentences.append(f" {verdict.capitalize()} than {against}: {_list(words)}.")
        if compared and not sentences:
            sentences.append(f" Nothing is shown to be better or worse than {against}.")
        return "".join(sentences)

    def ends(self) -> list[str]:
        """The score of always giving one answer, and of which family the comparisons are."""
        sentences = []
        majorities = {cell.majority for cell in self.cells.values()}
        majority = majorities.pop()
        if not majorities and majority is not None:
            score = self.number(majority)
            sentences.append(f"Always giving the most frequent right answer would score {score}.")
        comparisons = max(cell.comparisons for cell in self.cells.values())
        if comparisons > 1:
            sentences.append(
                f"All comparisons hold together with 95% certainty: {family(comparisons)}. "
                "What is not shown to differ is not shown to be equal."
            )
        return sentences

    def full(self, entry: Entry) -> str:
        """The entry in words, with its model if there are several, and without its rule."""
        label = replace(entry, rule=None).label
        return f"{label} on {entry.on}" if self.several_models else label

    def number(self, value: float) -> str:
        return f"{100 * value:.1f}%" if self.column.percent else f"{value:.4g}"

    def signed(self, difference: Difference) -> str:
        mean = difference.mean
        text = f"{100 * mean:+.1f} points" if self.column.percent else f"{mean:+.3g}"
        return text.replace("-", "\N{MINUS SIGN}")


def family(comparisons: int) -> str:
    """What a family of comparisons is, in words."""
    if comparisons == 1:
        return "one pair of rows"
    return f"all {comparisons:,} pairs of rows (Bonferroni; always one answer counts as a row)"


def _list(parts: Iterable[str]) -> str:
    """Words joined by semicolons. A long list is cut, and says how many more there are."""
    words = list(parts)
    more = [f"{len(words) - _LISTED + 1} more"] if len(words) > _LISTED else []
    return "; ".join(words[: _LISTED - 1] + more if more else words)
