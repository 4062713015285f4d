"""The real command in child processes: exit codes, signals, locks, secrets, odd consoles."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import CANARY, FILE_ONLY, POSIX, QUICK, Desk, Hold, Shop, clips, last_line, until
from servers import Act, FakeJob, FakeSume, Reply, closed_port, error, finished

import sume_resume
from sume_resume import InputError, UsageError, account_from

HOSTILE = "a \x1b]0;t\x07 \x1b[2J \x9b2J [/x] [red] \u202e\u2066b 日本 é"


def failed(job: FakeJob) -> dict[str, Any]:
    body = {"id": job.id, "status": "failed", "usage": {"cost": 0.0}}
    return body | {"error": {"code": "content_filtered", "message": "filtered"}}


# -- exit codes --


def test_0_every_row_is_completed(shop: Shop) -> None:
    done = shop.run(shop.rows(*clips(3)))
    assert done.returncode == 0, done.stderr
    assert {job.status for job in shop.jobs().values()} == {"completed"}
    assert len(shop.server.charges) == 3
    assert b"spent $0.300000" in done.stderr
    assert done.stdout == b""
    assert shop.run("clips.jsonl").returncode == 0
    assert len(shop.server.posts) == 3


def test_1_all_final_and_some_not_completed(shop: Shop) -> None:
    shop.server.submits.append(Reply(422, error("invalid_request", "no such ratio")))
    shop.server.final = lambda job: failed(job) if b"clip 2" in job.body else finished(job)
    done = shop.run(shop.rows(*clips(3)), "--concurrency", "2")
    assert done.returncode == 1, done.stderr
    assert [str(job.status) for job in shop.jobs().values()] == ["rejected", "failed", "completed"]
    assert b"r1" in done.stderr
    assert b"r2" in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("run", "--nonsense"),
        ("nonsense",),
        ("run", "clips.jsonl", "--deadline", "soon"),
        ("run", "clips.jsonl", "--deadline", "5"),
        ("run", "clips.jsonl", "--deadline", "0s"),
        ("run", "clips.jsonl", "--poll-interval", "-1s"),
        ("run", "clips.jsonl", "--writes-per-minute", "-1"),
        ("run", "clips.jsonl", "--reads-per-minute", "nan"),
        ("run", "clips.jsonl", "--concurrency", "0"),
        ("run", "clips.jsonl", "--limit", "-1"),
        ("run", "clips.jsonl", "--key-ttl", "30s"),
        ("run", "clips.jsonl", "--kind", "gif"),
        ("run", "clips.jsonl", "--namespace", ""),
        ("run", "clips.jsonl", "other.jsonl"),
        ("run", "absent.jsonl"),
        ("add",),
        ("add", "clips.jsonl", "--prompt", "x"),
        ("add", "clips.jsonl", "--id", "x"),
        ("status", "--format", "xml"),
    ],
    ids=" ".join,
)
def test_2_bad_usage_makes_nothing(shop: Shop, args: tuple[str, ...]) -> None:
    shop.rows(*clips(1))
    before = shop.files()
    done = shop.invoke(*args)
    assert done.returncode == 2, done.stderr
    assert done.stderr
    assert b"Traceback" not in done.stderr
    assert shop.files() == before
    assert shop.server.requests == []


def test_2_neither_ledger_nor_file(shop: Shop) -> None:
    done = shop.run()
    assert done.returncode == 2
    assert b"run FILE" in done.stderr
    assert shop.files() == {}


@pytest.mark.parametrize("key", [None, "", "  ", "two words", "k\xe9y"])
def test_2_no_usable_api_key(shop: Shop, key: str | None) -> None:
    shop.rows(*clips(1))
    before = shop.files()
    done = shop.invoke("run", "clips.jsonl", SUME_API_KEY=key)
    assert done.returncode == 2
    assert b"SUME_API_KEY" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert shop.files() == before
    assert shop.server.requests == []


@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "m"),
        ("--duration", "5"),
        ("--kind", "image"),
        ("--set", "x=1"),
        ("--take", "2"),
        ("--namespace", "n"),
    ],
    ids=" ".join,
)
def test_2_input_flags_without_a_file(shop: Shop, flags: tuple[str, ...]) -> None:
    shop.invoke("add", shop.rows(*clips(1)))
    assert shop.invoke("run", *flags).returncode == 2
    assert shop.server.requests == []


def test_2_bad_rows_add_nothing_and_make_nothing(shop: Shop) -> None:
    shop.rows({"id": "r1", "prompt": "a"}, {"id": "r1", "prompt": "b"}, {"prompt": 5})
    before = shop.files()
    done = shop.run("clips.jsonl")
    assert done.returncode == 2
    assert b"clips.jsonl:2" in done.stderr
    assert b"line 1" in done.stderr
    assert b"clips.jsonl:3: prompt: expected text, got 5" in done.stderr
    assert shop.files() == before
    assert shop.server.requests == []


def test_3_a_limit_left_rows_open(shop: Shop) -> None:
    done = shop.run(shop.rows(*clips(3)), "--limit", "1")
    assert done.returncode == 3
    assert len(shop.server.posts) == 1
    assert last_line(done.stderr).startswith("run the same command again")
    assert shop.run("clips.jsonl").returncode == 0


def test_3_a_deadline_left_a_job_running(shop: Shop) -> None:
    shop.server.reads_to_finish = 10**9
    done = shop.run(shop.rows(*clips(1)), "--deadline", "0.4s")
    job = shop.jobs()["r1"]
    assert done.returncode == 3
    assert job.status in ("pending", "in_progress")
    assert (job.job_id or "-").encode() in done.stderr
    assert {request.method for request in shop.server.requests} == {"GET", "POST"}


def test_4_a_row_needs_review(shop: Shop) -> None:
    shop.server.submits.append(Reply(409, error("strange")))
    done = shop.run(shop.rows(*clips(2)), "--concurrency", "2")
    assert done.returncode == 4
    assert b"review: r1" in done.stderr
    assert shop.jobs()["r2"].status == "completed"


def test_4_goes_before_3(shop: Shop) -> None:
    shop.server.submits.append(Reply(409, error("strange")))
    assert shop.run(shop.rows(*clips(3)), "--limit", "1").returncode == 4


@pytest.mark.parametrize("reply", [(401, "unauthorized"), (402, "insufficient_credits")])
def test_5_the_account_needs_fixing(shop: Shop, reply: tuple[int, str]) -> None:
    shop.server.submits.append(Reply(409, error("strange")))
    shop.server.on_submit = Reply(reply[0], error(reply[1]))
    done = shop.run(shop.rows(*clips(4)), "--concurrency", "2")
    assert done.returncode == 5
    assert str(reply[0]).encode() in done.stderr
    assert [str(job.status) for job in shop.jobs().values()] == ["review"] + ["queued"] * 3
    assert len(shop.server.posts) == 2


def test_5_another_key_on_a_used_ledger(shop: Shop) -> None:
    shop.run(shop.rows(*clips(1)))
    done = shop.run(shop.rows(*clips(2)), SUME_API_KEY="another")
    assert done.returncode == 5
    assert b"--adopt-account" in done.stderr
    assert len(shop.server.posts) == 1
    assert set(shop.jobs()) == {"r1"}
    adopted = shop.run("clips.jsonl", "--adopt-account", SUME_API_KEY="another")
    assert adopted.returncode == 0
    assert len(shop.server.charges) == 2


@FILE_ONLY
@pytest.mark.parametrize("damage", ["empty", "text", "foreign", "newer", "pages", "folder"])
@pytest.mark.parametrize("command", ["run", "add", "status"])
def test_8_the_ledger_cannot_be_used(shop: Shop, damage: str, command: str) -> None:
    shop.rows(*clips(1))
    path = shop.folder / "jobs.db"
    if damage == "folder":
        path.mkdir()
    elif damage in ("empty", "text"):
        path.write_bytes(b"" if damage == "empty" else b"no ledger " * 100)
    elif damage == "foreign":
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE jobs (x)")
        db.close()
    else:
        shop.invoke("add", "clips.jsonl")
        content = bytearray(path.read_bytes())
        if damage == "newer":
            content[60:64] = (99).to_bytes(4, "big")
        else:
            content[4096:] = b"\xff" * (len(content) - 4096)
        path.write_bytes(content)
    before = {} if damage == "folder" else shop.files()
    args = {"run": ("run", "clips.jsonl", *QUICK), "add": ("add", "clips.jsonl")}
    done = shop.invoke(*args.get(command, (command,)))
    assert done.returncode == 8, done.stderr
    assert b"jobs.db" in done.stderr
    assert b"Traceback" not in done.stderr
    assert shop.server.requests == []
    if before:
        assert shop.files() == before


def test_70_a_fault_is_one_line_without_a_traceback(shop: Shop) -> None:
    boom = "import os, sume_resume\ndef boom(*a): raise RuntimeError(os.environ['SUME_API_KEY'])\n"
    done = shop.run(shop.rows(*clips(1)), code=boom + "sume_resume.run_ledger = boom")
    assert done.returncode == 70
    assert len(done.stderr.splitlines()) == 3
    assert b"RuntimeError in boom" in done.stderr
    assert b"CANARY" not in done.stdout + done.stderr
    assert shop.run("clips.jsonl").returncode == 0


def test_rows_of_the_file_decide(shop: Shop) -> None:
    shop.call("add", shop.rows({"id": "other", "prompt": "not in the file"}, name="more.jsonl"))
    done = shop.run(shop.rows(*clips(1)))
    assert done.returncode == 0
    assert b"other" in done.stderr
    assert shop.server.charges_of("not in the file") == 0
    assert shop.run().returncode == 0
    assert shop.server.charges_of("not in the file") == 1


# -- what the command never needs --


@pytest.mark.parametrize("blocked", ["httpx", "rich"])
def test_add_and_json_status_need_no_key_and_no_client(shop: Shop, blocked: str) -> None:
    code = f"import sys; sys.modules[{blocked!r}] = None"
    shop.rows(*clips(2))
    drop = ("SUME_API_KEY", "SUME_API_BASE_URL")
    assert shop.call("add", "clips.jsonl", code=code, drop=drop).returncode == 0
    done = shop.call("status", "--format", "json", code=code, drop=drop)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["totals"]["rows"] == 2


def test_status_table_needs_no_key_and_no_client(shop: Shop) -> None:
    shop.call("add", shop.rows(*clips(2)))
    code = "import sys; sys.modules['httpx'] = None"
    done = shop.call("status", code=code, drop=("SUME_API_KEY", "SUME_API_BASE_URL"))
    assert done.returncode == 0, done.stderr
    assert b"clip 2." in done.stdout


def test_ledger_name_from_the_environment_and_the_flag(shop: Shop) -> None:
    shop.rows(*clips(1))
    shop.call("add", "clips.jsonl", SUME_RESUME_DB="env.db")
    shop.call("add", "clips.jsonl", "--db", "flag.db", SUME_RESUME_DB="env.db")
    assert set(shop.files()) == {"clips.jsonl", "env.db", "flag.db"}


@FILE_ONLY
@POSIX
def test_ledger_is_for_its_owner_alone_and_one_file_at_rest(shop: Shop) -> None:
    shop.run(shop.rows(*clips(2)))
    assert set(shop.files()) == {"clips.jsonl", "jobs.db"}
    assert (shop.folder / "jobs.db").stat().st_mode & 0o777 == 0o600


# -- status --


def test_status_json_has_the_promised_shape(shop: Shop) -> None:
    def final(job: FakeJob) -> dict[str, Any]:
        done = finished(job)
        return done | {"url": done["url"] + "?X-Signature=SECRET"}

    shop.server.final = final
    rows = [*clips(2), {"id": "later", "prompt": "日本", "kind": "image", "model": "m/x"}]
    shop.run(shop.rows(*rows), "--limit", "1")
    data = json.loads(shop.call("status", "--format", "json").stdout)
    assert set(data) == {"totals", "jobs"}
    totals = data["totals"]
    assert set(totals) == {"rows", "by_status", "cost_usd", "cost_unknown_rows"}
    assert (totals["rows"], totals["cost_usd"], totals["cost_unknown_rows"]) == (3, "0.100000", 0)
    assert {s: n for s, n in totals["by_status"].items() if n} == {"completed": 1, "queued": 2}
    first, second, later = data["jobs"]
    names = "row key job_id kind model duration prompt status sume_status cost_usd attempt note"
    assert all(set(job) == {*names.split(), "outputs"} for job in data["jobs"])
    assert first["cost_usd"] == "0.100000"
    assert first["job_id"] in shop.server.jobs
    assert first["key"] == shop.server.posts[0].key
    assert (first["status"], first["sume_status"], first["attempt"]) == (
        "completed",
        "completed",
        1,
    )
    assert first["outputs"][0]["url"] == f"https://media.invalid/artifacts/{first['job_id']}.mp4"
    assert (second["status"], second["job_id"], second["cost_usd"]) == ("queued", None, None)
    assert (later["kind"], later["model"], later["duration"]) == ("image", "m/x", None)
    assert later["prompt"] == "日本"
    assert later["outputs"] == []
    assert b"SECRET" not in b"".join(shop.files().values())


def test_unknown_cost_is_null_and_counted(shop: Shop, hold: Callable[..., Hold]) -> None:
    held = hold()
    running = shop.start(shop.rows(*clips(1)))
    assert held.held.wait(15)
    data = json.loads(shop.call("status", "--format", "json").stdout)
    assert data["jobs"][0]["cost_usd"] is None
    assert data["totals"]["cost_unknown_rows"] == 1
    assert b"spent: 1 of unknown cost" in shop.call("status").stdout
    held.release.set()
    assert running.wait() == 0


def test_status_of_one_row_by_row_id_and_by_job_id(shop: Shop) -> None:
    shop.run(shop.rows(*clips(3)))
    job = shop.jobs()["r2"]
    for name in ("r2", job.job_id or ""):
        data = json.loads(shop.call("status", name, "--format", "json").stdout)
        assert [row["row"] for row in data["jobs"]] == ["r2"]
        table = shop.call("status", name).stdout.decode()
        assert "clip 2." in table
        assert "clip 1." not in table
    done = shop.call("status", "nobody")
    assert done.returncode == 2
    assert b"nobody" in done.stderr


def test_status_table_names_what_matters(shop: Shop) -> None:
    shop.run(shop.rows(*clips(2)), "--limit", "1")
    done = shop.call("status")
    text = done.stdout.decode()
    job = shop.jobs()["r1"]
    assert done.returncode == 0
    assert done.stderr == b""
    for word in ("r1", "clip 1.", job.job_id, job.model, "completed", "$0.100000", "queued"):
        assert word
        assert word in text
    assert "1 completed" in text
    assert "spent $0.100000" in text
    assert max(map(len, text.splitlines())) <= 200


def test_status_without_a_ledger_says_what_to_do(shop: Shop) -> None:
    done = shop.call("status")
    assert done.returncode in (2, 8)
    assert b"add" in done.stderr
    assert shop.files() == {}


@POSIX
@pytest.mark.parametrize("form", ["table", "json"])
def test_status_into_a_reader_that_leaves(shop: Shop, form: str) -> None:
    """`status | head -1` is no error (status exits 0 whenever it could read the ledger)."""
    shop.rows(*({"id": f"r{n}", "prompt": f"clip {n} " + "x" * 80} for n in range(1000)))
    shop.call("add", "clips.jsonl")
    process = subprocess.Popen(
        shop.command("status", "--format", form),
        cwd=shop.folder,
        env=shop.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) == 0
    assert err == b""


@POSIX
@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1"}], ids=["plain", "forced colour"])
def test_run_whose_log_reader_left_goes_on_to_the_end(shop: Shop, env: dict[str, str]) -> None:
    """`run FILE 2>&1 | head -1`: the ledger work and the exit code do not need a reader."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            shop.command("run", shop.rows(*clips(3)), *QUICK),
            cwd=shop.folder,
            env=shop.env | env,
            stdout=write,
            stderr=write,
            timeout=30,
        )
    finally:
        os.close(write)
    assert done.returncode == 0
    assert len(shop.server.charges) == 3


# -- one run per ledger --


@FILE_ONLY
def test_second_runner_is_refused_at_once(shop: Shop, hold: Callable[..., Hold]) -> None:
    held = hold()
    first = shop.start(shop.rows(*clips(2)), "--concurrency", "2")
    assert held.held.wait(15)
    begin = time.monotonic()
    second = shop.run("clips.jsonl")
    assert time.monotonic() - begin < 4
    assert second.returncode == 7
    assert f"pid {first.process.pid}".encode() in second.stderr
    assert len(second.stderr.splitlines()) == 1
    # Status and add need no lock.
    assert shop.call("status").returncode == 0
    assert shop.call("add", "--prompt", "beside it", "--id", "r9").returncode == 0
    held.release.set()
    assert first.wait() == 0
    assert shop.jobs()["r9"].status == "queued"
    assert len(shop.server.charges) == 2


@FILE_ONLY
def test_refused_runner_adds_nothing(shop: Shop, hold: Callable[..., Hold]) -> None:
    held = hold()
    first = shop.start(shop.rows(*clips(1)))
    assert held.held.wait(15)
    second = shop.run(shop.rows({"id": "new", "prompt": "x"}, name="more.jsonl"))
    assert second.returncode == 7
    held.release.set()
    first.wait()
    assert set(shop.jobs()) == {"r1"}


def test_stale_lock_file_is_no_obstacle(shop: Shop) -> None:
    (shop.folder / "jobs.db.lock").write_text("pid 1 on elsewhere")
    assert shop.run(shop.rows(*clips(1))).returncode == 0
    assert len(shop.server.charges) == 1


@FILE_ONLY
@POSIX
def test_link_in_place_of_the_lock_is_not_followed(shop: Shop) -> None:
    victim = shop.folder / "victim"
    victim.write_text("precious")
    (shop.folder / "jobs.db.lock").symlink_to(victim)
    done = shop.run(shop.rows(*clips(1)))
    assert done.returncode == 8
    assert b"jobs.db.lock" in done.stderr
    assert victim.read_text() == "precious"
    assert shop.server.requests == []


@FILE_ONLY
@POSIX
@pytest.mark.parametrize("make_first", [True, False], ids=["accepted", "not yet there"])
def test_kill_9_then_start_at_once(shop: Shop, hold: Callable[..., Hold], make_first: bool) -> None:
    """B07: rows 1 and 2 keep their ids, row 3 is found again by its key."""
    held = hold(3, make_first)
    running = shop.start(shop.rows(*clips(3)), "--concurrency", "2")
    assert held.held.wait(15)
    running.send(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    ids = {row: job.job_id for row, job in shop.jobs().items()}
    assert [bool(ids[row]) for row in ("r1", "r2", "r3")] == [True, True, False]
    done = shop.run("clips.jsonl")
    held.release.set()
    assert done.returncode == 0, done.stderr
    after = {row: job.job_id for row, job in shop.jobs().items()}
    assert (after["r1"], after["r2"]) == (ids["r1"], ids["r2"])
    assert len(shop.server.charges) == len(set(after.values())) == 3
    assert len({post.key for post in shop.server.posts}) == 3


# -- signals --


@POSIX
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signal_while_an_answer_is_held(shop: Shop, hold: Callable[..., Hold], name: str) -> None:
    """B33: the answer is waited for, its id is stored, and the last line says how to go on."""
    signum = getattr(signal, name)
    held = hold()
    running = shop.start(shop.rows(*clips(3)), "--concurrency", "2")
    assert held.held.wait(15)
    running.send(signum)
    until(lambda: "stopping" in running.err)
    held.release.set()
    assert running.wait() == 128 + signum
    job = shop.jobs()["r1"]
    assert job.status == "pending"
    assert job.job_id in shop.server.jobs
    assert len(shop.server.posts) == 1
    assert name in running.err
    assert str(job.job_id) in running.err
    assert last_line(running.err).startswith("run the same command again")
    assert shop.run("clips.jsonl").returncode == 0
    assert len(shop.server.charges) == 3


@FILE_ONLY
@POSIX
def test_second_signal_leaves_at_once(shop: Shop, hold: Callable[..., Hold]) -> None:
    held = hold()
    running = shop.start(shop.rows(*clips(1)))
    assert held.held.wait(15)
    running.send(signal.SIGINT)
    until(lambda: "stopping" in running.err)
    begin = time.monotonic()
    running.send(signal.SIGINT)
    assert running.wait() == 130
    assert time.monotonic() - begin < 3
    assert shop.jobs()["r1"].status == "sending"
    held.release.set()
    assert shop.run("clips.jsonl").returncode == 0
    assert len(shop.server.charges) == 1


@POSIX
def test_signal_between_polls_is_prompt(shop: Shop) -> None:
    shop.server.reads_to_finish = 10**9
    running = shop.start(shop.rows(*clips(1)))
    until(lambda: shop.server.gets)
    begin = time.monotonic()
    running.send(signal.SIGTERM)
    assert running.wait() == 143
    assert time.monotonic() - begin < 3
    assert "still running at Sume" in running.err


# -- edits and lost ledgers (B03, B06, B18) --


def test_one_key_through_faults_and_an_edit_is_refused(desk: Desk) -> None:
    """B03: three POSTs, one key; after the edit nothing is sent."""
    desk.add({"id": "r1", "prompt": "first"})
    desk.server.submits.append(Reply(429, error("rate_limit_exceeded")))
    desk.server.submits.append(Reply(503, error("unavailable")))
    desk.run()
    assert len(desk.server.posts) == 3
    assert len({(post.key, post.body) for post in desk.server.posts}) == 1
    with pytest.raises(InputError, match="r1"):
        desk.add({"id": "r1", "prompt": "second"})
    desk.run()
    assert len(desk.server.posts) == 3


@FILE_ONLY
@POSIX
def test_edit_while_the_outcome_is_unknown(shop: Shop, hold: Callable[..., Hold]) -> None:
    """B06: the old body is settled, the new one refused by the row's name."""
    held = hold()
    running = shop.start(shop.rows(*clips(1)))
    assert held.held.wait(15)
    running.send(signal.SIGKILL)
    running.wait()
    refused = shop.run(shop.rows(clips(1)[0] | {"duration": 8}))
    assert refused.returncode == 2
    assert b"'r1'" in refused.stderr
    assert shop.run().returncode == 0
    held.release.set()
    assert len({post.body for post in shop.server.posts}) == len(shop.server.charges) == 1
    assert shop.jobs()["r1"].duration_s == 4


@pytest.fixture
def lost(shop: Shop, hold: Callable[..., Hold]) -> tuple[list[str], str]:
    """A run with a namespace was killed after 2 of 3 submits, and its ledger is lost.

    Returns the keys it made and what the next run said.
    """
    held = hold(3, make_first=False)
    args = (shop.rows(*clips(3)), "--namespace", "build-42")
    running = shop.start(*args, "--concurrency", "2")
    assert held.held.wait(15)
    running.send(signal.SIGKILL)
    running.wait()
    before = [job.key for job in shop.jobs().values()]
    for path in shop.folder.glob("jobs.db*"):
        path.unlink()
    done = shop.run(*args)
    held.release.set()
    assert done.returncode == 0
    return before, done.stderr.decode()


@FILE_ONLY
@POSIX
def test_lost_ledger_with_a_namespace_buys_nothing_twice(
    shop: Shop, lost: tuple[list[str], str]
) -> None:
    """B18."""
    assert [job.key for job in shop.jobs().values()] == lost[0]
    assert len(shop.server.charges) == 3


@FILE_ONLY
@POSIX
def test_lost_ledger_with_a_namespace_counts_what_sume_knew(lost: tuple[list[str], str]) -> None:
    """B18: the output says how many were recognised."""
    assert re.search(r"\b2\b.*(known|already|existing)", lost[1])


def test_namespace_mismatch_is_exit_2(shop: Shop) -> None:
    shop.run(shop.rows(*clips(1)), "--namespace", "build-42")
    done = shop.run(shop.rows(*clips(2)), "--namespace", "build-43")
    assert done.returncode == 2
    assert b"build-42" in done.stderr
    assert set(shop.jobs()) == {"r1"}


@pytest.mark.parametrize("bad", ["../me", "a/b?x=1", "a#b", "", "a b", "x" * 2000, "\u0661"])
def test_odd_job_id_calls_no_other_route(desk: Desk, bad: str) -> None:
    """B33: it is no id, or it stays one segment."""
    desk.add(*clips(1))
    desk.server.on_submit = Reply(202, {"data": {"job": {"id": bad}}})
    desk.run(deadline_s=600)
    assert desk.job().job_id is None
    assert desk.server.gets == []
    assert {post.path for post in desk.server.posts} == {"/v1/videos"}


# -- hostile text, odd consoles --


def echo_error(job: FakeJob) -> dict[str, Any]:
    return failed(job) | {"error": {"code": "bad", "message": HOSTILE}}


def assert_inert(text: bytes) -> None:
    assert b"\x1b" not in text
    assert b"\x07" not in text
    assert not re.search("[\x80-\x9f\u202a-\u202e\u2066-\u2069]", text.decode("utf-8", "replace"))
    assert b"Traceback" not in text


@pytest.mark.parametrize(
    "env",
    [{}, {"PYTHONIOENCODING": "cp1252"}, {"PYTHONIOENCODING": "ascii", "TERM": "dumb"}],
    ids=["utf-8", "cp1252", "ascii and dumb"],
)
def test_text_from_outside_is_inert(shop: Shop, env: dict[str, str]) -> None:
    """B32: whatever a prompt or a server says, no cursor moves and no console breaks."""
    shop.server.submits.append(Reply(422, error("bad", HOSTILE)))
    shop.server.submits.append(Reply(409, error("odd", HOSTILE)))
    shop.server.final = echo_error
    rows = [{"id": f"r{n}", "prompt": f"{n} {HOSTILE}", "model": HOSTILE[-9:]} for n in range(3)]
    done = shop.run(shop.rows(*rows), **env)
    assert done.returncode == 4, done.stderr
    table = shop.call("status", **env)
    data = shop.call("status", "--format", "json", **env)
    assert (table.returncode, data.returncode) == (0, 0)
    codec = env.get("PYTHONIOENCODING", "utf-8")
    assert b"[/x] [red]" in table.stdout
    for stream in (done.stdout, done.stderr, table.stdout, table.stderr, data.stdout):
        assert_inert(stream.decode(codec).encode())
    said = [job["prompt"] for job in json.loads(data.stdout)["jobs"]]
    assert said == [row["prompt"] for row in rows]


@pytest.mark.parametrize("name", ["\x1b[2J.jsonl", "a\u202eb.jsonl"])
def test_file_name_is_inert(shop: Shop, name: str) -> None:
    for args in (("add", name), ("run", name), ("status", name)):
        done = shop.invoke(*args)
        assert done.returncode in (2, 8)
        assert_inert(done.stderr)
        assert_inert(done.stdout)


# -- secrets --

ECHO = f"sent Authorization: Bearer {CANARY} and x-api-key: {CANARY}, key {CANARY}"


def spell(style: str) -> bytes:
    """Return an error body that echoes the key, in one of JSON's spellings."""
    text = json.dumps(error("bad", ECHO))
    if style == "slashes":
        text = text.replace("/", "\\/")
    if style == "escapes":
        text = text.replace("-", "\\u002d").replace("/", "\\u002F")
    return text.encode()


def assert_no_canary(shop: Shop, *done: subprocess.CompletedProcess[bytes]) -> None:
    for one in done:
        assert b"CANARY" not in one.stdout + one.stderr, one.stderr
        assert b"Traceback" not in one.stderr
    for name, content in shop.files().items():
        assert "CANARY" not in name
        assert b"CANARY" not in content, name


@pytest.mark.parametrize(
    ("style", "mode"),
    [("plain", "bearer"), ("plain", "x-api-key"), ("slashes", "bearer"), ("escapes", "bearer")],
)
def test_key_that_a_server_echoes_is_nowhere(shop: Shop, mode: str, style: str) -> None:
    body = spell(style)
    page = b"<html>" + ECHO.encode() + b"</html>"
    acts: list[Act] = [Reply(code, body) for code in (400, 409, 422, 500, 202)]
    acts += [Reply(422, page), Reply(202, page)]
    shop.server.submits.extend(acts)

    def final(job: FakeJob) -> Reply:
        said = json.loads(spell("plain"))["error"]
        url = f"https://media.invalid/{job.id}.mp4?token={CANARY}"
        extra = {"url": url, "usage": {"cost": ECHO, "note": ECHO}, "note": ECHO}
        text = json.dumps({"id": job.id, "status": "failed", "error": said} | extra)
        return Reply(200, text.replace("/", "\\/").encode() if style != "plain" else text.encode())

    shop.server.on_read = lambda server, request: (
        final(server.jobs[request.path.split("/")[3]])
        if request.path.split("/")[3] in server.jobs
        else None
    )
    rows = shop.rows(*clips(len(acts) + 2))
    done = shop.run(rows, "--deadline", "0.6s", SUME_API_AUTH_MODE=mode)
    assert done.returncode in (3, 4, 5)
    assert len(shop.server.posts) >= len(acts)
    shop.invoke("add", "--prompt", "one more")
    shop.server.submits.clear()
    shop.server.on_submit = Reply(401, body)
    stopped = shop.run(SUME_API_AUTH_MODE=mode)
    assert stopped.returncode == 5
    shown = [shop.invoke("status"), shop.invoke("status", "--format", "json")]
    assert_no_canary(shop, done, stopped, *shown)


WRONG = {
    "password in the URL": {"SUME_API_BASE_URL": f"https://user:{CANARY}@sume.invalid"},
    "as the URL": {"SUME_API_BASE_URL": CANARY},
    "as the host": {"SUME_API_BASE_URL": f"http://{CANARY}.invalid"},
    "in the query": {"SUME_API_BASE_URL": f"https://sume.invalid/?key={CANARY}"},
    "with a space": {"SUME_API_KEY": f"{CANARY} {CANARY}"},
    "with a line end": {"SUME_API_KEY": f"{CANARY}\nx"},
    "as the mode": {"SUME_API_AUTH_MODE": CANARY},
    "in a proxy": {
        "SUME_API_BASE_URL": "https://sume.invalid",
        "HTTPS_PROXY": f"nonsense://u:{CANARY.replace('/', '')}@proxy.invalid",
    },
}


@pytest.mark.parametrize("env", WRONG.values(), ids=WRONG)
def test_key_in_a_wrong_setting_is_nowhere(shop: Shop, env: dict[str, str]) -> None:
    done = shop.invoke("run", shop.rows(*clips(1)), "--deadline", "0.5s", **env)
    assert done.returncode == 2, done.stderr
    assert b"canary" not in done.stderr.lower()
    assert_no_canary(shop, done)


def test_key_is_nowhere_after_failures_of_the_connection(shop: Shop) -> None:
    with closed_port() as port:
        url = f"http://127.0.0.1:{port}"
        offline = shop.run(shop.rows(*clips(1)), "--deadline", "0.5s", SUME_API_BASE_URL=url)
    location = {"Location": f"https://x.invalid/?token={CANARY}"}
    shop.server.submits.append(Reply(307, b"", location))
    moved = shop.run("clips.jsonl")
    assert (offline.returncode, moved.returncode) == (3, 5)
    assert_no_canary(shop, offline, moved)


@FILE_ONLY
@POSIX
def test_key_is_nowhere_after_a_kill(shop: Shop, hold: Callable[..., Hold]) -> None:
    """Not in the lock, the journal, nor the ledger of a run that died or was refused."""
    held = hold()
    running = shop.start(shop.rows(*clips(1)))
    assert held.held.wait(15)
    refused = shop.run("clips.jsonl")
    assert refused.returncode == 7
    assert_no_canary(shop, refused)
    running.send(signal.SIGKILL)
    running.wait()
    held.release.set()
    assert "jobs.db.lock" in shop.files()
    assert_no_canary(shop)
    assert "CANARY" not in running.err


# -- connection settings --


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_base_url_with_or_without_v1(shop: Shop, suffix: str) -> None:
    url = shop.server.url + suffix
    assert shop.run(shop.rows(*clips(1)), SUME_API_BASE_URL=url).returncode == 0
    assert shop.server.posts[0].path == "/v1/videos"
    assert shop.server.gets[0].path.startswith("/v1/videos/job_")


@pytest.mark.parametrize("mode", ["bearer", "x-api-key", " X-API-Key "])
def test_auth_mode_sends_its_header_alone(shop: Shop, mode: str) -> None:
    assert shop.run(shop.rows(*clips(1)), SUME_API_AUTH_MODE=mode).returncode == 0
    for request in shop.server.requests:
        bearer, plain = request.headers.get("authorization"), request.headers.get("x-api-key")
        assert (bearer, plain) == (
            (f"Bearer {CANARY}", None) if mode == "bearer" else (None, CANARY)
        )


@pytest.mark.parametrize(
    "url",
    [
        "http://api.sume.com",
        "http://127.0.0.1.sume.invalid",
        "http://localhost.sume.invalid",
        "http://127.0.0.1@sume.invalid",
        "http://sume.invalid#@127.0.0.1",
        "http://0.0.0.0:80",
        "http://10.0.0.1",
        "http://[::1",
        "http://[::2]",
        "http://2130706433",
        "ftp://127.0.0.1",
        "api.sume.com",
        "https://",
        "https://u:p@sume.invalid",
        "https://sume.invalid?x=1",
        "https://sume.invalid:port",
    ],
)
def test_base_url_that_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="SUME_API_BASE_URL"):
        account_from({"SUME_API_KEY": "k", "SUME_API_BASE_URL": url})


@pytest.mark.parametrize(
    ("url", "base", "origin"),
    [
        ("", "https://api.sume.com/v1", "https://api.sume.com"),
        ("https://sume.invalid:443/", "https://sume.invalid/v1", "https://sume.invalid"),
        ("https://SUME.invalid/v1/", "https://sume.invalid/v1", "https://sume.invalid"),
        ("https://h.invalid:8443/p", "https://h.invalid:8443/p/v1", "https://h.invalid:8443"),
        ("http://localhost:80", "http://localhost/v1", "http://localhost"),
        ("http://127.0.0.9:8080", "http://127.0.0.9:8080/v1", "http://127.0.0.9:8080"),
        ("http://[::1]:8080/v1", "http://[::1]:8080/v1", "http://[::1]:8080"),
    ],
)
def test_base_url_that_is_taken(url: str, base: str, origin: str) -> None:
    account = account_from({"SUME_API_KEY": CANARY, "SUME_API_BASE_URL": url})
    assert (account.base_url, account.origin) == (base, origin)
    assert CANARY not in repr(account)


def test_clear_text_to_another_host_makes_nothing(shop: Shop) -> None:
    shop.rows(*clips(1))
    before = shop.files()
    done = shop.run("clips.jsonl", SUME_API_BASE_URL="http://sume.invalid")
    assert done.returncode == 2
    assert b"https://" in done.stderr
    assert shop.files() == before


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_proxy_is_never_used_for_loopback(shop: Shop, host: str) -> None:
    with FakeSume() as proxy:
        names = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY")
        url = shop.server.url.replace("127.0.0.1", host)
        env = dict.fromkeys(names, proxy.url) | {"SUME_API_BASE_URL": url}
        done = shop.run(shop.rows(*clips(2)), **env)
        assert proxy.requests == []
    assert done.returncode == 0, done.stderr
    assert len(shop.server.charges) == 2


BROKEN = {
    "proxy of no kind": {"HTTPS_PROXY": "nonsense://proxy.invalid"},
    "proxy that is no URL": {"HTTPS_PROXY": "http://[::1"},
    "proxy that needs a package": {"ALL_PROXY": "socks5://127.0.0.1:1"},
    "missing certificates": {"SSL_CERT_FILE": "absent.pem"},
    "certificates that are none": {"SSL_CERT_FILE": "clips.jsonl"},
}


def run_broken(shop: Shop, env: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    args = ("run", "clips.jsonl", "--deadline", "0.5s")
    return shop.invoke(*args, SUME_API_BASE_URL="https://sume.invalid", **env)


@pytest.mark.parametrize("env", BROKEN.values(), ids=BROKEN)
def test_broken_connection_setting_is_one_clean_line(shop: Shop, env: dict[str, str]) -> None:
    shop.rows(*clips(1))
    done = run_broken(shop, env)
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"SSL_CERT_FILE" in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith(b"error: ")]
    assert len(errors) == 1
    assert done.stderr.splitlines()[-1] == errors[0]


@pytest.mark.parametrize("env", BROKEN.values(), ids=BROKEN)
def test_broken_connection_setting_changes_nothing(shop: Shop, env: dict[str, str]) -> None:
    """Exit 2 says so: no row is added, no ledger is made."""
    shop.rows(*clips(1))
    before = shop.files()
    run_broken(shop, env)
    assert shop.files() == before


# -- help --


COMMANDS = ["add", "audit", "backup", "cancel", "drill", "resolve", "retry", "run", "status"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_an_example(shop: Shop, command: str) -> None:
    done = shop.invoke(command, "--help")
    assert done.returncode == 0
    assert f"sume-resume {command}" in done.stdout.decode().partition("Example")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_a_line_for_each_exit_code(shop: Shop, command: str) -> None:
    lines = [line.strip() for line in shop.invoke(command, "--help").stdout.decode().splitlines()]
    assert "Exit codes:" in lines
    for code, meaning in exit_codes().items():
        assert f"{code}  {meaning}" in lines


def exit_codes() -> dict[str, str]:
    lines = sume_resume.EXIT_CODES.splitlines()
    found = (re.fullmatch(r"\s+([0-9][0-9, ]*?)\s{2,}(.+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def test_help_of_the_whole_names_every_command_and_code(shop: Shop) -> None:
    text = shop.invoke("--help").stdout.decode()
    assert all(f"  {command} " in text for command in COMMANDS)
    assert "Exit codes" in text
    assert len(exit_codes()) >= 9


def test_version(shop: Shop) -> None:
    done = shop.invoke("--version")
    assert done.returncode == 0
    assert done.stdout.decode().strip() == f"sume-resume {sume_resume.__version__}"


@pytest.mark.parametrize("args", [("--help",), ("run", "--help"), ("run", "--nonsense")])
def test_help_and_usage_never_show_a_secret(shop: Shop, args: tuple[str, ...]) -> None:
    done = shop.invoke(*args)
    assert done.returncode in (0, 2)
    assert_no_canary(shop, done)
    assert shop.files() == {}
