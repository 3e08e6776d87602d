"""Arguments of `generate` and `stream`: options, conversions and checks."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from pydantic import ValidationError

from ..contracts.constraint import Constraint, checked_constraint
from ..contracts.models import LoadedModel
from ..contracts.options import fault
from ..contracts.sampling import Sampling
from ..contracts.steps import StepEvent
from ..engine.logits_processors import LogitsProcessors, Processor
from ..errors import CrossdraftError, UsageError, quoted
from ..models.chat import encode
from ..util.limits import PREFILL_TOKENS
from .build import StrategyLike, configured

P = ParamSpec("P")
T = TypeVar("T")
Options = TypeVar("Options")
#: A constraint, a mapping of its fields, or None.
ConstraintLike = Constraint | Mapping[str, Any] | None


class UnexpectedArgumentError(UsageError, TypeError):
    """Unknown keyword argument; a TypeError, as Python's own."""


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Keyword arguments of `stream`; `generate` documents them."""

    drafter: StrategyLike = "prompt-lookup"
    verifier: StrategyLike | None = None
    max_new_tokens: int | Sequence[int] = 128
    temperature: float | Sequence[float] = 1.0
    top_k: int | Sequence[int] = 0
    top_p: float | Sequence[float] = 1.0
    min_p: float | Sequence[float] = 0.0
    batch_size: int = 8
    seed: int = 0
    chat: bool | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    constraint: ConstraintLike | Sequence[ConstraintLike] = None
    logits_processor: Sequence[Processor] = ()
    prefill_tokens: int = PREFILL_TOKENS
    on_step: Callable[[StepEvent], None] | None = None

    def checked(self) -> Self:
        """The options with integers and ``stop`` in one form. Raises UsageError for a value of another kind."""
        checked_processors(self.logits_processor)
        if self.chat is not None and not isinstance(self.chat, bool):
            raise UsageError(f"chat={self.chat!r} must be True, False, or None for the tokenizer's default")
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        if self.ignore_eos and self.constraint is not None:
            raise UsageError(
                "ignore_eos=True, but a constraint ends with an end-of-sequence token; leave one of them out"
            )
        if self.on_step is not None and not callable(self.on_step):
            raise UsageError(f"on_step={self.on_step!r} must be a function of a StepEvent")
        return replace(
            self,
            batch_size=as_int("batch_size", self.batch_size, 1),
            seed=as_int("seed", self.seed),
            stop=stop_strings(self.stop),
            prefill_tokens=as_int("prefill_tokens", self.prefill_tokens, 0),
        )

    def samplings(self, inputs: int) -> list[Sampling]:
        """The sampling parameters of each input; those that are lists have one value per input."""
        values = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        each = {name: per_input(name, value, inputs, lambda _, number: number) for name, value in values.items()}
        if inputs:
            return [checked_sampling(**{name: each[name][i] for name in each}) for i in range(inputs)]
        return [checked_sampling(**{name: value for name, value in values.items() if not _is_list(value)})]

    def constraints(self, inputs: int) -> list[Constraint | None]:
        """The constraint of each input."""
        return per_input("constraint", self.constraint, inputs, lambda name, value: checked_constraint(value, name))

    def limits(self, inputs: int) -> list[int]:
        """``max_new_tokens`` of each input."""
        return per_input("max_new_tokens", self.max_new_tokens, inputs, lambda name, value: as_int(name, value, 1))


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(StreamOptions):
    """Keyword arguments of `generate`, which documents them."""

    streamer: Any = None


Model = str | LoadedModel
Inputs = str | Sequence[str] | Sequence[Sequence[int]]


def keywords_of(
    options: Callable[P, Options],
) -> Callable[[Callable[[Model, Inputs, Options], T]], Callable[Concatenate[Model, Inputs, P], T]]:
    """Let a function of (model, inputs, options) take the fields of a dataclass of ``options`` as keyword arguments.

    Its signature lists them. An unknown keyword raises `UnexpectedArgumentError`, which names its place: options
    of a drafter or verifier are often passed to the function instead.
    """

    def decorate(function: Callable[[Model, Inputs, Options], T]) -> Callable[Concatenate[Model, Inputs, P], T]:
        own = inspect.signature(function)
        keywords = inspect.signature(options).parameters
        parameters = [*list(own.parameters.values())[:2], *keywords.values()]

        @wraps(function)
        def call(model: Model, inputs: Inputs, *args: P.args, **kwargs: P.kwargs) -> T:
            for name, value in kwargs.items():
                if name not in keywords:
                    names = [parameter.name for parameter in parameters]
                    raise UnexpectedArgumentError(_unexpected(function.__name__, name, value, kwargs, names))
            return function(model, inputs, options(*args, **kwargs))

        call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def _unexpected(function: str, name: str, value: Any, keywords: Mapping[str, Any], names: Sequence[str]) -> str:
    for kind in ("drafter", "verifier"):
        strategy = keywords.get(kind) or ("prompt-lookup" if kind == "drafter" else None)
        try:
            cls, _ = configured(f"{kind}s", strategy) if strategy is not None else (None, None)
        except CrossdraftError:  # reported by the function itself once the keyword is gone
            continue
        if cls is not None and name in cls.Config.model_fields:
            place = f'{kind}={{"name": {cls.name!r}, {name!r}: {quoted(value)}}}'.replace("'", '"')
            return f"{function}() has no argument {name!r}; it is an option of the {kind}: {place}"
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"its arguments are {', '.join(names)}"
    return f"{function}() has no argument {name!r}; {hint}"


def check_text(name: str, text: str) -> None:
    """Raise UsageError for an empty text as a prompt, with or without a chat template."""
    if not text:
        raise UsageError(f"{name} is an empty text; give at least one character")


def checked_sampling(**parameters: Any) -> Sampling:
    """Validate sampling parameters; UsageError names the first invalid one."""
    try:
        return Sampling(**parameters)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}={first['input']!r} is not valid: {fault(first)}") from None


def as_int(name: str, value: Any, minimum: int | None = None) -> int:
    """Convert an argument of any integer type; UsageError if it is not an integer of at least ``minimum``."""
    integer = _index(value)
    if integer is None or (minimum is not None and integer < minimum):
        raise UsageError(f"{name}={value!r} must be an integer{'' if minimum is None else f' of at least {minimum}'}")
    return integer


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Convert the argument ``stop`` to a tuple; UsageError if it is not a string or a list of strings."""
    strings: tuple[Any, ...]
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (None,)
    if not all(isinstance(string, str) and string for string in strings):
        raise UsageError(f"stop={stop!r} must be a text or a list of texts, none of them empty")
    return strings


def checked_processors(processors: Any) -> LogitsProcessors | None:
    """Wrap a list of logits processors, None if it is empty; UsageError if it is not a list of functions."""
    if not isinstance(processors, list | tuple) or not all(map(callable, processors)):
        raise UsageError(f"logits_processor={processors!r} must be a list of functions of (ids [1, T], logits [1, V])")
    return LogitsProcessors(lambda _: processors) if processors else None


def per_input(name: str, value: Any, inputs: int, checked: Callable[[str, Any], T]) -> list[T]:
    """``checked(name, value)`` of each input: of one value for all of them, or of a list with one per input."""
    if not _is_list(value):
        return [checked(name, value)] * inputs
    if len(value) != inputs:
        raise UsageError(f"{name} has {len(value)} values for {inputs} inputs; give one, or one per input")
    return [checked(f"{name}[{i}]", item) for i, item in enumerate(value)]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def check_streamer(streamer: Any, inputs: int) -> None:
    """Raise UsageError if ``streamer`` has not the methods of one, or if there are more inputs than one."""
    if not callable(getattr(streamer, "put", None)) or not callable(getattr(streamer, "end", None)):
        raise UsageError(f"streamer={streamer!r} must have put(tokens) and end(), as transformers.TextStreamer has")
    if inputs != 1:
        raise UsageError(
            f"a streamer takes one output, but there are {inputs} inputs; leave it out, or use crossdraft.stream, "
            "whose chunks have the index of their input"
        )


def put_tensors(streamer: Any, values: Iterable[Sequence[Any]]) -> None:
    with torch.inference_mode(False):  # the streamer gets ordinary tensors
        for value in values:
            streamer.put(torch.tensor(value))


def _index(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # not an integer, or a tensor with several numbers
        return None


def separate(inputs: Any) -> list[Any]:
    """Split ``inputs`` into a list; UsageError if it is not a text, a list of texts or a list of lists."""
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, Mapping):
        raise UsageError(
            f"inputs is a {type(inputs).__name__}; give only its token ids, without padding: a list of lists of ids"
        )
    if isinstance(inputs, bytes | bytearray | set | frozenset) or not isinstance(inputs, Iterable):
        raise UsageError(
            f"inputs must be a text, a list of texts or a list of lists of token ids, not {type(inputs).__name__}"
        )
    try:
        items = list(inputs)
    except TypeError:  # a tensor without dimensions
        raise UsageError(f"inputs must be a list of texts or a list of lists of token ids, not {inputs!r}") from None
    for i, item in enumerate(items):
        messages = items if isinstance(item, Mapping) else item
        if isinstance(messages, list | tuple) and any(isinstance(m, Mapping) and "role" in m for m in messages):
            raise UsageError(
                "inputs has messages; give the text of one user message with chat=True, or the ids of a conversation: "
                "[tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)]"
            )
        if _index(item) is not None:
            raise UsageError("inputs is one flat list of token ids; wrap it into a list of prompts: [[1, 2, 3]]")
        if isinstance(item, bytes | bytearray | set | frozenset | Mapping) or not isinstance(item, Iterable):
            raise UsageError(f"inputs[{i}] must be a text or a list of token ids, not {item!r}")
    return items


def encoded(target: LoadedModel, i: int, text: str, chat: bool | None) -> list[int]:
    """Token ids of input ``i``, a text; UsageError if it is empty, or the target has no tokenizer or chat template."""
    check_text(f"inputs[{i}]", text)
    if target.tokenizer is None:
        raise UsageError(f"{target.name} has no tokenizer; give lists of token ids instead of texts")
    if chat and not getattr(target.tokenizer, "chat_template", None):
        raise UsageError(f"chat=True, but the tokenizer of {target.name} has no chat template; leave chat out")
    return encode(target.tokenizer, [text], chat=chat)


def token_ids(i: int, prompt: Any) -> list[int]:
    """Token ids of input ``i``: a list, array or tensor of any integers."""
    ids = []
    for token in prompt.tolist() if hasattr(prompt, "tolist") else prompt:
        index = _index(token)
        if index is None:
            raise UsageError(f"inputs[{i}] has {token!r} among its token ids; they must be integers")
        ids.append(index)
    return ids
