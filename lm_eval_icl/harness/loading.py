"""lm-eval's `HFLM`, with one-line errors for checkpoints and tokenizers that cannot be loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.errors import InputError, did_you_mean, refusing
from lm_eval_icl.harness.distributed import leave_in_order, total
from lm_eval_icl.inference.checkpoints import WholeCheckpoints, refuse_vision
from lm_eval_icl.inference.identity import files_digest, hub_commit, model_identity
from lm_eval_icl.inference.memory import vocabulary_of


def _refuse_unknown(arguments: Iterable[str]) -> None:
    """Refuse arguments that would be ignored, since transformers, which refuses them otherwise,
    loads no model."""
    known = [name for name in inspect.signature(HFLM.__init__).parameters if name != "kwargs"]
    for name in arguments:
        if name not in known:
            near = did_you_mean(name, known)
            raise InputError(
                f"model argument {name!r}: unknown for a model that is a Python object.{near}"
            )


class CheckedHFLM(HFLM):
    """A causal language model with its tokenizer, both checked when they are loaded.

    Args:
        pretrained: the name or folder of a checkpoint, a model, or a model of this class, whose
            checkpoint and arguments are then shared. The weights do not change any more.
        **kwargs: as for `HFLM`.

    Attributes:
        loaded: the model that has loaded the checkpoint; None if this model has.
        model_files_digest: a digest of the files that were loaded; None if they are not on this
            machine.

    Raises:
        InputError: the checkpoint, the tokenizer or an argument cannot be used.
    """

    tokenizer: Any
    _model: Any
    _forwarded: dict[str, Any]

    def __init__(
        self, pretrained: str | transformers.PreTrainedModel | CheckedHFLM | None, **kwargs: Any
    ) -> None:
        self.loaded = pretrained if isinstance(pretrained, CheckedHFLM) else None
        if self.loaded is not None:
            pretrained = self.loaded.pretrained
            kwargs = {**self.loaded._forwarded, **kwargs}
        is_model = hasattr(pretrained, "config")
        if not is_model and not (isinstance(pretrained, str) and pretrained):
            raise InputError(
                f"pretrained={pretrained!r}: must be the name or folder of a checkpoint: --model_args pretrained=..."
            )
        if self.loaded is None and not isinstance(pretrained, str):
            _refuse_unknown(kwargs)
        self._forwarded = kwargs
        with refusing("the model cannot be made of these arguments"):
            # The default device of lm-eval's command line: the first GPU if there is one, or else
            # the CPU. (From Python, `HFLM` would take a GPU even on a machine without one.)
            super().__init__(pretrained, **{"device": "cuda:0", **kwargs})
        if hasattr(self, "accelerator"):
            # `HFLM` sets these numbers only for processes on the GPUs of one machine.
            self._rank = self.accelerator.process_index
            self._world_size = self.accelerator.num_processes
            leave_in_order()
        self._check_tokenizer()
        self.model_files_digest: str | None
        if self.loaded is not None:
            self.model_files_digest = self.loaded.model_files_digest
        else:
            self.model_files_digest = files_digest(pretrained, **kwargs)

    def total(self, share: dict[str, Any]) -> dict[str, Any]:
        """The sum of the counts of all processes, on the process that gathers them; its own counts
        on every other."""
        return total(self.gather_object(share) or [share])

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes under "config" in the results file, with the digest of the model's
        files. If lm-eval could not ask the Hub for the model's commit, the commit of the files in
        the Hub's cache is added."""
        info: dict[str, Any] = super().get_model_info()
        if self.model_files_digest:
            info["model_files_digest"] = self.model_files_digest
        if not info.get("model_sha") and (commit := hub_commit(self.pretrained, self.revision)):
            info["model_sha"] = commit
        return info

    def model_identity(self) -> dict[str, Any]:
        """The facts that tell this model from other models
        (`inference.identity.model_identity`)."""
        return model_identity(
            self.model, self.model_files_digest, hub_commit(self.pretrained, self.revision)
        )

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        if self.loaded is not None:
            self._config = self.loaded.config
            return
        # cuda:0 is the default of lm-eval's command and stands for the CPU where there is no GPU.
        device = str(self._forwarded.get("device", "cuda:0"))
        if device.startswith("cuda") and device != "cuda:0" and not torch.cuda.is_available():
            raise InputError(
                f"device={device!r}: torch finds no GPU here: give cpu, or leave it out."
            )
        what = "the folder has no checkpoint that transformers can read"
        if not Path(pretrained).is_dir():
            what = "is neither a folder here nor a checkpoint that could be loaded from the Hub"
        with refusing(f"pretrained={pretrained!r}: {what}"):
            super()._get_config(pretrained, **kwargs)
        refuse_vision(pretrained, self._config)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.loaded is not None:
            self.tokenizer = self.loaded.tokenizer
            return
        where = f"pretrained={pretrained!r}"
        if isinstance(tokenizer, str):
            where = f"tokenizer={tokenizer!r}"
        advice = "Give the folder or name of one that fits: --model_args tokenizer=..."
        with refusing(f"{where}: its tokenizer cannot be loaded", advice):
            super()._create_tokenizer(pretrained, tokenizer, *args, **kwargs)
        # Some tokenizers load even if their files are missing, and then have only special tokens.
        if set(self.tokenizer.get_vocab()) <= set(self.tokenizer.all_special_tokens):
            raise InputError(
                f"{where}: its tokenizer has no vocabulary: check that its files are there. {advice}"
            )

    def _create_model(self, *args: Any, pretrained: str, **kwargs: Any) -> None:
        if self.loaded is not None:
            self._model = self.loaded._model
            return
        # lm-eval passes `load_in_4bit` and the like to transformers as arguments; transformers
        # takes a configuration.
        known = inspect.signature(transformers.BitsAndBytesConfig.__init__).parameters
        bits = {name: kwargs.pop(name) for name in kwargs.keys() & known.keys()}
        if any(bits.values()):
            kwargs["quantization_config"] = transformers.BitsAndBytesConfig(**bits)
        # The error also names the arguments about loading, since they are as likely wrong as the
        # files.
        what = f"pretrained={pretrained!r}"
        for name, value in self._forwarded.items():
            if name not in ("tokenizer", "batch_size", "max_length", "device"):
                what += f", {name}={value!r}"
        with refusing(f"{what}: the model cannot be loaded"):
            super()._create_model(*args, pretrained=pretrained, **kwargs)

    def _check_tokenizer(self) -> None:
        prefix = self.prefix_token_id
        pad = self.tokenizer.pad_token_id
        rows = vocabulary_of(self.model)
        if prefix not in range(rows):
            raise InputError(
                f"prefix_token_id={prefix!r}: must be one of the model's tokens, 0 to {rows - 1}, that stands for an "
                "empty context, since the tokenizer names no BOS and no EOS token: --model_args prefix_token_id=N."
            )
        if pad is None or pad >= rows:
            # lm-eval adds a padding token if the tokenizer has none. Padding is masked, so any
            # known token will do.
            self.tokenizer.pad_token_id = prefix

    def _get_backend(self, *args: Any, **kwargs: Any) -> None:
        super()._get_backend(*args, **kwargs)
        self.AUTO_MODEL_CLASS = WholeCheckpoints
        if self.backend != "causal":
            raise InputError(
                f"{self.config.model_type!r} is an encoder-decoder model; these methods are defined "
                "for decoders (causal language models) only."
            )
