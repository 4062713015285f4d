"""A Sume for benchmarks: correct, deterministic, and as cheap as Python allows.

It runs in a process of its own, so that a client has a core to itself, and speaks just
enough HTTP/1.1 for httpx. Its only argument is a JSON object with the fields of `Rules`; it
prints its port, and ends when its stdin closes. GET /books tells what it saw.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Rules:
    """How this Sume behaves; times are seconds."""

    # From accept to result; None is for ever.
    job_s: float | None = 0.0
    # What passes before each answer.
    answer_s: float = 0.0
    # Jobs that may be open at once; 0 is no limit.
    capacity: int = 0
    # Submits that may come in any 60 s, and a sixth of it in any 10; 0 is no limit.
    writes_per_minute: int = 0
    # When a job asks to be read again; None says nothing.
    hint_s: float | None = None


@dataclass
class Job:
    id: str
    accepted_s: float
    done_s: float
    reads: int = 0
    # When an answer first said that it was done.
    told_s: float | None = None


@dataclass
class Books:
    """What came in; times are steady seconds."""

    posts_s: list[float] = field(default_factory=list)
    reads: int = 0
    # Submits under a key that it knew.
    replays: int = 0
    queue_full: int = 0
    rate_limited: int = 0
    last_told_s: float = 0.0


class Heard(NamedTuple):
    method: str
    path: str
    key: str
    closes: bool
    length: int


class QuickSume:
    """Keys, jobs and limits; no sockets."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.books = rules, Books()
        self.jobs: dict[str, Job] = {}
        self.by_key: dict[str, Job] = {}
        # Accepted and not done, by the time at which they will be: jobs take equally long.
        self._open: deque[float] = deque()
        self._recent: deque[float] = deque()

    def answer(self, heard: Heard) -> tuple[int, Any]:
        now_s = time.monotonic()
        if heard.method == "POST":
            return self._submit(heard.key, now_s)
        if heard.path == "/books":
            return 200, self._told()
        return self._read(heard.path.rpartition("/")[2], now_s)

    def _submit(self, key: str, now_s: float) -> tuple[int, Any]:
        rules, books = self.rules, self.books
        books.posts_s.append(now_s)
        known = self.by_key.get(key)
        if known is not None:
            books.replays += 1
            return 200, {"job_id": known.id, "idempotency_hit": True}
        if rules.writes_per_minute and self._too_many(now_s):
            books.rate_limited += 1
            return 429, {"error": {"code": "rate_limit_exceeded", "message": "slow down"}}
        while self._open and self._open[0] <= now_s:
            self._open.popleft()
        if rules.capacity and len(self._open) >= rules.capacity:
            books.queue_full += 1
            return 429, {"error": {"code": "queue_full", "message": "wait for a job to end"}}
        done_s = now_s + rules.job_s if rules.job_s is not None else float("inf")
        job = Job(f"job_{len(self.jobs):07}", now_s, done_s)
        self.jobs[job.id] = self.by_key[key] = job
        self._open.append(done_s)
        told: dict[str, Any] = {"job_id": job.id, "status": "pending"}
        if rules.capacity:
            told["generation_limits"] = {
                "queue_capacity_remaining": rules.capacity - len(self._open)
            }
        return 202, told

    def _too_many(self, now_s: float) -> bool:
        """Say whether a submit breaks a limit; count it where it does not."""
        limit, recent = self.rules.writes_per_minute, self._recent
        while recent and recent[0] <= now_s - 60:
            recent.popleft()
        in_ten = max(1, limit // 6)
        too_many = len(recent) >= limit or (len(recent) >= in_ten and recent[-in_ten] > now_s - 10)
        if not too_many:
            recent.append(now_s)
        return too_many

    def _read(self, id: str, now_s: float) -> tuple[int, Any]:
        job = self.jobs.get(id)
        if job is None:
            return 404, {"error": {"code": "not_found", "message": "no such job"}}
        self.books.reads += 1
        job.reads += 1
        told: dict[str, Any] = {"job_id": id, "status": "in_progress", "terminal": False}
        if self.rules.hint_s is not None:
            told["next_poll_after_seconds"] = self.rules.hint_s
        if now_s >= job.done_s:
            if job.told_s is None:
                job.told_s = self.books.last_told_s = now_s
            told = {
                "job_id": id, "status": "completed", "terminal": True,
                "video_url": f"https://cdn.example/{id}.mp4",
                "usage": {"cost": "0.100000", "captured_micros": 100_000},
            }  # fmt: skip
        return 200, told

    def _told(self) -> dict[str, Any]:
        books = self.books
        late = [job.told_s - job.done_s for job in self.jobs.values() if job.told_s is not None]
        return vars(books) | {
            "jobs": len(self.jobs),
            "told": len(late),
            "late_s": late,
            "reads_per_job": [job.reads for job in self.jobs.values()],
        }


class Connection(asyncio.Protocol):
    """One connection, kept open unless the client says that it closes."""

    def __init__(self, sume: QuickSume) -> None:
        self._sume, self._buffer = sume, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            heard = _heard(self._buffer[:end])
            whole = end + 4 + heard.length
            if len(self._buffer) < whole:
                return
            self._buffer = self._buffer[whole:]
            self._answer(heard)

    def _answer(self, heard: Heard) -> None:
        sume = self._sume
        code, told = sume.answer(heard)
        body = json.dumps(told).encode()
        head = (
            f"HTTP/1.1 {code} OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        closing = "\r\nConnection: close" if heard.closes else ""
        whole = f"{head}{closing}\r\n\r\n".encode() + body
        if not sume.rules.answer_s or heard.path == "/books":
            self._write(whole, heard.closes)
            return
        loop = asyncio.get_running_loop()
        loop.call_later(sume.rules.answer_s, self._write, whole, heard.closes)

    def _write(self, whole: bytes, closes: bool) -> None:
        self._transport.write(whole)
        if closes:
            self._transport.close()


def _heard(head: bytes) -> Heard:
    lines = head.decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ")
    key, closes, length = "", False, 0
    for line in lines[1:]:
        name, _, value = line.partition(": ")
        match name.lower():
            case "idempotency-key":
                key = value
            case "connection":
                closes = value == "close"
            case "content-length":
                length = int(value)
    return Heard(method, path, key, closes, length)


async def main() -> None:
    sume = QuickSume(Rules(**json.loads(sys.argv[1])))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(sume), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
