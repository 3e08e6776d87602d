"""What users hand over to `generate` and its like: each argument as it is meant, or a sentence about what is wrong."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from pydantic import ValidationError

from ..contracts.models import LoadedModel
from ..contracts.options import fault
from ..contracts.sampling import Sampling
from ..engine.logits_processors import LogitsProcessors
from ..errors import CrossdraftError, UsageError, quoted
from ..models.chat import encode
from .build import configured

P = ParamSpec("P")
T = TypeVar("T")


class UnexpectedArgumentError(UsageError, TypeError):
    """A keyword argument that a function does not have; a TypeError, as Python's own."""


def explain_unexpected(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function raise `UnexpectedArgumentError` for a keyword that it lacks, with the place where it belongs.

    For functions that take a ``drafter`` and a ``verifier``, whose options are often given to the function instead.
    """
    known = inspect.signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in kwargs.items():
            if name not in known:
                raise UnexpectedArgumentError(_unexpected(function.__name__, name, value, kwargs, list(known)))
        return function(*args, **kwargs)

    return call


def _unexpected(function: str, name: str, value: Any, given: Mapping[str, Any], known: Sequence[str]) -> str:
    for kind in ("drafter", "verifier"):
        strategy = given.get(kind) or ("prompt-lookup" if kind == "drafter" else None)
        try:
            cls, _ = configured(f"{kind}s", strategy) if strategy is not None else (None, None)
        except CrossdraftError:  # the function itself reports that, once the keyword is gone
            continue
        if cls is not None and name in cls.Config.model_fields:
            place = f'{kind}={{"name": {cls.name!r}, {name!r}: {quoted(value)}}}'.replace("'", '"')
            return f"{function}() has no argument {name!r}; it is an option of the {kind}: {place}"
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"its arguments are {', '.join(known)}"
    return f"{function}() has no argument {name!r}; {hint}"


def check_text(name: str, text: str) -> None:
    """Raise UsageError for an empty text as a prompt, with or without a chat template."""
    if not text:
        raise UsageError(f"{name} is an empty text; give at least one character")


def checked_sampling(**parameters: Any) -> Sampling:
    """Sampling parameters from a user; UsageError names the first that cannot be."""
    try:
        return Sampling(**parameters)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}={first['input']!r} cannot be: {fault(first)}") from None


def laws(inputs: int, **parameters: Any) -> list[Sampling]:
    """The law of each of so many inputs: every parameter is one number, or a list of them, one for each input."""
    each = {key: value for key, value in parameters.items() if isinstance(value, list | tuple)}
    shared = {key: value for key, value in parameters.items() if key not in each}
    for key, values in each.items():
        if len(values) != inputs:
            raise UsageError(f"{key} names {len(values)} numbers for {inputs} inputs; give one number, or one each")
    found = [checked_sampling(**shared, **{key: values[i] for key, values in each.items()}) for i in range(inputs)]
    return found or [checked_sampling(**shared)]


def whole(name: str, value: Any, least: int | None = None) -> int:
    """An integer from a user, of any integer type, at least ``least``; UsageError says what it is instead."""
    found = _index(value)
    if found is None or (least is not None and found < least):
        raise UsageError(f"{name}={value!r} must be an integer{'' if least is None else f' of at least {least}'}")
    return found


def stop_strings(stop: Any) -> tuple[str, ...]:
    """Strings that end an answer, from a user: one, several or none; UsageError for what can be none."""
    found: tuple[Any, ...]
    found = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list | tuple) else (None,)
    for one in found:
        if not isinstance(one, str) or not one:
            raise UsageError(f"stop={stop!r} must be a text or a list of texts, none of them empty")
    return found


def checked_processors(given: Any) -> LogitsProcessors | None:
    """Logits processors from a user, None for none; UsageError for what can be none."""
    if not isinstance(given, list | tuple) or not all(map(callable, given)):
        raise UsageError(f"logits_processor={given!r} must be a list of functions of (ids [1, T], logits [1, V])")
    return LogitsProcessors(lambda _: given) if given else None


def limits(most: Any, inputs: int) -> list[int]:
    """Most new tokens of each of so many inputs."""
    if not isinstance(most, Sequence) or isinstance(most, str):
        return [whole("max_new_tokens", most, 1)] * inputs
    if len(most) != inputs:
        raise UsageError(f"max_new_tokens names {len(most)} limits for {inputs} inputs; give one number, or one each")
    return [whole(f"max_new_tokens[{i}]", one, 1) for i, one in enumerate(most)]


def check_streamer(streamer: Any, inputs: int) -> None:
    """Raise UsageError for what is no streamer, or cannot tell several answers apart."""
    if not callable(getattr(streamer, "put", None)) or not callable(getattr(streamer, "end", None)):
        raise UsageError(f"streamer={streamer!r} must have put(tokens) and end(), as transformers.TextStreamer has")
    if inputs != 1:
        raise UsageError(
            f"a streamer is told one answer, and there are {inputs} inputs; leave it out, or take "
            "crossdraft.stream, whose pieces say which answer they belong to"
        )


def tell(streamer: Any, values: Iterable[Sequence[Any]]) -> None:
    """Put each of ``values`` as a tensor of its own."""
    with torch.inference_mode(False):  # the streamer's tensors are ordinary ones
        for value in values:
            streamer.put(torch.tensor(value))


def _index(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # of numbers that are none, and of tensors with many
        return None


def separate(inputs: Any) -> list[Any]:
    """The inputs one by one; what is no list of texts or lists is refused."""
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, Mapping):
        raise UsageError(
            f"inputs is a {type(inputs).__name__}; give its token ids alone, without padding: a list of lists of ids"
        )
    if isinstance(inputs, bytes | bytearray | set | frozenset) or not isinstance(inputs, Iterable):
        raise UsageError(
            f"inputs must be a text, a list of texts or a list of lists of token ids, not {type(inputs).__name__}"
        )
    try:
        found = list(inputs)
    except TypeError:  # a tensor without dimensions
        raise UsageError(f"inputs must be a list of texts or a list of lists of token ids, not {inputs!r}") from None
    for i, one in enumerate(found):
        if _index(one) is not None:
            raise UsageError("inputs is one flat list of token ids; wrap it into a list of prompts: [[1, 2, 3]]")
        if isinstance(one, bytes | bytearray | set | frozenset | Mapping) or not isinstance(one, Iterable):
            raise UsageError(f"inputs[{i}] must be a text or a list of token ids, not {one!r}")
    return found


def encoded(target: LoadedModel, i: int, text: str, chat: bool | None) -> list[int]:
    """Token ids of input ``i``, a text; UsageError if it is empty, or where the target has not what that needs."""
    check_text(f"inputs[{i}]", text)
    if target.tokenizer is None:
        raise UsageError(f"{target.name} has no tokenizer; give lists of token ids instead of texts")
    if chat and not getattr(target.tokenizer, "chat_template", None):
        raise UsageError(f"chat=True, but the tokenizer of {target.name} has no chat template; leave chat out")
    return encode(target.tokenizer, [text], chat=chat)


def ids(i: int, prompt: Any) -> list[int]:
    """Token ids of input ``i``, of whatever integers it is made."""
    listed = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)  # tensors and arrays
    found = [_index(token) for token in listed]
    for token, index in zip(listed, found, strict=True):
        if index is None:
            raise UsageError(f"inputs[{i}] has {token!r} among its token ids, which are integers")
    return [index for index in found if index is not None]
