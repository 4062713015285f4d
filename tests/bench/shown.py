"""Runs a ledger with the live table or with nothing, which no command does.

Arguments: the ledger, what to show (nothing or table), and how many rows to send.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import sume_resume as product


def main() -> None:
    ledger_name, show, limit = sys.argv[1:4]
    clock, account = product.Clock(), product.account_from(os.environ)
    settings = product.Settings(
        poll_interval_s=0.01, writes_per_minute=0, reads_per_minute=0, concurrency=16,
        limit=int(limit),
    )  # fmt: skip
    make_api = product.client_factory(account, clock)
    console = product.make_console(stderr=True)
    table = product.LiveTable(console) if show == "table" else None
    with product.open_ledger(Path(ledger_name)) as ledger, table or contextlib.nullcontext():
        product.admit(ledger, account, False, clock.wall_ms())
        workers = product.Workers(make_api, clock, settings.workers)
        listen = table or (lambda event: None)
        product.Engine(ledger, workers, clock, settings, listen=listen).run()
        workers.close()


if __name__ == "__main__":
    main()
