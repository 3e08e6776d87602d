"""Constraints compiled for a tokenizer by llguidance."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..contracts.constraint import KINDS, Constraint
from ..contracts.models import LoadedModel
from ..errors import ModelError, UsageError, first_line
from ..util.extras import need

#: One JSON text has one form, the usual one of language models.
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: Tokenizers in the form of llguidance, by vocabulary size.
_TOKENIZERS: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()


class TokenMatcher:
    """A `crossdraft.framework.contracts.constraint.Matcher` of llguidance."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher, self._vocab_size = matcher, vocab_size

    @property
    def accepting(self) -> bool:
        return self._matcher.is_accepting()

    def advance(self, token: int) -> bool:
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            raise ModelError(f"llguidance cannot roll back {count} tokens: {self._matcher.get_error()}")

    def permitted(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(bool)

    def implied(self, limit: int) -> list[int]:
        return self._matcher.compute_ff_tokens()[:limit]


class TokenGrammar:
    """A `crossdraft.framework.contracts.constraint.Grammar` of llguidance."""

    def __init__(self, matcher: Any, vocab_size: int, mask_drafts: bool):
        self._matcher, self._vocab_size, self.mask_drafts = matcher, vocab_size, mask_drafts

    def matcher(self) -> TokenMatcher:
        return TokenMatcher(self._matcher.deep_copy(), self._vocab_size)


def compile_constraint(constraint: Constraint, target: LoadedModel, vocab_size: int) -> TokenGrammar:
    """Compile ``constraint`` for the tokens of ``target``, whose logits have ``vocab_size`` entries.

    Raises:
        UsageError: llguidance is not installed, or the constraint is not valid or not supported.
        ModelError: the target has no tokenizer of the `tokenizers` library, or no end-of-sequence token.
    """
    need("a constraint", "constrain", "llguidance")
    from llguidance import LLMatcher

    kind = next(kind for kind in KINDS if getattr(constraint, kind) is not None)
    try:
        text = _source(constraint)
        matcher = LLMatcher(_tokenizer(target, vocab_size), text, log_level=0)
        problem = matcher.get_error()
    except ValueError as error:
        problem = first_line(error)
    if problem:
        lines = " ".join(line.strip() for line in problem.strip().splitlines() if line.strip(" ^\t\n"))
        raise UsageError(f"the constraint's {kind} cannot be compiled: {lines[:300]}; correct it")
    return TokenGrammar(matcher, vocab_size, constraint.mask_drafts)


def _source(constraint: Constraint) -> str:
    """The grammar as llguidance reads it."""
    from llguidance import LLMatcher

    if (schema := constraint.json_schema) is not None:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        return LLMatcher.grammar_from_json_schema({} if schema is True else schema, defaults=_JSON)
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    if constraint.grammar is not None:
        return LLMatcher.grammar_from_lark(constraint.grammar)
    texts = " | ".join(json.dumps(text) for text in constraint.choice or ())
    return LLMatcher.grammar_from_lark(f"start: {texts}")


def _tokenizer(target: LoadedModel, vocab_size: int) -> Any:
    """The target's tokenizer in the form of llguidance, which takes half a second to make and is kept."""
    from llguidance import hf

    tokenizer = target.tokenizer
    if tokenizer is None or not hasattr(tokenizer, "backend_tokenizer"):
        raise ModelError(f"a constraint needs a fast tokenizer, and {target.name} has none; use another target")
    if not target.eos_token_ids:
        raise ModelError(f"a constraint ends with an end-of-sequence token, and {target.name} has none")
    kept = _TOKENIZERS.setdefault(tokenizer, {})
    if vocab_size not in kept:
        size = max(vocab_size, len(tokenizer))
        try:
            kept[vocab_size] = hf.from_tokenizer(tokenizer, n_vocab=size, eos_token=list(target.eos_token_ids))
        except ValueError as error:
            reason = f"llguidance cannot read the tokenizer of {target.name}: {first_line(error)}"
            raise ModelError(f"{reason}; use a target with a byte-level or byte-fallback tokenizer") from None
    return kept[vocab_size]
