"""What needs no server: start-up, adding, totals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from common import HERE, PRODUCT, Line, added, at_most, changed, medians, ran, write_rows

IMPORTS = (sys.executable, "-c", "import httpx, typer, rich")
ADD_ROWS = 100_000
TOTAL_ROWS = 1_000_000


def wall_s(*command: str) -> float:
    outcome = ran(command)
    assert outcome.code == 0, command
    return outcome.wall_s


def start_up(folder: Path) -> Iterator[Line]:
    """Start, answer and end, beside the import of the three packages alone."""
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

    base_s, ours_s = medians(3, bare, ours)
    yield at_most(f"add of {ADD_ROWS:,} rows", ours_s, base_s, 1.5)


COUNT = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
print(database.execute(
    "SELECT status, count(*) FROM jobs WHERE latest = 1 GROUP BY status").fetchall())
"""


def totals(folder: Path) -> Iterator[Line]:
    """Count a large ledger and its money, beside the counts alone."""
    ledger = finished(folder, TOTAL_ROWS)
    start_s, base_s, ours_s = medians(
        5,
        partial(wall_s, *PRODUCT, "--version"),
        partial(wall_s, sys.executable, "-c", COUNT, str(ledger)),
        partial(wall_s, *PRODUCT, "status", "--db", str(ledger)),
    )
    yield at_most(f"`status` of {TOTAL_ROWS:,} rows", ours_s, base_s, 1.5, start_s)


def finished(folder: Path, count: int, left: int = 0) -> Path:
    """Return a ledger of so many rows, all completed but for the last ones."""
    ledger = added(folder, count)
    with changed(ledger) as database:
        database.execute(
            """
            UPDATE jobs
            SET status = 'completed', job_id = 'job_' || id, sume_status = 'completed',
                cost_micros = 100000, cost_state = 'captured', tries = 1,
                first_sent_at = created_at, accepted_at = created_at, finished_at = created_at
            WHERE id <= ?
            """,
            (count - left,),
        )
    return ledger
