"""Write the table of docs/reports/model-types.md: the smoke test of every model type of the installed transformers.

    python scripts/make_models_table.py [--record FILE]

It takes some minutes. --record is that of `lm-eval-icl smoke`: types whose results are in FILE are not run again.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

import transformers

from lm_eval_icl.smoke import tiny
from lm_eval_icl.smoke.smoke import Result, sweep

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reports" / "model-types.md"
HEADING = "## All types\n"


def row(result: Result) -> str:
    """A type's row of the table."""
    if result.status == "exact":
        refused = [f"`{name}`".replace(" (texts)`", "` (texts)") for name in result.refused]
        only = ", ".join(f"`{name}`" for name in result.ran)
        said = "all" if not refused else f"all but {', '.join(refused)}" if len(refused) < len(result.ran) else only
        return f"| `{result.arch}` | exact | {said} |"
    said, why = {"refused": "refused", "none": "no tiny model"}.get(result.status, result.status), result.why
    if result.status == "refused":  # only what is wrong, without the folder, numbers, and advice
        why = re.sub(r"^pretrained='.*?': | \([^()]*\)", "", why)
        why = re.findall(r"^(?:.*? cannot be used: )?[^:.;]*", why)[0]
    return f"| `{result.arch}` | {said} | {why} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    results = []
    for result in sweep(tiny.types(), record=parser.parse_args().record):
        print(row(result), flush=True)
        results.append(result)
    counts = Counter(result.status for result in results)
    summary = f"Of the {len(results)} types of transformers {transformers.__version__}, {counts['exact']} are exact, "
    summary += f"{counts['refused']} are refused, {counts['none']} have no tiny model and {counts['WRONG']} are wrong."
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    table = ["| type | `icl` | methods that run, or why not |", "| --- | --- | --- |", *map(row, results)]
    PAGE.write_text(f"{before}{HEADING}\n{summary}\n\n" + "\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
