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
import re
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from lm_eval_icl.errors import log
from lm_eval_icl.files import digest, kept

# The files of a checkpoint's weights, adapter, configuration, code and tokenizer, without the state
# of a trainer. GGUF files are not among them, since a folder may have many, and only one is loaded.
_MODEL_FILES = re.compile(
    r".*\.(safetensors|safetensors\.index\.json|bin\.index\.json|py|model|tiktoken|jinja)"
    r"|(?!training_args|optimizer|scheduler|sampler|random_states).*\.bin"
    r"|((generation_|adapter_|quantize_|quantization_)?config|tokenizer|tokenizer_config"
    r"|special_tokens_map|added_tokens|vocab)\.json|(vocab|merges)\.txt"
)

_WEIGHTS = re.compile(
    r".*\.safetensors|(?!training_args|optimizer|scheduler|sampler|random_states).*\.bin"
)
_CHUNK = 2**24  # bytes that are read at a time
_READERS = 8  # files that are read at the same time


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
    if files is None and commit is None:
        facts["unknown_weights"] = uuid.uuid4().hex  # no other model is known to have them
    # The facts are equal to what is later read from a JSON file.
    return json.loads(json.dumps(facts, default=str))


def hub_commit(pretrained: Any, revision: str | None = None) -> str | None:
    """The commit of a model from the Hub whose files are in the local cache, or None."""
    folder = _folder(pretrained, revision)
    if folder is None or folder == Path(pretrained):
        return None
    return folder.name  # .../snapshots/COMMIT


def source_digest(cls: type) -> str | None:
    """A digest of a class's source file; None for a class of this package, or without a file."""
    if cls.__module__.partition(".")[0] == "lm_eval_icl":
        return None
    try:
        return hashlib.sha256(Path(inspect.getfile(cls)).read_bytes()).hexdigest()[:16]
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
            be folders, too, or names on the Hub.

    Returns:
        None if there are no such files (for a model from the Hub), a file cannot be read, or the
        model was made in Python.
    """
    if not isinstance(pretrained, str):
        return None
    places: dict[str, Any] = {"pretrained": pretrained}
    for role in ("tokenizer", "peft", "delta"):
        places[role] = others.get(role)
    files_by_role: list[tuple[str, Path]] = []
    try:
        for role, place in places.items():
            folder = _folder(place, others.get("revision"))
            if folder is None or (role == "pretrained" and folder != Path(pretrained)):
                continue  # the commit of a model from the Hub is known
            if role in ("pretrained", "tokenizer"):
                folder /= subfolder
            for path in sorted(folder.iterdir()):
                if _MODEL_FILES.fullmatch(path.name) and path.is_file():
                    files_by_role.append((role, path))
            if gguf_file and role == "pretrained":
                files_by_role.append((role, folder / gguf_file))
        with ThreadPoolExecutor(_READERS) as pool:
            digests = list(pool.map(_digest, files_by_role))
    except OSError as error:
        log.warning(
            "%s: a file cannot be read, so no digest of the model's files is recorded (%s).",
            pretrained,
            error,
        )
        return None
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16] if digests else None


def weights_digest(
    pretrained: Any, revision: str | None = None, adapters: Sequence[Any] = ()
) -> str | None:
    """A digest of a model's tensors and configuration.

    It is the same in every folder, and in any number of files. The digests of a file's tensors are
    kept by the file's path, size and time, since reading a large model takes long.

    Args:
        pretrained: a folder, or the name of a model whose files are in the local cache of the Hub.
        adapters: folders whose weights are added to the model's (`peft`, `delta`).

    Returns:
        None if there are no files of weights, or one cannot be read.
    """
    tensors: list[str] = []
    for place in (pretrained, *filter(None, adapters)):
        folder = _folder(place, revision)
        if folder is None:
            return None
        try:
            files = sorted(path for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name))
            if any(path.suffix == ".safetensors" for path in files):
                files = [path for path in files if path.suffix == ".safetensors"]
            if not files:
                return None
            with ThreadPoolExecutor(_READERS) as pool:
                for digests in pool.map(_tensor_digests, files):
                    tensors += [f"{name} {digest}" for name, digest in digests.items()]
            tensors.append(_settings(folder))
        # Of a file that is none of weights, any number may stand for the size of the header.
        except (OSError, ValueError, MemoryError, OverflowError) as error:
            log.warning("%s: no digest of the weights is recorded (%s).", place, error)
            return None
    return digest("\n".join(sorted(tensors)))[:32]


def _folder(place: Any, revision: str | None) -> Path | None:
    """The folder of a model's files: the place itself, or the local cache of the Hub."""
    if not isinstance(place, str):
        return None
    if Path(place).is_dir():
        return Path(place)
    with suppress(ValueError):  # no name on the Hub
        for name in ("config.json", "adapter_config.json", "tokenizer_config.json"):
            cached = try_to_load_from_cache(place, name, revision=revision)
            if isinstance(cached, str):
                return Path(cached).parent
    return None


def _settings(folder: Path) -> str:
    """The configuration, without the path and the version that wrote it."""
    settings: dict[str, Any] = {}
    for name in ("config.json", "adapter_config.json"):
        if (folder / name).is_file():
            settings |= json.loads((folder / name).read_text(encoding="utf-8"))
    for name in ("_name_or_path", "transformers_version", "base_model_name_or_path"):
        settings.pop(name, None)
    return json.dumps(settings, sort_keys=True)


def _tensor_digests(path: Path) -> dict[str, str]:
    """Name -> digest of each tensor in a file; the file's own name for a file of another format."""
    file = path.resolve()
    facts = file.stat()

    def read() -> dict[str, str]:
        digests = _digests_of_safetensors(file) if path.suffix == ".safetensors" else {}
        if not digests:
            with file.open("rb") as opened:
                digests = {path.name: hashlib.file_digest(opened, "sha256").hexdigest()}
        return digests

    known = [str(file), facts.st_size, facts.st_mtime_ns]
    return dict(kept("weights", path.stem, known, read).value)


def _digests_of_safetensors(file: Path) -> dict[str, str]:
    digests = {}
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            start, end = tensor["data_offsets"]
            opened.seek(8 + size + start)
            state = hashlib.sha256(f"{tensor['dtype']} {tensor['shape']} ".encode())
            for begin in range(start, end, _CHUNK):
                state.update(opened.read(min(_CHUNK, end - begin)))
            digests[name] = state.hexdigest()[:32]
    return digests


def _digest(role_and_file: tuple[str, Path]) -> bytes:
    role, path = role_and_file
    with path.open("rb") as file:
        return f"{role} {path.name} ".encode() + hashlib.file_digest(file, "sha256").digest()
