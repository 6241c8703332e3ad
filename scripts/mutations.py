"""For development: small faults in the package, one at a time, and whether the fast tests of their rooms catch them.

    python scripts/mutations.py [JOBS]    # 2 side by side by default

The faults are put into copies of the checkout. A line for each fault says that it was caught (by which test), NOT
CAUGHT, or GONE: then the room does not have the replaced text once. The exit status is 1 unless all are caught.
"""

from __future__ import annotations

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
        ("end = max(ends.values(), default=prefix)", "end = min(ends.values(), default=prefix)"),
        ("sees[-1, -2] = True", "sees[-1, -2] = False"),
        ('Block("A", answer, end + step * query', 'Block("A", answer, end'),
        ("(place[query] >= place[key])", "(place[query] > place[key])"),
        (
            "text = prompt.rstrip()\n        tokens, blanks",
            "text = str(prompt)\n        tokens, blanks",
        ),
    ],
    "inference": [
        ("torch.sigmoid(other_lse - lse)", "torch.sigmoid(lse - other_lse)"),
        ("reading.factor * lse + reading.log_weight", "reading.factor * lse"),
        (
            "np.less(nodes[first:end, None], ends[first:end]",
            "np.less(nodes[first:end, None], 0 * ends[first:end] + n",
        ),
        ("(query, answer[:-1]) != last", "last is None"),
        ("all([*islice(greedy, length)])", "any([*islice(greedy, length)])"),
        (
            "[*[0] * unused, *[1] * len(memory), *[0] * gap",
            "[*[0] * unused, *[1] * len(memory), *[1] * gap",
        ),
        ("layers = [(take(keys), take(values))", "layers = [(take(keys), take(keys))"),
        ("total > sizes.pack_tokens or", "total > sizes.pack_tokens + 8 or"),
    ],
    "decisions": [
        ("- np.log(len(scores))", "- np.log(1 + len(scores))"),
        ("cdist(states, centroids)", "cdist(states, centroids, 'cityblock')"),
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
        (
            "self.rows = rows[:held_out], sorted(rows[held_out:])",
            "self.rows = rows[:held_out], sorted(rows)",
        ),
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
        ("parts.insert(0, first[surplus:])", "parts.insert(0, first[:surplus])"),
        ("max(range(len(kept)), key=lambda i", "min(range(len(kept)), key=lambda i"),
    ],
    "harness": [
        ("Request(tokens, answer, len(answer) - 1", "Request(tokens, answer, len(answer)"),
        ('if kind == "generate_until" and normalize', 'if kind == "loglikelihood" and normalize'),
        ("prompt = [prompt.prefix, prompt.demonstrations, prompt.query]", "prompt = str(prompt)"),
    ],
    "results": [
        ("variance, fewest = a + b - e", "variance, fewest = a + b + e"),
        ("_t_quantile(POWER, df)) * error", "_t_quantile(CONFIDENCE, df)) * error"),
        ("half *= _t_quantile((1 + CONFIDENCE) / 2", "half *= _t_quantile(CONFIDENCE"),
        ("p = 2.0 ** (1 - ", "p = 2.0 ** (0 - "),
        ('"confirmed" if agree else "differs"', '"differs" if agree else "confirmed"'),
        ("options[counts.argmax()]", "options[counts.argmin()]"),
        ("return self.model, self.setting, self.rule", "return self.model, self.setting, ()"),
        ("np.ceil(values[:, 0] * BINS) - 1", "np.floor(values[:, 0] * BINS) - 1"),
        ("special.log_softmax(x)[gold]", "x[gold]"),
    ],
    "leaderboard": [
        ("(estimate.high - estimate.low) / 2", "estimate.high - estimate.low"),
        ('value.lstrip()[:1] in ("=", "+", "-", "@")', 'value[:1] in ("=", "+", "-", "@")'),
        ('r"([\\\\|`*_<>\\[\\]&~$])"', 'r"([\\\\`*_<>\\[\\]&~$])"'),
    ],
    "studies": [
        ("len(candidates) > 1 and all(state == DONE", "len(candidates) > 1 and any(state == DONE"),
        ("max(means) if higher else min(means)", "max(means)"),
        ("math.isclose(mean, top, rel_tol=1e-9)", "mean == top"),
    ],
}
# Room -> the folders and files of its fast tests, if they are not only in the folder of its name.
TESTS = {
    "methods": "methods inference",
    "prompts": "prompts methods",
    "inference": "inference methods",
}
TESTS["demonstrations"] = (
    "demonstrations harness/test_choosing.py harness/test_evaluated_documents.py"
)


def tried(copy: Path, room: str, old: str, new: str) -> str:
    """The outcome of one fault, in a copy of the checkout."""
    files = sorted((copy / "lm_eval_icl" / room).rglob("*.py"))
    having = {path: text for path in files if old in (text := path.read_text(encoding="utf-8"))}
    if len(having) != 1 or (text := having[path := next(iter(having))]).count(old) != 1:
        return "GONE"
    path.write_text(text.replace(old, new), encoding="utf-8")
    folders = [f"tests/{name}" for name in TESTS.get(room, room).split()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *folders,
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    path.write_text(text, encoding="utf-8")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return (
        f"caught by {failed[1]}"
        if failed
        else "NOT CAUGHT"
        if not done.returncode
        else f"exit {done.returncode}"
    )


def main() -> int:
    jobs, outcomes, copies = int(sys.argv[1]) if sys.argv[1:] else 2, list[str](), Queue[Path]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as threads:
        for job in range(jobs):  # tests look for `shared` beside the checkout
            copies.put(copy := Path(folder) / str(job) / ROOT.name)
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv*", ".git", "site"))
            (copy.parent / "shared").symlink_to(ROOT.parent / "shared")

        def run(room: str, old: str, new: str) -> None:
            copy = copies.get()
            outcomes.append(tried(copy, room, old, new))
            copies.put(copy)
            print(f"{room:15}{outcomes[-1]}  {old!r}", flush=True)

        for future in [
            threads.submit(run, room, *fault) for room, faults in FAULTS.items() for fault in faults
        ]:
            future.result()
    caught = sum(outcome.startswith("caught") for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} faults are caught.")
    return int(caught < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
