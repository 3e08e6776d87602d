"""Lines of JSON as responses: plain ones, and what OpenAI-style endpoints answer.

Plain: ``prompt`` (the text that the model saw, or its token ids) or ``messages`` (by the chat template), and
``response`` (a text) or ``tokens`` (its ids, with the end-of-sequence token if there was one). Optional: ``logprobs``
(a number for each token), ``finish_reason`` (``stop`` or ``length``), ``id``, ``category``, ``max_tokens``, and the
sampling parameters ``temperature``, ``top_k``, ``top_p``, ``min_p``.

Endpoints: a ``chat.completion`` or ``completion`` object with the request's ``prompt`` or ``messages`` beside its
``choices``, or ``{"request": {..}, "response": {..}}``, or a line of a batch file (``response.body``). Token ids come
from ``token_ids`` and ``prompt_token_ids`` where the server tells them, from tokens written as ``token_id:123``, or
from the text, if it is tokenized into just the tokens that the log-probabilities name.
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
from .response import Reading, Response, log_probabilities, sampling_of, token_ids

#: Finish reasons of servers and runs, and whether an end-of-sequence token is part of the response.
FINISHED = {"stop": True, "eos": True, "length": False}


def response_of(reader: Reading, row: Any, where: str) -> Iterator[Response]:
    """The responses of one line. Raises UsageError naming it and the key."""
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a response is a JSON object, not {type(row).__name__}")
    answer, request = row, row
    if isinstance(row.get("response"), dict):
        answer = row["response"].get("body", row["response"])
        request = row.get("request", row)
        request = request.get("body", request) if isinstance(request, dict) else request
        if not isinstance(answer, dict) or not isinstance(request, dict) or "choices" not in answer:
            raise UsageError(f"{where}: 'response' is an object without 'choices', so no answer of an endpoint")
    if "choices" in answer:
        yield from _choices(reader, row, answer, request, where)
    else:
        yield _plain(reader, row, where)


def _plain(reader: Reading, row: dict[str, Any], where: str) -> Response:
    ended = _finished(row, "finish_reason", where)
    if row.get("tokens") is not None:
        tokens = token_ids(row["tokens"], "tokens", where)
        ends = reader.tokenizer(where).eos_token_ids if ended and reader.target else ()
        if ended and not reader.target:
            reader.assumed["that ended by themselves, taken to hold their end-of-sequence token"] += 1
        elif ended and tokens and tokens[-1] not in ends:
            tokens = _with_end(reader, tokens, where)
    else:
        text = row.get("response")
        if not isinstance(text, str):
            raise UsageError(f"{where}: a response needs 'response', a text, or 'tokens', its token ids")
        tokens = _encoded(reader, text, where)
        tokens = _with_end(reader, tokens, where) if ended else tokens
    sampling = sampling_of(row, reader.sampling, where)
    log_p = None
    if row.get("logprobs") is not None:
        log_p = _as_sampled(reader, log_probabilities(row["logprobs"], "logprobs", len(tokens), where), sampling)
    prompt = _prompt(reader, row, where)
    name, category = _name(row, "id", where) or where, _name(row, "category", where) or "all"
    return Response(name, category, prompt, tokens, log_p, bool(ended), _most(row, where), sampling, where)


def _choices(
    reader: Reading, row: dict[str, Any], answer: dict[str, Any], request: dict[str, Any], where: str
) -> Iterator[Response]:
    choices = answer["choices"]
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise UsageError(f"{where}: 'choices' must be a list of objects")
    sampling, most = sampling_of(request, reader.sampling, where), _most(request, where)
    told = answer.get("prompt_token_ids")
    for choice in choices:
        told = choice.get("prompt_token_ids") if told is None else told
    prompt = _prompt(reader, request, where) if told is None else token_ids(told, "prompt_token_ids", where)
    name = _name(row, "custom_id", where) or _name(row, "id", where) or _name(answer, "id", where) or where
    category = _name(row, "category", where) or "all"
    for i, choice in enumerate(choices):
        here = f"{where}, choices[{i}]"
        ended = _finished(choice, "finish_reason", here)
        pieces, values = _logprobs(choice, here)
        tokens = _said(reader, choice, pieces, here)
        log_p = None
        if values is not None:
            log_p = _as_sampled(reader, log_probabilities(values, "logprobs", len(tokens), here), sampling)
        if ended and tokens and reader.target and tokens[-1] not in reader.tokenizer(here).eos_token_ids:
            # What ended it was drawn, too, but nobody wrote it down.
            reader.assumed["without the token that ended them, taken as cut there"] += 1
            ended = False
        yield Response(name, category, prompt, tokens, log_p, bool(ended), most if ended else None, sampling, here)


def _said(reader: Reading, choice: Mapping[str, Any], pieces: list[str] | None, where: str) -> list[int]:
    """The token ids of a choice."""
    if choice.get("token_ids") is not None:
        return token_ids(choice["token_ids"], "token_ids", where)
    if pieces and all(piece.startswith("token_id:") and piece[9:].isdecimal() for piece in pieces):
        return token_ids([int(piece[9:19]) for piece in pieces], "logprobs", where)
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if not isinstance(text, str):
        raise UsageError(f"{where}: it holds neither 'token_ids' nor a text ('text', or 'content' of 'message')")
    tokens = _encoded(reader, text, where)
    if pieces is None:
        return tokens
    found = reader.tokenizer(where)
    if len(pieces) == len(tokens) + 1:  # the last one ended it, and is no part of the text
        ends = {str(found.tokenizer.decode([end])): end for end in found.eos_token_ids}
        if pieces[-1] in ends or (not pieces[-1] and len(ends) == 1):
            tokens = [*tokens, ends.get(pieces[-1], next(iter(ends.values())))]
    same = len(pieces) == len(tokens) and all(
        piece == said or "\ufffd" in piece or "\ufffd" in said or not piece or piece.startswith("bytes:")
        for piece, said in zip(pieces, (str(found.tokenizer.decode([token])) for token in tokens), strict=True)
    )
    if not same:
        raise UsageError(
            f"{where}: its text is tokenized into {len(tokens)} tokens, which are not the {len(pieces)} that carry "
            "log-probabilities; ask the server for token ids (vLLM: return_token_ids, or "
            "return_tokens_as_token_ids), or give the --target that said it"
        )
    return tokens


def _logprobs(choice: Mapping[str, Any], where: str) -> tuple[list[str] | None, list[Any] | None]:
    """The tokens of a choice as texts, and their log-probabilities."""
    found = choice.get("logprobs")
    if found is None:
        return None, None
    if isinstance(found, dict) and isinstance(content := found.get("content"), list):
        if all(isinstance(one, dict) and isinstance(one.get("token"), str) for one in content):
            return [one["token"] for one in content], [one.get("logprob") for one in content]
    elif isinstance(found, dict) and isinstance(pieces := found.get("tokens"), list):
        values = found.get("token_logprobs")
        if isinstance(values, list) and len(values) == len(pieces) and all(isinstance(piece, str) for piece in pieces):
            return pieces, values
    raise UsageError(
        f"{where}: 'logprobs' is neither that of a chat completion (content: token, logprob) nor that of a completion "
        "(tokens, token_logprobs)"
    )


def _as_sampled(reader: Reading, values: np.ndarray, sampling: Sampling | None) -> np.ndarray | None:
    """Log P as the target samples, from what a file says; None where it cannot be that."""
    if sampling is None:
        reader.assumed["with log-probabilities that are not used: it is not known what they were sampled with"] += 1
        return None
    if sampling.temperature == 0:
        return np.zeros(len(values))
    if sampling == Sampling():
        reader.assumed["with log-probabilities at temperature 1: there they are log P, before or after it"] += 1
        return values
    if reader.processed:
        reader.assumed["with log-probabilities taken as those after temperature and truncation, as asked"] += 1
        return values
    reader.assumed[
        "with log-probabilities that are not used: they may be those before temperature and truncation; where they are "
        "not, say --logprobs processed"
    ] += 1
    return None


def _prompt(reader: Reading, row: Mapping[str, Any], where: str) -> list[int]:
    if isinstance(messages := row.get("messages"), list):
        if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise UsageError(f"{where}: 'messages' must be a list of objects with a role and a content")
        return encode_messages(reader.tokenizer(where).tokenizer, messages)
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return token_ids(prompt, "prompt", where)
    if isinstance(prompt, str):
        try:
            return encode_text(reader.tokenizer(where).tokenizer, prompt, special=True)
        except UsageError as error:
            raise _at(error, where) from None
    raise UsageError(f"{where}: there is no 'prompt' (a text or token ids) and there are no 'messages'")


def _encoded(reader: Reading, text: str, where: str) -> list[int]:
    tokenizer = reader.tokenizer(where).tokenizer
    try:
        found = encode_text(tokenizer, text, special=False)
    except UsageError as error:
        raise _at(error, where) from None
    reader.assumed["whose text was tokenized anew, taken to be the tokens that were drawn"] += 1
    return found


def _with_end(reader: Reading, tokens: list[int], where: str) -> list[int]:
    """With the end-of-sequence token that ended it."""
    found = reader.tokenizer(where)
    end = found.tokenizer.eos_token_id
    if end is None:
        raise UsageError(f"{where}: it ended by itself, but {found.model} names no end-of-sequence token")
    reader.assumed["that ended by themselves, with the tokenizer's end-of-sequence token put behind them"] += 1
    return [*tokens, int(end)]


def _at(error: UsageError, where: str) -> UsageError:
    return error if where in str(error) else UsageError(f"{where}: {error}")


def _finished(row: Mapping[str, Any], key: str, where: str) -> bool | None:
    """Whether it ended by itself; None where nobody says."""
    value = row.get(key, row.get("finish_reason"))
    if value is None:
        return None
    if not isinstance(value, str) or value not in FINISHED:
        raise UsageError(f"{where}: {key!r} is {quoted(value)}, which is none of {', '.join(FINISHED)}")
    return FINISHED[value]


def _most(row: Mapping[str, Any], where: str) -> int | None:
    value = next((row[key] for key in ("max_tokens", "max_completion_tokens") if row.get(key) is not None), None)
    if value is not None and (type(value) is not int or not 0 < value <= MOST_TOKENS):
        raise UsageError(f"{where}: 'max_tokens' is {quoted(value)}, which is no number of tokens")
    return value


def _name(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    value = str(value) if type(value) is int else value
    if value is None:
        return ""
    if not isinstance(value, str) or flaw(value, UNPRINTABLE) or MOST_NAME.refusal(value):
        raise UsageError(f"{where}: {key!r} is {quoted(value)}; it must be a short text on one line")
    return value
