"""Digests of code. They tell numbers that are kept from those of other code."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from lm_eval_icl.methods.base import Method

_PACKAGE = Path(__file__).parent.parent
# No number comes from these files, though files import them from which numbers come: texts, names, caches, records.
_NO_NUMBERS = {
    *("__init__.py", "version.py", "errors.py", "methods/__init__.py", "training/record.py"),
    *("methods/code.py", "inference/fingerprint.py", "harness/identity.py", "harness/response_cache.py"),
    *("harness/plugin.py", "studies/folder.py", "studies/grid.py", "studies/cells.py", "studies/choose.py"),
}


def code_digest(method: type[Method]) -> str | None:
    """A digest of the code that computes responses: this package's, and the modules of a method from elsewhere.

    Returns:
        None if the method's code is in no file, for example because it was typed into an interpreter.
    """
    try:
        others = ("lm_eval_icl", *sys.stdlib_module_names)
        classes = [cls for cls in method.__mro__ if cls.__module__.partition(".")[0] not in others]
        theirs = {inspect.getsourcefile(cls) for cls in classes}
        files = [*sorted(_PACKAGE.rglob("*.py")), *sorted(Path(str(file)) for file in theirs)]
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    except (OSError, TypeError):
        return None


def code_of_numbers(*starts: str, method: type[Method] | None = None, without: tuple[str, ...] = ()) -> str | None:
    """A digest of the code that numbers come from: of these files, of the method's, and of all that they import, from
    this package, from a method's own package, or from beside a method's file.

    Numbers that take hours are kept with it, so it is computed from what Python runs, the syntax trees without
    docstrings. A comment, a line break or a new folder does not change it, nor does a figure of this package, which
    nothing that computes numbers imports. Whatever is imported counts until `_NO_NUMBERS` or `without` says otherwise:
    taking the numbers of other code for those of this one is worse than a mark too many.

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
            file = next((place for place in (path.with_suffix(".py"), path / "__init__.py") if place.is_file()), path)
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
            _syntax(item) for item in node if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
        ]
    if not isinstance(node, ast.AST):
        return repr(node)
    return type(node).__name__, *((k, _syntax(v)) for k, v in ast.iter_fields(node) if v is not None and v != [])
