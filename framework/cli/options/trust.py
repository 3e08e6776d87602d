"""Consent to foreign code: ``--trust-remote-code MODEL`` and ``--allow-program PROGRAM``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import Field

from ...contracts.command import Argument
from ...contracts.options import Options
from ...errors import UsageError, quoted


class TrustOptions(Options):
    """``--trust-remote-code``; an option of a command that inherits from this."""

    trust_remote_code: Annotated[tuple[str, ...], Argument("MODEL")] = Field(
        (), description="allow this model to run Python code from its directory; read the code first (repeatable)"
    )

    def trusted(self, models: Iterable[Any], drafters: Iterable[str] = ()) -> frozenset[str]:
        """The models that may run their own code.

        Args:
            models: those of the command; None items are skipped.
            drafters: names or mappings, whose models are added.

        Raises:
            UsageError: another model; a drafter that is not a name or a mapping.
        """
        if not self.trust_remote_code:
            return frozenset()
        from ...recipe.recipe import Strategy

        options = [Strategy.parse(text, "--drafter").config for text in drafters]
        known = sorted({name for name in (*models, *strings_in(options)) if isinstance(name, str)})
        for name in self.trust_remote_code:
            if name not in known:
                raise UsageError(
                    f"--trust-remote-code {quoted(name)} is not a model of this command; its models: "
                    f"{', '.join(map(quoted, known)) or 'none'}"
                )
        return frozenset(self.trust_remote_code)


class ProgramOptions(Options):
    """``--allow-program``; an option of a command that inherits from this."""

    allow_program: Annotated[tuple[str, ...], Argument("PROGRAM")] = Field(
        (),
        description="allow the recipe to start this program of an engine, with its arguments and environment "
        "(repeatable)",
    )


def strings_in(options: Any) -> Iterator[str]:
    """All strings in a drafter's options, any of which may be a model."""
    if isinstance(options, str):
        yield options
    elif isinstance(options, dict | list):
        for value in options.values() if isinstance(options, dict) else options:
            yield from strings_in(value)
