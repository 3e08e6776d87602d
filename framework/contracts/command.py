"""Commands of the command line: models whose fields are the options.

::

    class CountTokens(Command):
        name = "count-tokens"

        prompts: Annotated[str, Argument("PROMPTS", positional=True)] = Field(description="prompt set")
        limit: Annotated[int, Argument("N")] = Field(16, ge=1, description="number of prompts")

        def run(self) -> int:
            ...
            return 0

Parser, checks and messages follow from the fields: a ``bool`` is a flag, a tuple a repeatable option, a ``Literal`` a
choice, a ``Path`` a valid file name. Options that depend on each other are checked by a validator of the model, which
raises UsageError. A kind of training gets its options in the same way (`add_options`, `parsed`).
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import Field, ValidationError
from pydantic_core import PydanticUndefined

from ..errors import UsageError, printable
from ..util.input_files import kind_of, path_of
from ..util.limits import Limit
from .options import Options, fault

AnyOptions = TypeVar("AnyOptions", bound=Options)
#: Characters of a list, and of a value in a message.
_LONGEST, _QUOTED = 10_000, 60


@dataclass(frozen=True)
class Argument:
    """Form of an option on the command line, in the annotation of its field; the field's description is its help.

    Attributes:
        metavar: name of the value in ``--help``.
        positional: True for an argument without ``--name``.
        short: a short form, e.g. ``"-v"``.
        group: heading in ``--help``.
        exclusive: name of a set of options of which one may be given.
        commas: True if the items of a tuple are separated by commas.
        requires: names of fields, separated by blanks; one given without all of them is refused.
    """

    metavar: str = ""
    positional: bool = False
    short: str = ""
    group: str = ""
    exclusive: str = ""
    commas: bool = False
    requires: str = ""


@dataclass(frozen=True)
class _Option:
    """One option: its name, help, form, and the type of its value or of the items of its tuple."""

    name: str
    help: str
    form: Argument
    item: Any
    many: bool
    default: Any
    limit: Limit | None

    @property
    def label(self) -> str:
        """Name in messages: ``--max-prompt``, or the metavar of a positional argument."""
        if self.form.positional:
            return self.form.metavar or self.name.upper()
        return f"--{self.name.rstrip('_').replace('_', '-')}"  # ``json_`` is --json, a method of models

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of ``add_argument``; the value stays text, which `parsed` converts."""
        form, default, required = self.form, self.default, self.default is PydanticUndefined
        text = self.help
        if not required and default not in (None, False, (), "") and not text.endswith(")"):
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            text += f" (default: {shown})"
        settings: dict[str, Any] = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS}
        if self.item is bool:
            return settings | {"action": "store_true"}
        if get_origin(self.item) is Literal:
            settings["metavar"] = f"{{{','.join(get_args(self.item))}}}"
        elif metavar := form.metavar or {int: "N", float: "X"}.get(self.item, ""):
            settings["metavar"] = ",".join([metavar, metavar, "..."]) if form.commas and not form.metavar else metavar
        if form.positional:
            if self.many or not required:
                settings["nargs"] = "?" if not self.many else "+" if required else "*"
            return settings
        if self.many and not form.commas:
            settings["action"] = "append"
        return settings | {"required": required}

    def convert(self, text: Any) -> Any:
        """Parts of a list with commas, and paths with ``~`` expanded; other values as they are.

        Raises:
            UsageError: a list that is too long, an empty name in one, an invalid path.
        """
        if self.many and self.form.commas:
            if len(text) > _LONGEST:
                raise UsageError(f"{self.label} has {len(text)} characters; the maximum is {_LONGEST}")
            text = [part.strip() for part in text.split(",")]
            if self.item is str:
                if not all(text):
                    raise UsageError(f"{self.label} {_shown(text)}: should be a list of names, without an empty one")
                text = list(dict.fromkeys(text))
        if self.item is Path:
            return [self._path(name) for name in text] if self.many else self._path(text)
        return text

    def _path(self, name: Any) -> Path:
        try:
            if str(name).strip():
                kind_of(name)
                return path_of(name)
        except UsageError as error:
            raise UsageError(f"{self.label}: {error}") from None
        raise UsageError(f"{self.label} {str(name)!r} is not a valid path")

    def check(self, value: Any) -> None:
        """Raise UsageError if a number exceeds the limit in the annotation."""
        for number in value if isinstance(value, tuple) else (value,):
            if self.limit is not None and number is not None and (reason := self.limit.violation(number)):
                raise UsageError(f"{self.label} {_shown(number)} is too large; {reason}")


class Command(Options, ABC):
    """A command of ``crossdraft``, registered through ``crossdraft_register_commands``.

    Attributes:
        debug: True if tracebacks of errors are printed.

    Raises:
        UsageError: options that cannot be combined (from a validator of the subclass).
    """

    #: The registered name.
    name: ClassVar[str]

    debug: bool = Field(False, description="show tracebacks of errors")

    @abstractmethod
    def run(self) -> int:
        """Return the exit code. A CrossdraftError is printed as one line, with its own exit code."""

    def refuse_given(self, fields: Iterable[str], reason: str) -> None:
        """Raise UsageError if one of these options was given: "--draws 5 has no effect <reason>; remove it"."""
        for option in _options(type(self)):
            if option.name in self.model_fields_set.intersection(fields):
                value = "" if option.item is bool else f" {_shown(getattr(self, option.name))}"
                raise UsageError(f"{option.label}{value} has no effect {reason}; remove it")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser."""
        add_options(parser, cls)

    @classmethod
    def main(cls, args: argparse.Namespace) -> int:
        """Run the command with parsed arguments and return its exit code."""
        return parsed(cls, vars(args)).run()


def add_options(parser: Any, model: type[Options]) -> None:
    """Add the fields of a model to a parser, or to a group of its options: its own, inherited ones, ``--debug``."""
    homes = (base for base in model.__mro__ if base is model or "name" in vars(base))  # not shared options
    own = {name for base in homes for name in vars(base).get("__annotations__", {})}
    groups: dict[str, Any] = {"": parser}
    exclusive: dict[str, Any] = {}
    for option in sorted(_options(model), key=lambda option: (option.name == "debug", option.name not in own)):
        form = option.form
        if form.group not in groups:
            groups[form.group] = parser.add_argument_group(form.group)
        into = groups[form.group]
        if form.exclusive:
            if form.exclusive not in exclusive:
                exclusive[form.exclusive] = into.add_mutually_exclusive_group()
            into = exclusive[form.exclusive]
        if form.positional:
            into.add_argument(option.name, **option.settings())
        else:
            names = [form.short] * bool(form.short) + [option.label]
            into.add_argument(*names, dest=option.name, **option.settings())


def parsed(model: type[AnyOptions], values: Mapping[str, Any]) -> AnyOptions:
    """The model with those ``values``, as text, that are its fields.

    Raises:
        UsageError: a value is not valid; the message has the option, the value and the reason.
    """
    options = {option.name: option for option in _options(model)}
    try:
        result = model(**{name: options[name].convert(value) for name, value in values.items() if name in options})
    except ValidationError as error:
        problem = error.errors()[0]
        option = options[str(problem["loc"][0])]
        raise UsageError(f"{option.label} {_shown(problem['input'])}: {fault(problem)}") from None
    for name, option in options.items():
        option.check(getattr(result, name))
        if name in result.model_fields_set:
            for other in option.form.requires.split():
                if getattr(result, other) in (None, "", (), False):
                    raise UsageError(f"{option.label} requires {options[other].label}")
    return result


def _options(model: type[Options]) -> Iterator[_Option]:
    for name, field in model.model_fields.items():
        kind, metadata = field.annotation, [*field.metadata]
        if get_origin(kind) in (Union, UnionType):
            kind = next(part for part in get_args(kind) if part is not NoneType)
        many = get_origin(kind) is tuple
        item = get_args(kind)[0] if many else kind
        if get_origin(item) is Annotated:
            item, *parts = get_args(item)
            metadata += parts
        form = next((part for part in metadata if isinstance(part, Argument)), Argument())
        limit = next((part for part in metadata if isinstance(part, Limit)), None)
        yield _Option(name, field.description or "", form, item, many, field.default, limit)


def _shown(value: Any) -> str:
    """A value for a message, truncated."""
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = printable(text) if text.strip() else repr(value)
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"
