"""Counter-based random numbers, one stream per sequence.

A number depends only on (seed, stream, position where the step starts, purpose, index within the step): not on the
batch size, the slot, other rows, or the count of earlier draws. Numbers are not keyed by the absolute position of a
token: a position drafted again in the next step would reuse a number that earlier decisions depend on.

The generator is Philox4x32-10 (J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011), computed on the host for all rows and purposes of a step in one call, which is faster than a
hundred small operations on a device.

An index depends only on the node or level that its number is for: use the node, the depth or a constant, never the
number of rows, a row's number, or the width N of the draft, which is that of the widest row. Otherwise a row takes
other numbers in another batch: its text depends on the batch size, two rows may share a number, and the certificate,
which follows one script of decisions per row, finds a bias.

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

from ..errors import UsageError, quoted
from ..util.tensors import columns, on_device

#: Purposes of a number. Each has its own sub-stream with its own indices.
PURPOSES = ("draft", "accept", "residual", "other")
_LOW32 = 0xFFFFFFFF
#: Tokens per block of `inverse_cdf`, and the largest vocabulary that is one block.
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

        If weights are NaN or all 0, the result is an arbitrary id; the decoder detects NaN separately.
        """
        ...


class RngSource(Protocol):
    """Makes the :class:`StepRng` of a step."""

    def for_step(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> StepRng:
        """Random numbers of a step; ``stream[b]``: number of row b's sequence, ``position[b]``: its length."""
        ...


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10: ``counter [4, ...]`` uint64 holding 32-bit words -> ``[4, ...]`` 32-bit words in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    low, half = np.uint64(_LOW32), np.uint64(32)
    for _ in range(10):
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
    """Index below V per row of ``weights [.., V]`` by inverse CDF in float64.

    ``uniform [..]`` in [0, 1) selects a block of tokens, ``within [..]`` in [0, 1) a token in it; a vocabulary of at
    most `SMALL` tokens is one block and uses only ``uniform``.

    With two levels, passes that differ by rounding (other batch sizes) draw the same token more often: rounding
    accumulates over V / BLOCK and BLOCK terms instead of V. It is also much faster than a running sum over V. Blocks
    are summed in the precision of the weights, at least float32.
    """
    v = weights.shape[-1]
    if weights.dtype not in (torch.float32, torch.float64):
        weights = weights.float()
    if v <= SMALL:
        return _find(weights, uniform).clamp_(max=v - 1)
    end = v // BLOCK * BLOCK
    sums = weights[..., :end].unflatten(-1, (-1, BLOCK)).sum(-1)
    if end < v:
        sums = torch.cat([sums, weights[..., end:].sum(-1, keepdim=True)], -1)
    # If weights are NaN or 0, the block is the extra last row, and the result is clamped.
    block = _find(sums, uniform)
    token, beyond = _blocks(v, BLOCK, weights.device)
    inside = weights.gather(-1, token[block])
    if end < v:
        inside.masked_fill_(beyond[block], 0.0)
    return torch.add(_find(inside, within), block, alpha=BLOCK).clamp_(max=v - 1)


def _blocks(v: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[blocks + 1, size]``: token ids of each block, clamped to V - 1, and a mask of the clamped ones; read-only."""
    return _make_blocks(v, size, device) if torch.compiler.is_compiling() else _cached_blocks(v, size, device)


def _make_blocks(v: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    token = torch.arange((-(-v // size) + 1) * size, device=device).view(-1, size)
    return token.clamp(max=v - 1), token >= v


@cache
def _cached_blocks(v: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return _make_blocks(v, size, device)


def _find(weights: Tensor, uniform: Tensor) -> Tensor:
    """``[..]``: first index at which the running sum of ``weights [.., n]`` exceeds ``uniform`` times the total.

    The result is n if the weights are NaN or 0, and below n otherwise, as ``uniform`` is at most 1 - 2^-53.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    threshold = uniform * cdf[..., -1]
    return torch.searchsorted(cdf, threshold[..., None], right=True).squeeze(-1)


def draw_each(rng: StepRng, weights: Tensor, purpose: str, indices: Sequence[int]) -> Tensor:
    """``[B, n]``: ``rng.draw`` for each column of ``weights [B, n, V]``, with the n ``indices``."""
    if isinstance(rng, UniformStepRng):
        return rng.draw_each(weights, purpose, indices)
    drawn = [rng.draw(column, purpose, index) for column, index in zip(weights.unbind(1), indices, strict=True)]
    return torch.stack(drawn, 1)


def accept_each(rng: StepRng, h: Tensor, indices: Sequence[int]) -> Tensor:
    """``[B, n]`` bool: ``rng.accept`` for each column of ``h [B, n]``, with the n ``indices``."""
    if isinstance(rng, UniformStepRng):
        return rng.accept_each(h, indices)
    coins = [rng.accept(column[:, None], index=index) for column, index in zip(h.unbind(1), indices, strict=True)]
    return torch.cat(coins, 1)


def first_accepted(rng: StepRng, h: Tensor) -> Tensor:
    """``[B]``: the first accepted column of ``h [B, n]`` (probabilities), n if none is accepted.

    Coin i has index i. A source that enumerates outcomes does not branch on coins after the first accepted one.
    """
    b, n = h.shape
    if isinstance(rng, UniformStepRng):
        return functional.pad(rng.accept(h), (0, 1), value=True).max(1).indices
    first = torch.full((b,), n, device=h.device)
    for i in range(n):
        accepted = rng.accept(torch.where(first == n, h[:, i], 0.0)[:, None], index=i).squeeze(1)
        first = torch.where(accepted, i, first)
    return first


class CounterRng:
    """The default source. ``seed``: an integer of 64 bits; equal seeds give common random numbers across cells."""

    def __init__(self, seed: int = 0):
        if not -(2**63) <= seed < 2**64:
            raise UsageError(f"the seed {quoted(seed)} must be an integer of 64 bits; give one below 2**64")
        self.key = (seed & _LOW32, (seed >> 32) & _LOW32)

    def for_step(self, stream: Sequence[int], position: Sequence[int], device: torch.device) -> CounterStepRng:
        return CounterStepRng(self.key, stream, position, device)


class UniformStepRng:
    """Random choices of one step from a table of uniforms.

    Args:
        uniforms: ``[2 * purposes, B, n]`` float64 in [0, 1): the first number of each purpose, then the second numbers
            that draws take (see `inverse_cdf`).
    """

    def __init__(self, uniforms: Tensor):
        self._uniforms: Tensor | None = uniforms
        self._used: dict[str, set[int]] = {}

    def table(self, n: int) -> Tensor:
        """The uniforms. Raises ValueError if there are fewer than ``n`` of each purpose."""
        if self._uniforms is None or self._uniforms.shape[2] < n:
            raise ValueError(f"{n} random numbers of a purpose were requested, more than this step has")
        return self._uniforms

    def uniform(self, purpose: str, index: int, n: int) -> Tensor:
        """``[B, n]`` float64 uniforms in [0, 1) for indices ``index .. index + n - 1`` of ``purpose``.

        Raises:
            ValueError: a number of this step is used twice, which would correlate two decisions.
        """
        self._use(purpose, range(index, index + n))
        return self.table(index + n)[PURPOSES.index(purpose), :, index : index + n]

    def _use(self, purpose: str, indices: Sequence[int]) -> None:
        used, new = self._used.setdefault(purpose, set()), set(indices)
        if used & new:
            raise ValueError(f"random numbers {sorted(used & new)} for '{purpose}' were already used this step")
        used |= new

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
        """``[B]``: ``draw(weights, *this)`` if ``which [B]``, else ``draw(weights, *that)``."""
        self._use(this[0], [this[1]])
        self._use(that[0], [that[1]])
        table = self.table(max(this[1], that[1]) + 1)
        # The two numbers of a draw are len(PURPOSES) rows apart.
        uniforms = [table[PURPOSES.index(purpose) :: len(PURPOSES), :, index] for purpose, index in (this, that)]
        return inverse_cdf(weights, *torch.where(which, *uniforms).unbind())

    def draw_each(self, weights: Tensor, purpose: str, indices: Sequence[int]) -> Tensor:
        """See the function `draw_each`."""
        self._use(purpose, indices)
        numbers, row = self.table(max(indices) + 1), PURPOSES.index(purpose)
        return inverse_cdf(weights, *(columns(numbers[i], indices) for i in (row, len(PURPOSES) + row)))


class CounterStepRng(UniformStepRng):
    """Uniforms of one step, generated on first use and extended on demand."""

    def __init__(self, key: tuple[int, int], stream: Sequence[int], position: Sequence[int], device: torch.device):
        self._key, self._device = key, device
        self._where = np.array([list(stream), list(position)], dtype=np.uint64)
        self._uniforms = None
        self._used = {}

    def of_rows(self, rows: slice) -> CounterStepRng:
        """The same numbers for a part of the rows."""
        stream, position = self._where[:, rows]
        part = CounterStepRng(self._key, stream, position, self._device)
        part._uniforms = None if self._uniforms is None else self._uniforms[:, rows]
        part._used = {purpose: set(used) for purpose, used in self._used.items()}
        return part

    def table(self, n: int) -> Tensor:
        if self._uniforms is None or self._uniforms.shape[2] < n:
            self._uniforms = self._generate(max(n, 16))
        return self._uniforms

    def _generate(self, n: int) -> Tensor:
        """``[2 * purposes, B, n]`` float64, on the device; a shorter table is a prefix of a longer one."""
        stream, position = self._where
        pairs, streams = (n + 1) // 2, 2 * len(PURPOSES)
        counter = np.empty((4, streams, len(stream), pairs), dtype=np.uint64)
        counter[0] = np.arange(pairs, dtype=np.uint64)
        counter[1] = np.arange(streams, dtype=np.uint64)[:, None, None]
        counter[2] = position[:, None]
        counter[3] = stream[:, None]
        numbers = philox4x32(counter, self._key)
        high, low = numbers[0::2], numbers[1::2]
        bits = (high << np.uint64(21)) ^ (low >> np.uint64(11))
        uniforms = np.moveaxis(bits, 0, -1).reshape(streams, len(stream), 2 * pairs) * 2.0**-53
        return on_device(uniforms, self._device, None)
