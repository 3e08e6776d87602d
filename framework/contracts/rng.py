"""Counter-based randomness: one stream per sequence, keyed so that nothing else can change a draw.

A number depends on (seed, stream, position where the step starts, purpose, index within the step) and on
nothing else: not on the batch size, the slot, the other rows, or on how many numbers were drawn before.
Keying by the token's own absolute position would be a trap: a position drafted again in the next step would
reuse a number on which the last step's decisions already depended.

The generator is Philox4x32-10 (J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011), computed on the host for all rows and purposes of a step at once: the host knows the key, and a
hundred small operations on a device would take longer than the verifier that needs the numbers.

The certificate replaces :class:`CounterRng` by a source that enumerates both outcomes of every choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..util.tensors import columns

#: What a number is drawn for. Each purpose has its own sub-stream, indices count within it.
PURPOSES = ("draft", "accept", "residual", "other")
_LOW32 = 0xFFFFFFFF
#: Tokens whose weights are summed before one of them is looked for; and the vocabularies that are one block.
BLOCK, SMALL = 256, 1024


class StepRng(Protocol):
    """The random choices of one step, one independent stream per row."""

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        """Toss a coin per entry of ``h [B, n]`` (probabilities): True with probability h, strictly.

        The coins of column i use index ``index + i``; h = 0 never accepts, h = 1 always does.
        """
        ...

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        """Draw a token ``[B]`` per row of ``weights [B, V]`` (need not sum to 1), never one of weight 0.

        Of weights that are NaN, or all 0, comes some id of the vocabulary, which means nothing; the loop finds the NaN.
        """
        ...


class RngSource(Protocol):
    """Makes the :class:`StepRng` of a step."""

    def for_step(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> StepRng:
        """``stream[b]`` numbers row b's sequence, ``position[b]`` is its length when the step starts."""
        ...


def philox4x32(counter: np.ndarray, key: tuple[int, int], rounds: int = 10) -> np.ndarray:
    """Philox4x32: ``counter [4, ...]`` uint64 holding 32-bit words -> ``[4, ...]`` 32-bit words in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    low, half = np.uint64(_LOW32), np.uint64(32)
    for _ in range(rounds):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> half) ^ c1 ^ np.uint64(k0),
            product1 & low,
            (product0 >> half) ^ c3 ^ np.uint64(k1),
            product0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW32, (k1 + 0xBB67AE85) & _LOW32
    return np.stack((c0, c1, c2, c3))


def inverse_cdf(weights: Tensor, uniform: Tensor, within: Tensor) -> Tensor:
    """Index per row of ``weights [.., V]`` by inverse CDF in float64: ``uniform [..]`` in [0, 1) finds a block of
    tokens, ``within [..]`` in [0, 1) a token in it; a small vocabulary is one block, found by ``uniform`` alone. Always
    below V.

    Why two: passes that differ by rounding alone (in other batches, say) should draw the same token. A uniform falls
    between the two places of a step of the CDF as often as the step moved. With one number there are V steps, each
    moved by the rounding of all before it; with two, V / BLOCK and BLOCK. A running sum over all V is also many times
    slower than sums of blocks. A block is summed in the weights' own precision, at least float32.
    """
    v = weights.shape[-1]
    if weights.dtype not in (torch.float32, torch.float64):
        weights = weights.float()
    if v <= SMALL:
        return _find(weights, uniform).clamp_(max=v - 1)
    whole = v // BLOCK * BLOCK
    sums = weights[..., :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    if whole < v:
        sums = torch.cat([sums, weights[..., whole:].sum(-1, keepdim=True)], -1)
    # Where weights are NaN or 0 there is no block: the last row, and what is found is clamped.
    block = _find(sums, uniform)
    token, beyond = _blocks(v, BLOCK, weights.device)
    inside = weights.gather(-1, token[block])
    if whole < v:
        inside.masked_fill_(beyond[block], 0.0)
    return torch.add(_find(inside, within), block, alpha=BLOCK).clamp_(max=v - 1)


def _blocks(v: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[blocks + 1, size]``: the tokens of each block, at most V - 1, and which are beyond; to be read only."""
    return _made_blocks(v, size, device) if torch.compiler.is_compiling() else _kept_blocks(v, size, device)


def _made_blocks(v: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    token = torch.arange((-(-v // size) + 1) * size, device=device).view(-1, size)
    return token.clamp(max=v - 1), token >= v


@cache  # as `counting`: made once
def _kept_blocks(v: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return _made_blocks(v, size, device)


def _find(weights: Tensor, uniform: Tensor) -> Tensor:
    """``[..]``: the first index at which the running sum of ``weights [.., n]`` exceeds that share of its end; n where
    the weights are NaN or 0.

    The share of a normal number is below the number itself, as ``uniform`` is at most 1 - 2^-53.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    threshold = uniform * cdf[..., -1]
    return torch.searchsorted(cdf, threshold[..., None], right=True).squeeze(-1)


def draw_each(rng: StepRng, weights: Tensor, purpose: str, indices: Sequence[int]) -> Tensor:
    """``[B, n]``: what ``rng.draw`` says of every column of ``weights [B, n, V]``, by its own of n ``indices``."""
    if isinstance(rng, UniformStepRng):
        return rng.draw_each(weights, purpose, indices)
    drawn = [rng.draw(column, purpose, index) for column, index in zip(weights.unbind(1), indices, strict=True)]
    return torch.stack(drawn, 1)


def accept_each(rng: StepRng, h: Tensor, indices: Sequence[int]) -> Tensor:
    """``[B, n]`` bool: what ``rng.accept`` says of every column of ``h [B, n]``, by its own of n ``indices``."""
    if isinstance(rng, UniformStepRng):
        return rng.accept_each(h, indices)
    coins = [rng.accept(column[:, None], index=index) for column, index in zip(h.unbind(1), indices, strict=True)]
    return torch.cat(coins, 1)


def first_accepted(rng: StepRng, h: Tensor) -> Tensor:
    """``[B]``: the first column of ``h [B, n]`` (probabilities) whose coin says yes, n where none does.

    Coin i has index i. Coins behind the first yes are not needed: for a source that enumerates outcomes they have one.
    """
    b, n = h.shape
    if isinstance(rng, UniformStepRng):
        return functional.pad(rng.accept(h), (0, 1), value=True).max(1).indices
    found = torch.full((b,), n, device=h.device)
    for i in range(n):
        accepted = rng.accept(torch.where(found == n, h[:, i], 0.0)[:, None], index=i).squeeze(1)
        found = torch.where(accepted, i, found)
    return found


class CounterRng:
    """The shipped generator. ``seed``: any integer; equal seeds give common random numbers across cells."""

    def __init__(self, seed: int = 0):
        self.key = (seed & _LOW32, (seed >> 32) & _LOW32)

    def for_step(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> CounterStepRng:
        return CounterStepRng(self.key, stream, position, device)


class UniformStepRng:
    """The choices of one step, decided by a table of uniforms.

    Args:
        uniforms: ``[2 * purposes, B, n]`` float64 in [0, 1): those of every purpose, then those that a draw takes
            beside its own.
    """

    def __init__(self, uniforms: Tensor):
        self._uniforms: Tensor | None = uniforms
        self._used: dict[str, set[int]] = {}

    def table(self, n: int) -> Tensor:
        """The uniforms, at least ``n`` of each purpose. Raises ValueError if there are fewer."""
        if self._uniforms is None or self._uniforms.shape[2] < n:
            raise ValueError(f"{n} random numbers of a purpose were asked for, more than this step has")
        return self._uniforms

    def uniform(self, purpose: str, index: int, n: int) -> Tensor:
        """``[B, n]`` float64 uniforms in [0, 1) for indices ``index .. index + n - 1`` of ``purpose``.

        Raises:
            ValueError: a number of this step is asked for twice, which would correlate two decisions.
        """
        self._use(purpose, range(index, index + n))
        return self.table(index + n)[PURPOSES.index(purpose), :, index : index + n]

    def _use(self, purpose: str, indices: Sequence[int]) -> None:
        used, wanted = self._used.setdefault(purpose, set()), set(indices)
        if used & wanted:
            raise ValueError(f"random numbers {sorted(used & wanted)} for '{purpose}' were already used this step")
        used |= wanted

    def accept(self, h: Tensor, purpose: str = "accept", index: int = 0) -> Tensor:
        return self.uniform(purpose, index, h.shape[1]) < h

    def accept_each(self, h: Tensor, indices: Sequence[int]) -> Tensor:
        """See the function `accept_each`."""
        self._use("accept", indices)
        return columns(self.table(max(indices) + 1)[PURPOSES.index("accept")], indices) < h

    def draw(self, weights: Tensor, purpose: str = "residual", index: int = 0) -> Tensor:
        uniform = self.uniform(purpose, index, 1)[:, 0]
        within = self.table(index + 1)[len(PURPOSES) + PURPOSES.index(purpose), :, index]
        return inverse_cdf(weights, uniform, within)

    def draw_either(self, which: Tensor, weights: Tensor, this: tuple[str, int], that: tuple[str, int]) -> Tensor:
        """``[B]``: what ``draw(weights, *this)`` says where ``which [B]``, and ``draw(weights, *that)`` elsewhere."""
        (purpose, index), (other, its_index) = this, that
        self._use(purpose, [index])
        self._use(other, [its_index])
        table, row, its_row = self.table(max(index, its_index) + 1), PURPOSES.index(purpose), PURPOSES.index(other)
        # A draw's two numbers stand as many rows apart as there are purposes.
        found = torch.where(which, table[row :: len(PURPOSES), :, index], table[its_row :: len(PURPOSES), :, its_index])
        return inverse_cdf(weights, *found.unbind())

    def draw_each(self, weights: Tensor, purpose: str, indices: Sequence[int]) -> Tensor:
        """See the function `draw_each`."""
        self._use(purpose, indices)
        numbers, row = self.table(max(indices) + 1), PURPOSES.index(purpose)
        return inverse_cdf(weights, *(columns(numbers[i], indices) for i in (row, len(PURPOSES) + row)))


class CounterStepRng(UniformStepRng):
    """One step's uniforms, generated when the first one is asked for; there are as many as are asked for."""

    def __init__(self, key: tuple[int, int], stream: Sequence[int], position: Sequence[int], device: torch.device):
        self._key, self._device = key, device
        self._where = np.array([list(stream), list(position)], dtype=np.uint64)
        self._uniforms = None
        self._used = {}

    def of_rows(self, rows: slice) -> CounterStepRng:
        """The same numbers, for some rows of the batch."""
        stream, position = self._where[:, rows]
        part = CounterStepRng(self._key, stream, position, self._device)
        part._uniforms = None if self._uniforms is None else self._uniforms[:, rows]
        part._used = {purpose: set(used) for purpose, used in self._used.items()}
        return part

    def table(self, n: int) -> Tensor:
        if self._uniforms is None or self._uniforms.shape[2] < n:
            self._uniforms = self._made(max(n, 16))
        return self._uniforms

    def _made(self, n: int) -> Tensor:
        """``[2 * purposes, B, n]`` float64, on the device: a longer table starts like a shorter one."""
        stream, position = self._where
        pairs, streams = (n + 1) // 2, 2 * len(PURPOSES)
        counter = np.empty((4, streams, len(stream), pairs), dtype=np.uint64)
        counter[0] = np.arange(pairs, dtype=np.uint64)
        counter[1] = np.arange(streams, dtype=np.uint64)[:, None, None]
        counter[2] = position[:, None]
        counter[3] = stream[:, None]
        words = philox4x32(counter, self._key)
        high, low = words[0::2], words[1::2]
        bits = (high << np.uint64(21)) ^ (low >> np.uint64(11))
        uniforms = np.moveaxis(bits, 0, -1).reshape(streams, len(stream), 2 * pairs) * 2.0**-53
        return torch.from_numpy(uniforms).to(self._device, non_blocking=True)
