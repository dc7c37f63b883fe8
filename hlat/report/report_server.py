"""An HTTP server of a run's report page, for browsers on this machine only.

The server has a single page and opens no path from a request.
"""

import sys
import threading
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.figures.interactive_figures import CONTENT_SECURITY_POLICY
from hlat.report.report_writer import render_report
from hlat.study.run_record import get_run_version, load_run_record

HOST = "127.0.0.1"
"""The loopback interface: the configuration of a run may be confidential."""
REFRESH_INTERVAL_S = 30
CONNECTION_TIMEOUT_S = 10.0
"""Maximum time without data of a connection."""
MAX_CONNECTIONS = 32
"""Maximum number of concurrent connections, each of which has a thread; further ones are closed."""


class ReportServer(ThreadingHTTPServer):
    """HTTP server with a limited number of threads that ignores clients which disconnect."""

    _free_connections = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or close it if there are too many."""
        if self._free_connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle the requests of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, unless the client has disconnected."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def build_server(run_dir: Path, port: int) -> ThreadingHTTPServer:
    """Return a server that renders a run's page after changes; call its `serve_forever`.

    Raise ConfigError if the directory contains no run. Port 0 is any free port.
    """
    load_run_record(run_dir)
    lock = threading.Lock()  # matplotlib's settings are global

    @lru_cache(maxsize=1)
    def render(version: tuple[tuple[int, int], ...]) -> bytes:
        return render_report(load_run_record(run_dir)).encode()

    class Handler(BaseHTTPRequestHandler):
        """Handler of GET and HEAD requests of `/`."""

        server_version, sys_version = "hlat", ""
        timeout = CONNECTION_TIMEOUT_S

        def do_GET(self) -> None:
            """Send the page; of a HEAD request, only its headers."""
            # A Host header that is not local shows DNS rebinding
            if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
                self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
                return
            if self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            try:
                with lock:
                    body = render(get_run_version(run_dir))
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
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815  the name in BaseHTTPRequestHandler

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing."""

    return ReportServer((HOST, port), Handler)
