"""Serves the page of a run while the run goes on, to this machine and nobody else.

It only ever reads, and knows one page: whatever else a browser asks for is not there, so no path
from outside is ever opened.
"""

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hlat.config.errors import ConfigError
from hlat.reporting.interactive import POLICY
from hlat.reporting.record import read
from hlat.reporting.report import render

HOST = "127.0.0.1"
"""The loopback: what a run is told may be nobody else's business."""
SECONDS = 30
"""Between two looks of a page that stays open."""


def server(run_folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of a run's page, made anew for each look; it serves once it is told to.

    Args:
        run_folder: The run's folder.
        port: Where; 0: any that is free.

    Raises:
        ConfigError: It is no run folder.
        OSError: The port is taken.
    """
    read(run_folder)
    drawing = threading.Lock()  # matplotlib's settings are the process's

    def page() -> str:
        with drawing:
            return render(read(run_folder))

    return ThreadingHTTPServer((HOST, port), _handler(page))


def _handler(page: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET and HEAD of `/`; nothing else is there."""

        server_version, sys_version = "hlat", ""

        def do_GET(self) -> None:
            """Send the page."""
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            """Send what would come before it."""
            self._answer(with_body=False)

        def _answer(self, with_body: bool) -> None:
            if not self._is_for_here():
                self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
                return
            if self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            try:
                body = page().encode()
            except (ConfigError, OSError) as error:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
                return
            self.send_response(HTTPStatus.OK)
            for name, value in {
                "Content-Type": "text/html; charset=utf-8",
                "Content-Length": str(len(body)),
                "Content-Security-Policy": POLICY,
                "Cache-Control": "no-store",
                "Refresh": str(SECONDS),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _is_for_here(self) -> bool:
            """Whether it was asked for by this machine's name: a site elsewhere may not look in."""
            host = self.headers.get("Host", "").rpartition(":")[0]
            return host in (HOST, "localhost")

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing of each look."""

    return Handler
