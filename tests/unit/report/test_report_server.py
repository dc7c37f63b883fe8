"""Report server: local, read-only, and limited to one run."""

import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from hlat.report import __main__ as report
from hlat.report import report_server
from hlat.report.report_server import build_server


def _log(folder: Path, step: int) -> None:
    row = {"step": step, "tokens": 512 * step, "loss": 1.5, "attempt": 1, "time": 1000.0 + step}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "x"
    folder.mkdir()
    _log(folder, 7)
    (tmp_path / "secret.txt").write_text("canary-5f2d9c")
    (folder / "config.yaml.bak").write_text("canary-5f2d9c")
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[ThreadingHTTPServer]:
    with build_server(folder, 0) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def _request(
    server: ThreadingHTTPServer, path: str = "/", method: str = "GET", host: str | None = None
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_page_is_rendered_per_request_without_files(
    server: ThreadingHTTPServer, folder: Path
) -> None:
    before = sorted(folder.parent.rglob("*"))
    status, body, headers = _request(server)
    assert status == 200
    assert "<dd>7</dd>" in body
    assert int(headers["Refresh"]) > 0
    _log(folder, 8)
    assert "<dd>8</dd>" in _request(server)[1]
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "path",
    ["/metrics.jsonl", "/../secret.txt", "/%2e%2e/secret.txt", "//secret.txt", "/..%2fsecret.txt", "/x/../../secret.txt",
     "/config.yaml.bak", "/?", "/.", "http://127.0.0.1/etc/passwd", "/%00", "*"],
)  # fmt: skip
def test_other_paths_are_not_found(server: ThreadingHTTPServer, path: str) -> None:
    status, body, _ = _request(server, path)
    assert status == 404
    assert "canary" not in body
    assert "root:" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"])
def test_other_methods_are_rejected(server: ThreadingHTTPServer, method: str) -> None:
    assert _request(server, method=method)[0] == 501


def test_head_has_no_body(server: ThreadingHTTPServer) -> None:
    status, body, headers = _request(server, method="HEAD")
    assert (status, body) == (200, "")
    assert int(headers["Content-Length"]) > 1000


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:1", "x"]
)
def test_other_host_names_are_rejected(server: ThreadingHTTPServer, host: str) -> None:
    """Prevent DNS rebinding, by which another site could read the page through the browser."""
    assert _request(server, host=host)[0] == 421


def test_server_listens_on_localhost(server: ThreadingHTTPServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_removed_run_is_an_error(server: ThreadingHTTPServer, folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    status, body, _ = _request(server)
    assert status == 503
    assert "is not a run directory" in body


def test_invalid_and_several_runs_are_rejected(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(folder.parent), "--serve"]) == 2
    assert report.main([str(folder), str(folder), "--serve"]) == 2
    errors = capsys.readouterr().err
    assert "is not a run directory" in errors
    assert "serve= shows one run, but 2 directories are given" in errors


def test_page_is_cached_until_a_change(
    server: ThreadingHTTPServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = []
    render = report_server.render_report
    monkeypatch.setattr(
        report_server, "render_report", lambda record: rendered.append(1) or render(record)
    )
    pages = [_request(server)[1] for _ in range(3)]
    assert len(rendered) == 1
    assert pages[0] == pages[2]
    _log(folder, 8)
    _request(server)
    assert len(rendered) == 2


@pytest.mark.slow  # 9 s: waits for time limits
def test_half_open_connections_are_limited_and_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_server, "CONNECTION_TIMEOUT_S", 0.5)
    with build_server(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        before = threading.active_count()
        clients = [socket.create_connection(server.server_address) for _ in range(50)]
        for client in clients:
            client.settimeout(60)
        assert all(client.recv(1) == b"" for client in clients[-10:])  # closed at once
        assert threading.active_count() - before <= report_server.MAX_CONNECTIONS
        assert all(client.recv(1) == b"" for client in clients)  # after the timeout
        for client in clients:
            client.close()
        assert _request(server)[0] == 200
        server.shutdown()
        thread.join()


def test_a_client_that_disconnects_prints_no_traceback(
    server: ThreadingHTTPServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        with socket.create_connection(server.server_address) as client:
            reset = struct.pack("ii", 1, 0)  # closes with RST
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost:1\r\n\r\n")
    assert _request(server)[0] == 200
    assert capfd.readouterr().err == ""
