"""Draft models that engines cannot load."""

from __future__ import annotations

from crossdraft.framework import plugins
from crossdraft.framework.util.input_files import kind_of


def not_servable(name: str) -> str:
    """The reason why engines cannot load a draft model: a directory without its embedding; empty if they can."""
    from crossdraft.framework.models.resolve import resolve
    from crossdraft.framework.models.shared_embedding import shared_embedding_of

    if not name or (name not in plugins.entries("models") and kind_of(name) != "directory"):
        return ""  # a Hub id or a path on the machine of the engine
    if (shared := shared_embedding_of(resolve(name).path)) is None:
        return ""
    return (
        f"the directory of {name} lacks the token embedding, which it shares with {shared['model']}, so engines cannot "
        f"load it; run crossdraft train export draft-model {name} --target {shared['model']} --out DIR, and add "
        "--draft-path DIR"
    )
