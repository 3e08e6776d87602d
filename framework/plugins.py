"""Installed plug-ins, and the objects behind their names.

Plug-ins are found through the entry-point group ``crossdraft``; the built-in drafters and verifiers use the
same door. A plug-in that fails to import or to register is recorded in `broken` and skipped with a warning:
somebody else's mistake never stops a run that does not need it. Whatever else of a plug-in is called is called inside
`guarded`. Nothing here imports PyTorch, and looking at `entries` imports no drafter: only `get` does.
"""

import importlib
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from .contracts import hookspecs
from .errors import ContractError, CrossdraftError, UnknownNameError, UsageError, first_line, printable, quoted
from .util.input_files import UNPRINTABLE, describe_forbidden_char
from .util.limits import MOST_NAME

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HOOK = "crossdraft_register_"
KINDS = tuple(hook.removeprefix(_HOOK) for hook in vars(hookspecs) if hook.startswith(_HOOK))
"""What can be registered; for each there is a hook ``crossdraft_register_<kind>``."""
COMPANIONS = {("launchers", name): "crossdraft-cluster" for name in ("local", "ray", "slurm")}
COMPANIONS |= {("trackers", name): "crossdraft-cluster" for name in ("mlflow", "trackio")}
_DRAFTERS = ("dflash", "dspark", "early-exit", "jacobi", "layer-skip", "lookahead", "mlp-speculator", "mtp", "online")
_DRAFTERS += ("p-eagle", "pass", "token-recycling", "universal")
COMPANIONS |= {("drafters", name): "crossdraft-drafters" for name in _DRAFTERS}
COMPANIONS |= {("commands", "serve"): "crossdraft-server", ("commands", "train"): "crossdraft-trainers"}
_TRAINERS = ("disco", "draft-model", "eagle3", "layer-skip", "medusa", "pass")
COMPANIONS |= {("trainers", name): "crossdraft-trainers" for name in _TRAINERS}
_ADVISOR = ("advise", "certify-model", "certify-samples", "compare-texts", "diagnose", "gate", "replay", "simulate")
_ADVISOR += ("verify-engine",)
COMPANIONS |= {("commands", name): "crossdraft-advisor" for name in _ADVISOR}
COMPANIONS |= {("options", "cost --on"): "crossdraft-advisor"}
COMPANIONS |= {("reports", name): "crossdraft-page" for name in ("html", "pdf", "png", "svg")}
_LAYERS = ("flex-attention", "longrope", "recurrent-layers", "small-batch-linear")
COMPANIONS |= {("preparations", name): "crossdraft-layers" for name in _LAYERS}
COMPANIONS |= {("preparations", "openvino"): "crossdraft-openvino"}
COMPANIONS |= {("servers", "openai"): "crossdraft-advisor"}
"""Names of distributions beside crossdraft, by kind; if one is not installed, its names are refused with the remedy."""
#: The same for packages in the repository that nothing of crossdraft needs.
_PACKAGES = {("servers", "vllm"): "vllm", ("servers", "vllm-crossdraft"): "vllm", ("servers", "llama.cpp"): "llamacpp"}
_PACKAGES |= {("backends", "llama.cpp"): "llamacpp", ("drafters", "ngram-simple"): "llamacpp"}
_PACKAGES |= {("drafters", name): name for name in ("combine", "ngram-cache", "rest", "suffix")}
_PACKAGES |= {("verifiers", "by-shape"): "by-shape"}
#: What the core calls of companions: the distribution and the object.
_CALLED = {
    "runner of engines": ("crossdraft-advisor", "crossdraft_advisor.engines.engine_cell:EngineCell"),
    "consent to programs": ("crossdraft-advisor", "crossdraft_advisor.engines.consent:check_programs"),
    "runner of launchers": ("crossdraft-cluster", "crossdraft_cluster.launched_run:Launch"),
    "running of some layers": ("crossdraft-layers", "crossdraft_layers.layer_fork:LayerFork"),
    "tensor parallelism": ("crossdraft-cluster", "crossdraft_cluster.split_placement:Split"),
    "section of engines": ("crossdraft-advisor", "crossdraft_advisor.advise.engine_settings:engine_settings"),
}
_COMMAND = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Entry:
    """A registered name. `ref` is ``"module:object"`` or the object itself; `heading` is of commands only."""

    name: str
    ref: Any
    summary: str
    provider: str
    heading: str = ""


@dataclass(frozen=True)
class Broken:
    """A plug-in, or one of its names, that is skipped, and why."""

    provider: str
    error: str


class Manager(pluggy.PluginManager):
    """pluggy's manager, with the provider of each plug-in and a list of broken ones.

    `register` and `unregister` may be called at any time (tests do): the names are collected again.
    """

    def __init__(self) -> None:
        super().__init__("crossdraft")
        self.add_hookspecs(hookspecs)
        self.providers: dict[str, str] = {}
        self.broken_plugins: list[Broken] = []
        self._collected: tuple[dict[str, dict[str, Entry]], list[Broken]] | None = None
        self.checked: dict[tuple[str, str], Any] = {}

    def register(self, plugin: Any, name: str | None = None) -> str | None:
        """Register `plugin`; it must implement at least one hook, and only existing ones."""
        self._collected = None
        known = self.is_registered(plugin)
        try:
            registered = super().register(plugin, name)
            self.check_pending()
            if not self.get_hookcallers(plugin):
                raise ContractError(_shadowing(plugin) or "it implements no hook; mark its functions with @hookimpl")
        except BaseException:
            if not known and self.is_registered(plugin):
                self.unregister(plugin)
            raise
        return registered

    def unregister(self, plugin: Any = None, name: str | None = None) -> Any:
        """Unregister `plugin` and its names."""
        self._collected = None
        return super().unregister(plugin, name)

    def load_entry_points(self) -> None:
        """Load every installed plug-in: crossdraft's own first, so that built-in names cannot be overridden."""
        skip_damaged_distributions()
        points = [(*_distribution(point), point) for point in entry_points(group="crossdraft")]
        self.broken_plugins += [_skipped(f"the entry points of {path}", error) for path, error in _damaged.items()]
        for distribution, version, point in sorted(points, key=lambda f: (f[0] != "crossdraft", f[0], f[2].name)):
            name, provider = f"{distribution}:{point.name}", f"{distribution} {version}".rstrip()
            try:
                if point.pattern.match(point.value) is None:
                    raise ContractError("it is not of the form module:object")
                with redirect_stdout(sys.stderr):
                    self.register(point.load(), name)
                self.providers[name] = provider
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whatever a third party's module may raise, SystemExit too
                top = sys.modules.get(point.value.partition(":")[0].partition(".")[0])
                if isinstance(error, ModuleNotFoundError) and (why := _shadowing(top)):
                    error = ContractError(why)
                self.broken_plugins.append(_skipped(f"{provider}, {point.name} = {point.value}", error))

    def collected(self) -> tuple[dict[str, dict[str, Entry]], list[Broken]]:
        """All names by kind, and broken plug-ins; cached until a plug-in is registered or unregistered."""
        if self._collected is None:
            self._collected = self._collect()
        return self._collected

    def _collect(self) -> tuple[dict[str, dict[str, Entry]], list[Broken]]:
        names: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
        broken = list(self.broken_plugins)
        for plugin_name, plugin in self.list_name_plugin():
            provider = self.providers.get(plugin_name, f"{plugin_name} (in this process)")
            try:
                # All the hooks of one plug-in, then its names: it is in, or it is out.
                with redirect_stdout(sys.stderr):
                    registered = [(kind, entry) for kind in KINDS for entry in self._entries(plugin, kind, provider)]
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                broken.append(_skipped(provider, error))
                continue
            for kind, entry in registered:
                first = names[kind].setdefault(entry.name, entry)
                if first is not entry:
                    clash = f"the {_singular(kind)} {entry.name!r} is already provided by {first.provider}"
                    broken.append(_skipped(provider, ContractError(clash)))
        return names, broken

    def _entries(self, plugin: Any, kind: str, provider: str) -> list[Entry]:
        """Return what `plugin` registers of one kind. Called per plug-in: a pluggy call stops at the first failure."""
        entries: list[Entry] = []

        def register(name: str, reference: Any, summary: str = "", heading: str = "") -> None:
            if (
                not isinstance(name, str)
                or not name
                or name != name.strip()
                or describe_forbidden_char(name, UNPRINTABLE)
            ):
                raise ContractError(f"{quoted(name)} is not a name for one of its {kind}")
            if reason := MOST_NAME.violation(name):
                raise ContractError(f"{quoted(name)} is too long a name for one of its {kind}; {reason}")
            if isinstance(reference, str) and not all(reference.partition(":")):
                raise ContractError(f"the reference of {name!r}, {quoted(reference)}, is not 'module:object'")
            for part, text in (("summary", summary), ("heading", heading)):
                if not isinstance(text, str) or describe_forbidden_char(text, UNPRINTABLE):
                    raise ContractError(f"the {part} of {name!r}, {quoted(text)}, is not a line of text")
            if kind == "commands" and not _COMMAND.fullmatch(name):
                raise ContractError(
                    f"{quoted(name)} is not a name for a command: lower-case letters, digits and hyphens"
                )
            entries.append(Entry(name, reference, summary, provider, heading or provider.partition(" ")[0]))

        for implementation in getattr(self.hook, f"{_HOOK}{kind}").get_hookimpls():
            if implementation.plugin is plugin:
                implementation.function(register)
        return entries


@cache
def skip_damaged_distributions() -> None:
    """Let distributions with unreadable entry points have none, in this process.

    importlib raises for all distributions if one is damaged, also when a library (pydantic, PyTorch) looks for its own
    plug-ins, so that nothing could be imported.
    """
    read: Any = Distribution.entry_points.fget  # type: ignore[attr-defined]

    def points(self: Distribution) -> EntryPoints:
        try:
            return read(self)
        except Exception as error:
            _damaged[str(getattr(self, "_path", self))] = error
            return EntryPoints()

    Distribution.entry_points = property(points)  # type: ignore[assignment,misc]


#: Distributions with unreadable entry points, and the errors.
_damaged: dict[str, Exception] = {}


@cache
def manager() -> Manager:
    """The one plug-in manager of this process, with every installed plug-in loaded."""
    manager = Manager()
    manager.load_entry_points()
    return manager


def entries(kind: str) -> dict[str, Entry]:
    """Registered names of a kind (one of `KINDS`), without importing the objects."""
    if kind not in KINDS:
        raise UnknownNameError.among("kind of plug-in", kind, KINDS)
    return dict(manager().collected()[0][kind])


def broken() -> list[Broken]:
    """Skipped plug-ins, with the reasons."""
    return list(manager().collected()[1])


def get(kind: str, name: str) -> Any:
    """Import and return the object registered as `name`.

    Raises `UnknownNameError` for an unregistered name, and `ContractError`, which names the plug-in, for an object that
    cannot be imported or violates the contract of its kind.
    """
    known = entries(kind)
    if name not in known:
        raise unknown(kind, name)
    entry = known[name]
    with guarded(kind, name, passing=()):
        registered = _import(entry.ref) if isinstance(entry.ref, str) else entry.ref
        if manager().checked.get((kind, name)) is not registered:
            _check(kind, name, registered)
            manager().checked[kind, name] = registered
    return registered


def installing(companion: str) -> str:
    """The command that installs a distribution of `COMPANIONS`, none of which is on a package index."""
    return f"in a clone of crossdraft: pip install plugins/{companion}"


def of_companion(name: str) -> Any:
    """The object of `_CALLED`. Raises UnknownNameError with what installs its distribution."""
    companion, reference = _CALLED[name]
    if find_spec(reference.partition(".")[0]) is None:
        raise UnknownNameError(f"the {name} is part of {companion}; {installing(companion)}")
    return _import(reference)


def of_repository(cls: type[Any]) -> bool:
    """True for a class of crossdraft or of a distribution that is named here, whose tests certify it."""
    named = {"crossdraft", *COMPANIONS.values(), *(f"crossdraft-{package}" for package in _PACKAGES.values())}
    return cls.__module__.partition(".")[0].replace("_", "-") in named


def unknown(kind: str, name: str, hint: str = "") -> UnknownNameError:
    """Error for a name that is not registered: what installs it, or the nearest names."""
    package = _PACKAGES.get((kind, name))
    if companion := COMPANIONS.get((kind, name)) or (package and f"crossdraft-{package}"):
        return UnknownNameError(f"the {_singular(kind)} {name!r} is part of {companion}; {installing(companion)}")
    return UnknownNameError.among(_singular(kind), name, entries(kind), hint)


@contextmanager
def guarded(
    kind: str, name: str, doing: str = "", passing: tuple[type[BaseException], ...] = (CrossdraftError,)
) -> Iterator[None]:
    """Run code of the plug-in that provides ``name``; convert its exceptions to a ContractError that names it.

    SystemExit is converted too; KeyboardInterrupt and the classes in ``passing`` propagate. Output of the code is
    redirected to standard error.

    Args:
        doing: the call, for the message: "traits()".
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (KeyboardInterrupt, *passing):
        raise
    except BaseException as error:
        raise unusable(kind, name, f"{doing} raised {first_line(error)}" if doing else first_line(error)) from error


def unusable(kind: str, name: str, why: str) -> ContractError:
    """Error for a registered object that violates its contract."""
    entry = entries(kind).get(name)
    provider = f" of {entry.provider}" if entry is not None else ""
    return ContractError(f"the {_singular(kind)} {name!r}{provider} is unusable: {why}")


def recorded_traits(kind: str, name: str, options: Mapping[str, Any], *sampling: Any) -> Any:
    """The traits of a drafter or verifier with options that a run recorded.

    Raises UsageError if the options do not fit the installed version.
    """
    cls = get(kind, name)
    try:
        with guarded(kind, name, "its Config", passing=(ValueError, TypeError)):
            config = cls.Config(**options)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"the run has options of {kind[:-1]} '{name}' that do not fit the installed version: "
            f"{first_line(error)}; run its recipe again"
        ) from None
    return traits_of(kind, cls, config, *sampling)


def traits_of(kind: str, cls: Any, config: Any, *sampling: Any) -> Any:
    """Return the traits of a drafter or verifier (a class, or an instance).

    Raises ContractError for traits that raise or are nonsense.
    """
    from .contracts.drafter import DraftTraits
    from .contracts.verifier import VerifierTraits

    with guarded(kind, cls.name, "traits()"):
        traits = cls.traits(config, *sampling)
    expected: Any = DraftTraits if kind == "drafters" else VerifierTraits
    if not isinstance(traits, expected):
        raise unusable(kind, cls.name, f"traits() must return crossdraft.{expected.__name__}, not {quoted(traits)}")
    if problem := traits.problem():
        raise unusable(kind, cls.name, f"traits() declares {problem}")
    return traits


def notify(hook: str, **arguments: Any) -> Any:
    """Call `hook` of every plug-in; errors are logged, not raised. Returns the last result that is not None."""
    results = []
    for implementation in getattr(manager().hook, hook).get_hookimpls():
        try:
            with redirect_stdout(sys.stderr):
                results.append(implementation.function(*[arguments[name] for name in implementation.argnames]))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            logger.warning("crossdraft: %s of %s: %s", hook, implementation.plugin_name, first_line(error))
    return next((result for result in reversed(results) if result is not None), None)


def _import(reference: str) -> Any:
    module, _, attributes = reference.partition(":")
    target = importlib.import_module(module)
    for attribute in attributes.split("."):
        if (
            hasattr(target, "__path__")
            and not hasattr(target, attribute)
            and find_spec(f".{attribute}", target.__name__)
        ):  # a module of a package
            importlib.import_module(f".{attribute}", target.__name__)
        target = getattr(target, attribute)
    return target


#: Base classes of kinds, in `contracts`.
_BASES = {"drafters": "drafter:Drafter", "verifiers": "verifier:Verifier", "trainers": "options:Options"}
_BASES |= {"backends": "models:Backend", "preparations": "models:ModelPreparation"}
#: Base class and required methods of kinds whose base class this layer does not import.
_METHODS = {
    "engines": ("crossdraft_advisor.Engine", ("cannot", "scheduled", "export")),
    "formats": ("crossdraft_advisor.AcceptanceFormat or ResponseFormat", ("read", "rows")),  # one of both
    "launchers": ("crossdraft_cluster.launcher.Launcher", ("devices", "start")),
    "servers": ("crossdraft_advisor.EngineServer", ("start", "complete", "stop")),
    "reports": ("crossdraft.Report", ("render",)),
}


def _check(kind: str, name: str, registered: Any) -> None:
    """Raise `ContractError` with what `registered` lacks to be a `kind` called `name`."""
    if kind in _BASES:
        _check_class(kind, name, registered)
    elif kind in _METHODS:
        base, methods = _METHODS[kind]
        defined = [callable(getattr(registered, method, None)) for method in methods]
        if not isinstance(registered, type) or not (any(defined) if kind == "formats" else all(defined)):
            raise ContractError(f"{name!r} must be a subclass of {base}, not {quoted(registered)}")
    elif kind == "commands":
        if missing := [part for part in ("add_arguments", "main") if not callable(getattr(registered, part, None))]:
            raise ContractError(f"{quoted(registered)} is not a subclass of crossdraft.Command: no {missing[0]}")
    elif kind == "trackers" and not isinstance(registered, type):
        raise ContractError(f"a tracker is a class, not {quoted(registered)}")
    elif kind == "models":
        from .contracts.models import ModelSource

        if not (isinstance(registered, ModelSource | Path) or callable(registered)):
            raise ContractError(f"a model is a ModelSource, a pathlib.Path or a function, not {registered!r}")
    if kind in (*_BASES, *_METHODS) and (own := getattr(registered, "name", None)) != name:
        raise ContractError(f"{registered.__name__}.name is {own!r}; it must be {name!r}, the registered name")


def _check_class(kind: str, name: str, registered: Any) -> None:
    base = _import(f"{__package__}.contracts.{_BASES[kind]}")
    if not (isinstance(registered, type) and issubclass(registered, base)):
        raise ContractError(f"{registered!r} is not a subclass of crossdraft.{base.__name__}")
    if missing := sorted(getattr(registered, "__abstractmethods__", ())):
        raise ContractError(f"{registered.__name__} does not define {', '.join(missing)}")
    if kind in ("drafters", "verifiers"):
        from .contracts.drafter import StrategyConfig

        if not callable(getattr(registered, "traits", None)):
            raise ContractError(
                f"{registered.__name__}.traits must be a classmethod that returns the traits for a config"
            )
        config: Any = getattr(registered, "Config", None)
        if not (isinstance(config, type) and issubclass(config, StrategyConfig)):
            raise ContractError(f"{registered.__name__}.Config is {quoted(config)}, not a crossdraft.StrategyConfig")


def _shadowing(module: Any) -> str | None:
    """A sentence on the folder ``module`` if it hides an installed package; None if it has code."""
    if getattr(module, "__file__", None) is not None or not getattr(module, "__path__", None):
        return None
    folder = next(iter(module.__path__))
    return (
        f"the folder {printable(str(folder))} shadows the installed package {module.__name__!r}: it has no "
        "__init__.py, and Python found it first; start Python in another folder, or rename that one"
    )


def _skipped(provider: str, error: BaseException) -> Broken:
    broken = Broken(printable(provider), first_line(error))
    logger.warning("crossdraft: skipped a plug-in (%s): %s", broken.provider, broken.error)
    return broken


def _singular(kind: str) -> str:
    return "prompt source" if kind == "prompts" else kind.removesuffix("s")


def _distribution(entry_point: EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution of an entry point; its directory if its metadata is damaged."""
    package: Any = entry_point.dist
    try:
        name, version = package.name, package.version
    except Exception:
        name = version = None
    return str(name or getattr(package, "_path", "unknown distribution")), str(version or "")
