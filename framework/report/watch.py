"""The HTML page of runs that are still going on, served on this machine: ``crossdraft report --watch``.

The page itself makes no request. It stands in a frame of another one, which asks whether there are more finished cells,
and takes the page anew when there are.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..errors import CrossdraftError
from .html.document import html_page
from .load_run import FinishedRun, read_runs

#: What browsers call this machine; another Host is a page whose own name resolves to it (DNS rebinding).
_HOSTS = ("localhost", "127.0.0.1")
_SCRIPT = """
const frame = document.querySelector("iframe"), note = document.querySelector("p");
let seen = "";
async function look() {
  try {
    const now = await (await fetch("version")).text();
    if (now !== seen) {
      const inside = frame.contentWindow, y = inside.scrollY;
      frame.onload = () => frame.contentWindow.scrollTo(0, y);
      inside.location.replace("page?" + now);
      seen = now;
    }
    note.hidden = true;
  } catch {
    note.hidden = false;
  }
}
setInterval(look, 2000);
look();
"""
_FRAME = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}"><title>crossdraft: runs that go on</title>
<style>:root {{ color-scheme: light dark }} html, body {{ margin: 0; height: 100% }} body {{ display: flex;
flex-direction: column }} iframe {{ border: 0; flex: 1 }} p {{ margin: 0; padding: .5rem 1rem; font: 1rem sans-serif }}
[hidden] {{ display: none }}</style></head>
<body><p role="status" hidden>The server has ended; this is what it showed last.</p>
<iframe title="the report" src="about:blank"></iframe><script>{script}</script></body></html>
"""
_WAITING = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>crossdraft: waiting</title>
<style>:root {{ color-scheme: light dark }} body {{ font: 1rem sans-serif; margin: 2rem }}</style></head>
<body><h1>No numbers yet</h1><p>{reason}</p></body></html>
"""


class Live:
    """The pages of some directories of runs.

    Args:
        directories: of runs that go on, or will.
        settings: what `html_page` is to be told beside the runs.
    """

    def __init__(self, directories: Sequence[Path], settings: Callable[[Sequence[FinishedRun]], Any] = lambda runs: ()):
        self._directories, self._settings = directories, settings
        self._made = ("", "")

    def version(self) -> str:
        """Another one once there are other finished cells; empty while there are none."""
        found = []
        for directory in self._directories:
            for file in sorted(directory.glob("**/cells/[!.]*/config.json")):
                try:
                    found.append((str(file), file.stat().st_mtime_ns))
                except OSError:  # replaced at this moment
                    found.append((str(file), 0))
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16] if found else ""

    def page(self) -> str:
        """The page of what is finished; where there is nothing yet, one that says so."""
        now = self.version()
        if not now or self._made[0] != now:
            try:
                runs = read_runs(self._directories, running=True)
                self._made = (now, html_page(runs, self._settings(runs)))
            except CrossdraftError as error:
                return _WAITING.format(reason=escape(str(error)))
        return self._made[1]

    def application(self) -> Starlette:
        """``/``, ``/page`` and ``/version``, as an ASGI application."""

        async def frame(_: Request) -> Response:
            digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
            policy = (
                f"default-src 'none'; frame-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
                f"script-src 'sha256-{digest}'"
            )
            return HTMLResponse(_FRAME.format(policy=policy, script=_SCRIPT))

        async def page(_: Request) -> Response:
            return HTMLResponse(await run_in_threadpool(self.page), headers={"Cache-Control": "no-store"})

        async def version(_: Request) -> Response:
            return PlainTextResponse(await run_in_threadpool(self.version), headers={"Cache-Control": "no-store"})

        routes = [Route("/", frame), Route("/page", page), Route("/version", version)]
        return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS)])

    def server(self) -> uvicorn.Server:
        """``run(sockets=[..])`` answers until a signal comes."""
        config = uvicorn.Config(
            self.application(), http="h11", ws="none", log_level="warning", timeout_graceful_shutdown=1
        )
        return uvicorn.Server(config)
