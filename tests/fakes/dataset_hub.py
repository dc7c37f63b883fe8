"""A server with the requests of huggingface_hub that read a data set, on loopback."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit


def _build_entry(path: str, content: bytes) -> dict[str, object]:
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": oid}


def _list_tree(files: Mapping[str, bytes], parent: str, recursive: bool) -> list[dict[str, object]]:
    entries: dict[str, dict[str, object]] = {}
    for path, content in files.items():
        if not path.startswith(parent):
            continue
        for directory in map(str, PurePosixPath(path).parents):
            if directory != "." and directory.startswith(parent):
                entries[directory] = {"type": "directory", "path": directory, "size": 0, "oid": "0"}
        entries[path] = _build_entry(path, content)
    depth = parent.count("/")
    return [e for path, e in entries.items() if recursive or path.count("/") == depth]


@contextmanager
def serve_dataset(dataset_id: str, revisions: Mapping[str, Mapping[str, bytes]]) -> Iterator[str]:
    """Serve a data set with files by path for each revision; yield the URL for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            path = unquote(url.path).removeprefix("/api").removeprefix(f"/datasets/{dataset_id}")
            if path == unquote(url.path):
                self._send(404, b"{}")
                return
            if path in ("", "/revision/main"):
                self._send_json({"id": dataset_id, "sha": "0" * 40})
                return
            _, action, rest = path.split("/", 2)
            revision = next((name for name in revisions if f"{rest}/".startswith(f"{name}/")), None)
            if revision is None:
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            name = rest.removeprefix(revision).lstrip("/")
            if action == "revision":
                self._send_json({"id": dataset_id, "sha": "0" * 40})
            elif action == "tree":
                is_recursive = parse_qs(url.query).get("recursive", [""])[0].lower() == "true"
                prefix = f"{name}/" if name else ""
                entries = _list_tree(revisions[revision], prefix, is_recursive)
                self._send_json(entries, 200 if entries else 404)
            else:
                self._send_file(revisions[revision][name])

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
            path = unquote(urlsplit(self.path).path)
            revision = path.partition("/paths-info/")[2]
            entries = _list_tree(revisions.get(revision, {}), "", True)
            self._send_json([entry for entry in entries if entry["path"] in paths])

        def _send_file(self, content: bytes) -> None:
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": "0" * 40}
            if requested := self.headers.get("Range"):
                first, last = requested.removeprefix("bytes=").split("-")
                part = content[int(first) : int(last) + 1 if last else None]
                headers["Content-Range"] = f"bytes {requested[6:]}/{len(content)}"
                self._send(206, part, headers)
            else:
                self._send(200, content, headers)

        def do_HEAD(self) -> None:
            self.do_GET()

        def _send_json(self, content: object, status: int = 200) -> None:
            self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
