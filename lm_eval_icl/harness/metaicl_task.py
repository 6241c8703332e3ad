"""MetaICL's tasks in lm-eval: its files, its sequences, its decision and its metric, for every
model with a tokenizer.

The requests carry their token ids (`lm_eval_icl.prompts.encoded`), because MetaICL tokenizes and
cuts piece by piece. So the tasks have to know the model before requests are built: a patch of
`evaluate` tells them (`MetaICLTask.bind`). A patch of lm-eval's tokenization hands the ids to
lm-eval's own models (`given_ids`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.model import LM, TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks.manager import TaskManager
from transformers import PreTrainedTokenizerBase

from lm_eval_icl.errors import InputError, naming
from lm_eval_icl.files import as_json, digest
from lm_eval_icl.harness.private_names import Kind, encodes_like_all
from lm_eval_icl.harness.samplers import GivenSampler
from lm_eval_icl.harness.task_state import state_of
from lm_eval_icl.metaicl.data import (
    SHOTS,
    Row,
    check_group,
    checked_seed,
    classifies,
    folder,
    skips,
)
from lm_eval_icl.metaicl.reading import Reader, reader
from lm_eval_icl.metaicl.strings import (
    EncodedExample,
    Sequences,
    decision,
    encoded,
    macro_f1,
    mean_losses,
)
from lm_eval_icl.prompts.encoded import EncodedPrompt, EncodedText
from lm_eval_icl.prompts.tokens import Context

Doc = dict[str, Any]


class MetaICLTask(ConfigurableTask):
    """A target task of MetaICL.

    `--metadata` says where the files are (`metaicl=DATA`), whether a group goes on without tasks
    that have no files (`missing=skip`), and whether an option's loss after the input "N/A" is
    subtracted (`pmi=True`). The YAML file names the task (`dataset_name`) and says whether it is in
    the channel form (`channel`). The YAML file of a group names the setting and the list of tasks
    (`setting`, `split`).

    Args:
        config: the configuration of the YAML file, with `--metadata`.

    Raises:
        InputError: the task has no files, or its files cannot be used.
    """

    # Why these tasks take no other demonstrations.
    own_demonstrations = (
        "MetaICL's demonstrations are the rows of the seed's training file: leave it out."
    )

    def __init__(self, config: dict[str, Any]) -> None:
        config = {key: value for key, value in config.items() if key != "class"}
        self.channel = bool(config.pop("channel", False))
        setting = config.pop("setting", None)
        split = config.pop("split", "test")
        self.source = str(config["dataset_name"])
        metadata = config.get("metadata") or {}
        self.files = folder(metadata)
        if "demonstrations" in metadata:
            raise InputError(
                f"--metadata demonstrations={metadata['demonstrations']}: {self.own_demonstrations}"
            )
        self.pmi = bool(metadata.get("pmi"))
        if setting is not None:
            check_group(self.files, setting, split, skips(metadata))
        self._rows: tuple[Row, ...] = ()  # of the seed
        self._sequences: Sequences | None = None
        self._shown: list[EncodedExample] = []
        self._contexts: dict[Context, Context] = {}
        # Document -> for each of its requests, how many tokens are scored.
        self._made: dict[int, list[int]] = {}
        super().__init__(config=config)
        self.sampler = GivenSampler([])

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        self.dataset = {"test": _dataset(self.files.test(self.source))}

    def fewshot_docs(self) -> list[Doc] | None:
        return [_doc(i, row) for i, row in enumerate(self._rows)] or None

    def set_fewshot_seed(self, seed: int | None = None) -> None:
        """Take the files of this seed."""
        number = checked_seed(seed)
        self._rows = self.files.shown(self.source, number)
        self.dataset = {"test": _dataset(self.files.test(self.source, number))}
        self.sampler = GivenSampler(self.fewshot_docs() or [])
        super().set_fewshot_seed(seed)

    @property
    def demonstration_rows(self) -> str:
        """A digest of the demonstrations' rows, in any order. A prompt may have only a part of the
        first row."""
        rows = self.sampler.df[: int(self.config.num_fewshot or 0)]
        texts = sorted(map(as_json, rows))
        return digest("\n".join(texts))[:32] if texts else ""

    # Requests.

    def bind(self, model: LM) -> None:
        """Take the tokenizer and the limits of the model that is evaluated.

        Raises:
            InputError: the model does not tell its tokens, so that the mean loss of a token cannot
                be computed.
        """
        self._sequences = Sequences(_reader(model, str(self.config.task)), self.channel)

    def build_all_requests(self, **kwargs: Any) -> None:
        """Build all requests as lm-eval does, for the model that `bind` was told.

        Raises:
            InputError: there is no seed or no model, or an option of lm-eval is given that would
                change the sequences.
        """
        if state_of(self).requests_are_made:  # by a study
            return
        name = self.config.task
        shots = int(self.config.num_fewshot or 0)
        if self._sequences is None:
            raise InputError(
                f"task {name!r}: its sequences are cut by the model's tokenizer, which is not known here: run it with "
                "lm_eval, or with lm_eval.evaluate of lm_eval 0.4.13."
            )
        if shots > SHOTS:
            raise InputError(
                f"task {name!r}: num_fewshot={shots}: MetaICL's training files have {SHOTS} rows."
            )
        for option in ("apply_chat_template", "system_instruction", "cache_requests"):
            if kwargs.get(option):
                raise InputError(
                    f"task {name!r}: --{option}: MetaICL's sequences are fixed: leave it out."
                )
        if not self._rows:
            checked_seed(None)
        rows = [_row(doc) for doc in self.sampler.df[:shots]]
        self._shown = self._sequences.encoded_demonstrations(rows)
        self._made = {}
        self._contexts = {}
        super().build_all_requests(**kwargs)

    def fewshot_context(self, *args: Any, **kwargs: Any) -> str:
        """Nothing: `construct_requests` makes the prompts, one for each option."""
        return ""

    def construct_requests(self, doc: Doc, ctx: Any, **kwargs: Any) -> list[Instance]:
        assert self._sequences is not None
        row = _row(doc)
        rows = [row, dataclasses.replace(row, input="N/A")] if self.pmi else [row]
        with naming(f"task {self.config.task!r}, document {doc['row']}"):
            joined = []
            for query in rows:
                options = self._sequences.encoded_options(query, not self._shown)
                joined += self._sequences.join(self._shown, options)
        self._made[doc["row"]] = [len(sequence.target) for sequence in joined]
        arguments = [
            encoded(sequence, self._sequences.reader, self._contexts) for sequence in joined
        ]
        kwargs = {name: value for name, value in kwargs.items() if name == "metadata"}
        return [
            Instance("loglikelihood", doc, pair, i, **kwargs) for i, pair in enumerate(arguments)
        ]

    # The metric.

    def process_results(self, doc: Doc, results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
        losses = mean_losses([logprob for logprob, _ in results], self._made[doc["row"]])
        if self.pmi:
            losses = losses[: len(doc["options"])] - losses[len(doc["options"]) :]
        # lm-eval writes documents into its samples, from which alone the option with the smallest
        # loss is not known.
        doc["prediction"] = decision(losses)
        right = doc["output"].strip()
        answer = doc["options"][doc["prediction"]].strip()
        correct = float(right == answer)
        return {"metaicl": (right, answer) if classifies(self.source) else correct, "acc": correct}

    def aggregation(self) -> dict[str, Callable[..., float]]:
        return {"metaicl": macro_f1 if classifies(self.source) else mean, "acc": mean}

    def higher_is_better(self) -> dict[str, bool]:
        return {"metaicl": True, "acc": True}


def tell_model(task: Any, model: LM) -> None:
    """Tell one of these tasks which model is evaluated, if its requests are not made yet."""
    if isinstance(task, MetaICLTask) and not state_of(task).requests_are_made:
        task.bind(model)


# The files.


def leave_out_missing(manager: TaskManager) -> None:
    """Take tasks that have no files out of MetaICL's groups, if `--metadata` says missing=skip."""
    metadata = manager.metadata or {}
    if not skips(metadata):
        return
    files = folder(metadata)
    index = manager.task_index
    for name, entry in list(index.items()):
        config = entry.cfg or {}
        if entry.kind != Kind.GROUP or not name.startswith("metaicl_") or "setting" not in config:
            continue
        tasks = {task: index[task].cfg or {} for task in config["task"]}
        missing = set(files.without_test([str(cfg["dataset_name"]) for cfg in tasks.values()]))
        kept = [task for task, cfg in tasks.items() if cfg["dataset_name"] not in missing]
        if missing and kept:
            index[name] = dataclasses.replace(entry, yaml_path=None, cfg={**config, "task": kept})


def _doc(number: int, row: Row) -> Doc:
    return {
        "row": number,
        **dataclasses.asdict(row),
        "options": list(row.options),
        "right": row.right,
    }


def _row(doc: Doc) -> Row:
    return Row(doc["input"], doc["output"], tuple(doc["options"]))


@functools.lru_cache(maxsize=64)
def _dataset(rows: tuple[Row, ...]) -> Dataset:
    return Dataset.from_list([_doc(i, row) for i, row in enumerate(rows)])


# The model.


def _reader(model: LM, task: str) -> Reader:
    from lm_eval_icl.harness.models import ICLModel

    if isinstance(model, ICLModel):
        limits = model.runner.limits(model.max_length)
        return dataclasses.replace(
            reader(model.tokenizer, model.add_bos_token, model.max_length),
            # A demonstration that is cut is another for every query.
            alike=model.method.treats_demonstrations_alike
            or model.method.needs_answers
            or bool(limits.also),
            longest_first=limits.longest_go_first,
            canonical=model.canonical_order,
        )
    tokenizer: Any = getattr(model, "tokenizer", None)
    usable = isinstance(tokenizer, PreTrainedTokenizerBase) and isinstance(model, TemplateLM)
    if not usable or not encodes_like_all(model) or model.backend != "causal":
        raise InputError(
            f"task {task!r}: MetaICL compares options by their mean loss per token, which "
            f"{type(model).__name__} does not report: take hf, or a method of this package."
        )
    return reader(tokenizer, getattr(model, "add_bos_token", None), int(model.max_length))


def given_ids(
    original: Callable[..., Any], lm: Any, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Wrapper of `TemplateLM._encode_pair`: a request that comes with its token ids is not
    tokenized again."""
    if isinstance(context, EncodedPrompt) and isinstance(continuation, EncodedText):
        return context.ids, list(continuation.ids)
    return original(lm, context, continuation)
