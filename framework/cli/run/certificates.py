"""Certification before a run: uncertified strategies of its cells are certified on the smallest toy models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any

from ...errors import ContractError

if TYPE_CHECKING:
    from ...bench.cells.step_limit import StepLimit
    from ...recipe.recipe import CellConfig
    from ...runs.certified_registry import CertificateRecord


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
    from ...models.cpu.threads import one_thread
    from ...runs import certified_registry

    start, certified, new = monotonic(), [], []
    pairs = _pairs(cells)
    failure = ""
    with one_thread():
        for kind, strategy, config, certify in (*_verifiers(pairs, limit), *_drafters(pairs)):
            certificate = certified_registry.certificate(strategy, config)
            if certificate is None and (certificate := _guarded(certify, limit)) is not None:
                new.append((strategy, config, certificate))
                certified.append(strategy.name)
            if certificate is not None and not certificate.lossless:
                failure = _failure_message(kind, strategy.name, certificate)
                break
    try:
        certified_registry.remember(new)
    except OSError as error:
        log(f"certificates cannot be stored; the next run certifies again: {error.strerror or error}")
    if failure:
        raise ContractError(failure)
    if certified:
        names = ", ".join(dict.fromkeys(certified))
        log(f"certified lossless on the smallest toy models, in {monotonic() - start:.1f} s: {names}")


def _guarded(certify: Callable[[], CertificateRecord | None], limit: StepLimit) -> CertificateRecord | None:
    """The certificate, or None if the strategy raised; its cells report the error."""
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


def _failure_message(kind: str, name: str, certificate: CertificateRecord) -> str:
    if certificate.where.startswith(kind):  # a fault, not a total variation
        return f"{certificate.where}. Run crossdraft certify --{kind} {name} for details"
    where = f"TV {certificate.tv:.2g} {certificate.where}".rstrip()
    if kind == "verifier":
        return (
            f"verifier '{name}' is declared lossless, but changes the target distribution ({where}); fix it, or "
            f"declare lossless=False in its traits. Run crossdraft certify --verifier {name} for details"
        )
    return (
        f"drafter '{name}' changes the target distribution under a certified verifier ({where}): its q is not the "
        f"distribution that its tokens are drawn from; fix it. Run crossdraft certify --drafter {name} for details"
    )


#: A strategy to certify: "verifier" or "drafter", class, config, and the function that certifies it.
Task = tuple[str, Any, Any, Callable[[], "CertificateRecord | None"]]


def _pairs(cells: Iterable[CellConfig]) -> list[tuple[tuple[Any, Any], tuple[Any, Any]]]:
    """Drafter and verifier, as class and config, of each distinct pair whose verifier is declared lossless."""
    from ... import plugins
    from ...api.build import configured

    pairs = {}
    for cell in cells:
        if cell.is_baseline:
            continue
        key = str((cell.drafter.name, cell.drafter.config, cell.verifier.name, cell.verifier.config))
        if key in pairs:
            continue
        drafter, verifier = (
            configured(kind, {**strategy.config, "name": strategy.name})
            for kind, strategy in (("drafters", cell.drafter), ("verifiers", cell.verifier))
        )
        if plugins.traits_of("verifiers", *verifier).lossless:
            pairs[key] = drafter, verifier
    return list(pairs.values())


def _verifiers(pairs: list[tuple[tuple[Any, Any], tuple[Any, Any]]], limit: StepLimit) -> Iterable[Task]:
    from ...certificate.outcomes import certify_quickly, outcome

    tasks: dict[str, Task] = {}
    for _, (verifier, config) in pairs:
        key = f"{verifier.name} {config!r}"
        tasks[key] = (
            "verifier",
            verifier,
            config,
            lambda verifier=verifier, config=config: outcome(certify_quickly(verifier, config, limit.restart)),
        )
    return tasks.values()


def _drafters(pairs: list[tuple[tuple[Any, Any], tuple[Any, Any]]]) -> Iterable[Task]:
    """Tasks for drafters of plug-ins; built-in drafters are certified by crossdraft's tests."""
    from ...certificate.outcomes import certify_drafter, outcome

    tasks: dict[str, Task] = {}
    for (drafter, config), (verifier, options) in pairs:
        if drafter.__module__.partition(".")[0] == "crossdraft":
            continue

        def certify(
            drafter: Any = drafter, config: Any = config, verifier: Any = verifier, options: Any = options
        ) -> CertificateRecord | None:
            row = certify_drafter(drafter, config, verifier, options)
            return None if row is None else outcome([row])

        tasks.setdefault(f"{drafter.name} {config!r}", ("drafter", drafter, config, certify))
    return tasks.values()
