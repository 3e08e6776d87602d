"""Drafter and verifier of the engine, read from ``CROSSDRAFT_VLLM`` (``CROSSDRAFT_SGLANG`` in SGLang)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from crossdraft import CHAIN, CrossdraftError, Drafter, Sampling, UsageError, Verifier, find_drafter, make_verifier

#: JSON object with the keys ``drafter`` and ``verifier``, each a name or a mapping with ``name`` and options.
VARIABLE, SGLANG_VARIABLE = "CROSSDRAFT_VLLM", "CROSSDRAFT_SGLANG"
KEYS = ("drafter", "verifier")


@dataclass(frozen=True)
class Settings:
    """Class and config of the drafter, and the verifier; None = the engine's own."""

    drafter: Any = None
    verifier: Verifier | None = None


def read_settings(variable: str = VARIABLE, *, load_drafter: bool = True) -> Settings:
    """Read and validate ``variable``. Raises UsageError if it is malformed or names a strategy that cannot run.

    Without ``load_drafter``, the drafter is returned as it was given, and its package is not imported.
    """
    text = os.environ.get(variable, "").strip()
    return parse_settings(text, variable, load_drafter) if text else Settings()


def parse_settings(text: str, variable: str = VARIABLE, load_drafter: bool = True) -> Settings:
    """Validate the JSON object ``text``, the value of ``variable``, see `read_settings`."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"{variable}={text!r} is not valid JSON ({error}); "
            'write, for example, {"drafter": {"name": "prompt-lookup", "gamma": 4}, "verifier": "block"}'
        ) from None
    if not isinstance(values, dict) or not values or set(values) - set(KEYS):
        raise UsageError(
            f"{variable}={text!r} is not an object with the keys 'drafter' and 'verifier'; set one of them, or both"
        )
    try:
        drafter = values.get("drafter")
        if drafter is not None and load_drafter:
            drafter = _drafter(drafter)
        verifier = None if values.get("verifier") is None else _verifier(values["verifier"])
    except CrossdraftError as error:
        raise UsageError(f"{variable}: {error}") from None
    return Settings(drafter, verifier)


def _drafter(strategy: Any) -> tuple[type[Drafter], Any]:
    cls, config = find_drafter(strategy)
    traits = cls.traits(config, Sampling(temperature=1))
    reason = None
    if traits.kind is None:
        reason = "it never drafts; leave out the key, and the engine's speculative options"
    elif not traits.is_chain:
        reason = f"it drafts '{traits.kind}', but the engine verifies chains; use its option for chains (tree: false)"
    elif not traits.point_mass:
        reason = "it samples its drafts, and the engine reads only their tokens; use the engine's own draft models"
    elif traits.hidden_layers:
        reason = "it reads the target's hidden states, which the engine does not pass to a custom drafter"
    elif traits.adapts:
        reason = "it reads the target's scores, which the engine does not pass to a custom drafter"
    elif not traits.nodes:
        reason = "its drafts are empty; set gamma to 1 or more"
    if reason:
        raise UsageError(f"drafter '{cls.name}' cannot draft inside an engine: {reason}")
    return cls, config


def _verifier(strategy: Any) -> Verifier:
    verifier = make_verifier(strategy)
    traits = verifier.traits(verifier.config)
    reason = None
    if not traits.accepts_kind(CHAIN):
        reason = "it does not accept chains"
    elif not traits.lossless:
        reason = "it is not lossless"
    elif traits.stateful or traits.modifies_target:
        reason = "it keeps state between steps, which the engine does not support"
    if reason:
        raise UsageError(
            f"verifier '{verifier.name}' cannot verify inside an engine: {reason}; use block, token or greedy"
        )
    return verifier
