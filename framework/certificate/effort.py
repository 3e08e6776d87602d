"""How much there is to enumerate: known before anything is built, so that what would never end is refused.

All counts are logarithms to base 2, because what somebody asks for may have a billion digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..contracts.drafter import DraftTraits
from ..contracts.errors import UsageError

#: The joint law of an output is held as one table: most entries it may have, and most tokens, if V = 1.
LARGEST_LAW = 20_000_000
LONGEST = 64
#: Decision paths of a pair: most that are followed because somebody asked for them, and by default.
MOST_PATHS = 2.0**25
DEFAULT_PATHS = 2.0**20
#: The same where every path is replayed from its start; by default, and if each needs a drafter of its own.
DEFAULT_REPLAYED, DEFAULT_ALONE = 2.0**18, 2.0**12
#: A later round is by default as long as this at least, before an earlier one is longer.
SECOND = 2


class TooLargeError(UsageError):
    """More paths, drafts or variables than can be handled."""


def drawn_nodes(traits: DraftTraits, vocab_size: int, depth: int) -> float:
    """Most nodes that are drawn for a draft cut at ``depth``; none of a point mass."""
    if traits.point_mass or traits.drawn is None or not depth:
        return 0.0
    if traits.branching is not None:
        nodes, level = 0.0, 1.0
        for children in traits.branching[:depth]:
            level *= min(children, vocab_size)
            nodes += level
        return nodes
    deepest = max(traits.depth, 1)
    if traits.drawn in ("chain", "iid"):  # all levels are equally wide
        return float(traits.nodes) * min(depth, deepest) / deepest
    return float(traits.nodes)


def paths(traits: DraftTraits, vocab_size: int, depth: int) -> float:
    """log2 of the decision paths of one round, at most: every drafted node, and a decision of the rule a level."""
    return (drawn_nodes(traits, vocab_size, depth) + min(depth, traits.depth) + 1) * math.log2(vocab_size)


def draft_length(traits: DraftTraits, vocab_size: int, longest: int, most: float) -> int | None:
    """The longest draft length up to ``longest`` of which a round has at most ``most`` paths."""
    fit = [n for n in range(min(longest, LONGEST) + 1) if paths(traits, vocab_size, n) <= math.log2(most)]
    return max(fit, default=None)


def draft_lengths(traits: DraftTraits, vocab_size: int, longest: int, rounds: int, most: float) -> list[int] | None:
    """A draft length for each round where the paths of rounds multiply, as long as ``most`` paths allow.

    Later rounds first get `SECOND` tokens (or what fits), then the first one as many as fit, and so on. ``None`` = not
    even drafts of one token fit.
    """
    room = math.log2(most)
    for least in range(min(SECOND, longest), min(1, longest) - 1, -1):
        reserved = paths(traits, vocab_size, least)
        if reserved * rounds <= room + 1e-9:
            break
    else:
        return None
    found = []
    for left in range(rounds - 1, -1, -1):
        length = draft_length(traits, vocab_size, longest, 2 ** (room - reserved * left + 1e-9))
        assert length is not None
        found.append(length)
        room -= paths(traits, vocab_size, length)
    return found


def check_law(name: str, vocab_size: int, rounds: int, gamma: int) -> None:
    """Raise UsageError if the law of ``rounds`` rounds on the toy ``name`` is no table of a size that can be held."""
    tokens = rounds * (gamma + 1)
    advice = f"lower --rounds (now {shown(rounds)})" if rounds > 1 else f"lower the draft length with --gamma (now {shown(gamma)})"
    if tokens > LONGEST and vocab_size == 1:
        raise TooLargeError(
            f"toy {name} has V = 1, so there is nothing to find out in outputs of {shown(tokens)} tokens, more than "
            f"{LONGEST}; {advice}"
        )
    if tokens > 10**15 or tokens * math.log(vocab_size) > math.log(LARGEST_LAW):
        entries = f"{vocab_size}^{shown(tokens)}" if tokens > 100 else shown(vocab_size**tokens)
        raise TooLargeError(
            f"toy {name} has V = {vocab_size}, so there are {entries} outputs of rounds x (gamma + 1) = "
            f"{shown(tokens)} tokens, more than the {LARGEST_LAW:,} that can be enumerated; {advice}"
        )


def check_paths(what: str, traits: DraftTraits, vocab_size: int, lengths: Sequence[int], multiply: bool) -> None:
    """Raise TooLargeError if rounds with drafts of these lengths may have more than `MOST_PATHS` paths.

    ``what`` is a toy and a drafter; ``multiply``: no paths are merged between rounds.
    """
    bits = [paths(traits, vocab_size, length) for length in lengths]
    found = sum(bits) if multiply else max(bits, default=0.0)
    if found > math.log2(MOST_PATHS):
        raise TooLargeError(
            f"{what}: there may be {power(found)} decision paths, more than the {MOST_PATHS:,.0f} that are followed; "
            "lower the draft length with --gamma" + (" or --rounds" if len(lengths) > 1 else "")
        )


def shown(number: int) -> str:
    """A number as people read it, however many digits it has."""
    return f"{number:,}" if number < 10**12 else power(math.log2(number))


def power(bits: float) -> str:
    """2 to the power of ``bits``, roughly."""
    return f"{2**bits:,.0f}" if bits < 40 else f"about 10^{bits * math.log10(2):,.0f}"
