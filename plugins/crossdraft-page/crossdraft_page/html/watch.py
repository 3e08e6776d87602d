"""Local server for the HTML report of running runs: ``crossdraft report --watch``.

The report itself makes no requests. It is shown in an iframe of a page that polls a version string and reloads the
report when more cells have finished.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from crossdraft import CrossdraftError, UsageError
from crossdraft.commands import is_loopback_header
from crossdraft.runs import read_runs

from .document import html_page

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


def watch(directories: Sequence[Path], port: int) -> None:
    """Serve the report of runs on the loopback interface until Ctrl-C.

    Raises:
        UsageError: not the directory of a run, or a port that is in use.
    """
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory} is not a directory; give a run directory, which crossdraft run prints")
    try:
        server = report_server(directories, port)
    except OSError as error:
        raise UsageError(f"cannot listen on --port {port}: {error.strerror or error}") from None
    with server:
        print(f"crossdraft: http://127.0.0.1:{server.server_port} (press Ctrl-C to stop)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("crossdraft: server stopped")


class WatchedRuns:
    """The HTML report of the runs in ``directories``, which may be running or not started yet."""

    def __init__(self, directories: Sequence[Path]):
        self._directories = directories
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
        """The report of the finished cells, made anew when cells finish, or a placeholder."""
        version = self.version()
        if not version or self._cached[0] != version:
            try:
                self._cached = (version, html_page(read_runs(self._directories, running=True)))
            except CrossdraftError as error:
                return _WAITING.format(reason=escape(str(error)))
        return self._cached[1]


def report_server(directories: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server for 127.0.0.1 with the paths ``/``, ``/page`` and ``/version``; raises OSError if it cannot listen."""
    runs = WatchedRuns(directories)
    script = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = (
        "default-src 'none'; frame-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{script}'"
    )
    paths: dict[str, tuple[str, Callable[[], str]]] = {
        "/": ("text/html", lambda: _FRAME.format(policy=policy, script=_SCRIPT)),
        "/page": ("text/html", runs.page),
        "/version": ("text/plain", runs.version),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, content = paths.get(self.path.partition("?")[0], ("", None))
            if not is_loopback_header(self.headers.get("Host", "")):
                self.send_error(403, "the Host header must be localhost, 127.0.0.1 or [::1]")
            elif content is None:
                self.send_error(404)
            else:
                data = content().encode("utf-8")
                self.send_response(200)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Cache-Control", "no-store")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass  # requests are not logged

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
