"""Checks of shapes, dtypes, devices and traits of drafts and verdicts, without reading values.

They run no operation on the device, so the loop makes them in every step. `validation` checks the values.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..contracts.draft import Draft, Sequences, Verdict
from ..contracts.drafter import DraftTraits
from ..errors import ContractError, UsageError
from ..util.static_trees import problem

#: Allowed dtypes of q, and the allowed difference between the sum of a row and 1.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}


def check_draft(
    draft: Draft, traits: DraftTraits, sequences: Sequences, vocab_size: int, *, drafter: str = "the drafter"
) -> None:
    """Raise ContractError, naming the ``drafter``, for a draft whose structure breaks the contract."""
    if not isinstance(draft, Draft):
        raise broken(drafter, f"proposed a {type(draft).__name__}", "propose() must return a Draft")
    who, like, b = drafter, sequences, sequences.batch_size
    if isinstance(draft.tokens, Tensor) and draft.tokens.dim() == 2 and len(draft.tokens) != b:
        raise broken(who, f"drafted {len(draft.tokens)} rows for {b} slots", "a draft must have a row for every slot")
    n = _check_tensor(who, "draft.tokens", draft.tokens, "B N", (b, None), (torch.long,), like).shape[1]
    _check_tensor(who, "draft.parents", draft.parents, "B N", (b, n), (torch.long,), like)
    _check_tensor(who, "draft.valid", draft.valid, "B N", (b, n), (torch.bool,), like)
    if draft.finite is not None:
        _check_tensor(who, "draft.finite", draft.finite, "B", (b,), (torch.bool,), like)
    if n > traits.nodes:
        raise broken(who, f"drafted {n} nodes, more than traits.nodes = {traits.nodes}", "buffers are made for as many")
    if not 0 <= draft.probes <= n:
        raise broken(who, f"has {draft.probes} probes among {n} nodes", "probes are the last nodes of a draft")
    candidates = n - draft.probes
    if draft.resume_from is not None and not draft.is_chain:
        what = f"has resume_from and a draft '{draft.kind}'{' with probes' if draft.probes else ''}"
        raise broken(who, what, "draft.resume_from is supported for chains only")
    if draft.q is not None:
        m = _check_tensor(who, "draft.q", draft.q, "B M V", (b, None, vocab_size), tuple(TOLERANCE), like).shape[1]
        if draft.q_index is not None:
            _check_tensor(who, "draft.q_index", draft.q_index, "B N", (b, n), (torch.long,), like)
        if m < (candidates if draft.q_index is None else min(candidates, 1)):
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
    if draft.sequences is not None:
        _check_tensor(who, "draft.sequences", draft.sequences, "B K L", (b, None, None), (torch.long,), like)


def check_verdict(draft: Draft, verdict: Verdict, *, verifier: str = "the verifier") -> None:
    """Raise ContractError, naming the ``verifier``, for a verdict whose structure breaks the contract."""
    if not isinstance(verdict, Verdict):
        raise broken(verifier, f"returned a {type(verdict).__name__}", "verify() must return a Verdict")
    b, like = draft.batch_size, draft.tokens
    _check_tensor(verifier, "verdict.length", verdict.length, "B", (b,), (torch.long,), like)
    _check_tensor(verifier, "verdict.token", verdict.token, "B", (b,), (torch.long,), like)
    if verdict.path is not None:
        _check_tensor(verifier, "verdict.path", verdict.path, "B D", (b, None), (torch.long,), like)
    elif draft.width and not draft.is_chain:
        raise broken(verifier, "verified a tree without verdict.path", "only chains may leave it None")
    if verdict.survival is not None:
        dtypes = (torch.float32, torch.float64)
        _check_tensor(verifier, "verdict.survival", verdict.survival, "B D", (b, None), dtypes, like)


def broken(who: str, what: str, advice: str) -> ContractError:
    return ContractError(f"{who} {what}; {advice}")


def _check_tensor(
    who: str,
    name: str,
    value: object,
    axes: str,
    sizes: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    like: Tensor | Sequences,
) -> Tensor:
    """Return ``value`` if it is a tensor of these ``sizes`` (None = any) and dtypes on the device of ``like``.

    Raises:
        ContractError: it is not.
    """

    def wrong(what: str) -> ContractError:
        kinds = " or ".join(_plain(dtype) for dtype in dtypes)
        advice = f"{name} must be a tensor [{', '.join(axes.split())}] of {kinds} on {like.device}"
        return broken(who, f"made {name} {what}", advice)

    if not isinstance(value, Tensor):
        raise wrong(f"a {type(value).__name__}")
    if value.dim() != len(sizes) or any(size not in (None, is_) for size, is_ in zip(sizes, value.shape, strict=True)):
        expected = [axis if size is None else str(size) for axis, size in zip(axes.split(), sizes, strict=True)]
        raise wrong(f"of shape {list(value.shape)}, not [{', '.join(expected)}]: a shape is off")
    if value.dtype not in dtypes:
        raise wrong(f"of dtype {_plain(value.dtype)}")
    if value.device != like.device:
        raise wrong(f"on {value.device}")
    return value


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class MutationGuard:
    """Check that a strategy does not modify ``sequences``. Host only.

    Args:
        contents: compare the tokens of the histories, not only their lengths.
    """

    def __init__(self, sequences: Sequences, contents: bool):
        self._sequences, self._lists = sequences, list(sequences.history)
        self._lengths = [len(history) for history in sequences.history]
        self._contents = [list(history) for history in sequences.history] if contents else None
        self._limit, self._stream = list(sequences.limit), list(sequences.stream)

    def check(self, who: str) -> None:
        """Raise ContractError, naming the strategy ``who``, if anything changed."""
        now, advice = self._sequences, "sequences are read-only: copy what you want to change"
        for name, before, after in (("limit", self._limit, now.limit), ("stream", self._stream, now.stream)):
            if before != after:
                raise broken(who, f"changed sequences.{name} from {before} to {after}", advice)
        same = len(now.history) == len(self._lists) and all(map(operator.is_, now.history, self._lists))
        if not same or [len(history) for history in now.history] != self._lengths:
            raise broken(who, "changed sequences.history", advice)
        if self._contents is not None and self._contents != now.history:
            row = next(
                row for row, (old, new) in enumerate(zip(self._contents, now.history, strict=True)) if old != new
            )
            raise broken(who, f"changed sequences.history in slot {row}", advice)


def check_prompt(name: str, prompt: Sequence[int], context_length: int | None) -> None:
    """Raise UsageError for a prompt that is empty or fills the target's context."""
    if not len(prompt):
        raise UsageError(f"{name} is empty; a prompt needs at least one token")
    if context_length is not None and len(prompt) >= context_length:
        raise UsageError(
            f"{name} has {len(prompt)} tokens, but the target's context is {context_length} tokens; "
            "shorten the prompt or use a target with a longer context"
        )
