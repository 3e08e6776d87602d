"""``crossdraft replay SOURCE... --target CHECKPOINT...``: one drafter along the checkpoints of a target in training.

Each checkpoint is replayed on its own responses, as the formulas require, and compared with the first one on the same
prompts. A drafter that reads hidden states reads those of each checkpoint; its own weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from crossdraft import Estimate, Table, UsageError
from crossdraft.runs import LEAST_PIECES, counted, estimate_text

from ...gate import GateCheck, Sample, checked
from ...report import Report, change_text, log, percent_text, right
from .output import verifier_title

Pair = tuple[str, str, int, int]  # a drafter, verifier, number of sequences and draft length


@dataclass(frozen=True)
class Checkpoint:
    """Acceptance of one pair at one checkpoint."""

    # target, source: the checkpoint and its responses
    target: str
    source: str
    block_efficiency: Estimate
    marginal: list[float]  # Pr(tau >= i), i = 1 .. gamma
    weights: bool  # the drafter has weights of its own, which can be refreshed
    change: GateCheck | None = None  # to the first checkpoint; None for that one
    stale: bool = False  # the loss is larger than the limit and beyond its interval


def checkpoints_of(sources: Iterable[tuple[str, str]], drop: float, replayed: Callable[..., Any]) -> Report:
    """All pairs at all checkpoints.

    ``sources``: with their targets; ``replayed``: replays the responses of sources with a target.
    """
    samples: dict[Pair, list[tuple[str, str, Sample, list[float], bool]]] = {}
    notes: list[str] = []
    for source, target in sources:
        log(f"replaying {source} with {target}")
        result, sampling, assumed = replayed([source], target)
        names = tuple(result.groups.names())
        for candidate in result.candidates:
            (cls, config), gamma = candidate.drafter, candidate.gammas[-1]
            weights, share = has_weights(candidate.drafter, sampling), "has no weights"
            if cls.traits(config, sampling).hidden_layers:
                share = "reads the hidden states of each checkpoint; its own weights stay"
            elif weights:
                share = "has weights of its own, and shares nothing with the checkpoints"
            notes.append(f"{candidate.title}: {share}")
            for (verifier, k), tally in candidate.tallies.items():
                key = (candidate.title, verifier, k, gamma)
                sample = Sample(
                    target, [(t, s) for t, s in tally.sums(gamma)[:, :2].tolist()], names, maximum=1.0 + gamma
                )
                samples.setdefault(key, []).append((target, source, sample, tally.row(gamma).marginal, weights))
        notes += [f"{source}, {counted(count, 'response')}: {assumption}" for assumption, count in assumed.items()]
    pairs = {key: _compared(key, rows, drop) for key, rows in samples.items()}
    return Report(lambda: _as_text(pairs, notes, drop), lambda: _as_json(pairs, drop))


def _compared(key: Pair, rows: Sequence[tuple[str, str, Sample, list[float], bool]], drop: float) -> list[Checkpoint]:
    if empty := next((source for _, source, sample, *_ in rows if not len(sample.sums)), None):
        raise UsageError(
            f"{empty}: no step has room for a draft of {counted(key[3], 'token')}; give longer "
            "responses or a smaller --gamma"
        )
    first = rows[0][2]
    results = []
    for target, source, sample, marginal, weights in rows:
        change = checked(first, sample, drop) if sample is not first else None
        stale = False
        if change is not None and change.half is not None:
            stale = change.change.value <= -drop and change.change.value + change.half < 0
        results.append(Checkpoint(target, source, sample.block_efficiency(), marginal, weights, change, stale))
    return results


def has_weights(drafter: Any, sampling: Any) -> bool:
    """True if a drafter has weights of its own: a model, or a head on the target's hidden states."""
    cls, config = drafter
    return bool(cls.traits(config, sampling).hidden_layers or getattr(config, "model", None))


def _first_stale(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    return next((checkpoint for checkpoint in checkpoints if checkpoint.stale), None)


def _as_text(pairs: dict[Pair, list[Checkpoint]], notes: Sequence[str], drop: float) -> str:
    columns = ["drafter", "verifier", *right("gamma"), "target", "block efficiency", *right("Pr(tau >= 1)")]
    rows, lines = [], []
    for (drafter, verifier, k, gamma), checkpoints in pairs.items():
        title = verifier_title(verifier, k)
        for item in checkpoints:
            cells = [drafter, title, str(gamma), item.target, estimate_text(item.block_efficiency)]
            cells.append(f"{item.marginal[0]:.3f}" if item.marginal else "")
            rows.append([*cells, "" if item.change is None else change_text(item.change.change), _verdict(item)])
        lines.append(f"{drafter} × {title}: {_advice(checkpoints, drop)}")
    first = next(iter(pairs.values()))
    pairing = "the same prompts" if all(c.change.paired for c in first if c.change) else "independent responses"
    legend = [
        f"change: of block efficiency against {first[0].target}, by the differences of {pairing}",
        f"stale: lower by {percent_text(drop)} or more, and beyond the interval; ok: such a loss is excluded",
        *dict.fromkeys(notes),
    ]
    table = Table([*columns, "change [95 %]", "verdict"], rows).text()
    return "\n\n".join([table, "\n".join(legend), "\n".join(lines)])


def _verdict(item: Checkpoint) -> str:
    if item.change is None:
        return ""
    return "stale" if item.stale else "ok" if item.change.outcome == "pass" else "undecided"


def _advice(checkpoints: Sequence[Checkpoint], drop: float) -> str:
    stale = _first_stale(checkpoints)
    if stale is not None and not stale.weights:
        return (
            f"the texts of {stale.target} are drafted worse, and the drafter has no weights to refresh; replay other "
            "drafters there"
        )
    if stale is not None:
        return f"refresh the drafter at {stale.target}"
    unclear = [item.change for item in checkpoints if item.change is not None and _verdict(item) == "undecided"]
    if not unclear:
        return f"keep the drafter: a loss of {percent_text(drop)} is excluded at every checkpoint"
    needed = max((change.needed or LEAST_PIECES) for change in unclear)
    return f"a loss of {percent_text(drop)} is neither shown nor excluded; replay about {needed} prompts"


def _as_json(pairs: dict[Pair, list[Checkpoint]], drop: float) -> dict[str, Any]:
    rows = []
    for (drafter, verifier, k, gamma), checkpoints in pairs.items():
        stale = _first_stale(checkpoints)
        row: dict[str, Any] = {"drafter": drafter, "verifier": verifier, "k": k, "gamma": gamma}
        row["stale_at"] = None if stale is None else stale.target
        row["refresh_at"] = row["stale_at"] if stale is not None and stale.weights else None
        row["checkpoints"] = [
            {
                "target": item.target,
                "source": item.source,
                "block_efficiency": item.block_efficiency,
                "acceptance_marginal": item.marginal,
                "change": None if item.change is None else item.change.change,
                "paired": None if item.change is None else item.change.paired,
                "verdict": _verdict(item),
            }
            for item in checkpoints
        ]
        rows.append(row)
    return {"drop": drop, "pairs": rows}
