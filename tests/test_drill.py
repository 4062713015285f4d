"""The drill: clean on the product as it is, and red on a product that was broken on purpose."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import POSIX, SCRIPT, until
from test_output import events_of

import sume_resume
from sume_resume import DrillLine, Fault, crash_methods, drill_lines

ENV = {name: value for name, value in os.environ.items() if not name.startswith("SUME_")}


def drill(
    folder: Path, *args: str, script: Path = SCRIPT, timeout_s: float = 280
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, str(script), "drill", *args]
    # A key of the user's would be an accident: none is read.
    env = ENV | {"SUME_API_KEY": "CANARY-of-the-user", "SUME_API_BASE_URL": "https://x.invalid"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, timeout=timeout_s, stdin=-3
    )


def events(done: subprocess.CompletedProcess[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@POSIX
@pytest.mark.timeout(300)
def test_drill_of_the_product_is_clean(tmp_path: Path) -> None:
    """Every point, every crossed fault, and some kills at random moments."""
    (tmp_path / "jobs.db").write_text("no ledger, and not touched")
    done = drill(tmp_path, "--random", "4", "--seed", "11", "--json")
    lines = events(done)
    bad = [line for line in lines if line["type"] == "line" and not line["clean"]]
    assert done.returncode == 0, (bad, done.stderr)
    first, last = lines[0], lines[-1]
    assert (first["type"], last["type"]) == ("drill", "summary")
    assert last["lines"] == first["lines"] == len(lines) - 2
    names = {line["line"] for line in lines if line["type"] == "line"}
    assert {"no kill", "random:4", "held answer + second runner"} <= names
    assert all(line["charges"] == line["jobs"] for line in lines if line["type"] == "line")
    # All that a run records was killed at; what is not reached is said.
    assert set(first["not_reached"]) == {
        "record_found", "record_cancel_asked", "record_unclaimed", "record_late_id", "cancel",
        "record_estimates", "jobs", "record_named", "record_part", "record_lost",
        "record_undownloaded", "record_renewed", "record_moving", "record_moved",
        "record_move_undone", "record_copy_of",
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.db"]
    assert b"CANARY" not in done.stdout + done.stderr


def test_points_are_found_and_not_listed() -> None:
    """A new recording method or API call is a crash point without anyone remembering."""
    found = {name for _, name in crash_methods()}
    records = {name for name in vars(sume_resume.Ledger) if name.startswith("record_")}
    calls = {"submit", "read", "result", "cancel", "jobs", "judge", "stream"}
    part = {"keep", "write", "peek", "sync", "publish", "drop"}
    assert found == records | {"_commit"} | calls | part
    lines = drill_lines(dict.fromkeys(found, 10))
    points = {line.point for line in lines if line.fault is None}
    for name in found:
        for when in ("before", "after"):
            for nth in (1, 2):
                assert f"{name}:{when}:{nth}" in points
    crossed = {line.fault for line in lines if line.fault is not None}
    assert crossed == set(Fault) - {Fault.CONFLICT}
    names = [line.name for line in lines]
    assert len(names) == len(set(names))


def test_point_that_was_not_reached_is_no_clean_line(tmp_path: Path) -> None:
    trial = sume_resume.Trial(DrillLine("record_found:before:1"), tmp_path / "t", SCRIPT, ENV)
    result = trial.run()
    assert not result.clean
    assert "was not reached" in result.problems[0]


def test_one_line_alone_and_its_table(tmp_path: Path) -> None:
    done = drill(tmp_path, "--only", "record_accepted:after:1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[0].split() == [
        "crash", "point", "POSTs", "jobs", "charges", "doubles", "lost", "recovery",
    ]  # fmt: skip
    assert re.match(r"record_accepted:after:1 +\d+ +9 +9 +0 +0 +\d+\.\d\d s$", lines[1])
    assert b"1 of 1 lines clean" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_random_line_is_told_by_its_seed(tmp_path: Path) -> None:
    one, same, other = (sume_resume.random_line(2, seed) for seed in (5, 5, 6))
    assert one == same != other
    assert all(0 <= kill_s <= sume_resume.DRILL_SPAN_S for kill_s in one.kills_s)
    done = drill(tmp_path, "--only", "random:2", "--seed", "5", "--json")
    assert done.returncode == 0, done.stderr
    assert [line["line"] for line in events_of(done, "drill")[1:-1]] == ["random:2"]


@pytest.mark.parametrize("args", [("--only", "nonsense"), ("--random", "-1"), ("--db", "no/x.db")])
def test_drill_that_is_not_clear(tmp_path: Path, args: tuple[str, ...]) -> None:
    done = drill(tmp_path, *args)
    assert done.returncode == 2, done.stderr
    assert list(tmp_path.iterdir()) == []


@POSIX
def test_drill_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "drill"], cwd=tmp_path, env=ENV,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    until(lambda: list(tmp_path.glob(".sume-resume-drill-*/2/rows.jsonl")), 60)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert list(tmp_path.iterdir()) == []


# -- a drill that cannot fail proves nothing --


class Break(NamedTuple):
    """A fault put into a copy of the product, and the line that must turn red."""

    old: str
    new: str
    line: str
    says: str


BREAKS = {
    "key committed after the POST": Break(
        "                calls = self._claim(now_s, now_ms)\n",
        "                calls = self._claim(now_s, now_ms)\n"
        "                self._hand_out(calls, now_ms)\n"
        "                self._clock.sleep(0.2)\n"
        "                calls = []\n",
        "no kill",
        "before its key was committed",
    ),
    "a commit left out": Break(
        "    def _commit(self) -> None:\n        self._execute(SQL_COMMIT)\n",
        "    def _commit(self) -> None:\n"
        "        self._execute(SQL_ROLLBACK if self._db._db.total_changes > 40 else SQL_COMMIT)\n",
        "no kill",
        "before its key was committed",
    ),
    "new key at replay": Break(
        "            job=ready,\n",
        "            job=ready._replace(key=ready.key + 'x') if earlier else ready,\n",
        "lost answer",
        "before its key was committed",
    ),
    "other bytes at replay": Break(
        "            job=ready,\n",
        "            job=ready._replace(body=ready.body + b' ') if earlier else ready,\n",
        "lost answer",
        "with another body",
    ),
    "forgotten key of a send that may have arrived": Break(
        "                after = self._ledger.record_unanswered(job, trouble, now_ms, again_ms)\n"
        "                self._changed(job, after, now_ms)",
        "                self._ledger._execute("
        "'UPDATE jobs SET status = \\'queued\\', first_sent_at = NULL, key = key || \\'y\\'"
        " WHERE id = :id', id=job.id)",
        "lost answer",
        "",
    ),
    "final status that goes back": Break(
        "        jobs = self._active()\n        for job in jobs:\n            self._meet",
        "        TRANSITIONS[Status.COMPLETED] = frozenset({Status.PENDING})\n"
        "        for job in self._ledger.with_status(Status.COMPLETED):\n"
        "            self._ledger.record_accepted(job, job.job_id or '', now_ms, now_ms)\n"
        "        jobs = self._active()\n        for job in jobs:\n            self._meet",
        "no kill",
        "went back from its last word",
    ),
    "Retry-After ignored": Break(
        '    value = headers.get("retry-after", "").strip()\n',
        '    value = ""\n',
        "rate limit",
        "after a Retry-After",
    ),
    "cost added twice": Break(
        '    return {"cost_micros": cost.micros, ',
        '    return {"cost_micros": (job.cost_micros or 0) + (cost.micros or 0), ',
        "no kill",
        "charged were",
    ),
    "lock that is not taken": Break(
        "            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "            pass\n",
        "held answer + second runner",
        "a second runner ended with",
    ),
    "API key in an error": Break(
        "        admit(ledger, account, adopt, clock.wall_ms())\n",
        "        admit(ledger, account, adopt, clock.wall_ms())\n"
        "        print('using', account.api_key, file=sys.stderr)\n",
        "no kill",
        "the API key is in",
    ),
    "id that is not stored": Break(
        '"job_id": job_id, "accepted_at": now_ms',
        '"job_id": "job_" + job_id[-6:], "accepted_at": now_ms',
        "no kill",
        "",
    ),
    "rows that have each other's job": Break(
        "                for answer in came:\n",
        "                self._clock.sleep(0.1)\n"
        "                came = [*came, *self._workers.wait(0)]\n"
        "                good = [a for a in came if getattr(a.meaning, 'job_id', None)]\n"
        "                ids = [a.meaning.job_id for a in good]\n"
        "                ids = ids[1:] + ids[:1]\n"
        "                came = [a for a in came if a not in good] + [\n"
        "                    a._replace(meaning=a.meaning._replace(job_id=id))\n"
        "                    for a, id in zip(good, ids, strict=True)]\n"
        "                for answer in came:\n",
        "no kill",
        "has the job of another row",
    ),
    "same command again refused": Break(
        "            scope = added.rows\n",
        "            scope = added.rows\n"
        "            if added.existing:\n"
        "                raise UsageError('it is there')\n",
        "record_final:after:1",
        "the same command again ended with",
    ),
    "cancel that drops nothing": Break(
        "            if now.status is Status.QUEUED and now.latest:\n",
        "            if now.status is Status.QUEUED and not now.latest:\n",
        "no kill",
        "",
    ),
    "final and its cost in two commits": Break(
        '            done = self._change(job, "final", now_ms, status=status, note=note,'
        " reading=reading)\n",
        '            done = self._change(job, "final", now_ms, status=status, note=note,'
        " reading=reading._replace(cost=Cost(None, None, None)))\n",
        "no kill",
        "charged were",
    ),
    "history that is not written": Break(
        "        self._later(SQL_EVENT, **facts)\n",
        "        self._later(SQL_EVENT, **facts) if fact.event != 'final' else None\n",
        "no kill",
        "has not its whole history",
    ),
    "row left out": Break(
        "        while batch := self._queued_after(wanted, now_ms):",
        "        while batch := self._queued_after(wanted, now_ms)[:-1]:",
        "no kill",
        "",
    ),
}


@POSIX
@pytest.mark.parametrize("name", BREAKS)
def test_drill_turns_red_where_the_product_is_broken(tmp_path: Path, name: str) -> None:
    """The drill's run without kills is judged too, so it may be the one that is red."""
    broken = BREAKS[name]
    source = SCRIPT.read_text("utf-8")
    assert source.count(broken.old) == 1, f"{name}: the text to break is there no more"
    work = tmp_path / "work"
    work.mkdir()
    script = tmp_path / "sume_resume.py"
    text = source.replace(broken.old, broken.new)
    # A drill of a broken product may wait for what never comes.
    script.write_text(text.replace("DRILL_LIMIT_S = 60.0", "DRILL_LIMIT_S = 8.0"), "utf-8")
    done = drill(work, "--only", broken.line, script=script, timeout_s=110)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 1, said
    assert "--only" in said
    assert broken.says in said
    assert list(work.iterdir()) == []


@POSIX
def test_unbroken_copy_is_clean(tmp_path: Path) -> None:
    script = tmp_path / "sume_resume.py"
    script.write_bytes(SCRIPT.read_bytes())
    work = tmp_path / "work"
    work.mkdir()
    assert drill(work, "--only", "lost answer", script=script).returncode == 0
