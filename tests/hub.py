"""A stand-in for the hub's HTTP interface on a loopback port: what a repository holds, and its files, in ranges.

Large files (here: *.safetensors and *.gguf) have a SHA-256 and are redirected to, as the hub does with what it keeps
apart; the others have git's digest. Connections can be cut in the middle of a file.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories by name, and what was asked for."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None  # that gated repositories want
    gated: set[str] = field(default_factory=set)
    cuts: dict[str, list[int]] = field(default_factory=dict)  # by file: after how many bytes its next answers are cut
    ranges: bool = True  # whether parts of files can be asked for
    held: dict[str, threading.Event] = field(default_factory=dict)  # by file: when its second half is sent
    failures: int = 0  # how many files are answered with 503 first
    lies: dict[str, bytes] = field(default_factory=dict)  # by file: what is sent instead
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # (path, Range)
    tokens: set[str | None] = field(default_factory=set)  # that came with questions
    sent: int = 0  # bytes of files

    def add(self, repo: str, folder: Path, **more: bytes) -> None:
        files = {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}
        self.repositories[repo] = files | more

    def info(self, repo: str) -> dict[str, Any]:
        return {
            "_id": "0", "id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "downloads": 0,
            "likes": 0, "cardData": {"license": "apache-2.0"},
            "siblings": [_sibling(name, data) for name, data in self.repositories[repo].items()],
        }  # fmt: skip


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    git = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    told: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git}
    if name.endswith((".safetensors", ".gguf")):
        told["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 128}
    return told


@contextmanager
def hub_on_loopback() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append((path, self.headers.get("Range")))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            self._info(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self._file(match[2], self.hub.repositories[match[1]][match[2]])
        else:
            self._refuse(404, "EntryNotFound")

    def _may_read(self, repo: str) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        self.hub.tokens.add(given)
        if repo not in self.hub.repositories:
            self._refuse(401, "RepoNotFound")
            return False
        if repo in self.hub.gated and given != self.hub.token:
            self._refuse(401 if given is None else 403, "GatedRepo")
            return False
        return True

    def _info(self, repo: str, revision: str) -> None:
        if not self._may_read(repo):
            return
        if revision not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
            return
        self._answer(200, json.dumps(self.hub.info(repo)).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repo: str, commit: str, name: str) -> None:
        if not self._may_read(repo):
            return
        files = self.hub.repositories[repo]
        if commit != COMMIT or name not in files:
            self._refuse(404, "EntryNotFound")
        elif self.hub.failures:
            self.hub.failures -= 1
            self._refuse(503, "Busy")
        elif name.endswith((".safetensors", ".gguf")):
            self._answer(302, b"", {"Location": f"/cdn/{repo}/{name}", "X-Repo-Commit": COMMIT})
        else:
            self._file(name, files[name])

    def _file(self, name: str, data: bytes) -> None:
        data = self.hub.lies.get(name, data)
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(match[1]) if match and self.hub.ranges else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cuts = self.hub.cuts.get(name)
        cut = cuts.pop(0) if cuts else None
        self._answer(206 if start else 200, data[start:], headers, cut, self.hub.held.get(name))

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code})

    def _answer(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str],
        cut: int | None = None,
        held: threading.Event | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        part = data if cut is None else data[:cut]
        half = len(part) // 2 if held else 0
        self.wfile.write(part[:half])
        if held:
            self.wfile.flush()
            assert held.wait(60), "nobody let the file go on"
        self.wfile.write(part[half:])
        self.hub.sent += len(part)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
