"""Simulators of serving: aiconfigurator's mean, the conditional rates of Dynamo's mocker, ATOM's forced length.

https://github.com/ai-dynamo/aiconfigurator: docs/cli_user_guide.md; https://github.com/ai-dynamo/dynamo:
lib/mocker/src/common/speculative.rs; https://github.com/ROCm/ATOM: docs/forced_acceptance_length.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..acceptance import Acceptance
from ..engine import Engine, Schedule, Settings
from ..settings import length_remarks, needs_method, needs_model, shell, synthetic_remarks
from .vllm import Vllm

#: Longest draft of Dynamo's mocker.
_MOST_DRAFTED = 5


class Aiconfigurator(Engine):
    """The mean number of accepted tokens, from which aiconfigurator computes the time per token."""

    name = "aiconfigurator"
    read_from = "aiconfigurator main, commit c8a2bb918611"
    methods: ClassVar[Mapping[str, str]] = Vllm.methods

    def cannot(self, acceptance: Acceptance) -> str | None:
        return None if acceptance.chain else "it does not support tree drafts"

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("", ("omit --nextn",))
        acceptance = schedule.acceptance
        # Accepted draft tokens: without the bonus token.
        accepted = f"{sum(acceptance.marginal):.3f}"
        text = shell(["--nextn", str(schedule.gamma), "--nextn-accepted", accepted])
        remarks = [
            "it divides the time of a step by the mean; the spread of accepted tokens does not count: dynamo-mocker "
            "simulates that",
            *length_remarks(schedule),
        ]
        if acceptance.drafter not in ("", "mtp"):
            remarks.append(f"it prices the drafts as MTP layers of the target, not as {acceptance.drafter}")
        return Settings(text, tuple(remarks))


class DynamoMocker(Aiconfigurator):
    """Pr(tau >= i | tau >= i - 1), which the mocker draws independently in each step of each request."""

    name = "dynamo-mocker"
    read_from = "Dynamo main, commit fa0a9ec83480"

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("", ("omit --aic-nextn",))
        gamma = min(schedule.gamma, _MOST_DRAFTED)
        acceptance = schedule.acceptance.cut(gamma)
        rates = ",".join(f"{rate:.4f}" for rate in acceptance.conditional)
        text = shell(["--aic-nextn", str(gamma), "--aic-nextn-accept-rates", rates])
        shorter = f"it simulates drafts of at most {_MOST_DRAFTED} tokens; the advice is {schedule.gamma}"
        remarks = (
            *((shorter,) if gamma < schedule.gamma else ()),
            "the rates are conditional: of token i if all before it were accepted; their products are Pr(tau >= i), so "
            "mean and spread of a step are as measured",
            "all requests have the same rates; differences between prompts are not simulated",
            *length_remarks(schedule),
        )
        return Settings(text, remarks)


class AtomSynthetic(Engine):
    """ATOM with a forced acceptance length, to time a draft length without the drafter's quality."""

    name = "atom-synthetic"
    read_from = "ATOM main, commit ffdf3bb5ddf8"
    methods: ClassVar[Mapping[str, str]] = {"eagle3": "eagle3", "mtp": "mtp", "dspark": "dspark"}

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return Settings("", ("start the server without --method",))
        acceptance = schedule.acceptance
        method = needs_method(self, acceptance)
        arguments = ["--method", method, "--num-speculative-tokens", str(schedule.gamma)]
        if acceptance.model or method == "eagle3":
            arguments += ["--draft-model", needs_model(self, acceptance)]
        arguments += ["--spec-decode-acceptance-length", f"{1 + sum(acceptance.marginal):.2f}"]
        return Settings(shell(arguments), (*synthetic_remarks(acceptance), *length_remarks(schedule)))
