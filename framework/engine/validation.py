"""Validation of the values of drafts and verdicts, so that no strategy corrupts numbers silently.

All checks are computed on the device, as flags that are fetched at once; only if one is up it is found out where. That
waits for the device, so the loop makes these checks in some steps, see `Decoder`; what can be seen without waiting
(`forms`, and what travels with the step's one transfer) it checks in every step. The contract kit uses the same
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contracts.draft import Draft, Sequences, Verdict, on_device
from ..contracts.draft_kind import ONE_SAMPLED_SIBLING, SAMPLED_SIBLINGS
from ..contracts.drafter import DraftTraits
from ..errors import ContractError, CrossdraftError, NumericalError
from ..util.static_trees import tree_constant
from .host_sync import FINITE_Q, NOT_FINITE, accepted_too_many, emitted_outside, too_deep
from .structural_checks import TOLERANCE, check_draft, check_verdict

#: Rounding that a probability of survival may show.
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
    """Check all that the docstring of `Draft` promises; waits for the device once.

    Args:
        traits: of the drafter that proposed it.
        sequences: what it was proposed for.
        drafter, prompts: what to call the drafter, and the prompt of each slot.
        final_q: see `DraftContext`.
        finite: look for NaN and infinity in q, too. The loop does that in every step.

    Raises:
        ContractError: a form, a tree or a depth that is none.
        NumericalError: a q that is no law, or not that of the draw.
    """
    check_draft(draft, traits, sequences, vocab_size, drafter=drafter)
    faults = _tree_faults(draft, traits, sequences, vocab_size)
    if draft.q is not None and draft.q.shape[1]:
        faults += _law_faults(draft.candidates, draft.q, traits, sequences, final_q, finite)
    _raise_first(drafter, faults, prompts)


def _tree_faults(draft: Draft, traits: DraftTraits, sequences: Sequences, vocab_size: int) -> list[_Fault]:
    n, tokens, valid = draft.width, draft.tokens, draft.valid
    if not n:
        return []
    order = torch.arange(n, device=tokens.device)
    parents = draft.parents.clamp(-1, n - 1)
    parent_valid = torch.cat([torch.ones_like(valid[:, :1]), valid], 1).gather(1, parents + 1)
    faults = [
        _Fault(
            (tokens < 0) | (tokens >= vocab_size),
            lambda row, node: (
                f"drafted {'' if draft.valid[row, node] else 'padding with '}the token {int(tokens[row, node])}, "
                f"outside of the vocabulary of {vocab_size}"
            ),
            "tokens are ids of the target, padding too, because the target looks them up",
        ),
        _Fault(
            (draft.parents < -1) | (draft.parents >= order),
            lambda row, node: f"hung a node below node {int(draft.parents[row, node])}",
            "a parent comes before its children, and -1 is the root",
        ),
    ]
    nodes = draft.candidates
    n = nodes.width
    if not n:
        return faults
    deepest = traits.depth if nodes.levels is None else nodes.levels
    if nodes.children is not None:
        said = tree_constant(nodes.children, "parents", tokens.device)
        faults.append(
            _Fault(
                nodes.parents != said,
                lambda row, node: f"hung node {node} below node {int(draft.parents[row, node])}, not {int(said[node])}",
                "draft.children say how many children each node has, which stand side by side, level by level",
            )
        )
    nodes = replace(nodes, parents=nodes.parents.clamp(-1, n - 1), levels=None, children=None)
    if nodes.is_chain:
        before = torch.cat([torch.ones_like(valid[:, :1]), nodes.valid[:, :-1]], 1)
        faults += [
            _Fault(
                nodes.parents != order[:n] - 1,
                lambda row, node: f"hung a node of a chain below node {int(draft.parents[row, node])}",
                "in a chain every node is the child of the one before it",
            ),
            _Fault(
                nodes.valid & ~before,
                lambda row, node: "put a valid node after an invalid one",
                "the invalid nodes of a chain come last",
            ),
        ]
        depth = (order[:n] + 1).expand_as(nodes.tokens)
    else:
        same = nodes.earlier_siblings & (nodes.tokens[:, :, None] == nodes.tokens[:, None])
        faults.append(
            _Fault(
                same.any(-1) & nodes.valid,
                lambda row, node: f"gave two siblings the same token {int(tokens[row, node])}",
                "siblings differ: draw them without replacement, or merge equal sequences with Draft.iid",
            )
        )
        depth = nodes.depth
    faults.append(
        _Fault(
            valid & ~parent_valid,
            lambda row, node: "hung a valid node below an invalid one",
            "what hangs below an invalid node is invalid too",
        )
    )
    depth = torch.where(nodes.valid, depth, 0).amax(1)
    most = [limit if history else 0 for limit, history in zip(sequences.limit, sequences.history, strict=True)]
    faults += [
        _Fault(
            depth > on_device(most, depth.device),
            lambda row: too_deep(int(depth[row]), most[row]),
            "propose() must not exceed the limit of each row",
        ),
        _Fault(
            depth > deepest,
            lambda row: (
                f"drafted {int(depth[row])} tokens deep, deeper than "
                f"{'traits.depth' if draft.levels is None else 'draft.levels'} = {deepest}"
            ),
            "say how deep a draft can be",
        ),
    ]
    if nodes.sequences is not None:
        faults += _sequence_faults(nodes, nodes.sequences)
    return faults


def _sequence_faults(draft: Draft, sequences: Tensor) -> list[_Fault]:
    """Faults of the K sequences of an ``iid`` draft."""
    n, inside = draft.width, sequences >= 0
    nodes = sequences.clamp(0, n - 1).flatten(1)
    above = torch.cat([torch.full_like(sequences[:, :, :1], -1), sequences[:, :, :-1]], 2)
    wrong = (draft.parents.gather(1, nodes).view_as(sequences) != above) | ~draft.valid.gather(1, nodes).view_as(inside)
    wrong = (inside & wrong) | (sequences < -1) | (sequences >= n)
    long = inside.sum(2)
    named = torch.zeros_like(draft.tokens).scatter_reduce_(1, nodes, inside.flatten(1).long(), "amax")
    return [
        _Fault(
            wrong.any(2).any(1),
            lambda row: "has draft.sequences that do not go down from the root, node by valid node,",
            "Draft.iid makes them",
        ),
        _Fault(
            (long != long[:, :1]).any(1),
            lambda row: f"has draft.sequences of {sorted(set(long[row].tolist()))} tokens",
            "all sequences of a row are equally long",
        ),
        _Fault(
            draft.valid & (named == 0),
            lambda row, node: "has a valid node in none of draft.sequences",
            "every node is a token of some sequence",
        ),
    ]


def _law_faults(
    draft: Draft, q: Tensor, traits: DraftTraits, sequences: Sequences, final_q: bool, finite: bool
) -> list[_Fault]:
    """Faults of q, in rows that hold a sequence and whose logits the drafter did not report as NaN."""
    b, n = draft.batch_size, draft.width
    busy = on_device([len(history) for history in sequences.history], q.device).bool()
    if draft.finite is not None:
        busy = busy & draft.finite
    rows = torch.arange(b, device=q.device)[:, None]
    index = torch.arange(n, device=q.device).expand(b, n) if draft.q_index is None else draft.q_index
    used, m = draft.valid & busy[:, None], q.shape[1]
    if final_q and n <= m:  # the law after a draft that was cut short, as one more node
        count = draft.count[:, None]
        index = torch.cat([index, count.clamp(max=m - 1)], 1)
        used = torch.cat([used, busy[:, None] & (count < traits.depth) & (count < m)], 1)
    law = index.clamp(0, m - 1)
    low, total, tolerance = q.amin(-1).gather(1, law), q.sum(-1).gather(1, law), TOLERANCE[q.dtype]
    fine = total.isfinite() & ~low.isnan()
    drawn = q[rows, law[:, :n], draft.tokens.clamp(0, q.shape[2] - 1)]
    honest = "q is the law a token was drawn from, after every temperature, top-k and top-p"
    faults = [
        _Fault(
            (index < 0) | (index >= m),
            lambda row, node: f"has draft.q_index name row {int(index[row, node])} of the {m} rows of q",
            "draft.q_index is the row of q that a node was drawn from",
        )
    ]
    if finite:
        whole = ~q.sum((1, 2)).isfinite() & busy
        faults.append(_Fault(whole, lambda row: NOT_FINITE, FINITE_Q, NumericalError))
    faults += [
        _Fault(
            used & fine & (low < 0),
            lambda row, node: f"reported a negative q, {float(low[row, node]):.4g} at the least,",
            honest,
            NumericalError,
        ),
        _Fault(
            used & fine & ((total - 1).abs() > tolerance),
            lambda row, node: f"reported a row of q that sums to {float(total[row, node]):.6g}, not 1,",
            honest,
            NumericalError,
        ),
        _Fault(
            used[:, :n] & (drawn == 0),
            lambda row, node: f"reported a q of 0 at the token {int(draft.tokens[row, node])} that it drew",
            honest,
            NumericalError,
        ),
    ]
    if SAMPLED_SIBLINGS in draft.kind.capabilities and draft.q_index is not None:
        shared = draft.earlier_siblings & (draft.q_index[:, :, None] == draft.q_index[:, None])
        faults.append(
            _Fault(
                shared.any(-1) & draft.valid,
                lambda row, node: "drew two siblings without replacement from one row of q",
                "each sibling has its own row: what is left of the distribution after earlier siblings are removed",
            )
        )
    if ONE_SAMPLED_SIBLING in draft.kind.capabilities and not draft.is_chain:
        has_later = (draft.earlier_siblings & draft.valid[:, :, None]).any(1)
        here = q[rows[..., None], law[:, :n, None], draft.tokens.clamp(0, q.shape[2] - 1)[:, None]]
        faults += [
            _Fault(
                used[:, :n] & has_later & ((drawn - 1).abs() > tolerance),
                lambda row, node: f"reported a q of {float(drawn[row, node]):.4g} at a token taken without randomness",
                "in a greedy draft the rows of q of all siblings but the last are one-hot",
                NumericalError,
            ),
            _Fault(
                used[:, :n] & (draft.earlier_siblings & (here > 0)).any(-1) & ~has_later,
                lambda row, node: "reported a q above 0 at the token of an earlier sibling",
                "in a greedy draft the last sibling is drawn from what is left",
                NumericalError,
            ),
        ]
    return faults


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
    """Check all that the docstring of `Verdict` promises; waits for the device once.

    Args:
        draft: what was judged, without probes.
        verifier, prompts: what to call the verifier, and the prompt of each slot.
        rows: the slots that count, all by default.
        prob_of: of a lossless verifier, `Scores.prob_of`: no token that it accepts may have probability 0.

    Raises:
        ContractError: a form, a length or a path that is none, a token that is no id or that the target never says.
    """
    check_verdict(draft, verdict, verifier=verifier)
    b, n, device = draft.batch_size, draft.width, draft.tokens.device
    counts = on_device([int(rows is None or row in rows) for row in range(b)], device).bool()
    length, token = verdict.length, verdict.token
    order = torch.arange(n, device=device).expand(b, n)
    path = order if verdict.path is None else verdict.path
    depth = draft.count if draft.is_chain or not n else torch.where(draft.valid, draft.depth, 0).amax(1)
    on = torch.arange(path.shape[1], device=device) < length[:, None]
    faults = [
        _Fault(
            (token < 0) | (token >= vocab_size),
            lambda row: emitted_outside(int(token[row]), vocab_size),
            "verdict.token is an id of the target",
        ),
        _Fault(
            (length < 0) | (length > depth),
            lambda row: accepted_too_many(int(length[row]), int(depth[row])),
            "verdict.length counts accepted tokens of the draft",
        ),
        _Fault(
            length > path.shape[1],
            lambda row: f"accepted {int(length[row])} tokens on a path of {path.shape[1]}",
            "verdict.path names every accepted node",
        ),
    ]
    last = torch.zeros_like(token)  # of the accepted path, as an index into p
    if n and path.shape[1]:
        node = path.clamp(0, n - 1)
        above = torch.cat([torch.full_like(path[:, :1], -1), path[:, :-1]], 1)
        good = (path == node) & draft.valid.gather(1, node) & (draft.parents.gather(1, node) == above)
        faults.append(
            _Fault(
                (on & ~good).any(1),
                lambda row: (
                    f"accepted the path {path[row, : int(length[row])].tolist()}, which does not go down from the "
                    "root, node by valid node,"
                ),
                "verdict.path starts at a child of the root, and every node is the parent of the next",
            )
        )
        if verdict.path is not None:
            faults.append(
                _Fault(
                    (~on & (path != -1)).any(1),
                    lambda row: f"filled verdict.path with {path[row].tolist()} for {int(length[row])} accepted nodes",
                    "verdict.path is -1 behind the accepted nodes",
                )
            )
        last = torch.where(length > 0, node.gather(1, (length - 1).clamp(0, path.shape[1] - 1)[:, None])[:, 0] + 1, 0)
        if prob_of is not None:
            above = draft.parents.gather(1, node).clamp(-1, n - 1) + 1
            p = prob_of(above, draft.tokens.gather(1, node).clamp(0, vocab_size - 1))
            faults.append(_never_said((on & (p == 0)).any(1), "accepted a drafted token"))
    if prob_of is not None:
        p = prob_of(last[:, None], token.clamp(0, vocab_size - 1)[:, None])
        faults.append(_never_said((p == 0).any(1), "emitted a token"))
    if verdict.survival is not None:
        alive = verdict.survival
        faults.append(
            _Fault(
                ~((alive >= -ROUNDING) & (alive <= 1 + ROUNDING)).all(1),
                lambda row: f"reported the survival {[round(x, 6) for x in alive[row].tolist()]}",
                "verdict.survival holds probabilities",
                NumericalError,
            )
        )
    every = [replace(f, bad=f.bad & (counts if f.bad.dim() == 1 else counts[:, None])) for f in faults]
    _raise_first(verifier, every, prompts)


def _never_said(bad: Tensor, what: str) -> _Fault:
    advice = "a lossless rule lets no such token through; mend it, or declare lossless=False"
    return _Fault(bad, lambda row: f"{what} that the target never says (p = 0)", advice)


# -- the one transfer


@dataclass(frozen=True)
class _Fault:
    """A mistake that is looked for.

    Attributes:
        bad: ``[B]`` or ``[B, N]`` bool, where it was made.
        what: says it, given the slot (and the node).
        advice: what to do.
        error: what is raised.
    """

    bad: Tensor
    what: Callable[..., str]
    advice: str
    error: type[CrossdraftError] = ContractError


def _raise_first(who: str, faults: Sequence[_Fault], prompts: Sequence[str | None]) -> None:
    """The one transfer: raise the first fault that was made anywhere."""
    if not faults:
        return
    found = torch.stack([fault.bad.any() for fault in faults]).tolist()
    for fault, made in zip(faults, found, strict=True):
        if made:
            row, *node = fault.bad.nonzero()[0].tolist()
            prompt = f" ({prompts[row]})" if prompts and prompts[row] else ""
            place = f"slot {row}{prompt}" + (f", node {node[0]}" if node else "")
            raise fault.error(f"{who} {fault.what(row, *node)} in {place}; {fault.advice}")
