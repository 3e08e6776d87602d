"""Upper limits on the values of files and options, checked before anything of that size is allocated.

They are far beyond useful values: exceeding one is a typing error or a hostile file. Each `Limit` has a reason for the
error message.
"""

from __future__ import annotations

from collections.abc import Sized


class Limit(int):
    """A maximum, and the reason for it (``why``, for error messages)."""

    why: str

    def __new__(cls, maximum: int, why: str) -> Limit:
        limit = super().__new__(cls, maximum)
        limit.why = why
        return limit

    def violation(self, n: int | Sized) -> str | None:
        """``"the maximum is <limit>: <why>"`` if ``n``, or its length, exceeds the limit; else None."""
        n = n if isinstance(n, int) else len(n)
        return f"the maximum is {int(self)}: {self.why}" if n > self else None


# -- a step ---------------------------------------------------------------------------------------------------

MOST_NODES = Limit(4096, "the target evaluates every node of a draft in every step")
MOST_LEVELS = Limit(1024, "the work of every step grows with it")
MOST_SIBLINGS = Limit(256, "each is a row in the drafter's passes")

# -- a run -----------------------------------------------------------------------------------------------------

MOST_CELLS = Limit(10_000, "each is measured on every prompt")
MOST_LISTED = Limit(1000, "every drafter is combined with every verifier")
MOST_EXCLUDED = Limit(200, "every cell is compared with each")
MOST_ROWS = Limit(65_536, "every row of a batch has its own cache")
MOST_TOKENS = Limit(2**20, "every token of every row takes a slot of the cache")
#: Default of ``prefill_tokens``: maximum tokens of a prefill pass, padding included.
PREFILL_TOKENS = 1024
MOST_PROMPTS = Limit(50_000, "every cell decodes each of them")
MOST_SEED = Limit(2**64 - 1, "the random numbers are keyed by 64 bits")
MOST_REPEATS = Limit(1000, "each is a pass at every point")
MOST_POINTS = Limit(10_000, "each of them is measured")

# -- a constraint ----------------------------------------------------------------------------------------------

CONSTRAINT_BYTES = Limit(256 * 2**10, "the time to compile it grows with its square")
MOST_CHOICES = Limit(20_000, "all of them are compiled into one automaton")

# -- a model ---------------------------------------------------------------------------------------------------

MOST_LAYERS = Limit(1024, "each is built before any weight is read")
MOST_WIDTH = Limit(2**24, "it is a dimension of a matrix")

# -- a file ----------------------------------------------------------------------------------------------------

MOST_NESTING = Limit(64, "nested values are parsed recursively")
MOST_VALUES = Limit(30_000, "each is checked")
MOST_DIGITS = Limit(40, "keys do not take longer numbers")
MOST_PATTERN = Limit(2000, "a regular expression is parsed recursively")
MOST_NAME = Limit(200, "tables and directories contain it")
TABLE_BYTES = Limit(2**33, "its rows are kept in memory")
SETTINGS_BYTES = Limit(512 * 2**20, "a library reads all of it into memory")
RECIPE_BYTES = Limit(2**20, "a recipe is read into memory")
CONFIG_BYTES = Limit(10 * 2**20, "it is read into memory")
INDEX_BYTES = Limit(100 * 2**20, "it is read into memory")
PROMPT_FILE_BYTES = Limit(2**30, "its prompts are kept in memory")
RESPONSE_FILE_BYTES = Limit(2**38, "reading it takes hours")
LINE_BYTES = Limit(10 * 2**20, "a line is a prompt, and is read into memory")
