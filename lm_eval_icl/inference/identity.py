"""The identity of a model and of a method in a user's file: when two of them are the same.

A model is identified by its configuration, and by a digest of its files if it comes from a folder,
or by the commit of its files if it comes from the Hub. The code that runs it is identified by this
package's version and commit (`lm_eval_icl.version`). A method in a user's file is identified by a
digest of that file.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from lm_eval_icl.errors import log

# The files of a checkpoint's weights, adapter, configuration, code and tokenizer, without the state
# of a trainer. GGUF files are not among them, since a folder may have many, and only one is loaded.
_MODEL_FILES = re.compile(
    r".*\.(safetensors|safetensors\.index\.json|bin\.index\.json|py|model|tiktoken|jinja)"
    r"|(?!training_args|optimizer|scheduler|sampler|random_states).*\.bin"
    r"|((generation_|adapter_|quantize_|quantization_)?config|tokenizer|tokenizer_config"
    r"|special_tokens_map|added_tokens|vocab)\.json|(vocab|merges)\.txt"
)


def model_identity(model: Any, files: str | None, commit: str | None) -> dict[str, Any]:
    """The facts that identify a loaded model, by name.

    Args:
        model: the model. Its configuration and its generation settings are among the facts.
        files: the `files_digest` of its files.
        commit: the `hub_commit` of its files.
    """
    facts: dict[str, Any] = {}
    # The configuration comes first, since an error message names the first difference.
    for name in ("config", "generation_config"):
        settings = getattr(model, name, None)
        for key, value in settings.to_diff_dict().items() if settings is not None else ():
            # The checkpoint's path, and the version of transformers that wrote it, are left out.
            if not key.endswith(("version", "_name_or_path")):
                facts[f"{name}.{key}"] = value
    facts["model_files_digest"] = files
    facts["model_sha"] = commit
    # The facts are equal to what is later read from a JSON file.
    return json.loads(json.dumps(facts, default=str))


def hub_commit(pretrained: Any, revision: str | None = None) -> str | None:
    """The commit of a model from the Hub whose files are in the local cache, or None."""
    if isinstance(pretrained, str) and not Path(pretrained).is_dir():
        with suppress(ValueError):  # `pretrained` cannot be a name on the Hub
            cached = try_to_load_from_cache(pretrained, "config.json", revision=revision)
            if isinstance(cached, str):  # .../snapshots/COMMIT/config.json
                return Path(cached).parent.name
    return None


def source_digest(cls: type) -> str | None:
    """A digest of a class's source file; None for a class of this package, or without a file."""
    if cls.__module__.partition(".")[0] == "lm_eval_icl":
        return None
    try:
        return hashlib.sha256(Path(inspect.getsourcefile(cls) or "").read_bytes()).hexdigest()[:16]
    except (OSError, TypeError):
        return None


def files_digest(
    pretrained: Any, *, subfolder: str = "", gguf_file: str | None = None, **others: Any
) -> str | None:
    """A digest of the names and all bytes of the local files of a model of lm-eval's `hf`.

    The files are read rather than the weights in memory, so that nothing is copied back from a
    device.

    Args:
        pretrained: this and the others are arguments of `HFLM`. The tokenizer, peft and delta may
            be folders, too.

    Returns:
        None if there are no such files (for a model from the Hub or made in Python), or a file
        cannot be read.
    """
    places = {"pretrained": pretrained}
    for role in ("tokenizer", "peft", "delta"):
        places[role] = others.get(role)
    files_by_role: list[tuple[str, Path]] = []
    try:
        for role, place in places.items():
            if not isinstance(place, str) or not Path(place).is_dir():
                continue
            folder = Path(place)
            if role in ("pretrained", "tokenizer"):
                folder /= subfolder
            for path in sorted(folder.iterdir()):
                if _MODEL_FILES.fullmatch(path.name) and path.is_file():
                    files_by_role.append((role, path))
            if gguf_file and role == "pretrained":
                files_by_role.append((role, folder / gguf_file))
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(_digest, files_by_role))
    except OSError as error:
        log.warning(
            "%s: a file cannot be read, so no digest of the model's files is recorded (%s).",
            pretrained,
            error,
        )
        return None
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16] if digests else None


def _digest(role_and_file: tuple[str, Path]) -> bytes:
    role, path = role_and_file
    with path.open("rb") as file:
        return f"{role} {path.name} ".encode() + hashlib.file_digest(file, "sha256").digest()
