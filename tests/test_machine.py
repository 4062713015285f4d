"""Random lives of a ledger: kills, lost answers, edits, restored copies, jumping clocks.

A state machine adds rows, runs with a script of faults, kills at a random fact, restores an
old copy and moves the clock, and checks the promises P1-P4 and P6 after every step.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import child
import pytest
from conftest import Desk, FakeClock, clips
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from servers import Act, FakeSume, Reply, Request, drop_after, drop_before
from servers import error as err

import sume_resume
from sume_resume import FINAL, Exit, InputError, Job, Ledger, Status, open_ledger

# A hundred lives take 20 s on two idle cores, and much longer on busy ones.
pytestmark = pytest.mark.timeout(600)


class Killed(BaseException):
    """Stands for a SIGKILL: nothing above it may tidy up, and SQLite rolls back."""


def killer(nth: int) -> type[Ledger]:
    """Return a ledger whose nth recorded fact or commit never happens, or just happened."""
    left = [nth]

    def mined(name: str) -> Any:
        original = getattr(Ledger, name)

        def method(self: Ledger, *args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            result = original(self, *args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return result

        return method

    return type("Mined", (Ledger,), {name: mined(name) for name in child.recording_methods()})


def hold(server: FakeSume, request: Request) -> Reply:
    """Make the job, and answer with a page from a proxy."""
    server.make_job(request)
    return Reply(504, b"<html>")


ACTS: dict[str, Act] = {
    "well": lambda server, request: None,
    "lost before": drop_before,
    "lost after": drop_after,
    "page after": hold,
    "429": Reply(429, err("rate_limit_exceeded"), {"Retry-After": "3"}),
    "queue": Reply(429, err("queue_full")),
    "500": Reply(500, err("internal_error")),
    "503": Reply(503, b""),
    "400": Reply(400, err("bad_request")),
    "401": Reply(401, err("unauthorized")),
    "402": Reply(402, err("insufficient_credits")),
}
READS: dict[str, Act] = {
    "well": lambda server, request: None,
    "502": Reply(502, b"<html>"),
    "429": Reply(429, err("rate_limit_exceeded")),
    "busy": Reply(200, {"status": "in_progress"}),
    "lost": drop_before,
}
FORGETS_MS = 24 * 3600 * 1000


class Life(RuleBasedStateMachine):
    @initialize(honest=st.booleans())
    def begin(self, honest: bool) -> None:
        # In an honest life nobody restores a copy or sets the clock back, and the server
        # forgets keys after a day; in the others it never does, since a ledger that was
        # rolled back is safe only as far as Sume remembers.
        self.honest = honest
        self.folder = Path(tempfile.mkdtemp())
        self.server = FakeSume().__enter__()
        self.clock = FakeClock()
        self.desk = Desk(str(self.folder / "jobs.db"), self.folder, self.server, self.clock)
        self.server.watch = self.forget_old_keys
        self.server.now = self.clock.elapsed_ms
        self.rows: dict[str, dict[str, Any]] = {}
        self.finals: dict[str, Job] = {}
        self.restored = False
        self.desk.add(*clips(1))
        self.rows["r1"] = clips(1)[0]

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.server.__exit__()
            shutil.rmtree(self.folder)

    def forget_old_keys(self, request: Request) -> None:
        """The server keeps a key for 24 h of true time (policy F), and then knows it no more."""
        job = self.server.by_key.get(request.key)
        if job and self.honest and self.clock.elapsed - job.made_at >= FORGETS_MS:
            del self.server.by_key[request.key]

    @rule(count=st.integers(1, 4))
    def add(self, count: int) -> None:
        have = len(self.rows)
        new = clips(have + count)[have:]
        self.desk.add(*new)
        self.rows |= {row["id"]: row for row in new}

    @rule(data=st.data())
    def edit(self, data: st.DataObject) -> None:
        """An edited row is refused, and changes nothing."""
        row = data.draw(st.sampled_from(sorted(self.rows)))
        with open_ledger(self.desk.place) as ledger:
            there = ledger.job_of_row(row)
        if there is None:
            return
        with pytest.raises(InputError):
            self.desk.add(self.rows[row] | {"prompt": "something else."})
        assert self.desk.job(row) == there

    @rule(
        submits=st.lists(st.sampled_from(sorted(ACTS)), max_size=8),
        reads=st.lists(st.sampled_from(sorted(READS)), max_size=6),
        kill=st.one_of(st.none(), st.integers(1, 25), st.integers(1, 200)),
        latency_s=st.sampled_from([0.0, 0.5, 70.0]),
        deadline_s=st.sampled_from([5.0, 300.0, 3000.0]),
    )
    def run_the_command(
        self,
        submits: list[str],
        reads: list[str],
        kill: int | None,
        latency_s: float,
        deadline_s: float,
    ) -> None:
        self.server.submits.extend(ACTS[name] for name in submits)
        self.server.reads.extend(READS[name] for name in reads)
        ledger = killer(kill) if kill else Ledger
        try:
            ending = self.desk.run(
                make_ledger=ledger,
                latency_s=latency_s,
                deadline_s=deadline_s,
                writes_per_minute=120.0,
                reads_per_minute=600.0,
            )
        except Killed:
            return
        with open_ledger(self.desk.place) as ledger_:
            voice = sume_resume.Voice(False)
            code, _ = sume_resume._summarize(ledger_, ending, None, None, None, voice)
            left = {job.status for job in ledger_.latest()}
        # P6: 0 says that every row is completed, 1 that all are final, and nothing else does.
        assert (code is Exit.DONE) == (left == {Status.COMPLETED} and ending.halt is None)
        if code is Exit.NOT_ALL_COMPLETED:
            assert left <= FINAL
        if left - FINAL - {Status.REVIEW}:
            assert code not in (Exit.DONE, Exit.NOT_ALL_COMPLETED)

    @rule(name=st.sampled_from(["copy", "other"]))
    def keep_a_copy(self, name: str) -> None:
        shutil.copy(self.desk.path, self.folder / name)

    @precondition(lambda self: not self.honest and (self.folder / "copy").exists())
    @rule()
    def restore_the_copy(self) -> None:
        shutil.copy(self.folder / "copy", self.desk.path)
        self.restored = True
        self.finals.clear()
        # Rows that the copy does not know are added again from the same file.
        self.desk.add(*self.rows.values())

    @rule(kill=st.integers(5, 20), lost=st.integers(1, 3))
    def crash_with_sends_in_the_air(self, kill: int, lost: int) -> None:
        """Some sends arrive and are not answered, and the process dies soon after."""
        self.run_the_command(["lost after"] * lost, [], kill, 0.0, 5.0)

    @rule(seconds=st.sampled_from([600.0, 25 * 3600.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([8 * 3600.0, 25 * 3600.0]))
    def sleep(self, seconds: float) -> None:
        self.clock.suspend(seconds)

    @precondition(lambda self: not self.honest)
    @rule(seconds=st.sampled_from([60.0, 3600.0, 365 * 86400.0]), back=st.booleans())
    def somebody_sets_the_clock(self, seconds: float, back: bool) -> None:
        self.clock.set_back(seconds if back else -seconds)

    @invariant()
    def one_charge_a_row(self) -> None:
        """P1, P2: no key is charged twice, and every charge can be named."""
        if not hasattr(self, "server"):
            return
        charges = Counter(job.body for job in self.server.charges)
        assert all(count == 1 for count in charges.values()), charges
        jobs = self.desk.jobs()
        charged = {job.key for job in self.server.charges}
        assert charged <= {job.key for job in jobs.values()}
        if not self.restored:
            unbilled = (Status.QUEUED, Status.REJECTED)
            assert not charged & {j.key for j in jobs.values() if j.status in unbilled}

    @invariant()
    def no_row_is_lost_or_mixed_up(self) -> None:
        """P3, P4: each row is there, with its own clip and its exact cost."""
        if not hasattr(self, "server"):
            return
        jobs = self.desk.jobs()
        assert set(jobs) == set(self.rows)
        for row, job in jobs.items():
            if job.job_id is not None:
                made = self.server.jobs[job.job_id]
                assert (made.body, made.key) == (job.body, job.key)
            assert job.cost_micros in (None, 100_000)
            assert job.prompt == self.rows[row]["prompt"]
            if job.status is Status.REVIEW:
                assert job.note
            before = self.finals.get(row)
            assert before is None or before.status is job.status
            if job.status in FINAL:
                self.finals[row] = job


Life.TestCase.settings = settings(
    max_examples=100, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLife = Life.TestCase
