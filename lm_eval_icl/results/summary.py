"""The sentences at the top of a board: which entries are best, and which are better or worse than their baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lm_eval_icl.results.board import Column, Entry, grouped, rule_in_words, shown
from lm_eval_icl.results.statistics import Difference

_LISTED = 6  # the most entries in a sentence


def summarize(
    entries: Sequence[Entry], columns: Sequence[Column], baselines: Mapping[str, str]
) -> tuple[str, ...]:
    """Sentences that say for each rule which of its entries, sorted from the best, are best in the first column, which
    are better or worse than their baseline or than no rule; and then over how many tests p is adjusted."""
    several = len({entry.on for entry in entries}) > 1
    column = columns[0]
    cells = {entry: entry.cells[column.name] for entry in entries if column.name in entry.cells}
    methods = {entry.name: entry.method for entry in entries}

    def full(entry: Entry) -> str:
        """The entry in words, with its checkpoint if the board has several, and without its rule."""
        label = ", ".join(
            filter(None, [f"{entry.method} {entry.arguments}".strip(), entry.conditions])
        )
        return f"{label} on {entry.on}" if several else label

    def number(value: float) -> str:
        return f"{100 * value:.1f}%" if column.percent else f"{value:.4g}"

    def signed(difference: float) -> str:
        text = f"{100 * difference:+.1f} points" if column.percent else f"{difference:+.3g}"
        return text.replace("-", "\N{MINUS SIGN}")

    def verdicts(tests: Mapping[Entry, Difference], against: str) -> str:
        """Sentences that list the better and the worse entries, with their differences."""
        judged = grouped(tests, lambda entry: column.judged(tests[entry]))
        sentences = []
        for how in ("better", "worse"):
            words = [
                f"{full(entry)} ({signed(tests[entry].mean)})" for entry in judged.get(how, ())
            ]
            sentences += [f" {how.capitalize()} than {against}: {_list(words)}."] if words else []
        return "".join(sentences) or (
            f" Nothing is significantly better or worse than {against}." if tests else ""
        )

    sentences, by_rule = list[str](), grouped(cells, lambda entry: entry.rule)
    for rule, rule_entries in by_rule.items():
        best = cells[rule_entries[0]].estimate
        ties = [
            entry for entry in rule_entries if abs(cells[entry].estimate.mean - best.mean) <= 1e-12
        ]
        where = (
            f"average over {len(column.weights)} tasks"
            if column.kind == "average"
            else f"value on {column.name}"
        )
        text = f"the {'highest' if column.higher_is_better else 'lowest'} {shown(where)} is {number(best.mean)}"
        text += (
            f" (95% interval {number(best.low)} to {number(best.high)}): {_list(map(full, ties))}"
        )
        near = [e for e in rule_entries if e not in ties and cells[e].is_worse is False]
        text += f", not significantly better than {_list(map(full, near))}." if near else "."
        if len(ties) == 1 and (d := cells[ties[0]].to_majority) and (how := column.judged(d)):
            how = (
                "not significantly different from" if how == "same" else f"significantly {how} than"
            )
            text += f" The best is {how} always giving one answer ({signed(d.mean)}, adjusted p {d.p_holm:.2g})."
        text = f"{rule_in_words(rule)}, {text}" if len(by_rule) > 1 else text
        tests = {e: d for e in rule_entries if (d := cells[e].difference) is not None}
        bases = dict.fromkeys(methods[baselines[entry.name]] for entry in tests)
        raw = {e: d for e in rule_entries if (d := cells[e].to_raw) is not None}
        text += verdicts(tests, " or ".join(bases)) + verdicts(raw, "without the rule")
        sentences.append(text[0].upper() + text[1:])
    if (
        len(majorities := {cell.majority for cell in cells.values()}) == 1
        and None not in majorities
    ):
        sentences.append(
            f"Always giving the most frequent right answer would score {number(majorities.pop() or 0.0)}."
        )
    if any(cell.difference is not None or cell.to_raw is not None for cell in cells.values()):
        sentences.append(
            "Differences are on the same prompts, to the baseline and to the runs without a rule: better or worse if p "
            f"is at most 5%, adjusted (Holm). No other difference of this {column.kind} is significant, which does not "
            "show that there is none."
        )
    return tuple(sentences)


def _list(parts: Iterable[str]) -> str:
    """Words joined by semicolons. A long list is cut, and says how many more there are."""
    words = list(parts)
    more = [f"{len(words) - _LISTED + 1} more"] if len(words) > _LISTED else []
    return "; ".join(words[: _LISTED - 1] + more if more else words)
