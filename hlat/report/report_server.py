"""An HTTP server of a run's report page, for browsers on this machine only.

The server has a single page and opens no path from a request.
"""

import threading
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

    Raise ConfigError if the directory contains no run. Port 0 is any free port.
    """
    load_run_record(run_dir)
    lock = threading.Lock()  # matplotlib's settings are global

    class Handler(BaseHTTPRequestHandler):
        """Handler of GET and HEAD requests of `/`."""

        server_version, sys_version = "hlat", ""

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
                    body = render_report(load_run_record(run_dir)).encode()
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

    return ThreadingHTTPServer((HOST, port), Handler)
