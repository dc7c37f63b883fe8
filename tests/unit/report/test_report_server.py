"""The page of a run over HTTP: to this machine only, of this run only, read only."""

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
def serving(folder: Path) -> Iterator[ThreadingHTTPServer]:
    with build_server(folder, 0) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def _ask(
    serving: ThreadingHTTPServer, path: str = "/", method: str = "GET", host: str | None = None
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", serving.server_address[1], timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{serving.server_address[1]}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_the_page_is_made_anew_for_each_look_and_nothing_is_written(
    serving: ThreadingHTTPServer, folder: Path
) -> None:
    before = sorted(folder.parent.rglob("*"))
    status, body, headers = _ask(serving)
    assert status == 200
    assert "<dd>7</dd>" in body
    assert int(headers["Refresh"]) > 0
    _log(folder, 8)
    assert "<dd>8</dd>" in _ask(serving)[1]
    assert sorted(folder.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "path",
    ["/metrics.jsonl", "/../secret.txt", "/%2e%2e/secret.txt", "//secret.txt", "/..%2fsecret.txt", "/x/../../secret.txt",
     "/config.yaml.bak", "/?", "/.", "http://127.0.0.1/etc/passwd", "/%00", "*"],
)  # fmt: skip
def test_nothing_else_is_there(serving: ThreadingHTTPServer, path: str) -> None:
    status, body, _ = _ask(serving, path)
    assert status == 404
    assert "canary" not in body
    assert "root:" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT"])
def test_it_only_reads(serving: ThreadingHTTPServer, method: str) -> None:
    assert _ask(serving, method=method)[0] == 501


def test_head_has_no_body(serving: ThreadingHTTPServer) -> None:
    status, body, headers = _ask(serving, method="HEAD")
    assert (status, body) == (200, "")
    assert int(headers["Content-Length"]) > 1000


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:1", "x"]
)
def test_another_sites_name_is_refused(serving: ThreadingHTTPServer, host: str) -> None:
    """A site whose name is made to lead here would else read the page through the browser."""
    assert _ask(serving, host=host)[0] == 421


def test_only_this_machine_is_listened_to(serving: ThreadingHTTPServer) -> None:
    assert serving.server_address[0] == "127.0.0.1"


def test_a_run_that_is_gone_is_told(serving: ThreadingHTTPServer, folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    status, body, _ = _ask(serving)
    assert status == 503
    assert "is not a run directory" in body


def test_what_is_no_run_or_several_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(folder.parent), "--serve"]) == 2
    assert report.main([str(folder), str(folder), "--serve"]) == 2
    errors = capsys.readouterr().err
    assert "is not a run directory" in errors
    assert "serve= shows one run, but 2 directories are given" in errors


def test_the_page_is_rendered_once_per_change(
    serving: ThreadingHTTPServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = []
    render = report_server.render_report
    monkeypatch.setattr(
        report_server, "render_report", lambda record: rendered.append(1) or render(record)
    )
    pages = [_ask(serving)[1] for _ in range(3)]
    assert len(rendered) == 1
    assert pages[0] == pages[2]
    _log(folder, 8)
    _ask(serving)
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
        assert _ask(server)[0] == 200
        server.shutdown()
        thread.join()


def test_a_client_that_disconnects_prints_no_traceback(
    serving: ThreadingHTTPServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        with socket.create_connection(serving.server_address) as client:
            reset = struct.pack("ii", 1, 0)  # closing sends RST
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost:1\r\n\r\n")
    assert _ask(serving)[0] == 200
    assert capfd.readouterr().err == ""
