"""Hooks for plug-ins (pluggy, project and entry-point group ``crossdraft``).

A plug-in is a module, named by an entry point of the group ``crossdraft``, whose functions are marked with
``@hookimpl``; it implements the hooks it needs and no others::

    from crossdraft import hookimpl

    @hookimpl
    def crossdraft_register_drafters(register):
        register("my-drafter", "my_package.my_drafter:MyDrafter", summary="one line for `crossdraft list`")

``register(name, reference, summary="")`` takes the object or, better, ``"package.module:object"``, which is imported on
first use. Keep the plug-in module free of heavy imports: ``crossdraft list`` imports every plug-in. The decoding loop
calls no hooks, only methods of the registered classes.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import pluggy

hookspec = pluggy.HookspecMarker("crossdraft")
hookimpl = pluggy.HookimplMarker("crossdraft")


class Register(Protocol):
    """Callback of a plug-in, called once for each name that it provides.

    ``heading``, for commands only: the part of ``crossdraft --help`` that lists it; the name of the distribution
    without one.
    """

    def __call__(self, name: str, reference: Any, summary: str = "", heading: str = "") -> None: ...


@hookspec
def crossdraft_register_drafters(register: Register) -> None:
    """Register subclasses of `crossdraft.Drafter`, each under its own ``name``."""


@hookspec
def crossdraft_register_verifiers(register: Register) -> None:
    """Register subclasses of `crossdraft.Verifier`, each under its own ``name``."""


@hookspec
def crossdraft_register_trainers(register: Register) -> None:
    """Register kinds of training for ``crossdraft train``: subclasses of TrainingConfig of crossdraft_trainers."""


@hookspec
def crossdraft_register_models(register: Register) -> None:
    """Register models: a `ModelSource`, the `Path` of a model, or a function without arguments that returns one."""


@hookspec
def crossdraft_register_backends(register: Register) -> None:
    """Register subclasses of `crossdraft.Backend`, each under its own ``name``."""


@hookspec
def crossdraft_register_preparations(register: Register) -> None:
    """Register subclasses of `crossdraft.ModelPreparation`, each under its own ``name``."""


@hookspec
def crossdraft_register_prompts(register: Register) -> None:
    """Register prompt sources (see `crossdraft.framework.recipe.prompts`)."""


@hookspec
def crossdraft_register_engines(register: Register) -> None:
    """Register subclasses of `crossdraft_advisor.Engine`, each under its own ``name``, for ``crossdraft advise``."""


@hookspec
def crossdraft_register_formats(register: Register) -> None:
    """Register subclasses of `crossdraft_advisor.AcceptanceFormat` or `ResponseFormat`, each under its own ``name``."""


@hookspec
def crossdraft_register_servers(register: Register) -> None:
    """Register subclasses of `crossdraft_advisor.EngineServer`, each under the ``engine`` of a recipe."""


@hookspec
def crossdraft_register_launchers(register: Register) -> None:
    """Register subclasses of `crossdraft_cluster.launcher.Launcher`, for ``crossdraft run --launcher``."""


@hookspec
def crossdraft_register_trackers(register: Register) -> None:
    """Register trackers for ``crossdraft run --track NAME``.

    A tracker is a class without constructor arguments whose methods are the three hooks below, marked with
    ``@hookimpl``. A plug-in with these hooks as functions receives every run.
    """


@hookspec
def crossdraft_register_commands(register: Register) -> None:
    """Register commands of the command line: subclasses of `crossdraft.Command`, each under its own ``name``."""


@hookspec
def crossdraft_register_reports(register: Register) -> None:
    """Register formats of ``crossdraft report``: subclasses of `crossdraft.Report`, each under its own ``name``."""


@hookspec
def crossdraft_run_started(run: Mapping[str, Any]) -> None:
    """Called when a run starts.

    `run` holds at least ``name``, ``directory`` (a string), ``cells`` (their number) and ``shard`` (``"2/4"``, or
    empty).
    """


@hookspec
def crossdraft_cell_finished(run: Mapping[str, Any], cell: Mapping[str, Any]) -> None:
    """Called when a cell of `run` is on disk. `cell` holds at least ``id``, ``config`` and ``metrics``."""


@hookspec
def crossdraft_summary_written(summary: Any) -> None:
    """Called when the tables of a run are on disk.

    Write further files into ``summary.directory``. Append names of charts to ``summary.charts`` and remarks to
    ``summary.notes``: ``summary.md`` is written again with both.
    """


@hookspec
def crossdraft_run_finished(run: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
    """Called when a run has ended and its files are complete.

    `outcome` holds at least ``exit_code``, ``failed`` (number of cells), ``interrupted`` and ``stopped`` (the reason of
    an early end, or empty).
    """
