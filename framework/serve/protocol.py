"""What a request asks for: every field is honoured, refused with a sentence, or changes nothing about the answer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api.generate import check_ids
from ..api.generate_args import check_text, checked_sampling, stop_strings, whole
from ..contracts.sampling import Sampling
from ..contracts.steps import Request
from ..errors import CrossdraftError, UsageError, quoted
from ..models.chat import encode_messages, encode_text
from .decoder_pool import Served

#: Fields that are honoured, by both endpoints and by one of them.
HONOURED = frozenset({
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream", "stream_options",
    "logprobs", "ignore_eos",
})  # fmt: skip
HONOURED_BY = {True: frozenset({"messages", "max_completion_tokens"}), False: frozenset({"prompt"})}
#: Fields that say something about the client alone.
HARMLESS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier"})

_LAW = "it changes the law along the draft, which a step scores at once"
_ONE = "each prompt is answered once; send it again, with another seed"
#: Fields that are refused: the values that ask for nothing (null always does), and why others cannot be honoured.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), _ONE),
    "best_of": ((1,), _ONE),
    "echo": ((False,), "prompts are not repeated, and their tokens are not scored: no drafter has a part in that"),
    "suffix": (("",), "text is continued, not filled in"),
    "top_logprobs": ((0,), "log P of the chosen token is known, of others it is not asked"),
    "presence_penalty": ((0,), _LAW),
    "frequency_penalty": ((0,), _LAW),
    "repetition_penalty": ((1,), _LAW),
    "logit_bias": (({},), _LAW),
    "min_tokens": ((0,), _LAW),
    "tools": (([],), "answers are text"),
    "tool_choice": (("none", "auto"), "answers are text"),
    "functions": (([],), "answers are text"),
    "function_call": (("none", "auto"), "answers are text"),
    "response_format": (({"type": "text"},), _LAW),
    "modalities": ((["text"],), "answers are text"),
    "parallel_tool_calls": ((True, False), "answers are text"),
    "store": ((False,), "nothing is kept"),
}
_MOST_STREAM = 2**32


class Refused(UsageError):
    """A request that is not answered: the field that is wrong, and the HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True)
class Asked:
    """A checked request: its prompts, their law, and how the answer is to be told.

    Attributes:
        usage: whether a last chunk counts tokens; ``counting``: whether every chunk does.
    """

    chat: bool
    law: Sampling
    requests: list[Request]
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    counting: bool
    logprobs: bool


def asked(served: Served, body: Any, *, chat: bool) -> Asked:
    """Read the body of a request to ``/v1/chat/completions`` or ``/v1/completions``. Raises `Refused`."""
    if not isinstance(body, dict):
        raise Refused("the body of a request is a JSON object")
    given = {key: value for key, value in body.items() if value is not None}
    _check_fields(given, chat)
    if (name := given.get("model")) != served.target.name:
        raise Refused(f"there is no model {quoted(name)} here; it is {quoted(served.target.name)}", "model", 404)
    law = _law(served, given)
    try:
        stop = stop_strings(given.get("stop", ()))
    except UsageError as error:
        raise Refused(str(error), "stop") from None
    logprobs, stream, ignore_eos = given.get("logprobs", False), _truth(given, "stream"), _truth(given, "ignore_eos")
    if chat:
        logprobs = _truth(given, "logprobs")
    elif logprobs is not False and (isinstance(logprobs, bool) or logprobs != 0):
        raise Refused(f"logprobs={quoted(logprobs)} asks for other tokens than the chosen one; say 0", "logprobs")
    else:
        logprobs = logprobs is not False
    usage, counting = _usage(given, stream)
    key = "messages" if chat else "prompt"
    try:
        prompts = _chat(served, given.get(key)) if chat else _prompts(served, given.get(key))
        for i, prompt in enumerate(prompts):
            check_ids(served.decoder, key if len(prompts) == 1 else f"{key} {i}", prompt, served.target.name)
    except Refused:
        raise
    except CrossdraftError as error:
        raise Refused(str(error), key) from None
    seed = _number(given, "seed", 0)
    if seed is not None and seed >= _MOST_STREAM:
        raise Refused(f"seed={quoted(seed)} must be below 2^32", "seed")
    requests = [
        Request(
            prompt,
            stream=secrets.randbelow(_MOST_STREAM) if seed is None else seed,
            name=key,
            most=_most(served, given, len(prompt)),
            eos=() if ignore_eos else None,
        )
        for prompt in prompts
    ]
    return Asked(chat, law, requests, stop, stream, usage, counting, logprobs)


def _check_fields(given: Mapping[str, Any], chat: bool) -> None:
    for name, value in given.items():
        neutral, why = REFUSED.get(name, ((), "this server does not know it"))
        known = name in HONOURED or name in HONOURED_BY[chat] or name in HARMLESS
        if not known and not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            raise Refused(f"{quoted(name)[1:-1]}={quoted(value)} cannot be honoured: {why}; leave it out", name)


def _law(served: Served, given: Mapping[str, Any]) -> Sampling:
    """The server's law, with what the request says of it. At temperature 0 only the temperature counts."""
    told = {name: given[name] for name in ("temperature", "top_p", "top_k", "min_p") if given.get(name) is not None}
    if told.get("top_k") == -1:  # how engines spell it
        told["top_k"] = 0
    for name, value in told.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refused(f"{name}={quoted(value)} must be a number", name)
        try:
            checked_sampling(**{name: value})
        except UsageError as error:
            raise Refused(str(error), name) from None
    law = served.sampling.model_copy(update=told)
    law = Sampling(temperature=0) if law.temperature == 0 else Sampling(**law.model_dump())
    if law != served.sampling:
        try:
            served.check(law)
        except CrossdraftError as error:
            raise Refused(str(error), "temperature") from None
    return law


def _truth(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise Refused(f"{name}={quoted(value)} must be true or false", name)
    return value


def _number(given: Mapping[str, Any], name: str, least: int) -> int | None:
    if given.get(name) is None:
        return None
    try:
        return whole(name, given[name], least)
    except UsageError as error:
        raise Refused(str(error), name) from None


def _usage(given: Mapping[str, Any], stream: bool) -> tuple[bool, bool]:
    options = given.get("stream_options", {})
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    if not isinstance(options, dict) or set(options) - known:
        raise Refused(
            f"stream_options={quoted(options)} may hold include_usage and continuous_usage_stats alone",
            "stream_options",
        )
    if options.get("include_obfuscation"):
        raise Refused("include_obfuscation cannot be honoured: pieces are sent as they are", "stream_options")
    if options and not stream:
        raise Refused("stream_options are for stream=true", "stream_options")
    return _truth(options, "include_usage"), _truth(options, "continuous_usage_stats")


def _most(served: Served, given: Mapping[str, Any], prompt: int) -> int:
    """How many tokens an answer may have: as many as are asked for, or as there are room and limit for."""
    named = [name for name in ("max_completion_tokens", "max_tokens") if given.get(name) is not None]
    room = served.length - prompt
    if room < 1:
        raise Refused(f"the prompt has {prompt} tokens, but a slot holds {served.length}, answer included", "prompt")
    if not named:
        return min(served.most, room)
    most = _number(given, named[0], 1)
    assert most is not None
    if len(named) == 2 and given["max_tokens"] != most:
        raise Refused("max_tokens and max_completion_tokens say different things; leave one out", "max_tokens")
    if most > served.most:
        raise Refused(f"{named[0]}={most}, but this server was started with --max-new-tokens {served.most}", named[0])
    if most > room:
        raise Refused(
            f"a prompt of {prompt} tokens and {named[0]}={most} exceed the {served.length} tokens that a slot holds",
            named[0],
        )
    return most


def _chat(served: Served, messages: Any) -> list[list[int]]:
    tokenizer = served.target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise Refused(f"{served.target.name} has no chat template; ask /v1/completions", "messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list of objects with role and content", "messages")
    found = []
    for i, message in enumerate(messages):
        said = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        if set(said) != {"role", "content"} or not isinstance(said["role"], str):
            raise Refused(f"messages[{i}] must have role and content, and nothing else", "messages")
        found.append({"role": said["role"], "content": _content(i, said["content"])})
    check_text(f"messages[{len(found) - 1}]", found[-1]["content"])
    return [encode_messages(tokenizer, found, served.length)]


def _content(i: int, content: Any) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        raise Refused(f"messages[{i}].content must be a text, or a list of parts of type text", "messages")
    return "".join(part["text"] for part in parts)


def _prompts(served: Served, prompt: Any) -> list[list[int]]:
    several: Sequence[Any] = prompt if isinstance(prompt, list) and not _ids(prompt) else [prompt]
    if not several or not all(isinstance(one, str) or _ids(one) for one in several):
        raise Refused("prompt must be a text, a list of texts, or one or more lists of token ids", "prompt")
    found = []
    for i, one in enumerate(several):
        if isinstance(one, str):
            check_text("prompt" if len(several) == 1 else f"prompt {i}", one)
            one = encode_text(served.target.tokenizer, one, special=True, most=served.length)
        found.append(one)
    return found


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)
