"""Parsers of JSONL responses: a plain format and the responses of OpenAI-compatible endpoints.

Plain: ``prompt`` (text or token ids) or ``messages`` (formatted by the chat template), and ``response`` (text) or
``tokens`` (ids, including the end-of-sequence token). Optional: ``logprobs`` (one number per token), ``finish_reason``
(``stop`` or ``length``), ``id``, ``category``, ``max_tokens``, ``continuation`` (ids past the end, see
`Response.continuation`), and the sampling parameters ``temperature``, ``top_k``, ``top_p``, ``min_p``.

Endpoints: a ``chat.completion`` or ``completion`` object with the request's ``prompt`` or ``messages`` next to its
``choices``, or ``{"request": {..}, "response": {..}}``, or a line of a batch file (``response.body``). Token ids are
taken from ``token_ids`` and ``prompt_token_ids``, from tokens of the form ``token_id:123``, or from the text if its
tokenization matches the tokens of the log-probabilities. Thinking and calls are part of the text, see `generated_text`.
A response with another number of tokens than ``usage.completion_tokens`` is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from crossdraft import Sampling, UsageError, quoted
from crossdraft.commands import MOST_NAME, MOST_TOKENS, describe_forbidden_char
from crossdraft.framework.util.input_files import UNPRINTABLE
from crossdraft.models import encode_messages, encode_text

from .generated_text import GENERATED_KEYS, ChatRequest, Message
from .response import ParseContext, Response, UnknownTextError, log_probabilities, sampling_of, token_ids

#: Assumption about a prompt whose tokens differ from those of its messages.
OTHER_TEMPLATE = "with a prompt that differs from the messages in the target's chat template"
#: Assumption about a response whose end-of-sequence token was sampled but not recorded.
WITHOUT_END = "without their end-of-sequence token, treated as truncated there"
RETOKENIZED = "with retokenized text, assumed to yield the sampled tokens"
#: Assumption about an end-of-sequence token that cannot be checked without a tokenizer.
WITH_END = "with finish_reason stop, assumed to include the end-of-sequence token"
#: Finish reason of OpenAI, vLLM, SGLang, TGI or Anthropic -> the response ended with an end-of-sequence token.
FINISH_REASONS = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "tool_calls", "function_call", "tool_use"), True),
    **dict.fromkeys(
        ("length", "max_tokens", "stop_sequence", "content_filter", "refusal", "abort", "cancelled"), False
    ),
    **dict.fromkeys(("error", "pause_turn", "model_context_window_exceeded", "repetition"), False),
}
#: Tokens by which a response may differ from the server's count: an end-of-sequence token if ids are recorded; else
#: those of a stop text, and a part of the response for another tokenization.
_COUNTED = "completion_tokens"
_FEW_IDS, _FEW_TOKENS, _FEW_OF_TEXT = 1, 3, 0.02


def response_of(context: ParseContext, row: Any, place: str) -> Iterator[Response]:
    """Yield the responses of one line. Raises UsageError with line and key."""
    if not isinstance(row, dict):
        raise UsageError(f"{place}: a response is a JSON object, not {type(row).__name__}")
    name, body, request = row.get("custom_id"), row, row
    if isinstance(name, str) and isinstance(row.get("body"), dict) and "response" not in row:
        context.requests[name] = row["body"]
        return
    if (failure := _failure(row)) is not None:
        context.skip("that failed", f"{place}: {failure}")
        return
    if isinstance(row.get("response"), dict):
        body = row["response"].get("body", row["response"])
        request = row.get("request", context.requests.get(name, row) if isinstance(name, str) else row)
        request = request.get("body", request) if isinstance(request, dict) else request
        if not isinstance(body, dict) or not isinstance(request, dict) or "choices" not in body:
            raise UsageError(
                f"{place}: 'response' is an object without 'choices'; it must be a text or a response of an "
                "OpenAI-compatible endpoint"
            )
    if "choices" in body:
        yield from _choices(context, row, body, request, place)
    else:
        yield from _plain(context, row, place)


def _failure(row: Mapping[str, Any]) -> str | None:
    """The reason why a request failed, as OpenAI's API and batches report it; None if it did not."""
    response = row.get("response")
    response = response if isinstance(response, dict) else {}
    body = response.get("body")
    parts = [row, response, body if isinstance(body, dict) else {}]
    error = next((part["error"] for part in parts if part.get("error")), None)
    status = response.get("status_code")
    if error is None and not (type(status) is int and status >= 400):
        return None
    message = error.get("message", error) if isinstance(error, dict) else error
    return ", ".join([*([f"status {status}"] if status else []), *([quoted(message)] if message else [])])


def _plain(context: ParseContext, row: dict[str, Any], place: str) -> Iterator[Response]:
    ended, request = _ended(context, row, place), _request(row, place)
    prompt = _prompt(context, request, row, place)
    ids = row.get("tokens") is not None
    if ids:
        tokens = token_ids(row["tokens"], "tokens", place)
        lacks_end = ended and context.target and tokens and tokens[-1] not in context.tokenizer(place).eos_token_ids
        if ended and not context.target:
            context.assumed[WITH_END] += 1
    else:
        if not isinstance(row.get("response"), str):
            raise UsageError(f"{place}: the response is missing; set 'response' (text) or 'tokens' (token ids)")
        try:
            text = _text(context, _fields(row, row["response"]), request, bool(ended), place)
        except UnknownTextError as error:
            context.skip("whose generated tokens are unknown", str(error))
            return
        tokens, lacks_end = _encoded(context, text, place), ended
    recorded = row.get("logprobs")
    if lacks_end and isinstance(recorded, list) and len(recorded) == len(tokens):
        context.assumed[WITHOUT_END] += 1
        ended = False
    elif lacks_end:
        tokens = _with_end(context, tokens, place)
    sampling = sampling_of(row, context.sampling, place)
    log_p = None
    if recorded is not None:
        log_p = _as_sampled(context, log_probabilities(recorded, "logprobs", len(tokens), place), sampling)
    maximum = _most(row, place)
    if ids and _exceeds(context, tokens, maximum, place):
        return
    # Truncated at its length, for instance by the context length; or of another tokenization than the sampled one.
    maximum = None if ended is False or len(tokens) > (maximum or 0) else maximum
    name, category = _name(row, "id", place) or place, _name(row, "category", place) or "all"
    continuation = row.get("continuation")
    continuation = () if continuation is None else token_ids(continuation, "continuation", place)
    if _is_as_counted(context, row, [tokens], ids=ids, cut=not ended, place=place):
        yield Response(name, category, prompt, tokens, log_p, bool(ended), maximum, sampling, place, continuation)


def _choices(
    context: ParseContext, row: dict[str, Any], body: dict[str, Any], fields: dict[str, Any], place: str
) -> Iterator[Response]:
    choices = body["choices"]
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise UsageError(f"{place}: 'choices' must be a list of objects")
    sampling, maximum, request = (
        sampling_of(fields, context.sampling, place),
        _most(fields, place),
        _request(fields, place),
    )
    prompt_ids = body.get("prompt_token_ids")
    for choice in choices:
        prompt_ids = choice.get("prompt_token_ids") if prompt_ids is None else prompt_ids
    prompt = (
        _prompt(context, request, fields, place)
        if prompt_ids is None
        else token_ids(prompt_ids, "prompt_token_ids", place)
    )
    if request.messages is not None and context.target:
        usage = body.get("usage")
        size = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        templated = prompt if prompt_ids is None else _prompt(context, request, fields, place)
        if templated != prompt or (isinstance(size, int) and size != len(templated)):
            context.assumed[OTHER_TEMPLATE] += len(choices)
    name = _name(row, "custom_id", place) or _name(row, "id", place) or _name(body, "id", place) or place
    category = _name(row, "category", place) or "all"
    responses = []
    for i, choice in enumerate(choices):
        choice_where = f"{place}, choices[{i}]"
        ended = _ended(context, choice, choice_where)
        pieces, values = _logprobs(choice, choice_where)
        try:
            tokens = _choice_tokens(context, choice, pieces, request, bool(ended), choice_where)
        except UnknownTextError as error:
            context.skip("whose generated tokens are unknown", str(error))
            continue
        log_p = None
        if values is not None:
            log_p = _as_sampled(context, log_probabilities(values, "logprobs", len(tokens), choice_where), sampling)
        if ended and not context.target:
            context.assumed[WITH_END] += 1
        elif ended and tokens and tokens[-1] not in context.tokenizer(choice_where).eos_token_ids:
            if len(choices) == 1 and log_p is None and _counted(body) == len(tokens) + 1:
                tokens = _with_end(context, tokens, choice_where)
            else:
                context.assumed[WITHOUT_END] += 1
                ended = False
        if choice.get("token_ids") is not None and _exceeds(context, tokens, maximum, choice_where):
            continue
        limit = maximum if ended and len(tokens) <= (maximum or 0) else None
        responses.append(Response(name, category, prompt, tokens, log_p, bool(ended), limit, sampling, choice_where))
    ids = all(choice.get("token_ids") is not None for choice in choices)
    cut = not all(response.ended for response in responses)
    every = [response.tokens for response in responses]
    if len(responses) < len(choices) or _is_as_counted(context, body, every, ids=ids, cut=cut, place=place):
        yield from responses


def _exceeds(context: ParseContext, tokens: Sequence[int], maximum: int | None, place: str) -> bool:
    """True if recorded tokens are more than the request permitted; they are counted as skipped."""
    if maximum is None or len(tokens) <= maximum:
        return False
    context.skip("with more tokens than max_tokens", f"{place}: {len(tokens)} tokens, but max_tokens is {maximum}")
    return True


def _counted(body: Mapping[str, Any]) -> Any:
    """The number of tokens that a server counted; None if it did not."""
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return next((usage[key] for key in (_COUNTED, "output_tokens") if usage.get(key) is not None), None)


def _is_as_counted(
    context: ParseContext,
    body: Mapping[str, Any],
    choices: Sequence[Sequence[int]],
    *,
    ids: bool,
    cut: bool,
    place: str,
) -> bool:
    """True if the choices have the tokens that the server counted, but for a few; else they are counted as skipped.

    ``ids``: they are recorded token ids; ``cut``: one may lack its end-of-sequence token.
    """
    if (counted := _counted(body)) is None:
        return True
    if type(counted) is not int or counted < 0:
        raise UsageError(f"{place}: 'usage.{_COUNTED}' is {quoted(counted)}; it must be a number of tokens")
    size = sum(map(len, choices))
    difference = abs(counted - size)
    few = _FEW_IDS if ids else _FEW_TOKENS + _FEW_OF_TEXT * counted
    if difference > few * len(choices):
        context.skip(
            "with more or fewer tokens than the server counted",
            f"{place}: {size} tokens would be replayed, but usage.{_COUNTED} is {counted}; "
            + ("the file is damaged" if ids else "set --target to the model that generated it, or record token ids"),
            len(choices),
        )
        return False
    if difference and not (cut and size < counted <= size + len(choices)):
        context.assumed["with a few tokens more or fewer than the server counted (usage.completion_tokens)"] += len(
            choices
        )
    return True


def _choice_tokens(
    context: ParseContext,
    choice: Mapping[str, Any],
    pieces: list[str] | None,
    request: ChatRequest,
    ended: bool,
    place: str,
) -> list[int]:
    if choice.get("token_ids") is not None:
        return token_ids(choice["token_ids"], "token_ids", place)
    if pieces and all(piece.startswith("token_id:") and piece[9:].isdecimal() for piece in pieces):
        return token_ids([int(piece[9:19]) for piece in pieces], "logprobs", place)
    fields = choice.get("message")
    if not isinstance(fields, dict):
        fields = _fields(choice, choice["text"]) if isinstance(choice.get("text"), str) else {}
    if pieces is None:
        return _encoded(context, _text(context, fields, request, ended, place), place)
    message = _message(fields, place)
    result = context.tokenizer(place)
    names = [str(result.tokenizer.decode([end])) for end in result.eos_token_ids]
    whole = "" if any(map(_is_partial, pieces)) else "".join(pieces)
    complete = _contains(whole, message.texts(request))
    texts = [message.generated(request, result, ended=ended)] if not (message.thinking or message.calls) else []
    texts += [whole] if complete else []
    count = 0
    for text in texts:
        tokens = _encode(context, text, place)
        count = count or len(tokens)
        if len(pieces) == len(tokens) + 1:  # the end-of-sequence token is not part of the text
            ends = dict(zip(names, result.eos_token_ids, strict=True))
            if pieces[-1] in ends or (not pieces[-1] and len(ends) == 1):
                tokens = [*tokens, ends.get(pieces[-1], next(iter(ends.values())))]
        if len(pieces) == len(tokens) and all(
            piece == decoded or _is_partial(piece) or _is_partial(decoded)
            for piece, decoded in zip(pieces, (str(result.tokenizer.decode([token])) for token in tokens), strict=True)
        ):
            context.assumed[RETOKENIZED] += 1
            return tokens
    if complete and (tokens := context.named(pieces, place)):
        return tokens
    raise UsageError(
        f"{place}: the {count} tokens of the text differ from the {len(pieces)} tokens with "
        "log-probabilities; request token ids from the server (vLLM: return_token_ids, or "
        "return_tokens_as_token_ids), or set --target to the model that generated it"
    )


def _is_partial(piece: str) -> bool:
    """True for the text of a token that is a part of a character, or that a server does not write as text."""
    return not piece or "\ufffd" in piece or piece.startswith("bytes:")


def _contains(text: str, parts: Sequence[str]) -> bool:
    """True if a text has all parts in their order, but for white space."""
    text, end = "".join(text.split()), 0
    for part in ("".join(part.split()) for part in parts):
        end = text.find(part, end) + len(part)
        if end < len(part):
            return False
    return True


def _text(context: ParseContext, fields: Mapping[str, Any], request: ChatRequest, ended: bool, place: str) -> str:
    """The generated text of a message. Raises UnknownTextError if it does not follow from the message."""
    message = _message(fields, place)
    if not (message.thinking or message.calls):
        return message.content
    target = context.tokenizer(place)
    with _placed(place, UnknownTextError):
        text = message.generated(request, target, ended=ended)
    context.assumed["with thinking or calls in fields of their own, put together by the target's chat template"] += 1
    return text


def _fields(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The fields of a message that a row without one has."""
    return {**{key: row.get(key) for key in GENERATED_KEYS}, "content": text}


def _message(fields: Mapping[str, Any], place: str) -> Message:
    with _placed(place, UnknownTextError):
        message = Message.parse(fields)
    if message is None and "content" not in fields:
        raise UsageError(f"{place}: the choice is empty; it needs 'token_ids', 'text' or 'message.content'")
    return message or Message()


def _logprobs(choice: Mapping[str, Any], place: str) -> tuple[list[str] | None, list[Any] | None]:
    """Tokens of a choice as texts, and their log-probabilities."""
    result = choice.get("logprobs")
    if result is None:
        return None, None
    if isinstance(result, dict) and isinstance(content := result.get("content"), list):
        if all(isinstance(item, dict) and isinstance(item.get("token"), str) for item in content):
            return [item["token"] for item in content], [item.get("logprob") for item in content]
    elif isinstance(result, dict) and isinstance(pieces := result.get("tokens"), list):
        values = result.get("token_logprobs")
        if isinstance(values, list) and len(values) == len(pieces) and all(isinstance(piece, str) for piece in pieces):
            return pieces, values
    raise UsageError(
        f"{place}: 'logprobs' has an unknown format; it must be that of a chat completion (content: token, logprob) or "
        "of a completion (tokens, token_logprobs)"
    )


def _as_sampled(context: ParseContext, values: np.ndarray, sampling: Sampling | None) -> np.ndarray | None:
    """Log P of the sampled tokens, from recorded values; None if they may be unprocessed or the sampling is unknown."""
    if sampling is None:
        context.assumed["with log-probabilities that are ignored: their sampling parameters are unknown"] += 1
        return None
    if sampling.temperature == 0:
        return np.zeros(len(values))
    if sampling == Sampling():
        context.assumed["with log-probabilities at temperature 1, where raw and processed ones are equal"] += 1
        return values
    if context.processed:
        context.assumed["with log-probabilities taken after temperature and truncation (--logprobs processed)"] += 1
        return values
    context.assumed[
        "with log-probabilities that are ignored: they may be those before temperature and truncation; if they are "
        "not, set --logprobs processed"
    ] += 1
    return None


def _request(fields: Mapping[str, Any], place: str) -> ChatRequest:
    with _placed(place):
        return ChatRequest.parse(fields)


def _prompt(context: ParseContext, request: ChatRequest, row: Mapping[str, Any], place: str) -> list[int]:
    prompt = row.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):  # a list of one prompt
        (prompt,) = prompt
    with _placed(place):
        if request.messages is not None:
            encoded = partial(encode_messages, context.tokenizer(place).tokenizer, request.messages)
            tokens = encoded(tools=request.tools, options=request.options)
            if request.tools and tokens == encoded(options=request.options):
                context.assumed["with tools that the target's chat template does not write into the prompt"] += 1
            return tokens
        if isinstance(prompt, str):
            return encode_text(context.tokenizer(place).tokenizer, prompt, special=True)
    if isinstance(prompt, list):
        return token_ids(prompt, "prompt", place)
    raise UsageError(
        f"{place}: the prompt is missing; set 'prompt' (text or token ids) or 'messages', or give the input of an "
        "OpenAI batch before its output"
    )


def _encoded(context: ParseContext, text: str, place: str) -> list[int]:
    result = _encode(context, text, place)
    context.assumed[RETOKENIZED] += 1
    return result


def _encode(context: ParseContext, text: str, place: str) -> list[int]:
    with _placed(place):
        return encode_text(context.tokenizer(place).tokenizer, text, special=False)


def _with_end(context: ParseContext, tokens: list[int], place: str) -> list[int]:
    """``tokens`` with the tokenizer's end-of-sequence token appended."""
    result = context.tokenizer(place)
    end = result.tokenizer.eos_token_id
    if end is None:
        raise UsageError(
            f"{place}: finish_reason is stop, but {result.model} does not define an end-of-sequence token; give "
            "'tokens'"
        )
    context.assumed["with finish_reason stop, with the tokenizer's end-of-sequence token appended"] += 1
    return [*tokens, int(end)]


@contextmanager
def _placed(place: str, kind: type[UsageError] | None = None) -> Iterator[None]:
    """Errors with their place, by default of their own kind if they have it."""
    try:
        yield
    except UsageError as error:
        if kind is None and place in str(error):
            raise
        raise (kind or UsageError)(str(error) if place in str(error) else f"{place}: {error}") from None


def _ended(context: ParseContext, row: Mapping[str, Any], place: str) -> bool | None:
    """True if the response ended with an end-of-sequence token; None if unknown."""
    value = row.get("finish_reason")
    value = value.get("type") if isinstance(value, dict) else value  # SGLang
    if value is None:
        return None
    if not isinstance(value, str):
        raise UsageError(f"{place}: 'finish_reason' is {quoted(value)}; it must be a text, such as stop or length")
    if value.lower() not in FINISH_REASONS:
        context.assumed[f"with the unknown finish_reason {quoted(value, 20)}, treated as truncated there"] += 1
    # A text as vLLM's stop_reason is the stop text that ended the response.
    return FINISH_REASONS.get(value.lower(), False) and not isinstance(row.get("stop_reason"), str)


def _most(row: Mapping[str, Any], place: str) -> int | None:
    value = next((row[key] for key in ("max_tokens", "max_completion_tokens") if row.get(key) is not None), None)
    if value is not None and (type(value) is not int or not 0 < value <= MOST_TOKENS):
        raise UsageError(f"{place}: 'max_tokens' is {quoted(value)}; it must be a positive number of tokens")
    return value


def _name(row: Mapping[str, Any], key: str, place: str) -> str:
    value = row.get(key)
    value = str(value) if type(value) is int else value
    if value is None:
        return ""
    if not isinstance(value, str) or describe_forbidden_char(value, UNPRINTABLE) or MOST_NAME.violation(value):
        raise UsageError(f"{place}: {key!r} is {quoted(value)}; it must be a short, single-line text")
    return value
