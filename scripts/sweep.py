"""The smoke test on every model type of transformers, each with what is special about it (`model_types`).

    python -m scripts.sweep

writes the table of docs/reports/model-types.md, in some minutes.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from lm_eval_icl.errors import InputError
from lm_eval_icl.smoke.smoke import refusals, smoke
from lm_eval_icl.smoke.tiny import NoTinyModel, types
from tests.smoke.model_types import NONE, TYPES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reports" / "model-types.md"
HEADING = "## All types\n"


def row(arch: str, limit: int = 3) -> str:
    """The row of a model type in the table: type, outcome of the smoke test, methods that ran or why none did.

    "exact": `icl` gives what lm-eval's `hf` gives, and the other methods pass their checks or refuse the model.
    "refused": `icl` refuses the model. "no tiny model": there is none to test. "WRONG": a number or a text is wrong.
    """
    if arch in NONE:
        return f"| `{arch}` | no tiny model | {NONE[arch]} |"
    try:
        scores = smoke(arch, limit, TYPES)
    except NoTinyModel as error:
        return f"| `{arch}` | no tiny model | {error.why} |"
    except InputError as error:
        return f"| `{arch}` | WRONG | {error.message} |"
    ran, refused = (
        [name for name, of in scores.items() if not isinstance(of, str)],
        refusals(scores),
    )
    if "icl" in ran:
        names = [f"`{name}`".replace(" (texts)`", "` (texts)") for name in refused]
        few = len(names) < len(ran)
        said = (
            "all"
            if not names
            else f"all but {', '.join(names)}"
            if few
            else ", ".join(f"`{name}`" for name in ran)
        )
        return f"| `{arch}` | exact | {said} |"
    # Only what is wrong, without the folder, numbers, and advice.
    why = re.sub(r"^pretrained='.*?': | \([^()]*\)", "", refused.get("icl", ""))
    return f"| `{arch}` | refused | {re.findall(r'^(?:.*? cannot be used: )?[^:.;]*', why)[0]} |"


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    rows = []
    for arch in types():
        rows.append(row(arch))
        print(rows[-1], flush=True)
    counts = Counter(line.split(" | ")[1] for line in rows)
    summary = f"Of the {len(rows)} types of transformers {transformers.__version__}, {counts['exact']} are exact, "
    summary += f"{counts['refused']} are refused, {counts['no tiny model']} have no tiny model and {counts['WRONG']} "
    summary += "are wrong."
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    table = ["| type | `icl` | methods that run, or why not |", "| --- | --- | --- |", *rows]
    PAGE.write_text(f"{before}{HEADING}\n{summary}\n\n" + "\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
