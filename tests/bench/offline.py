"""What needs no server: start-up, adding, totals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from common import ENVIRON, HERE, PRODUCT, Line, added, at_most, change, medians, ran, write_rows

IMPORTS = (sys.executable, "-c", "import httpx, typer, rich")
ADD_ROWS = 100_000
TOTAL_ROWS = 1_000_000


def wall_s(*command: str) -> float:
    outcome = ran(command)
    assert outcome.code == 0, command
    return outcome.wall_s


def start_up(folder: Path) -> Iterator[Line]:
    """Start, answer and end, beside the import of the three packages alone.

    That `add` and `status` import no httpx is a test: tests/test_cli.py.
    """
    ledger = added(folder, 20)
    commands = {
        "`--version`": ("--version",),
        "`--help`": ("--help",),
        "`status` of 20 rows": ("status", "--db", str(ledger)),
    }
    measures = [partial(wall_s, *PRODUCT, *flags) for flags in commands.values()]
    base_s, *ours_s = medians(15, partial(wall_s, *IMPORTS), *measures)
    for name, taken_s in zip(commands, ours_s, strict=True):
        yield at_most(f"start-up: {name}", taken_s, base_s, 1.0)


def add(folder: Path) -> Iterator[Line]:
    """Add a large file, beside the same inserts without a check of anything."""
    rows = write_rows(folder / "rows.jsonl", ADD_ROWS)

    def ours() -> float:
        ledger = folder / "ours.db"
        ledger.unlink(missing_ok=True)
        return wall_s(*PRODUCT, "add", str(rows), "--db", str(ledger))

    def bare() -> float:
        ledger = folder / "bare.db"
        ledger.unlink(missing_ok=True)
        return wall_s(sys.executable, str(HERE / "bare_add.py"), str(rows), str(ledger))

    base_s, ours_s = medians(5, bare, ours)
    yield at_most(f"add of {ADD_ROWS:,} rows", ours_s, base_s, 1.5)


# Times its own query: the start of an interpreter is allowed for apart.
COUNT = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1])
start_s = time.perf_counter()
database.execute("SELECT status, count(*) FROM jobs GROUP BY status").fetchall()
print(time.perf_counter() - start_s)
"""


def totals(folder: Path) -> Iterator[Line]:
    """Show a large ledger's totals and first rows, beside the query of its counts alone.

    The query as a person writes it; it looks at every row.
    """
    ledger = finished(folder, TOTAL_ROWS)

    def count_s() -> float:
        command = [sys.executable, "-c", COUNT, str(ledger)]
        return float(subprocess.run(command, env=ENVIRON, capture_output=True, check=True).stdout)

    start_s, base_s, ours_s = medians(
        7,
        partial(wall_s, *PRODUCT, "--version"),
        count_s,
        partial(wall_s, *PRODUCT, "status", "--db", str(ledger)),
    )
    what = f"`status` of {TOTAL_ROWS:,} rows (allowed for: start-up)"
    yield at_most(what, ours_s, base_s, 1.5, start_s)


def finished(folder: Path, count: int) -> Path:
    """Return a ledger of so many completed rows."""
    ledger = added(folder, count)
    change(
        ledger,
        """
        UPDATE jobs
        SET status = 'completed', job_id = 'job_' || id, sume_status = 'completed',
            cost_micros = 100000, cost_state = 'captured', tries = 1,
            first_sent_at = created_at, accepted_at = created_at, finished_at = created_at
        """,
    )
    return ledger
