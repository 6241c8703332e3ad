"""Studies that train: each method has its checkpoint, which is made once.

What was interrupted goes on.
"""

import itertools
import shutil
from pathlib import Path

import pytest
import yaml

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

pytestmark = [pytest.mark.usefixtures("own_tasks"), pytest.mark.slow]


TASKS = ("icl_demo_short", "icl_demo_four")


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
    short = {"tasks": "icl_demo_short", "targets": "icl_demo_short"}
    four = {"tasks": "icl_demo_four,icl_demo_short", "steps": 2, "targets": ["icl_demo_four"]}
    train = {**FEW, "short": short, "four": four}
    return conduct(tmp_path_factory.mktemp("study") / "o", tasks=[*TASKS], train=train)


def lines(progress):
    """The lines of the study's table."""
    columns = end.columns_of(progress.study, progress.grid.tasks)
    found, _ = end.results_of(progress.folder, progress.cells())
    return end.in_order(end.board_of(found, columns), found)


def test_a_cell_is_train_followed_by_lm_eval(study, tmp_path):
    """Of every method; hf and deepthink run on the model that was trained under icl."""
    there = {}
    for path in study.folder.checkpoints.iterdir():
        name, _, _ = path.name.rpartition("-")
        there[name.partition(",")[2]] = path
    assert there.keys() == {"short,icl", "short,invicl", "four,icl", "four,invicl"}
    assert not (there["short,invicl"] / "checkpoints").exists()
    line = ["--model_args", f"pretrained={model_path()}", "--tasks", "icl_demo_short"]
    for name, value in FEW.items():
        line += [f"--{name}", value]
    trained_alone = tmp_path / "alone"
    commands.run("train", "invicl", *line, "--device", "cpu", "--output", trained_alone)
    assert weights(trained_alone) == weights(there["short,invicl"])
    for cell in study.cells():
        results = study.results(cell)
        facts = study.facts(cell)
        assert facts["model"] == str(model_path())
        assert "steps" in facts["options"]
        assert "save_steps" not in facts["options"]
        if cell.task != "icl_demo_short":
            assert facts["training"] == "four"
            continue
        under = "invicl" if cell.variant.method == "invicl" else "icl"
        folder = trained_alone if under == "invicl" else there["short,icl"]
        arguments = {"pretrained": str(folder), **cell.variant.arguments}
        alone = running.evaluated(study, cell, model_args=arguments)
        assert results["results"][cell.task]["acc,none"] == alone["results"][cell.task]["acc,none"]
        running.assert_alike(study.samples(cell), alone["samples"][cell.task])
        if cell.variant.method != "hf":  # lm-eval's own does not read it
            assert results["config"]["icl"]["trained"]["method"] == under


def test_what_was_interrupted_goes_on(tmp_path, study, steps, monkeypatch):
    """In the middle of a training and of the evaluation: nothing is trained or scored twice."""
    keys = {"methods": ["invicl", "pcw"], "train": {"short": STUDY["train"]}}
    steps["at"] = 2
    with pytest.raises(KeyboardInterrupt):
        conduct(tmp_path / "o", **keys)
    checkpoints = tmp_path / "o/checkpoints"
    assert [path.suffix for path in checkpoints.iterdir()] == [".part"]
    evaluate = UnitRunner._evaluate
    ran = []
    stops = [True]

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
    assert steps["done"] == 2 * 3
    assert len(ran) == len(set(ran)) == 2
    assert len(list(checkpoints.iterdir())) == 2
    assert not list(checkpoints.glob("*.part"))
    made = {path.name for path in checkpoints.iterdir()}
    (both,) = made & {model.checkpoint for model in study.grid.models}
    assert weights(checkpoints / both) == weights(study.folder.checkpoints / both)
    shutil.rmtree(checkpoints)  # the cells are there
    conduct(tmp_path / "o", **keys)
    assert steps["done"] == 2 * 3
    assert len(ran) == 2
    assert not checkpoints.exists()


def test_before_and_after_a_training(tmp_path, steps):
    """The models as they are have rows of their own; a training in two parts has both's costs.

    One of the tasks has its own number of demonstrations and decision rule.
    """
    own = {"task": "icl_demo_four", "num_fewshot": 2, "metadata": {"decide": "batch"}}
    keys = {
        "methods": ["icl", "invicl"],
        "train": {"tasks": "icl_demo_short", **FEW, "eval_steps": 3, "eval_documents": 4},
        "before": True,
        "tasks": ["icl_demo_short", own],
        "columns": [*TASKS],
        "num_fewshot": [1, None],
    }
    steps["at"] = 5
    with pytest.raises(KeyboardInterrupt):
        conduct(tmp_path / "o", **keys)
    progress = conduct(tmp_path / "o", **keys)
    shown = progress.cells(num_fewshot=1)
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
    assert set(spent.steps) == {3}
    assert steps["done"] == 2 * 3
    assert (spent[["seconds", "memory", "loss_before", "loss_after"]] > 0).all(axis=None)
    assert spent.tokens["invicl"] > spent.tokens["icl"]


def trained(method, **arguments):
    """The name of what is trained for a method with these arguments."""
    return trained_under(Variant(method, arguments, 7)).name


def test_which_arguments_are_trained_with():
    """All of a method's own that is one pass; of the others those that icl has too."""
    assert trained("hf") == "icl"
    assert trained("icl", positions="sequential", repeat=2) == "icl,repeat=2"
    assert trained("pcw", window_size=1) == "pcw"
    assert trained("invicl", positions="sequential") == "invicl,positions=sequential"
    assert trained("deepthink", T=3, eta=0.5) == "icl"
    assert trained("deepthink", positions="symmetric", T=2) == "icl,positions=symmetric"
    assert trained("batchicl", layer=2) == "icl"


def test_a_checkpoint_is_named_by_what_its_weights_depend_on():
    def name(model="pretrained=m", **options):
        arguments = dict(pair.split("=") for pair in model.split(","))
        training = Training("t", {"steps": 3, **options}, ())
        return Model(arguments, training, Variant("pcw", {}, 0)).checkpoint

    assert name() == name(save_steps=7) == name("pretrained=m,overflow=drop")
    assert name().startswith("m,t,pcw-")
    longer = name(steps=4)
    seeded = name(seed=1)
    typed = name("pretrained=m,dtype=bfloat16")
    other = name("pretrained=n")
    assert len({name(), longer, seeded, typed, other}) == 5


REFUSED = yaml.safe_load("""
"train: 'icl_demo_short': must be options of `lm-eval-icl train`":
  {train: icl_demo_short}
"dev: choose: 'window_size': `train` trains":
  {methods: {pcw: {window_size: [1, 2]}}, dev: {size: 4, choose: window_size}}
"train: trained: unknown argument 'step': did you mean 'steps'?":
  {train: {step: 3}}
"models: peft: train: icl_demo_short trains new weights":
  {models: "pretrained=m,peft=n"}
""")


@pytest.mark.parametrize("says", REFUSED)
def test_a_training_that_cannot_be_is_refused_in_one_line(tmp_path, says):
    """Before anything is trained or run."""
    file = running.write(tmp_path / "o.yaml", **{**STUDY, **REFUSED[says]})
    said = commands.refused("study", file, "--output", tmp_path / "o", "--device", "cpu")
    assert said.removeprefix(f"{file}: ").startswith(says), said
    assert not (tmp_path / "o/checkpoints").exists()


# MetaICL.


TARGETS = ("glue-mrpc", "medical_questions_pairs", "paws")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of MetaICL's data with made-up rows: three target tasks, and two to train on."""
    folder = tmp_path_factory.mktemp("metaicl")

    def write(task, k, seed, split, rows):
        test_metaicl.write(folder, task, k, seed, split, rows)

    for task, seed in itertools.product(TARGETS, SEEDS):
        write(task, 16, seed, "train", test_metaicl.made_rows(task, 16, seed, "train"))
        write(task, 16, seed, "test", test_metaicl.made_rows(task, 5, 0))
    for task in ("ethos-gender", "rotten_tomatoes"):
        write(task, 16384, 100, "train", test_metaicl.made_rows(task, 20, 1, "train"))
    return folder


def test_a_study_on_metaicl(data, tmp_path, checkpoint):
    """Trained on a setting, each cell is what lm_eval gives on the checkpoint, in all orders."""
    setting = "non_paraphrase_to_paraphrase"
    every = f"metaicl_{setting}"
    unseen = f"metaicl_{setting}_unseen"
    progress = conduct(
        tmp_path / "o",
        Options("cpu", 4, 3),
        metadata={"metaicl": str(data), "missing": "skip"},
        models=f"pretrained={checkpoint('gpt2')}",
        methods=["hf", "invicl"],
        tasks=[every, unseen],
        train={setting: {**FEW, "metaicl": setting}},
        metric="metaicl",
        columns={"all": [every], "unseen": [unseen]},
        seeds=[100, 13],
        num_fewshot=2,
        orders=2,
    )
    assert len(progress.cells()) == 2 * 3 * 2 * 2
    assert len(progress.grid.models) == 2
    of_one_set = {"seed": 13, "task": "metaicl_paws"}
    for cell in progress.cells(order=1, **of_one_set):
        assert progress.facts(cell)["indices"] == [1, 0]
    for cell in progress.cells(order=0, **of_one_set):
        assert progress.facts(cell)["indices"] == [0, 1]
        alone = running.evaluated(progress, cell, "metaicl", {"metaicl": str(data)})
        value = alone["results"][cell.task]["metaicl,none"]
        assert progress.score(cell) == value
        mine = progress.samples(cell)
        theirs = alone["samples"][cell.task]
        running.assert_same_prompts(mine, theirs)
        running.assert_alike(mine, theirs)
    hf, invicl = lines(progress)
    assert hf.method == "hf"
    assert invicl.method == "invicl"
    for column in (every, unseen):
        assert hf.cells[column].sensitivity is not None
        assert invicl.cells[column].sensitivity.mean == 0


@pytest.mark.parametrize("name", ["invicl-table2", "invicl-table8"])
def test_a_named_study_that_trains_is_planned(name, data, checkpoint, capsys):
    """With the options of its trainings checked, its tasks loaded, and its columns found."""
    study = grid.read(name, {})
    unseen = "hr_to_lr_unseen" in str(study)
    options = {
        "tasks": "metaicl_hr_to_lr_unseen" if unseen else "metaicl_hr_to_lr",
        "metadata": f"metaicl={data},missing=skip",
        "limit": "1",
        "model_args": f"pretrained={checkpoint('gpt2')}",
        "seeds": "100",
        "train": "steps=1",
    }
    line = ["study", name, "--dry_run", "--verbose"]
    for option, value in options.items():
        line += [f"--{option}", value]
    commands.run(*line)
    said = capsys.readouterr().out
    checkpoints = {trained_under(variant).name for variant in study.variants}
    assert f"{len(checkpoints)} checkpoints to be trained first" in said
    assert "hr_to_lr,invicl-" in said
