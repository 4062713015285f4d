"""jobs.example.db is what its script makes, and a copy of it runs to its end."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import make_example
import pytest

from sume_resume import Status, open_ledger, stand_in_state

ROOT = Path(make_example.__file__).parents[1]
EXAMPLE = ROOT / "jobs.example.db"


def dump(path: Path) -> list[str]:
    db = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        return list(db.iterdump())
    finally:
        db.close()


def run(folder: Path, *args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "sume_resume.py"), *args]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_the_example_is_what_its_script_makes(tmp_path: Path) -> None:
    make_example.make(tmp_path / "made.db")
    assert dump(tmp_path / "made.db") == dump(EXAMPLE)


def test_the_example_holds_rows_of_three_kinds() -> None:
    with open_ledger(EXAMPLE) as ledger:
        counts = Counter(job.status for job in ledger.latest())
    assert counts == {Status.QUEUED: 7, Status.SENDING: 2, Status.COMPLETED: 3}


def test_a_copy_runs_to_its_end_and_charges_once(tmp_path: Path) -> None:
    """The README's first command, but for the venv: no key, no network, exit 0."""
    copy = tmp_path / "try.db"
    shutil.copy(EXAMPLE, copy)
    done = run(tmp_path, "run", "--simulate", "--db", "try.db", "--writes-per-minute", "0")
    assert done.returncode == 0, done.stderr
    with open_ledger(copy) as ledger:
        jobs = list(ledger.latest())
        assert {job.status for job in jobs} == {Status.COMPLETED}
        assert ledger.totals().cost_unknown_rows == 0
    state = sqlite3.connect(stand_in_state(copy))
    charges = state.execute("SELECT job, count(*) FROM charges GROUP BY job").fetchall()
    state.close()
    # The three that were completed were charged in an earlier life.
    assert len(charges) == len(jobs) - 3
    assert {count for _, count in charges} == {1}
    again = run(tmp_path, "run", "--simulate", "--db", "try.db")
    assert again.returncode == 0, again.stderr


def test_the_example_can_never_buy_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs are at the stand-in, so a run with a real key is refused, with nothing sent."""
    shutil.copy(EXAMPLE, tmp_path / "jobs.db")
    monkeypatch.setenv("SUME_API_KEY", "CANARY-real")
    monkeypatch.setenv("SUME_API_BASE_URL", "http://127.0.0.1:9")
    before = dump(tmp_path / "jobs.db")
    refused = run(tmp_path, "run", "--adopt-account")
    assert refused.returncode == 5
    assert "stand-in" in refused.stderr
    assert dump(tmp_path / "jobs.db") == before


def test_the_stand_in_survives_a_kill_with_its_jobs(tmp_path: Path) -> None:
    """What it accepted before the kill is found again by its key, and charged once."""
    rows = b"".join(b'{"id": "r%d", "prompt": "p%d"}\n' % (n, n) for n in range(4))
    (tmp_path / "a.jsonl").write_bytes(rows)
    child = subprocess.Popen(
        [sys.executable, str(ROOT / "sume_resume.py"), "run", "a.jsonl", "--simulate"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "r1: pending" in line:
            break
    child.kill()
    child.wait(10)
    child.stderr.close()
    done = run(tmp_path, "run", "a.jsonl", "--simulate")
    assert done.returncode == 0, done.stderr
    state = sqlite3.connect(tmp_path / "simulated.stand-in.db")
    charges = state.execute("SELECT count(*), count(DISTINCT job) FROM charges").fetchone()
    state.close()
    assert charges == (4, 4)
