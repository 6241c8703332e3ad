"""lm-eval's `HFLM`, with one-line errors for what cannot be loaded or would fail in the middle of a run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from lm_eval_icl.errors import InputError, is_whole, one_line, refusing
from lm_eval_icl.harness.distributed import DividedDocuments
from lm_eval_icl.inference.checkpoints import WholeCheckpoints, refuse_vision
from lm_eval_icl.inference.identity import files_digest, hub_commit, model_identity
from lm_eval_icl.inference.memory import vocabulary_of

# The arguments of `HFLM` that have an effect if it is given a model that is loaded already.
_OF_A_LOADED_MODEL = set(
    "tokenizer revision subfolder trust_remote_code use_fast_tokenizer add_bos_token prefix_token_id backend device "
    "max_length softmax_dtype mixed_precision_dtype batch_size max_batch_size truncation logits_cache think_end_token "
    "enable_thinking chat_template_args".split()
)


@contextmanager
def _loading(what: str, advice: str = "") -> Iterator[None]:
    """Turn exceptions into an `InputError`, as `refusing` does; for a library that is missing, without `advice`, which
    is about files."""
    with refusing(what, advice):
        try:
            yield
        except ImportError as error:
            reason = one_line(error).partition(": ")[2]
            install = f": pip install {error.name}" if error.name and "install" not in reason else ""
            raise InputError(f"{what}, since a library is missing ({reason}){install}.") from error


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that is in memory, for several models to share. Nothing changes its weights any more.

    Attributes:
        lm: the model that has loaded it.
    """

    lm: CheckedHFLM


class CheckedHFLM(DividedDocuments):
    """A causal language model with its tokenizer, both checked when they are loaded.

    Args:
        pretrained: the name or folder of a checkpoint, a model, or a checkpoint that another model has loaded with
            these arguments.
        **kwargs: as for `HFLM`.

    Attributes:
        loaded: the checkpoint that other models share; None if this model has loaded its own.
        model_files_digest: a digest of the files that were loaded; None if there are none here.

    Raises:
        InputError: the checkpoint, the tokenizer or an argument cannot be used.
    """

    tokenizer: Any
    _model: Any
    _forwarded: dict[str, Any]

    def __init__(self, pretrained: str | transformers.PreTrainedModel | Loaded | None, **kwargs: Any) -> None:
        self.loaded = pretrained if isinstance(pretrained, Loaded) else None
        if self.loaded is not None:
            pretrained, kwargs = self.loaded.lm.pretrained, {**self.loaded.lm._forwarded, **kwargs}
        if pretrained is None or pretrained == "" or not (isinstance(pretrained, str) or hasattr(pretrained, "config")):
            raise InputError(
                f"pretrained={pretrained!r}: must be the name or folder of a checkpoint: --model_args pretrained=..."
            )
        self._forwarded = kwargs
        if not isinstance(pretrained, str):
            self._check_config(pretrained.config)
            if late := sorted(set(kwargs) - _OF_A_LOADED_MODEL):
                raise InputError(
                    f"model argument {late[0]}={kwargs[late[0]]!r}: says how to load a model, and pretrained is one "
                    "that is loaded already: leave it out."
                )
        with _loading("the model cannot be made of these arguments"):
            # The device that lm-eval's command line gives if none is asked for: the first GPU if there is one, or else
            # the CPU. (From Python, `HFLM` would take a GPU that is not there.)
            super().__init__(pretrained, **{"device": "cuda:0", **kwargs})
        self._check_tokenizer()
        files = self.loaded.lm.model_files_digest if self.loaded else files_digest(pretrained, **kwargs)
        self.model_files_digest: str | None = files

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes under "config" in the results file, with the digest of the model's files; and the commit
        of a model's files in the Hub's cache, where lm-eval could not ask the Hub."""
        info: dict[str, Any] = super().get_model_info()
        if self.model_files_digest:
            info["model_files_digest"] = self.model_files_digest
        if not info.get("model_sha") and (commit := hub_commit(self.pretrained, self.revision)):
            info["model_sha"] = commit
        return info

    def model_identity(self) -> dict[str, Any]:
        """What tells the model from others, by name (`inference.identity.model_identity`)."""
        return model_identity(self.model, self.model_files_digest, hub_commit(self.pretrained, self.revision))

    def _check_config(self, config: transformers.PreTrainedConfig) -> None:
        """For subclasses: refuse a model by its configuration, before its weights are loaded."""

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        if self.loaded is not None:
            self._config = self.loaded.lm.config
            self._check_config(self._config)
            return
        self._check_device()
        what = "no checkpoint there that transformers can read"
        if not Path(pretrained).is_dir():
            what = "neither a folder here nor a checkpoint that could be had from the Hub"
        with _loading(f"pretrained={pretrained!r}: {what}"):
            super()._get_config(pretrained, **kwargs)
        refuse_vision(pretrained, self._config)
        self._check_config(self._config)

    def _check_device(self) -> None:
        """Refuse a device that is not there: `HFLM` would take another one. (lm-eval's command gives cuda:0
        if no device is asked for, which stands for the CPU where there is no GPU.)"""
        device, placed = self._forwarded.get("device"), ("parallelize", "tp_plan", "device_map")
        if device in (None, "cuda:0"):
            return
        if hasattr(self, "accelerator") or any(self._forwarded.get(name) for name in placed):
            return
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(f"device={device!r}: here is no GPU that torch can use: give cpu, or leave it out.")
        if str(self.device) != device:
            raise InputError(f"device={device!r}: there is no such device here: give cpu, cuda, cuda:0, ...")

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.loaded is not None:
            self.tokenizer = self.loaded.lm.tokenizer
            return
        where = f"tokenizer={tokenizer!r}" if isinstance(tokenizer, str) else f"pretrained={pretrained!r}"
        advice = "Give the folder or name of one that fits: --model_args tokenizer=..."
        with _loading(f"{where}: its tokenizer cannot be loaded", advice):
            super()._create_tokenizer(pretrained, tokenizer, *args, **kwargs)
        # Some tokenizers load even if their files are missing, and then have only special tokens.
        if set(self.tokenizer.get_vocab()) <= set(self.tokenizer.all_special_tokens):
            raise InputError(f"{where}: its tokenizer has no vocabulary: are its files there? {advice}")

    def _create_model(self, *args: Any, pretrained: str, **kwargs: Any) -> None:
        if self.loaded is not None:
            self._model = self.loaded.lm._model
            return
        # lm-eval still passes `load_in_4bit` and the like to transformers as arguments, which takes a configuration.
        known = inspect.signature(transformers.BitsAndBytesConfig.__init__).parameters
        bits = {name: kwargs.pop(name) for name in kwargs.keys() & known.keys()}
        quantizing = [name for name, value in bits.items() if value]
        if bits.get("load_in_4bit") or bits.get("load_in_8bit"):
            kwargs["quantization_config"] = transformers.BitsAndBytesConfig(**bits)
        elif quantizing:
            raise InputError(
                f"{quantizing[0]}={bits[quantizing[0]]!r}: says how to quantize, and nothing is to be: give "
                "load_in_4bit=True or load_in_8bit=True too."
            )
        # The error also names the arguments about loading, since they are as likely wrong as the files.
        about = ("attn_implementation", "dtype", "peft", "delta", "device_map", *quantizing)
        arguments = [name for name in about if name in self._forwarded]
        what = ", ".join([f"pretrained={pretrained!r}", *(f"{name}={self._forwarded[name]!r}" for name in arguments)])
        quantized = kwargs.get("quantization_config") is not None
        advice = "" if arguments or quantized else "Check the files: is one cut short, or missing?"
        with _loading(f"{what}: the model cannot be loaded", advice):
            super()._create_model(*args, pretrained=pretrained, **kwargs)

    def _check_tokenizer(self) -> None:
        prefix, pad, rows = self.prefix_token_id, self.tokenizer.pad_token_id, vocabulary_of(self.model)
        if prefix is None:
            raise InputError(
                "the tokenizer names no BOS and no EOS token, one of which stands for an empty context: "
                "say which token to take, --model_args prefix_token_id=N."
            )
        if not is_whole(prefix) or not 0 <= prefix < rows:
            raise InputError(f"prefix_token_id={prefix!r}: must be one of the model's tokens, 0 to {rows - 1}.")
        if pad is None or pad >= rows:
            # lm-eval adds a padding token if the tokenizer has none. Padding is masked, so any known token will do.
            self.tokenizer.pad_token_id = prefix

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template that `--apply_chat_template` chooses.

        Raises:
            InputError: the tokenizer has no such template.
        """
        if chat_template and not self.tokenizer.chat_template:
            raise InputError(
                f"--apply_chat_template: the tokenizer of {self.tokenizer.name_or_path} has no chat template: leave "
                "the option out, or give a tokenizer that has one: --model_args tokenizer=..."
            )
        with refusing(f"--apply_chat_template {chat_template}", kinds=(ValueError,)):
            template: str | None = super().chat_template(chat_template)
        return template

    def _get_backend(self, *args: Any, **kwargs: Any) -> None:
        super()._get_backend(*args, **kwargs)
        self.AUTO_MODEL_CLASS = WholeCheckpoints
        if self.backend != "causal":
            raise InputError(
                f"{self.config.model_type!r} is an encoder-decoder model; these methods are defined "
                "for decoders (causal language models) only."
            )
