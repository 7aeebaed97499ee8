"""A hub on the loopback interface that serves one repository and misbehaves on request."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/tiny"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what the tests are about."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class FakeHub:
    """Attributes may be changed between requests.

    files          content by name
    status, code   answer everything with this status and X-Error-Code header
    token          demand this bearer token for files, 401 without it
    cuts           break off that many downloads of a file halfway, then be well; -1: always, at once
    stall_seconds  wait that long before each file's first byte
    ignore_range   answer 200 with the whole file to a Range request
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.status: int | None = None
        self.code = ""
        self.token: str | None = None
        self.cuts = 0
        self.stall_seconds = 0.0
        self.ignore_range = False
        self.requests: list[tuple[str, str | None]] = []  # path and Range header
        self.user_agents: set[str] = set()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def downloads(self, name: str) -> list[str | None]:
        """Range headers of the requests for a file."""
        return [header for path, header in self.requests if path.endswith(f"/{name}")]

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                hub.requests.append((self.path, self.headers.get("Range")))
                hub.user_agents.add(self.headers.get("User-Agent", ""))
                if hub.status is not None:
                    self._answer(hub.status, b"{}", {"X-Error-Code": hub.code} if hub.code else {})
                elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                    self._answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
                elif self.path.startswith(f"/api/models/{REPO}"):
                    self._answer(200, json.dumps(hub._listing()).encode())
                else:
                    self._file(self.path.rsplit("/", 1)[1])

            def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for key, value in (headers or {}).items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _file(self, name: str) -> None:
                assert f"/{REPO}/resolve/{COMMIT}/" in self.path
                data = hub.files[name]
                start = 0
                requested = self.headers.get("Range")
                if requested and not hub.ignore_range:
                    start = int(requested.removeprefix("bytes=").removesuffix("-"))
                if hub.stall_seconds:
                    time.sleep(hub.stall_seconds)
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(data) - start))
                self.end_headers()
                if hub.cuts and name.endswith(".safetensors"):
                    if hub.cuts > 0:
                        self.wfile.write(data[start : (start + len(data)) // 2])
                    hub.cuts -= hub.cuts > 0
                    self.wfile.flush()
                    self.close_connection = True
                    return
                self.wfile.write(data[start:])

        return Handler

    def _listing(self) -> dict[str, object]:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": "0" * 40}
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings, "tags": []}
