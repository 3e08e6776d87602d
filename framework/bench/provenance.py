"""What the numbers of a cell depend on beside its config, and what of it has changed since they were measured."""

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
from ..models.placement import describe_placement, first_device
from ..models.resolve import resolve
from ..models.threads import settings
from ..recipe.recipe import CellConfig, Strategy
from ..runs.code_digest import code_sha256, source_of
from ..runs.marks import mark_of

#: Libraries whose versions decide what models say or how fast.
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def provenance(config: CellConfig, environment: Mapping[str, Any], prompts: str, timed: bool = True) -> dict[str, Any]:
    """Versions, code, device and prompts that a cell is measured with; its models come from `models_used`.

    Args:
        environment: see `describe`.
        prompts: digest of the prompts.
        timed: False for cells that share their device with others.
    """
    device = first_device(config.device)
    cuda = device.type == "cuda"
    hardware = torch.cuda.get_device_name(device) if cuda else environment["cpu"]["model"]
    return {
        "crossdraft": environment["versions"]["crossdraft"],
        "code": code_sha256([f"{__package__}.cell_runner"]),
        **{library: environment["versions"][library] for library in LIBRARIES},
        "drafter": _source("drafters", config.drafter),
        "verifier": _source("verifiers", config.verifier),
        "mark": mark_of(config).to_json(),
        "device": f"{device.type} ({hardware}){describe_placement(config.device)}",
        **_threads(),
        "dtype": str(pick_dtype(config.dtype, device)).removeprefix("torch."),
        "prompts": prompts,
        **({} if timed else {"timed": False}),
    }


def _threads() -> dict[str, Any]:
    """The settings of the user; what was chosen for a group is ``decoding_threads``, which finished cells keep."""
    found = settings()
    automatic = found["free_processors"] is not None
    return {"threads": found["most"], "wait_policy": "measured" if automatic else found["wait_policy"]}


def distinct(provenances: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The distinct conditions of cells: device, dtype, versions, digest of the prompts; usually one entry."""
    found: list[dict[str, Any]] = []
    for one in provenances:
        conditions = {key: value for key, value in one.items() if key not in ("models", "drafter", "verifier", "mark")}
        if conditions and conditions not in found:
            found.append(conditions)
    return found


def _source(kind: str, strategy: Strategy) -> dict[str, str]:
    cls, options = configured(kind, {**strategy.config, "name": strategy.name})
    with plugins.guarded(kind, cls.name, "wrapped()"):
        return source_of(cls, *cls.wrapped(options))


def models_used(used: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Digests of the weights and of the settings of every model that a cell uses, by name."""
    return {name: {**model, "settings": _settings(name, model)} for name, model in used.items()}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of a cell's provenance is not as it was, in words; its models as they are found now."""
    found = []
    if before.get("timed", True) < now.get("timed", True):
        found.append("the clock (they were not timed)")
    for key, value in now.items():
        old = before.get(key)
        if key in ("timed", "mark"):  # timed ones serve both; a certificate changes no number
            continue
        if key in ("drafter", "verifier"):
            if old != value or not value["sha256"]:
                found.append(_strategy(key, old, value))
        elif key == "code":
            if old != value:
                found.append("crossdraft's own code")
        elif key == "prompts":
            if old != value:
                found.append("the prompts")
        elif key != "models" and old != value:
            found.append(f"{key} ({old} → {value})")
    for name, model in before.get("models", {}).items():
        try:
            same = _weights(name, model) == model.get("sha256"), _settings(name, model) == model.get("settings")
        except (CrossdraftError, OSError):
            found.append(f"the model {name}, which is not there any more")  # measuring will say why
            continue
        if not same[0]:
            found.append(f"the weights of {name}")
        if not same[1]:
            found.append(f"the config, tokenizer or templates of {name}")
    return found


def _weights(name: str, model: Mapping[str, Any]) -> str:
    if "file" in model:  # of `DraftContext.load_settings`: it has nothing else
        return file_sha256(Path(model["file"]))
    return model_sha256(resolve(name, heads=model.get("heads", False)))


def _settings(name: str, model: Mapping[str, Any]) -> str:
    return "" if "file" in model else settings_sha256(resolve(name, heads=model.get("heads", False)).path)


def _strategy(kind: str, old: Any, new: Mapping[str, str]) -> str:
    if not new["sha256"]:
        return f"perhaps the {kind}, whose code is in no file"
    if isinstance(old, Mapping) and old.get("version") != new["version"]:
        return f"the {kind} ({new['distribution']} {old.get('version')} → {new['version']})"
    return f"the code of the {kind}"
