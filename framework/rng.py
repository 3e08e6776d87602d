"""Counter-based randomness: one stream per sequence, keyed so that nothing else can change a draw.

A number depends on (seed, stream, position where the round starts, purpose, index within the round) and on
nothing else: not on the batch size, the slot, the other rows, or on how many numbers were drawn before.
Keying by the token's own absolute position would be a trap: a position drafted again in the next round would
reuse a number on which the last round's decisions already depended.

The generator is Philox4x32-10 (J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011), computed for all rows at once with integer tensor operations.

The certificate replaces :class:`CounterRng` by a source that enumerates both outcomes of every choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

#: What a number is drawn for. Each purpose has its own sub-stream, indices count within it.
PURPOSES = ("draft", "accept", "residual", "other")
_LOW32 = 0xFFFFFFFF
#: Tokens whose weights are summed before one of them is looked for.
BLOCK = 256


class RoundRng(Protocol):
    """The random choices of one round, one independent stream per row."""

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        """Toss a coin per entry of ``h [B, n]`` (probabilities): True with probability h, strictly.

        The coins of column i use index ``index + i``; h = 0 never accepts, h = 1 always does.
        """
        ...

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        """Draw a token ``[B]`` per row of ``weights [B, V]`` (need not sum to 1), never one of weight 0."""
        ...


class RngSource(Protocol):
    """Makes the :class:`RoundRng` of a round."""

    def round(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> RoundRng:
        """``stream[b]`` numbers row b's sequence, ``position[b]`` is its length when the round starts."""
        ...


def philox4x32(counter: Tensor, key: tuple[int, int], rounds: int = 10) -> Tensor:
    """Philox4x32: ``counter [..., 4]`` int64 holding 32-bit words -> ``[..., 4]`` 32-bit words in int64."""
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap modulo 2**64, so the low and high words come out exact.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW32) ^ c1 ^ k0,
            product1 & _LOW32,
            ((product0 >> 32) & _LOW32) ^ c3 ^ k1,
            product0 & _LOW32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW32, (k1 + 0xBB67AE85) & _LOW32
    return torch.stack((c0, c1, c2, c3), -1)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index per row of ``weights [B, V]`` by inverse CDF in float64, one ``uniform [B]`` in [0, 1) a draw.

    In two steps, a block of tokens first and then the token inside it: a running sum over all V is many times slower
    than sums of blocks, on any device.
    """
    v = weights.shape[1]
    if v <= BLOCK:
        return _search(weights.double(), uniform * weights.sum(1, dtype=torch.float64))
    whole = v // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1, dtype=torch.float64)
    if whole < v:
        sums = torch.cat([sums, weights[:, whole:].sum(1, keepdim=True, dtype=torch.float64)], 1)
    threshold = uniform * sums.sum(1)
    block = _search(sums, threshold)[:, None]
    before = (sums.cumsum(1) - sums).gather(1, block).squeeze(1)
    token = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, token.clamp(max=v - 1)).double().masked_fill(token >= v, 0.0)
    return block.squeeze(1) * BLOCK + _search(inside, threshold - before)


def _search(weights: Tensor, threshold: Tensor) -> Tensor:
    """``[B]``: the first index at which the running sum of ``weights [B, n]``, float64, exceeds ``threshold [B]``."""
    cdf = weights.cumsum(1)
    total = cdf[:, -1:]
    # Rounding may put the threshold at the total or, in a block, a little below 0: never on a weight of 0.
    inside = torch.minimum(threshold[:, None].clamp(min=0), torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, inside, right=True).squeeze(1).clamp(max=weights.shape[1] - 1)


class CounterRng:
    """The shipped generator. ``seed``: any integer; equal seeds give common random numbers across cells."""

    def __init__(self, seed: int = 0):
        self.key = (seed & _LOW32, (seed >> 32) & _LOW32)

    def round(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> CounterRound:
        return CounterRound(self.key, torch.tensor([list(stream), list(position)], dtype=torch.long, device=device))


class CounterRound:
    """One round's uniforms, generated in blocks per purpose when first asked for."""

    def __init__(self, key: tuple[int, int], where: Tensor):
        self._key, self._where = key, where
        self._uniforms: dict[str, Tensor] = {}
        self._used: dict[str, set[int]] = {}

    def uniform(self, purpose: str, index: int, n: int) -> Tensor:
        """``[B, n]`` float64 uniforms in [0, 1) for indices ``index .. index + n - 1`` of ``purpose``.

        Raises:
            ValueError: a number of this round is asked for twice, which would correlate two decisions.
        """
        used = self._used.setdefault(purpose, set())
        wanted = set(range(index, index + n))
        if used & wanted:
            raise ValueError(f"random numbers {sorted(used & wanted)} for '{purpose}' were already used this round")
        used |= wanted
        have = self._uniforms.get(purpose)
        if have is None or have.shape[1] < index + n:
            have = self._uniforms[purpose] = self._block(purpose, max(index + n, 16))
        return have[:, index : index + n]

    def _block(self, purpose: str, n: int) -> Tensor:
        stream, position = self._where
        device = self._where.device
        counter = torch.empty(len(stream), (n + 1) // 2, 4, dtype=torch.long, device=device)
        counter[..., 0] = torch.arange((n + 1) // 2, device=device)
        counter[..., 1] = PURPOSES.index(purpose)
        counter[..., 2] = position[:, None]
        counter[..., 3] = stream[:, None]
        words = philox4x32(counter, self._key).view(len(stream), -1, 2)
        return ((words[..., 0] << 21) ^ (words[..., 1] >> 11)).double() * 2.0**-53

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        return self.uniform(purpose, index, h.shape[1]) < h

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        return inverse_cdf(weights, self.uniform(purpose, index, 1)[:, 0])
