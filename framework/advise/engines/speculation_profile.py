"""``speculation_profile.json``: acceptance as it travels with a draft checkpoint, in both conventions.

https://github.com/NVIDIA/Model-Optimizer: examples/specdec_bench/specdec_bench/speculation_profile.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from ..acceptance import Acceptance
from ..engine import Engine, Schedule, Settings
from ..engine_log import Source
from .vllm import Vllm

#: How far rounded rates may be from one another.
_ROUNDING = 2e-4


class SpeculationProfile(Engine):
    name = "speculation-profile"
    read_from = "schema 1.0, Model Optimizer main, commit 095124e9d582"
    methods: ClassVar[Mapping[str, str]] = Vllm.methods  # the profile takes over vLLM's names

    def read(self, given: Source, before: Source | None = None) -> list[Acceptance]:
        if before is not None:
            return []
        return [self._profile(given, line, found) for line, found in given.objects("conditional_accept_rates")]

    def cannot(self, acceptance: Acceptance) -> str | None:
        reason = super().cannot(acceptance)
        if reason is None and acceptance.verifier == "block" and not acceptance.point_mass:
            reason = "it has no rates for block verification"
        return reason

    def scheduled(self, acceptance: Acceptance) -> bool:
        return True  # all lengths follow from its rates

    def export(self, schedule: Schedule) -> Settings:
        found = schedule.acceptance
        length = 1 + sum(found.marginal)
        profile: dict[str, Any] = {
            "schema_version": "1.0",
            "measured": True,
            "method": self.methods.get(found.drafter),
            "draft_checkpoint": {"model": found.model} if found.model else None,
            "target_model": None,
            "num_speculative_tokens": found.gamma,
            "block_size": None,
            "max_supported_k": found.gamma,
            "verification_method": "longest_prefix",
            "conditional_accept_rates": list(found.conditional),
            "marginal_accept_rates": list(found.marginal),
            "mean_accept_length": length,
            "accept_length_model": "chain_analytic" if found.cuttable else "measured_per_k",
            "accept_length_by_k": {str(found.gamma): length},
            "measurement_conditions": {"source": found.source, "temperature": found.temperature},
        }
        return Settings(json.dumps(profile, indent=2))

    def _profile(self, given: Source, line: int, found: dict[str, Any]) -> Acceptance:
        if found.get("measured") is False:
            raise given.error(line, "the profile says that nothing was measured")
        keys = ("conditional_accept_rates", "marginal_accept_rates")
        conditional, marginal = (None if found.get(key) is None else given.rates(found, key, line) for key in keys)
        if conditional is None and marginal is None:
            raise given.error(line, "the profile has no rates: block verification gives it none")
        source = given.place(line)
        about: dict[str, Any] = {
            "drafter": self.ours(found.get("method")),
            "drafts": _steps(given, line, found),
            "cuttable": found.get("accept_length_model", "chain_analytic") == "chain_analytic",
        }
        checkpoint = found.get("draft_checkpoint")
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get("model"), str):
            about["model"] = checkpoint["model"]
        if marginal is None:
            return Acceptance.from_conditional(conditional or (), source, **about)
        made = Acceptance(marginal, source, **about)
        for i, (theirs, ours) in enumerate(zip(conditional or (), made.conditional, strict=False), start=1):
            before = made.marginal[i - 2] if i > 1 else 1.0
            if not abs(theirs - ours) * before <= _ROUNDING:  # NaN too
                raise given.error(
                    line,
                    f"conditional and marginal rates contradict each other at position {i}: {theirs:g}, not {ours:g}",
                )
        mean = found.get("mean_accept_length")
        if isinstance(mean, int | float) and not abs(mean - 1 - sum(marginal)) <= 0.02:
            raise given.error(line, f"mean_accept_length is {mean:g}, and 1 + the marginal rates {1 + sum(marginal):g}")
        return made


def _steps(given: Source, line: int, found: dict[str, Any]) -> float | None:
    """The drafts behind a profile: its histogram of tokens a step."""
    histogram = found.get("acceptance_length_histogram")
    if not histogram:
        return None
    if not isinstance(histogram, dict) or not all(type(n) is int and n >= 0 for n in histogram.values()):
        raise given.error(line, "acceptance_length_histogram holds something that is no count")
    return float(sum(histogram.values())) or None
