"""The sentences at the top of a board: what is best, and what is better or worse than its baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from lm_eval_icl.results.board import Column, Entry, grouped, rule_in_words, shown
from lm_eval_icl.results.statistics import Difference

_LISTED = 6  # entries in a sentence
Words = Callable[[Entry], str]


def summarize(entries: Sequence[Entry], columns: Sequence[Column], baselines: Mapping[str, str]) -> tuple[str, ...]:
    """What is best in the first column under each decision rule, and which entries are better or worse than their
    baseline; what each rule changes; the best of the other columns; and over how many tests p is adjusted.

    Args:
        entries: the best first.
        baselines: as of the `Board`.
    """
    several = len({entry.on for entry in entries}) > 1

    def full(entry: Entry) -> str:
        """The entry in words, without its rule: the sentence has that; with its checkpoint, if there are several."""
        label = ", ".join(filter(None, [f"{entry.method} {entry.arguments}".strip(), entry.conditions]))
        return f"{label} on {entry.on}" if several else label

    first = columns[0]
    in_first = [entry for entry in entries if first.name in entry.cells]
    by_rule = grouped(in_first, lambda entry: entry.rule)
    # Rules under which the same is to be said have one sentence.
    said = {rule: _section(of_rule, first, baselines, full) for rule, of_rule in by_rule.items()}
    sentences = []
    for text, rules in grouped(said, lambda rule: said[rule]).items():
        text = f"{_list(map(rule_in_words, rules))}, {text}" if len(by_rule) > 1 else text
        sentences.append(text[0].upper() + text[1:])
    for rule, of_rule in by_rule.items():
        cells = {entry: entry.cells[first.name] for entry in of_rule}
        if changes := {e: (cell.to_raw, cell.p_raw) for e, cell in cells.items() if cell.to_raw is not None}:
            verdicts = _verdicts(changes, first, full)
            differs = "; ".join(f"{how} for {who}" for how, who in verdicts.items()) or "not significantly different"
            sentences.append(f"The rule {rule}, compared with the same runs without it, is {differs}.")
    if len(majorities := {entry.cells[first.name].majority for entry in in_first}) == 1 and None not in majorities:
        sentences.append(f"Always giving the most frequent right answer has {_number(majorities.pop() or 0.0, first)}.")
    for column in [c for c in columns[1:] if not c.weights.keys() <= first.weights.keys()][:3]:
        if of_column := [e for e in entries if column.name in e.cells and e.rule is None]:
            best, _ = _best(of_column, column, full)
            sentences.append(f"{best[0].upper()}{best[1:]}.")
    of_tasks = [column.name for column in columns if column.kind == "task"]
    collapsed = [
        f"{full(entry)}{'' if entry.rule is None else f' under {entry.rule}'} (on {_list(map(shown, tasks))})"
        for entry in entries
        if (tasks := [name for name in of_tasks if name in entry.cells and "collapsed" in entry.cells[name].marks])
    ]
    if collapsed:
        sentences.append(f"One answer is given to 95% of the documents or more by {_list(collapsed)}.")
    tests = {"baselines": sum(entry.cells[first.name].difference is not None for entry in in_first),
             "runs without a rule": sum(entry.cells[first.name].to_raw is not None for entry in in_first)}  # fmt: skip
    if families := [f"{number} comparisons with {what}" for what, number in tests.items() if number]:
        adjusted = f", adjusted (Holm) over {_list(families)}" if sum(tests.values()) > 1 else ""
        sentences.append(
            f"Differences are on the same prompts; better or worse means a p of at most 5%{adjusted}. All "
            "other entries that are compared do not differ significantly."
        )
    return tuple(sentences)


def _best(entries: Sequence[Entry], column: Column, full: Words) -> tuple[str, list[Entry]]:
    """The best value of a column in words, and all that have it."""
    cells = {entry: entry.cells[column.name] for entry in entries}
    estimate = max((cell.estimate for cell in cells.values()), key=lambda estimate: column.sign * estimate.mean)
    ties = [entry for entry in cells if math.isclose(cells[entry].estimate.mean, estimate.mean, abs_tol=1e-12)]
    where = (
        f"average over {len(column.weights)} tasks" if column.kind == "average" else f"value on {shown(column.name)}"
    )
    sentence = f"the {'highest' if column.higher_is_better else 'lowest'} {where} is {_number(estimate.mean, column)}"
    if len(ties) == 1 and estimate.low < estimate.high and math.isfinite(estimate.error):
        sentence += f" (95% interval {_number(estimate.low, column)} to {_number(estimate.high, column)})"
    everybody = 3 < len(ties) == len(entries)
    return f"{sentence}: {f'all {len(ties)} entries' if everybody else _list(map(full, ties))}", ties


def _section(entries: Sequence[Entry], column: Column, baselines: Mapping[str, str], full: Words) -> str:
    """What is best among the entries under one rule, and which of them are better or worse than their baseline."""
    text, ties = _best(entries, column, full)
    tests = {
        entry: (cell.difference, cell.p_holm)
        for entry in entries
        if (cell := entry.cells[column.name]).difference is not None
    }
    bases = {baselines[entry.name] for entry in tests}
    of_bases = [entry for entry in entries if entry.name in bases]
    methods = " or ".join(dict.fromkeys(entry.method for entry in of_bases)) or "the baseline"
    base = full(of_bases[0]) if len(of_bases) == 1 else f"{methods} with the same prompts"
    verdicts = _verdicts(tests, column, full)
    if tests and not verdicts:
        return f"{text}. Nothing is significantly better or worse than {base}."
    if len(ties) == 1 and (alone := _verdicts({e: tests[e] for e in ties if e in tests}, column, lambda e: "")):
        text += "".join(f", {how} than {base}{difference}" for how, difference in alone.items())
        verdicts = _verdicts({entry: test for entry, test in tests.items() if entry not in ties}, column, full)
    return ". ".join([text, *(f"{how.capitalize()} than {base}: {who}" for how, who in verdicts.items())]) + "."


def _verdicts(tests: Mapping[Entry, tuple[Difference, float | None]], column: Column, full: Words) -> dict[str, str]:
    """Under "better" and "worse", which entries are, with the differences; by the differences and p-values."""

    def signed(mean: float) -> str:
        text = f"{100 * mean:+.1f} points" if column.percent else f"{mean:+.3g}"
        return text.replace("-", "\N{MINUS SIGN}")

    texts = {}
    judged = grouped(tests, lambda entry: column.judged(tests[entry][0].mean, tests[entry][1]))
    for how in ("better", "worse"):
        means = {entry: tests[entry][0].mean for entry in judged.get(how, ())}
        if 3 < len(means) == len(tests):
            least, most = min(means.values()), max(means.values())
            texts[how] = f"all {len(means)} entries ({signed(least).removesuffix(' points')} to {signed(most)})"
        elif means:
            texts[how] = _list(f"{full(entry)} ({signed(mean)})" for entry, mean in means.items())
    return texts


def _number(value: float, column: Column) -> str:
    return f"{100 * value:.1f}%" if column.percent else f"{value:.4g}"


def _list(parts: Iterable[str]) -> str:
    """Words joined by commas and an "and", or by semicolons if a word has a comma; of many, how many more there are."""
    words = list(parts)
    comma = ";" if any("," in word for word in words) else ","
    if len(words) > _LISTED:
        words = [*words[: _LISTED - 1], f"{len(words) - _LISTED + 1} more"]
    *before, last = words
    return f"{f'{comma} '.join(before)}{';' if comma == ';' else ''} and {last}" if before else last
