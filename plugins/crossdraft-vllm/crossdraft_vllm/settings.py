"""Drafter and verifier of the engine, read from the environment variable ``CROSSDRAFT_VLLM``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from crossdraft import CHAIN, CrossdraftError, Drafter, Sampling, UsageError, Verifier, find_drafter, make_verifier

#: JSON object with the keys ``drafter`` and ``verifier``, each a name or a mapping with ``name`` and options.
VARIABLE = "CROSSDRAFT_VLLM"
KEYS = ("drafter", "verifier")


@dataclass(frozen=True)
class Settings:
    """Strategies of the engine; None = vLLM's own."""

    drafter: tuple[type[Drafter], Any] | None = None
    verifier: Verifier | None = None


def read_settings() -> Settings:
    """Read and validate `VARIABLE`. Raises UsageError if it is malformed or names a strategy that cannot run."""
    text = os.environ.get(VARIABLE, "").strip()
    return parse_settings(text) if text else Settings()


def parse_settings(text: str) -> Settings:
    """Validate the JSON object ``text``, see `read_settings`."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"{VARIABLE}={text!r} is not valid JSON ({error}); "
            'write, for example, {"drafter": {"name": "prompt-lookup", "gamma": 4}, "verifier": "block"}'
        ) from None
    if not isinstance(given, dict) or not given or set(given) - set(KEYS):
        raise UsageError(
            f"{VARIABLE}={text!r} is not an object with the keys 'drafter' and 'verifier'; set one of them, or both"
        )
    drafter = None if given.get("drafter") is None else _drafter(given["drafter"])
    verifier = None if given.get("verifier") is None else _verifier(given["verifier"])
    return Settings(drafter, verifier)


def _drafter(strategy: Any) -> tuple[type[Drafter], Any]:
    try:
        cls, config = find_drafter(strategy)
        traits = cls.traits(config, Sampling(temperature=1))
    except CrossdraftError as error:
        raise UsageError(f"{VARIABLE}, key 'drafter': {error}") from None
    reason = None
    if traits.kind is None:
        reason = "it never drafts; leave out the key, and vLLM's speculative config"
    elif not traits.is_chain:
        reason = f"it drafts '{traits.kind}', but vLLM verifies chains; use its option for chains (tree: false)"
    elif not traits.point_mass:
        reason = "it samples its drafts, but vLLM accepts only tokens from a custom class; use vLLM's own draft models"
    elif traits.hidden_layers:
        reason = "it reads the target's hidden states, which vLLM does not pass to a custom class"
    elif traits.adapts:
        reason = "it reads the target's scores, which vLLM does not pass to a custom class"
    elif not traits.nodes:
        reason = "its drafts are empty; set gamma to 1 or more"
    if reason:
        raise UsageError(f"{VARIABLE}, key 'drafter': '{cls.name}' cannot draft in vLLM: {reason}")
    return cls, config


def _verifier(strategy: Any) -> Verifier:
    try:
        verifier = make_verifier(strategy)
        traits = verifier.traits(verifier.config)
    except CrossdraftError as error:
        raise UsageError(f"{VARIABLE}, key 'verifier': {error}") from None
    reason = None
    if not traits.accepts_kind(CHAIN):
        reason = "it does not accept chains"
    elif not traits.lossless:
        reason = "it is not lossless"
    elif traits.stateful or traits.modifies_target:
        reason = "it keeps state between steps, which vLLM does not"
    if reason:
        raise UsageError(
            f"{VARIABLE}, key 'verifier': '{verifier.name}' cannot verify in vLLM: {reason}; use block, token or greedy"
        )
    return verifier
