"""One recorded response, and the values of a row that are made into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from ..contracts.sampling import Sampling
from ..errors import UsageError, quoted
from ..models.tokenizer import TokenizerOf, load_tokenizer
from ..util.limits import MOST_TOKENS, MOST_WIDTH

#: A log-probability below this is no drawn token's (engines write -9999 for minus infinity).
LEAST = -100.0


@dataclass(frozen=True, slots=True)
class Response:
    """One recorded response.

    Attributes:
        id: of its prompt: intervals are over prompts.
        category: what results are grouped by.
        prompt, tokens: token ids; the response's own include the end-of-sequence token that ended it.
        log_p: float64 [T], log P of each token as the target samples, None where that is not known.
        ended: its last token is an end-of-sequence token.
        most: most tokens that it could have had, None where that is not known.
        sampling: what it was sampled with, None where that is not known.
        where: it stands, for sentences.
    """

    id: str
    category: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    log_p: np.ndarray | None = None
    ended: bool = False
    most: int | None = None
    sampling: Sampling | None = None
    where: str = ""

    @property
    def limit(self) -> int | None:
        """Most tokens that it could have had, as far as is known: one that did not end by itself was cut."""
        return self.most if self.most is not None or self.ended else len(self.tokens)


@dataclass
class Reading:
    """What is known while responses are read.

    Attributes:
        target: whose tokenizer turns texts into token ids; empty = no text may have to be.
        sampling: what responses that do not say were sampled with; None = that is not known.
        processed: log-probabilities of a file are of the law that was sampled from, after temperature and truncation.
        trust_remote_code: let the target's tokenizer run Python code of its own.
        assumed: what was taken for granted, and of how many responses.
    """

    target: str = ""
    sampling: Sampling | None = None
    processed: bool = False
    trust_remote_code: bool = False
    assumed: Counter[str] = field(default_factory=Counter)
    _tokenizer: TokenizerOf | None = None

    def tokenizer(self, where: str) -> TokenizerOf:
        """The target's, loaded when a text first needs it."""
        if self._tokenizer is None:
            if not self.target:
                raise UsageError(
                    f"{where}: it holds text, not token ids; name the model whose tokenizer it takes: --target MODEL"
                )
            self._tokenizer = load_tokenizer(self.target, trust_remote_code=self.trust_remote_code)
        return self._tokenizer


def described(sampling: Sampling) -> str:
    """Sampling parameters for people."""
    given = sampling.model_dump(exclude_defaults=True) | {"temperature": sampling.temperature}
    return ", ".join(f"{key} {value:g}" for key, value in sorted(given.items(), reverse=True))


# -- values of a row -------------------------------------------------------------------------------------------


def token_ids(values: Any, key: str, where: str) -> list[int]:
    """A list of token ids. Raises UsageError naming the key."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise UsageError(f"{where}: {key!r} must be a list of token ids, whole numbers")
    if values and not 0 <= min(values) <= max(values) < MOST_WIDTH:
        strange = min(values) if min(values) < 0 else max(values)
        raise UsageError(f"{where}: {key!r} holds {quoted(strange)}, which is no token id")
    if reason := MOST_TOKENS.refusal(values):
        raise UsageError(f"{where}: {key!r} has {len(values)} tokens; {reason}")
    return values


def log_probabilities(values: Any, key: str, count: int, where: str) -> np.ndarray:
    """``count`` log-probabilities as float64. Raises UsageError naming the key."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float}:
        raise UsageError(f"{where}: {key!r} must be a list of numbers, one for each token of the response")
    if len(values) != count:
        raise UsageError(f"{where}: {key!r} has {len(values)} numbers, but the response has {count} tokens")
    found = np.array(values, dtype=np.float64)
    wrong = ~((found <= 1e-3) & (found >= LEAST))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise UsageError(
            f"{where}: {key!r} holds {values[at]!r} for token {at + 1}, which is no logarithm (base e) of the "
            "probability of a token that was drawn"
        )
    return np.minimum(found, 0.0)


def sampling_of(row: dict[str, Any], given: Sampling | None, where: str) -> Sampling | None:
    """What a row says that it was sampled with, or what was ``given``. Raises UsageError where the two differ."""
    said = {key: row[key] for key in Sampling.model_fields if row.get(key) is not None}
    if said.get("top_k") == -1:  # off, in some engines
        said["top_k"] = 0
    if not said:
        return given
    try:
        found = Sampling.model_validate(said)
    except ValidationError:
        raise UsageError(f"{where}: {', '.join(said)} are no sampling parameters: {quoted(said)}") from None
    if given is not None and found != given:
        raise UsageError(f"{where}: it was sampled at {described(found)}, not at {described(given)} as asked for")
    return found
