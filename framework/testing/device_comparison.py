"""Decoding on the simulated CUDA device (`simulated_cuda`), compared with the CPU."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..api.build import build_decoder
from ..contracts.rng import CounterRng
from ..contracts.sampling import Sampling
from ..contracts.steps import StepEvent
from ..contracts.verifier import incompatible
from ..errors import CrossdraftError
from ..plugins import entries, get
from .settings import Setting, TinyModel, Toys
from .simulated_cuda import device

if TYPE_CHECKING:
    from .drafter_contract import DrafterContract

#: Temperature zero, warped and plain sampling.
SAMPLINGS = (Sampling(temperature=0), Sampling(temperature=0.8, top_k=6, top_p=0.9), Sampling(temperature=1.0))
#: One slot, and several with more prompts than slots.
BATCH_SIZES = (1, 4)


def verifiers(contract: DrafterContract, sampling: Sampling) -> list[str]:
    """Names of the installed verifiers that accept the drafter's drafts."""
    name, traits = contract.drafting.name, contract.drafting.traits(contract.config, sampling)
    if traits.temperature_zero_only and sampling.temperature:
        return []
    classes = {other: get("verifiers", other) for other in entries("verifiers")}
    return [
        other
        for other, verifier in classes.items()
        if incompatible(name, traits, other, verifier.traits(verifier.Config()), sampling) is None
    ]


def compare_devices(
    contract: DrafterContract, verifier: str, sampling: Sampling, batch_size: int, **loop: Any
) -> Counter[str]:
    """Decode on the CPU and on the simulated device; return the waits of the step with the largest number, by line.

    Raises:
        AssertionError: the devices differ in tokens or accepted drafts, a warning is logged on the simulated one only,
            a tensor of a capture is still referenced, or a step waits more often than `DraftTraits.waits` permits.
    """
    pair = f"'{contract.drafting.name}' × '{verifier}' (temperature {sampling.temperature:g}, batch size {batch_size})"
    with _warnings() as expected:
        want, _ = _decode(contract, verifier, sampling, batch_size, "cpu", loop)
    device.forget()
    with _warnings() as logged:
        results, waits = _decode(contract, verifier, sampling, batch_size, "cuda", loop)
    assert results == want, f"{pair}: the CPU yields (tokens, accepted) {want}, the simulated device {results}"
    assert logged <= expected, f"{pair} warns on the simulated device only: {sorted(logged - expected)}"
    assert not (kept := device.kept()), f"{pair}: tensors of a captured pass are kept: {dict(kept)}"
    permitted = 1 + contract.drafting.traits(contract.config, sampling).waits
    assert waits.total() <= permitted, (
        f"{pair}: a step waits for the device {waits.total()} times, {permitted} are permitted; keep values on the "
        f"device, or declare DraftTraits.waits: {dict(waits)}"
    )
    return waits


def _decode(
    contract: DrafterContract, verifier: str, sampling: Sampling, batch_size: int, place: str, loop: dict[str, Any]
) -> tuple[dict[int, Any], Counter[str]]:
    steps: list[Counter[str]] = []

    def count(_: StepEvent) -> None:
        steps.append(counts.waits.copy())
        counts.waits.clear()

    kind, setting = get("verifiers", verifier), _setting(contract, sampling)
    prompts = setting.prompts[:1] if batch_size == 1 else [*setting.prompts, setting.prompts[0][:1]]
    decoder = build_decoder(
        setting.context(batch_size, sampling, place),
        contract.make,
        (kind, kind.Config()),
        **{"rng": CounterRng(7), "validate": "never", "max_new_tokens": 8, "on_step": count, **loop},
    )
    with device.counting() as counts:
        responses = {r.index: (r.tokens, [step.tau for step in r.steps]) for r in decoder.run(prompts)}
    return responses, max(steps, key=Counter.total, default=Counter())


def _setting(contract: DrafterContract, sampling: Sampling) -> Setting:
    """A tiny model, which has passes and graphs; the contract's own setting if the drafter needs it."""
    if type(contract.setting) is Toys:
        with suppress(CrossdraftError):
            contract.make(TinyModel().context(1, sampling))
            return TinyModel()
    return contract.setting


@contextmanager
def _warnings() -> Iterator[set[str]]:
    """Collect the warnings of crossdraft and of Python."""
    messages: set[str] = set()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.add(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("crossdraft")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield messages
            messages |= {str(warning.message) for warning in caught}
    finally:
        logger.removeHandler(handler)
