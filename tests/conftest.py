"""What the tests share: a clock they own, a carrier without threads, a ledger, a server."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from servers import FakeSume

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
    Settings,
    Sume,
    admit,
    perform,
)

START_MS = 1_790_000_000_000
KEY = "CANARY-key-1"


class FakeClock(Clock):
    """Time stands still until a test, or a wait, moves it."""

    def __init__(self) -> None:
        self.wall = START_MS
        self.awake = 1000.0
        self.elapsed = 5_000_000
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

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def jsonl(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def clips(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "prompt": f"clip {n}.", "duration": 4} for n in range(1, count + 1)]


@dataclass
class Desk:
    """A ledger, a server and a clock, and what a person would do with them."""

    path: Path
    server: FakeSume
    clock: FakeClock
    key: str = KEY
    seed: int = 7
    events: list[Event] = field(default_factory=list)
    carrier: Inline | None = None

    @property
    def account(self) -> Account:
        return Account(self.server.url + "/v1", self.server.url, self.key)

    def add(self, *rows: dict[str, Any], name: str = "clips.jsonl", **more: Any) -> Added:
        namespace = more.pop("namespace", "test" if not self.path.exists() else None)
        defaults = Defaults(**more)
        return sume_resume.add_rows(self.path, BytesIO(jsonl(*rows)), name, defaults, namespace)

    def run(
        self,
        *,
        scope: set[str] | None = None,
        adopt: bool = False,
        latency_s: float = 0.0,
        before: Callable[[Call], None] = lambda call: None,
        during: Callable[[Engine, Event], None] = lambda engine, event: None,
        make_ledger: Callable[[Path], Ledger] = sume_resume.open_ledger,
        api: type[Sume] = Sume,
        **settings: Any,
    ) -> Ending:
        """Run as the command does, without threads and without real time."""
        client = api(self.account, self.clock, False)
        carrier = self.carrier = Inline(client, self.clock, latency_s=latency_s, before=before)
        settings = {"writes_per_minute": 0.0, "reads_per_minute": 0.0} | settings
        try:
            with make_ledger(self.path) as ledger:
                admit(ledger, self.account, adopt, self.clock.wall_ms())
                wanted = Settings(**settings)
                carrier.count = wanted.concurrency

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
        with sume_resume.open_ledger(self.path) as ledger:
            return {job.row: job for job in ledger.latest()}

    def job(self, row: str = "r1") -> Job:
        return self.jobs()[row]

    def history(self, row: str = "r1") -> list[str]:
        with sume_resume.open_ledger(self.path) as ledger:
            job = ledger.job_of_row(row)
            assert job is not None
            return [event[3] for event in ledger.history(job)]

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Notice)]


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


@pytest.fixture
def desk(tmp_path: Path, server: FakeSume, clock: FakeClock) -> Desk:
    return Desk(tmp_path / "jobs.db", server, clock)


def reading_of(answer: sume_resume.Reply | sume_resume.Failure, of_result: bool = False) -> Any:
    """Read an answer as the one to the question that it names."""
    asked = sume_resume.job_id_of(getattr(answer, "data", None)) or "job_1"
    return sume_resume.reading_of(answer, asked, of_result)


def statuses(jobs: Iterable[Job]) -> list[str]:
    return [str(job.status) for job in jobs]
