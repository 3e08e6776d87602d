"""``speculation_profile.json``: acceptance stored with a draft checkpoint, as marginal and conditional rates.

https://github.com/NVIDIA/Model-Optimizer: examples/specdec_bench/specdec_bench/speculation_profile.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from ..acceptance import Acceptance
from ..engine import Engine, Schedule, Settings
from ..engine_log import Source
from ..formats import AcceptanceFormat
from .vllm import Vllm

#: Tolerance for rounded rates.
_ROUNDING = 2e-4


class SpeculationProfile(Engine):
    name = "speculation-profile"
    read_from = "schema 1.0, Model Optimizer main, commit 095124e9d582"
    methods: ClassVar[Mapping[str, str]] = Vllm.methods  # profiles use vLLM's names

    def scheduled(self, acceptance: Acceptance) -> bool:
        return True  # its rates cover all lengths

    def export(self, schedule: Schedule) -> Settings:
        lengths = schedule.lengths or (schedule.acceptance,)
        acceptance = lengths[-1]
        profile: dict[str, Any] = {
            "schema_version": "1.0",
            "measured": True,
            "method": self.methods.get(acceptance.drafter),
            "draft_checkpoint": {"model": acceptance.model} if acceptance.model else None,
            "target_model": None,
            "num_speculative_tokens": acceptance.gamma,
            "block_size": None,
            "max_supported_k": acceptance.gamma,
            "verification_method": "longest_prefix",
            "conditional_accept_rates": list(acceptance.conditional),
            "marginal_accept_rates": list(acceptance.marginal),
            "mean_accept_length": 1 + sum(acceptance.marginal),
            "accept_length_model": "measured_per_k" if acceptance.refusal else "chain_analytic",
            "accept_length_by_k": {str(item.gamma): 1 + sum(item.marginal) for item in lengths},
            "measurement_conditions": {"source": acceptance.source, "temperature": acceptance.temperature},
        }
        return Settings(json.dumps(profile, indent=2))


class SpeculationProfileRates(AcceptanceFormat):
    """Rates of a profile, by position."""

    name = "speculation-profile"
    definition = "marginal rates, Pr(tau >= i), or conditional ones"

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        acceptances = []
        for line, fields in source.objects("conditional_accept_rates"):
            with source.skipping():
                acceptances.append(self._profile(source, line, fields))
        return acceptances

    def _profile(self, source: Source, line: int, fields: dict[str, Any]) -> Acceptance:
        if fields.get("measured") is False:
            raise source.error(line, "the profile is not measured")
        keys = ("conditional_accept_rates", "marginal_accept_rates")
        conditional, marginal = (None if fields.get(key) is None else source.rates(fields, key, line) for key in keys)
        if conditional is None and marginal is None:
            raise source.error(line, "the profile has no acceptance rates, as for block verification")
        place = source.place(line)
        attributes: dict[str, Any] = {
            "drafter": SpeculationProfile.ours(fields.get("method")),
            "drafts": _steps(source, line, fields),
        }
        if fields.get("accept_length_model", "chain_analytic") != "chain_analytic":
            attributes["refusal"] = "its accept_length_model is not chain_analytic"
        checkpoint = fields.get("draft_checkpoint")
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get("model"), str):
            attributes["model"] = checkpoint["model"]
        if marginal is None:
            return Acceptance.from_conditional(conditional or (), place, **attributes)
        acceptance = Acceptance(marginal, place, **attributes)
        for i, (theirs, ours) in enumerate(zip(conditional or (), acceptance.conditional, strict=False), start=1):
            previous = acceptance.marginal[i - 2] if i > 1 else 1.0
            if not abs(theirs - ours) * previous <= _ROUNDING:  # NaN too
                raise source.error(
                    line,
                    f"conditional and marginal rates are inconsistent at position {i}: {theirs:g}, not {ours:g}",
                )
        mean = fields.get("mean_accept_length")
        if isinstance(mean, int | float) and not abs(mean - 1 - sum(marginal)) <= 0.02:
            raise source.error(
                line, f"mean_accept_length is {mean:g}, but 1 + the sum of the marginal rates is {1 + sum(marginal):g}"
            )
        return acceptance


def _steps(source: Source, line: int, fields: dict[str, Any]) -> float | None:
    """The number of drafts, from the histogram of tokens per step."""
    histogram = fields.get("acceptance_length_histogram")
    if not histogram:
        return None
    if not isinstance(histogram, dict) or not all(type(n) is int and n >= 0 for n in histogram.values()):
        raise source.error(line, "acceptance_length_histogram has a value that is not a count")
    return float(sum(histogram.values())) or None
