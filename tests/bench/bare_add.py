"""The baseline for adding: read, hash twice, insert the same lines; nothing is checked.

Arguments: a JSONL file and the ledger to make.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from sume_resume import MIGRATIONS, PRAGMAS, SQL_ADD, SQL_EVENT


def main() -> None:
    rows, ledger = sys.argv[1:3]
    database = sqlite3.connect(ledger, isolation_level=None)
    for statement, *_ in PRAGMAS:
        database.execute(statement)
    for statement in (text for step in MIGRATIONS for text in step):
        database.execute(statement)
    database.execute("BEGIN IMMEDIATE")
    with open(rows, "rb") as file:
        for line in file:
            row = json.loads(line)
            body = hashlib.sha256(line).hexdigest()
            key = hashlib.sha256(body.encode() + row["id"].encode()).hexdigest()[:40]
            facts = {
                "row": row["id"], "attempt": 1, "key": f"sr-{key}", "kind": "video",
                "model": row["model"], "duration_s": row["duration"], "own": line.decode(),
                "body": line, "source": "rows.jsonl", "status": "queued", "now": 0,
            }  # fmt: skip
            job = database.execute(SQL_ADD, facts).lastrowid
            event = {
                "at": 0, "job": job, "event": "added", "before": None, "after": "queued",
                "detail": "rows.jsonl",
            }  # fmt: skip
            database.execute(SQL_EVENT, event)
    database.execute("COMMIT")


if __name__ == "__main__":
    main()
