"""What the scheduler decides beside single answers: scope, limits, guard, age, pacing, races."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import socket
import sqlite3
import threading
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import FILE_ONLY, KEY, START_MS, Desk, Inline, clips, statuses
from servers import FakeSume, Reply, Request, accept_and_say, drop_after, drop_before
from servers import error as err

import sume_resume
from sume_resume import (
    AccountError,
    Call,
    Changed,
    Engine,
    Errand,
    Event,
    Ledger,
    LedgerBusy,
    LedgerError,
    Started,
    Status,
    open_ledger,
)

HOUR = 3600.0


# -- scope and limits --


def test_scope_sends_only_its_rows_and_settles_the_others(desk: Desk) -> None:
    """`run FILE` sends FILE's rows; what is open or unknown beside them is brought to its end."""
    desk.add(*clips(4))
    desk.server.submits.append(drop_after)
    desk.run(scope={"r1"}, during=lambda e, _: e.stop(15) if desk.server.posts else None)
    assert desk.job("r1").status == "sending"
    desk.run(scope={"r3"})
    jobs = desk.jobs()
    assert [str(jobs[r].status) for r in ("r1", "r2", "r3", "r4")] == [
        "completed",
        "queued",
        "completed",
        "queued",
    ]


def test_limit_counts_new_rows_once(desk: Desk) -> None:
    desk.add(*clips(5))
    desk.server.submits.extend([Reply(429, err("rate_limit_exceeded"))] * 2)
    desk.run(limit=2)
    assert sorted(statuses(desk.jobs().values())) == ["completed"] * 2 + ["queued"] * 3
    desk.run(limit=0)
    assert len(desk.server.charges) == 2


def test_rows_added_beside_a_run_are_sent(desk: Desk) -> None:
    desk.add(*clips(1))
    added: list[Any] = []

    def during(engine: Engine, event: Event) -> None:
        if isinstance(event, Changed) and event.after.status is Status.PENDING and not added:
            added.append(desk.add(*clips(3)))

    desk.run(during=during)
    assert len(desk.server.charges) == 3
    assert statuses(desk.jobs().values()) == ["completed"] * 3


# -- guard --


def kill_in_flight(desk: Desk) -> None:
    """Leave one row `sending`, with its job made at Sume."""
    desk.add(*clips(2))
    desk.server.submits.append(drop_after)
    desk.run(limit=1, during=lambda e, _: e.stop(15) if desk.server.posts else None)
    assert desk.job().status == "sending"


def test_another_key_sends_nothing(desk: Desk) -> None:
    """B09: nothing is sent or replayed until a person says that it is the same account."""
    kill_in_flight(desk)
    before = desk.jobs()
    desk.key = "CANARY-other"
    with pytest.raises(AccountError, match="--adopt-account"):
        desk.run()
    assert len(desk.server.requests) == 1
    assert desk.jobs() == before
    desk.run(adopt=True)
    assert len(desk.server.charges) == 2
    desk.key = KEY
    with pytest.raises(AccountError):
        desk.run()


def test_a_mistyped_key_does_not_lock_a_ledger(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.key = "CANARY-typo"
    desk.server.on_submit = Reply(401, err("unauthorized"))
    assert desk.run().halt is not None
    desk.server.on_submit = None
    desk.key = KEY
    desk.run()
    assert desk.job().status == "completed"


def test_another_origin_before_any_job_is_stored(desk: Desk) -> None:
    """What may have been sent to the old origin goes to review, and it is named."""
    kill_in_flight(desk)
    old = desk.server.url
    with FakeSume() as other:
        desk.server = other
        desk.run()
        assert desk.job("r1").status == "review"
        assert old in (desk.job("r1").note or "")
        assert desk.job("r2").status == "completed"
        assert [b"clip 2." in job.body for job in other.charges] == [True]


def test_another_origin_is_never_adopted_once_a_job_is_stored(desk: Desk) -> None:
    desk.add(*clips(2))
    desk.run(limit=1)
    with FakeSume() as other:
        desk.server = other
        with pytest.raises(AccountError, match="belongs to"):
            desk.run(adopt=True)
        assert other.requests == []


def test_the_ledger_keeps_no_key(desk: Desk) -> None:
    desk.add(*clips(2))
    desk.run()
    assert KEY.encode() not in desk.content()


# -- key age --


@pytest.mark.parametrize("asleep", [False, True])
def test_a_key_that_may_be_forgotten_waits_for_a_person(desk: Desk, asleep: bool) -> None:
    """B04: no POST after 24 h; the row says how old its first send is."""
    kill_in_flight(desk)
    (desk.clock.suspend if asleep else desk.clock.advance)(25 * HOUR)
    desk.run(scope={"r1"})
    assert len(desk.server.posts) == 1
    assert desk.job().status == "review"
    assert "25h" in (desk.job().note or "")


def test_a_young_key_is_replayed(desk: Desk) -> None:
    kill_in_flight(desk)
    desk.clock.advance(23.9 * HOUR)
    desk.run()
    assert len(desk.server.charges) == 2
    assert statuses(desk.jobs().values()) == ["completed"] * 2


def test_key_ttl_moves_the_bound(desk: Desk) -> None:
    kill_in_flight(desk)
    desk.clock.advance(2 * HOUR)
    desk.run(scope={"r1"}, key_ttl_s=1 * HOUR)
    assert desk.job().status == "review"


def test_no_key_is_too_old_for_the_stand_in(desk: Desk) -> None:
    kill_in_flight(desk)
    desk.clock.advance(1000 * HOUR)
    desk.run(scope={"r1"}, key_ttl_s=None)
    assert desk.job().status == "completed"


@FILE_ONLY
def test_a_clock_behind_the_first_send_is_too_old(desk: Desk) -> None:
    kill_in_flight(desk)
    desk.clock.set_back(1 * HOUR)
    desk.run(scope={"r1"})
    assert len(desk.server.posts) == 1
    assert desk.job().status == "review"


def test_the_age_is_asked_again_at_the_moment_of_sending(desk: Desk) -> None:
    """A suspend between claim and send: the replay is held back before its first byte."""
    kill_in_flight(desk)
    desk.clock.advance(HOUR)
    desk.run(scope={"r1"}, before=lambda call: desk.clock.suspend(25 * HOUR))
    assert len(desk.server.posts) == 1
    assert desk.job().status == "review"


def test_a_first_send_that_slept_is_claimed_anew(desk: Desk) -> None:
    """Nothing has arrived yet, so a new age is as good as the old one was."""
    desk.add(*clips(1))
    naps = deque([25 * HOUR])
    desk.run(before=lambda call: desk.clock.suspend(naps.popleft()) if naps else None)
    assert desk.history()[:4] == ["added", "prepared", "returned", "prepared"]
    assert len(desk.server.posts) == 1
    assert desk.job().status == "completed"


@FILE_ONLY
def test_a_clock_set_back_while_sending_holds_the_replay(desk: Desk) -> None:
    kill_in_flight(desk)
    desk.clock.advance(2 * HOUR)

    def before(call: Call) -> None:
        if call.errand is Errand.SUBMIT:
            desk.clock.set_back(HOUR)

    desk.run(scope={"r1"}, before=before)
    assert len(desk.server.posts) == 1
    assert desk.job().status == "review"


@FILE_ONLY
def test_a_clock_set_back_in_a_long_run_sends_unknown_rows_to_review(desk: Desk) -> None:
    """It fell by ten minutes while the outcome of a send was unknown: its age says nothing."""
    desk.add(*clips(1))
    desk.clock.advance(10)
    desk.server.on_submit = drop_before
    turned: list[bool] = []

    def during(engine: Engine, event: Event) -> None:
        if len(desk.server.posts) == 1 and not turned and desk.clock.wall_ms() > START_MS:
            turned.append(True)
            desk.clock.advance(HOUR)
            desk.clock.set_back(600)

    desk.run(during=during, deadline_s=2 * HOUR)
    assert len(desk.server.posts) == 1
    assert desk.job().status == "review"


# -- pacing --


class Limiter:
    """A server's sliding window of one minute, by the test's clock."""

    def __init__(self, desk: Desk, per_minute: int) -> None:
        self.desk, self.most = desk, per_minute
        self.times: deque[float] = deque()
        self.refused = 0

    def __call__(self, server: FakeSume, request: Request) -> Reply | None:
        now = self.desk.clock.awake_s()
        while self.times and self.times[0] <= now - 60:
            self.times.popleft()
        if len(self.times) >= self.most:
            self.refused += 1
            return Reply(429, err("rate_limit_exceeded"), {"Retry-After": "5"})
        self.times.append(now)
        return None


def test_300_rows_at_120_a_minute_draw_no_429(desk: Desk) -> None:
    limiter = desk.server.on_submit = Limiter(desk, 120)
    desk.add(*clips(300))
    start = desk.clock.awake_s()
    desk.run(writes_per_minute=120.0, latency_s=0.3)
    assert limiter.refused == 0
    assert len(desk.server.charges) == 300
    assert desk.clock.awake_s() - start < 300 / 120 * 60 * 1.05 + 60


def test_a_restart_does_not_refill_the_bucket(desk: Desk) -> None:
    """Ten kills in a row, each after some sends: the server's window is never overrun."""
    limiter = desk.server.on_submit = Limiter(desk, 10)
    desk.add(*clips(30))
    for _ in range(10):
        desk.run(writes_per_minute=10.0, deadline_s=7.0)
    desk.run(writes_per_minute=10.0)
    assert limiter.refused == 0
    assert len(desk.server.charges) == 30


class Queue:
    """A queue of a few places; each job in it takes some seconds of the test's clock."""

    def __init__(self, desk: Desk, places: int, takes_s: float, others: int = 0) -> None:
        self.desk, self.places, self.takes_s = desk, places, takes_s
        self.ends: list[float] = []
        self.full = 0
        self.busy_s = 0.0
        self.others = others
        desk.server.on_submit, desk.server.on_read = self.submit, self.read
        self.end_of: dict[str, float] = {}

    def running(self) -> int:
        now = self.desk.clock.awake_s()
        return sum(end > now for end in self.ends) + self.others

    def submit(self, server: FakeSume, request: Request) -> Reply:
        if self.running() >= self.places:
            self.full += 1
            return Reply(429, err("queue_full"))
        reply = server.accept(request)
        self.ends.append(self.desk.clock.awake_s() + self.takes_s)
        self.end_of[reply.body["data"]["job"]["id"]] = self.ends[-1]
        left = {"queue_capacity_remaining": self.places - self.running()}
        return Reply(202, reply.body | {"generation_limits": left})

    def read(self, server: FakeSume, request: Request) -> Reply | None:
        if self.end_of[request.path.split("/")[3]] > self.desk.clock.awake_s():
            return Reply(200, {"status": "in_progress", "next_poll_after_seconds": 1})
        return None


def test_a_small_queue_is_kept_full_and_not_hammered(desk: Desk) -> None:
    queue = Queue(desk, places=5, takes_s=20.0)
    desk.add(*clips(60))
    start = desk.clock.awake_s()
    desk.run(poll_interval_s=1.0, latency_s=0.2)
    took = desk.clock.awake_s() - start
    ideal = 60 / 5 * 20
    assert queue.full <= 6
    assert took <= ideal / 0.85
    assert len(desk.server.charges) == 60


def test_a_queue_that_others_fill_is_probed_by_backoff(desk: Desk) -> None:
    queue = Queue(desk, places=2, takes_s=5.0, others=2)
    desk.add(*clips(3))
    desk.run(deadline_s=600.0)
    # About one probe per backoff of up to a minute, never a hot loop.
    assert 5 <= queue.full <= 45
    queue.others = 0
    desk.run()
    assert len(desk.server.charges) == 3


def test_a_queue_that_others_left_is_filled_again(desk: Desk) -> None:
    """One refusal while others were there does not make the rest go one by one."""
    queue = Queue(desk, places=50, takes_s=30.0, others=50)
    desk.add(*clips(40))
    start = desk.clock.awake_s()

    def during(engine: Engine, event: Event) -> None:
        queue.others = 0 if queue.full else queue.others

    desk.run(poll_interval_s=1.0, writes_per_minute=120.0, during=during)
    # At 120 a minute the sends alone take 20 s, and one job 30 s.
    assert desk.clock.awake_s() - start <= 150
    assert len(desk.server.charges) == 40


def test_a_job_that_stays_open_does_not_block_the_queue(desk: Desk) -> None:
    desk.add(*clips(6))
    desk.server.on_read = Reply(200, {"status": "in_progress"})
    desk.server.submits.extend([lambda server, request: None, Reply(429, err("queue_full"))])
    desk.run(deadline_s=900.0, writes_per_minute=120.0)
    assert len(desk.server.charges) == 6


def test_rate_limit_headers_are_obeyed_before_they_bite(desk: Desk) -> None:
    times: list[float] = []

    def submit(server: FakeSume, request: Request) -> Reply:
        times.append(desk.clock.awake_s())
        left = 4 - len(times) % 5
        headers = {
            "RateLimit-Limit": "5",
            "RateLimit-Remaining": str(left),
            "RateLimit-Reset": "30",
        }
        return Reply(202, server.accept(request).body, headers)

    desk.server.on_submit = submit
    desk.add(*clips(10))
    desk.run(writes_per_minute=600.0)
    waits = [b - a for a, b in pairwise(times)]
    assert sum(wait >= 29 for wait in waits) == 2


# -- resuming --


def test_replays_come_first_and_are_byte_equal(desk: Desk) -> None:
    kill_in_flight(desk)
    sent = desk.server.posts[0]
    desk.run()
    again = desk.server.posts[1]
    assert (again.key, again.body) == (sent.key, sent.body)
    assert len(desk.server.charges) == 2


def test_a_new_build_replays_the_old_bytes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """B08: an upgrade that builds bodies otherwise changes no row that exists."""
    kill_in_flight(desk)
    monkeypatch.setattr(sume_resume, "DEFAULT_MODEL", "sume/other")
    added = desk.add(*clips(2))
    assert (added.new, added.existing) == (0, 2)
    desk.run()
    assert desk.server.posts[0].body == desk.server.posts[1].body
    assert b"sume/other" not in b"".join(p.body for p in desk.server.posts)


def test_edit_after_a_lost_answer(desk: Desk) -> None:
    """B06: the stored body is replayed and settled, the new one refused."""
    kill_in_flight(desk)
    with pytest.raises(sume_resume.InputError, match="r1"):
        desk.add({"id": "r1", "prompt": "clip 1.", "duration": 8})
    desk.run()
    assert desk.job().duration_s == 4
    assert len(desk.server.charges) == 2


def test_a_lost_ledger_with_a_namespace_makes_the_same_keys(desk: Desk) -> None:
    """B18: Sume returns the jobs that it has, and the history says that it knew them."""
    desk.add(*clips(3), namespace="build-42")
    desk.run(limit=2)
    desk.begin_anew("again")
    desk.add(*clips(3), namespace="build-42")
    desk.run()
    assert len(desk.server.charges) == 3
    assert statuses(desk.jobs().values()) == ["completed"] * 3


def test_two_ledgers_have_two_namespaces(desk: Desk) -> None:
    """B07: the same row id in two ledgers is two rows."""
    desk.add({"id": "hook", "prompt": "one"}, namespace=None)
    first = desk.job("hook").key
    desk.begin_anew("other")
    desk.add({"id": "hook", "prompt": "one"}, namespace=None)
    assert desk.job("hook").key != first


@FILE_ONLY
def test_an_old_copy_restored(desk: Desk) -> None:
    desk.add(*clips(3))
    shutil.copy(desk.path, desk.path.with_name("copy"))
    desk.run()
    shutil.copy(desk.path.with_name("copy"), desk.path)
    desk.run()
    assert len(desk.server.charges) == 3
    assert statuses(desk.jobs().values()) == ["completed"] * 3


# -- races that kills cannot steer --


def test_a_signal_between_commit_and_hand_out_gives_the_claim_back(desk: Desk) -> None:
    desk.add(*clips(2))

    class Signalled(Ledger):
        engine: Any = None

        def _commit(self) -> None:
            super()._commit()
            if self.engine is not None and self.with_status(Status.SENDING):
                self.engine.stop(15)

    def during(engine: Engine, event: Event) -> None:
        if isinstance(event, Started):
            engine._ledger.engine = engine  # type: ignore[attr-defined]

    desk.run(make_ledger=Signalled, during=during)
    assert desk.server.posts == []
    assert statuses(desk.jobs().values()) == ["queued", "queued"]
    assert desk.history() == ["added", "prepared", "unclaimed"]


def test_a_late_id_is_kept_by_a_row_that_ended(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.server.on_submit = Reply(400, err("bad_request"))
    desk.run()
    with open_ledger(desk.place) as ledger:
        job = ledger.record_late_id(desk.job(), "job_late", START_MS)
        assert (job.status, job.job_id) == ("rejected", "job_late")
        assert ledger.record_late_id(job, "job_late", START_MS) == job
        kept = ledger.record_late_id(job, "job_other", START_MS)
        assert kept.job_id == "job_late"
        assert "job_other" in str(ledger.history(job)[-1])


def test_a_row_changed_by_another_command_is_let_be(desk: Desk) -> None:
    """The answer to a read finds its row cancelled: nothing is written over that."""
    desk.add(*clips(1))
    done: list[Any] = []

    def before(call: Call) -> None:
        if call.errand is Errand.READ and not done:
            with open_ledger(desk.place) as other:
                job = other.job(call.job.id)
                reading = sume_resume.reading_of(Reply_("cancelled"), "")
                done.append(other.record_final(job, Status.CANCELLED, reading, None, START_MS))

    desk.run(before=before)
    assert desk.job().status == "cancelled"


def Reply_(word: str) -> sume_resume.Reply:
    return sume_resume.Reply(200, {}, {"status": word})


# -- a ledger that cannot be written --


@FILE_ONLY
def test_disk_full_at_the_key_sends_nothing(desk: Desk) -> None:
    """P8, B14: no POST without its commit; with space again, one charge each."""
    desk.add(*clips(5))

    class Full(Ledger):
        def record_prepared(self, *args: Any) -> Any:
            if len(desk.server.posts) >= 2:
                pages = self._one("PRAGMA page_count")[0]
                self._execute(f"PRAGMA max_page_count = {pages}")
                self._execute("INSERT INTO meta VALUES ('fill', hex(zeroblob(9000)))")
            return super().record_prepared(*args)

    with pytest.raises(LedgerError, match="disk is full"):
        desk.run(make_ledger=Full, concurrency=1)
    assert len(desk.server.posts) == 2
    desk.run()
    assert len(desk.server.charges) == 5


def test_disk_full_at_the_id_names_the_job_once(desk: Desk) -> None:
    desk.add(*clips(2))

    class Full(Ledger):
        def record_accepted(self, *args: Any, **more: Any) -> Any:
            raise LedgerError(f"{self.place}: the disk is full")

    with pytest.raises(LedgerError) as caught:
        desk.run(make_ledger=Full, concurrency=1)
    assert str(caught.value).count(desk.server.charges[0].id) == 1
    assert len(desk.server.posts) == 1
    desk.run()
    assert len(desk.server.charges) == 2


def lock(path: Path) -> sqlite3.Connection:
    """Be another process that has the ledger's write lock."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    return other


@FILE_ONLY
def test_a_locked_ledger_is_waited_for_with_an_answer_in_hand(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id is never dropped: the run waits longer than any limit, and then records it."""
    monkeypatch.setattr(sume_resume, "BUSY_TIMEOUT_MS", 1)
    desk.add(*clips(1))
    others: list[sqlite3.Connection] = []

    def before(call: Call) -> None:
        if not others:
            others.append(lock(desk.path))

    def during(engine: Engine, event: Event) -> None:
        if sum("another process" in notice for notice in desk.notices) == 40:
            others[0].close()

    desk.run(before=before, during=during)
    assert len(desk.notices) >= 40
    assert desk.history() == ["added", "prepared", "accepted", "final"]
    assert len(desk.server.posts) == 1


@FILE_ONLY
def test_an_answer_that_comes_while_the_ledger_is_locked_is_kept(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locked in a turn without answers, and stopped there: the id on its way is still stored."""
    monkeypatch.setattr(sume_resume, "BUSY_TIMEOUT_MS", 1)
    desk.add(*clips(1))
    others: list[sqlite3.Connection] = []

    def during(engine: Engine, event: Event) -> None:
        if desk.server.posts and not others:
            others.append(lock(desk.path))
            engine.stop(15)
        if len(desk.notices) == 30:
            others[0].close()

    ending = desk.run(latency_s=0.5, during=during)
    assert ending.signal == 15
    assert len(desk.notices) >= 30
    assert desk.job().job_id == desk.server.charges[0].id


def test_ids_that_arrive_after_a_disk_ran_full_are_named(desk: Desk) -> None:
    """Nothing can be recorded any more: every id that still comes home is printed once."""
    desk.add(*clips(3))

    class Full(Ledger):
        def record_accepted(self, *args: Any, **more: Any) -> Any:
            raise LedgerError(f"{self.place}: the disk is full")

    # The first answer comes soon, the other two while the run is ending.
    def before(call: Call) -> None:
        assert desk.carrier is not None
        desk.carrier.latency_s = 2.0 if desk.server.posts else 0.1

    with pytest.raises(LedgerError) as caught:
        desk.run(make_ledger=Full, before=before)
    assert len(desk.server.charges) == 3
    assert all(str(caught.value).count(job.id) == 1 for job in desk.server.charges)


@FILE_ONLY
@pytest.mark.parametrize("signalled", [False, True])
def test_a_locked_ledger_without_an_answer_ends_the_run(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, signalled: bool
) -> None:
    """After a minute of waiting by itself, or at once when somebody presses Ctrl-C."""
    monkeypatch.setattr(sume_resume, "BUSY_TIMEOUT_MS", 1)
    desk.add(*clips(1))
    others: list[sqlite3.Connection] = []

    def during(engine: Engine, event: Event) -> None:
        if isinstance(event, Started):
            others.append(lock(desk.path))
        elif signalled:
            engine.stop(15)

    if signalled:
        assert desk.run(during=during).signal == 15
    else:
        with pytest.raises(LedgerBusy):
            desk.run(during=during)
    others[0].close()
    assert len(desk.notices) == (1 if signalled else sume_resume.BUSY_TRIES - 1)
    assert desk.server.posts == []


@FILE_ONLY
def test_a_long_wait_for_the_ledger_is_no_overrun(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is timed from its start, so a refusal after a slow commit is still a refusal."""
    monkeypatch.setattr(sume_resume, "BUSY_TIMEOUT_MS", 1)
    desk.add(*clips(1))
    desk.server.on_submit = Reply(400, err("bad_request"))
    others: list[sqlite3.Connection] = []

    def during(engine: Engine, event: Event) -> None:
        if isinstance(event, Started):
            others.append(lock(desk.path))
        elif len(desk.notices) == 5:
            desk.clock.advance(300)
            others[0].close()

    desk.run(during=during)
    assert desk.job().status == "rejected"


# -- waits that must end, and waits that must be there --


def test_a_replay_beside_open_jobs_is_no_hot_loop(desk: Desk) -> None:
    """The queue is full with our own job while another row's answer is still unknown."""
    desk.add(*clips(2))
    desk.server.reads_to_finish = 10**6
    desk.server.submits.extend([lambda server, request: None, drop_after])
    desk.server.on_submit = Reply(429, err("queue_full"))
    desk.run(concurrency=2, deadline_s=120.0, writes_per_minute=120.0)
    assert desk.job("r2").status == "sending"
    assert len(desk.server.posts) <= 15


def test_a_job_past_its_deadline_is_read_on_while_others_wait(desk: Desk) -> None:
    """Its place in the queue is what the next row waits for."""
    queue = Queue(desk, places=2, takes_s=600.0)
    desk.add(*clips(3))
    ending = desk.run(job_deadline_s=60.0, deadline_s=6 * HOUR, poll_interval_s=5.0)
    assert not ending.deadline
    assert statuses(desk.jobs().values())[:2] == ["completed"] * 2
    assert len(desk.server.charges) == 3
    # One try a minute, while the first two render for ten.
    assert queue.full <= 11


def test_a_clock_correction_harms_no_later_row(desk: Desk) -> None:
    """Rows first sent after the clock was set back have ages that can be told."""
    desk.add(*clips(4))
    turned: list[bool] = []

    def submit(server: FakeSume, request: Request) -> Reply | None:
        first = sum(post.key == request.key for post in server.posts) == 1
        return Reply(502, b"<html>") if first and turned else None

    def during(engine: Engine, event: Event) -> None:
        if len(desk.server.charges) == 1 and not turned:
            turned.append(True)
            desk.clock.set_back(600)

    desk.server.on_submit = submit
    desk.run(during=during, writes_per_minute=30.0)
    assert statuses(desk.jobs().values()) == ["completed"] * 4


def test_a_wrong_path_does_not_use_up_a_ledger(desk: Desk) -> None:
    """Three rows not found, and never one accepted: it is the base URL."""
    desk.add(*clips(10))
    desk.server.on_submit = Reply(404, err("not_found"))
    ending = desk.run(writes_per_minute=120.0)
    assert "SUME_API_BASE_URL" in (ending.halt or "")
    assert statuses(desk.jobs().values()).count("rejected") == 3
    assert statuses(desk.jobs().values()).count("queued") == 7


def test_unknown_models_after_an_accept_are_the_rows_fault(desk: Desk) -> None:
    desk.add(*clips(6))
    desk.server.submits.append(lambda server, request: None)
    desk.server.on_submit = Reply(404, err("not_found", "unknown model"))
    ending = desk.run(writes_per_minute=120.0)
    assert ending.halt is None
    assert statuses(desk.jobs().values()) == ["completed"] + ["rejected"] * 5


def test_a_changed_cost_leaves_its_history(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.server.on_read = Reply(200, {"status": "processing", "usage": {"cost": 0.3}})
    desk.run(deadline_s=30.0)
    desk.server.on_read = None
    desk.run()
    with open_ledger(desk.place) as ledger:
        last = ledger.history(desk.job())[-1]
    assert "cost was $0.300000, is $0.100000" in (last.detail or "")


# -- workers --


class Slow:
    """A client whose reads take until they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.read_ids: list[str] = []

    def read(self, kind: str, job_id: str) -> sume_resume.Reply:
        self.read_ids.append(job_id)
        if job_id.startswith("slow"):
            self.go.wait(30)
        return Reply_("completed")

    def close(self) -> None:
        pass


def test_an_abandoned_worker_is_replaced_and_ends(desk: Desk) -> None:
    """Its place is free at once, and no call ever waits behind a stuck one."""
    desk.add(*clips(1))
    job = desk.job()._replace(job_id="slow_1")
    slow = Slow()
    workers = sume_resume.Workers(lambda: slow, sume_resume.Clock(), 2)  # type: ignore[arg-type,return-value]

    def call(job_id: str) -> Call:
        named = job._replace(job_id=job_id)
        return Call(errand=Errand.READ, job=named, sent_s=0.0, before=named)

    first, second = call("slow_1"), call("slow_2")
    workers.start(first)
    workers.start(second)
    assert workers.free() == 0
    workers.abandon(first)
    workers.abandon(second)
    assert workers.free() == 2
    workers.start(call("quick_3"))
    answers = workers.wait(20)
    assert [answer.call.job.job_id for answer in answers] == ["quick_3"]
    slow.go.set()
    late = [*workers.wait(20), *workers.wait(20)]
    assert {answer.call.job.job_id for answer in late} == {"slow_1", "slow_2"}
    workers.close()
    assert sorted(slow.read_ids) == ["quick_3", "slow_1", "slow_2"]


def test_a_client_that_cannot_be_made_sends_nothing(desk: Desk) -> None:
    desk.add(*clips(1))

    def broken() -> Any:
        raise OSError("too many open files")

    workers = sume_resume.Workers(broken, sume_resume.Clock(), 1)
    job = desk.job()
    workers.start(Call(errand=Errand.SUBMIT, job=job, sent_s=0.0, before=job))
    (answer,) = workers.wait(20)
    workers.close()
    assert isinstance(answer.meaning, sume_resume.Outcome)
    assert answer.meaning.landing is sume_resume.Landing.NOT_LANDED
    assert answer.meaning.halt is sume_resume.Halt.EVERYTHING


# -- a server that mixes its answers up --


class TwiceServer:
    """Answers each request twice on one connection, as a broken proxy does."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.posts = 0
        threading.Thread(target=self.accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self.socket.accept()
                threading.Thread(target=self.serve, args=(peer,), daemon=True).start()

    def serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer, peer.makefile("rb") as lines:
            while line := lines.readline():
                length = 0
                while (header := lines.readline().strip()) != b"":
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                lines.read(length)
                peer.sendall(self.answer(line))

    def answer(self, line: bytes) -> bytes:
        method, path, _ = line.decode().split()
        if method == "POST":
            self.posts += 1
            return packed({"id": f"job_{self.posts}"}) + packed({"id": f"ghost_{self.posts}"})
        done = {"id": path.split("/")[3], "status": "completed", "usage": {"cost": 1}}
        return packed(done | {"url": f"u-{path}"}) * 2


def packed(data: dict[str, Any]) -> bytes:
    body = json.dumps(data).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def test_a_second_answer_on_a_connection_is_nobodys(desk: Desk) -> None:
    """P2, P3: it is not taken for the answer to the next row, of submits nor of reads."""
    desk.add(*clips(4))
    twice = TwiceServer()
    desk.server = twice  # type: ignore[assignment]
    desk.run(concurrency=1)
    twice.socket.close()
    jobs = desk.jobs().values()
    assert [job.job_id for job in jobs] == ["job_1", "job_2", "job_3", "job_4"]
    assert statuses(jobs) == ["completed"] * 4
    with open_ledger(desk.place) as ledger:
        urls = [ledger.outputs(job)[0].url for job in jobs]
    assert urls == [f"u-/v1/videos/job_{n}" for n in range(1, 5)]


def test_a_read_that_names_another_job_ends_no_row(desk: Desk) -> None:
    desk.add(*clips(2))
    other = {"id": "job_other", "status": "completed", "usage": {"cost": 9}, "url": "u"}
    desk.server.reads.extend([Reply(200, other)] * 3)
    desk.run()
    jobs = desk.jobs().values()
    assert {job.cost_micros for job in jobs} == {100_000}
    assert sum(job.poll_errors for job in jobs) == 3


@pytest.mark.parametrize("code", [302, 400, 401, 403, 404, 405, 410])
def test_a_result_route_that_refuses_stops_nothing(desk: Desk, code: int) -> None:
    desk.add({"id": "i", "prompt": "clip 1.", "kind": "image"}, *clips(3))
    desk.server.results.extend([Reply(code, b"", {"Location": "https://x.invalid"})])
    ending = desk.run()
    assert ending.halt is None
    assert statuses(desk.jobs().values()) == ["completed"] * 4


def test_a_deep_answer_with_an_id_is_accepted(desk: Desk) -> None:
    desk.add(*clips(1))
    deep = b"[" * 300 + b"]" * 300
    desk.server.submits.append(
        lambda server, r: Reply(202, b'{"id":"%s","x":%s}' % (server.make_job(r).id.encode(), deep))
    )
    desk.run()
    assert desk.job().status == "completed"
    assert len(desk.server.posts) == 1


def test_an_answer_packed_twice_is_not_unpacked(desk: Desk) -> None:
    desk.add(*clips(1))
    bomb = gzip.compress(gzip.compress(bytes(10**7)))
    headers = {"Content-Encoding": "gzip, gzip"}
    desk.server.submits.append(accept_and_say(202, bomb, headers=headers))
    desk.run()
    assert desk.server.posts[0].headers["accept-encoding"] == "identity"
    assert desk.job().status == "completed"
    assert len(desk.server.charges) == 1


def test_the_stand_in_takes_no_ledger_that_was_sent_from(desk: Desk) -> None:
    """A row that may have been paid for is no toy."""
    kill_in_flight(desk)
    account = sume_resume.Account("http://127.0.0.1:9/v1", sume_resume.STAND_IN, "k")
    with open_ledger(desk.place) as ledger, pytest.raises(AccountError):
        sume_resume.admit(ledger, account, True, START_MS)
    assert desk.job().status == "sending"


@FILE_ONLY
def test_a_late_answer_hides_no_row_that_waits_to_be_replayed(desk: Desk) -> None:
    """Two calls for one row, after the first was given up: counts do not say who waits."""
    desk.add(*clips(2))
    with sume_resume.open_ledger(desk.place) as ledger:
        first, second = [ledger.record_prepared(job, START_MS) for job in ledger.latest()]
        client = sume_resume.Sume(desk.account, desk.clock, False)
        carrier = Inline(client, desk.clock)
        engine = sume_resume.Engine(ledger, carrier, desk.clock, sume_resume.Settings())
        engine._begin()
        call = sume_resume.Call(errand=sume_resume.Errand.SUBMIT, job=first, sent_s=0, before=first)
        call.sent_s = float("-inf")
        engine._flying = {first.id: call}
        with ledger.transaction():
            engine._overruns(desk.clock.awake_s())
            # The row is sent again, and then the first call is answered after all.
            again = sume_resume.Call(
                errand=sume_resume.Errand.SUBMIT, job=first, sent_s=0, before=first
            )
            engine._flying = {first.id: again}
            engine._record_late(call, "job_1", START_MS)
            waiting = list(engine._replays(desk.clock.awake_s(), START_MS))
        client.close()
    assert [job.row for job in waiting] == [second.row]
