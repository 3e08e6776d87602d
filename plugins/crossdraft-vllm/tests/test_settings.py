"""The variable that selects the strategies, and the checks of the engine."""

from __future__ import annotations

import pytest
from crossdraft_vllm.guards import EngineMismatch, check_signature, check_version
from crossdraft_vllm.settings import VARIABLE, Settings, parse_settings, read_settings

from crossdraft import UsageError


def test_unset(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_settings() == Settings()


def test_both(monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"drafter": {"name": "prompt-lookup", "gamma": 3}, "verifier": "block"}')
    settings = read_settings()
    assert settings.drafter is not None and settings.verifier is not None
    assert (settings.drafter[0].name, settings.drafter[1].gamma, settings.verifier.name) == (
        "prompt-lookup",
        3,
        "block",
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("prompt-lookup", "is not valid JSON"),
        ("[]", "keys 'drafter' and 'verifier'"),
        ('{"draft": "prompt-lookup"}', "keys 'drafter' and 'verifier'"),
        ('{"drafter": "prompt-lokup"}', "CROSSDRAFT_VLLM: .*prompt-lokup"),
        ('{"drafter": {"name": "prompt-lookup", "gama": 3}}', "key 'gama': is unknown"),
        ('{"drafter": {"name": "prompt-lookup", "gamma": 0}}', "its drafts are empty"),
        ('{"drafter": {"name": "draft-model", "model": "m"}}', "it samples its drafts"),
        ('{"drafter": "none"}', "it never drafts"),
        ('{"drafter": "token-recycling"}', "the engine verifies chains"),
        ('{"drafter": {"name": "token-recycling", "width": 1, "nodes": 3}}', "it reads the target's scores"),
        ('{"verifier": "blok"}', "CROSSDRAFT_VLLM: .*blok"),
        ('{"verifier": "typical"}', "it is not lossless"),
        ('{"verifier": "greedy-block"}', "it keeps state"),
    ],
)
def test_wrong_values(text, message):
    with pytest.raises(UsageError, match=message):
        parse_settings(text)


def test_versions():
    check_version("vLLM", "0.32.0", "0.32")
    check_version("vLLM", "0.32.4+cu129", "0.32")
    for other in ("0.33.0", "0.3.2", "1.32.0", "dev"):
        with pytest.raises(EngineMismatch, match=f"vLLM {other} is installed"):
            check_version("vLLM", other, "0.32")


def test_signatures():
    def function(x, y=0): ...

    check_signature("f", function, ("x", "y"))
    with pytest.raises(EngineMismatch, match="f has the parameters x, y"):
        check_signature("f", function, ("x",))
