"""Settings of vLLM with crossdraft's drafter and verifier inside it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from crossdraft_advisor import Acceptance, Schedule, Settings
from crossdraft_advisor.engines.builtin.vllm import Vllm
from crossdraft_advisor.engines.counter_definitions import DEFINITIONS, CounterDefinition

from crossdraft import UsageError

from .settings import VARIABLE, parse_settings


class VllmCrossdraft(Vllm):
    """vLLM's own drafters with models, any drafter of point masses by `Proposer`, and a verifier of crossdraft."""

    name = "vllm-crossdraft"
    counters: ClassVar[CounterDefinition] = replace(DEFINITIONS["vllm"], drafter_options={})
    methods: ClassVar[Mapping[str, str]] = {
        name: how for name, how in Vllm.methods.items() if how not in ("ngram", "dflash", "dspark")
    }

    def counters_of(self, drafter: str) -> CounterDefinition:
        """`Proposer` cuts drafts at the maximum length."""
        return replace(self.counters, shortens=drafter not in self.methods)

    def cannot(self, acceptance: Acceptance) -> str | None:
        if acceptance.drafter in self.methods:
            if reason := super().cannot(replace(acceptance, verifier="")):
                return reason
        elif not acceptance.drafter:
            return None
        try:
            drafter = parse_settings(json.dumps(self._strategies(acceptance))).drafter
        except UsageError as error:
            return str(error).removeprefix(f"{VARIABLE}: ")
        if drafter is not None and "gamma" not in type(drafter[1]).model_fields:
            return f"drafter '{acceptance.drafter}' has no option gamma, which sets the draft length"
        return None

    def scheduled(self, acceptance: Acceptance) -> bool:
        return acceptance.drafter in self.methods  # vLLM does not pass the length of a step to a custom class

    def export(self, schedule: Schedule) -> Settings:
        if not schedule.gamma:
            return super().export(schedule)
        acceptance = schedule.acceptance
        strategies = self._strategies(acceptance, schedule.gamma)
        if acceptance.drafter in self.methods:
            settings = super().export(replace(schedule, acceptance=replace(acceptance, verifier="token")))
        else:
            custom = {"method": "custom_class", "model": "crossdraft_vllm.Proposer"}
            config = json.dumps(custom | {"num_speculative_tokens": schedule.gamma})
            settings = Settings(f"--speculative-config {shlex.quote(config)}", schedule.remarks())
        variable = f"export {VARIABLE}={shlex.quote(json.dumps(strategies))}"
        remark = "crossdraft and crossdraft-vllm must be installed in vLLM's environment"
        return Settings(f"{variable}\n{settings.text}", (*settings.remarks, remark))

    def _strategies(self, acceptance: Acceptance, gamma: int | None = None) -> dict[str, Any]:
        """The value of `VARIABLE`: the verifier, and the drafter unless it is one of vLLM's own."""
        strategies: dict[str, Any] = {"verifier": acceptance.verifier or "token"}
        if acceptance.drafter not in self.methods:
            length = {} if gamma is None else {"gamma": gamma}
            strategies["drafter"] = {"name": acceptance.drafter, **acceptance.options, **length}
        return strategies
