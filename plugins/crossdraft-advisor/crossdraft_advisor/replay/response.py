"""Recorded responses, and parsers of their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import ValidationError

from crossdraft import ContractError, Sampling, UsageError, load_tokenizer, quoted
from crossdraft.commands import MOST_TOKENS, MOST_WIDTH
from crossdraft.framework import plugins
from crossdraft.models import TokenizerOf

from ..report import sampling_text

MIN_LOG_P = -100.0  # smallest log-probability of a sampled token (engines write -9999 for minus infinity)


@dataclass(frozen=True, slots=True)
class Response:
    """One recorded response."""

    id: str  # prompt id; confidence intervals are over prompts
    category: str  # group of the prompt in tables
    # prompt, tokens: token ids; ``tokens`` include the final end-of-sequence token
    prompt: Sequence[int]
    tokens: Sequence[int]
    # float64 [T], log P of each token as sampled (after temperature and truncation); None if unknown
    log_p: np.ndarray | None = None
    ended: bool = False  # the last token is an end-of-sequence token
    maximum: int | None = None  # maximum number of tokens of the request; None if unknown
    sampling: Sampling | None = None  # sampling parameters; None if unknown
    place: str = ""  # file and line, for error messages
    # tokens that the target would emit past the end, for counters of engines (`engine_counts`)
    continuation: Sequence[int] = ()

    @property
    def limit(self) -> int | None:
        """Maximum length if known; a response without an end-of-sequence token was truncated at its length."""
        return self.maximum if self.maximum is not None or self.ended else len(self.tokens)


class OptionsError(UsageError):
    """Options that do not fit any response of a file, such as a missing target."""


class UnknownTextError(UsageError):
    """A response whose generated tokens cannot be determined; the others of its file can be replayed."""


@dataclass
class ParseContext:
    """Settings and state shared by the parsers of responses."""

    target: str = ""  # model whose tokenizer encodes texts; empty if responses consist of token ids only
    sampling: Sampling | None = None  # default sampling parameters of the responses; None if unknown
    processed: bool = False  # log-probabilities in files are those after temperature and truncation
    trust_remote_code: bool = False  # allow the target's tokenizer to run custom Python code
    assumed: Counter[str] = field(default_factory=Counter)  # assumption -> number of responses that it was made for
    # why responses were skipped -> a description of the first one
    skipped: dict[str, str] = field(default_factory=dict)
    # custom_id -> request of an OpenAI batch, for responses that do not have it
    requests: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)  # keys of samples that are not to be read again
    model: str = ""  # the first model that a response names; empty if none does
    _tokenizer: TokenizerOf | None = None
    _named: dict[str, int] | None = None

    @cached_property
    def formats(self) -> list[str]:
        """Names of the formats of responses, and of those that cannot be loaded, which every row reports."""
        names = []
        for name in plugins.entries("formats"):
            with suppress(ContractError):
                if not hasattr(plugins.get("formats", name), "rows"):
                    continue
            names.append(name)
        return names

    def tokenizer(self, place: str) -> TokenizerOf:
        """Tokenizer of the target, loaded on first use. Raises UsageError without a target."""
        if self._tokenizer is None:
            if not self.target:
                raise OptionsError(
                    f"{place}: a text needs a tokenizer; set --target MODEL, not a config.json, or record token ids"
                )
            self._tokenizer = load_tokenizer(self.target, trust_remote_code=self.trust_remote_code)
        return self._tokenizer

    def named(self, names: Sequence[str], place: str) -> list[int]:
        """The tokens with these texts; empty if one is not the text of exactly one token of the vocabulary."""
        if self._named is None:
            tokenizer = self.tokenizer(place).tokenizer
            texts = [str(text) for text in tokenizer.batch_decode([[token] for token in range(len(tokenizer))])]
            counts = Counter(texts)
            self._named = {text: token for token, text in enumerate(texts) if counts[text] == 1}
        tokens = [self._named.get(name) for name in names]
        return [token for token in tokens if token is not None] if None not in tokens else []

    def skip(self, reason: str, response: str, count: int = 1) -> None:
        """Count skipped responses; ``response`` describes one of them, for a remark."""
        first = self.skipped.setdefault(reason, response)
        self.assumed[f"skipped: {reason}; the first is {first}"] += count


def token_ids(values: Any, key: str, place: str) -> list[int]:
    """Validate a list of token ids. Raises UsageError with the key."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise UsageError(f"{place}: {key!r} must be a list of integer token ids")
    if values and not 0 <= min(values) <= max(values) < MOST_WIDTH:
        invalid = min(values) if min(values) < 0 else max(values)
        raise UsageError(f"{place}: {key!r} contains {quoted(invalid)}, which is not a valid token id")
    if reason := MOST_TOKENS.violation(values):
        raise UsageError(f"{place}: {key!r} has {len(values)} tokens; {reason}")
    return values


def check_text(
    place: str, prompt: Sequence[int], tokens: Sequence[int], vocab_size: int, context_length: int | None
) -> None:
    """Raise UsageError for a text that is too long or out of vocabulary for a target, which does not read its end."""
    ids = [*prompt, *tokens]
    if not len(prompt):
        raise UsageError(f"{place}: the prompt is empty; it must have at least one token")
    if context_length is not None and len(ids) - 1 > context_length:
        raise UsageError(
            f"{place}: prompt and response have {len(ids)} tokens, but the target's context length is "
            f"{context_length}; remove this response"
        )
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        invalid = min(ids) if min(ids) < 0 else max(ids)
        raise UsageError(
            f"{place}: token {invalid} is outside of the target's vocabulary of {vocab_size}; give the target that "
            "generated the response"
        )


def log_probabilities(values: Any, key: str, count: int, place: str) -> np.ndarray:
    """Validate ``count`` log-probabilities; returns float64. Raises UsageError with the key."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int, float, type(None)}:
        raise UsageError(f"{place}: {key!r} must be a list of numbers, one per token of the response")
    if len(values) != count:
        raise UsageError(f"{place}: {key!r} has {len(values)} numbers, but the response has {count} tokens")
    result = np.array(values, dtype=np.float64)  # null, the log-probability of a token that p excludes, is NaN
    invalid = ~((result <= 1e-3) & (result >= MIN_LOG_P))
    if invalid.any():
        index = int(np.argmax(invalid))
        raise UsageError(
            f"{place}: {key!r} contains {values[index]!r} for token {index + 1}, which is not a valid natural "
            f"log-probability of a sampled token; it must lie between {MIN_LOG_P:g} and 0"
        )
    return np.minimum(result, 0.0)


def sampling_of(row: dict[str, Any], default: Sampling | None, place: str) -> Sampling | None:
    """Sampling parameters of a row, by default ``given``. Raises UsageError if the two differ."""
    fields = {key: row[key] for key in Sampling.model_fields if row.get(key) is not None}
    if fields.get("top_k") == -1:  # off, in some engines
        fields["top_k"] = 0
    if not fields:
        return default
    try:
        result = Sampling.model_validate(fields)
    except ValidationError:
        raise UsageError(f"{place}: invalid sampling parameters {', '.join(fields)}: {quoted(fields)}") from None
    if default is not None and result != default:
        raise OptionsError(
            f"{place}: sampled at {sampling_text(result)}, but the options request {sampling_text(default)}"
        )
    return result
