"""Checks of every step, on the host: the structure of drafts and verdicts, then the outcome of each row.

Structure is shapes, dtypes, devices and traits, without reading values. The outcome is what the one copy of a step
brings, see `step.to_host`. `validation` checks all values, in some steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..contracts.draft import Draft, Sequences, Verdict
from ..contracts.drafter import DraftTraits
from ..errors import ContractError, NumericalError, UsageError
from ..util.static_trees import problem
from .sequence import RowOutcome

#: By field: axes, then dtypes.
_Table = dict[str, tuple[Any, ...]]
#: Allowed dtypes of q, and the allowed difference between the sum of a row and 1.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
#: Error message for a q with NaN, and its advice.
NOT_FINITE = "reported a q that is NaN or infinite"
FINITE_Q = "every row of q must be finite, padding too, because verifiers multiply it by 0"
#: Axes and dtypes of the tensors of a draft and of a verdict.
_DRAFT: _Table = {
    "tokens": ("B N", torch.int64),
    "parents": ("B N", torch.int64),
    "valid": ("B N", torch.bool),
    "finite": ("B", torch.bool),
    "q": ("B M V", *TOLERANCE),
    "q_index": ("B N", torch.int64),
    "sequences": ("B K L", torch.int64),
}
_VERDICT: _Table = {
    "length": ("B", torch.int64),
    "token": ("B", torch.int64),
    "path": ("B D", torch.int64),
    "survival": ("B D", *TOLERANCE),
}


def check_draft(
    draft: Draft, traits: DraftTraits, sequences: Sequences, vocab_size: int, *, drafter: str = "the drafter"
) -> None:
    """Raise ContractError, naming the ``drafter``, for a draft whose structure breaks the contract."""
    if not isinstance(draft, Draft):
        raise contract_error(drafter, f"proposed a {type(draft).__name__}", "propose() must return a Draft")
    _check_tensors(drafter, draft, _DRAFT, {"B": len(sequences.history), "V": vocab_size}, sequences.device)
    who, n = drafter, draft.width
    if n > traits.nodes:
        raise contract_error(
            who,
            f"drafted {n} nodes, more than traits.nodes = {traits.nodes}",
            "buffers have traits.nodes slots; raise traits.nodes",
        )
    if traits.on_host and n and draft.lists is None:
        raise contract_error(who, "drafted on the device", "make drafts by Draft.copied, or omit traits.on_host")
    if not 0 <= draft.probes <= n:
        raise contract_error(who, f"has {draft.probes} probes among {n} nodes", "probes are the last nodes of a draft")
    candidates = n - draft.probes
    if draft.resume_from is not None and not draft.is_chain:
        fault = f"has resume_from and a draft '{draft.kind}'{' with probes' if draft.probes else ''}"
        raise contract_error(who, fault, "draft.resume_from is supported for chains only")
    if draft.q is not None and draft.q.shape[1] < (candidates if draft.q_index is None else min(candidates, 1)):
        fault = f"made draft.q of shape {list(draft.q.shape)}, too few rows for {candidates} nodes: a shape is off"
        raise contract_error(who, fault, "row i is the distribution of node i, unless draft.q_index is set")
    if not candidates:
        return
    if draft.kind != traits.kind:
        advice = "the verifier was chosen by the traits, and for other drafts it would bias the output"
        raise contract_error(who, f"made a draft '{draft.kind}', but traits.kind is '{traits.kind}'", advice)
    if (draft.q is None) != traits.point_mass:
        has = "without" if draft.q is None else "with"
        fault = f"made a draft {has} q, but traits.point_mass is {traits.point_mass}"
        raise contract_error(who, fault, "q is the distribution that tokens were drawn from; None = point masses")
    if draft.levels is not None and not 0 <= draft.levels <= traits.depth:
        fault = f"made a draft of {draft.levels} levels, deeper than traits.depth = {traits.depth}"
        raise contract_error(who, fault, "traits.levels must be the depth of the deepest draft")
    if draft.children is not None and (reason := problem(draft.children, candidates)):
        fault = f"made draft.children, which {reason}"
        advice = "it is the number of children of each node, level by level; None = a dynamic tree"
        raise contract_error(who, fault, advice)
    if (draft.sequences is None) == draft.kind.merged_sequences:
        fault = f"made a draft '{draft.kind}' {'without' if draft.sequences is None else 'with'} draft.sequences"
        raise contract_error(who, fault, "only drafts of merged sequences have it; use Draft.iid")


def check_verdict(draft: Draft, verdict: Verdict, *, verifier: str = "the verifier") -> None:
    """Raise ContractError, naming the ``verifier``, for a verdict whose structure breaks the contract."""
    if not isinstance(verdict, Verdict):
        raise contract_error(verifier, f"returned a {type(verdict).__name__}", "verify() must return a Verdict")
    _check_tensors(verifier, verdict, _VERDICT, {"B": len(draft.tokens)}, draft.tokens.device)
    if verdict.path is None and draft.width and not draft.is_chain:
        raise contract_error(verifier, "verified a tree without verdict.path", "only chains may leave it None")


def check_rows(
    rows: Sequence[RowOutcome],
    places: Mapping[int, str],
    limits: Sequence[int],
    vocab_size: int,
    *,
    drafter: str,
    verifier: str,
    on_error: str,
) -> dict[int, str]:
    """Return an error message per row with invalid numbers, of those in ``places``.

    Args:
        places: sequence and position of each occupied slot, for messages.
        limits: ``sequences.limit``.
        on_error: see `Decoder.run`.

    Raises:
        NumericalError: a row has invalid numbers, and ``on_error`` is "raise".
        ContractError: an invalid count or token in another row.
    """
    failed = {}
    for index, place in places.items():
        row = rows[index]
        if not row.target_finite or not row.drafter_finite:
            who = drafter if row.target_finite else "the target"
            advice = "try dtype float32, another attention implementation, or check the weights"
            failed[index] = f"{who} produced NaN or infinite logits for {place}; {advice}"
        elif not math.isfinite(row.q):
            failed[index] = f"{drafter} {NOT_FINITE} for {place}; {FINITE_Q}"
    if failed and on_error == "raise":
        raise NumericalError(next(iter(failed.values())))
    for index, place in places.items():
        row, limit = rows[index], limits[index]
        if index in failed:
            continue
        deepest = min(row.depth, len(row.tokens) - 1)
        emitted = row.tokens[: max(row.tau, 0) + 1]
        who, advice = verifier, "see the docstring of Verdict"
        if not row.resume_matches:
            who, fault = drafter, "drafted other tokens than it fed to a fork"
            advice = "draft.resume_from must be a fork that was fed the root and then the draft's tokens, in order"
        elif row.depth > limit:
            who, fault = drafter, too_deep(row.depth, limit)
            advice = "propose() must not exceed the limit of each row"
        elif not 0 <= row.tau <= deepest:
            fault = accepted_too_many(row.tau, deepest)
        elif min(emitted) < 0 or max(emitted) >= vocab_size:
            fault = emitted_outside(next(token for token in emitted if not 0 <= token < vocab_size), vocab_size)
        elif not -1 < row.survival < row.depth + 2:
            fault = f"reported a survival that sums to {row.survival:.6g}"
        else:
            continue
        raise contract_error(who, f"{fault} in slot {index} ({place})", advice)
    return failed


def too_deep(depth: int, limit: int) -> str:
    return f"drafted {depth} tokens deep, but sequences.limit allows {limit},"


def emitted_outside(token: int, vocab_size: int) -> str:
    return f"emitted the token {token}, outside of the vocabulary of {vocab_size},"


def accepted_too_many(tau: int, depth: int) -> str:
    return f"accepted {tau} tokens of a draft that is {depth} deep"


def contract_error(who: str, fault: str, advice: str) -> ContractError:
    return ContractError(f"{who} {fault}; {advice}")


def _check_tensors(
    who: str, owner: Draft | Verdict, table: _Table, sizes: dict[str, int], device: torch.device
) -> None:
    """Raise ContractError unless the fields of ``owner`` are tensors as in ``table``; optional ones may be None."""
    prefix = "draft" if isinstance(owner, Draft) else "verdict"
    for field, (axes, *dtypes) in table.items():
        value, name = getattr(owner, field), f"{prefix}.{field}"
        if value is None and hasattr(type(owner), field):  # the default
            continue
        expected = [sizes.get(axis, axis) for axis in axes.split()]
        if not isinstance(value, Tensor):
            fault = f"a {type(value).__name__}"
        elif value.dim() != len(expected) or any(
            isinstance(size, int) and size != actual for size, actual in zip(expected, value.shape, strict=True)
        ):
            fault = f"of shape {list(value.shape)}, not [{', '.join(map(str, expected))}]: a shape is off"
        elif value.dtype not in dtypes:
            fault = f"of dtype {_plain(value.dtype)}"
        elif value.device != device:
            fault = f"on {value.device}"
        else:
            if axes == "B N":
                sizes["N"] = value.shape[1]
            continue
        advice = f"must be a tensor [{', '.join(axes.split())}] of {' or '.join(map(_plain, dtypes))} on {device}"
        raise contract_error(who, f"made {name} {fault}", f"{name} {advice}")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def snapshot(sequences: Sequences, contents: bool) -> dict[str, Any]:
    """State of ``sequences`` for `check_unchanged`; with ``contents``, tokens are compared, not only their number."""
    history = [(id(tokens), len(tokens), list(tokens) if contents else None) for tokens in sequences.history]
    return {"limit": list(sequences.limit), "stream": list(sequences.stream), "history": history}


def check_unchanged(sequences: Sequences, before: Mapping[str, Any], who: str, contents: bool) -> None:
    """Raise ContractError, naming the strategy ``who``, if ``sequences`` differ from the `snapshot` ``before``."""
    for name, now in snapshot(sequences, contents).items():
        if before[name] != now:
            values = "" if name == "history" else f" from {before[name]} to {now}"
            advice = "sequences are read-only: copy what you want to change"
            raise contract_error(who, f"changed sequences.{name}{values}", advice)


def check_prompt(name: str, prompt: Sequence[int], context_length: int | None) -> None:
    """Raise UsageError for a prompt that is empty or fills the target's context."""
    if not len(prompt):
        raise UsageError(f"{name} is empty; a prompt needs at least one token")
    if context_length is not None and len(prompt) >= context_length:
        raise UsageError(
            f"{name} has {len(prompt)} tokens, but the target's context is {context_length} tokens; "
            "shorten the prompt or use a target with a longer context"
        )
