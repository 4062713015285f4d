"""The baseline for adding: read, hash twice, insert the same lines; nothing is checked.

Arguments: a JSONL file and the ledger to make. It takes the statements from the product, and
writes as it does, many lines at a time; so its start-up is on both sides.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import sys
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from sume_resume import ADD_ROWS, MIGRATIONS, PRAGMAS, SQL_ADD, SQL_EVENT


def facts_of(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    body = hashlib.sha256(line).hexdigest()
    key = hashlib.sha256(body.encode() + row["id"].encode()).hexdigest()[:40]
    return {
        "row": row["id"], "attempt": 1, "key": f"sr-{key}", "kind": "video",
        "model": row["model"], "duration_s": row["duration"], "own": line.decode(),
        "body": line, "source": "rows.jsonl", "status": "queued", "now": 0,
    }  # fmt: skip


def main() -> None:
    rows, ledger = sys.argv[1:3]
    database = sqlite3.connect(ledger, isolation_level=None)
    for statement, *_ in PRAGMAS:
        database.execute(statement)
    for statement in (text for step in MIGRATIONS for text in step):
        database.execute(statement)
    database.execute("BEGIN IMMEDIATE")
    made = 0
    with open(rows, "rb") as file:
        while batch := [facts_of(line) for line in islice(file, ADD_ROWS)]:
            database.executemany(SQL_ADD, batch)
            event = {"at": 0, "event": "added", "before": None, "after": "queued"}
            events = [event | {"job": made + n, "detail": "x"} for n, _ in enumerate(batch, 1)]
            database.executemany(SQL_EVENT, events)
            made += len(batch)
    database.execute("COMMIT")


if __name__ == "__main__":
    main()
