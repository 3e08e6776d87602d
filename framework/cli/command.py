"""Commands of the command line: dataclasses whose fields are the options.

::

    @dataclass(frozen=True, kw_only=True)
    class CountTokens(Command):
        name = "count-tokens"

        prompts: Annotated[str, Argument("prompt set", metavar="PROMPTS", positional=True)]
        limit: Annotated[int, Ge(1), Argument("number of prompts", metavar="N")] = 16

        def run(self) -> int:
            ...
            return 0

The parser, the checks and their messages follow from the fields: a ``bool`` is a flag, a tuple a repeatable option,
``Literal`` a choice, and bounds are those of ``annotated_types``, which pydantic checks before `Command.run`; it is
not imported for ``--help``. Options that depend on each other are checked in ``__post_init__``, which raises
UsageError.
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from ..errors import UsageError, printable
from ..util.limits import Limit

#: Characters of a list, and of a value in a message.
_LONGEST, _QUOTED = 10_000, 60


@dataclass(frozen=True)
class Argument:
    """Description of one option, in the annotation of its field.

    Attributes:
        help: text for ``--help``; the default is appended unless the text has one in parentheses at its end.
        metavar: name of the value in ``--help``.
        positional: True for an argument without ``--name``.
        short: a short form, e.g. ``"-v"``.
        group: heading in ``--help``.
        exclusive: name of a set of options of which one may be given.
        commas: True if the items of a tuple are separated by commas.
    """

    help: str
    metavar: str = ""
    positional: bool = False
    short: str = ""
    group: str = ""
    exclusive: str = ""
    commas: bool = False


@dataclass(frozen=True)
class _Option:
    """Field of a command: its name, description, type and the rest of its annotation."""

    name: str
    argument: Argument
    item: Any
    many: bool
    default: Any
    limit: Limit | None

    @property
    def label(self) -> str:
        """Name in messages: ``--max-prompt``, or the metavar of a positional argument."""
        if self.argument.positional:
            return self.argument.metavar or self.name.upper()
        return f"--{self.name.replace('_', '-')}"

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of ``add_argument``; the value stays text, which `Command.parsed` converts."""
        argument, required = self.argument, self.default is MISSING
        words, default = argument.help, self.default
        if default not in (None, MISSING, False, (), "") and not words.endswith(")"):
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            words += f" (default: {shown})"
        settings: dict[str, Any] = {"help": words.replace("%", "%%"), "default": argparse.SUPPRESS}
        if self.item is bool:
            return settings | {"action": "store_true"}
        if get_origin(self.item) is Literal:
            settings["choices"] = get_args(self.item)
        if argument.metavar:
            settings["metavar"] = argument.metavar
        if argument.positional:
            if self.many or not required:
                settings["nargs"] = "?" if not self.many else "+" if required else "*"
            return settings
        if self.many and not argument.commas:
            settings["action"] = "append"
        return settings | {"required": required}

    def convert(self, text: Any) -> Any:
        """Values of a list, from its text."""
        if not (self.many and self.argument.commas):
            return text
        if len(text) > _LONGEST:
            raise UsageError(f"{self.label} has {len(text)} characters; the maximum is {_LONGEST}")
        return [part.strip() for part in text.split(",")]

    def check(self, value: Any) -> None:
        """Raise UsageError if a number exceeds the limit in the annotation."""
        for number in value if isinstance(value, tuple) else (value,):
            if self.limit is not None and number is not None and (reason := self.limit.refusal(number)):
                raise UsageError(f"{self.label} {_shown(number)} is too large; {reason}")


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """A command of ``crossdraft``, registered through ``crossdraft_register_commands``.

    A subclass is a frozen, keyword-only dataclass whose fields are annotated with `Argument`.

    Attributes:
        debug: True if tracebacks of errors are printed.

    Raises:
        UsageError: options that cannot be combined (from ``__post_init__``).
    """

    #: The registered name.
    name: ClassVar[str]
    #: False if the command never loads PyTorch.
    loads_models: ClassVar[bool] = True
    __pydantic_config__: ClassVar[Any] = {"allow_inf_nan": False}

    debug: Annotated[bool, Argument("show tracebacks of errors")] = False

    @abstractmethod
    def run(self) -> int:
        """Return the exit code. A CrossdraftError is printed as one line, with its own exit code."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser, the inherited ones last."""
        groups: dict[str, Any] = {"": parser}
        exclusive: dict[str, Any] = {}
        for option in sorted(cls.options(), key=lambda option: option.name == "debug"):
            argument = option.argument
            into = groups.setdefault(argument.group, None) or parser.add_argument_group(argument.group)
            groups[argument.group] = into
            if argument.exclusive:
                into = exclusive.setdefault(argument.exclusive, None) or into.add_mutually_exclusive_group()
                exclusive[argument.exclusive] = into
            if argument.positional:
                into.add_argument(option.name, **option.settings())
            else:
                names = [argument.short] * bool(argument.short) + [option.label]
                into.add_argument(*names, dest=option.name, **option.settings())

    @classmethod
    def main(cls, args: argparse.Namespace) -> int:
        """Run the command with parsed arguments and return its exit code."""
        return cls.parsed(vars(args)).run()

    @classmethod
    def parsed(cls, values: dict[str, Any]) -> Self:
        """The command with the options in ``values``, as text.

        Raises UsageError, which names the option and its value, if one is not valid.
        """
        options = {option.name: option for option in cls.options()}
        values = {name: option.convert(values[name]) for name, option in options.items() if name in values}
        if all(options[name].item in (str, bool) and not options[name].many for name in values):
            return cls(**values)  # nothing to convert: `crossdraft list` starts without pydantic
        from pydantic import TypeAdapter, ValidationError

        from ..contracts.options import fault

        try:
            command = TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            problem = error.errors()[0]
            option = options[str(problem["loc"][0])]
            raise UsageError(f"{option.label} {_shown(problem['input'])}: {fault(problem)}") from None
        for name, option in options.items():
            option.check(getattr(command, name))
        return command

    @classmethod
    def options(cls) -> Iterator[Any]:
        """The fields that are options."""
        hints = get_type_hints(cls, include_extras=True)
        for entry in fields(cls):
            annotation, metadata = hints[entry.name], ()
            while get_origin(annotation) is Annotated:
                annotation, *rest = get_args(annotation)
                metadata += tuple(rest)
            argument = next((item for item in metadata if isinstance(item, Argument)), None)
            if argument is None:
                continue
            if get_origin(annotation) in (Union, UnionType):
                annotation = next(kind for kind in get_args(annotation) if kind is not NoneType)
            many = get_origin(annotation) is tuple
            item = get_args(annotation)[0] if many else annotation
            limits = [part for part in metadata if isinstance(part, Limit)]
            if get_origin(item) is Annotated:
                item, *rest = get_args(item)
                limits += [part for part in rest if isinstance(part, Limit)]
            yield _Option(entry.name, argument, item, many, entry.default, limits[0] if limits else None)


def _shown(value: Any) -> str:
    """A value for a message, truncated."""
    text = printable(str(value)) if str(value).strip() else repr(value)
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"
