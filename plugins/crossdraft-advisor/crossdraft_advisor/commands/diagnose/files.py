"""``crossdraft diagnose --files``: engines that would misread heads, without running a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossdraft.framework.api.build import Configured
from crossdraft.framework.contracts.models import TRANSFORMERS, Checkpoint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import UsageError, quoted
from crossdraft.framework.models.checkpoint import load_checkpoint
from crossdraft.framework.models.shared_embedding import shared_embedding_of
from crossdraft.framework.util.input_files import read_json
from crossdraft.framework.util.limits import CONFIG_BYTES
from crossdraft.framework.util.table import Alignment, Table

from ...diagnosis.engine_keys import Reading, engine_keys, further_keys, readings, value_of


def target_facts(heads: Checkpoint, target: str, digest: str) -> list[str]:
    """Findings from files: a missing embedding, a target other than the one that the heads were trained for."""
    shared = shared_embedding_of(heads.path)
    if shared is not None:
        return [
            f"{heads.name} does not contain its embedding, which is that of {shared['model']}: engines load it after "
            "crossdraft train export",
            *_training_facts(heads, target, digest),
        ]
    return _training_facts(heads, target, digest)


def _training_facts(heads: Checkpoint, target: str, digest: str) -> list[str]:
    path = heads.path / "training.json"
    training = read_json(path, CONFIG_BYTES) if path.is_file() else {}
    theirs = training.get("target_sha256") if isinstance(training, dict) else None
    if not isinstance(theirs, str) or not theirs:
        return ["the heads do not record the target checkpoint that they were trained for"]
    if theirs == digest:
        return []
    other, own = ("+".join(part[:12] for part in sha256.split("+")) for sha256 in (theirs, digest))
    return [
        f"the heads were trained for a target with SHA-256 {quoted(other)}, but {target} has {quoted(own)}; use the "
        "target that they were trained for"
    ]


def files_of(drafter: Configured, target: str, as_json: bool) -> str:
    """The keys of a head that change what it computes, as engines read them, as text or JSON.

    A draft model has no such keys: of its files, the tokenizer and the facts about its training are compared.

    Raises:
        UsageError: a drafter without heads, or one that the table does not have.
    """
    from crossdraft.framework.models.configs import read_config
    from crossdraft.framework.models.digests import model_sha256
    from crossdraft.framework.models.load import same_tokenizer
    from crossdraft.framework.models.resolve import resolve
    from crossdraft.framework.models.tokenizer import load_tokenizer

    name, table = drafter[0].name, engine_keys()
    model = getattr(drafter[1], "model", None)
    own_model = not drafter[0].traits(drafter[1], Sampling()).hidden_layers
    if not isinstance(model, str) or not (own_model or name in table.keys):
        raise UsageError(
            f"--files: no facts about how engines read heads of '{name}' (known: {', '.join(table.keys)}); compare "
            "counters with a replay instead (--replay, --counters)"
        )
    heads = load_checkpoint(model)
    resolved = resolve(target)
    facts = target_facts(heads, target, model_sha256(resolved))
    if own_model:
        tokenizers = [load_tokenizer(name).tokenizer for name in (model, target)]
        facts.append(same_tokenizer(*tokenizers) or "the tokenizers of draft model and target are equal")
        if as_json:
            return json.dumps({"facts": facts, "absent": [], "keys": [], "further_keys": {}})
        line = f"Engines load the model of '{name}' as any other one: it has no keys of heads that they could misread."
        return "\n".join([*(f"Note: {fact}." for fact in facts), line])
    config = read_config(Path(resolved.path)) if resolved.backend == TRANSFORMERS else {}
    depth = (config.get("text_config") or config).get("num_hidden_layers", 0)
    treatments = list(readings(heads, name, depth))
    absent = [
        f"{engine} {release.version} does not load heads of {name} ({release.where})"
        for engine, release in table.absent.items()
        if name in release.drafters
    ]
    others = dict(further_keys(heads.config, name))
    if as_json:
        keys = [_json(reading) for reading in treatments]
        return json.dumps({"facts": facts, "absent": absent, "keys": keys, "further_keys": others}, default=str)
    if others:
        shown = ", ".join(f"{key} {json.dumps(value, default=str)[:60]}" for key, value in others.items())
        facts.append(f"further keys that change what the head computes, without facts about engines: {shown}")
    return "\n\n".join([_table(heads, name, treatments), _conclusion(treatments, facts, absent)])


def _json(reading: Reading) -> dict[str, Any]:
    return {
        "key": reading.key,
        "engine": reading.engine,
        "value": reading.value,
        "used": reading.used,
        "misread": reading.misread,
        "ignored_at": reading.ignored_at,
        "origin": reading.origin,
    }


def _table(heads: Checkpoint, name: str, treatments: Sequence[Reading]) -> str:
    engines = [engine for engine, sources in engine_keys().sources.items() if name in sources]
    columns: dict[str, Alignment] = dict.fromkeys(("key", "in the head", *engines), "left")
    by_key = {(reading.key, reading.engine): reading for reading in treatments}
    rows = []
    for key, facts in engine_keys().keys[name].items():
        value, own = (value_of(heads, key, neutral) for neutral in (facts.neutral, None))
        shown = json.dumps(value) if own is not None else f"absent ({json.dumps(value)})"
        readings = (by_key.get((key, engine)) for engine in engines)
        rows.append([key, shown[:24], *(_cell(reading) for reading in readings)])
    return Table(columns, rows).text()


def _cell(reading: Reading | None) -> str:
    if reading is None:
        return "unknown"
    return f"USES {json.dumps(reading.used)}" if reading.misread else "right"


def _conclusion(treatments: Sequence[Reading], facts: Sequence[str], absent: Sequence[str]) -> str:
    lines = [f"Note: {fact}." for fact in (*facts, *absent)]
    lines += [
        f"{reading.engine} would misread {reading.key}: {json.dumps(reading.used)} for {json.dumps(reading.value)} "
        f"({reading.origin})."
        for reading in treatments
        if reading.misread
    ]
    lines += [
        f"{reading.engine} at commit {reading.ignored_at} did not read {reading.key}; later ones do ({reading.origin})."
        for reading in treatments
        if reading.ignored_at
    ]
    if not any(reading.misread for reading in treatments):
        lines.append("No engine of the table would misread this head.")
    lines.append("Engines change: check the named place in your version. Corrections: engine_keys.yaml.")
    return "\n".join(lines)
