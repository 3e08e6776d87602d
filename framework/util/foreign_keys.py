"""Tables of the keys of a foreign mapping: a published config, or the settings of another library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Key(NamedTuple):
    """Treatment of a config key.

    Attributes:
        effect: "read"; "none"; "refused"; or "ignored", which is remarked.
        reason: of the latter three.
        neutral: values that request nothing; so does None.
    """

    effect: Literal["read", "none", "refused", "ignored"]
    reason: str = ""
    neutral: tuple[Any, ...] = ()


Keys = Mapping[str, "Key | Keys"]


def read_keys(*names: str) -> dict[str, Key]:
    """Keys that are read."""
    return dict.fromkeys(names, Key("read"))


def unused_keys(reason: str, *names: str) -> dict[str, Key]:
    """Keys without effect."""
    return dict.fromkeys(names, Key("none", reason))


def refused_keys(reason: str, **neutral: tuple[Any, ...]) -> dict[str, Key]:
    """Keys that are refused unless their value is neutral."""
    return {name: Key("refused", reason, values) for name, values in neutral.items()}


def ignored_keys(reason: str, **neutral: tuple[Any, ...]) -> dict[str, Key]:
    return {name: Key("ignored", reason, values) for name, values in neutral.items()}
