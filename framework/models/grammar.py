"""Constraints compiled for a tokenizer by llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from ..contracts.constraint import Constraint
from ..contracts.models import LoadedModel
from ..errors import ModelError, UsageError, first_line, printable
from ..util.extras import need

#: One JSON text has one form, the usual one of language models.
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: The error of llguidance where no token is permitted and the text is not accepted.
_DEAD_END = "NoExtensionBias"
#: Failures after which a matcher is not restored.
_MOST_FAILURES = 4
#: Stack of a compilation, which recurses along the references of a grammar.
_STACK_BYTES = 512 * 2**20
#: Tokens that a constraint leaves no choice about, at its beginning, which are tried when it is compiled.
_MOST_IMPLIED = 64
#: Characters shown of each end of a long line in a message of llguidance.
_SHOWN = 100
_stack_size = threading.Lock()
_Result = TypeVar("_Result")
#: Tokenizers in the form of llguidance, by vocabulary size.
_TOKENIZERS: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()


class TokenMatcher:
    """A `crossdraft.framework.contracts.constraint.Matcher` of llguidance.

    In llguidance, a matcher in a dead end or after a failure stays there, and a failure of the lexer is one of all
    copies of the grammar. Therefore the tokens are kept: an earlier state is restored from them, and the grammar is
    compiled again after a failure.
    """

    def __init__(self, grammar: TokenGrammar):
        self.failure: str | None = None
        self._failures = self._failed_length = 0
        self._grammar = grammar
        self._tokens: list[int] = []
        self._restore()

    @property
    def accepting(self) -> bool:
        return bool(self._run(lambda matcher: matcher.is_accepting()))

    def advance(self, token: int) -> bool:
        entered = False

        def consume(matcher: Any) -> int:
            nonlocal entered
            consumed = matcher.try_consume_tokens([token])
            entered = matcher.is_error()
            if not consumed and not entered:
                matcher.compute_bitmask()  # a failed lexer rejects tokens without an error, but not masks
            return consumed

        consumed = self._run(consume)
        if not (consumed or entered):
            return False
        if self.failure is not None:  # of the state after the token
            self._failed_length += 1
        self._tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self._tokens[len(self._tokens) - count :]
        if len(self._tokens) < self._failed_length and self._failures < _MOST_FAILURES:
            self.failure = None
        if self.failure is None and (self._matcher.is_error() or (count and not self._matcher.rollback(count))):
            self._restore()

    def permitted(self) -> np.ndarray:
        mask, size = self._run(lambda matcher: matcher.compute_bitmask()), self._grammar.vocab_size
        if mask is None:
            return np.zeros(size, dtype=bool)
        return np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=size, bitorder="little").view(bool)

    def implied(self, limit: int) -> list[int]:
        return (self._run(lambda matcher: matcher.compute_ff_tokens()) or [])[:limit]

    def _run(self, operation: Callable[[Any], _Result]) -> _Result | None:
        """The result of ``operation`` on llguidance's matcher; None in a dead end, and after a failure."""
        if self.failure is None and self._compiled is not self._grammar.compiled:
            self._restore()
        if self.failure is not None or self._matcher.is_error():
            return None
        result = operation(self._matcher)
        self._check()
        return None if self._matcher.is_error() else result

    def _restore(self) -> None:
        self._compiled = self._grammar.compiled
        self._matcher = self._compiled.deep_copy()
        for token in self._tokens:  # one at a time: the limits of llguidance apply to each call
            self._matcher.try_consume_tokens([token])
        self._check()

    def _check(self) -> None:
        error = self._matcher.get_error()
        if error and not error.startswith(_DEAD_END):
            self.failure, self._failed_length = _in_one_line(error), len(self._tokens)
            self._failures += 1
            self._grammar.renew(self._compiled)


class TokenGrammar:
    """A `crossdraft.framework.contracts.constraint.Grammar` of llguidance.

    Args:
        compile: makes a matcher of llguidance.

    Attributes:
        compiled: the matcher that others are copied from, replaced after a failure.
    """

    def __init__(self, compile: Callable[[], Any], vocab_size: int, mask_drafts: bool):
        self._compile, self.vocab_size, self.mask_drafts = compile, vocab_size, mask_drafts
        self.compiled = compile()

    def matcher(self) -> TokenMatcher:
        return TokenMatcher(self)

    def renew(self, failed: Any) -> None:
        """Compile again, unless ``failed`` has been replaced already."""
        if failed is self.compiled:
            self.compiled = self._compile()


def compile_constraint(constraint: Constraint, target: LoadedModel, vocab_size: int) -> TokenGrammar:
    """Compile ``constraint`` for the tokens of ``target``, whose logits have ``vocab_size`` entries.

    Raises:
        UsageError: llguidance is not installed, or the constraint is not valid, not supported or permits no text.
        ModelError: the target has no tokenizer of the `tokenizers` library, or no end-of-sequence token.
    """
    need("a constraint", "constrain", "llguidance")
    from llguidance import LLMatcher, LLParserLimits

    tokenizer, limits = _tokenizer(target, vocab_size), LLParserLimits(verbose_errors=False)
    source = llguidance_source(constraint)

    def compiled() -> Any:
        return _with_deep_stack(lambda: LLMatcher(tokenizer, source, log_level=0, limits=limits))

    grammar = TokenGrammar(compiled, vocab_size, constraint.mask_drafts)
    if problem := grammar.compiled.get_error():
        raise _not_compiled(constraint, problem)
    matcher = grammar.matcher()
    while (implied := matcher.implied(_MOST_IMPLIED)) and all(map(matcher.advance, implied)):
        if len(implied) == _MOST_IMPLIED:
            break
    if not matcher.accepting and not matcher.permitted().any():
        reason = matcher.failure or f"no text matches it that the tokens of {target.name} can spell"
        raise UsageError(f"the constraint's {constraint.kind} permits no response: {reason}; correct it")
    return grammar


def _with_deep_stack(function: Callable[[], _Result]) -> _Result:
    """Call ``function`` in a thread with a stack of `_STACK_BYTES`: an overflow would end the process."""
    with ThreadPoolExecutor(1) as pool:
        with _stack_size:
            before = threading.stack_size(_STACK_BYTES)
            try:
                result = pool.submit(function)
            finally:
                threading.stack_size(before)
        return result.result()


def _in_one_line(message: str) -> str:
    """A message of llguidance in one line; of its long lines, which quote the constraint, both ends."""
    lines = [printable(line.strip()) for line in message.replace("<non-verbose/>", "").splitlines()]
    lines = [line if len(line) <= 2 * _SHOWN else f"{line[:_SHOWN]} … {line[-_SHOWN:]}" for line in lines]
    return " ".join(line for line in lines if line.strip(" ^"))


def llguidance_source(constraint: Constraint) -> str:
    """The grammar as llguidance reads it. Raises UsageError if a schema has a value that llguidance cannot read."""
    from llguidance import LLMatcher

    if (schema := constraint.json_schema) is not None:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        try:
            return LLMatcher.grammar_from_json_schema({} if schema is True else schema, defaults=_JSON)
        except ValueError as error:
            raise _not_compiled(constraint, first_line(error)) from None
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    if constraint.grammar is not None:
        return LLMatcher.grammar_from_lark(constraint.grammar)
    # Not alternatives of a grammar: llguidance limits their number, and follows each of them.
    return LLMatcher.grammar_from_regex("|".join(map(_literal, constraint.choice or ())))


def _not_compiled(constraint: Constraint, problem: str) -> UsageError:
    return UsageError(f"the constraint's {constraint.kind} cannot be compiled: {_in_one_line(problem)}; correct it")


def _literal(text: str) -> str:
    """A regular expression that matches ``text`` only."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _tokenizer(target: LoadedModel, vocab_size: int) -> Any:
    """The target's tokenizer in the form of llguidance, which takes half a second to make and is kept."""
    from llguidance import LLTokenizer

    kept = _TOKENIZERS.setdefault(target.tokenizer, {}) if target.tokenizer is not None else {}
    if vocab_size not in kept:
        text = serialized_tokenizer(target, vocab_size)
        try:
            kept[vocab_size] = LLTokenizer(text["tokenizer"], n_vocab=text["vocab_size"], eos_token=text["eos"])
        except ValueError as error:
            reason = f"llguidance cannot read the tokenizer of {target.name}: {first_line(error)}"
            raise ModelError(f"{reason}; use a target with a byte-level or byte-fallback tokenizer") from None
    return kept[vocab_size]


def serialized_tokenizer(target: LoadedModel, vocab_size: int) -> dict[str, Any]:
    """The tokenizer as JSON, its vocabulary size and its end-of-sequence ids. Raises ModelError without a fast one."""
    tokenizer = target.tokenizer
    if tokenizer is None or not hasattr(tokenizer, "backend_tokenizer"):
        raise ModelError(f"a constraint needs a fast tokenizer, and {target.name} has none; use another target")
    if not target.eos_token_ids:
        raise ModelError(f"a constraint ends with an end-of-sequence token, and {target.name} has none")
    text = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    size = max(vocab_size, len(tokenizer))
    return {"tokenizer": json.dumps(text), "vocab_size": size, "eos": list(target.eos_token_ids)}
