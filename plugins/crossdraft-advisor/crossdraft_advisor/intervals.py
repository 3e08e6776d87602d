"""Plans of 95 % intervals over independent pieces."""

from scipy import stats

from crossdraft.framework.metrics.intervals import FREEDOM
from crossdraft.runs import CONFIDENCE


def pieces_needed(half: float, target: float, pieces: int) -> float:
    """Estimate the number of pieces for an interval of half width ``target``.

    The standard error falls with the square root of the number of pieces; Student's quantile falls to the normal one.

    Args:
        half: half width over ``pieces`` pieces of similar weight.
    """
    upper = (1 + CONFIDENCE) / 2
    quantile = float(stats.t.ppf(upper, max(FREEDOM * pieces, 1.0)) / stats.norm.ppf(upper))
    return pieces * (half / quantile / target) ** 2
