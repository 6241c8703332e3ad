"""For development: small faults in the package, one at a time, and whether the fast tests of their rooms catch them.

    python scripts/mutations.py [ROOM ...]    # all rooms; --jobs 2 side by side by default
    python scripts/mutations.py --check       # runs no test: names the faults whose text is gone

The faults are put into copies of the checkout. A line for each fault says that it was caught (by
which test), NOT CAUGHT, or GONE: then the room does not have the replaced text once. The exit
status is 1 unless all are caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
# Room -> for each fault, the text that it replaces, and the new text.
FAULTS: dict[str, list[tuple[str, str]]] = {
    "methods": [
        ("self._entries[i] = entry + eta * velocity", "self._entries[i] = entry - eta * velocity"),
        (
            "present.pop(0) - entry + momentum * self._velocity[i]",
            "present.pop(0) - entry + self._velocity[i]",
        ),
        ("range(2, self.T + 1):", "range(2, self.T):"),
        ("first.again(0 if self.restart_positions else first.end", "first.again(0"),
        ("factor = self.scale * self.temperature", "factor = self.scale"),
        ("Reading(log_weight=-math.log(factor))", "Reading(log_weight=math.log(factor))"),
        ("shift = max(windows) - windows[window]", "shift = windows[window] - max(windows)"),
        (
            "second_sees = torch.cat([others(n), nothing(n)]",
            "second_sees = torch.cat([~nothing(n), nothing(n)]",
        ),
        ("Pattern(nothing(n), query=True)", "Pattern(nothing(n))"),
        ("sees[:, : self.window_size] = True", "sees[:, : self.window_size] |= False"),
    ],
    "prompts": [
        ("return everything(n).tril(-1)", "return everything(n).tril()"),
        (
            "return starts, max(ends.values(), default=prefix)",
            "return starts, min(ends.values(), default=prefix)",
        ),
        ("sees[-1, -2] = True", "sees[-1, -2] = False"),
        ('Block("A", answer, end + step * query', 'Block("A", answer, end'),
        ("(place[query] >= place[key])", "(place[query] > place[key])"),
        (
            "text = prompt.rstrip()\n        blanks = ",
            "text = str(prompt)\n        blanks = ",
        ),
    ],
    "inference": [
        ("torch.sigmoid(other_lse - lse)", "torch.sigmoid(lse - other_lse)"),
        ("reading.factor * lse + reading.log_weight", "reading.factor * lse"),
        (
            "np.less(nodes[tree, None], ends[tree]",
            "np.less(nodes[tree, None], 0 * ends[tree] + n",
        ),
        ("if predicting != last:", "if last is None:"),
        ("all(likeliest[start:end])", "any(likeliest[start:end])"),
        (
            "mask.append(padded([1] * len(memory), [1] * len(query), 0))",
            "mask.append(padded([1] * len(memory), [1] * len(query), 1))",
        ),
        ("layers = [(take(keys), take(values))", "layers = [(take(keys), take(keys))"),
        ("total > sizes.pack_tokens or", "total > sizes.pack_tokens + 8 or"),
    ],
    "decisions": [
        ("- np.log(len(scores))", "- np.log(1 + len(scores))"),
        ("cdist(states, np.stack(centroids))", "cdist(states, np.stack(centroids), 'cityblock')"),
        ("divergences = entropy - np.stack", "divergences = -entropy - np.stack"),
        ("return log_mean_exp(log_normalized(query_scores))", "return log_mean_exp(query_scores)"),
    ],
    "demonstrations": [
        ("table.sum(1, where=others)", "table.sum(1)"),
        (
            "(probabilities[near] * (logs[near] - logs[row]))",
            "(probabilities[row] * (logs[row] - logs[near]))",
        ),
        ("closed = [row for row in drawn if evaluated(pool[row])]", "closed: list[int] = []"),
        ('-scores[rows], kind="stable"', 'scores[rows], kind="stable"'),
        ("probabilities / probabilities.sum(1, keepdims=True)", "probabilities"),
    ],
    "training": [
        ("self.rows = sorted(rows[held_out:])", "self.rows = sorted(rows)"),
        ('Random(f"{seed} {number} {attempt}")', 'Random(f"{seed} {number}")'),
        ('/ batch["target_share"]).sum()', '/ batch["target_share"]).mean()'),
        ("loss_is_scaled_for_ga = False", "loss_is_scaled_for_ga = True"),
        ('lr_scheduler_type="linear"', 'lr_scheduler_type="constant"'),
    ],
    "metaicl": [
        ("PER_EXAMPLE - FREE - max(others)", "PER_EXAMPLE - max(others)"),
        (
            "example.between + example.source)[:-too_many]",
            "example.between + example.source)[too_many:]",
        ),
        ("parts.append(part[cut:])", "parts.append(part[:-cut])"),
        ("max(range(len(kept)), key=lambda i", "min(range(len(kept)), key=lambda i"),
    ],
    "harness": [
        ("Request(tokens, answer, len(answer) - 1", "Request(tokens, answer, len(answer)"),
        ('if kind == "generate_until" and normalize', 'if kind == "loglikelihood" and normalize'),
        ("prompt = [prompt.prefix, prompt.demonstrations, prompt.query]", "prompt = str(prompt)"),
    ],
    "results": [
        ("self.documents + self.sets - self.rest", "self.documents + self.sets + self.rest"),
        ("more.half(self.error_rate)", "more.half(ERROR_RATE)"),
        ("_quantile(error_rate, df) ** 2", "_quantile(2 * error_rate, df) ** 2"),
        ("min(1.0, alone * self.comparisons)", "min(1.0, alone)"),
        ("if agree is False:", "if agree:"),
        ("options[counts.argmax()]", "options[counts.argmin()]"),
        ("str(key.compared_as or key.model)", "str(key.model)"),
        ("np.ceil(confidence * BINS) - 1", "np.floor(confidence * BINS) - 1"),
        ("special.log_softmax(values)[gold]", "values[gold]"),
    ],
    "leaderboard": [
        (
            "{value(estimate.high - estimate.mean, column)}",
            "{value(estimate.high - estimate.low, column)}",
        ),
        ('value.lstrip().startswith(("=", "+"', 'value.startswith(("=", "+"'),
        ('r"([\\\\|`*_<>\\[\\]&~$])"', 'r"([\\\\`*_<>\\[\\]&~$])"'),
    ],
    "studies": [
        ("len(candidates) > 1 and all(state == DONE", "len(candidates) > 1 and any(state == DONE"),
        ("mean if higher_is_better else -mean", "mean"),
        ("math.isclose(mean, max(means), rel_tol=1e-9)", "mean == max(means)"),
    ],
}
# Room -> the folders and files of its fast tests, if they are not only in the folder of its name.
TESTS = {
    "methods": "methods inference",
    "prompts": "prompts methods",
    "inference": "inference methods",
    "demonstrations": "demonstrations harness/test_choosing.py harness/test_evaluated_documents.py",
}


def place_of(root: Path, room: str, old: str) -> Path | None:
    """The file of a room that has the text once; None unless exactly one file of the room does."""
    having: list[Path] = []
    for path in (root / "lm_eval_icl" / room).rglob("*.py"):
        having += [path] * path.read_text(encoding="utf-8").count(old)
    return having[0] if len(having) == 1 else None


def gone() -> list[str]:
    """A line for each fault whose text is gone from its room, or stands there more than once."""
    lines = []
    for room, faults in FAULTS.items():
        for old, _ in faults:
            if place_of(ROOT, room, old) is None:
                lines.append(f"{room:15}GONE  {old!r}")
    return lines


def tried(copy: Path, room: str, old: str, new: str) -> str:
    """The outcome of one fault, in a copy of the checkout."""
    path = place_of(copy, room, old)
    if path is None:
        return "GONE"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(old, new), encoding="utf-8")
    folders = [f"tests/{name}" for name in TESTS.get(room, room).split()]
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*pytest, "-m", "not slow", *folders],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    path.write_text(text, encoding="utf-8")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed:
        return f"caught by {failed[1]}"
    return f"exit {done.returncode}" if done.returncode else "NOT CAUGHT"


def run_all(rooms: list[str], jobs: int) -> list[str]:
    """The outcomes of all faults of these rooms, of which `jobs` run side by side."""
    copies: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as threads:
        for job in range(jobs):  # tests look for `shared` beside the checkout
            copy = Path(folder) / str(job) / ROOT.name
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv*", ".git", "site"))
            (copy.parent / "shared").symlink_to(ROOT.parent / "shared")
            copies.put(copy)

        def run(room: str, old: str, new: str) -> str:
            copy = copies.get()
            outcome = tried(copy, room, old, new)
            copies.put(copy)
            print(f"{room:15}{outcome}  {old!r}", flush=True)
            return outcome

        futures = []
        for room in rooms:
            futures += [threads.submit(run, room, *fault) for fault in FAULTS[room]]
        return [future.result() for future in futures]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Small faults, and the fast tests that catch them."
    )
    parser.add_argument("--check", action="store_true", help="only name the faults that are gone")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried side by side")
    parser.add_argument("rooms", nargs="*", default=list(FAULTS), help="all rooms by default")
    arguments = parser.parse_args()
    for room in arguments.rooms:
        if room not in FAULTS:
            parser.error(f"there are no faults for {room!r}: name some of {', '.join(FAULTS)}")
    if arguments.check:
        lines = gone()
        print("\n".join([*lines, f"{len(lines)} of {sum(map(len, FAULTS.values()))} are gone."]))
        return int(bool(lines))
    outcomes = run_all(arguments.rooms, arguments.jobs)
    caught = sum(outcome.startswith("caught") for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} faults are caught.")
    return int(caught < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
