"""An HTTP server of a run's report page, for browsers on this machine only.

The server has a single page and opens no path from a request.
"""

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hlat.config.config_errors import ConfigError
from hlat.report.interactive_figures import CONTENT_SECURITY_POLICY
from hlat.report.report_writer import render_report
from hlat.report.run_record import load_run_record

HOST = "127.0.0.1"
"""The loopback interface: the configuration of a run may be confidential."""
REFRESH_INTERVAL_S = 30


def build_server(run_dir: Path, port: int) -> ThreadingHTTPServer:
    """Return a server that renders a run's page for each request; call its `serve_forever`.

    Args:
        run_dir: Run directory.
        port: TCP port; 0 for any free port.

    Raises:
        ConfigError: The directory contains no run.
        OSError: The port is in use.
    """
    load_run_record(run_dir)
    lock = threading.Lock()  # matplotlib's settings are global

    def render_page() -> str:
        with lock:
            return render_report(load_run_record(run_dir))

    return ThreadingHTTPServer((HOST, port), _build_handler(render_page))


def _build_handler(render_page: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Handler of GET and HEAD requests of `/`."""

        server_version, sys_version = "hlat", ""

        def do_GET(self) -> None:
            """Send the page."""
            self._respond(with_body=True)

        def do_HEAD(self) -> None:
            """Send the headers of the page."""
            self._respond(with_body=False)

        def _respond(self, with_body: bool) -> None:
            if not self._is_local_host():
                self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
                return
            if self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            try:
                body = render_page().encode()
            except (ConfigError, OSError) as error:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
                return
            self.send_response(HTTPStatus.OK)
            for name, value in {
                "Content-Type": "text/html; charset=utf-8",
                "Content-Length": str(len(body)),
                "Content-Security-Policy": CONTENT_SECURITY_POLICY,
                "Cache-Control": "no-store",
                "Refresh": str(REFRESH_INTERVAL_S),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _is_local_host(self) -> bool:
            """Return True if the Host header is local, which prevents DNS rebinding."""
            host = self.headers.get("Host", "").rpartition(":")[0]
            return host in (HOST, "localhost")

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing."""

    return Handler
