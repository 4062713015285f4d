"""The ledger on its own: what it refuses, what it guarantees, how it survives."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import FILE_ONLY, START_MS, Desk, clips, reading_of

import sume_resume
from sume_resume import (
    APPLICATION_ID,
    FINAL,
    MIGRATIONS,
    SCHEMA_VERSION,
    TRANSITIONS,
    Job,
    Ledger,
    LedgerBusy,
    LedgerError,
    LockedError,
    RowChanged,
    RunLock,
    Status,
    open_ledger,
    parse_reply,
)


@pytest.fixture
def ledger(desk: Desk) -> Iterator[Ledger]:
    desk.add(*clips(3))
    with open_ledger(desk.place) as opened:
        yield opened


def read(word: str, **more: Any) -> sume_resume.Reading:
    answer = sume_resume.Reply(200, {}, {"status": word, **more})
    return sume_resume.reading_of(answer, "job_1")


def job_in(ledger: Ledger, status: Status) -> Job:
    """Bring row r1 into a state, by the facts that lead there."""
    job = ledger.job_of_row("r1")
    assert job is not None
    if status is Status.QUEUED:
        return job
    job = ledger.record_prepared(job, START_MS)
    if status is Status.SENDING:
        return job
    if status is Status.REJECTED:
        return ledger.record_rejected(job, "no", START_MS)
    if status is Status.REVIEW:
        return ledger.record_review(job, "why", START_MS)
    job = ledger.record_accepted(job, "job_1", START_MS, START_MS)
    if status is Status.PENDING:
        return job
    if status is Status.IN_PROGRESS:
        return ledger.record_status(job, read("processing"), START_MS, START_MS)
    return ledger.record_final(job, status, read(status), None, START_MS)


# -- the file --


@FILE_ONLY
def test_at_rest_it_is_one_private_file(desk: Desk) -> None:
    desk.add(*clips(2))
    desk.run()
    assert [path.name for path in desk.folder.iterdir()] == ["jobs.db"]
    if os.name == "posix":
        assert stat.S_IMODE(desk.path.stat().st_mode) == 0o600


@FILE_ONLY
def test_pragmas_and_marks(ledger: Ledger) -> None:
    ask = ledger._one
    assert ask("PRAGMA journal_mode")[0] == "delete"
    assert ask("PRAGMA synchronous")[0] == 3
    assert ask("PRAGMA foreign_keys")[0] == 1
    assert ask("PRAGMA application_id")[0] == APPLICATION_ID
    assert ask("PRAGMA user_version")[0] == SCHEMA_VERSION == len(MIGRATIONS)
    assert ask("PRAGMA busy_timeout")[0] == 5000


@FILE_ONLY
def test_a_ledger_in_wal_mode_is_brought_back(desk: Desk) -> None:
    desk.add(*clips(1))
    with contextlib.closing(sqlite3.connect(desk.path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
    with open_ledger(desk.place) as ledger:
        assert ledger._one("PRAGMA journal_mode")[0] == "delete"


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case "empty":
            data.clear()
        case "text":
            data[:] = b"id,prompt\n1,cat\n" * 20
        case "short":
            del data[60:]
        case "newer":
            data[60:64] = (99).to_bytes(4, "big")
        case "foreign":
            data[68:72] = b"\0\0\0\0"
        case "bad page":
            data[4096 : 4096 * 3] = os.urandom(4096 * 2)
        case "truncated":
            del data[len(data) // 2 :]
    path.write_bytes(data)


@FILE_ONLY
@pytest.mark.parametrize(
    "how", ["empty", "text", "short", "newer", "foreign", "bad page", "truncated"]
)
def test_what_is_no_whole_ledger_is_refused_untouched(desk: Desk, how: str) -> None:
    """B15: refused before anything is written, whatever is wrong with it."""
    desk.add(*clips(40))
    damaged(desk.path, how)
    before = (desk.path.read_bytes(), desk.path.stat().st_mtime_ns)
    with pytest.raises(LedgerError), open_ledger(desk.place) as ledger:
        ledger.quick_check()
    assert (desk.path.read_bytes(), desk.path.stat().st_mtime_ns) == before
    assert [path.name for path in desk.folder.iterdir()] == ["jobs.db"]


def test_a_missing_ledger_is_not_made_by_opening(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no such ledger"):
        open_ledger(tmp_path / "jobs.db")
    assert list(tmp_path.iterdir()) == []


@FILE_ONLY
def test_a_new_ledger_never_replaces_a_file(tmp_path: Path, desk: Desk) -> None:
    def fill(ledger: Ledger) -> sume_resume.Added:
        desk.path.write_text("mine")
        return sume_resume.Added()

    with pytest.raises(FileExistsError):
        sume_resume.create_ledger(desk.path, "n", fill)
    assert desk.path.read_text() == "mine"


@FILE_ONLY
def test_a_hot_journal_is_rolled_back(desk: Desk) -> None:
    """B13: killed in the middle of a commit; the next opening has every committed key."""
    desk.add(*clips(3))
    program = (
        "import os, signal, sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('PRAGMA cache_size = 1')\n"
        "db.execute('PRAGMA cache_spill = 1')\n"
        "db.execute('BEGIN IMMEDIATE')\n"
        'db.execute("UPDATE jobs SET note = hex(zeroblob(4000))")\n'
        "db.execute(\"INSERT INTO meta VALUES ('big', hex(zeroblob(90000)))\")\n"
        "os.kill(os.getpid(), getattr(signal, 'SIGKILL', signal.SIGTERM))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(desk.path)], check=False)
    assert desk.path.with_name("jobs.db-journal").exists()
    assert [job.note for job in desk.jobs().values()] == [None] * 3
    assert not desk.path.with_name("jobs.db-journal").exists()
    shutil.copy(desk.path, desk.path.with_name("copy.db"))
    with open_ledger(desk.path.with_name("copy.db")) as ledger:
        assert len(list(ledger.latest())) == 3


# -- facts --


def test_every_transition_is_reachable_or_refused(desk: Desk) -> None:
    """The table is the truth: each illegal move is refused with nothing written."""
    for number, (before, allowed) in enumerate(TRANSITIONS.items()):
        for after in Status:
            desk.begin_anew(f"{number}-{after}")
            desk.add(*clips(1))
            with open_ledger(desk.place) as ledger:
                job = job_in(ledger, before)
                changes: dict[str, Any] = {"status": after}
                changes["next_poll_at"] = START_MS if after in sume_resume.OPEN else None
                if after in sume_resume.OPEN:
                    changes["job_id"] = "job_1"
                changes["first_sent_at"] = None if after is Status.QUEUED else START_MS
                if after is before or after in allowed:
                    assert ledger._change(job, "x", START_MS, **changes).status is after
                else:
                    with pytest.raises(RowChanged):
                        ledger._change(job, "x", START_MS, **changes)
                    assert ledger.job(job.id) == job


@pytest.mark.parametrize("status", sorted(FINAL))
def test_a_final_row_takes_no_further_fact(ledger: Ledger, status: Status) -> None:
    job = job_in(ledger, status)
    facts: list[Callable[[], Job]] = [
        lambda: ledger.record_prepared(job, START_MS),
        lambda: ledger.record_returned(job, "t", START_MS),
        lambda: ledger.record_accepted(job, "job_2", START_MS, START_MS),
        lambda: ledger.record_rejected(job, "t", START_MS),
        lambda: ledger.record_review(job, "t", START_MS),
        lambda: ledger.record_status(job, read("processing"), START_MS, START_MS),
        lambda: ledger.record_poll_error(job, "t", START_MS, START_MS),
    ]
    for fact in facts:
        if status is Status.REJECTED and fact is facts[3]:
            continue
        with pytest.raises((RowChanged, LedgerError)):
            fact()
    assert ledger.job(job.id).status is status


def test_facts_of_one_commit_stand_or_fall_together(ledger: Ledger) -> None:
    one, two = ledger.job_of_row("r1"), ledger.job_of_row("r2")
    assert one is not None
    assert two is not None
    with contextlib.suppress(ZeroDivisionError), ledger.transaction():
        ledger.record_prepared(one, START_MS)
        raise ZeroDivisionError
    assert ledger.job(one.id) == one
    with ledger.transaction():
        ledger.record_prepared(one, START_MS)
        # The conflict of one fact does not undo the others.
        with pytest.raises(RowChanged):
            ledger.record_accepted(two, "job_9", START_MS, START_MS)
    assert ledger.job(one.id).status is Status.SENDING


def test_history_has_a_line_for_each_fact(ledger: Ledger) -> None:
    job = job_in(ledger, Status.COMPLETED)
    lines = [(event.event, event.before, event.after) for event in ledger.history(job)]
    assert lines == [
        ("added", None, "queued"),
        ("prepared", "queued", "sending"),
        ("accepted", "sending", "pending"),
        ("final", "pending", "completed"),
    ]


def test_absence_never_erases_a_cost(ledger: Ledger) -> None:
    job = job_in(ledger, Status.PENDING)
    job = ledger.record_status(job, read("processing", usage={"cost": 1}), START_MS, START_MS)
    assert (job.cost_micros, job.cost_state) == (1_000_000, "stated")
    job = ledger.record_status(job, read("processing"), START_MS, START_MS)
    assert job.cost_micros == 1_000_000
    refund = {"captured_usd_micros": 900_000, "refunded_usd_micros": 900_000}
    job = ledger.record_final(job, Status.FAILED, read("failed", usage=refund), None, START_MS)
    assert (job.cost_micros, job.cost_state) == (0, "refunded")


def test_totals_are_exact_and_name_the_unknown(ledger: Ledger) -> None:
    cost = parse_reply(200, {}, b'{"status": "completed", "usage": {"cost": 0.1}}')
    one = job_in(ledger, Status.PENDING)
    ledger.record_final(one, Status.COMPLETED, reading_of(cost), None, START_MS)
    two = ledger.job_of_row("r2")
    assert two is not None
    ledger.record_prepared(two, START_MS)
    totals = ledger.totals()
    assert (totals.rows, totals.cost_micros, totals.cost_unknown_rows) == (3, 100_000, 1)
    assert totals.by_status[Status.QUEUED] == 1


def test_a_signed_url_loses_its_query(ledger: Ledger) -> None:
    job = job_in(ledger, Status.PENDING)
    url = "https://media.sume.com/artifacts/a.mp4?sig=SECRET#part"
    ledger.record_final(job, Status.COMPLETED, read("completed", url=url), None, START_MS)
    assert [out.url for out in ledger.outputs(job)] == ["https://media.sume.com/artifacts/a.mp4"]
    assert "SECRET" not in repr(ledger._all("SELECT * FROM outputs"))


@FILE_ONLY
def test_sql_itself_refuses_a_row_that_cannot_be(ledger: Ledger) -> None:
    """The CHECKs are a second net under the code."""
    bad = [
        "UPDATE jobs SET status = 'done'",
        "UPDATE jobs SET status = 'sending'",
        "UPDATE jobs SET first_sent_at = 1",
        "UPDATE jobs SET next_poll_at = 1",
        "UPDATE jobs SET status = 'pending', next_poll_at = 1",
        "UPDATE jobs SET cost_micros = -1",
        "UPDATE jobs SET cost_micros = 0.5",
        "UPDATE jobs SET key = 'same'",
        "INSERT INTO jobs (row, attempt, key, kind, model, own, body, source, status,"
        " created_at, updated_at) SELECT row, 2, 'k2', kind, model, own, body, source, status,"
        " created_at, updated_at FROM jobs",
    ]
    for sql in bad:
        with pytest.raises(LedgerError):
            ledger._execute(sql)


@FILE_ONLY
def test_what_is_due_is_found_by_its_index(ledger: Ledger) -> None:
    values = {"now": 1, "horizon": 2, "limit": 1, "status": "queued", "after": 0, "no_lease": 3}
    for sql in (sume_resume.SQL_CLAIMABLE_DUE, sume_resume.SQL_DUE_SPAN, sume_resume.SQL_BY_STATUS):
        plan = ledger._all(f"EXPLAIN QUERY PLAN {sql}", **values)
        text = " ".join(str(line[3]) for line in plan)
        assert "USING" in text, text
        assert "SCAN jobs" not in text.replace("SCAN jobs USING INDEX", ""), text


# -- locks --


@FILE_ONLY
def test_one_run_per_ledger(desk: Desk) -> None:
    desk.add(*clips(1))
    with RunLock(desk.path):
        with pytest.raises(LockedError, match=f"pid {os.getpid()}"), RunLock(desk.path):
            pass
        # Another name of the same ledger is the same ledger.
        link = desk.path.with_name("link.db")
        if os.name == "posix":
            link.symlink_to(desk.path)
            with pytest.raises(LockedError), RunLock(link):
                pass
    with RunLock(desk.path):
        pass
    assert not desk.path.with_name("jobs.db.lock").exists()


@FILE_ONLY
def test_an_old_lock_file_is_no_lock(desk: Desk) -> None:
    """B16: the kernel's lock counts, not the file and not the pid inside."""
    desk.path.with_name("jobs.db.lock").write_text("pid 1 on elsewhere")
    with RunLock(desk.path):
        pass


@FILE_ONLY
def test_a_lock_file_deleted_under_a_run_guards_its_successor(desk: Desk) -> None:
    first = RunLock(desk.path).__enter__()
    if os.name == "posix":
        first.path.unlink()
        with RunLock(desk.path) as second:
            assert second._is_current()
            assert not first._is_current()
    first.__exit__()


@FILE_ONLY
def test_a_writer_is_waited_for(desk: Desk) -> None:
    """B11: with IMMEDIATE the timeout works: 50 claims beside a busy writer, no error."""
    desk.add(*clips(50))
    stop = threading.Event()

    def write() -> None:
        other = sqlite3.connect(desk.path, timeout=10, isolation_level=None)
        while not stop.is_set():
            other.execute("BEGIN IMMEDIATE")
            other.execute("INSERT OR REPLACE INTO meta VALUES ('noise', hex(randomblob(50)))")
            other.execute("COMMIT")
            # SQLite's lock is not fair: a writer that never pauses keeps it.
            stop.wait(0.002)
        other.close()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with open_ledger(desk.place) as ledger:
            for job in ledger.with_status(Status.QUEUED):
                ledger.record_prepared(job, START_MS)
    finally:
        stop.set()
        thread.join()
    assert {job.status for job in desk.jobs().values()} == {Status.SENDING}


@FILE_ONLY
def test_a_ledger_locked_for_long_says_so(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sume_resume, "BUSY_TIMEOUT_MS", 20)
    desk.add(*clips(1))
    other = sqlite3.connect(desk.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with open_ledger(desk.place) as ledger, pytest.raises(LedgerBusy, match="another process"):
            ledger.record_pace("writes", 1)
    finally:
        other.close()


@FILE_ONLY
def test_a_reader_that_delays_a_commit_is_waited_for(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit may be the only trace of a paid job: it is tried until it is done."""
    monkeypatch.setattr(sume_resume, "BUSY_TIMEOUT_MS", 20)
    desk.add(*clips(1))
    reader = sqlite3.connect(desk.path, isolation_level=None, check_same_thread=False)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM jobs").fetchall()
    waits = []

    def on_busy(exc: LedgerBusy, tries: int) -> None:
        waits.append(str(exc))
        if len(waits) == 3:
            reader.execute("COMMIT")

    with open_ledger(desk.place) as ledger:
        ledger.on_busy = on_busy
        ledger.record_pace("writes", 1)
        assert ledger.pace("writes") == 1
    reader.close()
    assert len(waits) == 3


@FILE_ONLY
def test_a_read_only_ledger_can_be_shown(desk: Desk) -> None:
    desk.add(*clips(2))
    with open_ledger(desk.place) as ledger:
        ledger._execute("PRAGMA query_only = ON")
        assert ledger.totals().rows == 2
        with pytest.raises(LedgerError, match="writable"):
            ledger.record_pace("writes", 1)


def test_memory_stays_flat_over_many_rows(desk: Desk) -> None:
    """Reading all rows goes in batches; no read stays open meanwhile."""
    desk.add(*clips(50))
    with open_ledger(desk.place) as ledger:
        rows = ledger.latest(batch=7)
        first = next(rows)
        with open_ledger(desk.place) as other:
            other.record_prepared(first, START_MS)
        assert 1 + sum(1 for _ in rows) == 50


@FILE_ONLY
def test_a_journal_of_a_ledger_that_is_gone_is_not_rolled_into_a_new_one(desk: Desk) -> None:
    desk.path.with_name("jobs.db-journal").write_bytes(b"old pages")
    with pytest.raises(LedgerError, match=r"jobs\.db-journal"):
        desk.add(*clips(2))
    assert [path.name for path in desk.folder.iterdir()] == ["jobs.db-journal"]


@FILE_ONLY
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_is_refused_at_once(desk: Desk) -> None:
    os.mkfifo(desk.path)
    with pytest.raises(LedgerError, match="not a regular file"):
        open_ledger(desk.place)
    with pytest.raises(LedgerError, match="not a regular file"):
        open_ledger(desk.folder)


@FILE_ONLY
def test_a_link_to_nothing_is_named(desk: Desk) -> None:
    desk.path.symlink_to(desk.path.with_name("nothing.db"))
    with pytest.raises(LedgerError, match="link"):
        desk.add(*clips(1))


@FILE_ONLY
def test_a_ledger_that_was_replaced_says_so(ledger: Ledger) -> None:
    Path(str(ledger.place)).unlink()
    with pytest.raises(LedgerError, match="removed or replaced"):
        ledger.record_pace("writes", 1)


def test_a_row_is_found_by_id_job_id_and_unique_prefix(ledger: Ledger) -> None:
    job = job_in(ledger, Status.PENDING)
    assert ledger.find("r1") == ledger.find("job_1") == job
    with pytest.raises(sume_resume.UsageError, match="several rows"):
        ledger.find("r")
    for nobody in ("x", "", "r1x"):
        with pytest.raises(sume_resume.UsageError, match="no row or job"):
            ledger.find(nobody)


# -- many facts in one commit --


def sending(ledger: Ledger, row: str) -> Job:
    job = ledger.job_of_row(row)
    assert job is not None
    return ledger.record_prepared(job, START_MS)


def test_one_job_for_two_rows_in_one_commit(ledger: Ledger) -> None:
    """What the commit puts off to write is known to it: the second row goes to a person."""
    first, second = sending(ledger, "r1"), sending(ledger, "r2")
    for asked_before in (False, True):
        with contextlib.suppress(ZeroDivisionError), ledger.transaction():
            if asked_before:
                ledger.hold([first.id, second.id], ["job_x"])
            ledger.record_accepted(first, "job_x", START_MS, START_MS)
            after = ledger.record_accepted(second, "job_x", START_MS, START_MS)
            assert after.status is Status.REVIEW
            assert "which row 'r1' already has" in (after.note or "")
            raise ZeroDivisionError
    assert [job.status for job in ledger.latest()][:2] == ["sending", "sending"]


def test_a_commit_sees_what_it_has_put_off(ledger: Ledger) -> None:
    job = sending(ledger, "r1")
    with ledger.transaction():
        accepted = ledger.record_accepted(job, "job_1", START_MS, START_MS + 5)
        assert ledger.job(job.id) == accepted
        assert ledger.with_status(Status.PENDING) == [accepted]
        assert ledger.next_due_ms(START_MS + 10_000) == START_MS + 5
        done = ledger.record_final(accepted, Status.COMPLETED, read("completed"), None, START_MS)
        assert ledger.totals().by_status[Status.COMPLETED] == 1
        assert ledger.job(job.id) == done
    assert ledger.job(job.id) == done
    words = [fact.event for fact in ledger.history(done)]
    assert words == ["added", "prepared", "accepted", "final"]


def test_a_row_that_changes_under_a_commit_undoes_it(ledger: Ledger) -> None:
    first, second = sending(ledger, "r1"), sending(ledger, "r2")

    def both() -> None:
        with ledger.transaction():
            ledger.record_accepted(first, "job_1", START_MS, START_MS)
            ledger.record_accepted(second, "job_2", START_MS, START_MS)
            # No method does this; it stands for a fault of the database or of ours.
            sql = "UPDATE jobs SET token = token + 1 WHERE id = :id"
            ledger._db.execute(sql, {"id": second.id})

    with pytest.raises(LedgerError, match="rows changed under a commit"):
        both()
    assert [job.status for job in ledger.latest()][:2] == ["sending", "sending"]
    assert ledger.job(first.id) == first


def test_a_commit_of_many_facts_keeps_few_of_them_in_memory(desk: Desk) -> None:
    count = 3 * sume_resume.ADD_ROWS
    desk.add(*clips(count))
    with open_ledger(desk.place) as ledger:
        jobs = list(ledger.latest())
        with ledger.transaction():
            for job in jobs:
                ledger.record_prepared(job, START_MS)
                assert len(ledger._rows) <= 2 * sume_resume.ADD_ROWS
        assert ledger.totals().by_status == {Status.SENDING: count}


@FILE_ONLY
def test_totals_need_no_row(ledger: Ledger) -> None:
    """Counts and money come from indexes: a million rows are not read for a line about them."""
    for sql in (sume_resume.SQL_COUNTS, sume_resume.SQL_MONEY):
        plan = ledger._all(f"EXPLAIN QUERY PLAN {sql}", rejected="rejected")
        steps = [line[3] for line in plan if "jobs" in line[3]]
        assert steps
        assert all(" USING " in step and "INDEX" in step for step in steps), steps


def test_a_job_that_was_asked_for_before_its_holder_is_let_go(ledger: Ledger) -> None:
    """Handing a row back must not make the commit forget who has its job."""
    first, second = job_in(ledger, Status.PENDING), sending(ledger, "r2")
    with ledger.transaction():
        ledger.hold([first.id, second.id], ["job_1"])
        ledger.record_handed_back(ledger.record_claimed(first, START_MS))
        after = ledger.record_accepted(second, "job_1", START_MS, START_MS)
    assert after.status is Status.REVIEW
    assert ledger.job(first.id).status is Status.PENDING


def test_rows_that_are_passed_are_not_kept(desk: Desk) -> None:
    """A run of one row among many passes the others; a commit does not hold them all."""
    desk.add(*clips(3 * sume_resume.ADD_ROWS))
    kept: list[int] = []

    class Watched(Ledger):
        def _commit(self) -> None:
            kept.append(len(self._rows))
            super()._commit()

    last = f"r{3 * sume_resume.ADD_ROWS}"
    desk.run(scope={last}, make_ledger=Watched)
    assert desk.jobs()[last].status is Status.COMPLETED
    assert max(kept) <= sume_resume.ADD_ROWS


def test_rows_are_found_by_an_index(ledger: Ledger) -> None:
    """Whatever the ledger's size: a turn asks for the rows of its answers, and their jobs."""
    plans = {
        ledger._db.jobs_sql: {"ids": "[1, 2]", "job_ids": '["job_1"]'},
        ledger._db.rows_sql: {"rows": '["r1", "r2"]'},
    }
    for sql, values in plans.items():
        with ledger.transaction():
            if ledger.shared:
                # Of three rows a scan would be the cheapest; without it an index must do.
                ledger._execute("SET LOCAL enable_seqscan = off")
                plan = str(ledger._all(f"EXPLAIN {sql}", **values))
                assert "Seq Scan on jobs" not in plan, plan
            else:
                plan = str(ledger._all(f"EXPLAIN QUERY PLAN {sql}", **values))
                assert "SCAN jobs" not in plan, plan
