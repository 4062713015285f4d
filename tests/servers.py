"""Servers that the tests talk to: a Sume that can be told to misbehave, on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass
class Request:
    """What arrived, byte for byte."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str:
        return self.headers.get("idempotency-key", "")


@dataclass
class Reply:
    """What goes back. `body` may be JSON-able or raw bytes."""

    code: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    # Send only so many bytes of the body, then close; the length header stays whole.
    cut: int | None = None
    # Leave the length header out and close at the end.
    lengthless: bool = False


class Reset(Exception):
    """Close the connection without an answer, with a TCP reset."""


# A script entry: a reply, an exception to raise, or a function of (server, request).
Act = Reply | Reset | Callable[["FakeSume", Request], "Reply | None"]


@dataclass
class FakeJob:
    id: str
    key: str
    body: bytes
    made_at: int = 0
    reads: int = 0


def error(code: str, message: str = "no") -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


class Loopback:
    """A server on a loopback port while it is open; what it answers is its own matter."""

    _server: ThreadingHTTPServer | None = None

    def answer(self, request: Request) -> Reply:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._server = _serve(self)
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"


class FakeSume(Loopback):
    """A Sume with a memory of keys and a charge log. Acts in `script` come first.

    `submits` and `reads` are scripts by route: each POST (or GET) takes the next act, and
    when none is left the server behaves well. `charges` has a line per job it made.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.submits: deque[Act] = deque()
        self.reads: deque[Act] = deque()
        self.results: deque[Act] = deque()
        self.cancels: deque[Act] = deque()
        self.requests: list[Request] = []
        self.jobs: dict[str, FakeJob] = {}
        self.by_key: dict[str, FakeJob] = {}
        self.charges: list[FakeJob] = []
        self.cancelled: set[str] = set()
        # A job is done at this many reads.
        self.reads_to_finish = 1
        self.final: Callable[[FakeJob], dict[str, Any]] = finished
        self.on_submit: Act | None = None
        self.on_read: Act | None = None
        self.keep_keys = True
        # The server's own clock, where a test cares.
        self.now: Callable[[], int] = lambda: 0
        # Called for each request, before anything else; may block or kill.
        self.watch: Callable[[Request], None] = lambda request: None

    # -- what tests ask --

    @property
    def posts(self) -> list[Request]:
        """The submits; a wish to cancel is no purchase."""
        posts = [r for r in self.requests if r.method == "POST"]
        return [r for r in posts if not r.path.endswith("/cancel")]

    @property
    def gets(self) -> list[Request]:
        return [r for r in self.requests if r.method == "GET"]

    def charges_of(self, row_body: str) -> int:
        return sum(row_body.encode() in job.body for job in self.charges)

    def forget(self) -> None:
        """Be as new: no job, no key, no charge, and nothing asked."""
        for log in (self.charges, self.requests):
            log.clear()
        for known in (self.jobs, self.by_key, self.cancelled):
            known.clear()

    # -- behaviour --

    def make_job(self, request: Request) -> FakeJob:
        """Make (and charge) a job, or find the one that this key made."""
        job = self.by_key.get(request.key)
        if job is None:
            number = len(self.charges) + 1
            name = hashlib.sha256(f"{request.key}{number}".encode()).hexdigest()[:8]
            job = FakeJob(f"job_{number}_{name}", request.key, request.body, self.now())
            self.charges.append(job)
            self.jobs[job.id] = job
            if self.keep_keys:
                self.by_key[request.key] = job
        return job

    def accept(self, request: Request) -> Reply:
        known = request.key in self.by_key
        job = self.make_job(request)
        if job.body != request.body:
            return Reply(422, error("idempotency_key_reused"))
        return Reply(202, {"data": {"job": {"id": job.id}, "idempotency_hit": known}})

    def read(self, request: Request) -> Reply:
        parts = request.path.split("/")
        job = self.jobs.get(parts[3]) if len(parts) > 3 else None
        if job is None:
            return Reply(404, error("not_found", "no such job"))
        if job.id in self.cancelled:
            usage = {"captured_usd_micros": 100_000, "refunded_usd_micros": 100_000}
            return Reply(200, {"id": job.id, "status": "cancelled", "usage": usage})
        if request.path.endswith("/result"):
            return Reply(200, {"data": self.final(job)})
        job.reads += 1
        if job.reads < self.reads_to_finish:
            return Reply(200, {"id": job.id, "status": "in_progress"})
        return Reply(200, self.final(job))

    def cancel(self, request: Request) -> Reply:
        job = self.jobs.get(request.path.split("/")[3])
        if job is None:
            return Reply(404, error("not_found", "no such job"))
        self.cancelled.add(job.id)
        return Reply(200, {"data": {"job_id": job.id, "status": "CANCELED", "canceled": True}})

    def answer(self, request: Request) -> Reply:
        self.watch(request)
        with self.lock:
            self.requests.append(request)
            if request.path.endswith("/cancel"):
                script, standing, usual = self.cancels, None, self.cancel
            elif request.method == "POST":
                script, standing, usual = self.submits, self.on_submit, self.accept
            elif request.path.endswith("/result"):
                script, standing, usual = self.results, None, self.read
            else:
                script, standing, usual = self.reads, self.on_read, self.read
            act = script.popleft() if script else standing
            if isinstance(act, Reset):
                raise act
            reply = act(self, request) if callable(act) else act
            return reply if reply is not None else usual(request)


def finished(job: FakeJob) -> dict[str, Any]:
    return {
        "id": job.id,
        "status": "completed",
        "usage": {"cost": 0.1},
        "url": f"https://media.invalid/artifacts/{job.id}.mp4",
    }


# -- acts: what a server can do to one submit --


def drop_before(server: FakeSume, request: Request) -> Reply | None:
    """Read the request, make nothing, hang up."""
    raise Reset


def drop_after(server: FakeSume, request: Request) -> Reply | None:
    """Make the job, charge it, hang up without an answer."""
    server.make_job(request)
    raise Reset


def accept_and_say(code: int, body: Any, **more: Any) -> Act:
    """Make the job, and answer something else."""

    def act(server: FakeSume, request: Request) -> Reply | None:
        server.make_job(request)
        return Reply(code, body, **more)

    return act


@dataclass
class File:
    """A file that a media server has."""

    content: bytes
    type: str = "video/mp4"
    etag: str = ""
    # Acts that come before it is simply served.
    script: deque[Reply | Reset] = field(default_factory=deque)
    # Whether a part of it can be asked for.
    ranges: bool = True


class Media(Loopback):
    """Serves files by path, at an origin that is not the API's, and remembers what was asked."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.files: dict[str, File] = {}
        self.watch: Callable[[Request], None] = lambda request: None

    def answer(self, request: Request) -> Reply:
        self.requests.append(request)
        self.watch(request)
        file = self.files.get(request.path.partition("?")[0])
        if file is None:
            return Reply(404, b"<Error><Code>NoSuchKey</Code></Error>", XML)
        if file.script:
            act = file.script.popleft()
            if isinstance(act, Reset):
                raise act
            return act
        return serve_file(file, request)

    def asked(self, name: str) -> list[Request]:
        return [r for r in self.requests if r.path.partition("?")[0] == name]


XML = {"Content-Type": "application/xml"}


def serve_file(file: File, request: Request, cut: int | None = None) -> Reply:
    """Answer as a file server does: whole, or the rest of the same object."""
    headers = {"Content-Type": file.type} | ({"ETag": file.etag} if file.etag else {})
    asked = request.headers.get("range", "").removeprefix("bytes=").partition("-")[0]
    same = request.headers.get("if-range", file.etag) == file.etag
    if not (asked and file.ranges and same):
        return Reply(200, file.content, headers, cut=cut)
    start, size = int(asked), len(file.content)
    if start >= size:
        return Reply(416, b"", headers)
    span = {"Content-Range": f"bytes {start}-{size - 1}/{size}"}
    return Reply(206, file.content[start:], headers | span, cut=cut)


def _serve(sume: Loopback) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._serve()

        do_POST = do_GET

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if len(body) < length:
                # The client died in the middle of its request: nothing was asked.
                self.close_connection = True
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            try:
                reply = sume.answer(Request(self.command, self.path, headers, body))
            except Reset:
                self._hang_up()
                return
            self._send(reply)

        def _hang_up(self) -> None:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            self.connection.close()

        def _send(self, reply: Reply) -> None:
            raw = isinstance(reply.body, bytes)
            text = reply.body if raw else json.dumps(reply.body).encode()
            self.send_response_only(reply.code)
            for name, value in ({"Content-Type": "application/json"} | reply.headers).items():
                self.send_header(name, value)
            if not reply.lengthless:
                self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(text if reply.cut is None else text[: reply.cut])
                self.wfile.flush()
            if reply.lengthless or reply.cut is not None:
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

        def finish(self) -> None:
            with contextlib.suppress(OSError, ValueError):
                super().finish()

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    return Server(("127.0.0.1", 0), Handler)


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port where nobody listens, kept from others while in use."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
