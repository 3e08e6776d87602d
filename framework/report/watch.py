"""Local server for the HTML report of running runs: ``crossdraft report --watch``.

The report itself makes no requests. It is shown in an iframe of a page that polls a version string and reloads the
report when more cells have finished.
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
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..cost.load_run import FinishedRun, read_runs
from ..errors import CrossdraftError
from ..util.loopback import LoopbackOnly
from .html.document import html_page

_SCRIPT = """
const frame = document.querySelector("iframe"), note = document.querySelector("p");
let shown = "";
async function poll() {
  try {
    const now = await (await fetch("version")).text();
    if (now !== shown) {
      const inside = frame.contentWindow, y = inside.scrollY;
      frame.onload = () => frame.contentWindow.scrollTo(0, y);
      inside.location.replace("page?" + now);
      shown = now;
    }
    note.hidden = true;
  } catch {
    note.hidden = false;
  }
}
setInterval(poll, 2000);
poll();
"""
_FRAME = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}"><title>crossdraft: running runs</title>
<style>:root {{ color-scheme: light dark }} html, body {{ margin: 0; height: 100% }} body {{ display: flex;
flex-direction: column }} iframe {{ border: 0; flex: 1 }} p {{ margin: 0; padding: .5rem 1rem; font: 1rem sans-serif }}
[hidden] {{ display: none }}</style></head>
<body><p role="status" hidden>The server has stopped; the report may be out of date.</p>
<iframe title="the report" src="about:blank"></iframe><script>{script}</script></body></html>
"""
_WAITING = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>crossdraft: waiting</title>
<style>:root {{ color-scheme: light dark }} body {{ font: 1rem sans-serif; margin: 2rem }}</style></head>
<body><h1>No results yet</h1><p>{reason}</p></body></html>
"""


class ReportServer:
    """Serves the HTML report of the runs in ``directories``, rebuilt when cells finish.

    Args:
        directories: of runs, which may be running or not started yet.
        settings: the second argument of `html_page`, given the runs.
    """

    def __init__(self, directories: Sequence[Path], settings: Callable[[Sequence[FinishedRun]], Any] = lambda runs: ()):
        self._directories, self._settings = directories, settings
        self._cached = ("", "")

    def version(self) -> str:
        """A digest of the finished cells; "" without any."""
        cells = []
        for directory in self._directories:
            for file in sorted(directory.glob("**/cells/[!.]*/config.json")):
                try:
                    cells.append((str(file), file.stat().st_mtime_ns))
                except OSError:  # being replaced
                    cells.append((str(file), 0))
        return hashlib.sha256(repr(cells).encode()).hexdigest()[:16] if cells else ""

    def page(self) -> str:
        """The report of the finished cells, or a placeholder."""
        version = self.version()
        if not version or self._cached[0] != version:
            try:
                runs = read_runs(self._directories, running=True)
                self._cached = (version, html_page(runs, self._settings(runs)))
            except CrossdraftError as error:
                return _WAITING.format(reason=escape(str(error)))
        return self._cached[1]

    def application(self) -> Starlette:
        """The ASGI application, with the paths ``/``, ``/page`` and ``/version``."""

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
        return Starlette(routes=routes, middleware=[Middleware(LoopbackOnly)])

    def server(self) -> uvicorn.Server:
        """A server; ``run(sockets=[..])`` returns at a signal."""
        config = uvicorn.Config(
            self.application(),
            http="h11",
            ws="none",
            use_colors=False,
            log_level="warning",
            timeout_graceful_shutdown=1,
        )
        return uvicorn.Server(config)
