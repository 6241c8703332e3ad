"""For development: the smoke test on every model type of transformers.

    python -m scripts.sweep

writes docs/reports/model-types.csv and its summary in docs/reports/model-types.md, in some minutes.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import transformers

from lm_eval_icl.errors import InputError
from lm_eval_icl.smoke.every_method import refusals, smoke
from lm_eval_icl.smoke.tiny import NoTinyModel, types
from tests.smoke.model_types import NONE, TYPES

REPORTS = Path(__file__).resolve().parents[1] / "docs" / "reports"
PAGE = REPORTS / "model-types.md"
TABLE = REPORTS / "model-types.csv"
HEADING = "## All types\n"
EXACT, REFUSED, NO_TINY_MODEL, WRONG = "exact", "refused", "no tiny model", "WRONG"


class Row(NamedTuple):
    """A model type, and what the smoke test says of it.

    "exact": `icl` gives what lm-eval's `hf` gives, and the other methods pass their checks or refuse
    the model. "refused": `icl` refuses the model. "no tiny model": there is none to test. "WRONG": a
    number or a text is wrong.
    """

    type: str
    icl: str
    methods: str  # those that ran, or why none did


def row(arch: str, limit: int = 3) -> Row:
    """Run the smoke test on a model type."""
    if arch in NONE:
        return Row(arch, NO_TINY_MODEL, NONE[arch])
    try:
        scores = smoke(arch, limit, TYPES)
    except NoTinyModel as error:
        return Row(arch, NO_TINY_MODEL, error.why)
    except InputError as error:
        return Row(arch, WRONG, error.message)
    ran = [name for name, score in scores.items() if not isinstance(score, str)]
    refused = refusals(scores)
    if "icl" not in ran:
        # Only what is wrong, without the folder, numbers, and advice.
        why = re.sub(r"^pretrained='.*?': | \([^()]*\)", "", refused.get("icl", ""))
        reason = re.findall(r"^(?:.*? cannot be used: )?[^:.;]*", why)[0]
        return Row(arch, REFUSED, reason)
    if not refused:
        return Row(arch, EXACT, "all")
    if len(refused) < len(ran):
        return Row(arch, EXACT, f"all but {', '.join(refused)}")
    return Row(arch, EXACT, ", ".join(ran))


def read_table() -> list[Row]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [Row(**line) for line in csv.DictReader(file)]


def summary(rows: list[Row]) -> str:
    """The types in words: how many are exact, and which methods run on which types."""
    counts = Counter(row.icl for row in rows)
    lines = [
        f"Of the {len(rows)} types of transformers {transformers.__version__}, {counts[EXACT]} are "
        f"exact, {counts[REFUSED]} are refused, {counts[NO_TINY_MODEL]} have no tiny model and "
        f"{counts[WRONG]} are wrong.",
        "",
    ]
    by_methods: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.icl == EXACT:
            by_methods[row.methods].append(row.type)
    for methods, names in sorted(by_methods.items(), key=lambda item: -len(item[1])):
        lines.append(f"- {methods} ({len(names)}): {', '.join(names)}")
    for outcome in (REFUSED, NO_TINY_MODEL, WRONG):
        names = [row.type for row in rows if row.icl == outcome]
        if names:
            lines.append(f"- {outcome} ({len(names)}): {', '.join(names)}")
    return "\n".join(lines)


def main() -> None:
    transformers.logging.set_verbosity_error()
    rows = []
    for arch in types():
        rows.append(row(arch))
        print(*rows[-1], sep=" | ", flush=True)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows)
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    PAGE.write_text(f"{before}{HEADING}\n{summary(rows)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
