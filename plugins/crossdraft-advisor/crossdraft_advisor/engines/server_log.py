"""The lines of a server's log that hold the cause of its end.

An engine consists of processes, and the first one that fails logs the cause; the others follow with "see root cause
above". So the cause is the last line of the first traceback that is not logged as a warning, of the process that wrote
it. A log without tracebacks (llama.cpp, errors of arguments) has its first lines about an error.
"""

from __future__ import annotations

import re
from pathlib import Path

from crossdraft.framework.errors import printable

from .engine_log import ESCAPES
from .network_settings import redacted

#: Bytes at the end of a log that are read, lines that are shown, and characters of a line.
_BYTES, _LINES, _LENGTH = 2**24, 12, 500
#: Lines of a message that continue the last one of a traceback.
_MORE = 4
_TRACEBACK = "Traceback (most recent call last):"
#: Process, as vLLM writes it before every line.
_PROCESS = re.compile(r"\([A-Za-z][\w ]*pid=\d+\) ?")
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
#: First line of an exception, without its frames.
_RAISED = re.compile(r"[A-Za-z_][\w.]*(:|$)")
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
    cause = _of_traceback(lines, start) or _of_errors(lines, start)
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


def _of_errors(lines: list[str], start: int) -> list[int]:
    """Indices of the first lines about an error."""
    errors = [i for i in range(start, len(lines)) if _ERROR.search(lines[i]) and not _HARMLESS.search(lines[i])]
    return errors[:_MORE]
