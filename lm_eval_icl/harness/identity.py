"""What a run's responses depend on besides its requests, identified by contents: the contents of a path can change."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lm_eval_icl import version
from lm_eval_icl.errors import InputError, log
from lm_eval_icl.methods.base import Method

# How many elements of a tensor are hashed at a time.
_PART = 2**24
_PACKAGE = Path(__file__).parent.parent
# How many bytes of a file are hashed at a time, and by one thread.
_BYTES, _BYTES_OF_THREAD = 2**20, 2**26
# The files of a checkpoint's folder that are its weights, its adapter, its configuration, its code and its tokenizer;
# not what a trainer leaves beside them. Of GGUF files, a folder may have many: the one that is loaded counts.
_MODEL_FILES = re.compile(
    r".*\.(safetensors|safetensors\.index\.json|bin\.index\.json|py|model|tiktoken|jinja)"
    r"|(?!training_args|optimizer|scheduler|sampler|random_states).*\.bin"
    r"|((generation_|adapter_|quantize_|quantization_)?config|tokenizer|tokenizer_config|special_tokens_map"
    r"|added_tokens|vocab)\.json|(vocab|merges)\.txt"
)
# No number comes from these files, though files import them from which numbers come: texts, names, caches, records.
_NO_NUMBERS = {
    *("__init__.py", "version.py", "errors.py", "methods/__init__.py", "training/record.py"),
    *("harness/identity.py", "harness/response_cache.py", "harness/plugin.py", "studies/folder.py", "studies/grid.py"),
    *("studies/cells.py", "studies/choose.py"),
}


def identity(
    model: Mapping[str, Any], method: Method, code: str | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """What the responses of a run depend on beside the requests, by name. A cache (`--use_cache`) that was written by
    a run with another identity is refused.

    Args:
        model: `fingerprint` of the model.
        code: `code_digest` of the method.
        arguments: the run's other arguments on which its responses depend.

    Raises:
        InputError: the method's code cannot be read.
    """
    if code is None:
        raise InputError(
            f"{method.name} and --use_cache do not go together: the code of this method is in no file, so that the "
            "cache could not tell it from an edited one. Put it into a file, or leave --use_cache out."
        )
    return {
        **arguments,
        "version": version.VERSION,
        "code": code,
        "method": method.name,
        **{f"{method.name}.{name}": value for name, value in dataclasses.asdict(method).items()},
        **model,
    }


def fingerprint(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Digests of a model's weights and tokenizer, and the settings of its configuration, by name.

    All bytes of all weights are hashed (docs/resuming.md says how long this takes), so that every training step, merge,
    adapter or exchange of two rows is noticed. The versions of transformers and torch are left out: they change results
    by no more than rounding, and otherwise every upgrade would make the cache useless.

    Raises:
        InputError: the model's weights cannot be read.
    """
    found = {"weights": weights_digest(model)}
    if type(model).__module__.startswith("transformers_modules."):  # code that came with the checkpoint
        source = inspect.getsource(sys.modules[type(model).__module__])
        found["checkpoint.code"] = hashlib.sha256(source.encode()).hexdigest()[:16]
    for name in ("config", "generation_config"):
        if (settings := getattr(model, name, None)) is not None:
            found |= {f"{name}.{k}": v for k, v in settings.to_diff_dict().items()}
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        found |= {f"peft.{name}.{k}": v for k, v in adapter.to_dict().items()}
    # The checkpoint's path, and the version of transformers that wrote it, are left out.
    found = {k: _plain(v) for k, v in found.items() if not k.endswith(("version", "_name_or_path"))}
    return found | {"tokenizer": _tokenizer(tokenizer)}


def _plain(value: Any) -> Any:
    """The value as JSON reads it back. Sets, which have no order, are sorted."""
    return json.loads(json.dumps(value, default=lambda v: sorted(map(str, v)) if isinstance(v, set) else str(v)))


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for padding in ("padding", "truncation"):  # every call of the tokenizer changes them
        backend.pop(padding, None)
    # The chat template is left out, since its effect shows in the prompts.
    said = [type(tokenizer).__name__, backend, tokenizer.special_tokens_map]
    said.append(getattr(tokenizer, "clean_up_tokenization_spaces", None))  # changes how generated ids are decoded
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def weights_digest(model: nn.Module) -> str:
    """A digest of the names, shapes, dtypes and bytes of all weights, including the scales of quantized weights."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda named: _digest(model, *named), model.state_dict().items())
        return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def _digest(model: nn.Module, name: str, value: Any) -> bytes:
    """A digest of one entry of a state dictionary.

    Raises:
        InputError: its values cannot be read.
    """
    digest = hashlib.sha256(name.encode())
    if isinstance(value, (tuple, list)):  # of a quantized layer
        for i, part in enumerate(value):
            digest.update(_digest(model, f"{name}.{i}", part))
        return digest.digest()
    if value is None or isinstance(value, (str, int, float, torch.dtype, torch.Size)):
        digest.update(repr(value).encode())
        return digest.digest()
    if isinstance(value, Tensor) and value.is_meta:  # accelerate may have offloaded it
        module, _, own = name.rpartition(".")
        hook = getattr(model.get_submodule(module), "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            if (elsewhere := getattr(each, "weights_map", None)) is not None:
                value = elsewhere[own]
    if not isinstance(value, Tensor) or value.is_meta:
        raise InputError(
            f"the weights {name!r} of this model cannot be read, so that a response cache could not tell it from "
            "another one: leave --use_cache out."
        )
    for part, values in _flat(name, value):
        digest.update(f"{part} {tuple(values.shape)} {values.dtype}".encode())
        if values.is_quantized:  # torch's own kind, with scales inside
            values = values.dequantize()
        for some in values.detach().reshape(-1).split(_PART):  # in parts, since each is copied to the CPU
            digest.update(some.view(torch.uint8).cpu().numpy().data)
    return digest.digest()


def _flat(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The name and the tensor itself, or those of the inner tensors of a tensor subclass (quantized, sharded)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    inner, _ = tensor.__tensor_flatten__()
    for part in inner:
        yield from _flat(f"{name}.{part}", getattr(tensor, part))


def files_digest(
    pretrained: Any,
    *,
    subfolder: str = "",
    gguf_file: str | None = None,
    tokenizer: Any = None,
    peft: Any = None,
    delta: Any = None,
    **_: Any,
) -> str | None:
    """A digest of the local files that a model of lm-eval's `hf` is made of: their names and all of their bytes.

    It is of files, not of weights in memory, so that nothing is copied back from a device.

    Args:
        pretrained: this and the others are arguments of `HFLM`; further ones do not say which files there are.

    Returns:
        None if there is no such file here (a model of the Hub, or one made in Python), or one cannot be read.
    """
    places = {"pretrained": pretrained, "tokenizer": tokenizer, "peft": peft, "delta": delta}
    found: list[tuple[str, Path]] = []
    try:
        for role, place in places.items():
            if isinstance(place, str) and Path(place).is_dir():
                folder = Path(place, subfolder) if role in ("pretrained", "tokenizer") else Path(place)
                files = sorted(
                    each for each in folder.iterdir() if _MODEL_FILES.fullmatch(each.name) and each.is_file()
                )
                if gguf_file and role == "pretrained":
                    files.append(folder / gguf_file)
                found += [(role, path) for path in files]
        parts = [
            (f"{role} {path.name} {size}", path, start)
            for role, path in found
            for size in [path.stat().st_size]
            for start in range(0, max(size, 1), _BYTES_OF_THREAD)
        ]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(lambda part: _digest_of_part(*part), parts))
    except OSError as error:
        log.warning("%s: no digest of the model's files is recorded (%s).", pretrained, error)
        return None
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16] if digests else None


def _digest_of_part(name: str, path: Path, start: int) -> bytes:
    digest = hashlib.sha256(f"{name} {start}".encode())
    with path.open("rb") as file:
        file.seek(start)
        left = _BYTES_OF_THREAD
        while left and (data := file.read(min(left, _BYTES))):
            digest.update(data)
            left -= len(data)
    return digest.digest()


def with_digest_of_files(original: Callable[..., None], model: Any, pretrained: Any, *args: Any, **kwargs: Any) -> None:
    """Wrapper of `HFLM.__init__`: note which files were loaded. They may be others when the run ends."""
    original(model, pretrained, *args, **kwargs)
    if loaded := getattr(model, "loaded", None):
        model.model_files_digest = loaded.lm.model_files_digest
        return
    writes_results = model.rank == 0 and os.environ.get("LOCAL_RANK", "0") == "0"
    model.model_files_digest = files_digest(pretrained, **kwargs) if writes_results else None


def said_in_results(original: Callable[..., dict[str, Any]], model: Any) -> dict[str, Any]:
    """Wrapper of `HFLM.get_model_info`: say which files were loaded; and of a model of the Hub the commit of its files
    in the cache, where lm-eval could not ask the Hub."""
    info = original(model)
    if digest := getattr(model, "model_files_digest", None):
        info["model_files_digest"] = digest
    name = model.pretrained
    if not info.get("model_sha") and isinstance(name, str) and not Path(name).is_dir():
        with suppress(ValueError):  # it is no name on the Hub
            kept = try_to_load_from_cache(name, "config.json", revision=model.revision)
            if isinstance(kept, str):  # .../snapshots/COMMIT/config.json
                info["model_sha"] = Path(kept).parent.name
    return info


def code_digest(method: type[Method]) -> str | None:
    """A digest of the code that computes responses: this package's, and the modules of a method from elsewhere.

    Returns:
        None if the method's code is in no file, for example because it was typed into an interpreter.
    """
    try:
        theirs = {inspect.getsourcefile(cls) for cls in method.__mro__ if _from_elsewhere(cls)}
        files = [*sorted(_PACKAGE.rglob("*.py")), *sorted(Path(str(file)) for file in theirs)]
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    except (OSError, TypeError):
        return None


def code_of_numbers(*starts: str, method: type[Method] | None = None, without: tuple[str, ...] = ()) -> str | None:
    """A digest of the code that numbers come from: of these files, of the method's, and of all that they import, from
    this package, from a method's own package, or from beside a method's file.

    Numbers that take hours are kept with it, so it is of what Python runs, the syntax trees without docstrings: a
    comment, a line break or a new folder makes no other digest, nor does a figure of this package, which nothing
    imports from which numbers come. Whatever is imported counts until `_NO_NUMBERS` or `without` says otherwise, since
    numbers of other code that are taken for those of this one are worse than a mark too many.

    Args:
        starts: files of this package: "studies/run.py".
        method: whose module and base classes' modules are added.
        without: files and folders of this package that do not count: "demonstrations/".

    Returns:
        None if the method's code is in no file.
    """
    bases = {_PACKAGE.name: _PACKAGE.parent}  # package or module -> the folder that it is in
    waiting = [".".join([_PACKAGE.name, *start.removesuffix(".py").split("/")]) for start in starts]
    for cls in method.__mro__ if method else ():
        if cls.__module__.partition(".")[0] not in sys.stdlib_module_names:
            try:
                file = Path(inspect.getsourcefile(cls) or "")
            except (OSError, TypeError):
                return None
            depth = cls.__module__.count(".") + (file.name == "__init__.py")
            bases.setdefault(cls.__module__.partition(".")[0], file.resolve().parents[depth])
            waiting.append(cls.__module__)
    # Modules beside a user's file are the user's; those beside an installed package are other packages.
    users = [base for base in bases.values() if not {"site-packages", "dist-packages"} & {*base.parts}]
    digests: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        first = name.partition(".")[0]
        for base in [bases[first]] if first in bases else users:
            path = base.joinpath(*name.split("."))
            file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), path)
            inside = file.relative_to(base / _PACKAGE.name).as_posix() if first == _PACKAGE.name else ""
            if name in digests or file == path or inside in _NO_NUMBERS or (without and inside.startswith(without)):
                continue
            try:
                digests[name], imported = _read_code(file, name)
            except (OSError, ImportError, SyntaxError, ValueError):
                return None
            waiting += imported
    if method and method.__module__ not in digests:
        return None
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def _read_code(file: Path, name: str) -> tuple[str, list[str]]:
    """A digest of a file's syntax tree without docstrings, and the names of all modules that it may import."""
    tree = ast.parse(file.read_bytes())
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            imported += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return hashlib.sha256(repr(_syntax(tree)).encode()).hexdigest(), imported


def _syntax(node: Any) -> Any:
    """A syntax tree as tuples. What is empty is left out: the next version of Python may have a name for it."""
    if isinstance(node, list):
        return [
            _syntax(each) for each in node if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        ]
    if not isinstance(node, ast.AST):
        return repr(node)
    return type(node).__name__, *((k, _syntax(v)) for k, v in ast.iter_fields(node) if v is not None and v != [])


def _from_elsewhere(cls: type) -> bool:
    """Whether a class is defined neither in this package nor in Python's standard library."""
    package = cls.__module__.partition(".")[0]
    return package == "__main__" or package not in ("lm_eval_icl", *sys.stdlib_module_names)
