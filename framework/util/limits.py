"""The most of everything that a file or an option may ask for, checked before anything of that size is made.

Each `Limit` is a number that says what more would cost, so that a refusal can tell. They are far beyond what is useful:
who meets one has mistyped, or been handed a hostile file.
"""

from __future__ import annotations

from collections.abc import Sized


class Limit(int):
    """The most there may be of something, and what more of it would cost (``why``, for people)."""

    why: str

    def __new__(cls, most: int, why: str) -> Limit:
        limit = super().__new__(cls, most)
        limit.why = why
        return limit

    def refusal(self, n: int | Sized) -> str | None:
        """``"the most is <limit>: <why>"`` where ``n``, or its length, is more; else None."""
        n = n if isinstance(n, int) else len(n)
        return f"the most is {int(self)}: {self.why}" if n > self else None


# -- a step ---------------------------------------------------------------------------------------------------

MOST_NODES = Limit(4096, "the target evaluates every node of a draft in every step")
MOST_LEVELS = Limit(1024, "the work of every step grows with it")
MOST_SIBLINGS = Limit(256, "every one of them is a row of the drafter's own passes")

# -- a run -----------------------------------------------------------------------------------------------------

MOST_CELLS = Limit(10_000, "each of them is measured on every prompt")
MOST_LISTED = Limit(1000, "every drafter meets every verifier")
MOST_EXCLUDED = Limit(200, "every cell is compared with each of them")
MOST_ROWS = Limit(65_536, "every row of a batch has a cache of its own")
MOST_TOKENS = Limit(2**20, "every token of every row has its place in the cache")
#: Most tokens of a prefill pass, padding counted, where nobody says otherwise: ``prefill_tokens`` wherever it is said.
PREFILL_TOKENS = 1024
MOST_PROMPTS = Limit(50_000, "every cell answers each of them")
MOST_SEED = Limit(2**64 - 1, "the random numbers are keyed by 64 bits")
MOST_REPEATS = Limit(1000, "each is a pass at every point")
MOST_POINTS = Limit(10_000, "each of them is measured")
MOST_BYTES = Limit(16, "no number of a model takes more")
MOST_DEVICES = Limit(65_536, "no model is spread over more")

# -- a replay --------------------------------------------------------------------------------------------------

MOST_REPLAYED = Limit(64, "a draft of that length is followed from every token of every response")
MOST_SEQUENCES = Limit(64, "the work of every token grows with its square")

# -- a model ---------------------------------------------------------------------------------------------------

MOST_LAYERS = Limit(1024, "each is built before any weight is read")
MOST_WIDTH = Limit(2**24, "it is the side of a matrix")

# -- a file ----------------------------------------------------------------------------------------------------

MOST_NESTING = Limit(64, "what reads it goes down level by level")
MOST_VALUES = Limit(30_000, "each of them is checked")
MOST_DIGITS = Limit(40, "no key takes a number that long")
MOST_NAME = Limit(200, "tables and directories are to show it")
TABLE_BYTES = Limit(2**33, "its rows are held in memory")
SETTINGS_BYTES = Limit(512 * 2**20, "a library reads it whole")
RECIPE_BYTES = Limit(2**20, "a recipe is read whole")
CONFIG_BYTES = Limit(10 * 2**20, "it is read whole")
INDEX_BYTES = Limit(100 * 2**20, "it is read whole")
PROMPT_FILE_BYTES = Limit(2**30, "its prompts are held in memory")
RESPONSE_FILE_BYTES = Limit(2**38, "reading it takes hours")
METRICS_BYTES = Limit(256 * 2**20, "it is held in memory; keep the lines that speak of drafts")
LINE_BYTES = Limit(10 * 2**20, "a line is a prompt, and is read whole")
BODY_BYTES = Limit(10 * 2**20, "the body of a request is held in memory")
