"""What `--metadata` says of MetaICL's tasks: where their files are, and what is done where there are none."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from lm_eval_icl.errors import InputError, did_you_mean
from lm_eval_icl.metaicl.files import MetaICLFolder, check_missing, setting_of

OPTION = "--metadata metaicl=..."


def folder(metadata: Mapping[str, Any], task: str) -> MetaICLFolder:
    """The folder that `--metadata metaicl=...` names.

    Raises:
        InputError: there is none, or it is not one of MetaICL's.
    """
    if not metadata.get("metaicl"):
        raise InputError(f"task {task!r}: needs the folder of MetaICL's data: give --metadata metaicl=DATA_DIR.")
    return _folder(str(metadata["metaicl"]))


@functools.cache
def _folder(path: str) -> MetaICLFolder:
    return MetaICLFolder(path, OPTION)


def skips(metadata: Mapping[str, Any]) -> bool:
    """Whether tasks without files are left out.

    Raises:
        InputError: `missing` is something else than skip.
    """
    if metadata.get("missing") not in (None, "skip"):
        raise InputError(f"--metadata missing={metadata['missing']}: must be skip, or be left out.")
    return metadata.get("missing") == "skip"


def refuse_misspelt(metadata: Mapping[str, Any]) -> None:
    """Refuse what is nearly one of the names, since without PMI, for example, a run has numbers that look right."""
    known = ("metaicl", "missing", "pmi")
    for name in metadata:
        if name not in known and (near := did_you_mean(str(name).lower(), known)):
            raise InputError(f"--metadata {name}={metadata[name]}: {near}")


def flag(metadata: Mapping[str, Any], name: str) -> bool:
    value = metadata.get(name, False)
    if not isinstance(value, bool):
        raise InputError(f"--metadata {name}={value}: must be True or False.")
    return value


@functools.cache
def check_group(files: MetaICLFolder, setting: str, split: str, skip: bool) -> None:
    """Refuse a group with tasks that have no files, or say once which are left out."""
    tasks = setting_of(setting)[split]
    what = f"{'test' if split == 'test' else 'unseen-domain'} tasks of {setting}"
    check_missing(OPTION, what, files.without_test(tasks), len(tasks), "missing=skip in --metadata", skip)
