"""Studies that tests run: on the demonstration model, with few documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval.tasks import TaskManager

from lm_eval_icl.cli.train import training
from lm_eval_icl.errors import InputError
from lm_eval_icl.harness.plugin import task_dir
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.studies import grid
from lm_eval_icl.studies.cell_tasks import open_study
from lm_eval_icl.studies.conduct import DONE, Executor, Here, states
from lm_eval_icl.studies.conduct import conduct as conduct_study
from lm_eval_icl.studies.folder import StudyFolder
from lm_eval_icl.studies.targets import Cell, Grid
from lm_eval_icl.studies.unit_runner import Options, UnitRunner

MODEL = f"pretrained={model_path()}"
DEMO = {"models": MODEL, "tasks": "icl_demo_short", "num_fewshot": 3, "seeds": "0..1"}
OPTIONS = Options("cpu", 8, 6)
# Of what a cell says: how much of it was run in this process.
COUNTS = {
    "contexts_encoded",
    "contexts_reused",
    "tokens_run",
    "tokens_saved",
    "passes",
    "peak_bytes",
    "shared_demonstrations",
}


def write(path: Path, **keys: object) -> str:
    """The file of a study with these keys in place of the demonstration's."""
    path.write_text(yaml.safe_dump({**DEMO, **keys}))
    return str(path)


@dataclass
class Ran:
    """A study, and its folder."""

    grid: Grid
    folder: StudyFolder
    options: Options
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def study(self) -> grid.Study:
        return self.grid.study

    def cells(self, state: str = DONE, **where: object) -> list[Cell]:
        """The cells in a state whose fields have these values: `cells(split="test")`."""
        cells = []
        for target, of_target in states(self.grid, self.folder, self.failed):
            if isinstance(target, Cell) and of_target == state:
                cells.append(target)
        return [cell for cell in cells if where.items() <= vars(cell).items()]

    def facts(self, cell: Cell) -> dict[str, Any]:
        return dict(self.results(cell)["config"]["icl"]["study"])

    def results(self, cell: Cell) -> dict[str, Any]:
        return self.folder.results(cell)

    def score(self, cell: Cell, rule: str = "none") -> float:
        return float(self.results(cell)["results"][cell.task][f"{self.study.metric},{rule}"])

    def samples(self, cell: Cell) -> list[dict[str, Any]]:
        (path,) = (self.folder.path / cell.path).glob("samples_*")
        return [json.loads(line) for line in path.read_text().splitlines()]

    def choices(self) -> list[tuple[Cell, ...]]:
        """What the dev set has chosen among several."""
        several = [candidates for candidates in self.grid.alternatives if len(candidates) > 1]
        return [self.folder.choice(self.grid, candidates) for candidates in several]


def opened(
    output: Path,
    options: Options = OPTIONS,
    include_path: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    **keys: object,
) -> Ran:
    """A study with these keys, as it stands in its folder."""
    study = grid.read(write(output.with_suffix(".yaml"), **keys), overrides or {})
    return Ran(open_study(study, options.limit, include_path), StudyFolder(output), options)


def conduct(
    output: Path,
    options: Options = OPTIONS,
    include_path: str | None = None,
    executor: Callable[[Ran], Executor] | None = None,
    may_fail: bool = False,
    **keys: Any,
) -> Ran:
    """A study of `opened`, which is run: in this process, or as `executor` says."""
    study = opened(output, options, include_path, **keys)
    with study.folder.locked():
        runner = UnitRunner(study.grid, options, study.folder, training, include_path)
        where = executor(study) if executor else Here(runner.run)
        conduct_study(study.grid, study.folder, where, study.failed)
    if study.failed and not may_fail:
        raise InputError(next(iter(study.failed.values())))
    return study


def files_of(study: Path) -> dict[str, Any]:
    """What the cells of a folder hold, without times and counts."""
    contents: dict[str, Any] = {}
    for path in sorted(study.glob("cells/**/*.json*")):
        name = str(path.relative_to(study))
        contents[name] = path.read_text()
        if path.suffix == ".json":
            results = json.loads(contents[name])
            facts = results["config"]["icl"]["study"]
            del facts["shared"]
            del facts["id"]
            contents[name] = (results["results"], facts)
    return contents


def evaluated(
    study: Ran,
    cell: Cell,
    folder: str | Path = "demo",
    metadata: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """The same evaluation by lm-eval alone, with these arguments of `simple_evaluate` besides."""
    include_path = task_dir() / folder
    manager = TaskManager(
        include_path=include_path, include_defaults=False, metadata=dict(metadata or {})
    )
    model_args = {**study.folder.arguments(cell.model), **cell.variant.arguments}
    arguments.setdefault("model_args", model_args)
    results = lm_eval.simple_evaluate(
        model=cell.variant.method,
        tasks=[cell.task],
        num_fewshot=cell.num_fewshot,
        batch_size=study.options.batch_size,
        device="cpu",
        limit=study.options.limit,
        fewshot_random_seed=cell.seed,
        task_manager=manager,
        **arguments,
    )
    return dict(results)


def assert_same_prompts(
    mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> None:
    hashes = [sample["prompt_hash"] for sample in mine]
    assert hashes == [sample["prompt_hash"] for sample in theirs]


def assert_alike(mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> None:
    """The log-likelihoods of these samples are the same to 1e-5, and so are the greedy answers."""
    for one, other in zip(mine, theirs, strict=True):
        for (ours,), (their,) in zip(one["resps"], other["resps"], strict=True):
            assert abs(float(ours[0]) - float(their[0])) < 1e-5
            assert str(ours[1]) == str(their[1])
