"""Parsers of JSONL responses: a plain format and the responses of OpenAI-compatible endpoints.

Plain: ``prompt`` (text or token ids) or ``messages`` (formatted by the chat template), and ``response`` (text) or
``tokens`` (ids, including the end-of-sequence token). Optional: ``logprobs`` (one number per token), ``finish_reason``
(``stop`` or ``length``), ``id``, ``category``, ``max_tokens``, ``continuation`` (ids past the end, see
`Response.continuation`), and the sampling parameters ``temperature``, ``top_k``, ``top_p``, ``min_p``.

Endpoints: a ``chat.completion`` or ``completion`` object with the request's ``prompt`` or ``messages`` next to its
``choices``, or ``{"request": {..}, "response": {..}}``, or a line of a batch file (``response.body``). Token ids are
taken from ``token_ids`` and ``prompt_token_ids``, from tokens of the form ``token_id:123``, or from the text if its
tokenization matches the tokens of the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..contracts.sampling import Sampling
from ..errors import UsageError, quoted
from ..models.chat import encode_messages, encode_text
from ..util.input_files import UNPRINTABLE, flaw
from ..util.limits import MOST_NAME, MOST_TOKENS
from .response import ParseContext, Response, log_probabilities, sampling_of, token_ids

#: Assumption about a prompt whose tokens differ from those of its messages.
OTHER_TEMPLATE = "with a prompt that differs from the messages in the target's chat template"
#: Assumption about a response whose end-of-sequence token was sampled but not recorded.
WITHOUT_END = "without their end-of-sequence token, treated as truncated there"
#: Finish reason -> the response includes an end-of-sequence token.
FINISH_REASONS = {"stop": True, "eos": True, "length": False}


def response_of(context: ParseContext, row: Any, where: str) -> Iterator[Response]:
    """Yield the responses of one line. Raises UsageError with line and key."""
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a response is a JSON object, not {type(row).__name__}")
    body, request = row, row
    if isinstance(row.get("response"), dict):
        body = row["response"].get("body", row["response"])
        request = row.get("request", row)
        request = request.get("body", request) if isinstance(request, dict) else request
        if not isinstance(body, dict) or not isinstance(request, dict) or "choices" not in body:
            raise UsageError(
                f"{where}: 'response' is an object without 'choices'; it must be a text or a response of an "
                "OpenAI-compatible endpoint"
            )
    if "choices" in body:
        yield from _choices(context, row, body, request, where)
    else:
        yield _plain(context, row, where)


def _plain(context: ParseContext, row: dict[str, Any], where: str) -> Response:
    ended = _finished(row, "finish_reason", where)
    if row.get("tokens") is not None:
        tokens = token_ids(row["tokens"], "tokens", where)
        lacks_end = ended and context.target and tokens and tokens[-1] not in context.tokenizer(where).eos_token_ids
        if ended and not context.target:
            context.assumed["with finish_reason stop, assumed to include the end-of-sequence token"] += 1
    else:
        text = row.get("response")
        if not isinstance(text, str):
            raise UsageError(f"{where}: the response is missing; set 'response' (text) or 'tokens' (token ids)")
        tokens, lacks_end = _encoded(context, text, where), ended
    recorded = row.get("logprobs")
    if lacks_end and isinstance(recorded, list) and len(recorded) == len(tokens):
        context.assumed[WITHOUT_END] += 1
        ended = False
    elif lacks_end:
        tokens = _with_end(context, tokens, where)
    sampling = sampling_of(row, context.sampling, where)
    log_p = None
    if recorded is not None:
        log_p = _as_sampled(context, log_probabilities(recorded, "logprobs", len(tokens), where), sampling)
    prompt, most = _prompt(context, row, where), _most(row, where)
    most = None if ended is False else most  # truncated at its length, for instance by the context length
    name, category = _name(row, "id", where) or where, _name(row, "category", where) or "all"
    continuation = row.get("continuation")
    continuation = () if continuation is None else token_ids(continuation, "continuation", where)
    return Response(name, category, prompt, tokens, log_p, bool(ended), most, sampling, where, continuation)


def _choices(
    context: ParseContext, row: dict[str, Any], body: dict[str, Any], request: dict[str, Any], where: str
) -> Iterator[Response]:
    choices = body["choices"]
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise UsageError(f"{where}: 'choices' must be a list of objects")
    sampling, most = sampling_of(request, context.sampling, where), _most(request, where)
    prompt_ids = body.get("prompt_token_ids")
    for choice in choices:
        prompt_ids = choice.get("prompt_token_ids") if prompt_ids is None else prompt_ids
    prompt = (
        _prompt(context, request, where) if prompt_ids is None else token_ids(prompt_ids, "prompt_token_ids", where)
    )
    if isinstance(request.get("messages"), list) and context.target:
        usage = body.get("usage")
        size = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        templated = prompt if prompt_ids is None else _prompt(context, request, where)
        if templated != prompt or (isinstance(size, int) and size != len(templated)):
            context.assumed[OTHER_TEMPLATE] += len(choices)
    name = _name(row, "custom_id", where) or _name(row, "id", where) or _name(body, "id", where) or where
    category = _name(row, "category", where) or "all"
    for i, choice in enumerate(choices):
        choice_where = f"{where}, choices[{i}]"
        ended = _finished(choice, "finish_reason", choice_where)
        pieces, values = _logprobs(choice, choice_where)
        tokens = _choice_tokens(context, choice, pieces, choice_where)
        log_p = None
        if values is not None:
            log_p = _as_sampled(context, log_probabilities(values, "logprobs", len(tokens), choice_where), sampling)
        if ended and tokens and context.target and tokens[-1] not in context.tokenizer(choice_where).eos_token_ids:
            context.assumed[WITHOUT_END] += 1
            ended = False
        yield Response(
            name, category, prompt, tokens, log_p, bool(ended), most if ended else None, sampling, choice_where
        )


def _choice_tokens(context: ParseContext, choice: Mapping[str, Any], pieces: list[str] | None, where: str) -> list[int]:
    if choice.get("token_ids") is not None:
        return token_ids(choice["token_ids"], "token_ids", where)
    if pieces and all(piece.startswith("token_id:") and piece[9:].isdecimal() for piece in pieces):
        return token_ids([int(piece[9:19]) for piece in pieces], "logprobs", where)
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if not isinstance(text, str):
        raise UsageError(f"{where}: the choice is empty; it needs 'token_ids', 'text' or 'message.content'")
    tokens = _encoded(context, text, where)
    if pieces is None:
        return tokens
    result = context.tokenizer(where)
    if len(pieces) == len(tokens) + 1:  # the end-of-sequence token is not part of the text
        ends = {str(result.tokenizer.decode([end])): end for end in result.eos_token_ids}
        if pieces[-1] in ends or (not pieces[-1] and len(ends) == 1):
            tokens = [*tokens, ends.get(pieces[-1], next(iter(ends.values())))]
    same = len(pieces) == len(tokens) and all(
        piece == decoded or "\ufffd" in piece or "\ufffd" in decoded or not piece or piece.startswith("bytes:")
        for piece, decoded in zip(pieces, (str(result.tokenizer.decode([token])) for token in tokens), strict=True)
    )
    if not same:
        raise UsageError(
            f"{where}: the {len(tokens)} tokens of the text differ from the {len(pieces)} tokens with "
            "log-probabilities; request token ids from the server (vLLM: return_token_ids, or "
            "return_tokens_as_token_ids), or set --target to the model that generated it"
        )
    return tokens


def _logprobs(choice: Mapping[str, Any], where: str) -> tuple[list[str] | None, list[Any] | None]:
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
        f"{where}: 'logprobs' has an unknown format; it must be that of a chat completion (content: token, logprob) or "
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


def _prompt(context: ParseContext, row: Mapping[str, Any], where: str) -> list[int]:
    if isinstance(messages := row.get("messages"), list):
        if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise UsageError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
        return encode_messages(context.tokenizer(where).tokenizer, messages)
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return token_ids(prompt, "prompt", where)
    if isinstance(prompt, str):
        try:
            return encode_text(context.tokenizer(where).tokenizer, prompt, special=True)
        except UsageError as error:
            raise _at(error, where) from None
    raise UsageError(f"{where}: the prompt is missing; set 'prompt' (text or token ids) or 'messages'")


def _encoded(context: ParseContext, text: str, where: str) -> list[int]:
    tokenizer = context.tokenizer(where).tokenizer
    try:
        result = encode_text(tokenizer, text, special=False)
    except UsageError as error:
        raise _at(error, where) from None
    context.assumed["with retokenized text, assumed to yield the sampled tokens"] += 1
    return result


def _with_end(context: ParseContext, tokens: list[int], where: str) -> list[int]:
    """``tokens`` with the tokenizer's end-of-sequence token appended."""
    result = context.tokenizer(where)
    end = result.tokenizer.eos_token_id
    if end is None:
        raise UsageError(
            f"{where}: finish_reason is stop, but {result.model} does not define an end-of-sequence token; give "
            "'tokens'"
        )
    context.assumed["with finish_reason stop, with the tokenizer's end-of-sequence token appended"] += 1
    return [*tokens, int(end)]


def _at(error: UsageError, where: str) -> UsageError:
    return error if where in str(error) else UsageError(f"{where}: {error}")


def _finished(row: Mapping[str, Any], key: str, where: str) -> bool | None:
    """True if the response ended with an end-of-sequence token; None if unknown."""
    value = row.get(key, row.get("finish_reason"))
    if value is None:
        return None
    if not isinstance(value, str) or value not in FINISH_REASONS:
        raise UsageError(f"{where}: {key!r} is {quoted(value)}; it must be one of {', '.join(FINISH_REASONS)}")
    return FINISH_REASONS[value]


def _most(row: Mapping[str, Any], where: str) -> int | None:
    value = next((row[key] for key in ("max_tokens", "max_completion_tokens") if row.get(key) is not None), None)
    if value is not None and (type(value) is not int or not 0 < value <= MOST_TOKENS):
        raise UsageError(f"{where}: 'max_tokens' is {quoted(value)}; it must be a positive number of tokens")
    return value


def _name(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    value = str(value) if type(value) is int else value
    if value is None:
        return ""
    if not isinstance(value, str) or flaw(value, UNPRINTABLE) or MOST_NAME.refusal(value):
        raise UsageError(f"{where}: {key!r} is {quoted(value)}; it must be a short, single-line text")
    return value
