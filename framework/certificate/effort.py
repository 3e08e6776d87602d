"""How much there is to enumerate: known before anything is built, so that what would never end is refused.

All counts are logarithms to base 2, because what somebody asks for may have a billion digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..contracts.draft_kind import INDEPENDENT_SEQUENCES
from ..errors import UsageError

if TYPE_CHECKING:
    from ..contracts.drafter import DraftTraits

#: log2 of the decision paths of a step with drafts of so many tokens.
Cost = Callable[[int], float]

#: The joint law of an output is held as one table: most entries it may have, and most tokens, if V = 1.
LARGEST_LAW = 20_000_000
LONGEST = 64
#: Decision paths of a pair: most that are followed because somebody asked for them, and by default.
MOST_PATHS = 2.0**25
DEFAULT_PATHS = 2.0**20
#: The same where every path is replayed from its start; by default, and if each needs a drafter of its own.
DEFAULT_REPLAYED, DEFAULT_ALONE = 2.0**18, 2.0**12
#: A later step is by default as long as this at least, before an earlier one is longer.
SECOND = 2


class TooLargeError(UsageError):
    """More paths, drafts or variables than can be handled."""


def drawn_nodes(traits: DraftTraits, vocab_size: int, depth: int) -> float:
    """Most nodes that are drawn for a draft cut at ``depth``; none of a point mass."""
    if traits.point_mass or traits.kind is None or not depth:
        return 0.0
    if traits.branching is not None:
        nodes, level = 0.0, 1.0
        for children in traits.branching[:depth]:
            level *= min(children, vocab_size)
            nodes += level
        return nodes
    deepest, nodes = max(traits.depth, 1), traits.nodes
    if INDEPENDENT_SEQUENCES in traits.kind.capabilities:  # all levels are equally wide
        nodes = nodes * min(depth, deepest) // deepest
    return float(min(nodes, 10**18))


def paths(traits: DraftTraits, vocab_size: int, depth: int) -> float:
    """log2 of the decision paths of one step, at most: every drafted node, and a decision of the rule a level."""
    return (drawn_nodes(traits, vocab_size, depth) + min(depth, traits.depth) + 1) * math.log2(vocab_size)


def draft_length(cost: Cost, longest: int, most: float) -> int | None:
    """The longest draft length up to ``longest`` of which a step has at most ``most`` paths; ``None`` = not even 0."""
    fit = [n for n in range(min(longest, LONGEST) + 1) if cost(n) <= math.log2(most)]
    return max(fit, default=None)


def draft_lengths(cost: Cost, longest: int, steps: int, most: float) -> list[int] | None:
    """A draft length for each step where the paths of steps multiply, as long as ``most`` paths allow.

    Later steps first get `SECOND` tokens (or what fits), then the first one as many as fit, and so on. ``None`` = not
    even drafts of one token fit.
    """
    room = math.log2(most) + 1e-9
    fitting = (n for n in range(min(SECOND, longest), min(1, longest) - 1, -1) if cost(n) * steps <= room)
    if (least := next(fitting, None)) is None:
        return None
    found = []
    for left in range(steps - 1, -1, -1):
        here = room - cost(least) * left
        found.append(max(n for n in range(min(longest, LONGEST) + 1) if cost(n) <= here))
        room -= cost(found[-1])
    return found


def replayed(
    remembers: bool,
    traits: DraftTraits,
    vocab_size: int,
    longest: int,
    steps: int,
    most: float = DEFAULT_REPLAYED,
) -> list[int] | None:
    """:func:`draft_lengths` where one drafter lives through all steps of a path, fewer if each needs its own.

    ``remembers``: the drafter's memory outlives a sequence (`Drafter.remembers`), so a batch of paths would share it.
    """
    if remembers:
        most = min(most, DEFAULT_ALONE)
    return draft_lengths(lambda n: paths(traits, vocab_size, n), longest, steps, most)


def check_law(name: str, vocab_size: int, steps: int, gamma: int) -> None:
    """Raise UsageError if the law of ``steps`` steps on the toy ``name`` is no table of a size that can be held."""
    tokens = steps * (gamma + 1)
    advice = (
        f"lower --steps (now {shown(steps)})"
        if steps > 1
        else f"lower the draft length with --gamma (now {shown(gamma)})"
    )
    if vocab_size == 1 and tokens > LONGEST:
        raise TooLargeError(
            f"toy {name}: outputs of steps x (gamma + 1) = {shown(tokens)} tokens are longer than the {LONGEST} that "
            f"are enumerated; {advice}"
        )
    if tokens <= LONGEST and tokens * math.log(vocab_size) <= math.log(LARGEST_LAW):
        return
    huge = tokens > 10**12
    entries = f"{vocab_size} to the power of {shown(tokens)}" if huge else power(tokens * math.log2(vocab_size))
    raise TooLargeError(
        f"toy {name} has V = {vocab_size}, so there are {entries} outputs of steps x (gamma + 1) = {shown(tokens)} "
        f"tokens, more than the {LARGEST_LAW:,} that can be enumerated; {advice}"
    )


def too_many_paths(cost: Cost, lengths: Sequence[int], multiply: bool) -> str | None:
    """Why steps with drafts of these lengths cannot be enumerated: they may have more than `MOST_PATHS` paths.

    ``multiply``: paths of different steps are not merged.
    """
    bits = [cost(length) for length in lengths]
    found = sum(bits) if multiply else max(bits)
    if found <= math.log2(MOST_PATHS):
        return None
    advice = "lower the draft length with --gamma" if max(lengths) > 1 else "ask for drafts with fewer nodes"
    return (
        f"there may be {power(found)} decision paths, more than the {MOST_PATHS:,.0f} that are followed; {advice}"
        + (" or lower --steps" if multiply and len(lengths) > 1 else "")
    )


def shown(number: int) -> str:
    """A number as people read it, however many digits it has."""
    return f"{number:,}" if abs(number) < 10**12 else power(math.log2(abs(number)))


def power(bits: float) -> str:
    """2 to the power of ``bits``, roughly."""
    return f"{2**bits:,.0f}" if bits < 40 else f"about 10^{bits * math.log10(2):,.0f}"
