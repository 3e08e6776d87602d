"""Conditions of a measurement besides the cell's config, and their changes since results were stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import plugins
from ..api.build import configured
from ..errors import CrossdraftError
from ..models.device import pick_dtype
from ..models.digests import file_sha256, model_sha256, settings_sha256
from ..models.placement import first_device, several_devices
from ..models.resolve import resolve
from ..recipe.recipe import CellConfig, Strategy
from ..runs.code_digest import code_sha256, source_of
from ..runs.marks import mark_of
from ..runs.records import CellResult
from ..runs.threads import threads_in_use

#: Libraries whose versions affect outputs or speed.
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def provenance(config: CellConfig, environment: Mapping[str, Any], prompts: str, timed: bool = True) -> dict[str, Any]:
    """Versions, code, device and prompts of a measurement; `models_used` adds the models.

    Args:
        environment: see `describe`.
        prompts: digest of the prompts.
        timed: False if times are discarded.
    """
    device, spread = first_device(config.device), several_devices(config.device)
    cuda = device.type == "cuda"
    runner = (
        plugins.of_companion("runner of engines").__module__ if config.engine else f"{__package__}.cells.cell_runner"
    )
    user_threads = threads_in_use()
    hardware = torch.cuda.get_device_name(device) if cuda else environment["cpu"]["model"]
    return {
        "crossdraft": environment["versions"]["crossdraft"],
        "code": code_sha256([runner]),
        **{library: environment["versions"][library] for library in LIBRARIES},
        "drafter": _source("drafters", config.drafter),
        "verifier": _source("verifiers", config.verifier),
        "mark": mark_of(CellResult(config)).to_json(),
        **({"engine": source_of(plugins.get("servers", config.engine.name))} if config.engine else {}),
        "device": f"{device.type} ({hardware}){spread.description() if spread else ''}",
        "threads": user_threads["number"],
        "wait_policy": user_threads["wait_policy"],
        "dtype": str(pick_dtype(config.dtype, device)).removeprefix("torch."),
        "prompts": prompts,
        **({} if timed else {"timed": False}),
    }


def distinct(provenances: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Distinct conditions of cells (device, dtype, versions, digest of the prompts); usually one entry."""
    entries: list[dict[str, Any]] = []
    for entry in provenances:
        conditions = {
            key: value for key, value in entry.items() if key not in ("models", "drafter", "verifier", "mark")
        }
        if conditions and conditions not in entries:
            entries.append(conditions)
    return entries


def _source(kind: str, strategy: Strategy) -> dict[str, str]:
    cls, options = configured(kind, strategy)
    with plugins.guarded(kind, cls.name, "wrapped()"):
        return source_of(cls, *cls.wrapped(options))


def models_used(digests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Digests of the weights and settings of every model of a cell, by name."""
    return {name: {**model, "settings": _settings(name, model)} for name, model in digests.items()}


#: Changes that are described without their values.
_WITHOUT_VALUES = {"code": "crossdraft's own code", "prompts": "the prompts"}


def changes(old_provenance: Mapping[str, Any], new_provenance: Mapping[str, Any]) -> list[str]:
    """Describe the changes of a cell's provenance; digests of its models are computed again."""
    changed = []
    if old_provenance.get("timed", True) < new_provenance.get("timed", True):
        changed.append("times (the results on disk are untimed)")
    for key, value in new_provenance.items():
        old = old_provenance.get(key)
        if key in ("timed", "mark"):  # timed results serve both; a certificate does not change results
            continue
        if key in ("drafter", "verifier"):
            if old != value or not value["sha256"]:
                changed.append(_strategy(key, old, value))
        elif key != "models" and old != value:
            changed.append(_WITHOUT_VALUES.get(key, f"{key} ({old} → {value})"))
    for name, model in old_provenance.get("models", {}).items():
        try:
            unchanged = _weights(name, model) == model.get("sha256"), _settings(name, model) == model.get("settings")
        except (CrossdraftError, OSError):
            changed.append(f"the model {name}, which is missing")  # the measurement raises the reason
            continue
        if not unchanged[0]:
            changed.append(f"the weights of {name}")
        if not unchanged[1]:
            changed.append(f"the config, tokenizer or templates of {name}")
    return changed


def _weights(name: str, model: Mapping[str, Any]) -> str:
    if "file" in model:  # from `DraftContext.load_settings`: a single file
        return file_sha256(Path(model["file"]))
    return model_sha256(resolve(name, heads=model.get("heads", False)))


def _settings(name: str, model: Mapping[str, Any]) -> str:
    return "" if "file" in model else settings_sha256(resolve(name, heads=model.get("heads", False)).path)


def _strategy(kind: str, old: Any, new: Mapping[str, str]) -> str:
    if not new["sha256"]:
        return f"possibly the {kind}, whose code is not in a file"
    if isinstance(old, Mapping) and old.get("version") != new["version"]:
        return f"the {kind} ({new['distribution']} {old.get('version')} → {new['version']})"
    return f"the code of the {kind}"
