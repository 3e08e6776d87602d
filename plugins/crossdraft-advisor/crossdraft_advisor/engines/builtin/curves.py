"""Acceptance by draft length that is published with a model: golden curves and profiles.

Golden curves are YAML of model, mode and draft length, as SemiAnalysis InferenceX publishes it
(https://github.com/SemiAnalysisAI/InferenceX: golden_al_distribution/README.md). A value is the mean acceptance length,
bonus token included, of drafts of that length, rounded to two decimals.

``speculation_profile.json`` is stored with a draft checkpoint, with marginal and conditional rates.
https://github.com/NVIDIA/Model-Optimizer: examples/specdec_bench/specdec_bench/speculation_profile.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
from scipy.optimize import isotonic_regression

from crossdraft import MOST_LEVELS
from crossdraft.runs import counted

from ..acceptance import EACH_LENGTH, Acceptance
from ..engine import Engine, Schedule, Settings
from ..engine_log import Source
from ..formats import AcceptanceFormat
from .vllm import Vllm

_MODEL = re.compile(r"([^\s#:][^:]*):\s*(?:#.*)?")
_MODE = re.compile(r"\s+([^\W\d][\w.-]*):\s*(?:#.*)?")
_LENGTH = re.compile(r"\s+(\d{1,9}):\s*([^\s#]+)\s*(?:#.*)?")
_FACT = re.compile(r"\s+([\w.-]+):\s+(\S.*?)\s*")

Curve = dict[int, tuple[int, float]]  # lengths of one curve: draft length -> line and acceptance length


class GoldenAl(Engine):
    name = "golden-al"
    read_from = "InferenceX, golden_al_distribution, commit 0c66e113c639"
    methods: ClassVar[Mapping[str, str]] = Vllm.methods

    def cannot(self, acceptance: Acceptance) -> str | None:
        return None  # a curve of any pair

    def scheduled(self, acceptance: Acceptance) -> bool:
        return True  # it covers all lengths

    def export(self, schedule: Schedule) -> Settings:
        acceptance = schedule.acceptance
        model, mode = acceptance.setting or ("target", "thinking_off")
        lines = ["# Acceptance length, bonus token included, per number of speculative tokens; comments: 95 % interval"]
        pair = " × ".join(filter(None, (acceptance.drafter, acceptance.verifier)))
        temperature = "" if acceptance.temperature is None else f" | temperature: {acceptance.temperature:g}"
        lines += [f"# {pair or 'drafts'}{temperature} | {acceptance.source} | {acceptance.interval_assumes}"]
        if acceptance.model:
            lines.append(f"# Draft model: {acceptance.model}")
        lines += [f"{model}:", f"  {mode}:"]
        for length in schedule.lengths or (acceptance,):
            be = length.block_efficiency()
            interval = "" if be.low is None or be.high is None else f" # [{be.low:.2f}, {be.high:.2f}]"
            lines.append(f"    {length.gamma}: {be.value:.2f}{interval}")
        remarks = (
            () if acceptance.setting else ("replace target and thinking_off by the names of the model and its mode",)
        )
        return Settings("\n".join(lines), remarks)


class GoldenAlCurves(AcceptanceFormat):
    """Curves of `GoldenAl`: an acceptance for each model, mode and draft length, with exactly its published mean.

    Its rates by position are the rises of the curve up to there, or a constant rate if lengths are missing or it falls.
    """

    name = "golden-al"
    definition = "mean acceptance length, bonus token included, at each draft length"

    def read(self, source: Source, earlier: Source | None = None) -> list[Acceptance]:
        if not (curves := _curves(source)):
            return []
        attributes: dict[str, Any] = {"refusal": EACH_LENGTH, "model": _comment(source, r"draft[ -]model: *(\S+)")}
        methods = [method for method in GoldenAl.methods.values() if f"_{method}" in source.name]
        attributes["drafter"] = GoldenAl.ours(max(methods, key=len, default=""))
        if temperature := _comment(source, r"temp(?:erature:)? +(\d+(?:\.\d+)?)\b"):
            attributes["temperature"] = float(temperature)
        acceptances = []
        for setting, curve in curves.items():
            attributes["setting"] = setting
            for gamma in sorted(curve):
                line, length = curve[gamma]
                acceptance = Acceptance((), source.place(line), length=length, **attributes).with_constant_rate(gamma)
                if all(i in curve for i in range(1, gamma)):
                    rises = np.diff([1.0, *(curve[i][1] for i in range(1, gamma + 1))])
                    # Rates do not increase with the position; this keeps their sum.
                    marginal = isotonic_regression(rises, increasing=False).x
                    if marginal[-1] >= 0 and marginal[0] <= 1:
                        acceptance = Acceptance(tuple(marginal.tolist()), source.place(line), **attributes)
                acceptances.append(acceptance)
        return acceptances


def _comment(source: Source, pattern: str) -> str:
    """The first match in a comment or in ``_metadata``, or an empty string."""
    for _, line in source.lines():
        if line.lstrip().startswith(("#", "draft-model")) and (match := re.search(pattern, line, re.IGNORECASE)):
            return match[1]
    return ""


def _curves(source: Source) -> dict[tuple[str, str], Curve]:
    """Curves by model and mode; empty for another format. Raises UsageError for a damaged curve."""
    curves: dict[tuple[str, str], Curve] = {}
    model = mode = ""
    for number, line in source.lines():
        if not line.strip() or line.lstrip().startswith("#") or (_FACT.fullmatch(line) and model == "_metadata"):
            continue
        if match := _MODEL.fullmatch(line):
            model, mode = match[1].strip("\"'"), ""
        elif (match := _LENGTH.fullmatch(line)) and model and mode:
            gamma = int(match[1])
            value = source.number(match[2], number, f"the acceptance length at {gamma}")
            curve = curves.setdefault((model, mode), {})
            if gamma in curve:
                raise source.error(number, f"the acceptance length at {gamma} is given twice; remove one of them")
            if not gamma or MOST_LEVELS.violation(gamma) or not 1 <= value <= gamma + 1:
                raise source.error(
                    number,
                    f"drafts of {counted(gamma, 'token')} cannot have the acceptance length {value:g}; it lies "
                    "between 1 and the draft length plus 1, bonus token included",
                )
            curve[gamma] = (number, value)
        elif (match := _MODE.fullmatch(line)) and model:
            mode = match[1]
        elif curves:
            raise source.error(
                number,
                f"{line.strip()[:40]!r} is not a line of an acceptance-length curve; write a draft length with its "
                "acceptance length, as in 2: 2.38, or remove the line",
            )
        else:
            return {}
    return curves


_ROUNDING = 2e-4  # tolerance for rounded rates


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
        return source.read(source.objects("conditional_accept_rates"), partial(self._profile, source))

    def _profile(self, source: Source, line: int, fields: dict[str, Any]) -> Acceptance:
        if fields.get("measured") is False:
            raise source.error(line, "the profile is not measured")
        keys = ("conditional_accept_rates", "marginal_accept_rates")
        conditional, marginal = (None if fields.get(key) is None else source.rates(fields, key, line) for key in keys)
        if conditional is None and marginal is None:
            raise source.error(line, "the profile has no acceptance rates, as for block verification")
        place, histogram = source.place(line), fields.get("acceptance_length_histogram") or {}  # of tokens per step
        if not isinstance(histogram, dict) or not all(type(n) is int and n >= 0 for n in histogram.values()):
            raise source.error(line, "acceptance_length_histogram has a value that is not a count")
        attributes: dict[str, Any] = {
            "drafter": SpeculationProfile.ours(fields.get("method")),
            "drafts": float(sum(histogram.values())) or None if histogram else None,
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
                    line, f"conditional and marginal rates are inconsistent at position {i}: {theirs:g}, not {ours:g}"
                )
        mean = fields.get("mean_accept_length")
        if isinstance(mean, int | float) and not abs(mean - 1 - sum(marginal)) <= 0.02:
            raise source.error(
                line, f"mean_accept_length is {mean:g}, but 1 + the sum of the marginal rates is {1 + sum(marginal):g}"
            )
        return acceptance
