"""Certificates before a run: every strategy of its cells that has none is certified on the smallest toys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from ...errors import ContractError

if TYPE_CHECKING:
    from ...bench.step_limit import StepLimit
    from ...recipe.recipe import CellConfig
    from ...runs.certified_registry import CertificateRecord


def certify_missing(cells: Iterable[CellConfig], tell: Callable[[str], None], limit: StepLimit) -> None:
    """Certify the verifiers of cells that claim to be lossless, and the drafters that plug-ins provide.

    Certificates are kept with the digest of the code, so that a second run has nothing to enumerate. A verifier that
    cannot be certified (it raises, or its code has no file) runs and is marked "not certified".

    Args:
        limit: ends the enumeration of a pair that takes longer than a step may.

    Raises:
        ContractError: one that claims to be lossless changes the target's distribution.
    """
    from ...models.threads import one_thread
    from ...runs import certified_registry

    start, done, new = monotonic(), [], []
    pairs = _pairs(cells)
    refused = ""
    with one_thread():
        for kind, strategy, config, certify in (*_verifiers(pairs, limit), *_drafters(pairs)):
            found = certified_registry.certificate(strategy, config)
            if found is None and (found := _guarded(certify, limit)) is not None:
                new.append((strategy, config, found))
                done.append(strategy.name)
            if found is not None and not found.lossless:
                refused = _sentence(kind, strategy.name, found)
                break
    try:
        certified_registry.remember(new)
    except OSError as error:
        tell(f"certificates could not be kept, and are made again by the next run: {error.strerror or error}")
    if refused:
        raise ContractError(refused)
    if done:
        names = ", ".join(dict.fromkeys(done))
        tell(f"certified lossless on the smallest toys, in {monotonic() - start:.1f} s: {names}")


def _guarded(certify: Callable[[], CertificateRecord | None], limit: StepLimit) -> CertificateRecord | None:
    """The certificate; None if the strategy raised instead, whatever that was: its cells report it."""
    from ...runs.interrupts import user_interrupted

    try:
        limit.restart()
        return certify()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and user_interrupted():
            raise
        return None
    finally:
        limit.stop()


def _sentence(kind: str, name: str, found: CertificateRecord) -> str:
    where = f"TV {found.tv:.2g} {found.where}".rstrip()
    if kind == "verifier":
        return (
            f"verifier '{name}' claims to be lossless, but changes the target's distribution ({where}); mend it, or "
            f"declare lossless=False in its traits. crossdraft certify --verifier {name} shows more"
        )
    return (
        f"drafter '{name}' changes the target's distribution under a certified verifier ({where}): its q is not the "
        f"distribution that its tokens are drawn from; mend it. crossdraft certify --drafter {name} shows more"
    )


#: What is to be certified: "verifier" or "drafter", class, config, and what certifies it.
Task = tuple[str, Any, Any, Callable[[], "CertificateRecord | None"]]


def _pairs(cells: Iterable[CellConfig]) -> list[tuple[tuple[Any, Any], tuple[Any, Any]]]:
    """Drafter and verifier, as configured, of each distinct pair with a verifier that claims to be lossless."""
    from ... import plugins
    from ...api.build import configured

    found = {}
    for cell in cells:
        if cell.is_baseline:
            continue
        key = str((cell.drafter.name, cell.drafter.config, cell.verifier.name, cell.verifier.config))
        if key in found:
            continue
        drafter, verifier = (
            configured(kind, {**one.config, "name": one.name})
            for kind, one in (("drafters", cell.drafter), ("verifiers", cell.verifier))
        )
        if plugins.traits_of("verifiers", *verifier).lossless:
            found[key] = drafter, verifier
    return list(found.values())


def _verifiers(pairs: list[tuple[tuple[Any, Any], tuple[Any, Any]]], limit: StepLimit) -> Iterable[Task]:
    from ...certificate.outcomes import certify_quickly, outcome

    tasks: dict[str, Task] = {}
    for _, (rule, options) in pairs:
        key = f"{rule.name} {options!r}"
        tasks[key] = (
            "verifier",
            rule,
            options,
            lambda rule=rule, options=options: outcome(certify_quickly(rule, options, limit.restart)),
        )
    return tasks.values()


def _drafters(pairs: list[tuple[tuple[Any, Any], tuple[Any, Any]]]) -> Iterable[Task]:
    """Tasks for drafters of plug-ins only: crossdraft's tests certify its own."""
    from ...certificate.outcomes import certify_drafter, outcome

    tasks: dict[str, Task] = {}
    for (drafter, config), (rule, options) in pairs:
        if drafter.__module__.partition(".")[0] == "crossdraft":
            continue

        def certify(
            drafter: Any = drafter, config: Any = config, rule: Any = rule, options: Any = options
        ) -> CertificateRecord | None:
            row = certify_drafter(drafter, config, rule, options)
            return None if row is None else outcome([row])

        tasks.setdefault(f"{drafter.name} {config!r}", ("drafter", drafter, config, certify))
    return tasks.values()
