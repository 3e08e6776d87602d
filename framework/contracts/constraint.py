"""Constraints on the text of a response, and the protocol of the grammars that implement them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field, ValidationError, model_validator

from ..errors import UsageError, quoted
from ..util.input_files import nested_too_deeply, parse_json
from ..util.limits import CONSTRAINT_BYTES, MOST_CHOICES, MOST_NESTING
from .options import Options, fault

if TYPE_CHECKING:  # this module validates recipes, and importing numpy takes time
    import numpy as np

KINDS = ("json_schema", "regex", "grammar", "choice")


class Constraint(Options):
    """The language of a response; one of its forms is given.

    ``json_schema`` permits one JSON text without optional whitespace: ``", "`` between items, ``": "`` after keys. A
    schema may be given as a mapping or as JSON; ``True`` permits every JSON value.
    """

    json_schema: dict[str, Any] | Literal[True] | str | None = Field(default=None, description="a JSON schema")
    regex: str | None = Field(default=None, description="a regular expression that matches the whole response")
    grammar: str | None = Field(default=None, description="a context-free grammar in the syntax of Lark")
    choice: tuple[str, ...] | None = Field(default=None, description="a list of texts, one of which is the response")
    mask_drafts: bool = Field(default=True, description="mask the logits of draft models too")

    @model_validator(mode="after")
    def _one_form(self) -> Constraint:
        if sum(getattr(self, kind) is not None for kind in KINDS) != 1:
            raise ValueError(f"needs exactly one of {', '.join(KINDS)}")
        language = getattr(self, self.kind)
        if self.choice is not None:
            if not self.choice or "" in self.choice:
                raise ValueError("choice must be a list of texts, none of them empty")
            if reason := MOST_CHOICES.violation(self.choice):
                raise ValueError(f"choice has {len(self.choice)} texts; {reason}")
        if isinstance(self.json_schema, str):
            try:
                language = parse_json(self.json_schema, "json_schema", nan=False)
            except UsageError as error:
                raise ValueError(str(error)) from None
            if not isinstance(language, dict) and language is not True:
                raise ValueError("json_schema must be a JSON object, or true")
        if isinstance(language, dict) and nested_too_deeply(language):
            raise ValueError(f"json_schema is nested more than {int(MOST_NESTING)} deep; use $defs and $ref")
        try:
            size = len(json.dumps(language, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"json_schema is not JSON: {error}") from None
        if reason := CONSTRAINT_BYTES.violation(size):
            raise ValueError(f"{self.kind} has {size} bytes; {reason}")
        return self

    def __str__(self) -> str:
        """Title in tables: form and language, shortened, or the title of a schema."""
        language = getattr(self, self.kind)
        title = language.get("title") if isinstance(language, dict) else None
        masks = "" if self.mask_drafts else ", drafts not masked"
        return f"{self.kind} {title if isinstance(title, str) else quoted(language, 40)}{masks}"

    def __hash__(self) -> int:  # schemas are dicts, which pydantic cannot hash
        return hash(self.key)

    @property
    def kind(self) -> str:
        """Name of the form that is given."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def key(self) -> str:
        """Equal for equal constraints."""
        return json.dumps(self.model_dump(), sort_keys=True)


def checked_constraint(value: Any, name: str = "constraint") -> Constraint | None:
    """Validate a constraint, None, or a mapping of the fields of `Constraint`."""
    if value is None or isinstance(value, Constraint):
        return value
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{name}={quoted(value)} is not a constraint; give a mapping such as {{'regex': '[0-9]+'}}, with "
            "json_schema, regex, grammar or choice"
        )
    try:
        return Constraint(**value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([name, *map(str, first["loc"])])
        nearest = get_close_matches("".join(map(str, first["loc"])), Constraint.model_fields, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest and first["type"] == "extra_forbidden" else ""
        raise UsageError(f"{key}: {fault(first)}{hint}") from None


class Matcher(Protocol):
    """The state of a grammar after a sequence of tokens."""

    @property
    def failure(self) -> str | None:
        """The reason why the state cannot be computed, such as a limit of a library; no token is permitted then."""
        ...

    @property
    def accepting(self) -> bool:
        """True if the response may end."""
        ...

    def advance(self, token: int) -> bool:
        """Append a token; False, and no change, if the grammar does not permit it. Never an end-of-sequence token."""
        ...

    def rollback(self, count: int) -> None:
        """Remove the last ``count`` tokens."""
        ...

    def permitted(self) -> np.ndarray:
        """``[V]`` bool, True for tokens permitted next; its values at end-of-sequence tokens are ignored."""
        ...

    def implied(self, limit: int) -> list[int]:
        """At most ``limit`` tokens that the grammar leaves no choice about, from the current state on."""
        ...


class Grammar(Protocol):
    """A compiled constraint.

    Attributes:
        mask_drafts: True if draft models are masked too.
    """

    mask_drafts: bool

    def matcher(self) -> Matcher:
        """A matcher of an empty text."""
        ...


class RowConstraints(Protocol):
    """The constraints of a decoder's slots, as drafters read them."""

    def grammar(self, row: int) -> Grammar | None:
        """The grammar of the sequence in slot ``row``; None without a constraint."""
        ...

    def eos(self, row: int) -> Sequence[int]:
        """End-of-sequence ids of a constrained sequence."""
        ...

    def implied(self, row: int, limit: int) -> list[int]:
        """At most ``limit`` tokens that the grammar leaves no choice about after the committed tokens."""
        ...


def permitted_next(matcher: Matcher, eos: Sequence[int]) -> np.ndarray:
    """``[V]`` bool, tokens permitted next; those in ``eos`` only if the grammar accepts."""
    permitted = matcher.permitted().copy()
    permitted[list(eos)] = matcher.accepting
    return permitted


def walk(
    matcher: Matcher, eos: Sequence[int], tokens: Sequence[int], parents: Sequence[int], valid: Sequence[int]
) -> Iterator[int]:
    """Yield the root (-1) and each node that the grammar permits, depth first, with ``matcher`` at its state.

    Nodes below one that is not permitted, not valid, or in ``eos`` are skipped. The matcher returns to its state.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if valid[node]:
            children.setdefault(parent, []).append(node)
    yield -1
    path, stack = [-1], children.get(-1, [])[::-1]
    while stack:
        node = stack.pop()
        surplus = len(path) - 1 - path.index(parents[node])
        matcher.rollback(surplus)
        del path[len(path) - surplus :]
        if tokens[node] in eos or not matcher.advance(tokens[node]):
            continue
        path.append(node)
        yield node
        stack += children.get(node, [])[::-1]
    matcher.rollback(len(path) - 1)
