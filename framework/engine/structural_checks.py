"""Checks of shapes, dtypes, devices and traits of drafts and verdicts, without reading values.

They run no operation on the device, so the loop makes them in every step. `validation` checks the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..contracts.draft import Draft, Sequences, Verdict
from ..contracts.drafter import DraftTraits
from ..errors import ContractError, UsageError
from ..util.static_trees import problem

#: By field: axes, then dtypes.
_Table = dict[str, tuple[Any, ...]]
#: Allowed dtypes of q, and the allowed difference between the sum of a row and 1.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}
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
        raise broken(drafter, f"proposed a {type(draft).__name__}", "propose() must return a Draft")
    _check_tensors(drafter, draft, _DRAFT, {"B": sequences.batch_size, "V": vocab_size}, sequences.device)
    who, n = drafter, draft.width
    if n > traits.nodes:
        raise broken(who, f"drafted {n} nodes, more than traits.nodes = {traits.nodes}", "buffers are made for as many")
    if not 0 <= draft.probes <= n:
        raise broken(who, f"has {draft.probes} probes among {n} nodes", "probes are the last nodes of a draft")
    candidates = n - draft.probes
    if draft.resume_from is not None and not draft.is_chain:
        what = f"has resume_from and a draft '{draft.kind}'{' with probes' if draft.probes else ''}"
        raise broken(who, what, "draft.resume_from is supported for chains only")
    if draft.q is not None and draft.q.shape[1] < (candidates if draft.q_index is None else min(candidates, 1)):
        what = f"made draft.q of shape {list(draft.q.shape)}, too few rows for {candidates} nodes: a shape is off"
        raise broken(who, what, "row i is the distribution of node i, unless draft.q_index is set")
    if not candidates:
        return
    if draft.kind != traits.kind:
        advice = "the verifier was chosen by the traits, and for other drafts it would bias the output"
        raise broken(who, f"made a draft '{draft.kind}', but traits.kind is '{traits.kind}'", advice)
    if (draft.q is None) != traits.point_mass:
        has = "without" if draft.q is None else "with"
        what = f"made a draft {has} q, but traits.point_mass is {traits.point_mass}"
        raise broken(who, what, "q is the distribution that tokens were drawn from; None = point masses")
    if draft.levels is not None and not 0 <= draft.levels <= traits.depth:
        what = f"made a draft of {draft.levels} levels, deeper than traits.depth = {traits.depth}"
        raise broken(who, what, "traits.levels must be the depth of the deepest draft")
    if draft.children is not None and (reason := problem(draft.children, candidates)):
        what = f"made draft.children, which {reason}"
        raise broken(who, what, "it is the number of children of each node, level by level; None = a dynamic tree")
    if (draft.sequences is None) == draft.kind.merged_sequences:
        what = f"made a draft '{draft.kind}' {'without' if draft.sequences is None else 'with'} draft.sequences"
        raise broken(who, what, "only drafts of merged sequences have it; use Draft.iid")


def check_verdict(draft: Draft, verdict: Verdict, *, verifier: str = "the verifier") -> None:
    """Raise ContractError, naming the ``verifier``, for a verdict whose structure breaks the contract."""
    if not isinstance(verdict, Verdict):
        raise broken(verifier, f"returned a {type(verdict).__name__}", "verify() must return a Verdict")
    _check_tensors(verifier, verdict, _VERDICT, {"B": draft.batch_size}, draft.tokens.device)
    if verdict.path is None and draft.width and not draft.is_chain:
        raise broken(verifier, "verified a tree without verdict.path", "only chains may leave it None")


def broken(who: str, what: str, advice: str) -> ContractError:
    return ContractError(f"{who} {what}; {advice}")


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
            what = f"a {type(value).__name__}"
        elif value.dim() != len(expected) or any(
            isinstance(size, int) and size != actual for size, actual in zip(expected, value.shape, strict=True)
        ):
            what = f"of shape {list(value.shape)}, not [{', '.join(map(str, expected))}]: a shape is off"
        elif value.dtype not in dtypes:
            what = f"of dtype {_plain(value.dtype)}"
        elif value.device != device:
            what = f"on {value.device}"
        else:
            if axes == "B N":
                sizes["N"] = value.shape[1]
            continue
        advice = f"must be a tensor [{', '.join(axes.split())}] of {' or '.join(map(_plain, dtypes))} on {device}"
        raise broken(who, f"made {name} {what}", f"{name} {advice}")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class MutationGuard:
    """Check that a strategy does not modify ``sequences``. Host only.

    Args:
        contents: compare the tokens of the histories, not only their lengths.
    """

    def __init__(self, sequences: Sequences, contents: bool):
        self._sequences, self._contents = sequences, contents
        self._before = self._snapshot()

    def _snapshot(self) -> dict[str, list[Any]]:
        now = self._sequences
        history = [(id(tokens), len(tokens), list(tokens) if self._contents else None) for tokens in now.history]
        return {"limit": list(now.limit), "stream": list(now.stream), "history": history}

    def check(self, who: str) -> None:
        """Raise ContractError, naming the strategy ``who``, if anything changed."""
        for name, now in self._snapshot().items():
            if (before := self._before[name]) != now:
                values = "" if name == "history" else f" from {before} to {now}"
                advice = "sequences are read-only: copy what you want to change"
                raise broken(who, f"changed sequences.{name}{values}", advice)


def check_prompt(name: str, prompt: Sequence[int], context_length: int | None) -> None:
    """Raise UsageError for a prompt that is empty or fills the target's context."""
    if not len(prompt):
        raise UsageError(f"{name} is empty; a prompt needs at least one token")
    if context_length is not None and len(prompt) >= context_length:
        raise UsageError(
            f"{name} has {len(prompt)} tokens, but the target's context is {context_length} tokens; "
            "shorten the prompt or use a target with a longer context"
        )
