"""What results files say of the model that gave them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from lm_eval_icl.inference.fingerprint import files_digest


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
