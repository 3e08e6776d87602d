"""Requests of the OpenAI API: every field is supported, rejected with an error, or has no effect on the response."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossdraft.framework.api.generate import check_ids
from crossdraft.framework.api.generate_args import check_text, checked_sampling, stop_strings, whole
from crossdraft.framework.contracts.constraint import Constraint, checked_constraint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.steps import Request
from crossdraft.framework.errors import CrossdraftError, UsageError, quoted
from crossdraft.framework.models.chat import encode_messages, encode_text, template_message

from .decoder_pool import DecoderPool
from .tools import CallFormat, ToolCall, call_format, tool_call

#: Fields supported by both endpoints, and by one of them (key: True for chat).
SUPPORTED = frozenset({
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream", "stream_options",
    "logprobs", "ignore_eos", "return_token_ids", "response_format", "structured_outputs",
})  # fmt: skip
SUPPORTED_BY = {
    True: frozenset({"messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls"}),
    False: frozenset({"prompt"}),
}
#: Fields that describe the client and are ignored.
IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier"})

_DISTRIBUTION = "it changes the target's distribution at every position, and a draft is scored in one pass"
_ONE_CHOICE = "one choice is returned per prompt; send the request again with another seed"
_TEXT_ONLY = "responses are text"
#: Fields that are not supported: values without effect (as null), which are accepted, and the reason.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), _ONE_CHOICE),
    "best_of": ((1,), _ONE_CHOICE),
    "echo": ((False,), "prompts are not scored or returned"),
    "suffix": (("",), "infilling is not supported"),
    "top_logprobs": ((0,), "only the log-probability of the sampled token is computed"),
    "presence_penalty": ((0,), _DISTRIBUTION),
    "frequency_penalty": ((0,), _DISTRIBUTION),
    "repetition_penalty": ((1,), _DISTRIBUTION),
    "logit_bias": (({},), _DISTRIBUTION),
    "min_tokens": ((0,), _DISTRIBUTION),
    "tools": (([],), _TEXT_ONLY),
    "tool_choice": (("none", "auto"), _TEXT_ONLY),
    "functions": (([],), _TEXT_ONLY),
    "function_call": (("none", "auto"), _TEXT_ONLY),
    "modalities": ((["text"],), _TEXT_ONLY),
    "parallel_tool_calls": ((True, False), _TEXT_ONLY),
    "store": ((False,), "responses are not stored"),
}
_SEED_LIMIT = 2**32
#: Further keys of messages, by role, which only the chat template reads.
_CALL_KEYS = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id", "name")}
#: Fields of vLLM's ``structured_outputs``, and those of `Constraint`.
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


class InvalidRequestError(UsageError):
    """An invalid request.

    Attributes:
        param: the invalid field, if it is one field.
        status: the HTTP status of the response.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True)
class CompletionRequest:
    """A validated request.

    Attributes:
        chat: True for ``/v1/chat/completions``.
        prompts: one decoding request per prompt.
        include_usage: a last chunk with token counts is sent.
        continuous_usage: every chunk has token counts.
        tool: the name of the function that the response must call.
        call_format: how calls that the model decides on are read from the response.
        constraint: field and language of the responses, not yet compiled.
    """

    chat: bool
    sampling: Sampling
    prompts: list[Request]
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: bool
    token_ids: bool
    tool: str | None = None
    call_format: CallFormat | None = None
    constraint: tuple[str, Constraint] | None = None


def parse_request(pool: DecoderPool, body: Any, *, chat: bool) -> CompletionRequest:
    """Validate the body of ``/v1/chat/completions`` or ``/v1/completions``. Raises `InvalidRequestError`."""
    if not isinstance(body, dict):
        raise InvalidRequestError("the request body must be a JSON object")
    fields = {key: value for key, value in body.items() if value is not None}
    _check_fields(fields, chat)
    if (name := fields.get("model")) != pool.target.name:
        raise InvalidRequestError(
            f"model {quoted(name)} is not served; the model is {quoted(pool.target.name)}", "model", 404
        )
    sampling = _sampling(pool, fields)
    try:
        stop = stop_strings(fields.get("stop", ()))
    except UsageError as error:
        raise InvalidRequestError(str(error), "stop") from None
    stream, ignore_eos, token_ids = (_boolean(fields, name) for name in ("stream", "ignore_eos", "return_token_ids"))
    logprobs = _logprobs(fields, chat)
    parallel = "parallel_tool_calls" not in fields or _boolean(fields, "parallel_tool_calls")
    try:
        call = tool_call(fields) if chat else None
        calls = None if call is None or call.name is not None else call_format(pool.target, call.tools, parallel)
    except UsageError as error:
        raise InvalidRequestError(str(error), "tools" if str(error).startswith("tools") else "tool_choice") from None
    constraint = _constraint(fields, ignore_eos, call)
    include_usage, continuous_usage = _stream_options(fields, stream)
    key = "messages" if chat else "prompt"
    try:
        tools = None if call is None else call.tools
        prompts = _encode_chat(pool, fields.get(key), tools) if chat else _encode_prompts(pool, fields.get(key))
        for i, prompt in enumerate(prompts):
            check_ids(pool.decoder, key if len(prompts) == 1 else f"{key} {i}", prompt, pool.target.name)
    except InvalidRequestError:
        raise
    except CrossdraftError as error:
        raise InvalidRequestError(str(error), key) from None
    seed = _integer(fields, "seed", 0)
    if seed is not None and seed >= _SEED_LIMIT:
        raise InvalidRequestError(f"seed={quoted(seed)} must be below 2^32", "seed")
    requests = [
        Request(
            prompt,
            stream=secrets.randbelow(_SEED_LIMIT) if seed is None else seed,
            name=key,
            most=_max_tokens(pool, fields, key, len(prompt)),
            eos=() if ignore_eos else None,
        )
        for prompt in prompts
    ]
    return CompletionRequest(
        chat,
        sampling,
        requests,
        stop,
        stream,
        include_usage,
        continuous_usage,
        logprobs,
        token_ids,
        None if call is None else call.name,
        calls,
        constraint,
    )


def _check_fields(fields: Mapping[str, Any], chat: bool) -> None:
    for name, value in fields.items():
        if name in SUPPORTED or name in SUPPORTED_BY[chat] or name in IGNORED:
            continue
        neutral, reason = UNSUPPORTED.get(name, ((), "unknown field"))
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral):
            shown = quoted(name)[1:-1]
            raise InvalidRequestError(f"{shown}={quoted(value)} is not supported: {reason}; remove it", shown)


def _sampling(pool: DecoderPool, fields: Mapping[str, Any]) -> Sampling:
    """The sampling parameters of the request over the server's defaults; at temperature 0, all others are reset."""
    values = {name: fields[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in fields}
    if values.get("top_k") == -1:  # "off" in vLLM
        values["top_k"] = 0
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequestError(f"{name}={quoted(value)} must be a number", name)
        try:
            checked_sampling(**{name: value})
        except UsageError as error:
            raise InvalidRequestError(str(error), name) from None
    sampling = pool.sampling.model_copy(update=values)
    sampling = Sampling(temperature=0) if sampling.temperature == 0 else Sampling(**sampling.model_dump())
    if sampling != pool.sampling:
        try:
            pool.check(sampling)
        except CrossdraftError as error:
            raise InvalidRequestError(str(error), "temperature") from None
    return sampling


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name}={quoted(value)} must be true or false", name)
    return value


def _integer(fields: Mapping[str, Any], name: str, minimum: int) -> int | None:
    if name not in fields:
        return None
    try:
        return whole(name, fields[name], minimum)
    except UsageError as error:
        raise InvalidRequestError(str(error), name) from None


def _logprobs(fields: Mapping[str, Any], chat: bool) -> bool:
    """A boolean for chats; for completions the number of alternatives per token, of which only 0 is supported."""
    value = fields.get("logprobs", False)
    if chat:
        return _boolean(fields, "logprobs")
    if value is not False and (isinstance(value, bool) or value != 0):
        raise InvalidRequestError(
            f"logprobs={quoted(value)} is not supported: only the log-probability of the sampled token is computed; "
            "send 0",
            "logprobs",
        )
    return value is not False


def _stream_options(fields: Mapping[str, Any], stream: bool) -> tuple[bool, bool]:
    options = fields.get("stream_options", {})
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    if not isinstance(options, dict) or set(options) - known:
        raise InvalidRequestError(
            f"stream_options={quoted(options)} must be an object with include_usage and continuous_usage_stats only",
            "stream_options",
        )
    options = {key: value for key, value in options.items() if value is not None}
    if options.get("include_obfuscation"):
        raise InvalidRequestError("include_obfuscation is not supported; remove it", "stream_options")
    if options and not stream:
        raise InvalidRequestError("stream_options requires stream=true", "stream_options")
    return _boolean(options, "include_usage"), _boolean(options, "continuous_usage_stats")


def _constraint(fields: Mapping[str, Any], ignore_eos: bool, call: ToolCall | None) -> tuple[str, Constraint] | None:
    """Field and language of ``response_format``, vLLM's ``structured_outputs``, or a function's arguments."""
    names = [name for name in ("response_format", "structured_outputs") if name in fields]
    values = {name: _language(name, fields[name]) for name in names}
    if call is not None and call.name is not None:
        values["tool_choice"] = _checked("tool_choice", {"json_schema": call.parameters})
    constraints = {name: constraint for name, constraint in values.items() if constraint is not None}
    if not constraints:
        return None
    name, constraint = next(iter(constraints.items()))
    if len(constraints) > 1:
        raise InvalidRequestError(f"{' and '.join(constraints)} are both set; remove one of them", name)
    if ignore_eos:
        raise InvalidRequestError(f"{name} ends with an end-of-sequence token; remove ignore_eos", name)
    return name, constraint


def _language(name: str, value: Any) -> Constraint | None:
    """The constraint of a field; None for text."""
    options = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}
    if name == "structured_outputs":
        if len(options) != 1 or not options.keys() <= _STRUCTURED.keys():
            keys = ", ".join(_STRUCTURED)
            raise InvalidRequestError(f"{name}={quoted(value)} must be an object with one of {keys}", name)
        ((key, language),) = options.items()
        constraint = {_STRUCTURED[key]: language}
    elif (kind := options.get("type")) == "text":
        return None
    elif kind == "json_object":
        constraint = {"json_schema": {"type": "object"}}
    elif kind == "json_schema" and isinstance(schema := options.get("json_schema"), dict) and "schema" in schema:
        constraint = {"json_schema": schema["schema"]}
    else:
        raise InvalidRequestError(
            f"{name}={quoted(value)} is not supported; its type is text, json_object or json_schema, the last with an "
            "object json_schema that has a schema",
            name,
        )
    return _checked(name, constraint)


def _checked(name: str, constraint: Mapping[str, Any]) -> Constraint | None:
    try:
        return checked_constraint(constraint, name)
    except UsageError as error:
        raise InvalidRequestError(str(error), name) from None


def _max_tokens(pool: DecoderPool, fields: Mapping[str, Any], key: str, prompt: int) -> int:
    """The limit of new tokens: as requested, else as many as the server's limit and the slot allow."""
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in fields]
    remaining = pool.max_length - prompt
    if remaining < 1:
        raise InvalidRequestError(
            f"the prompt has {prompt} tokens; a slot holds {pool.max_length} tokens of prompt and response", key
        )
    if not names:
        return min(pool.max_new_tokens, remaining)
    limit = _integer(fields, names[0], 1)
    assert limit is not None
    if len(names) == 2 and fields["max_tokens"] != limit:
        raise InvalidRequestError("max_tokens and max_completion_tokens differ; remove one of them", "max_tokens")
    if limit > pool.max_new_tokens:
        raise InvalidRequestError(
            f"{names[0]}={limit} exceeds the server's --max-new-tokens {pool.max_new_tokens}", names[0]
        )
    if limit > remaining:
        raise InvalidRequestError(
            f"a prompt of {prompt} tokens and {names[0]}={limit} exceed the {pool.max_length} tokens of a slot",
            names[0],
        )
    return limit


def _encode_chat(pool: DecoderPool, messages: Any, tools: list[dict[str, Any]] | None) -> list[list[int]]:
    tokenizer = pool.target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError(f"{pool.target.name} has no chat template; use /v1/completions", "messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages must be a list of objects with role and content", "messages")
    conversation = []
    for i, message in enumerate(messages):
        try:
            fields = template_message(message) if isinstance(message, dict) else {}
        except UsageError as error:
            raise InvalidRequestError(f"messages[{i}].{error}", "messages") from None
        keys = {"role", "content", *_CALL_KEYS.get(str(fields.get("role")), ())}
        if not {"role", "content"} <= fields.keys() <= keys or not isinstance(fields["role"], str):
            raise InvalidRequestError(f"messages[{i}] must have role and content only", "messages")
        conversation.append(fields)
    if conversation[-1]["role"] != "tool":  # the result of a call may be empty
        check_text(f"messages[{len(conversation) - 1}]", conversation[-1]["content"])
    return [encode_messages(tokenizer, conversation, pool.max_length, tools)]


def _encode_prompts(pool: DecoderPool, prompt: Any) -> list[list[int]]:
    prompts: Sequence[Any] = prompt if isinstance(prompt, list) and not _is_token_ids(prompt) else [prompt]
    if not prompts or not all(isinstance(item, str) or _is_token_ids(item) for item in prompts):
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists", "prompt"
        )
    encoded = []
    for i, item in enumerate(prompts):
        if isinstance(item, str):
            check_text("prompt" if len(prompts) == 1 else f"prompt {i}", item)
            item = encode_text(pool.target.tokenizer, item, special=True, most=pool.max_length)
        encoded.append(item)
    return encoded


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
