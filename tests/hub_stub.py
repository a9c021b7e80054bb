"""A hub on the loopback: the part of the Hugging Face HTTP interface that fetching a model asks for."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FakeHub:
    """Serves `repos` (id -> file name -> bytes) at every revision but those in `no_revisions`; counts requests in `asked`.

    `answers` maps an id to (status, headers) for all that is asked of it; `gated` ids show their names but not their files.
    """

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]] | None = None) -> None:
        self.repos = dict(repos or {})
        self.answers: dict[str, tuple[int, dict[str, str]]] = {}
        self.gated: set[str] = set()
        self.no_revisions: set[str] = set()
        self.asked: list[str] = []
        self.endpoint = ""

    def commit(self, repo: str) -> str:
        return hashlib.sha1(repo.encode()).hexdigest()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = [unquote(p) for p in urlsplit(path).path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        rest = parts[4:] if api else parts[2:]
        if repo in self.answers:
            status, headers = self.answers[repo]
            return status, headers, b"{}"
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if len(rest) > 1 and rest[1] in self.no_revisions:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files, commit = self.repos[repo], self.commit(repo)
        if api and rest[:1] == ["tree"]:
            rows = [{"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()} for n, b in files.items()]
            return 200, {}, json.dumps(rows).encode()
        if api:
            siblings = [{"rfilename": n, "size": len(b)} for n, b in files.items()]
            return 200, {}, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        name = "/".join(rest[2:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        return 200, {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": commit}, files[name]

    @contextmanager
    def running(self) -> Iterator["FakeHub"]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked.append(f"{self.command} {self.path}")
                status, headers, body = hub.answer(self.path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
