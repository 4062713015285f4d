"""What a run does against a server: replay, throughput, limits, reads, memory, commits, display."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from common import (
    HERE,
    NO_PACING,
    Line,
    Served,
    added,
    at_most,
    ended,
    medians,
    ran,
    run_command,
    started,
)
from quick_sume import Rules

REPLAY_ROWS = 10_000
JOBS = 2000
THREADS = (1, 2, 4, 8, 16, 32)
# So many requests at once; more bring nothing more here.
CONCURRENCY = 32
IN_FLIGHT = 500


def restart(folder: Path) -> Iterator[Line]:
    """Kill a run whose first submit is on its way, and wait for the replay of it.

    Beside it the start of a run whose ledger has one row, to its first submit.
    """
    ledger = added(folder, REPLAY_ROWS)
    with Served(Rules(answer_s=3600)) as served:

        def sent_s(path: Path, replays: int) -> float:
            """From the start of a run to its first submit, which is a replay or is not."""
            before = served.books()["replays"]
            taken_s = served.next_submit_s(path)
            assert served.books()["replays"] - before == replays
            return taken_s

        sent_s(ledger, 0)
        base_s, ours_s = medians(7, lambda: sent_s(added(folder, 1), 0), partial(sent_s, ledger, 1))
    what = f"kill -9 to first replay, {REPLAY_ROWS:,} rows (baseline: first submit of 1 row)"
    yield at_most(what, ours_s, base_s, 1.0, plus_s=0.15)


def ours_per_s(folder: Path) -> float:
    ledger = added(folder, JOBS)
    with Served(Rules()) as served:
        flags = (*NO_PACING, "--poll-interval", "0.01s", "--concurrency", str(CONCURRENCY))
        assert ran(run_command(ledger, *flags), served.environ()).code == 0
        return served.jobs_per_s()


def bare_per_s(threads: int) -> float:
    with Served(Rules()) as served:
        command = [sys.executable, str(HERE / "bare_client.py"), served.url, str(JOBS)]
        assert ran([*command, str(threads)]).code == 0
        return served.jobs_per_s()


def throughput(folder: Path) -> Iterator[Line]:
    """Jobs a second through a server without limits, beside httpx alone at its best."""
    bare = [partial(bare_per_s, threads) for threads in THREADS]
    ours, *each = medians(3, partial(ours_per_s, folder), *bare)
    base = max(each)
    best = THREADS[each.index(base)]
    yield Line(
        f"throughput, {JOBS:,} jobs, no pacing, {CONCURRENCY} at once (baseline: threads, {best})",
        f"{ours:.0f} jobs/s", f"{base:.0f} jobs/s", f"{ours / base:.2f} x",
        "at least 0.80 x", ours >= 0.8 * base,
    )  # fmt: skip


def played(folder: Path, rows: int, rules: Rules, *flags: str) -> dict[str, Any]:
    """Run so many rows to their end, and return what the server saw."""
    ledger = added(folder, rows)
    with Served(rules) as served:
        assert ran(run_command(ledger, *flags), served.environ()).code == 0
        return served.books() | {"jobs_per_s": served.jobs_per_s()}


def budget(folder: Path) -> Iterator[Line]:
    """Use a write budget to its end, against a server that enforces it. One run."""
    rows, per_minute = 300, 600
    flags = ("--writes-per-minute", str(per_minute), "--poll-interval", "1s")
    books = played(folder, rows, Rules(writes_per_minute=per_minute), *flags)
    sent_s, refused = books["posts_s"], books["rate_limited"]
    ours = (rows - 1) / (sent_s[-1] - sent_s[0]) * 60
    yield Line(
        f"write budget, {rows} rows, {refused} refused", f"{ours:.0f} a minute",
        f"{per_minute} a minute", f"{ours / per_minute:.3f} x", "at least 0.970 x, none refused",
        ours >= 0.97 * per_minute and refused == 0,
    )  # fmt: skip


def queue(folder: Path) -> Iterator[Line]:
    """Keep a full queue full, without running into it. One run."""
    rows, capacity, job_s = 300, 20, 2.0
    flags = (*NO_PACING, "--poll-interval", "0.2s")
    books = played(folder, rows, Rules(capacity=capacity, job_s=job_s), *flags)
    ours, ideal = books["jobs_per_s"], capacity / job_s
    full = 100 * books["queue_full"] / len(books["posts_s"])
    yield Line(
        f"queue of {capacity}, jobs of {job_s:.0f} s; {full:.1f} % queue_full",
        f"{ours:.2f} jobs/s", f"{ideal:.2f} jobs/s", f"{ours / ideal:.2f} x",
        "at least 0.90 x, at most 1 % queue_full", ours >= 0.9 * ideal and full <= 1,
    )  # fmt: skip


def reads(folder: Path) -> Iterator[Line]:
    """Read as often as the jobs ask, no more, and see their ends in time. One run.

    The tool's own interval is shorter: what keeps the reads apart is the hint.
    """
    rows, job_s, hint_s = 100, 5.0, 1.0
    rules = Rules(job_s=job_s, hint_s=hint_s)
    books = played(folder, rows, rules, *NO_PACING, "--poll-interval", "0.3s")
    ours, ideal = mean(books["reads_per_job"]), job_s / hint_s + 1
    late_s = quantiles(books["late_s"], n=20)[-1]
    yield Line(
        f"reads a job, hint {hint_s:.0f} s, jobs of {job_s:.0f} s", f"{ours:.2f}", f"{ideal:.2f}",
        f"{ours / ideal:.2f} x", "at most 1.15 x", ours <= 1.15 * ideal,
    )  # fmt: skip
    yield at_most("… an end is noticed (p95; baseline: the hint)", late_s, hint_s, 1.1)


def memory(folder: Path) -> Iterator[Line]:
    """Peak memory with many rows, beside that with few; as many in flight, each read twice."""

    def peak_mb(rows: int) -> float:
        ledger = added(folder, rows)
        with Served(Rules(job_s=None, capacity=IN_FLIGHT)) as served:
            start_s = time.perf_counter()
            command = run_command(ledger, *NO_PACING, "--poll-interval", "1s")
            with started(command, served.environ()) as run:
                books = served.wait_for(run, lambda books: books["reads"] >= 2 * IN_FLIGHT)
                run.send_signal(signal.SIGTERM)
                outcome = ended(run, start_s)
        assert (outcome.code, books["jobs"]) == (128 + signal.SIGTERM, IN_FLIGHT)
        return outcome.peak_mb

    base, ours = medians(3, partial(peak_mb, 1000), partial(peak_mb, 100_000))
    yield Line(
        f"memory, 100,000 rows, {IN_FLIGHT} in flight (baseline: 1,000 rows)", f"{ours:.0f} MB",
        f"{base:.0f} MB", f"{ours / base:.2f} x", "at most + 30 MB", ours <= base + 30,
    )  # fmt: skip


def commits(folder: Path) -> Iterator[Line]:
    """Commits of a loaded run, beside the three facts that each job has. One run.

    That no submit leaves before its commit is what the kill tests and the drill show.
    """
    rows = 500
    ledger = added(folder, rows)
    before = change_count(ledger)
    with Served(Rules()) as served:
        flags = (*NO_PACING, "--poll-interval", "0.01s", "--concurrency", "16")
        assert ran(run_command(ledger, *flags), served.environ()).code == 0
    made = change_count(ledger) - before
    with contextlib.closing(sqlite3.connect(ledger)) as database:
        # The count in the header is one of commits in this mode alone.
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        query = "SELECT count(*) FROM events WHERE event IN ('prepared', 'accepted', 'final')"
        facts = database.execute(query).fetchone()[0]
    assert facts == 3 * rows
    yield Line(
        f"commits, {rows} jobs (baseline: facts)", str(made), str(facts),
        f"{made / facts:.2f} x", "below 1.00 x", made < facts,
    )  # fmt: skip


def change_count(ledger: Path) -> int:
    """Return how often a ledger was committed to: SQLite counts it in the header."""
    with ledger.open("rb") as file:
        return int(struct.unpack(">I", file.read(28)[24:])[0])


def display(folder: Path) -> Iterator[Line]:
    """Processor time of a run with a live table, beside one that shows nothing."""

    def cpu_s(show: str) -> float:
        ledger = added(folder, 100_000)
        with Served(Rules()) as served, Terminal() as terminal:
            command = [sys.executable, str(HERE / "shown.py"), str(ledger), show, str(JOBS)]
            env = served.environ() | {"TERM": "xterm-256color"}
            outcome = ran(command, env, stderr=terminal.fd)
            assert outcome.code == 0
        assert (terminal.screens > 3) == (show == "table"), terminal.screens
        return outcome.cpu_s

    base_s, ours_s = medians(5, partial(cpu_s, "nothing"), partial(cpu_s, "table"))
    yield at_most("processor time with a live table, 100,000 rows", ours_s, base_s, 1.05)


class Terminal:
    """A terminal of 200 columns and 50 lines whose reader counts the tables that it sees."""

    def __enter__(self) -> Terminal:
        import fcntl
        import pty
        import termios

        self.screens = 0
        self._ours, self.fd = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)
        self._reader.join(5)
        os.close(self._ours)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._ours, 65536):
                self.screens += data.count(b"rows final")
