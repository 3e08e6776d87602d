"""Requests of the OpenAI API: every field is supported, rejected with an error, or has no effect on the response."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from crossdraft import Constraint, CrossdraftError, Sampling, UsageError, quoted
from crossdraft.commands import Options, fault
from crossdraft.framework.api.generate_args import check_text
from crossdraft.framework.contracts.constraint import checked_constraint
from crossdraft.framework.contracts.steps import Request
from crossdraft.models import check_ids, encode_messages, encode_text, template_message

from .decoder_pool import DecoderPool
from .tools import CallFormat, Tool, ToolCall, call_format, tool_call

_DISTRIBUTION = "it changes the target's distribution at every position, and a draft is scored in one pass"
_ONE_CHOICE = "one choice is returned per prompt; send the request again with another seed"
_TEXT_ONLY = "responses are text"
#: Fields that describe the client and are ignored.
IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")
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
#: Items of a list, each of which may be an error.
_MOST_ITEMS = 1024
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


class _Fields(Options):
    """A JSON object whose numbers and flags are not converted from other types."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():  # one error, not one for each of a million keys
            if key not in cls.model_fields:
                raise ValueError(f"has the unknown key {quoted(key)}")
        return _without_nulls(values)


def _without_nulls(values: Any) -> Any:
    return {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values


class StreamOptions(_Fields):
    """``stream_options``: token counts in the last chunk, or in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class RequestBody(_Fields):
    """Fields of both endpoints."""

    #: True for ``/v1/chat/completions``, and the field that holds the prompts.
    chat: ClassVar[bool]
    key: ClassVar[str]

    model: Any = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    min_p: float | None = None
    seed: int | None = Field(None, ge=0, lt=_SEED_LIMIT)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = Field(default=[], max_length=_MOST_ITEMS)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    return_token_ids: bool = False
    logprobs: Any = False
    response_format: Any = None
    structured_outputs: Any = None


class CompletionBody(RequestBody):
    """The body of ``/v1/completions``."""

    chat, key = False, "prompt"

    prompt: Any = None

    @field_validator("logprobs", mode="after")
    @classmethod
    def _check_alternatives(cls, value: Any) -> bool:
        """True for 0 alternatives per token."""
        if value is not False and (isinstance(value, bool) or value != 0):
            raise ValueError("only the log-probability of the sampled token is computed; send 0")
        return value is not False


class ChatBody(RequestBody):
    """The body of ``/v1/chat/completions``."""

    chat, key = True, "messages"

    messages: Any = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    tools: list[Tool] = Field(default=[], max_length=_MOST_ITEMS)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True


@dataclass(frozen=True)
class CompletionRequest:
    """A validated request.

    Attributes:
        prompts: one decoding request per prompt.
        tool: the name of the function that the response must call.
        call_format: how calls that the model decides on are read from the response.
        constraint: field and language of the responses, not yet compiled.
    """

    body: RequestBody
    sampling: Sampling
    prompts: list[Request]
    tool: str | None = None
    call_format: CallFormat | None = None
    constraint: tuple[str, Constraint] | None = None


def parse_request(pool: DecoderPool, fields: Any, *, chat: bool) -> CompletionRequest:
    """Validate the body of ``/v1/chat/completions`` or ``/v1/completions``. Raises `InvalidRequestError`."""
    if not isinstance(fields, dict):
        raise InvalidRequestError("the request body must be a JSON object")
    kind = ChatBody if chat else CompletionBody
    fields = _supported(kind, fields)
    if (name := fields.get("model")) != pool.target.name:
        fault = "the request names no model" if name is None else f"model {quoted(name)} is not served"
        raise InvalidRequestError(f"{fault}; the model is {quoted(pool.target.name)}", "model", 404)
    body = _validated(kind, fields)
    if body.stream_options.model_fields_set and not body.stream:
        raise InvalidRequestError("stream_options requires stream=true", "stream_options")
    sampling = _sampling(pool, body)
    call = calls = None
    if isinstance(body, ChatBody):
        with _field("tool_choice"):
            call = tool_call(body.tools, body.tool_choice, fields.get("tools"))
            if call is not None and call.name is None:
                calls = call_format(pool.target, call.tools, body.parallel_tool_calls)
    constraint = _constraint(body, call)
    with _field(body.key):
        if isinstance(body, ChatBody):
            prompts = _encode_chat(pool, body.messages, None if call is None else call.tools)
        else:
            prompts = _encode_prompts(pool, fields.get("prompt"))
        for i, prompt in enumerate(prompts):
            check_ids(pool.decoder, body.key if len(prompts) == 1 else f"{body.key} {i}", prompt, pool.target.name)
    requests = [
        Request(
            prompt,
            stream=secrets.randbelow(_SEED_LIMIT) if body.seed is None else body.seed,
            name=body.key,
            max_new_tokens=_max_tokens(pool, body, len(prompt)),
            eos=() if body.ignore_eos else None,
        )
        for prompt in prompts
    ]
    return CompletionRequest(body, sampling, requests, None if call is None else call.name, calls, constraint)


@contextmanager
def _field(name: str) -> Iterator[None]:
    """Convert errors to `InvalidRequestError` of this field."""
    try:
        yield
    except InvalidRequestError:
        raise
    except CrossdraftError as error:
        raise InvalidRequestError(str(error), name) from None


def _supported(kind: type[RequestBody], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``kind``. Raises `InvalidRequestError` for another one with a value that has an effect."""
    for name in (name for name in fields if name not in kind.model_fields and name not in IGNORED):
        value, (neutral, reason) = fields[name], UNSUPPORTED.get(name, ((), "unknown field"))
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in (None, *neutral)):
            shown = quoted(name)[1:-1]
            raise InvalidRequestError(f"{shown}={quoted(value)} is not supported: {reason}; remove it", shown)
    return {name: value for name, value in fields.items() if name in kind.model_fields}


AnyOptions = TypeVar("AnyOptions", bound=Options)


def _validated(model: type[AnyOptions], fields: Mapping[str, Any]) -> AnyOptions:
    """An instance. Raises `InvalidRequestError` for the first field that is not valid."""
    try:
        return model(**fields)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        value = "" if problem["type"] == "missing" else f"={quoted(problem['input'])}"
        raise InvalidRequestError(f"{name}{value} is not valid: {fault(problem)}", str(problem["loc"][0])) from None


def _sampling(pool: DecoderPool, body: RequestBody) -> Sampling:
    """The sampling parameters of the request over the server's defaults; at temperature 0, all others are reset."""
    values = body.model_dump(include=set(Sampling.model_fields), exclude_none=True)
    if values.get("top_k") == -1:  # "off" in vLLM
        values["top_k"] = 0
    sampling = _validated(Sampling, pool.sampling.model_dump() | values)
    sampling = Sampling(temperature=0) if sampling.temperature == 0 else sampling
    if sampling != pool.sampling:
        with _field("temperature"):
            pool.check(sampling)
    return sampling


def _constraint(body: RequestBody, call: ToolCall | None) -> tuple[str, Constraint] | None:
    """Field and language of ``response_format``, vLLM's ``structured_outputs``, or a function's arguments."""
    values = {
        "response_format": _response_format(body.response_format),
        "structured_outputs": _structured_outputs(body.structured_outputs),
        "tool_choice": None if call is None or call.name is None else {"json_schema": call.parameters},
    }
    names = [name for name, value in values.items() if value is not None]
    if not names:
        return None
    name = names[0]
    if len(names) > 1:
        raise InvalidRequestError(f"{' and '.join(names)} are both set; remove one of them", name)
    if body.ignore_eos:
        raise InvalidRequestError(f"{name} ends with an end-of-sequence token; remove ignore_eos", name)
    with _field(name):
        constraint = checked_constraint(values[name], name)
    assert constraint is not None
    return name, constraint


def _response_format(value: Any) -> dict[str, Any] | None:
    """Fields of the constraint; None for text."""
    match _without_nulls(value):
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json_schema": schema}
    raise InvalidRequestError(
        f"response_format={quoted(value)} is not supported; its type is text, json_object or json_schema, the last "
        "with an object json_schema that has a schema",
        "response_format",
    )


def _structured_outputs(value: Any) -> dict[str, Any] | None:
    """Fields of the constraint."""
    if value is None:
        return None
    options = _without_nulls(value)
    if not isinstance(options, dict) or len(options) != 1 or not options.keys() <= _STRUCTURED.keys():
        keys = ", ".join(_STRUCTURED)
        raise InvalidRequestError(
            f"structured_outputs={quoted(value)} must be an object with one of {keys}", "structured_outputs"
        )
    return {_STRUCTURED[key]: language for key, language in options.items()}


def _max_tokens(pool: DecoderPool, body: RequestBody, prompt: int) -> int:
    """The limit of new tokens: as requested, else as many as the server's limit and the slot allow."""
    remaining = pool.max_length - prompt
    if remaining < 1:
        raise InvalidRequestError(
            f"the prompt has {prompt} tokens; a slot holds {pool.max_length} tokens of prompt and response", body.key
        )
    limits = body.model_dump(include={"max_completion_tokens", "max_tokens"}, exclude_none=True)
    if not limits:
        return min(pool.max_new_tokens, remaining)
    if len({*limits.values()}) > 1:
        raise InvalidRequestError("max_tokens and max_completion_tokens differ; remove one of them", "max_tokens")
    name, limit = max(limits.items(), key=lambda item: item[0] == "max_completion_tokens")
    if limit > pool.max_new_tokens:
        raise InvalidRequestError(f"{name}={limit} exceeds the server's --max-new-tokens {pool.max_new_tokens}", name)
    if limit > remaining:
        raise InvalidRequestError(
            f"a prompt of {prompt} tokens and {name}={limit} exceed the {pool.max_length} tokens of a slot", name
        )
    return limit


def _encode_chat(pool: DecoderPool, messages: Any, tools: list[dict[str, Any]] | None) -> list[list[int]]:
    """Token ids. Raises CrossdraftError."""
    tokenizer = pool.target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"{pool.target.name} has no chat template; use /v1/completions")
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages must be a list of objects with role and content")
    conversation = []
    for i, message in enumerate(messages):
        try:
            fields = template_message(message) if isinstance(message, dict) else {}
        except UsageError as error:
            raise UsageError(f"messages[{i}].{error}") from None
        keys = {"role", "content", *_CALL_KEYS.get(str(fields.get("role")), ())}
        if not {"role", "content"} <= fields.keys() <= keys or not isinstance(fields["role"], str):
            raise UsageError(f"messages[{i}] must have role and content only")
        conversation.append(fields)
    if conversation[-1]["role"] != "tool":  # the result of a call may be empty
        check_text(f"messages[{len(conversation) - 1}]", conversation[-1]["content"])
    return [encode_messages(tokenizer, conversation, pool.max_length, tools)]


def _encode_prompts(pool: DecoderPool, prompt: Any) -> list[list[int]]:
    prompts: Sequence[Any] = prompt if isinstance(prompt, list) and not _is_token_ids(prompt) else [prompt]
    if not prompts or not all(isinstance(item, str) or _is_token_ids(item) for item in prompts):
        raise UsageError("prompt must be a string, a list of strings, a list of token ids or a list of such lists")
    encoded = []
    for i, item in enumerate(prompts):
        if isinstance(item, str):
            check_text("prompt" if len(prompts) == 1 else f"prompt {i}", item)
            item = encode_text(pool.target.tokenizer, item, special=True, max_tokens=pool.max_length)
        encoded.append(item)
    return encoded


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
