"""What the benchmarks share: child processes, a quick server, ledgers of any size."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import ProxyHandler, build_opener

from quick_sume import Rules

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# As a module from the checkout, so that its compiled form is used, as that of an installed one is.
PRODUCT = (sys.executable, "-m", "sume_resume")
# Nobody's settings, and no proxy: it would slow the baseline alone, since the product reaches
# loopback directly.
ENVIRON = {
    name: value
    for name, value in os.environ.items()
    if name != "PYTHONDONTWRITEBYTECODE"
    and not name.upper().startswith("SUME_")
    and not name.upper().endswith("_PROXY")
}
NO_PACING = ("--writes-per-minute", "0", "--reads-per-minute", "0")
# No measure takes so long; what does hangs.
LIMIT_S = 600.0


@dataclass(frozen=True)
class Line:
    """A line of the result: what was measured, its baseline from the same run, the goal."""

    what: str
    measured: str
    baseline: str
    ratio: str
    goal: str
    met: bool


@dataclass(frozen=True)
class Ran:
    """How a child process went: seconds by the clock and on the processors, and peak memory."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    code: int


@contextlib.contextmanager
def started(
    command: Sequence[str], env: dict[str, str] | None = None, stderr: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command, quietly; whatever happens, it does not outlive the bench."""
    child = subprocess.Popen(
        command, env=env or ENVIRON, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr
    )
    timer = threading.Timer(LIMIT_S, child.kill)
    timer.start()
    try:
        yield child
    finally:
        timer.cancel()
        if child.returncode is None:
            child.kill()
            child.wait()


def ran(
    command: Sequence[str], env: dict[str, str] | None = None, stderr: int = subprocess.DEVNULL
) -> Ran:
    """Run a command to its end."""
    start_s = time.perf_counter()
    with started(command, env, stderr) as child:
        return ended(child, start_s)


def ended(child: subprocess.Popen[bytes], start_s: float) -> Ran:
    """Wait for the end of a child, and return what it took."""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    cpu_s = usage.ru_utime + usage.ru_stime
    # Linux counts the peak in kB.
    return Ran(time.perf_counter() - start_s, cpu_s, usage.ru_maxrss / 1000, child.returncode)


def medians(runs: int, *measures: Callable[[], float]) -> list[float]:
    """Take each measure in turn, so that a slow moment hits them all; return their medians."""
    found: list[list[float]] = [[] for _ in measures]
    for _ in range(runs):
        for measure, taken in zip(measures, found, strict=True):
            taken.append(measure())
    return [median(taken) for taken in found]


class Served:
    """A quick Sume in a process of its own."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._open = build_opener(ProxyHandler({})).open

    def __enter__(self) -> Served:
        command = [sys.executable, str(HERE / "quick_sume.py"), json.dumps(asdict(self._rules))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        # In a session of its own: Ctrl-C ends the bench, and with its pipe the server.
        self._child = subprocess.Popen(
            command, env=ENVIRON, text=True, start_new_session=True, **pipes
        )
        assert self._child.stdout is not None
        port = self._child.stdout.readline().strip()
        assert port.isdigit(), "the server did not start"
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.communicate()

    def books(self) -> dict[str, Any]:
        with self._open(f"{self.url}/books") as answer:
            return dict(json.load(answer))

    def wait_for(
        self, child: subprocess.Popen[bytes], what: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        """Wait until the books say so while a child runs; return them."""
        give_up_s = time.monotonic() + LIMIT_S
        while not what(books := self.books()):
            assert child.poll() is None, "the command ended before it did what is measured"
            assert time.monotonic() < give_up_s, "it did not happen in time"
            time.sleep(0.01)
        return books

    def next_submit_s(self, ledger: Path) -> float:
        """Return what passes from the start of a run to its first submit; the run is killed."""
        sent, start_s = len(self.books()["posts_s"]), time.monotonic()
        command = run_command(ledger, *NO_PACING, "--concurrency", "1")
        with started(command, self.environ()) as run:
            books = self.wait_for(run, lambda books: len(books["posts_s"]) > sent)
        return float(books["posts_s"][sent] - start_s)

    def jobs_per_s(self) -> float:
        """Return how many jobs a second went through, from the first submit to the last result.

        Seen from the server: start-up is on no side, nor is what follows the last answer.
        """
        books = self.books()
        return float(books["told"] / (books["last_told_s"] - books["posts_s"][0]))

    def environ(self) -> dict[str, str]:
        """Return the environment of a command that is to use it."""
        return ENVIRON | {"SUME_API_KEY": "bench-key", "SUME_API_BASE_URL": self.url}


def write_rows(path: Path, count: int) -> Path:
    """Write an input of so many rows, as people write them."""
    with path.open("w") as file:
        for number in range(count):
            row = {
                "id": f"clip-{number:07}",
                "prompt": f"clip {number}: a lighthouse in a storm, waves over the rocks, slow pan",
                "model": "seedance-2.5",
                "duration": 5,
                "aspect_ratio": "16:9",
            }
            file.write(json.dumps(row) + "\n")
    return path


def added(folder: Path, count: int) -> Path:
    """Return a new ledger of so many queued rows."""
    ledger = folder / f"{time.monotonic_ns()}.db"
    add_to(str(ledger), folder, count)
    return ledger


def add_to(db: str, folder: Path, count: int) -> None:
    rows = write_rows(folder / "rows.jsonl", count)
    assert ran([*PRODUCT, "add", str(rows), "--db", db]).code == 0, "the rows could not be added"


def run_command(ledger: Path | str, *flags: str) -> list[str]:
    return [*PRODUCT, "run", "--db", str(ledger), *flags]


def change(ledger: Path, sql: str, *values: object) -> None:
    """Set a scene in a ledger that would take hours to play."""
    with contextlib.closing(sqlite3.connect(ledger)) as database, database:
        database.execute(sql, values)


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.1f} ms"


def at_most(what: str, ours_s: float, base_s: float, times: float, plus_s: float = 0.0) -> Line:
    """Return the line of a time that may be so many times its baseline, and so much more.

    The ratio is what is left after the allowance, so that it can be held against the goal.
    """
    goal = f"at most {times:.2f} x" + (f" + {seconds(plus_s)}" if plus_s else "")
    ratio = max(0.0, ours_s - plus_s) / base_s
    return Line(what, seconds(ours_s), seconds(base_s), f"{ratio:.2f} x", goal, ratio <= times)


def end_in_order() -> None:
    """Let a signal end what was started, without a word."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, frame: sys.exit(128 + number))
