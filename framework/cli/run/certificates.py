"""Certification before a run: uncertified strategies of its cells are certified on the smallest toy models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from ...errors import ContractError
from ...runs.interrupts import propagate_interrupt

if TYPE_CHECKING:
    from ...bench.cells.step_limit import StepLimit
    from ...recipe.recipe import CellConfig
    from ...runs.certified_registry import CertificateRecord

#: A strategy to certify: "verifier" or "drafter", class, config; for a drafter, the verifier and its config.
Task = tuple[str, Any, Any, tuple[Any, Any] | None]


def certify_missing(cells: Iterable[CellConfig], log: Callable[[str], None], limit: StepLimit) -> None:
    """Certify the verifiers of cells that are declared lossless, and the drafters of plug-ins.

    Certificates are stored under the digest of the code, so later runs reuse them. A verifier that cannot be certified
    (it raises, or its code has no file) runs and is marked "not certified".

    Args:
        log: receives progress messages.
        limit: the time limit for the enumeration of a pair.

    Raises:
        ContractError: a strategy that is declared lossless changes the target distribution.
    """
    from ...runs import certified_registry

    start, certified, new = monotonic(), [], []
    failure = ""
    for kind, strategy, config, partner in _tasks(cells):
        certificate = certified_registry.certificate(strategy, config)
        if certificate is None and (certificate := _certified(strategy, config, partner, limit)) is not None:
            new.append((strategy, config, certificate))
            certified += [strategy.name] * certificate.exercised
        if certificate is not None and not certificate.lossless:
            failure = _failure_message(kind, strategy.name, certificate)
            break
    try:
        if new:
            certified_registry.remember(new)
    except OSError as error:
        log(f"certificates cannot be stored; the next run certifies again: {error.strerror or error}")
    if failure:
        raise ContractError(failure)
    if certified:
        names = ", ".join(dict.fromkeys(certified))
        log(f"certified lossless on the smallest toy models, in {monotonic() - start:.1f} s: {names}")


def _certified(
    strategy: Any, config: Any, partner: tuple[Any, Any] | None, limit: StepLimit
) -> CertificateRecord | None:
    """The certificate, or None if the strategy raised; its cells report the error."""
    from ...certificate.outcomes import certify_drafter, certify_quickly, outcome
    from ...certificate.rows import CannotRun
    from ...plugins import of_repository
    from ...runs.certified_registry import CertificateRecord
    from ...runs.threads import one_thread

    try:
        limit.restart()
        with one_thread():
            if partner is None:
                return outcome(certify_quickly(strategy, config, limit.restart))
            return outcome(certify_drafter(strategy, config, *partner))
    except CannotRun as reason:
        if partner is None or of_repository(strategy):
            return None
        return CertificateRecord(0.0, place=f"drafter '{strategy.name}': {reason}", exercised=False)
    except BaseException as error:
        propagate_interrupt(error)
        return None
    finally:
        limit.stop()


def _failure_message(kind: str, name: str, certificate: CertificateRecord) -> str:
    if certificate.place.startswith(kind):  # a fault, not a total variation
        return f"{certificate.place}. Run crossdraft certify --{kind} {name} for details"
    place = f"TV {certificate.tv:.2g} {certificate.place}".rstrip()
    if kind == "verifier":
        return (
            f"verifier '{name}' is declared lossless, but changes the target distribution ({place}); fix it, or "
            f"declare lossless=False in its traits. Run crossdraft certify --verifier {name} for details"
        )
    return (
        f"drafter '{name}' changes the target distribution under a certified verifier ({place}): its q is not the "
        f"distribution that its tokens are drawn from; fix it. Run crossdraft certify --drafter {name} for details"
    )


def _tasks(cells: Iterable[CellConfig]) -> list[Task]:
    """Verifiers that are declared lossless, then drafters of plug-ins; crossdraft's tests certify its own drafters."""
    from ... import plugins
    from ...api.build import configured

    verifiers, drafters = dict[str, Task](), dict[str, Task]()
    for cell in cells:
        if cell.is_baseline or cell.engine is not None:
            continue
        verifier, config = configured("verifiers", cell.verifier)
        if not plugins.traits_of("verifiers", verifier, config).lossless:
            continue
        verifiers.setdefault(f"{verifier.name} {config!r}", ("verifier", verifier, config, None))
        drafter, options = configured("drafters", cell.drafter)
        if drafter.__module__.partition(".")[0] != "crossdraft":
            key = f"{drafter.name} {options!r}"
            drafters.setdefault(key, ("drafter", drafter, options, (verifier, config)))
    return [*verifiers.values(), *drafters.values()]
