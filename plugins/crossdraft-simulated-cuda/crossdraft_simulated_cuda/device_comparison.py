"""Decoding on CUDA, the simulated device or a real one, compared with the CPU."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from crossdraft import CounterRng, CrossdraftError, Sampling, StepEvent
from crossdraft.framework.lm.idle import free_idle
from crossdraft.framework.plugins import get
from crossdraft.models import Decoder, build_decoder
from crossdraft.testing import Setting, TinyModel, Toys

from .simulated_device import Counts, device, host_only

#: Temperature zero, warped and plain sampling.
SAMPLINGS = (Sampling(temperature=0), Sampling(temperature=0.8, top_k=6, top_p=0.9), Sampling(temperature=1.0))
#: One slot, and several with more prompts than slots.
BATCH_SIZES = (1, 4)
_LINE = re.compile(r"(?P<operation>[^()]*?) at (?P<file>\S+):(?P<line>\d+) in (?P<function>\w+)")


def compare_drafter(contract: Any, verifier: str, sampling: Sampling, batch_size: int, **loop: Any) -> Counter[str]:
    """Compare the devices for a drafter and an installed verifier, see `compare_devices`."""
    kind, setting = get("verifiers", verifier), _setting(contract, sampling)

    def build(place: str, **options: Any) -> Decoder:
        context = setting.context(batch_size, sampling, place)
        return build_decoder(context, contract.make, (kind, kind.Config()), **{**options, **loop})

    return compare_devices(
        f"'{contract.drafting.name}' × '{verifier}' (temperature {sampling.temperature:g}, batch size {batch_size})",
        build,
        setting.prompts[:1] if batch_size == 1 else [*setting.prompts, setting.prompts[0][:1]],
        contract.drafting,
        contract.drafting.traits(contract.config, sampling).waits,
    )


def compare_devices(
    title: str, build: Callable[..., Decoder], prompts: Sequence[list[int]], strategy: type[Any], waits: int
) -> Counter[str]:
    """Decode on the CPU and on CUDA; return the waits of the step with the largest number, by line.

    Args:
        title: of the pair, for messages.
        build: makes the decoder on the device of the given name, with the loop's options.
        strategy: the drafter or verifier under test; messages name lines of its package if it is involved.
        waits: `DraftTraits.waits` of the drafter.

    Raises:
        AssertionError: the devices differ in tokens or accepted drafts, or a warning is logged on CUDA only; on the
            simulated device: a tensor of a capture is still referenced, or a step waits more often than permitted.
    """
    with collected_warnings() as expected, host_only():
        want = _decode(build("cpu", **_LOOP), prompts)
    device.forget()
    steps: list[Counter[str]] = []

    def count(_: StepEvent) -> None:
        steps.append(counts.waits.copy())
        counts.waits.clear()

    places = device.places = _places(strategy)
    try:
        with collected_warnings() as logged:
            decoder = build("cuda", on_step=count, **_LOOP)
            with device.counting() as counts:
                results = _decode(decoder, prompts)
            kept = [_shortened(line) for line in device.kept() if "held by crossdraft.framework." not in line]
            del decoder
    except (RuntimeError, TypeError) as error:
        place = _LINE.search(str(error))
        if place is None or "devices" not in str(error):
            raise AssertionError(f"{title} fails on CUDA: {_shortened(str(error))}") from error
        raise AssertionError(
            f"{title} mixes cuda:0 and cpu at {_place(place)} ({place['operation'].rpartition(' ')[2]}): make tensors "
            "on the device of those that the step passes"
        ) from error
    finally:
        device.places = ()
    for i in want:
        assert results[i] == want[i], (
            f"{title}: on prompt {i} the CPU yields tokens and accepted drafts {want[i]}, CUDA "
            f"{results[i]}: memory is read that was not written, or an asynchronous copy before it arrived, or a "
            f"captured pass depends on more than its tensors{_suspects(counts, places)}"
        )
    assert logged <= expected, f"{title} warns on CUDA only: {sorted(logged - expected)}"
    kept += map(_shortened, kept_tensors())
    assert not kept, (
        f"{title}: a tensor of a captured pass is kept, and the next replay overwrites it: {'; '.join(kept)}. Keep a "
        "copy that is made outside of the pass"
    )
    largest = max(steps, key=Counter.total, default=Counter())
    assert largest.total() <= 1 + waits, f"{title}: {_explanation(largest, steps, waits, places)}"
    return largest


_LOOP: dict[str, Any] = {"rng": CounterRng(7), "validate": "never", "max_new_tokens": 8}


def _decode(decoder: Decoder, prompts: Sequence[list[int]]) -> dict[int, Any]:
    """Tokens and accepted drafts by prompt."""
    return {r.index: (r.tokens, [step.tau for step in r.steps]) for r in decoder.run(prompts)}


def _suspects(counts: Counts, places: tuple[str, ...]) -> str:
    """Lines of the strategy that allocate memory without writing it, and that copy it to the host."""
    lines = (line for line in (*counts.uninitialised, *counts.copies) if "to the device" not in line)
    matches = (match for match in map(_LINE.fullmatch, lines) if match and match["file"].startswith(places))
    suspects = ", ".join(_shortened(match.group()) for match in matches)
    return suspects and f" (see {suspects})"


def kept_tensors() -> Counter[str]:
    """`Device.kept`, without idle slots of models, which replace theirs in the next pass."""
    if device.captures_alive():  # otherwise idle slots lend their graphs to the next case
        gc.collect()  # slots become idle when they are freed
        free_idle()
    return device.kept()


def _explanation(waits: Counter[str], steps: list[Counter[str]], declared: int, places: tuple[str, ...]) -> str:
    """A sentence about the step with the most waits."""
    sentences = []
    for line in waits:
        place = _LINE.fullmatch(line)
        if place is not None and place["file"].startswith(places):
            times = sum(line in step for step in steps)
            often = "every step" if times == len(steps) else f"{times} of {len(steps)} steps"
            operation, function = place["operation"], place["function"]
            sentences.append(f"{function} waits for the device at {_place(place)} ({operation}) in {often}")
    if not sentences:
        sentences = [f"a step waits for the device {waits.total()} times: {', '.join(map(_shortened, waits))}"]
    advice = f" (traits.waits declares {declared}). Keep values on the device, or declare DraftTraits.waits"
    if any(sentence.startswith("verify ") for sentence in sentences):
        advice = ". Keep values on the device"
    return "; ".join(sentences) + advice


def _places(strategy: type[Any]) -> tuple[str, ...]:
    """Files or folders of the packages of a class and its bases, without the framework."""
    others = ("crossdraft.framework.", "pydantic", "abc", "builtins")
    modules = (sys.modules[cls.__module__] for cls in strategy.__mro__ if not cls.__module__.startswith(others))
    files = ((module, getattr(module, "__file__", None) or "") for module in modules)
    return tuple(os.path.dirname(file) + os.sep if module.__package__ else file for module, file in files if file)


def _place(line: re.Match[str]) -> str:
    return f"{os.path.relpath(line['file'])}:{line['line']}"


def _shortened(text: str) -> str:
    return _LINE.sub(lambda line: f"{line['operation']} at {_place(line)} in {line['function']}", text)


def _setting(contract: Any, sampling: Sampling) -> Setting:
    """A tiny model, which has passes and graphs; the contract's own setting if the drafter needs it."""
    if type(contract.setting) is Toys:
        with suppress(CrossdraftError):
            contract.make(TinyModel().context(1, sampling))
            return TinyModel()
    return contract.setting


@contextmanager
def collected_warnings() -> Iterator[set[str]]:
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
