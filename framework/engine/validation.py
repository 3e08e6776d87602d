"""Validation of the values of drafts and verdicts, so that strategies do not corrupt results silently.

All checks are computed on the device as flags and copied to the host together; a raised flag is located afterwards.
This waits for the device, so the decoder validates some steps only, see `Decoder`; `checks` has the checks of every
step. The contract tests use the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contracts.draft import Draft, Sequences, Verdict, on_device
from ..contracts.draft_kind import ONE_SAMPLED_SIBLING, SAMPLED_SIBLINGS
from ..contracts.drafter import DraftTraits
from ..errors import ContractError, CrossdraftError, NumericalError
from ..util.static_trees import tree_constant
from .checks import (
    FINITE_Q,
    NOT_FINITE,
    TOLERANCE,
    accepted_too_many,
    check_draft,
    check_verdict,
    emitted_outside,
    too_deep,
)

#: Tolerance of survival probabilities.
ROUNDING = 1e-6


def validate_draft(
    draft: Draft,
    traits: DraftTraits,
    sequences: Sequences,
    vocab_size: int,
    *,
    drafter: str = "the drafter",
    prompts: Sequence[str | None] = (),
    final_q: bool = False,
    finite: bool = True,
) -> None:
    """Check the properties listed in the docstring of `Draft`; synchronises once.

    Args:
        traits: traits of the drafter.
        sequences: input of the drafter.
        drafter, prompts: names of the drafter and of each slot's prompt in messages.
        final_q: see `DraftContext`.
        finite: check q for NaN and infinity, too; the decoder does so in every step.

    Raises:
        ContractError: invalid structure, tree or depth.
        NumericalError: q is not a distribution, or not the one that tokens were drawn from.
    """
    check_draft(draft, traits, sequences, vocab_size, drafter=drafter)
    faults = [*_tree_faults(draft, traits, sequences, vocab_size)]
    if draft.q is not None and draft.q.shape[1]:
        faults += _q_faults(draft.candidates, draft.q, traits, sequences, final_q, finite)
    _raise_first(drafter, faults, prompts)


def _tree_faults(draft: Draft, traits: DraftTraits, sequences: Sequences, vocab_size: int) -> Iterator[_Fault]:
    n, tokens, valid = draft.width, draft.tokens, draft.valid
    if not n:
        return
    order = torch.arange(n, device=tokens.device)
    parents = draft.parents.clamp(-1, n - 1)
    parent_valid = torch.cat([torch.ones_like(valid[:, :1]), valid], 1).gather(1, parents + 1)
    yield _Fault(
        (tokens < 0) | (tokens >= vocab_size),
        lambda row, node: (
            f"drafted {'' if draft.valid[row, node] else 'padding with '}the token {int(tokens[row, node])}, "
            f"outside of the vocabulary of {vocab_size}"
        ),
        "tokens must be ids of the target, padding too, because the target embeds them",
    )
    yield _Fault(
        (draft.parents < -1) | (draft.parents >= order),
        lambda row, node: f"has node {int(draft.parents[row, node])} as a parent",
        "a parent must come before its children; -1 is the root",
    )
    nodes = draft.candidates
    n = nodes.width
    if not n:
        return
    deepest = traits.depth if nodes.levels is None else nodes.levels
    if nodes.children is not None:
        parent_of = tree_constant(nodes.children, "parents", tokens.device)
        yield _Fault(
            nodes.parents != parent_of,
            lambda row, node: f"has parent {int(draft.parents[row, node])} instead of {int(parent_of[node])}",
            "draft.parents must match draft.children, the number of children of each node, level by level",
        )
    nodes = replace(nodes, parents=nodes.parents.clamp(-1, n - 1), levels=None, children=None)
    if nodes.is_chain:
        yield _Fault(
            nodes.parents != order[:n] - 1,
            lambda row, node: f"has node {int(draft.parents[row, node])} as a parent in a chain",
            "in a chain every node must be the child of the one before it",
        )
        depth = (order[:n] + 1).expand_as(nodes.tokens)
    else:
        same = nodes.earlier_siblings & (nodes.tokens[:, :, None] == nodes.tokens[:, None])
        yield _Fault(
            same.any(-1) & nodes.valid,
            lambda row, node: f"gave two siblings the same token {int(tokens[row, node])}",
            "siblings must differ: draw them without replacement, or merge equal sequences with Draft.iid",
        )
        depth = nodes.depth
    yield _Fault(
        valid & ~parent_valid,
        lambda row, node: "has a valid node below an invalid one",
        "the children of an invalid node must be invalid",
    )
    depth = torch.where(nodes.valid, depth, 0).amax(1)
    limits = [limit if history else 0 for limit, history in zip(sequences.limit, sequences.history, strict=True)]
    yield _Fault(
        depth > on_device(limits, depth.device),
        lambda row: too_deep(int(depth[row]), limits[row]),
        "propose() must not exceed the limit of each row",
    )
    yield _Fault(
        depth > deepest,
        lambda row: (
            f"drafted {int(depth[row])} tokens deep, deeper than "
            f"{'traits.depth' if draft.levels is None else 'draft.levels'} = {deepest}"
        ),
        "it must be the depth of the deepest node",
    )
    if nodes.sequences is not None:
        yield from _sequence_faults(nodes, nodes.sequences)


def _sequence_faults(draft: Draft, sequences: Tensor) -> Iterator[_Fault]:
    """Faults of the K sequences of an ``iid`` draft."""
    n, inside = draft.width, sequences >= 0
    nodes = sequences.clamp(0, n - 1).flatten(1)
    parents = torch.cat([torch.full_like(sequences[:, :, :1], -1), sequences[:, :, :-1]], 2)
    wrong = draft.parents.gather(1, nodes).view_as(sequences) != parents
    wrong |= ~draft.valid.gather(1, nodes).view_as(inside)
    wrong = (inside & wrong) | (sequences < -1) | (sequences >= n)
    length = inside.sum(2)
    listed = torch.zeros_like(draft.tokens).scatter_reduce_(1, nodes, inside.flatten(1).long(), "amax")
    yield _Fault(
        wrong.any(2).any(1),
        lambda row: "has draft.sequences that are not paths of valid nodes from the root,",
        "use Draft.iid",
    )
    yield _Fault(
        (length != length[:, :1]).any(1),
        lambda row: f"has draft.sequences of {sorted(set(length[row].tolist()))} tokens",
        "all sequences of a row must have equal length",
    )
    yield _Fault(
        draft.valid & (listed == 0),
        lambda row, node: "has a valid node that is not in draft.sequences",
        "every valid node must be part of a sequence",
    )


def _sum_text(total: float, dtype: torch.dtype) -> str:
    """A sum that is not 1, with the reason if its difference is the round-off of another dtype."""
    if abs(total - 1) > 1e-5:
        return f"{total:.6g}"
    rounded = ", which is the round-off of float32, in float64: report q in float32" * (dtype == torch.float64)
    return f"1 {total - 1:+.2g}{rounded}"


def _q_faults(
    draft: Draft, q: Tensor, traits: DraftTraits, sequences: Sequences, final_q: bool, finite: bool
) -> Iterator[_Fault]:
    """Faults of q in occupied rows, except rows whose logits the drafter reported as NaN."""
    b, n = draft.batch_size, draft.width
    busy = on_device([len(history) for history in sequences.history], q.device).bool()
    if draft.finite is not None:
        busy = busy & draft.finite
    rows = torch.arange(b, device=q.device)[:, None]
    index = torch.arange(n, device=q.device).expand(b, n) if draft.q_index is None else draft.q_index
    used, m = draft.valid & busy[:, None], q.shape[1]
    if final_q and n <= m:  # one more node: the row of q after a shorter draft
        count = draft.count[:, None]
        index = torch.cat([index, count.clamp(max=m - 1)], 1)
        used = torch.cat([used, busy[:, None] & (count < traits.depth) & (count < m)], 1)
    q_row = index.clamp(0, m - 1)
    low, total, tolerance = q.amin(-1).gather(1, q_row), q.sum(-1).gather(1, q_row), TOLERANCE[q.dtype]
    not_nan = total.isfinite() & ~low.isnan()
    prob = q[rows, q_row[:, :n], draft.tokens.clamp(0, q.shape[2] - 1)]
    advice = "q must be the distribution that a token was drawn from, after temperature, top-k and top-p"
    yield _Fault(
        (index < 0) | (index >= m),
        lambda row, node: f"has {int(index[row, node])} in draft.q_index, but q has {m} rows",
        "draft.q_index must be the row of q that a node was drawn from",
    )
    if finite:
        not_finite = ~q.sum((1, 2)).isfinite() & busy
        yield _Fault(not_finite, lambda row: NOT_FINITE, FINITE_Q, NumericalError)
    yield _Fault(
        used & not_nan & (low < 0),
        lambda row, node: f"reported a negative q, {float(low[row, node]):.4g},",
        advice,
        NumericalError,
    )
    yield _Fault(
        used & not_nan & ((total - 1).abs() > tolerance),
        lambda row, node: f"reported a row of q that sums to {_sum_text(float(total[row, node]), q.dtype)}, not 1,",
        advice,
        NumericalError,
    )
    yield _Fault(
        used[:, :n] & (prob == 0),
        lambda row, node: f"reported a q of 0 at the token {int(draft.tokens[row, node])} that it drew",
        advice,
        NumericalError,
    )
    if SAMPLED_SIBLINGS in draft.kind.capabilities and draft.q_index is not None:
        shared = draft.earlier_siblings & (draft.q_index[:, :, None] == draft.q_index[:, None])
        yield _Fault(
            shared.any(-1) & draft.valid,
            lambda row, node: "drew two siblings without replacement from one row of q",
            "each sibling needs its own row: the distribution without earlier siblings, renormalised",
        )
    if ONE_SAMPLED_SIBLING in draft.kind.capabilities and not draft.is_chain:
        has_later = (draft.earlier_siblings & draft.valid[:, :, None]).any(1)
        prob_of_others = q[rows[..., None], q_row[:, :n, None], draft.tokens.clamp(0, q.shape[2] - 1)[:, None]]
        yield _Fault(
            used[:, :n] & has_later & ((prob - 1).abs() > tolerance),
            lambda row, node: f"reported a q of {float(prob[row, node]):.4g} at a token chosen deterministically",
            "in a greedy draft the rows of q of all siblings but the last must be one-hot",
            NumericalError,
        )
        yield _Fault(
            used[:, :n] & (draft.earlier_siblings & (prob_of_others > 0)).any(-1) & ~has_later,
            lambda row, node: "reported a q above 0 at the token of an earlier sibling",
            "in a greedy draft the last sibling must be drawn from the distribution without the others",
            NumericalError,
        )


def validate_verdict(
    draft: Draft,
    verdict: Verdict,
    vocab_size: int,
    *,
    verifier: str = "the verifier",
    prompts: Sequence[str | None] = (),
    rows: Collection[int] | None = None,
    prob_of: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Check the properties listed in the docstring of `Verdict`; synchronises once.

    Args:
        draft: the verified draft, without probes.
        verifier, prompts: names of the verifier and of each slot's prompt in messages.
        rows: the slots to check, all by default.
        prob_of: `Scores.prob_of` for a lossless verifier, whose tokens must have probability above 0.

    Raises:
        ContractError: an invalid structure, length or path, a token outside the vocabulary or of probability 0.
        NumericalError: survival is not a probability.
    """
    check_verdict(draft, verdict, verifier=verifier)
    checked = [int(rows is None or row in rows) for row in range(draft.batch_size)]
    of_rows = on_device(checked, draft.tokens.device).bool()
    faults = _verdict_faults(draft, verdict, vocab_size, prob_of)
    _raise_first(verifier, [replace(fault, bad=fault.bad & of_rows) for fault in faults], prompts)


def _verdict_faults(
    draft: Draft, verdict: Verdict, vocab_size: int, prob_of: Callable[[Tensor, Tensor], Tensor] | None
) -> Iterator[_Fault]:
    b, n, device = draft.batch_size, draft.width, draft.tokens.device
    length, token = verdict.length, verdict.token
    order = torch.arange(n, device=device).expand(b, n)
    path = order if verdict.path is None else verdict.path
    depth = draft.count if draft.is_chain or not n else torch.where(draft.valid, draft.depth, 0).amax(1)
    accepted = torch.arange(path.shape[1], device=device) < length[:, None]
    yield _Fault(
        (token < 0) | (token >= vocab_size),
        lambda row: emitted_outside(int(token[row]), vocab_size),
        "verdict.token must be an id of the target",
    )
    yield _Fault(
        (length < 0) | (length > depth),
        lambda row: accepted_too_many(int(length[row]), int(depth[row])),
        "verdict.length is the number of accepted tokens of the draft",
    )
    yield _Fault(
        length > path.shape[1],
        lambda row: f"accepted {int(length[row])} tokens on a path of {path.shape[1]}",
        "verdict.path must hold every accepted node",
    )
    last = torch.zeros_like(token)  # the last accepted node, as an index into p
    if n and path.shape[1]:
        node = path.clamp(0, n - 1)
        parents = torch.cat([torch.full_like(path[:, :1], -1), path[:, :-1]], 1)
        on_path = (path == node) & draft.valid.gather(1, node) & (draft.parents.gather(1, node) == parents)
        yield _Fault(
            (accepted & ~on_path).any(1),
            lambda row: (
                f"accepted the path {path[row, : int(length[row])].tolist()}, which is not a path of valid nodes "
                "from the root,"
            ),
            "verdict.path must start at a child of the root, and every node must be the parent of the next",
        )
        if verdict.path is not None:
            yield _Fault(
                (~accepted & (path != -1)).any(1),
                lambda row: f"filled verdict.path with {path[row].tolist()} for {int(length[row])} accepted nodes",
                "verdict.path must be -1 after the accepted nodes",
            )
        last = torch.where(length > 0, node.gather(1, (length - 1).clamp(0, path.shape[1] - 1)[:, None])[:, 0] + 1, 0)
        if prob_of is not None:
            positions = draft.parents.gather(1, node).clamp(-1, n - 1) + 1
            p = prob_of(positions, draft.tokens.gather(1, node).clamp(0, vocab_size - 1))
            yield _impossible((accepted & (p == 0)).any(1), "accepted a drafted token")
    if prob_of is not None:
        p = prob_of(last[:, None], token.clamp(0, vocab_size - 1)[:, None])
        yield _impossible((p == 0).any(1), "emitted a token")
    if verdict.survival is not None:
        survival = verdict.survival
        yield _Fault(
            ~((survival >= -ROUNDING) & (survival <= 1 + ROUNDING)).all(1),
            lambda row: f"reported the survival {[round(x, 6) for x in survival[row].tolist()]}",
            "verdict.survival must be probabilities",
            NumericalError,
        )


def _impossible(bad: Tensor, message: str) -> _Fault:
    advice = "a lossless verifier must not emit such a token; fix it, or declare lossless=False"
    return _Fault(bad, lambda row: f"{message} of target probability 0", advice)


@dataclass(frozen=True)
class _Fault:
    """A check of the contract.

    Attributes:
        bad: ``[B]`` or ``[B, N]`` bool, True at violations.
        message: the message, given the slot (and the node).
        advice: how to fix it.
        error: the exception to raise.
    """

    bad: Tensor
    message: Callable[..., str]
    advice: str
    error: type[CrossdraftError] = ContractError


def _raise_first(who: str, faults: Sequence[_Fault], prompts: Sequence[str | None]) -> None:
    """Raise the first fault with a violation; one transfer for all flags."""
    if not faults:
        return
    flags = torch.stack([fault.bad.any() for fault in faults]).tolist()
    for fault, violated in zip(faults, flags, strict=True):
        if violated:
            row, *node = fault.bad.nonzero()[0].tolist()
            prompt = f" ({prompts[row]})" if prompts and prompts[row] else ""
            place = f"slot {row}{prompt}" + (f", node {node[0]}" if node else "")
            raise fault.error(f"{who} {fault.message(row, *node)} in {place}; {fault.advice}")
