"""lm-eval's `HFLM`, with one clear line for what cannot be loaded, or would fail in the middle of a run."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import transformers
from lm_eval.models.huggingface import HFLM

from lm_eval_icl.errors import InputError, is_whole, refusing


class LoadedLM(HFLM):
    """A decoder with its tokenizer, in one of the processes that divide a run.

    Args:
        pretrained: the name or folder of a checkpoint, or a model.
        **kwargs: `HFLM`'s.

    Raises:
        InputError: the checkpoint, the tokenizer or an argument cannot be used.
    """

    def __init__(self, pretrained: str | transformers.PreTrainedModel | None, **kwargs: Any) -> None:
        if pretrained is None or not (isinstance(pretrained, str) or hasattr(pretrained, "config")):
            raise InputError(
                f"lm-eval-icl: pretrained={pretrained!r}: must be the name or folder of a checkpoint: --model_args "
                "pretrained=..."
            )
        self._forwarded = kwargs
        if not isinstance(pretrained, str):
            self._check_config(pretrained.config)
        with refusing("the model cannot be made of these arguments"):
            super().__init__(pretrained, **kwargs)
        if self.batch_size != "auto" and self.batch_size < 1:
            raise InputError(f"lm-eval-icl: batch_size={self.batch_size}: must be a whole number, 1 or more, or auto.")
        if not is_whole(self.max_batch_size) or self.max_batch_size < 1:
            raise InputError(f"lm-eval-icl: max_batch_size={self.max_batch_size}: must be a whole number, 1 or more.")
        self._check_tokenizer()
        if hasattr(self, "accelerator"):
            # `HFLM` divides the documents only among the GPUs of one machine; these numbers are for any processes.
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes

    def _check_config(self, config: transformers.PreTrainedConfig) -> None:
        """Refuse what a model's configuration shows before its weights are loaded."""

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        path = Path(pretrained)
        if path.is_absolute() and not path.is_dir() and not kwargs.get("gguf_file"):
            raise InputError(f"lm-eval-icl: pretrained={pretrained!r}: no checkpoint there (no such folder).")
        with refusing(f"pretrained={pretrained!r}: no checkpoint there that transformers can read"):
            super()._get_config(pretrained, **kwargs)
        self._check_config(self._config)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        where = f"tokenizer={tokenizer!r}" if isinstance(tokenizer, str) else f"pretrained={pretrained!r}"
        advice = "Give the folder or name of one that fits: --model_args tokenizer=..."
        with refusing(f"{where}: its tokenizer cannot be loaded", advice):
            super()._create_tokenizer(pretrained, tokenizer, *args, **kwargs)
        # Some tokenizers are made without their files, and then know no text.
        if set(self.tokenizer.get_vocab()) <= set(self.tokenizer.all_special_tokens):
            raise InputError(f"lm-eval-icl: {where}: its tokenizer has no vocabulary: are its files there? {advice}")

    def _create_model(self, *args: Any, pretrained: str, **kwargs: Any) -> None:
        # lm-eval still hands `load_in_4bit` and the like to transformers by name: it takes a configuration.
        known = inspect.signature(transformers.BitsAndBytesConfig.__init__).parameters
        bits = {name: kwargs.pop(name) for name in kwargs.keys() & known.keys()}
        if bits.get("load_in_4bit") or bits.get("load_in_8bit"):
            kwargs["quantization_config"] = transformers.BitsAndBytesConfig(**bits)
        elif asked := [name for name, value in bits.items() if value]:
            raise InputError(
                f"lm-eval-icl: {asked[0]}={bits[asked[0]]!r}: says how to quantize, and nothing is to be: give "
                "load_in_4bit=True or load_in_8bit=True too."
            )
        # What was given for loading alone is as likely at fault as the files.
        given = [k for k in ("attn_implementation", "dtype", "peft", "delta", "device_map") if k in self._forwarded]
        what = ", ".join([f"pretrained={pretrained!r}", *(f"{name}={self._forwarded[name]!r}" for name in given)])
        advice = "" if given else "Check the files: is one cut short, or missing?"
        with refusing(f"{what}: the model cannot be loaded", advice):
            super()._create_model(*args, pretrained=pretrained, **kwargs)

    def _check_tokenizer(self) -> None:
        prefix, pad, rows = self.prefix_token_id, self.tokenizer.pad_token_id, self._rows()
        if prefix is None:
            raise InputError(
                "lm-eval-icl: the tokenizer names no BOS and no EOS token, one of which stands for an empty context: "
                "say which token to take, --model_args prefix_token_id=N."
            )
        if not is_whole(prefix) or not 0 <= prefix < rows:
            raise InputError(
                f"lm-eval-icl: prefix_token_id={prefix!r}: must be one of the model's tokens, 0 to {rows - 1}."
            )
        if pad is None or pad >= rows:
            # lm-eval adds one where a tokenizer has none; padding is masked, so that any token will do.
            self.tokenizer.pad_token_id = prefix

    def _rows(self) -> int:
        """How many tokens the model knows: ids from here on would fail in the middle of a forward pass."""
        embedding: Any = self.model.get_input_embeddings()
        return int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])

    def _get_backend(self, *args: Any, **kwargs: Any) -> None:
        super()._get_backend(*args, **kwargs)
        self.AUTO_MODEL_CLASS = _Complete
        if self.backend != "causal":
            raise InputError(
                f"lm-eval-icl: {self.config.model_type!r} loads as an encoder-decoder model; these methods are defined "
                "for decoders (causal language models) only."
            )


class _Complete:
    """`AutoModelForCausalLM` for whole checkpoints: transformers makes up at random what one lacks, and goes on."""

    @staticmethod
    def from_pretrained(pretrained: str, **kwargs: Any) -> transformers.PreTrainedModel:
        kwargs["output_loading_info"] = True
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(pretrained, **kwargs)
        model, report = loaded
        if missing := sorted(report["missing_keys"]):
            raise InputError(
                f"lm-eval-icl: pretrained={pretrained!r}: {len(missing)} of the weights of {type(model).__name__} are "
                f"not in the checkpoint ({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}), and random "
                "ones would stand in for them: is it the checkpoint of another kind of model, or not whole?"
            )
        return model
