"""What a run does against a server: replay, throughput, limits, reads, memory, commits, display."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean, quantiles

from common import (
    HERE,
    NO_PACING,
    ROOT,
    Line,
    Ran,
    Rules,
    Served,
    added,
    at_most,
    medians,
    ran,
    run_command,
)

REPLAY_ROWS = 10_000
JOBS = 2000
THREADS = (2, 4, 8, 16)
IN_FLIGHT = 500


def restart(folder: Path) -> Iterator[Line]:
    """Kill a run whose first submit is on its way, and wait for the replay of it."""
    large, small = added(folder, REPLAY_ROWS), added(folder, 1)
    with Served(Rules(answer_s=3600)) as served:

        def replayed_s(ledger: Path) -> float:
            before, start_s = len(served.books()["posts_s"]), time.monotonic()
            run = subprocess.Popen(
                run_command(ledger, *NO_PACING, "--concurrency", "1"),
                env=served.environ(), cwd=ROOT, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            while len(posts_s := served.books()["posts_s"]) == before:
                time.sleep(0.01)
            run.send_signal(signal.SIGKILL)
            run.wait()
            return float(posts_s[before] - start_s)

        for ledger in (large, small):
            replayed_s(ledger)
        base_s, ours_s = medians(7, partial(replayed_s, small), partial(replayed_s, large))
    what = f"kill -9 to first replay, {REPLAY_ROWS:,} rows (baseline: 1 row)"
    yield at_most(what, ours_s, base_s, 1.0, plus_s=0.15)


def ours_per_s(folder: Path, concurrency: int) -> float:
    ledger = added(folder, JOBS)
    with Served(Rules()) as served:
        flags = (*NO_PACING, "--poll-interval", "0.01s", "--concurrency", str(concurrency))
        assert ran(run_command(ledger, *flags), served.environ()).code == 0
        return served.jobs_per_s()


def bare_per_s(threads: int, jobs: int = JOBS) -> float:
    with Served(Rules()) as served:
        command = [sys.executable, str(HERE / "bare_client.py"), served.url, str(jobs)]
        assert ran([*command, str(threads)]).code == 0
        return served.jobs_per_s()


def throughput(folder: Path) -> Iterator[Line]:
    """Jobs a second through a server without limits, beside httpx alone at its best."""
    best = max(THREADS, key=partial(bare_per_s, jobs=JOBS // 2))
    base, ours = medians(5, partial(bare_per_s, best), partial(ours_per_s, folder, 32))
    what = f"throughput, {JOBS:,} jobs, no pacing (baseline: {best} threads)"
    yield Line(
        what, f"{ours:.0f} jobs/s", f"{base:.0f} jobs/s", f"{ours / base:.2f} x",
        "at least 0.80 x", ours >= 0.8 * base,
    )  # fmt: skip


def budget(folder: Path) -> Iterator[Line]:
    """Use a write budget to its end, against a server that enforces it."""
    rows, per_minute = 300, 600
    ledger = added(folder, rows)
    with Served(Rules(writes_per_minute=per_minute)) as served:
        flags = ("--writes-per-minute", str(per_minute), "--poll-interval", "1s")
        assert ran(run_command(ledger, *flags), served.environ()).code == 0
        books = served.books()
    sent_s = books["posts_s"]
    ours = (len(sent_s) - 1) / (sent_s[-1] - sent_s[0]) * 60
    refused = books["rate_limited"]
    yield Line(
        f"write budget, {rows} rows, {refused} refused", f"{ours:.0f} a minute",
        f"{per_minute} a minute", f"{ours / per_minute:.3f} x", "at least 0.970 x, none refused",
        ours >= 0.97 * per_minute and refused == 0,
    )  # fmt: skip


def queue(folder: Path) -> Iterator[Line]:
    """Keep a full queue full, without running into it."""
    rows, capacity, job_s = 300, 20, 2.0
    ledger = added(folder, rows)
    with Served(Rules(capacity=capacity, job_s=job_s)) as served:
        flags = (*NO_PACING, "--poll-interval", "0.2s")
        assert ran(run_command(ledger, *flags), served.environ()).code == 0
        ours, books = served.jobs_per_s(), served.books()
    ideal, full = capacity / job_s, 100 * books["queue_full"] / len(books["posts_s"])
    yield Line(
        f"queue of {capacity}, jobs of {job_s:.0f} s; {full:.1f} % queue_full",
        f"{ours:.2f} jobs/s", f"{ideal:.2f} jobs/s", f"{ours / ideal:.2f} x",
        "at least 0.90 x, at most 1 % queue_full", ours >= 0.9 * ideal and full <= 1,
    )  # fmt: skip


def reads(folder: Path) -> Iterator[Line]:
    """Read as often as the jobs ask, no more, and see their ends in time."""
    rows, job_s, hint_s = 100, 5.0, 1.0
    ledger = added(folder, rows)
    with Served(Rules(job_s=job_s, hint_s=hint_s)) as served:
        flags = (*NO_PACING, "--poll-interval", f"{hint_s:.0f}s")
        assert ran(run_command(ledger, *flags), served.environ()).code == 0
        books = served.books()
    ours, ideal = mean(books["reads_per_job"]), job_s / hint_s + 1
    late_s = quantiles(books["late_s"], n=20)[-1]
    yield Line(
        f"reads a job, hint {hint_s:.0f} s, jobs of {job_s:.0f} s", f"{ours:.2f}", f"{ideal:.2f}",
        f"{ours / ideal:.2f} x", "at most 1.15 x", ours <= 1.15 * ideal,
    )  # fmt: skip
    yield at_most("… an end is noticed (p95; baseline: the hint)", late_s, hint_s, 1.1)


def memory(folder: Path) -> Iterator[Line]:
    """Peak memory with many rows, beside that with few; as many in flight."""

    def peak_mb(rows: int) -> float:
        ledger = added(folder, rows)
        with Served(Rules(job_s=None, capacity=IN_FLIGHT)) as served:
            flags = (*NO_PACING, "--deadline", "12s")
            outcome = ran(run_command(ledger, *flags), served.environ())
            assert (outcome.code, served.books()["jobs"]) == (3, IN_FLIGHT)
            return outcome.peak_mb

    base, ours = medians(3, partial(peak_mb, 1000), partial(peak_mb, 100_000))
    yield Line(
        f"memory, 100,000 rows, {IN_FLIGHT} in flight (baseline: 1,000 rows)", f"{ours:.0f} MB",
        f"{base:.0f} MB", f"{ours / base:.2f} x", "at most + 30 MB", ours <= base + 30,
    )  # fmt: skip


def commits(folder: Path) -> Iterator[Line]:
    """Commits of a loaded run, beside the three facts that each job has."""
    rows = 500
    ledger = added(folder, rows)
    before = change_count(ledger)
    with Served(Rules()) as served:
        flags = (*NO_PACING, "--poll-interval", "0.01s", "--concurrency", "16")
        assert ran(run_command(ledger, *flags), served.environ()).code == 0
    made = change_count(ledger) - before
    with contextlib.closing(sqlite3.connect(ledger)) as database:
        query = "SELECT count(*) FROM events WHERE event IN ('prepared', 'accepted', 'final')"
        facts = database.execute(query).fetchone()[0]
    yield Line(
        f"commits, {rows} jobs (baseline: facts)", str(made), str(facts),
        f"{made / facts:.2f} x", "below 1.00 x", made < facts,
    )  # fmt: skip


def change_count(ledger: Path) -> int:
    """Return how often a ledger was committed to: SQLite counts it in the header."""
    return int(struct.unpack(">I", ledger.read_bytes()[24:28])[0])


def display(folder: Path) -> Iterator[Line]:
    """Processor time of a run with a live table, beside one that shows nothing."""

    def cpu_s(show: str) -> float:
        ledger = added(folder, 100_000)
        with Served(Rules()) as served, drained_terminal() as terminal:
            command = [sys.executable, str(HERE / "shown.py"), str(ledger), show, "2000"]
            outcome: Ran = ran(command, served.environ(), stderr=terminal)
            assert outcome.code == 0
            return outcome.cpu_s

    base_s, ours_s = medians(3, partial(cpu_s, "nothing"), partial(cpu_s, "table"))
    yield at_most("processor time with a live table, 100,000 rows", ours_s, base_s, 1.05)


@contextlib.contextmanager
def drained_terminal() -> Iterator[int]:
    """Yield a terminal of 200 columns and 50 lines that somebody reads."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))

    def drain() -> None:
        with contextlib.suppress(OSError):
            while os.read(ours, 65536):
                pass

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
