"""Verifiers on flat tensors: exact distributions, ragged batches, masked tokens, greedy rows."""

from __future__ import annotations

import pytest
import torch
from crossdraft_vllm.verification import PADDING, verify_flat
from scipy.stats import chisquare

from crossdraft import make_verifier

P = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]])
Q = torch.tensor([[0.25, 0.25, 0.4, 0.1], [0.4, 0.3, 0.2, 0.1]])
ROWS = 40_000


def sequences(verifier: str, point_mass: bool) -> torch.Tensor:
    """``[ROWS, 3]``: outputs of drafts of two tokens; target and draft distributions depend on the position only."""
    torch.manual_seed(1)
    if point_mass:
        drafts = torch.tensor([2, 3]).repeat(ROWS, 1)
    else:
        drafts = torch.stack([torch.multinomial(q, ROWS, replacement=True) for q in Q], 1)
    bonus = torch.multinomial(P[0], ROWS, replacement=True)
    draft_probs = None if point_mass else Q.repeat(ROWS, 1)
    return verify_flat(
        make_verifier(verifier), drafts.view(-1), [2] * ROWS, draft_probs, P.repeat(ROWS, 1), bonus[:, None]
    )


@pytest.mark.parametrize("point_mass", [False, True])
@pytest.mark.parametrize("verifier", ["block", "token", "sample-match", "traversal"])
def test_distribution_is_that_of_target(verifier, point_mass):
    """Sequences of three tokens; a step that emits fewer is continued by draws from the target."""
    output = sequences(verifier, point_mass)
    assert (output[:, 0] >= 0).all()
    target = [P[0], P[1], P[0]]
    rest = torch.stack([torch.multinomial(p, ROWS, replacement=True) for p in target], 1)
    whole = torch.where(output >= 0, output, rest)
    counts = torch.bincount(whole @ torch.tensor([16, 4, 1]), minlength=64)
    expected = torch.einsum("i,j,k->ijk", *(p.double() / p.double().sum() for p in target)).flatten()
    assert len(counts) == 64
    assert chisquare(counts, expected * ROWS).pvalue > 1e-3


def test_block_accepts_more():
    accepted = [(sequences(name, False) >= 0).sum(1).float().mean() for name in ("block", "token")]
    assert accepted[0] > accepted[1] + 0.01


@pytest.mark.parametrize("verifier", ["block", "token"])
def test_ragged_rows(verifier):
    """Each drafted token is the only one of the target, or impossible."""
    certain = torch.eye(6)
    drafts = torch.tensor([1, 2, 3, 4, 5])  # rows: [1, 2], [], [3], [4, 5]
    target = certain[[1, 2, 0, 4, 1]]
    output = verify_flat(
        make_verifier(verifier), drafts, [2, 0, 1, 2], None, target, torch.tensor([[5], [4], [3], [2]])
    )
    assert output.tolist() == [[1, 2, 5], [4, PADDING, PADDING], [0, PADDING, PADDING], [4, 1, PADDING]]


def test_rows_without_drafts():
    output = verify_flat(
        make_verifier("block"), torch.empty(0), [0, 0], None, torch.empty(0, 6), torch.tensor([[5], [4]])
    )
    assert output.tolist() == [[5], [4]]


@pytest.mark.parametrize("draft_probs", [None, Q.repeat(2000, 1)])
@pytest.mark.parametrize("verifier", ["block", "token"])
def test_masked_tokens_are_rejected(verifier, draft_probs):
    """An engine masks a token of probability 0 by -1."""
    torch.manual_seed(2)
    target = torch.tensor([[0.6, 0.0, 0.4, 0.0], [0.1, 0.2, 0.3, 0.4]]).repeat(2000, 1)
    drafts = torch.tensor([-1, 0]).repeat(2000)
    output = verify_flat(
        make_verifier(verifier), drafts, [2] * 2000, draft_probs, target, torch.zeros(2000, 1, dtype=torch.int32)
    )
    assert (output[:, 1:] == PADDING).all()
    assert set(output[:, 0].tolist()) <= {0, 2}


def test_generators_are_used_by_their_rows_only():
    def outputs(seed: int, rows: int) -> list[list[int]]:
        torch.manual_seed(seed)
        generators = {0: torch.Generator().manual_seed(7), 1: torch.Generator().manual_seed(8)}
        drafts = torch.tensor([[0, 1]] * rows).view(-1)
        lengths = [2, 0, *[2] * (rows - 1)]
        bonus = torch.zeros(rows + 1, 1, dtype=torch.int32)
        output = verify_flat(
            make_verifier("block"), drafts, lengths, Q.repeat(rows, 1), P.repeat(rows, 1), bonus, generators
        )
        assert generators[1].initial_seed() == 8
        assert torch.equal(generators[1].get_state(), torch.Generator().manual_seed(8).get_state())  # unused
        return output.tolist()

    first, second = outputs(0, 200), outputs(1, 200)
    assert first[0] == second[0]
    assert first != second
