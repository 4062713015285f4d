"""Draws .github/live-table.svg: the live table in the middle of a real run of the example.

python tests/make_picture.py
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sume_resume as sr  # noqa: E402  found by the line above, also without an install

PICTURE = ROOT / ".github" / "live-table.svg"
ENOUGH_FINAL_ROWS = 6


def main() -> None:
    console = sr.make_console(
        file=io.StringIO(), record=True, force_terminal=True, width=110, height=24
    )
    table = sr.LiveTable(console)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "try.db"
        shutil.copy(ROOT / "jobs.example.db", path)
        clock = sr.Clock()
        with sr.open_ledger(path) as ledger, sr.StandIn(sr.stand_in_state(path)) as account:
            sr.admit(ledger, account, False, clock.wall_ms())
            workers = sr.Workers(sr.client_factory(account, clock), clock, sr.CONCURRENCY)
            settings = sr.Settings(key_ttl_s=None, poll_interval_s=sr.SIMULATED_POLL_INTERVAL_S)

            def listen(event: sr.Event) -> None:
                table._view.follow(event)
                if table._view.totals.final >= ENOUGH_FINAL_ROWS:
                    engine.stop(15)

            engine = sr.Engine(ledger, workers, clock, settings, listen=listen)
            engine.run()
            workers.close()
    console.print(table.render())
    console.save_svg(str(PICTURE), title="sume-resume run --simulate --db try.db")


if __name__ == "__main__":
    main()
