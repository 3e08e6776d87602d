"""Servers of engines that a run measures: started for a cell, or reached by their URL.

Servers are registered through the hook ``crossdraft_register_servers``, each under the name that a recipe gives as
``engine``. A server speaks HTTP with server-sent events; subclasses describe its command line, its request and its
events.

If a server ends, the cause is in its log. An engine consists of processes, and the first one that fails logs the cause;
the others follow with "see root cause above". So it is the last line of the first traceback that is not logged as a
warning, of the process that wrote it. A log without tracebacks (llama.cpp, errors of arguments) has its first lines
about an error.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from crossdraft import Limit, ModelError, Sampling, UsageError, first_line, printable, quoted
from crossdraft.commands import Options, parse_json
from crossdraft.runs import environment_of_others

from ..limits import EVENT_BYTES
from .engine_log import ESCAPES
from .http_response import HEADERS, HttpResponse, NetworkError, fetch, redacted, unfit

_POLL = 0.25  # seconds between two looks at a starting server
_STOP = 30  # seconds that a server may take to stop before it is killed
_TOKEN_BYTES = 2**16  # bytes of a stream for each requested token
_CHARACTER_BYTES = 4  # of UTF-8; a token has at least one
_BODY_SECONDS = 30.0  # seconds for a response that is not a stream


class _UnknownToken(int):
    """An id that no JSON of a server can equal by identity."""


UNKNOWN = _UnknownToken(-1)  # token whose id the engine does not stream


class ServerOptions(Options):
    """Options of an engine in a recipe. Subclasses add their own."""

    url: str = Field(default="", description="address of a running server, with speculation; by default one is started")
    baseline_url: str = Field(default="", description="address of a server of the same engine without speculation")
    plain: dict[str, Any] = Field(
        default={},
        description="fields of a request that switch speculation off, for plain decoding by url without baseline_url",
    )
    model: str = Field(
        default="", description="name or path of the target for the engine; by default that of the recipe"
    )
    args: list[str] = Field(default=[], description="further arguments of the server")
    env: dict[str, str] = Field(default={}, description="further environment variables of the server")
    start_seconds: float = Field(default=900, gt=0, description="maximum time until the server answers")
    token_seconds: float = Field(default=300, gt=0, description="maximum time without a new token of a response")
    response_seconds: float = Field(default=3600, gt=0, description="maximum time of a whole response")

    @field_validator("url", "baseline_url")
    @classmethod
    def _address(cls, url: str) -> str:
        if url and (reason := unfit(url)):
            raise ValueError(f"is not the address of a server: {reason}; write it as http://host:8000")
        return url


@dataclass(frozen=True)
class ServedCell:
    """Settings of a cell for a server."""

    target: Path  # directory or file of the target
    dtype: str  # of the target, or ``"auto"``
    sampling: Sampling
    seed: int
    batch_size: int  # maximum number of concurrent requests
    length: int  # maximum number of tokens of a sequence, prompt and two drafts included, within the target's context
    gamma: int  # maximum number of drafted tokens per step; 0 without speculation
    flags: Sequence[str]  # arguments that set up speculation, see `Engine.export`
    end_tokens: Sequence[int]  # end-of-sequence ids of the target
    tokenizer: Any  # of the target
    vocab_size: int | None = None  # number of token ids of the target; None if unknown


@dataclass
class ServerEvent:
    """One event of a streamed response.

    Attributes:
        drafted, accepted: tokens of each step that drafted, in order, if the engine reports them for each request. A
            single total each (`totals`) if it reports only their sums.
    """

    # new tokens; empty if the event has none. `UNKNOWN` if the engine streams text instead of token ids.
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # ``"stop"`` or ``"length"`` in the last event with tokens or after it, else None
    drafted: list[int] | None = None
    accepted: list[int] | None = None
    totals: tuple[int, int] | None = None
    text: str = ""  # new text, if the engine streams text
    #: Tokens of the response by the engine's count, in the last event. Those of a character that the limit cuts, which
    #: llama.cpp does not send, are in it.
    total: int | None = None


@dataclass
class ServedStep:
    """Tokens that one step of the engine emitted, the first step being the prefill."""

    seconds: float  # time of arrival since the request was sent
    tokens: int  # number of tokens
    nodes: int = 0  # number of drafted tokens, set once the steps of the response are counted


@dataclass
class ServedResponse:
    """Response of a server to one request."""

    tokens: list[int]  # generated tokens, a final end-of-sequence token included
    steps: list[ServedStep]  # steps in order; their tokens sum up to ``len(tokens)``
    finish_reason: str
    sent: float  # time at which the request was sent, of `time.perf_counter`
    # drafted, accepted, totals: as in `ServerEvent`; None if unknown
    drafted: list[int] | None = None
    accepted: list[int] | None = None
    totals: tuple[int, int] | None = None


def without_plain_decoding(engine: str) -> str:
    """The reason why a running server cannot decode plainly, and what makes it possible."""
    return (
        f"engine {engine}: baseline_url is missing; give the address of a server without speculation, or plain, the "
        "fields of a request that switch it off, if the engine has them (docs/remote.md)"
    )


class EngineServer(ABC):
    """A server for one cell, with validated options of the recipe; ``directory``: for its log."""

    name: ClassVar[str]  # as registered
    # name of the `Engine` that writes the settings of drafters; empty if only running servers are measured
    settings: ClassVar[str] = ""
    Config: ClassVar[type[ServerOptions]] = ServerOptions
    path: ClassVar[str] = "/v1/completions"  # path of the completions endpoint
    ready: ClassVar[str] = "/health"  # path that answers with status 200 when the server is ready
    metrics: ClassVar[str] = "/metrics"  # path of its Prometheus counters
    # True if the server streams tokens one by one, so that the steps follow from arrival times and the totals of the
    # request
    tokens_per_event: ClassVar[bool] = False
    executable: ClassVar[str] = ""  # name of the option that names the program to start, if there is one
    # options that neither start nor steer a program. All others need consent, see `program`.
    harmless: ClassVar[frozenset[str]] = frozenset(
        {"url", "baseline_url", "plain", "model", "start_seconds", "token_seconds", "response_seconds"}
    )

    def __init__(self, options: Any, cell: ServedCell, directory: Path):
        self.options, self.cell, self.directory, self.log = options, cell, directory, directory / "server.log"
        self.url, self._answer = "", ""
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def program(cls, options: ServerOptions) -> str:
        """Return the program that needs consent, ``--allow-program``, because ``options`` start or steer it.

        It is the value of the option `executable`, by default the engine's name; empty for engines that start nothing,
        and for running servers whose options are all `harmless`.
        """
        if cls.start is EngineServer.start and cls.command is EngineServer.command:
            return ""
        if (options.url or options.baseline_url) and not cls.steering(options):
            return ""
        return str(getattr(options, cls.executable or "name", "") or cls.name)

    @classmethod
    def steering(cls, options: ServerOptions) -> dict[str, Any]:
        """Return the options that are set and not `harmless`."""
        fields = type(options).model_fields.items()
        values = {key: (getattr(options, key), field) for key, field in fields if key not in cls.harmless}
        return {
            key: value
            for key, (value, field) in values.items()
            if field.is_required() or value != field.get_default(call_default_factory=True)
        }

    # -- what an engine defines ------------------------------------------------------------------------------

    def command(self, port: int) -> list[str]:
        """The command line of a server on ``port`` of this host. Raises UsageError if only a URL is supported."""
        raise UsageError(f"engine {self.name}: give the url of a server that runs; crossdraft does not start this one")

    def environment(self) -> dict[str, str]:
        """Return environment variables of the server, beside those of this process."""
        return {}

    @abstractmethod
    def body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """The JSON of a streaming request for the tokens ``prompt``. Raises UsageError for its sampling parameters."""

    @abstractmethod
    def event(self, data: Mapping[str, Any]) -> ServerEvent:
        """Parse an event of the stream. Raises KeyError or TypeError for another format."""

    # -- life ------------------------------------------------------------------------------------------------

    @property
    def given_url(self) -> str:
        """URL of a running server for this cell, or empty."""
        options = self.options
        if not (options.url or options.baseline_url):
            return ""
        if url := options.url if self.cell.gamma or self.plain_fields else options.baseline_url:
            return url.rstrip("/")
        if self.cell.gamma:
            raise UsageError(f"engine {self.name}: url is missing; give the address of a server with speculation")
        raise UsageError(without_plain_decoding(self.name))

    @property
    def plain_fields(self) -> dict[str, Any]:
        """Fields of a request with which the server of ``url`` decodes without speculation; empty for other cells."""
        return {} if self.cell.gamma or self.options.baseline_url else self.options.plain

    def start(self) -> None:
        """Start the server, or find the one of the URL; returns when it is ready.

        Raises ModelError if it ends or does not answer, with the cause in its log; UsageError if its executable is
        missing, or the URL does not answer.
        """
        if url := self.given_url:
            self.url = url
            if not self._is_ready():
                raise UsageError(
                    f"engine {self.name}: {url} is not ready ({self._answer}); check the address, the certificate if "
                    f"it is of a private authority, and {HEADERS} if the server needs an API key (docs/remote.md)"
                )
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command, self.url = self.command(port), f"http://127.0.0.1:{port}"
        # `python -m` would import from the working directory, in which foreign files may lie.
        own = {name: value for name, value in environment_of_others().items() if name != HEADERS}
        environment = {"PYTHONSAFEPATH": "1", **own, **self.environment(), **self.options.env}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
                )
            except OSError as error:
                raise UsageError(f"engine {self.name}: cannot start {command[0]}: {error.strerror}") from None
        deadline = time.monotonic() + self.options.start_seconds
        while not self._is_ready():
            if (code := self._process.poll()) is not None:
                self._process = None
                raise ModelError(
                    f"the server of {self.name} ended with code {code} before it was ready{cause_of(self.log)}"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise ModelError(
                    f"the server of {self.name} was not ready within {self.options.start_seconds:g} s "
                    f"(start_seconds){cause_of(self.log)}"
                )
            time.sleep(_POLL)

    def stop(self) -> None:
        """Stop the server if it was started here, and all its processes."""
        process, self._process = self._process, None
        if process is None:
            return
        for sign, patience in ((signal.SIGTERM, _STOP), (signal.SIGKILL, None)):
            try:
                os.killpg(process.pid, sign)
            except ProcessLookupError:
                break
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        process.wait()

    def _is_ready(self) -> bool:
        # A gateway in front of a running server may have no other path than those of OpenAI's API.
        paths = [self.ready] if self._process else [self.ready, "/v1/models"]
        for path in paths:
            try:
                status = self.get(path, seconds=5)[0]
            except NetworkError as error:
                self._answer = first_line(error)
                return False
            if status == 200:
                return True
            self._answer = f"{path} answers with status {status}"
        return False

    @cached_property
    def served_model(self) -> str:
        """The server's name of the target: the option ``model``; else the first one that it lists, or ModelError."""
        if self.options.model or self._process is not None:
            return str(self.options.model or self.cell.target)
        try:
            models = parse_json(self.get("/v1/models")[1], f"{self.url}/v1/models", error=ModelError)
            return str(models["data"][0]["id"])
        except (NetworkError, LookupError, TypeError) as error:
            raise ModelError(
                f"engine {self.name}: {self.url}/v1/models has no model ({first_line(error)}); set the option model"
            ) from None

    def scrape(self) -> str:
        """Return the counters; empty if the server has none."""
        try:
            status, text = self.get(self.metrics)
        except NetworkError:
            return ""
        return text if status == 200 else ""

    def get(self, path: str, seconds: float = _BODY_SECONDS) -> tuple[int, str]:
        """Send a GET request; returns the status and the body. Raises NetworkError."""
        return fetch(self.url + path, seconds)

    # -- requests --------------------------------------------------------------------------------------------

    def complete(self, prompt: Sequence[int], max_tokens: int, event_bytes: Limit = EVENT_BYTES) -> ServedResponse:
        """Send one request and read its response; ``event_bytes``: most bytes between two tokens. Threads may share it.

        Raises ModelError if the server refuses the request, ends, answers in an unknown format, or with an impossible
        response (see `response_flaw`).
        """
        events: list[tuple[float, ServerEvent]] = []
        emitted, account = 0, dict[str, Any]()
        limits = {"seconds": self.options.token_seconds, "whole_seconds": self.options.response_seconds}
        whole = Limit(event_bytes + max_tokens * _TOKEN_BYTES, "the tokens of the response do not need more")
        sent = time.perf_counter()
        try:
            body = self.body(prompt, max_tokens) | self.plain_fields
            with HttpResponse(self.url + self.path, body, maximum=event_bytes, whole=whole, **limits) as stream:
                if stream.status != 200:
                    raise ModelError(f"the server of {self.name} refuses the request, {stream.error()}")
                for data in _events(stream, self.name):
                    now = time.perf_counter()
                    if "error" in data:
                        raise ModelError(f"the server of {self.name} reports: {quoted(data['error'], 300)}")
                    account |= {key: data[key] for key in ("model", "usage", "timings") if data.get(key) is not None}
                    event = self.event(data)
                    events.append((now - sent, event))
                    if event.tokens:
                        emitted += len(event.tokens)
                        if emitted > max_tokens:
                            break
                        stream.renew()
        except NetworkError as error:
            raise ModelError(f"the server of {self.name} broke off: {error}{cause_of(self.log)}") from None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ModelError(
                f"the server of {self.name} sent an event of an unknown format: {first_line(error)}; is {self.url} a "
                f"server of {self.name}?"
            ) from error
        if flaw := account_flaw(account, body.get("model"), sum(len(event.tokens) for _, event in events)):
            raise self._impossible(flaw)
        return self._response(events, sent, max_tokens)

    def _response(self, events: Sequence[tuple[float, ServerEvent]], sent: float, max_tokens: int) -> ServedResponse:
        last: dict[str, Any] = {}
        for _, event in events:
            if "finish_reason" in last and (event.tokens or event.finish_reason is not None):
                raise self._impossible("tokens or a second finish reason after the end of the response")
            values = {
                name: getattr(event, name) for name in ("finish_reason", "drafted", "accepted", "totals", "total")
            }
            last |= {name: value for name, value in values.items() if value is not None}
        steps: list[ServedStep] = []
        for seconds, event in events:
            n = len(event.tokens)  # of engines that stream single tokens: those of a character, or one
            steps += (ServedStep(seconds, size) for size in ([1] * n if self.tokens_per_event else [n] if n else []))
        tokens = [token for _, event in events for token in event.tokens]
        text = "".join(event.text for _, event in events if isinstance(event.text, str))
        if not tokens or ("finish_reason" not in last and len(tokens) <= max_tokens):
            raise ModelError(f"the server of {self.name} sent a response without tokens or without a finish reason")
        cell, finish_reason = self.cell, last.setdefault("finish_reason", None)
        total = last.pop("total", len(tokens))
        if finish_reason != "length" or not 0 <= total - len(tokens) < _CHARACTER_BYTES:
            total = len(tokens)
        if all(token is UNKNOWN for token in tokens):
            tokens = list(cell.tokenizer(text, add_special_tokens=False)["input_ids"])
            if finish_reason == "stop" and cell.end_tokens:  # which has no text
                tokens.append(cell.end_tokens[0])
            if finish_reason == "stop" and sum(step.tokens for step in steps) == len(tokens) - 1:
                steps.append(ServedStep(steps[-1].seconds, 1))  # the end-of-sequence token, which was not reported
        flaw = response_flaw(
            tokens,
            [step.tokens for step in steps],
            finish_reason,
            gamma=cell.gamma,
            max_tokens=max_tokens + len(tokens) - total,
            end_tokens=cell.end_tokens,
            vocab_size=cell.vocab_size,
        ) or counts_flaw(last.get("drafted"), last.get("accepted"), last.get("totals"), emitted=total, gamma=cell.gamma)
        if flaw:
            raise self._impossible(flaw)
        response = ServedResponse(tokens, steps, sent=sent, **last)
        if self.tokens_per_event and response.totals is not None:
            response.steps = _grouped(steps, total - response.totals[1])
        return response

    def _impossible(self, flaw: str) -> ModelError:
        return ModelError(f"the server of {self.name} at {self.url} sent an impossible response: {flaw}")


def _events(stream: HttpResponse, name: str) -> Iterator[dict[str, Any]]:
    """Parse the data lines of a stream of server-sent events, up to ``[DONE]`` or its end."""
    rest = b""
    while part := stream.read():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                text = line[5:].strip()
                if text == b"[DONE]":
                    return
                data = parse_json(redacted(text.decode("utf-8")), f"the stream of {name}", error=ModelError)
                if not isinstance(data, dict):
                    raise TypeError(f"{quoted(data, 40)} is not an object")
                yield data


def _grouped(tokens: Sequence[ServedStep], steps: int) -> list[ServedStep]:
    """Group single tokens into ``steps`` steps at the longest gaps between their arrivals.

    Engines that stream tokens one by one send those of a step back to back.
    """
    gaps = sorted(range(1, len(tokens)), key=lambda i: tokens[i].seconds - tokens[i - 1].seconds, reverse=True)
    starts = [0, *sorted(gaps[: max(steps, 1) - 1]), len(tokens)]
    return [
        ServedStep(tokens[end - 1].seconds, sum(step.tokens for step in tokens[start:end]))
        for start, end in pairwise(starts)
    ]


#: Bytes at the end of a log that are read, lines that are shown, and characters of a line.
_BYTES, _LINES, _LENGTH = 2**24, 12, 500
_MORE = 4  # lines of a message that continue the last one of a traceback
_TRACEBACK = "Traceback (most recent call last):"
_PROCESS = re.compile(r"\([A-Za-z][\w ]*pid=\d+\) ?")  # process, as vLLM writes it before every line
#: Level, time and place, as loggers write them before every line.
_PREFIX = re.compile(
    r"(\[[^\]]*\] ?|(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b:? ?|\d\d(\d\d)?-\d\d(-\d\d)? |\d\d:\d\d:\d\d([.,]\d+)? ?)+"
)
_HARMLESS = re.compile(r"\b(DEBUG|INFO)\b|(?i:warn(ing)?\b)|\[[IWDV]\]|^[\d.]+ [IWD] ")
_ERROR = re.compile(
    r"\b(error|fatal|failed|failure|exception|abort(ed)?|assert(ion)?|terminate called|out of memory|killed|"
    r"segmentation fault|unrecognized|invalid|no such file|not found|cannot|unable to)\b|"
    r"\w+(Error|Exception)\b|_ASSERT\b|what\(\)",
    re.IGNORECASE,
)
_RAISED = re.compile(r"[A-Za-z_][\w.]*(:|$)")  # first line of an exception, without its frames
_CHAINED = ("During handling of the above", "The above exception was")


def cause_of(log: Path) -> str:
    """The end of a message about a server: the log's path and the lines with the cause, or else its last lines.

    Empty without a log.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _BYTES, 0))
            text = redacted(file.read().decode("utf-8", "replace"))
            file.seek(0)
            skipped = sum(file.read(size - _BYTES).count(b"\n") for _ in range(size > _BYTES))
    except OSError:
        return ""
    lines = [ESCAPES.sub("", line).rstrip() for line in text.split("\n")]
    start = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=-1) + 1  # of this start
    errors = [i for i in range(start, len(lines)) if _ERROR.search(lines[i]) and not _HARMLESS.search(lines[i])]
    cause = _of_traceback(lines, start) or errors[:_MORE]
    if not cause:
        shown = [line for line in lines[start:] if line][-_LINES:]
        return f"; the end of {log}:" + "".join(f"\n  {_shown(line)}" for line in shown)
    return f"; line {skipped + cause[0] + 1} of {log}:" + "".join(f"\n  {_shown(lines[i])}" for i in cause)


def _shown(line: str) -> str:
    line = printable(line)
    return line if len(line) <= _LENGTH else f"{line[: _LENGTH - 1]}…"


def _split(line: str) -> tuple[str, str, str]:
    """Process, prefix of the logger, and text of a line."""
    process = _PROCESS.match(line)
    rest = line[process.end() :] if process else line
    prefix = _PREFIX.match(rest)
    return process[0] if process else "", prefix[0] if prefix else "", rest[prefix.end() :] if prefix else rest


def _of_traceback(lines: list[str], start: int) -> list[int]:
    """Indices of the message at the end of the first traceback."""
    for i in range(start, len(lines)):
        if _TRACEBACK not in lines[i] or _HARMLESS.search(lines[i].partition(_TRACEBACK)[0]):
            continue
        process = _split(lines[i])[0]
        own = [j for j in range(i + 1, len(lines)) if _split(lines[j])[0] == process]
        for n, j in enumerate(own):
            text = _split(lines[j])[2]
            if _RAISED.match(text) and not text.startswith(_CHAINED):
                message = [j]
                for k in own[n + 1 : n + 1 + _MORE]:
                    text = _split(lines[k])[2]
                    if not text.startswith((" ", "\t")):
                        break
                    message.append(k)
                return message
    return []


FINISH_REASONS = ("stop", "length")


def response_flaw(
    tokens: Sequence[Any],
    steps: Sequence[int],
    finish_reason: Any,
    *,
    gamma: int,
    max_tokens: int,
    end_tokens: Collection[int],
    vocab_size: int | None,
) -> str | None:
    """The reason why a response is impossible, and what to do about it; None if it is possible.

    ``tokens`` and ``steps`` (numbers of tokens) include a final end-of-sequence id and the prefill. ``gamma`` is 0
    without speculation, ``end_tokens`` empty and ``vocab_size`` None if unknown.
    """
    beyond = [t for t in tokens if type(t) is not int or not 0 <= t < (t + 1 if vocab_size is None else vocab_size)]
    if beyond:
        size = f" of {vocab_size} tokens" if vocab_size else ""
        return f"{quoted(beyond[0])} is not an id of the target's vocabulary{size}; does it serve this target?"
    if max(steps, default=0) > gamma + 1:
        if not gamma:
            return (
                f"{max(steps)} tokens at once, but without speculation a step has one; it speculates, or sends several "
                "steps together: give the address of a server without speculation, or put less load on it"
            )
        return (
            f"{max(steps)} tokens at once, but a step with {gamma} drafted tokens has at most {gamma + 1}; it drafts "
            "more tokens, or sends several steps together: set gamma to the server's, or put less load on it"
        )
    if len(tokens) > max_tokens:
        return f"more than the {max_tokens} tokens of the request; the server ignores the limit"
    if sum(steps) != len(tokens):
        return (
            f"its text has {len(tokens)} tokens when encoded again, but the server emitted {sum(steps)}; use an engine "
            "that returns token ids (option token_ids)"
        )
    if finish_reason not in FINISH_REASONS:
        return f"the finish reason {quoted(finish_reason)}; expected stop or length"
    if early := [i for i, token in enumerate(tokens[:-1]) if token in end_tokens]:
        return (
            f"the end-of-sequence token {tokens[early[0]]} at token {early[0] + 1} of {len(tokens)}; responses must "
            "end there: start the server without ignore_eos, and with the target's end-of-sequence tokens"
        )
    if finish_reason == "stop" and end_tokens and tokens[-1] not in end_tokens:
        return (
            f"the finish reason 'stop' after token {tokens[-1]}, which is not an end-of-sequence token of the target "
            f"({', '.join(map(str, sorted(end_tokens)))}); remove stop words from the server's settings"
        )
    if finish_reason == "length" and len(tokens) < max_tokens:
        return (
            f"the finish reason 'length' after {len(tokens)} of {max_tokens} tokens; give the server a longer context, "
            "or lower max_new_tokens"
        )
    return None


def counts_flaw(drafted: Any, accepted: Any, totals: Any, *, emitted: int, gamma: int) -> str | None:
    """The reason why the numbers of drafted and accepted tokens of a response are impossible; None if they are not.

    ``drafted``, ``accepted``, ``totals``: as in `ServerEvent`; ``emitted``: number of tokens of the response.
    """
    for numbers in (drafted, accepted, totals):
        if numbers is not None and not (
            isinstance(numbers, list | tuple) and all(type(n) is int and n >= 0 for n in numbers)
        ):
            return f"{quoted(numbers)} as numbers of drafted or accepted tokens; expected lists of counts"
    if totals is not None and (
        len(totals) != 2 or totals[1] > totals[0] or totals[0] > gamma * emitted or totals[1] >= emitted
    ):
        return (
            f"{quoted(list(totals))} as the numbers of drafted and accepted tokens of {emitted}, with at most {gamma} "
            "drafted in a step; does the server draft otherwise than the recipe?"
        )
    if drafted is None and accepted is None:
        return None
    if drafted is None or accepted is None or len(drafted) != len(accepted):
        return "other numbers of steps for drafted and for accepted tokens"
    for n, tau in zip(drafted, accepted, strict=True):
        if not tau <= n <= gamma:
            return (
                f"a step with {n} drafted and {tau} accepted tokens, but the recipe drafts {gamma}; does the server "
                "draft otherwise than the recipe?"
            )
    if len(drafted) + sum(accepted) > emitted - 1 + gamma:
        return f"{len(drafted)} steps with {sum(accepted)} accepted tokens in a response of {emitted} tokens"
    return None


def account_flaw(account: Mapping[str, Any], model: Any, emitted: int) -> str | None:
    """The reason why a server's own account of a response contradicts the response; None if it does not.

    ``account`` has ``model``, ``usage`` and ``timings`` of its events, as far as they have them; ``model`` is the one
    that was requested, if any. An end-of-sequence token may count without being streamed.
    """
    served = account.get("model")
    if isinstance(served, str) and isinstance(model, str):
        names = [name.rstrip("/").rpartition("/")[2].casefold() for name in (served, model)]
        if not (names[0].startswith(names[1]) or names[1].startswith(names[0])):
            return (
                f"it is of the model {quoted(served)}, not {quoted(model)}; set the option model to the target's name"
            )
    usage, timings = (account.get(key) for key in ("usage", "timings"))
    count = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    if count is not None and (type(count) is not int or not emitted <= count <= emitted + 1):
        return (
            f"its usage has {quoted(count)} completion tokens, but {emitted} were streamed; use the plug-in of its "
            "engine, or an engine that streams all tokens"
        )
    if isinstance(timings, Mapping):
        drafted, accepted = (timings.get(key, 0) for key in ("draft_n", "draft_n_accepted"))
        if not (type(drafted) is type(accepted) is int and 0 <= accepted <= min(drafted, max(emitted - 1, 0))):
            return (
                f"its timings have {quoted(accepted)} accepted of {quoted(drafted)} drafted tokens in {emitted} tokens"
            )
    return None
