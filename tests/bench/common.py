"""What the benchmarks share: child processes, a quick server, ledgers of any size."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from quick_sume import Rules as Rules  # noqa: E402  beside this file, for all of them

import sume_resume as sume_resume  # noqa: E402  found by the path above

# As a module from the checkout, so that its compiled form is used as that of an installed one.
PRODUCT = (sys.executable, "-m", "sume_resume")
# What is installed is compiled; here the first run compiles.
ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
NO_PACING = ("--writes-per-minute", "0", "--reads-per-minute", "0")


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


def ran(command: Sequence[str], env: dict[str, str] | None = None, **more: Any) -> Ran:
    """Run a command to its end, quietly."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    quiet["cwd"] = ROOT
    start_s = time.perf_counter()
    child = subprocess.Popen(command, env=env or ENVIRON, **(quiet | more))
    _, status, usage = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - start_s
    child.returncode = os.waitstatus_to_exitcode(status)
    # Linux counts the peak in kB.
    return Ran(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000, child.returncode)


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

    def __enter__(self) -> Served:
        command = [sys.executable, str(HERE / "quick_sume.py"), json.dumps(asdict(self._rules))]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        self.url = f"http://127.0.0.1:{self._child.stdout.readline().strip()}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.communicate()

    def books(self) -> dict[str, Any]:
        with urlopen(f"{self.url}/books") as answer:
            return dict(json.load(answer))

    def jobs_per_s(self) -> float:
        """Return how many jobs a second went through, from the first submit to the last result."""
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


def added(folder: Path, count: int, db: str | None = None) -> Path:
    """Return a new ledger of so many queued rows."""
    path = folder / f"{time.monotonic_ns()}.db"
    rows = write_rows(folder / "rows.jsonl", count)
    outcome = ran([*PRODUCT, "add", str(rows), "--db", db or str(path)])
    assert outcome.code == 0, "the rows could not be added"
    return path


def run_command(ledger: Path | str, *flags: str) -> list[str]:
    return [*PRODUCT, "run", "--db", str(ledger), *flags]


@contextlib.contextmanager
def changed(ledger: Path) -> Iterator[Any]:
    """Open a ledger to set a scene in it that would take hours to play."""
    import sqlite3

    with contextlib.closing(sqlite3.connect(ledger)) as database, database:
        yield database


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.1f} ms"


def at_most(what: str, ours_s: float, base_s: float, times: float, plus_s: float = 0.0) -> Line:
    """Return the line of a time that may be so many times its baseline, and so much more."""
    goal = f"at most {times:.2f} x" + (f" + {seconds(plus_s)}" if plus_s else "")
    met = ours_s <= base_s * times + plus_s
    return Line(what, seconds(ours_s), seconds(base_s), f"{ours_s / base_s:.2f} x", goal, met)
