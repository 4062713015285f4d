"""What the scheduler decides beside single answers: scope, limits, guard, age, pacing, races."""

from __future__ import annotations

import shutil
from collections import deque
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from conftest import KEY, START_MS, Desk, clips, statuses
from servers import FakeSume, Reply, Request, drop_after, drop_before
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
        with pytest.raises(AccountError, match="its jobs are at"):
            desk.run(adopt=True)
        assert other.requests == []


def test_the_ledger_keeps_no_key(desk: Desk) -> None:
    desk.add(*clips(2))
    desk.run()
    assert KEY.encode() not in desk.path.read_bytes()


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


def test_a_clock_set_back_while_sending_holds_the_replay(desk: Desk) -> None:
    kill_in_flight(desk)
    desk.clock.advance(2 * HOUR)

    def before(call: Call) -> None:
        if call.errand is Errand.SUBMIT:
            desk.clock.set_back(HOUR)

    desk.run(scope={"r1"}, before=before)
    assert len(desk.server.posts) == 1
    assert desk.job().status == "review"


def test_a_clock_set_back_in_a_long_run_sends_unknown_rows_to_review(desk: Desk) -> None:
    """It fell by an hour while the first send's outcome was unknown: its age says nothing."""
    desk.add(*clips(1))
    desk.clock.advance(10)
    desk.server.on_submit = drop_before
    turned: list[bool] = []

    def during(engine: Engine, event: Event) -> None:
        if len(desk.server.posts) == 1 and not turned and desk.clock.wall_ms() > START_MS:
            turned.append(True)
            desk.clock.wall += 7200_000
            desk.clock.most_ahead_ms()
            desk.clock.wall -= 7200_000

    desk.run(during=during, deadline_s=600.0)
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
    desk.path.unlink()
    desk.add(*clips(3), namespace="build-42")
    desk.run()
    assert len(desk.server.charges) == 3
    assert statuses(desk.jobs().values()) == ["completed"] * 3


def test_two_ledgers_have_two_namespaces(desk: Desk) -> None:
    """B07: the same row id in two ledgers is two rows."""
    desk.add({"id": "hook", "prompt": "one"}, namespace=None)
    first = desk.job("hook").key
    desk.path = desk.path.with_name("other.db")
    desk.add({"id": "hook", "prompt": "one"}, namespace=None)
    assert desk.job("hook").key != first


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
    with open_ledger(desk.path) as ledger:
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
            with open_ledger(desk.path) as other:
                job = other.job(call.job.id)
                reading = replace(sume_resume.reading_of(Reply_("cancelled")))
                done.append(other.record_final(job, Status.CANCELLED, reading, None, START_MS))

    desk.run(before=before)
    assert desk.job().status == "cancelled"


def Reply_(word: str) -> sume_resume.Reply:
    return sume_resume.Reply(200, {}, {"status": word})


# -- a ledger that cannot be written --


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
            raise LedgerError(f"{self.path}: the disk is full")

    with pytest.raises(LedgerError) as caught:
        desk.run(make_ledger=Full, concurrency=1)
    assert str(caught.value).count(desk.server.charges[0].id) == 1
    assert len(desk.server.posts) == 1
    desk.run()
    assert len(desk.server.charges) == 2


def test_a_locked_ledger_is_waited_for_with_an_answer_in_hand(desk: Desk) -> None:
    """An id is never dropped: the run waits longer than any limit, and then records it."""
    desk.add(*clips(1))

    class Locked(Ledger):
        left = 40

        def _execute(self, sql: str, **values: object) -> Any:
            if sql == sume_resume.SQL_BEGIN and desk.server.posts and Locked.left:
                Locked.left -= 1
                raise LedgerBusy("locked")
            return super()._execute(sql, **values)

    desk.run(make_ledger=Locked)
    assert desk.job().status == "completed"
    assert len(desk.server.posts) == 1


def test_a_locked_ledger_without_an_answer_ends_the_run(desk: Desk) -> None:
    desk.add(*clips(1))

    class Locked(Ledger):
        def _execute(self, sql: str, **values: object) -> Any:
            if sql == sume_resume.SQL_BEGIN and self.meta("origin"):
                raise LedgerBusy("locked")
            return super()._execute(sql, **values)

    with pytest.raises(LedgerBusy):
        desk.run(make_ledger=Locked)
    assert desk.server.posts == []
