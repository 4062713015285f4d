"""Measures how cost grows with the number of rows: adding, starting, status, one round of polls.

    python tests/bench/scale.py            from 100 to 1,000,000 rows; takes some minutes
    python tests/bench/scale.py 100 10000  those sizes

Adding and polling are one run, the others medians of three. The exponent beside a time is the
slope in a log-log plot since the line above: 1 is proportional to the rows, 0 does not grow.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from functools import partial
from math import log10
from pathlib import Path

import common
from common import PRODUCT, Served, added, change, end_in_order, medians, ran, seconds, write_rows
from quick_sume import Rules

sys.path.insert(0, str(common.ROOT))

import sume_resume

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
OPEN_ROWS = 100


def add_s(folder: Path, count: int) -> float:
    rows, ledger = write_rows(folder / "rows.jsonl", count), folder / "added.db"
    ledger.unlink(missing_ok=True)
    outcome = ran([*PRODUCT, "add", str(rows), "--db", str(ledger)])
    assert outcome.code == 0
    return outcome.wall_s


def start_s(ledger: Path) -> float:
    """From the start of a run to its first submit; after the first time it is a replay."""
    with Served(Rules(answer_s=3600)) as served:
        return served.next_submit_s(ledger)


def status_s(ledger: Path) -> float:
    outcome = ran([*PRODUCT, "status", "--db", str(ledger)])
    assert outcome.code == 0
    return outcome.wall_s


class Readers:
    """Workers that answer each read at once: the job goes on."""

    def __init__(self) -> None:
        self._answers: list[sume_resume.Answer] = []
        self._reads = 0
        self.begun_s = self.done_s = 0.0
        self.engine: sume_resume.Engine | None = None

    def listen(self, event: sume_resume.Event) -> None:
        if isinstance(event, sume_resume.Started):
            self.begun_s = time.perf_counter()

    def free(self) -> int:
        return sume_resume.CONCURRENCY - len(self._answers)

    def start(self, call: sume_resume.Call) -> None:
        told = {"id": call.job.job_id, "status": "in_progress"}
        reading = sume_resume.reading_of(sume_resume.Reply(200, {}, told), call.job.job_id or "")
        self._answers.append(sume_resume.Answer(call, reading))

    def wait(self, timeout_s: float) -> list[sume_resume.Answer]:
        answers, self._answers = self._answers, []
        self._reads += len(answers)
        if self._reads == OPEN_ROWS and not answers:
            self.done_s = time.perf_counter()
            assert self.engine is not None
            self.engine.stop(signal.SIGTERM)
        return answers

    def abandon(self, call: sume_resume.Call) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


def poll_s(path: Path) -> float:
    """One read of each open row, without the network: what the scheduler and its ledger take."""
    change(
        path,
        """
        UPDATE jobs
        SET status = 'pending', job_id = 'job_' || id, tries = 1, first_sent_at = created_at,
            accepted_at = created_at, next_poll_at = created_at
        WHERE id <= ?
        """,
        OPEN_ROWS,
    )
    settings, readers = sume_resume.Settings(reads_per_minute=0, limit=0), Readers()
    with sume_resume.open_ledger(path) as ledger:
        clock = sume_resume.Clock()
        readers.engine = sume_resume.Engine(ledger, readers, clock, settings, listen=readers.listen)
        readers.engine.run()
    return readers.done_s - readers.begun_s


def main(sizes: list[int]) -> int:
    if any(size < OPEN_ROWS for size in sizes):
        print(f"sizes from {OPEN_ROWS} rows on: so many are polled", file=sys.stderr)
        return 2
    end_in_order()
    print("| rows | add | start to first submit | status | round of 100 polls |")
    print("|---:|---:|---:|---:|---:|")
    before: list[float] = []
    last = 0
    for count in sizes or SIZES:
        with tempfile.TemporaryDirectory(prefix="sume-bench-") as name:
            folder = Path(name)
            ledger = added(folder, count)
            measures = (partial(start_s, ledger), partial(status_s, ledger))
            taken = [add_s(folder, count), *medians(3, *measures), poll_s(ledger)]
        cells = [seconds(taken_s) for taken_s in taken]
        if before:
            decades = log10(count / last)
            slopes = [log10(a / b) / decades for a, b in zip(taken, before, strict=True)]
            cells = [f"{cell} ({slope:+.2f})" for cell, slope in zip(cells, slopes, strict=True)]
        before, last = taken, count
        print(f"| {count:,} |", " | ".join(cells), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main([int(text) for text in sys.argv[1:]]))
