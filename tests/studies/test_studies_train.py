"""Studies that train: each method has its checkpoint, which is made once, and what was interrupted goes on."""

import itertools
import shutil
from pathlib import Path

import pytest

from lm_eval_icl.metaicl.data import SEEDS
from lm_eval_icl.smoke.demo import model_path
from lm_eval_icl.studies import costs, end, grid
from lm_eval_icl.studies.grid import Training, Variant, trained_under
from lm_eval_icl.studies.targets import Model
from lm_eval_icl.studies.unit_runner import Options, UnitRunner
from lm_eval_icl.training.trainer import LayoutTrainer
from tests import commands
from tests.metaicl import test_metaicl
from tests.studies import running

FEW = {
    "steps": 3,
    "num_fewshot": 2,
    "batch_size": 2,
    "eval_steps": 0,
    "save_steps": 1,
    "learning_rate": "1e-3",
}
STUDY = {
    "methods": ["hf", "invicl", {"deepthink": {"T": 2, "eta": 0.5}}],
    "train": {"tasks": "icl_demo_short", **FEW},
    "seeds": 0,
}

pytestmark = pytest.mark.usefixtures("own_tasks")


TASKS = ("icl_demo_short", "icl_demo_four")
WINDOWS = {"methods": {"pcw": {"window_size": [1, 2]}}}


def conduct(output: Path, *args: object, **keys: object) -> running.Ran:
    return running.conduct(output, *args, **{**STUDY, **keys})


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture
def steps(monkeypatch):
    """The steps of all trainings; `at`, a step that is interrupted."""
    before = LayoutTrainer.compute_loss
    found = {"done": 0, "at": None}

    def compute_loss(self, *args, **kwargs):
        if found["done"] == found["at"]:
            found["at"] = None
            raise KeyboardInterrupt
        found["done"] += 1
        return before(self, *args, **kwargs)

    monkeypatch.setattr(LayoutTrainer, "compute_loss", compute_loss)
    return found


@pytest.fixture(scope="module")
def study(tmp_path_factory, own_tasks):
    """Two trainings with targets of their own, from one base, under all kinds of methods."""
    train = {
        **FEW,
        "short": {"tasks": "icl_demo_short", "targets": "icl_demo_short"},
        "four": {"tasks": "icl_demo_four,icl_demo_short", "steps": 2, "targets": ["icl_demo_four"]},
    }
    return conduct(tmp_path_factory.mktemp("study") / "o", tasks=[*TASKS], train=train)


def lines(progress):
    """The lines of the study's table."""
    columns = end.columns_of(progress.study, progress.grid.tasks)
    found = end.results_of(progress.folder, progress.cells())
    return end.in_order(end.board_of(found, columns), found)


def test_a_cell_is_train_followed_by_lm_eval(study, tmp_path):
    """Of every method; hf and deepthink run on the model that was trained under icl."""
    there = {
        path.name.rsplit("-", 1)[0].split(",", 1)[1]: path
        for path in study.folder.checkpoints.iterdir()
    }
    assert there.keys() == {"short,icl", "short,invicl", "four,icl", "four,invicl"}
    options = {
        **FEW,
        "model_args": f"pretrained={model_path()}",
        "tasks": "icl_demo_short",
        "device": "cpu",
    }
    line = [text for name, value in options.items() for text in (f"--{name}", value)]
    commands.run("train", "invicl", *line, "--output", tmp_path / "alone")
    assert weights(tmp_path / "alone") == weights(there["short,invicl"])
    assert not (there["short,invicl"] / "checkpoints").exists()
    for cell in study.cells():
        found = study.results(cell)
        said = found["config"]["icl"]["study"]
        assert said["model"] == str(model_path())
        if cell.task != "icl_demo_short":
            assert said["training"] == "four"
            continue
        under = "invicl" if cell.variant.method == "invicl" else "icl"
        folder = tmp_path / "alone" if under == "invicl" else there["short,icl"]
        alone = running.evaluated(
            study, cell, model_args={"pretrained": str(folder), **cell.variant.arguments}
        )
        assert found["results"][cell.task]["acc,none"] == alone["results"][cell.task]["acc,none"]
        running.assert_alike(study.samples(cell), alone["samples"][cell.task])
        trained = found["config"]["icl"].get(
            "trained", {"method": under}
        )  # lm-eval's own hf does not read it
        assert trained["method"] == under


def test_what_was_interrupted_goes_on(tmp_path, study, steps, monkeypatch):
    """In the middle of a training and of the evaluation: nothing is trained or scored twice, and all is as calmly."""
    keys = {"methods": ["invicl", "pcw"], "train": {"short": STUDY["train"]}}
    steps["at"] = 2
    with pytest.raises(KeyboardInterrupt):
        conduct(tmp_path / "o", **keys)
    checkpoints = tmp_path / "o/checkpoints"
    assert [path.suffix for path in checkpoints.iterdir()] == [".part"]
    evaluate, ran, stops = UnitRunner._evaluate, [], [True]

    def interrupted(self, lm, cell, *rest):
        if ran and stops:
            stops.clear()
            raise KeyboardInterrupt
        ran.append(cell.path)
        return evaluate(self, lm, cell, *rest)

    monkeypatch.setattr(UnitRunner, "_evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        conduct(tmp_path / "o", **keys)
    conduct(tmp_path / "o", **keys)
    assert steps["done"] == 2 * 3 and len(ran) == len(set(ran)) == 2
    assert len(list(checkpoints.iterdir())) == 2 and not list(checkpoints.glob("*.part"))
    (model,) = [
        m
        for m in study.grid.models
        if m.checkpoint in {path.name for path in checkpoints.iterdir()}
    ]
    assert weights(checkpoints / model.checkpoint) == weights(
        study.folder.checkpoints / model.checkpoint
    )
    shutil.rmtree(checkpoints)  # the cells are there
    conduct(tmp_path / "o", **keys)
    assert steps["done"] == 2 * 3 and len(ran) == 2 and not checkpoints.exists()


def test_before_and_after_a_training(tmp_path, steps):
    """The models as they are have rows of their own, and a training that was interrupted has the
    costs of both parts. One of the tasks has its own number of demonstrations and decision rule."""
    keys = {
        "methods": ["icl", "invicl"],
        "train": {"tasks": "icl_demo_short", **FEW, "eval_steps": 3, "eval_documents": 4},
        "before": True,
        "tasks": [
            "icl_demo_short",
            {"task": "icl_demo_four", "num_fewshot": 2, "metadata": {"decide": "batch"}},
        ],
        "columns": [*TASKS],
        "num_fewshot": [1, None],
    }
    steps["at"] = 5
    with pytest.raises(KeyboardInterrupt):
        conduct(tmp_path / "o", **keys)
    progress = conduct(tmp_path / "o", **keys)
    shown = [cell for cell in progress.cells() if cell.num_fewshot == 1]
    before = [cell for cell in shown if cell.model.training is None]
    assert len(before) == len(shown) / 2 == 2 * 2
    for cell in before:
        alone = running.evaluated(progress, cell)
        found = progress.results(cell)["results"][cell.task]
        assert found["acc,none"] == alone["results"][cell.task]["acc,none"]
        assert ("acc,batch" in found) == (cell.task == "icl_demo_four")
    assert {cell.num_fewshot for cell in progress.cells()} == {1, 2, 8}
    rows = {("(trained)" in line.checkpoint, line.rule) for line in lines(progress)}
    assert rows == set(itertools.product([False, True], [None, "batch"]))
    spent = costs.trainings(progress.grid, progress.folder).set_index("method")
    assert set(spent.steps) == {3} and steps["done"] == 2 * 3
    assert (spent[["seconds", "memory", "loss_before", "loss_after"]] > 0).all(axis=None)
    assert spent.tokens["invicl"] > spent.tokens["icl"]


def test_which_arguments_are_trained_with():
    """All of a method's own that is one pass; of the others those that icl has too."""
    for given, trained in (
        (("hf", {}), ("icl", {})),
        (("icl", {"positions": "sequential", "repeat": 2}), ("icl", {"repeat": 2})),
        (("pcw", {"window_size": 1}), ("pcw", {})),
        (("invicl", {"positions": "sequential"}), ("invicl", {"positions": "sequential"})),
        (("deepthink", {"T": 3, "eta": 0.5}), ("icl", {})),
        (("deepthink", {"positions": "symmetric", "T": 2}), ("icl", {"positions": "symmetric"})),
        (("batchicl", {"layer": 2}), ("icl", {})),
    ):
        found = trained_under(Variant(*given, 7))
        assert (found.method, found.arguments) == trained


def test_a_checkpoint_is_named_by_what_its_weights_depend_on():
    def name(model="pretrained=m", **options):
        arguments = dict(pair.split("=") for pair in model.split(","))
        return Model(
            arguments, Training("t", {"steps": 3, **options}, ()), Variant("pcw", {}, 0)
        ).checkpoint

    assert name() == name(save_steps=7) == name("pretrained=m,overflow=drop") and name().startswith(
        "m,t,pcw-"
    )
    others = [
        name(steps=4),
        name(seed=1),
        name("pretrained=m,dtype=bfloat16"),
        name("pretrained=n"),
        name(),
    ]
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"train": "icl_demo_short"},
            "train: 'icl_demo_short': must be options of `lm-eval-icl train`",
        ),
        (
            {**WINDOWS, "dev": {"size": 4, "choose": "window_size"}},
            "dev: choose: 'window_size': `train` trains",
        ),
        ({"train": {"step": 3}}, "train: trained: unknown argument 'step': did you mean 'steps'?"),
        (
            {"models": "pretrained=m,peft=n"},
            "models: peft: train: icl_demo_short trains new weights",
        ),
    ],
)
def test_a_training_that_cannot_be_is_refused_in_one_line(tmp_path, keys, says):
    """Before anything is trained or run."""
    file = running.write(tmp_path / "o.yaml", **{**STUDY, **keys})
    said = commands.refused("study", file, "--output", tmp_path / "o", "--device", "cpu")
    assert said.removeprefix(f"{file}: ").startswith(says), said
    assert not (tmp_path / "o/checkpoints").exists()


# MetaICL.


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of MetaICL's data with made-up rows: three target tasks, and two to train on."""
    folder = tmp_path_factory.mktemp("metaicl")
    for task, seed in itertools.product(("glue-mrpc", "medical_questions_pairs", "paws"), SEEDS):
        test_metaicl.write(
            folder, task, 16, seed, "train", test_metaicl.made_rows(task, 16, seed, "train")
        )
        test_metaicl.write(folder, task, 16, seed, "test", test_metaicl.made_rows(task, 5, 0))
    for task in ("ethos-gender", "rotten_tomatoes"):
        test_metaicl.write(
            folder, task, 16384, 100, "train", test_metaicl.made_rows(task, 20, 1, "train")
        )
    return folder


def test_a_study_on_metaicl(data, tmp_path, checkpoint):
    """Trained on a setting; each cell is what lm_eval gives on the checkpoint, also of several orders."""
    setting = "non_paraphrase_to_paraphrase"
    progress = conduct(
        tmp_path / "o",
        Options("cpu", 4, 3),
        metadata={"metaicl": str(data), "missing": "skip"},
        models=f"pretrained={checkpoint('gpt2')}",
        methods=["hf", "invicl"],
        tasks=[f"metaicl_{setting}", f"metaicl_{setting}_unseen"],
        train={setting: {**FEW, "metaicl": setting}},
        metric="metaicl",
        columns={"all": [f"metaicl_{setting}"], "unseen": [f"metaicl_{setting}_unseen"]},
        seeds=[100, 13],
        num_fewshot=2,
        orders=2,
    )
    cells = progress.cells()
    assert len(cells) == 2 * 3 * 2 * 2 and len(progress.grid.models) == 2
    for cell in cells:
        if cell.seed != 13 or cell.task != "metaicl_paws":
            continue
        found, mine = progress.results(cell), progress.samples(cell)
        assert found["config"]["icl"]["study"]["indices"] == ([0, 1] if cell.order == 0 else [1, 0])
        if cell.order:
            continue
        alone = running.evaluated(progress, cell, "metaicl", {"metaicl": str(data)})
        assert (
            found["results"][cell.task]["metaicl,none"]
            == alone["results"][cell.task]["metaicl,none"]
        )
        theirs = alone["samples"][cell.task]
        assert [sample["prompt_hash"] for sample in mine] == [
            sample["prompt_hash"] for sample in theirs
        ]
        running.assert_alike(mine, theirs)
    hf, invicl = lines(progress)
    assert (hf.method, invicl.method) == ("hf", "invicl")
    for column in (f"metaicl_{setting}", f"metaicl_{setting}_unseen"):
        assert (
            hf.cells[column].sensitivity is not None and invicl.cells[column].sensitivity.mean == 0
        )


@pytest.mark.parametrize("name", ["invicl-table2", "invicl-table8"])
def test_a_named_study_that_trains_is_planned(name, data, checkpoint, capsys):
    """With the options of its trainings checked, its tasks loaded, and its columns found."""
    tasks = (
        "metaicl_hr_to_lr_unseen"
        if "hr_to_lr_unseen" in str(grid.read(name, {}))
        else "metaicl_hr_to_lr"
    )
    arguments = [
        "--dry_run",
        "--verbose",
        "--tasks",
        tasks,
        "--metadata",
        f"metaicl={data},missing=skip",
    ]
    arguments += [
        "--limit",
        "1",
        "--model_args",
        f"pretrained={checkpoint('gpt2')}",
        "--seeds",
        "100",
    ]
    commands.run("study", name, *arguments, "--train", "steps=1")
    said = capsys.readouterr().out
    trained = {trained_under(each).name for each in grid.read(name, {}).variants}
    assert f"{len(trained)} checkpoints to be trained first" in said and "hr_to_lr,invicl-" in said
