"""Real kills: a child process dies by SIGKILL at every point, and the same command finishes.

The points are found, not listed: before and after each recording method, each commit and
each API call, at its first and at its second time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import child
import pytest
from conftest import Desk, jsonl, new_schema
from servers import FakeJob, FakeSume, Reply, Request, drop_after, finished
from servers import error as err

from sume_resume import Place, Status, open_ledger, place_of

# One row for each way that a submit or a read can go, so that every method is reached.
ROWS: list[dict[str, Any]] = [
    {"id": "lost", "prompt": "lost answer.", "duration": 4},
    {"id": "throttled", "prompt": "throttled.", "duration": 4},
    {"id": "broken", "prompt": "broken.", "duration": 4},
    {"id": "refused", "prompt": "refused.", "duration": 4},
    {"id": "conflict", "prompt": "conflict.", "duration": 4},
    {"id": "picture", "prompt": "picture.", "kind": "image"},
    {"id": "unread", "prompt": "unread.", "duration": 4},
    {"id": "plain", "prompt": "plain.", "duration": 4},
    {"id": "throttled2", "prompt": "throttled 2.", "duration": 4},
    {"id": "refused2", "prompt": "refused 2.", "duration": 4},
    {"id": "conflict2", "prompt": "conflict 2.", "duration": 4},
    {"id": "picture2", "prompt": "picture 2.", "kind": "image"},
]
# Waits of a real run, cut short: the order of things is what is tested here.
QUICK = {
    "BACKOFF_BASE_S": 0.02,
    "BACKOFF_FLOOR_S": 0.001,
    "COST_REREAD_S": (0.01, 0.01, 0.01),
    "TICK_S": 0.05,
}
# On Postgres a killed process's rows are free after its lease.
LEASES = {"LEASE_S": 1.2, "POST_DEADLINE_S": 0.6}
# Reached by a race that a scenario cannot steer; test_engine has a test for each.
RACES = {"record_unclaimed", "record_late_id"}
# Claims, which a file does not need.
CLAIMS = {"record_claimed", "record_renewed", "record_handed_back", "record_left"}
# Facts of caps and audits; test_money kills at them.
MONEY = {"record_estimates", "record_cost"}
# Facts of a move; test_workers kills at them.
MOVES = {"record_moving", "record_moved", "record_move_undone", "record_copy_of"}
# Facts of downloads; test_download kills at them.
FILES = {
    "record_named", "record_part", "record_downloaded", "record_lost", "record_undownloaded",
}  # fmt: skip
# Facts that a person's command records, not a run: below each has its command.
DECIDED = {
    "record_replaced": ("add", "b.jsonl", "--replace"),
    "record_retried": ("retry", "plain", "--yes"),
    "record_resent": ("resolve", "conflict", "--resend", "--yes"),
    "record_dropped": ("cancel", "refused", "--yes"),
    "record_found": ("resolve", "conflict", "--job-id", "job_found", "--yes"),
    "record_cancel_asked": ("cancel", "unread", "--yes"),
}
POINTS = [
    f"{name}:{when}:{nth}"
    for name in [*child.recording_methods(), *child.API_CALLS]
    for when in ("before", "after")
    for nth in (1, 2)
    if name not in {*RACES, *CLAIMS, *MOVES, *DECIDED, *MONEY, *FILES}
]
# These happen once in the life of a ledger, or once a run.
ONCE = {"record_namespace", "record_account", "record_added"}


class Scenario:
    """What the server does to each row; first time only, but for the refusals."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def submit(self, server: FakeSume, request: Request) -> Reply | None:
        text = request.body.decode()
        self.seen[text] += 1
        first = self.seen[text] == 1
        if "lost" in text and first:
            return drop_after(server, request)
        if "throttled" in text and first:
            return Reply(429, err("rate_limit_exceeded"))
        if "broken" in text and first:
            server.make_job(request)
            return Reply(500, err("internal_error"))
        if "refused" in text:
            return Reply(400, err("bad_request"))
        if "conflict" in text:
            return Reply(409, err("idempotency_key_reused"))
        return None

    def read(self, server: FakeSume, request: Request) -> Reply | None:
        self.seen[request.path] += 1
        job = server.jobs[request.path.split("/")[3]]
        unlucky = b"unread" in job.body or b"plain" in job.body
        return Reply(502, b"<html>") if unlucky and self.seen[request.path] == 1 else None


class Zygote:
    """A process with everything imported, that forks a child for each order."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        if hasattr(os, "fork"):
            self.process = subprocess.Popen(
                [sys.executable, child.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=_environment(),
            )

    def run(self, order: dict[str, Any]) -> int:
        text = json.dumps(order)
        if self.process is None:
            command = [sys.executable, child.__file__, text]
            return subprocess.run(command, env=_environment(), check=False).returncode
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait(10)


def _environment() -> dict[str, str]:
    root = str(Path(child.__file__).parents[1])
    return os.environ | {"PYTHONPATH": root}


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


class Bench:
    """A folder with the input, a server, and the command to run there."""

    def __init__(self, folder: Path, server: FakeSume, zygote: Zygote, db: str) -> None:
        self.folder, self.server, self.zygote = folder, server, zygote
        self.db = db
        (folder / "a.jsonl").write_bytes(jsonl(*ROWS))

    @property
    def place(self) -> Place:
        return place_of(self.db)

    def run(self, point: str | None = None) -> int:
        pace = ["--writes-per-minute", "0", "--reads-per-minute", "0"]
        return self.zygote.run(
            {
                "args": ["run", "a.jsonl", "--db", self.db, "--poll-interval", "0.02s", *pace],
                "env": {"SUME_API_KEY": "CANARY", "SUME_API_BASE_URL": self.server.url},
                "folder": str(self.folder),
                "log": str(self.folder / "log.txt"),
                "constants": QUICK if isinstance(self.place, Path) else QUICK | LEASES,
                "point": point,
            }
        )

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()


@pytest.fixture
def bench(tmp_path: Path, server: FakeSume, zygote: Zygote) -> Bench:
    return bench_at(str(tmp_path / "jobs.db"), tmp_path, server, zygote)


def bench_at(db: str, folder: Path, server: FakeSume, zygote: Zygote) -> Bench:
    scenario = Scenario()
    server.on_submit, server.on_read = scenario.submit, scenario.read
    server.reads_to_finish = 2
    return Bench(folder, server, zygote, db)


def check_promises(bench: Bench) -> None:
    """P1-P4 and P6 at the end of a scenario, whatever happened on the way."""
    charges = Counter(json.loads(job.body)["prompt"] for job in bench.server.charges)
    with open_ledger(bench.place) as ledger:
        ledger.quick_check()
        jobs = {job.row: job for job in ledger.latest()}
        totals = ledger.totals()
    assert list(jobs) == [row["id"] for row in ROWS]
    assert all(count == 1 for count in charges.values()), charges
    for row in ROWS:
        job, prompt = jobs[str(row["id"])], str(row["prompt"])
        if prompt.startswith("conflict"):
            assert job.status is Status.REVIEW
        elif prompt.startswith("refused"):
            # A kill after its send leaves a send that may have arrived.
            assert job.status in (Status.REJECTED, Status.REVIEW)
            assert charges[prompt] == 0
        else:
            assert job.status is Status.COMPLETED
            assert charges[prompt] == 1
            made = bench.server.jobs[job.job_id or ""]
            assert (made.body, made.key) == (job.body, job.key)
            assert job.cost_micros == 100_000
    assert totals.cost_micros == 100_000 * sum(charges.values())
    assert not list(bench.folder.glob(".jobs.db*"))


@pytest.mark.parametrize("point", POINTS)
def test_kill_and_run_again(bench: Bench, point: str) -> None:
    name, _, nth = point.split(":")
    code = bench.run(point)
    if code == 4 and nth == "2" and name in ONCE:
        check_promises(bench)
        return
    assert code in (-9, 137), f"{point} was not reached:\n{bench.log}"
    assert bench.run() == 4, bench.log
    check_promises(bench)


POSTGRES_POINTS = [
    *(point for point in POINTS if point.endswith(":1")),
    *(
        f"{name}:{when}:1"
        for name in ("record_claimed", "record_left")
        for when in ("before", "after")
    ),
]


@pytest.mark.parametrize("point", POSTGRES_POINTS)
def test_kill_on_postgres_and_run_again(
    postgres_url: str, tmp_path: Path, server: FakeSume, zygote: Zygote, point: str
) -> None:
    """The same rows, points and promises; what was held is free after its lease."""
    bench = bench_at(new_schema(postgres_url), tmp_path, server, zygote)
    assert bench.run(point) in (-9, 137), f"{point} was not reached:\n{bench.log}"
    assert bench.run() == 4, bench.log
    check_promises(bench)
    with open_ledger(bench.place) as ledger:
        assert all(job.worker is None for job in ledger.latest())


def test_kills_in_a_row(bench: Bench) -> None:
    """Each restart dies a little later than the one before; then one runs through."""
    for nth in range(1, 12):
        bench.run(f"_commit:after:{nth + 2}")
    assert bench.run() == 4, bench.log
    check_promises(bench)


def test_without_kills(bench: Bench) -> None:
    assert bench.run() == 4, bench.log
    check_promises(bench)
    posts = len(bench.server.posts)
    assert bench.run() == 4
    assert len(bench.server.posts) == posts


# -- what a person decides --


def prepare(desk: Desk, method: str) -> None:
    """Bring rows to where the command of this method has something to do."""
    desk.server.submits.append(Reply(409, err("strange")))
    desk.add(*({"id": id, "prompt": f"{id}."} for id in ("conflict", "plain", "unread", "refused")))
    desk.server.reads_to_finish = 10**6 if method == "record_cancel_asked" else 1
    desk.server.final = lambda job: {"id": job.id, "status": "failed", "usage": {"cost": 0.1}}
    desk.run(deadline_s=60, limit=3, concurrency=2)
    desk.server.final, desk.server.reads_to_finish = finished, 1
    desk.server.jobs["job_found"] = FakeJob("job_found", "by hand", b"{}")
    (desk.folder / "b.jsonl").write_bytes(jsonl({"id": "refused", "prompt": "other."}))


@pytest.mark.parametrize("when", ["before", "after", "commit"])
@pytest.mark.parametrize(
    ("method", "row", "attempt", "status", "sends"),
    [
        ("record_replaced", "refused", 1, "completed", 1),
        ("record_retried", "plain", 2, "completed", 2),
        ("record_resent", "conflict", 2, "completed", 2),
        ("record_dropped", "refused", 1, "cancelled", 0),
        ("record_found", "conflict", 1, "completed", 1),
        ("record_cancel_asked", "unread", 1, "cancelled", 1),
    ],
)
def test_kill_in_a_decision_leaves_it_undone_or_done(
    desk: Desk,
    zygote: Zygote,
    method: str,
    when: str,
    row: str,
    attempt: int,
    status: str,
    sends: int,
) -> None:
    """Killed around the fact and after its commit; then the same command again, and a run."""
    prepare(desk, method)
    order = {
        "args": [*DECIDED[method]],
        "env": {"SUME_API_KEY": desk.key, "SUME_API_BASE_URL": desk.server.url},
        "folder": str(desk.folder),
        "log": str(desk.folder / "log.txt"),
    }
    posts = len(desk.server.posts)
    point = "_commit:after:1" if when == "commit" else f"{method}:{when}:1"
    assert zygote.run(order | {"point": point}) in (-9, 137)
    with open_ledger(desk.place) as ledger:
        ledger.quick_check()
        assert all(job.latest for job in ledger.latest())
    code = zygote.run(order)
    # A row that was settled before the kill needs it no more; the rest can be said again.
    own_commit = method in ("record_found", "record_cancel_asked")
    committed = when == "commit" or (when == "after" and own_commit)
    said_twice = committed and method not in ("record_replaced", "record_cancel_asked")
    assert code == (2 if said_twice else 0), (desk.folder / "log.txt").read_text()
    desk.run()
    with open_ledger(desk.place) as ledger:
        job = ledger.find(row)
    assert (job.attempt, str(job.status)) == (attempt, status)
    assert job.prompt == ("other." if method == "record_replaced" else f"{row}.")
    keys = [post.key for post in desk.server.posts]
    assert len(keys) == len(set(keys))
    assert len(keys) - posts == sends
