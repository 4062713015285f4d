"""Fail step n, for every n: each call to the system fails once, and nothing is bought twice.

A run in which the nth call of a kind fails is followed by a run in which none does; n goes on
until a run is clean. What must hold is checked each time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpcore
import pytest
from conftest import Desk, clips
from servers import Reply, drop_after, error

import sume_resume
from sume_resume import Ledger, LedgerError, Status, SumeResumeError, open_ledger

ROWS = [*clips(2), {"id": "image", "prompt": "poster.", "kind": "image"}]


class Fault:
    """Counts calls; the nth one fails."""

    def __init__(
        self,
        nth: int,
        make: Callable[[], Exception],
        after: bool,
        broken: Callable[..., None] = lambda *args: None,
    ) -> None:
        """`broken` does to what was called what goes with the failure."""
        self.nth, self.make, self.after, self.calls = nth, make, after, 0
        self.broken = broken

    @property
    def hit(self) -> bool:
        return self.calls >= self.nth

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Fail before the call, or after it was done: a caller cannot tell which."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            mine = self.calls == self.nth
            if mine and not self.after:
                self.broken(*args)
                raise self.make()
            result = original(*args, **kwargs)
            if mine:
                self.broken(*args)
                if isinstance(result, sqlite3.Cursor):
                    # An open statement would keep its lock beyond the connection's end.
                    result.close()
                raise self.make()
            return result

        return call


class FailingDb:
    """A connection, but for the statements that fail."""

    def __init__(self, db: sqlite3.Connection, fault: Fault, wanted: str) -> None:
        self._db, self._wanted = db, wanted
        self._failing = fault.around(db.execute)
        self._failing_many = fault.around(db.executemany)

    def execute(self, sql: str, *args: Any) -> Any:
        commit = sql == sume_resume.SQL_COMMIT
        mine = commit if self._wanted == "commit" else not (commit or sql.startswith("ROLLBACK"))
        return self._failing(sql, *args) if mine else self._db.execute(sql, *args)

    def executemany(self, sql: str, *args: Any) -> Any:
        mine = self._wanted != "commit"
        return (self._failing_many if mine else self._db.executemany)(sql, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def disk_full() -> sqlite3.Error:
    exc = sqlite3.OperationalError("database or disk is full")
    exc.sqlite_errorcode = sqlite3.SQLITE_FULL
    return exc


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def unlucky_ledger(fault: Fault, wanted: str) -> Callable[[Path], Ledger]:
    def make(path: Path) -> Ledger:
        ledger = open_ledger(path)
        file = ledger._db
        assert isinstance(file, sume_resume.Sqlite)
        file._db = FailingDb(file._db, fault, wanted)  # type: ignore[assignment]
        return ledger

    return make


def behave(desk: Desk) -> None:
    """Have the server do, to each row's first submit, what is told by its text."""
    seen: Counter[bytes] = Counter()

    def on_submit(server: Any, request: Any) -> Any:
        seen[request.body] += 1
        if seen[request.body] > 1:
            return None
        if b"clip 1." in request.body:
            return drop_after(server, request)
        return Reply(429, error("rate_limit_exceeded")) if b"poster" in request.body else None

    desk.server.on_submit = on_submit
    desk.server.reads_to_finish = 2


def check_promises(desk: Desk) -> None:
    charges = Counter(json.loads(job.body)["prompt"] for job in desk.server.charges)
    assert all(count == 1 for count in charges.values()), charges
    with open_ledger(desk.place) as ledger:
        ledger.quick_check()
        jobs = list(ledger.latest())
        totals = ledger.totals()
    keys = {post.key for post in desk.server.posts}
    assert keys <= {job.key for job in jobs}
    for job in jobs:
        if job.job_id is not None:
            assert desk.server.jobs[job.job_id].key == job.key
    assert totals.cost_micros == 100_000 * sum(job.cost_micros is not None for job in jobs)
    for path in desk.folder.iterdir():
        assert desk.key.encode() not in path.read_bytes(), path


def check_done(desk: Desk) -> None:
    check_promises(desk)
    assert {job.status for job in desk.jobs().values()} == {Status.COMPLETED}
    assert len(desk.server.charges) == len(ROWS)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("wanted", ["execute", "commit"])
def test_statement_n_fails(desk: Desk, wanted: str, after: bool) -> None:
    """Of a run's own statements and commits; the disk is full at each one in turn."""
    n = 0
    while True:
        n += 1
        desk.path.unlink(missing_ok=True)
        desk.server.forget()
        behave(desk)
        desk.add(*ROWS)
        fault = Fault(n, disk_full, after)
        with contextlib.suppress(LedgerError):
            desk.run(make_ledger=unlucky_ledger(fault, wanted), concurrency=3)
        check_promises(desk)
        desk.run(concurrency=3)
        check_done(desk)
        if not fault.hit:
            break
    assert n > (10 if wanted == "commit" else 60)


NETWORK = {
    "connect": ("SyncBackend", "connect_tcp", lambda: httpcore.ConnectError("no route")),
    "send": ("SyncStream", "write", lambda: httpcore.WriteError("broken pipe")),
    "receive": ("SyncStream", "read", lambda: httpcore.ReadError("reset by peer")),
}


@pytest.mark.parametrize(
    ("step", "after"),
    [("connect", False), ("send", False), ("send", True), ("receive", False), ("receive", True)],
)
def test_call_n_to_the_network_fails(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    """One failure ends no run: the same run finds out and finishes."""
    import httpcore._backends.sync as backend

    owner, name, make = NETWORK[step]
    original = getattr(getattr(backend, owner), name)
    for n in range(1, 200):
        desk.path.unlink(missing_ok=True)
        desk.server.forget()
        behave(desk)
        desk.add(*ROWS)
        hang_up = (lambda *args: None) if step == "connect" else (lambda stream, *_: stream.close())
        fault = Fault(n, make, after, hang_up)
        monkeypatch.setattr(getattr(backend, owner), name, fault.around(original))
        desk.run(concurrency=3)
        monkeypatch.setattr(getattr(backend, owner), name, original)
        check_done(desk)
        if not fault.hit:
            break
    assert n > 5


FILE_CALLS = ["open", "write", "fsync", "link", "close", "ftruncate"]


@pytest.mark.skipif(os.name != "posix", reason="links and folders of POSIX")
@pytest.mark.parametrize("name", FILE_CALLS)
def test_call_n_to_the_file_system_fails(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """While a ledger is made, locked and backed up: all or nothing, and again works."""
    original = getattr(os, name)
    copy = desk.path.with_name("copy.db")
    for n in range(1, 60):
        for path in desk.folder.iterdir():
            path.unlink()
        fault = Fault(n, no_space, after=False)
        monkeypatch.setattr(os, name, fault.around(original))
        with contextlib.suppress(SumeResumeError, OSError):
            with sume_resume.RunLock(desk.path):
                desk.add(*ROWS)
            with open_ledger(desk.place) as ledger:
                ledger.copy_to(copy)
        monkeypatch.setattr(os, name, original)
        for path in (desk.path, copy):
            if path.exists():
                with open_ledger(path) as ledger:
                    ledger.quick_check()
                    assert ledger.totals().rows == len(ROWS)
        with sume_resume.RunLock(desk.path):
            desk.add(*ROWS)
        assert len(desk.jobs()) == len(ROWS)
        left = {path.name for path in desk.folder.iterdir()}
        assert left <= {"jobs.db", "copy.db"}, left
        if not fault.hit:
            break
    assert n > 1


def test_connect_n_to_the_ledger_fails(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.add(*ROWS)
    behave(desk)
    original = sqlite3.connect
    for n in range(1, 20):
        fault = Fault(n, disk_full, after=False)
        monkeypatch.setattr(sqlite3, "connect", fault.around(original))
        with contextlib.suppress(LedgerError):
            desk.run(concurrency=3)
        monkeypatch.setattr(sqlite3, "connect", original)
        check_promises(desk)
        if not fault.hit:
            break
    assert n > 1
    desk.run()
    check_done(desk)
