"""Many workers on one ledger in Postgres: no charge twice, nothing lost, nothing stuck."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from conftest import CANARY, POSIX, SCRIPT, START_MS, Desk, Shop, clips, new_schema, until
from servers import FakeJob, FakeSume, File, Media, Request, drop_after, finished
from test_download import mp4
from test_output import events_of

import sume_resume
from sume_resume import (
    Dsn,
    LedgerError,
    LedgerLost,
    Postgres,
    RowChanged,
    Status,
    UsageError,
    for_postgres,
    open_ledger,
    place_of,
)

# Leases and deadlines of a real run, cut short: the order of things is what is tested here.
SHORT = {
    "LEASE_S": 2.0,
    "POST_DEADLINE_S": 0.8,
    "BACKOFF_BASE_S": 0.05,
    "BACKOFF_FLOOR_S": 0.01,
    "TICK_S": 0.1,
    "RECOUNT_S": 0.2,
    "COST_REREAD_S": (0.01,),
}


class Crew:
    """Workers in child processes, on one ledger."""

    def __init__(self, url: str, server: FakeSume, folder: Path) -> None:
        self.db = new_schema(url)
        self.server, self.folder = server, folder
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def place(self) -> Any:
        return place_of(self.db)

    def environment(self) -> dict[str, str]:
        keep = {n: v for n, v in os.environ.items() if not n.upper().startswith("SUME_")}
        more = {"SUME_API_KEY": CANARY, "SUME_API_BASE_URL": self.server.url}
        return keep | more | {"PYTHONPATH": str(SCRIPT.parent), "PYTHONIOENCODING": "utf-8"}

    def command(self, *args: str, db: str | None = None) -> list[str]:
        code = f"import sume_resume as s\nvars(s).update({SHORT!r})\ns.main()"
        return [sys.executable, "-c", code, *args, "--db", db or self.db]

    def call(self, *args: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.command(*args, **more), cwd=self.folder, env=self.environment(),
            capture_output=True, timeout=60, stdin=-3,
        )  # fmt: skip

    def add(self, *rows: dict[str, Any]) -> None:
        from conftest import jsonl

        (self.folder / "clips.jsonl").write_bytes(jsonl(*rows))
        done = self.call("add", "clips.jsonl")
        assert done.returncode == 0, done.stderr

    def hire(self, *args: str, db: str | None = None) -> subprocess.Popen[bytes]:
        pace = () if "--writes-per-minute" in args else ("--writes-per-minute", "0")
        command = self.command(
            "run", "--poll-interval", "0.05s", "--reads-per-minute", "0", *pace, *args, db=db
        )
        log = open(self.folder / f"log-{len(self.processes)}", "wb")  # noqa: SIM115
        with log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment(), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def logs(self) -> str:
        paths = sorted(self.folder.glob("log-*"))
        return "\n".join(path.read_text("utf-8", "replace")[-1500:] for path in paths)

    def statuses(self) -> Counter[str]:
        with open_ledger(self.place) as ledger:
            return Counter(str(job.status) for job in ledger.latest())

    def check(self, count: int) -> None:
        """Each row has one charge and its own job; none is held any more."""
        with open_ledger(self.place) as ledger:
            jobs = list(ledger.latest())
            spent = ledger.totals().cost_micros
        assert Counter(job.status for job in jobs) == {Status.COMPLETED: count}, self.logs()
        assert len(self.server.charges) == count
        assert len({job.body for job in self.server.charges}) == count
        for job in jobs:
            assert self.server.jobs[job.job_id or ""].key == job.key
            assert (job.worker, job.lease_until) == (None, None)
        assert spent == 100_000 * count

    def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@pytest.fixture
def crew(postgres_url: str, server: FakeSume, tmp_path: Path) -> Iterator[Crew]:
    server.reads_to_finish = 2
    made = Crew(postgres_url, server, tmp_path)
    yield made
    made.stop()


# -- together --


def test_workers_share_the_rows_and_the_reads(crew: Crew) -> None:
    crew.add(*clips(60))
    workers = [crew.hire() for _ in range(4)]
    assert [worker.wait(60) for worker in workers] == [0] * 4, crew.logs()
    crew.check(60)
    # Each job is read twice to its end, and by one worker at a time.
    reads = Counter(request.path for request in crew.server.gets)
    assert set(reads.values()) == {2}, reads.most_common(3)
    assert len(crew.server.posts) == 60
    with open_ledger(crew.place) as ledger:
        claims = {job.token for job in ledger.latest()}
    assert min(claims) >= 2


@pytest.mark.timeout(180)
@POSIX
@pytest.mark.parametrize("seed", range(int(os.environ.get("SUME_RESUME_TEST_SEEDS", "1"))))
def test_workers_that_die_and_freeze_buy_nothing_twice(crew: Crew, seed: int) -> None:
    """SIGKILL, SIGSTOP past the lease, cut connections, and replies that a relay swallows."""
    rng = random.Random(seed)
    rows, crowd = 400, 8
    crew.add(*clips(rows))
    with Relay(crew.db) as relay, pooler(relay) as pooled:
        ways = [None, relay.db, pooled]
        start = time.monotonic()
        workers = [crew.hire(db=ways[n % 3]) for n in range(crowd)]
        frozen: dict[int, float] = {}
        while crew.statuses()["completed"] < rows:
            assert time.monotonic() - start < 120, crew.logs()
            time.sleep(0.15)
            calm = time.monotonic() - start > 30
            victim = rng.randrange(crowd)
            act = "none" if calm else rng.choice(["kill", "stop", "cut", "swallow", "none"])
            if act == "kill" and victim not in frozen:
                workers[victim].kill()
            elif act == "stop" and victim not in frozen and workers[victim].poll() is None:
                workers[victim].send_signal(signal.SIGSTOP)
                frozen[victim] = time.monotonic()
            elif act == "cut":
                cut_all_connections(crew.db)
            elif act == "swallow":
                relay.swallow()
            for n, since in list(frozen.items()):
                if time.monotonic() - since > 1.5 * SHORT["LEASE_S"] or calm:  # type: ignore[operator]
                    workers[n].send_signal(signal.SIGCONT)
                    del frozen[n]
            for n, worker in enumerate(workers):
                if worker.poll() is not None and n not in frozen:
                    workers[n] = crew.hire(db=ways[n % 3])
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.send_signal(signal.SIGCONT)
        codes = [worker.wait(60) for worker in workers]
        assert set(codes) <= {0, -9}, (codes, crew.logs())
    crew.check(rows)
    assert "Traceback" not in crew.logs()


def cut_all_connections(db: str) -> None:
    """End every other session of ours at the server, as a restart of it does."""
    place = place_of(db)
    assert isinstance(place, Dsn)
    with psycopg.connect(place.conninfo, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
            [f"sume-resume {place.schema}"],
        )


@contextlib.contextmanager
def pooler(relay: Relay) -> Iterator[str]:
    """A PgBouncer that pools transactions, where this machine has one; else the relay alone."""
    program = shutil.which("pgbouncer")
    if program is None:
        yield relay.db
        return
    place = place_of(relay.db)
    assert isinstance(place, Dsn)
    port = place.conninfo.partition("127.0.0.1:")[2].partition("/")[0]
    with socket.create_server(("127.0.0.1", 0)) as door:
        free = door.getsockname()[1]
    folder = Path(tempfile.mkdtemp())
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\npostgres = host=127.0.0.1 port={port} user=postgres\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {free}\nauth_type = any\nunix_socket_dir =\n"
        "pool_mode = transaction\ndefault_pool_size = 6\n"
    )
    # It will not run as root.
    folder.chmod(0o755)
    user = ["-u", "nobody"] if os.getuid() == 0 else []
    process = subprocess.Popen(
        [program, *user, str(settings)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: not refused(free))
        yield f"postgresql://postgres@127.0.0.1:{free}/postgres?schema={place.schema}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def refused(port: int) -> bool:
    with socket.socket() as knock:
        return knock.connect_ex(("127.0.0.1", port)) != 0


class Relay:
    """Stands between workers and the server, and now and then swallows what comes back."""

    def __init__(self, db: str) -> None:
        self.real = db
        place = place_of(db)
        assert isinstance(place, Dsn)
        with psycopg.connect(place.conninfo) as connection:
            self._target = (connection.info.host, connection.info.port)
        self._swallow = threading.Event()
        self._closing = False

    def __enter__(self) -> Relay:
        self._door = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing = True
        self._door.close()

    @property
    def db(self) -> str:
        place = place_of(self.real)
        assert isinstance(place, Dsn)
        port = self._door.getsockname()[1]
        return f"postgresql://postgres@127.0.0.1:{port}/postgres?schema={place.schema}"

    def swallow(self) -> None:
        """Let the next commit arrive, and its answer not."""
        self._swallow.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._door.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        host, port = self._target
        if host.startswith("/"):
            real = socket.socket(socket.AF_UNIX)
            real.connect(f"{host}/.s.PGSQL.{port}")
        else:
            real = socket.create_connection((host, port))
        with client, real, contextlib.suppress(OSError):
            deaf = False
            while not self._closing:
                ready, _, _ = select.select([client, real], [], [], 0.2)
                for side in ready:
                    data = side.recv(65536)
                    if not data:
                        return
                    if side is client and b"COMMIT" in data and self._swallow.is_set():
                        self._swallow.clear()
                        deaf = True
                    if side is real and deaf:
                        return
                    (real if side is client else client).sendall(data)


@POSIX
def test_a_killed_worker_delays_its_rows_by_the_lease_at_most(crew: Crew) -> None:
    held, release = threading.Event(), threading.Event()

    def watch(request: Request) -> None:
        if request.method == "POST" and not held.is_set():
            crew.server.make_job(request)
            held.set()
            release.wait(30)

    crew.server.watch = watch
    crew.add(*clips(1))
    first = crew.hire()
    assert held.wait(20)
    first.kill()
    first.wait()
    release.set()
    start = time.monotonic()
    assert crew.hire().wait(30) == 0, crew.logs()
    assert time.monotonic() - start < 2 * SHORT["LEASE_S"] + 3  # type: ignore[operator]
    crew.check(1)
    assert len({post.key for post in crew.server.posts}) == 1


@POSIX
def test_a_worker_that_ends_cleanly_hands_its_rows_back_at_once(crew: Crew) -> None:
    crew.add(*clips(20))
    crew.server.reads_to_finish = 10**6
    worker = crew.hire()
    until(lambda: crew.statuses()["in_progress"] >= 5)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 143, crew.logs()
    with open_ledger(crew.place) as ledger:
        assert {(job.worker, job.lease_until) for job in ledger.latest()} == {(None, None)}
        assert ledger.held() == []


def test_workers_share_one_budget(crew: Crew) -> None:
    """Four workers at 600 a minute send 600 together, not 2,400."""
    crew.add(*clips(40))
    workers = [crew.hire("--writes-per-minute", "600") for _ in range(4)]
    assert [worker.wait(60) for worker in workers] == [0] * 4, crew.logs()
    crew.check(40)
    with open_ledger(crew.place) as ledger:
        facts = [fact for job in ledger.latest() for fact in ledger.history(job)]
    claimed = sorted(fact.at for fact in facts if fact.event == "prepared")
    # By the server's clock, under one lock: a tenth of a second each, less the little that a
    # late worker makes up for.
    least_ms = 60_000 / 600 - 1000 * sume_resume.BUDGET_CREDIT_S
    assert claimed[-1] - claimed[0] >= 39 * least_ms - 40


def test_a_pause_that_one_worker_is_told_holds_all(crew: Crew) -> None:
    from servers import Reply, error

    crew.server.submits.append(Reply(429, error("rate_limit_exceeded"), {"Retry-After": "2"}))
    crew.add(*clips(8))
    workers = [crew.hire("--concurrency", "2", "--writes-per-minute", "300") for _ in range(3)]
    assert [worker.wait(60) for worker in workers] == [0] * 3, crew.logs()
    crew.check(8)
    with open_ledger(crew.place) as ledger:
        facts = [fact for job in ledger.latest() for fact in ledger.history(job)]
    (told,) = [fact.at for fact in facts if fact.event == "returned"]
    # From the commit that records it (a turn takes some ms) to the end of the pause.
    hasty = [fact.at for fact in facts if fact.event == "prepared" and 200 < fact.at - told < 1900]
    assert hasty == []


def test_a_cap_holds_across_workers(crew: Crew) -> None:
    (crew.folder / "p.toml").write_text('[models."sume/auto"]\nvideo_usd_per_second = "0.025"\n')
    crew.add(*clips(30))
    workers = [crew.hire("--prices", "p.toml", "--max-cost", "1.05") for _ in range(4)]
    assert {worker.wait(60) for worker in workers} == {6}, crew.logs()
    assert len(crew.server.charges) == 10


@POSIX
def test_a_file_that_a_dead_worker_had_in_hand_comes_after_its_lease(crew: Crew) -> None:
    """The others neither end before it is there, nor have it twice at once."""
    held, release = threading.Event(), threading.Event()
    with Media() as media:

        def watch(request: Request) -> None:
            if not held.is_set():
                held.set()
                release.wait(30)

        def final(job: FakeJob) -> dict[str, Any]:
            media.files.setdefault(f"/{job.id}", File(mp4(job.id)))
            return finished(job) | {"url": f"{media.url}/{job.id}"}

        media.watch = watch
        crew.server.final = final
        crew.add(*clips(3))
        first = crew.hire("--download", "out")
        assert held.wait(20)
        second = crew.hire("--download", "out")
        first.kill()
        first.wait()
        release.set()
        assert second.wait(40) == 0, crew.logs()
        crew.check(3)
        with open_ledger(crew.place) as ledger:
            for job in ledger.latest():
                (output,) = ledger.outputs(job)
                assert Path(output.path or "").read_bytes() == mp4(job.job_id or "")


@POSIX
def test_drill_of_a_server_leaves_nothing_there(crew: Crew) -> None:
    drill = [sys.executable, str(SCRIPT), "drill", "--only", "publish:before:1", "--db", crew.db]
    done = subprocess.run(drill, cwd=crew.folder, capture_output=True, timeout=100, stdin=-3)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert b"publish:before:1" in done.stdout
    place = crew.place
    with psycopg.connect(place.conninfo, autocommit=True) as connection:
        found = connection.execute("SELECT nspname FROM pg_namespace").fetchall()
    assert [name for (name,) in found if name.startswith("drill_")] == []
    assert not list(crew.folder.glob(".sume*"))


# -- one worker's view --


@pytest.fixture
def store() -> str:
    return "postgres"


def test_a_fencing_token_guards_every_write(desk: Desk) -> None:
    """Who lost its lease changes nothing; the id that it brings home is kept in the history."""
    desk.add(*clips(1))
    with open_ledger(desk.place) as one, open_ledger(desk.place) as other:
        mine = one.record_prepared(one.find("r1"), START_MS)
        late_ms = START_MS + round(sume_resume.LEASE_S * 1000) + 1
        assert other.claimable(Status.SENDING, START_MS + 1) == []
        (found,) = other.claimable(Status.SENDING, late_ms)
        theirs = other.record_prepared(found, late_ms)
        with pytest.raises(RowChanged, match="taken over"):
            one.record_accepted(mine, "job_mine", late_ms, late_ms)
        with pytest.raises(RowChanged):
            one.record_renewed(mine, late_ms)
        kept = one.record_late_id(mine, "job_mine", late_ms)
        assert (kept.job_id, kept.worker, kept.token) == (None, other.worker, theirs.token)
        assert "job_mine" in repr(one.history(kept))
        done = other.record_accepted(theirs, "job_mine", late_ms, late_ms)
        assert (done.status, done.job_id, done.worker) == (Status.PENDING, "job_mine", None)


def test_a_due_row_is_claimed_once(desk: Desk) -> None:
    desk.add(*clips(5))
    desk.server.reads_to_finish = 10**6
    desk.run(deadline_s=1)
    now = desk.clock.wall_ms() + 10**6
    with open_ledger(desk.place) as one, open_ledger(desk.place) as other:
        with one.transaction():
            mine = one.due(now, now + 10**9, 3)
            with other.transaction():
                theirs = other.due(now, now + 10**9, 10)
        assert len(mine) == 3
        assert not {job.id for job in mine} & {job.id for job in theirs}
        claimed = one.record_claimed(mine[0], now)
        assert claimed.id not in {job.id for job in other.due(now + 1, now + 10**9, 10)}
        with pytest.raises(RowChanged):
            other.record_claimed(mine[0], now)


def test_a_lease_is_asked_about_at_the_moment_of_sending(desk: Desk) -> None:
    """A worker that stood still for longer than its lease sends nothing."""
    desk.add(*clips(1))

    def meddle(call: Any) -> None:
        if not desk.server.posts and desk.clock.elapsed < 6_000_000:
            desk.clock.suspend(sume_resume.LEASE_S + 1)

    desk.run(before=meddle)
    assert desk.job().status is Status.COMPLETED
    assert len(desk.server.charges) == 1
    assert "returned" in desk.history() or "unanswered" in desk.history()


class Lost:
    """Breaks the connection at the nth statement of a kind, before or after it is done."""

    def __init__(self, wanted: str, nth: int, after: bool) -> None:
        self.wanted, self.nth, self.after, self.calls = wanted, nth, after, 0

    def make(self, place: Any) -> sume_resume.Ledger:
        ledger = open_ledger(place)
        database = ledger._db
        assert isinstance(database, Postgres)
        original = database.execute

        def execute(sql: str, values: Any) -> Any:
            commit = sql == sume_resume.SQL_COMMIT
            running = ledger.on_busy is not sume_resume._give_up
            mine = running and commit == (self.wanted == "commit")
            self.calls += mine
            hit = mine and self.calls == self.nth
            if hit and not self.after:
                database._db.close()
            result = original(sql, values)
            if hit:
                database._db.close()
                raise LedgerLost("the answer was swallowed")
            return result

        database.execute = execute  # type: ignore[method-assign]
        return ledger


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("wanted", ["statement", "commit"])
def test_connection_lost_at_step_n(desk: Desk, wanted: str, after: bool) -> None:
    """The run goes on; a commit that may have come is read back before anything is sent."""
    step = 1 if wanted == "commit" else 4
    for n in range(1, 200, step):
        desk.begin_anew(str(n))
        desk.server.forget()
        desk.add(*clips(2))
        lost = Lost(wanted, n, after)
        desk.run(make_ledger=lost.make, concurrency=3)
        assert {job.status for job in desk.jobs().values()} == {Status.COMPLETED}
        assert len(desk.server.charges) == 2
        assert {post.key for post in desk.server.posts} == {job.key for job in desk.jobs().values()}
        if lost.calls < lost.nth:
            break
    assert n > 5


# -- places --


@pytest.mark.parametrize(
    ("text", "shown", "schema"),
    [
        ("postgresql://u:SECRET@h/db", "postgresql://u@h/db", "sume_resume"),
        ("postgres://h:5433/db?schema=a_1", "postgresql://h:5433/db?schema=a_1", "a_1"),
        ("postgresql:///d?host=/x&password=SECRET", "postgresql:///d?host=/x", "sume_resume"),
        ("postgresql://u@[::1]/db?sslpassword=SECRET", "postgresql://u@[::1]/db", "sume_resume"),
    ],
)  # fmt: skip
def test_a_place_shows_no_password(text: str, shown: str, schema: str) -> None:
    place = place_of(text)
    assert isinstance(place, Dsn)
    assert (str(place), place.schema) == (shown, schema)
    assert "SECRET" not in repr(place) + sume_resume.db_flag(place)
    assert "schema" not in place.conninfo
    assert place.conninfo.startswith("postgresql://")
    assert ("SECRET" in place.conninfo) == ("SECRET" in text)


@pytest.mark.parametrize(
    "text",
    ["postgresql://h:x/db", "postgresql://h/db?schema=A", "postgresql://h/db?schema=a;b",
     "postgresql://h/db?schema=a&schema=b", "postgresql://h/db?schema="],
)  # fmt: skip
def test_a_place_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="--db"):
        place_of(text)


def test_a_server_that_cannot_be_reached(shop: Shop) -> None:
    db = "postgresql://u:SECRET@127.0.0.1:1/db"
    for args in (("status",), ("run", shop.rows(*clips(1))), ("add", "clips.jsonl")):
        done = shop.invoke(*args, "--db", db)
        assert done.returncode == 8, done.stderr
        assert b"SECRET" not in done.stderr
        assert b"check the network and the server" in done.stderr
    assert shop.server.requests == []


def test_statements_name_schema_and_values() -> None:
    text = for_postgres(
        "SELECT a::bigint FROM jobs JOIN outputs ON job = jobs.id WHERE x = :x", "s"
    )
    assert text == "SELECT a::bigint FROM s.jobs JOIN s.outputs ON job = jobs.id WHERE x = %(x)s"


def test_a_newer_or_foreign_schema_is_refused(desk: Desk) -> None:
    desk.add(*clips(1))
    place = desk.place
    assert isinstance(place, Dsn)
    with psycopg.connect(place.conninfo, autocommit=True) as connection:
        for value, said in (("99", "newer"), ("x", "other tables")):
            connection.execute(
                f"UPDATE {place.schema}.meta SET value = '{value}' WHERE name = 'schema_version'"
            )
            with pytest.raises(LedgerError, match=said):
                open_ledger(place)


def test_two_that_make_a_ledger_at_once_make_one(postgres_url: str, shop: Shop) -> None:
    db = new_schema(postgres_url)
    shop.rows(*clips(5))
    command = shop.command("add", "clips.jsonl", "--db", db)
    several = [
        subprocess.Popen(command, cwd=shop.folder, env=shop.env, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    said = [process.communicate(timeout=60)[1] for process in several]
    assert [process.returncode for process in several] == [0] * 4, said
    with open_ledger(place_of(db)) as ledger:
        assert ledger.totals().rows == 5


# -- moving --


def elsewhere(desk: Desk, url: str) -> str:
    """Return a place of the other kind, where there is nothing yet."""
    if isinstance(desk.place, Dsn):
        return str(desk.folder / f"moved-{os.urandom(3).hex()}.db")
    return new_schema(url)


def half_done(desk: Desk) -> None:
    """Leave rows of every sort: ended, at Sume, with an unknown outcome, and queued."""
    desk.add(*clips(6))
    desk.run(limit=2)
    desk.server.reads_to_finish = 10**6
    desk.run(limit=2, deadline_s=1)
    desk.server.submits.append(drop_after)
    desk.run(limit=1, during=lambda e, _: e.stop(15) if len(desk.server.posts) == 5 else None)
    desk.server.reads_to_finish = 1
    found = Counter(str(job.status) for job in desk.jobs().values())
    assert found == {"completed": 2, "pending": 2, "sending": 1, "queued": 1}


@pytest.mark.parametrize("store", ["file", "postgres"])
def test_a_move_in_the_middle_of_a_batch_buys_nothing_twice(desk: Desk, postgres_url: str) -> None:
    half_done(desk)
    before, old = desk.jobs(), desk.db
    new = elsewhere(desk, postgres_url)
    done = desk.command("move", new, "--json")
    assert done.returncode == 0, done.stderr
    assert [event["type"] for event in events_of(done, "other")] == ["moved", "summary"]
    for args in (("run",), ("add", "--prompt", "x"), ("retry", "r1", "--yes")):
        refused = desk.command(*args)
        assert refused.returncode == 8, refused.stderr
        assert b"was moved to" in refused.stderr
    assert desk.command("status").returncode == 0
    desk.db = new
    moved = {row: job._replace(lease_until=None, worker=None) for row, job in desk.jobs().items()}
    assert moved == {r: j._replace(lease_until=None, worker=None) for r, j in before.items()}
    desk.run()
    assert {job.status for job in desk.jobs().values()} == {Status.COMPLETED}
    assert len(desk.server.charges) == 6
    desk.add(*clips(7))
    desk.run()
    assert len(desk.server.charges) == 7
    back = old + "2" if isinstance(place_of(old), Path) else new_schema(postgres_url)
    assert desk.command("move", back).returncode == 0
    desk.db = back
    desk.run()
    assert len(desk.server.charges) == 7


class Killed(BaseException):
    pass


STEPS = ["record_moving", "record_copy_of", "record_moved"]


@pytest.mark.parametrize("store", ["file", "postgres"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_kill_in_a_move(
    desk: Desk, postgres_url: str, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    """The same command goes on; between, neither place sends what the other one could."""
    half_done(desk)
    new = elsewhere(desk, postgres_url)
    original = getattr(sume_resume.Ledger, step)

    def dies(self: Any, *args: Any) -> None:
        if when == "after":
            original(self, *args)
        raise Killed

    monkeypatch.setattr(sume_resume.Ledger, step, dies)
    with pytest.raises(Killed):
        desk.command("move", new)
    monkeypatch.setattr(sume_resume.Ledger, step, original)
    if (step, when) != ("record_moving", "before"):
        assert desk.command("run").returncode == 8
        assert desk.command("move", new + "x").returncode == 8
    done = desk.command("move", new)
    assert done.returncode == 0, done.stderr
    desk.db = new
    desk.run()
    assert {job.status for job in desk.jobs().values()} == {Status.COMPLETED}
    assert len(desk.server.charges) == 6


@pytest.mark.parametrize("store", ["file", "postgres"])
def test_a_move_that_did_not_arrive_is_undone(
    desk: Desk, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_done(desk)
    new = elsewhere(desk, postgres_url)
    assert desk.command("move", "--undo").returncode == 8

    def dies(self: Any, *args: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(sume_resume.Ledger, "record_copy_of", dies)
        with pytest.raises(Killed):
            desk.command("move", new)
    done = desk.command("move", "--undo")
    assert done.returncode == 0, done.stderr
    desk.run()
    assert len(desk.server.charges) == 6
    assert desk.command("move", new).returncode == 0
    assert desk.command("move", "--undo").returncode == 8


def test_nothing_is_moved_onto_something(desk: Desk) -> None:
    desk.add(*clips(1))
    there = desk.folder / "there.db"
    there.write_text("mine")
    assert desk.command("move", str(there)).returncode == 8
    assert there.read_text() == "mine"
    assert desk.command("move", desk.db).returncode == 2
    desk.run()
    assert desk.job().status is Status.COMPLETED


@POSIX
def test_workers_stop_when_their_ledger_is_moved(crew: Crew) -> None:
    crew.add(*clips(40))
    workers = [crew.hire("--writes-per-minute", "300") for _ in range(3)]
    until(lambda: len(crew.server.charges) >= 5)
    done = crew.call("move", "moved.db")
    assert done.returncode == 0, done.stderr
    assert {worker.wait(30) for worker in workers} <= {5, 8}, crew.logs()
    quick = ("--poll-interval", "0.05s", "--writes-per-minute", "0")
    assert crew.call("run", *quick, db=str(crew.folder / "moved.db")).returncode == 0
    assert len(crew.server.charges) == 40
    assert len({job.body for job in crew.server.charges}) == 40


def test_backup_of_postgres_is_a_file_that_can_run(desk: Desk) -> None:
    half_done(desk)
    done = desk.command("backup", str(desk.folder / "b.db"))
    assert done.returncode == 0, done.stderr
    desk.run()
    desk.db = str(desk.folder / "b.db")
    desk.run()
    assert len(desk.server.charges) == 6
    assert {job.status for job in desk.jobs().values()} == {Status.COMPLETED}


# -- what the README says --


def test_queries_of_an_operator_work(desk: Desk) -> None:
    text = (SCRIPT.parent / "README.md").read_text("utf-8")
    block = text.partition("<!-- the operator's queries -->\n```sql\n")[2].partition("```")[0]
    half_done(desk)
    place = desk.place
    assert isinstance(place, Dsn)
    queries = block.replace("sume_resume.", f"{place.schema}.").split(";\n")
    with psycopg.connect(place.conninfo, autocommit=True) as connection:
        found = [connection.execute(query).fetchall() for query in queries if query.strip()]
    assert len(found) == 3
    assert {line[0] for line in found[1]} >= {"r3", "r4"}


def test_the_rights_of_the_readme_are_enough(desk: Desk, crew: Crew) -> None:
    """A role with those and no others runs a ledger that is there."""
    text = (SCRIPT.parent / "README.md").read_text("utf-8")
    grants = text.partition("(who makes it needs CREATE on the database):\n\n```sql\n")[2]
    crew.add(*clips(3))
    place = crew.place
    role = f"role_{place.schema}"
    with psycopg.connect(place.conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN")
        for grant in grants.partition("```")[0].split(";\n"):
            if grant.strip():
                named = grant.replace("sume_resume", place.schema).replace("TO clips", f"TO {role}")
                connection.execute(named)
    worker = crew.hire("--download", "out", db=crew.db.replace("postgres:@", f"{role}@"))
    assert worker.wait(60) in (0, 1), crew.logs()
    crew.check(3)
