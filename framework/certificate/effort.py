"""Cost of an enumeration, estimated in advance so that infeasible ones are rejected.

All counts are base-2 logarithms, because the requested numbers may be astronomically large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..contracts.draft_kind import INDEPENDENT_SEQUENCES
from ..errors import UsageError

if TYPE_CHECKING:
    from ..contracts.drafter import DraftTraits

#: Draft length -> log2 of the decision paths of a step.
Cost = Callable[[int], float]

#: Maximum entries of the joint distribution of outputs, and maximum output length if V = 1.
MAX_JOINT_ENTRIES = 20_000_000
MAX_OUTPUT_LEN = 64
#: Maximum decision paths of a pair with explicit lengths, and by default.
MOST_PATHS = 2.0**25
DEFAULT_PATHS = 2.0**20
#: Default maximum if every path is replayed from its start, and if each path needs its own drafter.
DEFAULT_REPLAYED, DEFAULT_UNBATCHED = 2.0**18, 2.0**12
#: Default draft length of later steps, before the first step is lengthened.
LATER_STEP_LEN = 2


class TooLargeError(UsageError):
    """An enumeration with too many paths, drafts or variables."""


def drawn_nodes(traits: DraftTraits, vocab_size: int, depth: int) -> float:
    """Maximum number of sampled nodes of a draft truncated at ``depth``; 0 for point masses."""
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
    """Upper bound on log2 of the decision paths of one step: each drafted node, and one verifier decision per level."""
    return (drawn_nodes(traits, vocab_size, depth) + min(depth, traits.depth) + 1) * math.log2(vocab_size)


def draft_length(cost: Cost, longest: int, maximum: float) -> int | None:
    """Largest draft length up to ``longest`` with at most ``maximum`` paths per step; ``None`` if 0 exceeds them."""
    fit = [n for n in range(min(longest, MAX_OUTPUT_LEN) + 1) if cost(n) <= math.log2(maximum)]
    return max(fit, default=None)


def draft_lengths(cost: Cost, longest: int, steps: int, maximum: float) -> list[int] | None:
    """Draft length of each step if the paths of steps multiply, with at most ``maximum`` paths in total.

    Later steps first get `LATER_STEP_LEN` tokens (or as many as fit), then the first step as many as fit, and so on.
    ``None`` if drafts of one token exceed the limit.
    """
    available = math.log2(maximum) + 1e-9
    fitting = (n for n in range(min(LATER_STEP_LEN, longest), min(1, longest) - 1, -1) if cost(n) * steps <= available)
    if (minimum := next(fitting, None)) is None:
        return None
    lengths = []
    for left in range(steps - 1, -1, -1):
        budget = available - cost(minimum) * left  # later steps get at least this length
        lengths.append(max(n for n in range(min(longest, MAX_OUTPUT_LEN) + 1) if cost(n) <= budget))
        available -= cost(lengths[-1])
    return lengths


def unmerged_lengths(
    remembers: bool, traits: DraftTraits, vocab_size: int, longest: int, steps: int, maximum: float = DEFAULT_REPLAYED
) -> list[int] | None:
    """:func:`draft_lengths` with one drafter for all steps of a path.

    ``remembers``: the drafter remembers earlier sequences (`Drafter.remembers`), so each path needs its own drafter.
    """
    if remembers:
        maximum = min(maximum, DEFAULT_UNBATCHED)
    return draft_lengths(lambda n: paths(traits, vocab_size, n), longest, steps, maximum)


def check_joint_size(name: str, vocab_size: int, steps: int, gamma: int) -> None:
    """Raise UsageError if the joint distribution of ``steps`` steps on the toy ``name`` is too large for a table."""
    tokens = steps * (gamma + 1)
    advice = (
        f"lower --steps (now {number_text(steps)})"
        if steps > 1
        else f"lower the draft length with --gamma (now {number_text(gamma)})"
    )
    if vocab_size == 1 and tokens > MAX_OUTPUT_LEN:
        raise TooLargeError(
            f"toy {name}: outputs of steps x (gamma + 1) = {number_text(tokens)} tokens exceed the maximum of "
            f"{MAX_OUTPUT_LEN}; {advice}"
        )
    if tokens <= MAX_OUTPUT_LEN and tokens * math.log(vocab_size) <= math.log(MAX_JOINT_ENTRIES):
        return
    huge = tokens > 10**12
    exact = f"{vocab_size} to the power of {number_text(tokens)}"
    entries = exact if huge else power(tokens * math.log2(vocab_size))
    raise TooLargeError(
        f"toy {name} with V = {vocab_size} has {entries} outputs of steps x (gamma + 1) = "
        f"{number_text(tokens)} tokens, more than the maximum of {MAX_JOINT_ENTRIES:,}; {advice}"
    )


def too_many_paths(cost: Cost, lengths: Sequence[int], multiply: bool) -> str | None:
    """Return an error message if steps with these draft lengths may have more than `MOST_PATHS` paths, else None.

    ``multiply``: paths of different steps are not merged.
    """
    bits = [cost(length) for length in lengths]
    total = sum(bits) if multiply else max(bits)
    if total <= math.log2(MOST_PATHS):
        return None
    advice = "lower the draft length with --gamma" if max(lengths) > 1 else "use drafts with fewer nodes"
    return f"there may be {power(total)} decision paths, more than the maximum of {MOST_PATHS:,.0f}; {advice}" + (
        " or lower --steps" if multiply and len(lengths) > 1 else ""
    )


def number_text(number: int) -> str:
    """Format a number, abbreviated if it has more than 12 digits."""
    return f"{number:,}" if abs(number) < 10**12 else power(math.log2(abs(number)))


def power(bits: float) -> str:
    """Format 2 to the power of ``bits``."""
    return f"{2**bits:,.0f}" if bits < 40 else f"about 10^{bits * math.log10(2):,.0f}"
