"""What programs read: events, formats, plans, queries; and what a terminal is asked and shown."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import POSIX, QUICK, SCRIPT, START_MS, Desk, Shop, clips, until
from servers import FakeJob, Reply, drop_after, error, finished

import sume_resume
from sume_resume import Status

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
HOSTILE = 'a \x1b]0;t\x07 \x1b[2J \x9b2J [/x] [red] \u202e\u2066b \u2028 日本 é, "q"\r\n=1+1'


# -- events --


def documented() -> dict[str, set[str]]:
    """Return the events that the README lists, each with its fields."""
    table = README.partition("<!-- the events -->")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines()[3:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[0].strip("`")] = set(re.findall(r"`([a-z_0-9]+)`", cells[2]))
    return found


JOB_FIELDS = {
    "row", "key", "job_id", "kind", "model", "duration", "prompt", "status", "sume_status",
    "cost_usd", "attempt", "note", "outputs",
}  # fmt: skip
SUMMARY_FIELDS = {
    "run": {
        "exit_code",
        "totals",
        "why",
        "by_status",
        "not_in_file",
        "known_to_sume",
        "not_downloaded",
        "downloads_cut",
    },
    "plan": {
        "exit_code",
        "would_send",
        "would_replay",
        "would_review",
        "beyond_limit",
        "not_in_file",
    },
    "cancel": {"exit_code", "totals", "refused"},
    "other": {"exit_code", "totals"},
    "error": {"exit_code"},
    "drill": {"exit_code", "lines", "failed"},
    "audit": {"exit_code", "totals", "flagged", "not_compared", "unknown_to_sume"},
}


def events_of(done: subprocess.CompletedProcess[bytes], kind: str) -> list[dict[str, Any]]:
    """Read the events of a command, and check them against what the README says."""
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    known = documented()
    for event in lines[:-1]:
        type, fields = event["type"], set(event) - {"type"}
        if type == "job":
            assert fields - {"attempts"} == JOB_FIELDS
        else:
            assert fields == known[type], type
    assert lines[-1]["type"] == "summary"
    assert lines[-1]["exit_code"] == done.returncode
    assert set(lines[-1]) - {"type"} == SUMMARY_FIELDS[kind]
    assert [line["type"] for line in lines].count("summary") == 1
    return lines


def test_events_of_the_readme_are_read_right() -> None:
    known = documented()
    assert known["added"] == {"new", "existing", "replaced"}
    assert {"row", "job", "summary", "error", "notice", "progress"} <= set(known)
    text = README.partition("## Events for programs")[2].partition("## Settings")[0]
    named = set(re.findall(r"`([a-z_]+)`", text))
    for fields in SUMMARY_FIELDS.values():
        assert fields <= named


def test_every_event_is_as_documented_and_every_documented_one_is_seen(
    shop: Shop, desk: Desk
) -> None:
    seen: Counter[str] = Counter()

    def take(done: subprocess.CompletedProcess[bytes], kind: str) -> list[dict[str, Any]]:
        lines = events_of(done, kind)
        seen.update(line["type"] for line in lines)
        return lines

    shop.server.submits.extend([Reply(409, error("strange")), Reply(422, error("bad"))])
    shop.server.final = lambda job: (
        finished(job) | {"status": "failed"} if b"clip 3" in job.body else finished(job)
    )
    shop.rows(*clips(5))
    plan = take(shop.invoke("run", "clips.jsonl", "--dry-run", "--json", "--limit", "4"), "plan")
    assert [line["row"] for line in plan[:-1]] == ["r1", "r2", "r3", "r4"]
    assert plan[-1]["beyond_limit"] == 1
    take(shop.invoke("add", "clips.jsonl", "--json"), "other")
    ran = take(shop.run("clips.jsonl", "--json", "--limit", "4", "--concurrency", "2"), "run")
    assert ran[-1]["exit_code"] == 4
    assert ran[-1]["by_status"] == {
        **dict.fromkeys(map(str, Status), 0),
        "review": 1,
        "rejected": 1,
        "failed": 1,
        "completed": 1,
        "queued": 1,
    }
    states = [line["status"] for line in ran if line["type"] == "row" and line["row"] == "r4"]
    assert states[0] == "sending"
    assert states[-1] == "completed"
    take(shop.invoke("status", "--json"), "other")
    named = take(shop.invoke("status", "r1", "--json"), "other")
    history = named[0]["attempts"][0]["history"]
    assert [fact["event"] for fact in history] == ["added", "prepared", "review"]
    assert set(history[0]) == {"at_ms", "event", "before", "after", "detail"}
    take(shop.invoke("retry", "r3", "--yes", "--json"), "other")
    take(shop.invoke("resolve", "r1", "--drop", "--yes", "--json"), "other")
    take(shop.invoke("backup", "b.db", "--json"), "other")
    take(shop.invoke("cancel", "r5", "--yes", "--json"), "cancel")
    # A send without an answer, and a job that is open.
    shop.server.submits.append(drop_after)
    shop.server.reads_to_finish = 10**9
    shop.run("--json", "--deadline", "0.3s")
    shop.server.cancels.append(Reply(409, error("job_generation_already_started")))
    shop.rows({"id": "open", "prompt": "open."}, name="more.jsonl")
    running = shop.start("more.jsonl")
    until(lambda: "open" in shop.jobs() and shop.jobs()["open"].job_id)
    running.send(signal.SIGKILL)
    running.wait()
    take(shop.call("cancel", "open", "--yes", "--json"), "cancel")
    take(shop.invoke("retry", "nobody", "--json"), "error")
    seen.update(progress_and_replay(desk))
    # test_drill, test_money, test_download and test_workers look at those of theirs.
    elsewhere = {"drill", "line", "audited", "unread", "other_job", "file", "moved"}
    assert set(seen) == set(documented()) - elsewhere


def progress_and_replay(desk: Desk) -> list[str]:
    """Return the types of the events that need a clock or a lost answer."""
    told: list[tuple[str, set[str]]] = []
    log = sume_resume.JsonLog(lambda type, **facts: told.append((type, set(facts))))
    log._spoke_s -= sume_resume.HEARTBEAT_S
    log(sume_resume.Tick(START_MS, "rate limit, 5s"))
    log(sume_resume.Tick(START_MS, None))
    assert told == [("progress", documented()["progress"])]
    desk.server.on_submit = drop_after
    desk.add(*clips(1))
    desk.run(deadline_s=1)
    seen = ["progress"]
    for ttl in ("10000d", "2m"):
        plan = desk.command("run", "--dry-run", "--json", "--key-ttl", ttl)
        seen.append(events_of(plan, "plan")[0]["type"])
    return seen


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("run", "absent.jsonl"), 2),
        (("run", "bad.jsonl"), 2),
        (("run", "--nonsense"), 2),
        (("nonsense",), 2),
        (("status", "--db", "absent.db"), 8),
        (("status", "--db", "text.db"), 8),
        (("retry", "r1", "--db", "absent.db"), 8),
        (("backup", "b.db", "--db", "absent.db"), 8),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_errors_are_events_too(shop: Shop, args: tuple[str, ...], code: int) -> None:
    (shop.folder / "bad.jsonl").write_text('{"prompt": 5}\n{"prompt": "a", "duration": "x"}\n')
    (shop.folder / "text.db").write_text("no ledger")
    done = shop.invoke(*args, "--json")
    lines = events_of(done, "error")
    assert [line["type"] for line in lines] == ["error", "summary"]
    assert lines[-1]["exit_code"] == code
    assert lines[0]["text"]
    assert done.stderr


def test_events_hold_no_secret_and_no_cursor(shop: Shop) -> None:
    shop.server.submits.append(
        Reply(422, error("bad", f"{HOSTILE} Bearer {shop.env['SUME_API_KEY']}"))
    )
    done = shop.run(shop.rows({"id": "r1", "prompt": HOSTILE}), "--json")
    assert done.returncode == 1
    for text in (done.stdout, shop.invoke("status", "--json").stdout):
        assert b"CANARY" not in text
        assert not re.search(rb"[^\x20-\x7e\n]", text)


@POSIX
def test_run_whose_events_nobody_reads_goes_on_to_the_end(shop: Shop) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            shop.command("run", shop.rows(*clips(3)), *QUICK, "--json"),
            cwd=shop.folder, env=shop.env, stdout=write, stderr=subprocess.PIPE, timeout=30,
        )  # fmt: skip
    finally:
        os.close(write)
    assert done.returncode == 0, done.stderr
    assert len(shop.server.charges) == 3


@FULL
def test_run_whose_events_find_no_room_goes_on_and_says_so(shop: Shop) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            shop.command("run", shop.rows(*clips(2)), *QUICK, "--json"),
            cwd=shop.folder, env=shop.env, stdout=full, stderr=subprocess.PIPE, timeout=30,
        )  # fmt: skip
    assert done.returncode == 8, done.stderr
    assert b"no more events" in done.stderr
    assert b"Traceback" not in done.stderr
    assert len(shop.server.charges) == 2


def test_interrupted_run_ends_with_its_summary(shop: Shop) -> None:
    shop.server.reads_to_finish = 10**9
    out = shop.logs / "out"
    with open(out, "wb") as file:
        process = subprocess.Popen(
            shop.command("run", shop.rows(*clips(1)), *QUICK, "--json"),
            cwd=shop.folder, env=shop.env, stdout=file, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until(lambda: shop.server.gets)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
    last = json.loads(out.read_bytes().splitlines()[-1])
    assert (last["type"], last["exit_code"]) == ("summary", 143)
    assert last["why"] == "stopped by SIGTERM"


# -- formats --


def test_jsonl_is_the_jobs_of_json(shop: Shop) -> None:
    shop.run(shop.rows(*clips(3)), "--limit", "2")
    whole = json.loads(shop.invoke("status", "--format", "json").stdout)
    lines = shop.invoke("status", "--format", "jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == whole["jobs"]


def test_csv_is_the_jobs_of_json_on_one_line_each(shop: Shop) -> None:
    def final(job: FakeJob) -> dict[str, Any]:
        return finished(job) | {"urls": ["https://m.invalid/a?x=SECRET", "https://m.invalid/b"]}

    shop.server.final = final
    rows: list[dict[str, Any]] = [
        {"id": "r1", "prompt": HOSTILE},
        {"id": 'é, "x"', "prompt": "b", "duration": 4},
    ]
    shop.run(shop.rows(*rows), "--limit", "1")
    text = shop.invoke("status", "--format", "csv").stdout.decode()
    assert len(text.splitlines()) == 3
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e\u2066]", text)
    assert "SECRET" not in text
    header, *found = csv.reader(io.StringIO(text))
    whole = json.loads(shop.invoke("status", "--format", "json").stdout)["jobs"]
    for cells, job in zip(found, whole, strict=True):
        facts = dict(zip(header, cells, strict=True))
        assert facts.pop("urls").split() == [out["url"] for out in job["outputs"]]
        assert facts.pop("files") == ""
        assert facts.pop("prompt") == sume_resume.inert(job["prompt"])
        for name, cell in facts.items():
            assert cell == ("" if job[name] is None else str(job[name]))


@pytest.mark.parametrize("form", ["json", "jsonl", "csv"])
def test_named_rows_in_each_format(shop: Shop, form: str) -> None:
    shop.invoke("add", shop.rows(*clips(3)))
    text = shop.invoke("status", "r2", "r3", "--format", form).stdout.decode()
    assert "clip 2." in text
    assert "clip 3." in text
    assert "clip 1." not in text


@pytest.mark.parametrize(
    "args",
    [
        ("--json", "--format", "json"),
        ("--watch", "--json"),
        ("--watch", "r1"),
        ("--watch", "--format", "csv"),
        ("--format", "yaml"),
    ],
    ids=" ".join,
)
def test_status_that_is_not_clear(shop: Shop, args: tuple[str, ...]) -> None:
    shop.invoke("add", shop.rows(*clips(1)))
    done = shop.invoke("status", *args)
    assert done.returncode == 2
    assert done.stderr


# -- plans --


def test_dry_run_writes_nothing_and_asks_nobody(shop: Shop) -> None:
    rows = [*clips(2), {"id": "p", "prompt": "poster", "kind": "image"}]
    name = shop.rows(*rows)
    before = shop.files()
    done = shop.call("run", name, "--dry-run", "--model", "m", drop=("SUME_API_KEY",))
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines() == [
        "would send 3 rows; nothing was sent or written",
        "  m  2 videos, 8 s",
        "  m  1 image",
        "r1: clip 1.",
        "r2: clip 2.",
        "p: poster",
    ]
    assert shop.files() == before
    assert shop.server.requests == []


def test_dry_run_of_a_ledger_changes_no_byte_of_it(shop: Shop) -> None:
    shop.server.submits.append(Reply(422, error("bad")))
    shop.run(shop.rows(*clips(4)), "--limit", "2", "--concurrency", "2")
    shop.rows({"id": "r1", "prompt": "mended."}, *clips(4)[1:3], {"id": "new", "prompt": "new."})
    before, requests = shop.files(), len(shop.server.requests)
    refused = shop.invoke("run", "clips.jsonl", "--dry-run")
    assert refused.returncode == 2
    assert b"--replace" in refused.stderr
    done = shop.invoke("run", "clips.jsonl", "--dry-run", "--replace")
    assert done.stdout.decode().splitlines() == [
        "would send 3 rows; nothing was sent or written",
        "  sume/auto  3 videos, 4 s",
        "r3: clip 3.",
        "r1: mended.",
        "new: new.",
        "would not be sent, because they are not in the file: 1",
    ]
    assert shop.files() == before
    assert len(shop.server.requests) == requests
    assert shop.run("clips.jsonl", "--replace").returncode == 0
    sent = [json.loads(post.body)["prompt"] for post in shop.server.posts[2:]]
    assert sorted(sent) == ["clip 3.", "mended.", "new."]


@pytest.mark.parametrize("there", [False, True], ids=["no ledger", "ledger"])
def test_dry_run_refuses_what_a_run_refuses(shop: Shop, there: bool) -> None:
    if there:
        shop.invoke("add", shop.rows(*clips(1), name="a.jsonl"), "--namespace", "one")
    shop.rows({"id": "r1", "prompt": 5}, {"id": "r2", "prompt": "x", "duration": 0})
    (shop.folder / "empty.jsonl").write_text("\n")
    before = shop.files()
    for name in ("clips.jsonl", "empty.jsonl", "absent.jsonl"):
        dry, real = (shop.invoke("run", name, *more) for more in (("--dry-run",), ()))
        assert dry.returncode == real.returncode == 2
        assert dry.stderr == real.stderr
    assert shop.files() == before
    if there:
        assert shop.invoke("run", "a.jsonl", "--dry-run", "--namespace", "two").returncode == 2


def test_long_plan_names_the_first_rows(shop: Shop) -> None:
    text = shop.invoke("run", shop.rows(*clips(60)), "--dry-run").stdout.decode()
    assert "… and 40 more" in text
    assert text.count("clip ") == 20


def test_plan_keeps_the_order_of_the_run(desk: Desk) -> None:
    desk.add(*clips(3))
    changed = [{"id": "r1", "prompt": "other.", "duration": 9}, *clips(3)[1:]]
    rows = desk.folder / "c.jsonl"
    rows.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in changed))
    done = desk.command("run", str(rows), "--dry-run", "--replace", "--limit", "1", "--json")
    assert [line["row"] for line in events_of(done, "plan")[:-1]] == ["r1"]
    desk.add(*changed, replace=True)
    desk.run(limit=1)
    assert json.loads(desk.server.posts[0].body)["prompt"] == "other."


def test_plan_says_what_would_need_review(desk: Desk) -> None:
    desk.server.on_submit = drop_after
    desk.add(*clips(1))
    desk.run(deadline_s=1)
    for ttl, type in (("10000d", "would_replay"), ("2m", "would_review")):
        done = desk.command("run", "--dry-run", "--json", "--key-ttl", ttl)
        assert [line["type"] for line in events_of(done, "plan")] == [type, "summary"]
    text = desk.command("run", "--dry-run", "--key-ttl", "2m").stdout.decode()
    assert "r1: may have been bought, and would need review" in text


def test_plan_of_a_ledger_of_another_account_is_refused(desk: Desk) -> None:
    desk.add(*clips(2))
    desk.run(limit=1)
    assert desk.command("run", "--dry-run", SUME_API_KEY="another").returncode == 5
    assert desk.command("run", "--dry-run", "--simulate").returncode == 5
    adopted = desk.command("run", "--dry-run", "--adopt-account", SUME_API_KEY="another")
    assert adopted.returncode == 0
    assert desk.command("run", "--dry-run", SUME_API_KEY=None).returncode == 0


def test_plan_of_many_models_takes_no_time(shop: Shop) -> None:
    rows = [{"prompt": "p", "model": f"m{n}"} for n in range(20_000)]
    begin = time.process_time()
    done = shop.invoke("run", shop.rows(*rows), "--dry-run")
    assert done.returncode == 0
    # Models times rows would take half a minute.
    assert time.process_time() - begin < 8


def test_plan_after_another_base_url(desk: Desk) -> None:
    """What was sent elsewhere would go to review, as the run does it."""
    desk.server.on_submit = drop_after
    desk.add(*clips(1))
    desk.run(deadline_s=1)
    args = ("run", "--dry-run", "--json", "--key-ttl", "10000d")
    done = desk.command(*args, SUME_API_BASE_URL="http://127.0.0.1:1")
    assert [line["type"] for line in events_of(done, "plan")] == ["would_review", "summary"]


# -- output that finds no room --


@FULL
@pytest.mark.parametrize(
    "args",
    [("status",), ("status", "r1"), ("status", "--format", "json"), ("status", "--json"),
     ("run", "--dry-run"), ("--version",)],
    ids=" ".join,
)  # fmt: skip
def test_output_that_is_lost_is_no_success(shop: Shop, args: tuple[str, ...]) -> None:
    shop.invoke("add", shop.rows(*clips(1)))
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            shop.command(*args), cwd=shop.folder, env=shop.env, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 8, done.stderr
    assert len(done.stderr.splitlines()) == 1


@POSIX
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_before_a_command_began(shop: Shop, signum: int) -> None:
    """While the command line is built there is no boundary yet; still no traceback leaves."""
    stop = f"import os, sume_resume as s; s.app = lambda **k: os.kill(os.getpid(), {signum})"
    start = f"{stop}\nimport signal; signal.signal({signum}, signal.default_int_handler if"
    start += f" {signum} == 2 else signal.SIG_DFL)\ns.main()"
    done = subprocess.run(
        [sys.executable, "-c", start, "status"], cwd=shop.folder,
        env=shop.env | {"PYTHONPATH": str(SCRIPT.parent)}, capture_output=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 128 + signum, done.stderr
    assert b"Traceback" not in done.stderr


@POSIX
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_signal_outside_a_run_cleans_up_and_says_so(shop: Shop, signum: int) -> None:
    """An add that is stopped in the middle leaves nothing, and its last line is the summary."""
    out = shop.logs / "out"
    stop = f"import os, sume_resume as s; s.canonical = lambda v: os.kill(os.getpid(), {signum})"
    with open(out, "wb") as file:
        start = f"{stop}\ns.main()"
        done = subprocess.run(
            [sys.executable, "-c", start, "add", shop.rows(*clips(1)), "--json"],
            cwd=shop.folder, env=shop.env | {"PYTHONPATH": str(SCRIPT.parent)},
            stdout=file, stderr=subprocess.PIPE, timeout=30,
        )  # fmt: skip
    assert done.returncode == 128 + signum, done.stderr
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert [line["type"] for line in lines] == ["error", "summary"]
    assert set(shop.files()) == {"clips.jsonl"}


# -- the README's queries and its recipe --


def queries() -> list[str]:
    block = README.partition("<!-- the queries -->")[2].partition("```sql\n")[2].partition("```")[0]
    return [text.strip() for text in block.split(";") if text.strip()]


@pytest.mark.parametrize("query", queries())
def test_queries_of_the_readme_run(tmp_path: Path, query: str) -> None:
    copy = tmp_path / "example.db"
    copy.write_bytes((Path(SCRIPT).parent / "jobs.example.db").read_bytes())
    with contextlib.closing(sqlite3.connect(copy)) as db:
        if "'review'" in query:
            db.execute("UPDATE jobs SET status = 'rejected' WHERE status = 'queued'")
        assert db.execute(query).fetchall()


def test_readme_names_every_column() -> None:
    assert len(queries()) >= 5
    table = README.partition("| table | a line is |")[2].partition("\n\n")[0]
    db = sqlite3.connect(SCRIPT.parent / "jobs.example.db")
    names = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    for (name,) in names:
        line = next(line for line in table.splitlines() if line.startswith(f"| `{name}`"))
        columns = [column[1] for column in db.execute(f"PRAGMA table_info({name})")]
        assert set(re.findall(r"`([a-z_0-9]+)`", line)) == {name, *columns}
    db.close()


def test_namespace_of_the_recipe_is_taken(shop: Shop) -> None:
    recipe = README.partition("### GitHub Actions")[2].partition("### On a laptop")[0]
    for part in ("repository", "workflow", "job ", "matrix.batch", "run_id"):
        assert part in recipe.partition("NAMESPACE: ")[2].partition("\n")[0]
    assert "exec sume-resume run" in recipe
    assert recipe.index("sume-resume status") < recipe.index("actions/cache/save")
    name = "owner-of-some-length/a-repository/Buy the clips (nightly)/buy/harbour/12345678901"
    done = shop.invoke("add", shop.rows(*clips(1)), "--namespace", name)
    assert done.returncode == 0, done.stderr


# -- commands that are said name the ledger --


def test_commands_that_are_said_name_a_ledger_of_another_name(shop: Shop) -> None:
    shop.server.submits.append(Reply(409, error("strange")))
    done = shop.run(shop.rows(*clips(1)), "--db", "my clips.db")
    assert b"sume-resume status --db 'my clips.db' ROW" in done.stderr
    card = shop.invoke("status", "r1", "--db", "my clips.db").stdout.decode()
    assert "sume-resume resolve --db 'my clips.db' --job-id ID r1" in card
    refused = shop.invoke("retry", "r1", "--db", "my clips.db")
    assert b"sume-resume resolve --db 'my clips.db'" in refused.stderr
    by_env = shop.invoke("retry", "r1", SUME_RESUME_DB="my clips.db")
    assert b"sume-resume resolve --job-id" in by_env.stderr


# -- completion --


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_of_each_shell(shell: str) -> None:
    env = os.environ | {"_SUME_RESUME_COMPLETE": f"source_{shell}"}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert b"sume-resume" in done.stdout
    assert b"_SUME_RESUME_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sume-resume ", {"add", "run", "status", "retry", "cancel", "resolve", "backup"}),
        ("sume-resume re", {"retry", "resolve"}),
        ("sume-resume resolve --", {"--job-id", "--resend", "--drop", "--yes", "--db", "--json"}),
        ("sume-resume run --re", {"--replace", "--reads-per-minute"}),
    ],
)
def test_completion_completes(words: str, expected: set[str]) -> None:
    env = os.environ | {
        "_SUME_RESUME_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, timeout=30)
    assert expected <= set(done.stdout.decode().split())


# -- questions, and --watch, on a real terminal --


class Terminal:
    """A command on a pty: what it writes can be waited for, and it can be typed at."""

    def __init__(
        self, args: list[str], folder: Path, env: dict[str, str], size: tuple[int, int]
    ) -> None:
        import pty

        self.outer, inner = pty.openpty()
        self._inner = inner
        self.resize(*size)
        keep = {
            n: v for n, v in os.environ.items() if not n.startswith(("SUME_", "COLUMNS", "LINES"))
        }
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *args],
            cwd=folder, env=keep | {"TERM": "xterm-256color"} | env,
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
        )  # fmt: skip
        self.seen = b""

    def resize(self, lines: int, columns: int) -> None:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(self._inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, text: bytes) -> None:
        end = time.monotonic() + 15
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            self._read(0.1)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self.outer], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self.outer, 65536)
        except OSError:
            return False
        self.seen += data
        return bool(data)

    def type(self, text: bytes) -> None:
        os.write(self.outer, text)

    def end(self) -> int:
        code = self.process.wait(15)
        os.close(self._inner)
        while self._read(0.2):
            pass
        os.close(self.outer)
        return code


@pytest.fixture
def failed_row(shop: Shop) -> Shop:
    shop.server.final = lambda job: finished(job) | {"status": "failed"}
    shop.run(shop.rows(*clips(1)))
    return shop


@POSIX
@pytest.mark.parametrize(
    ("answer", "code", "attempt"),
    [(b"y\n", 0, 2), (b"n\n", 2, 1), (b"\n", 2, 1), (b"\x03", 130, 1)],
)
def test_question_on_a_terminal(failed_row: Shop, answer: bytes, code: int, attempt: int) -> None:
    shop = failed_row
    terminal = Terminal(["retry", "r1"], shop.folder, shop.env, (24, 80))
    terminal.wait_for(b"[y/N]")
    if answer == b"\x03":
        os.killpg(terminal.process.pid, signal.SIGINT)
    else:
        terminal.type(answer)
    assert terminal.end() == code, terminal.seen
    assert b"'r1'" in terminal.seen
    assert b"Traceback" not in terminal.seen
    assert shop.jobs()["r1"].attempt == attempt


@POSIX
def test_watch_on_a_terminal_follows_the_ledger_to_its_end(shop: Shop) -> None:
    shop.invoke("add", shop.rows(*clips(2)))
    terminal = Terminal(["status", "--watch"], shop.folder, shop.env, (24, 100))
    terminal.wait_for(b"0 of 2 rows final")
    terminal.resize(10, 60)
    assert shop.run().returncode == 0
    terminal.wait_for(b"2 of 2 rows final")
    assert terminal.end() == 0
    assert re.findall(rb"\x1b\[\?25[hl]", terminal.seen)[-1] == b"\x1b[?25h"


@POSIX
def test_watch_ends_by_a_key_and_gives_the_cursor_back(shop: Shop) -> None:
    shop.invoke("add", shop.rows(*clips(2)))
    terminal = Terminal(["status", "--watch"], shop.folder, shop.env, (24, 100))
    terminal.wait_for(b"0 of 2 rows final")
    terminal.type(b"\x03")
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == 130
    assert re.findall(rb"\x1b\[\?25[hl]", terminal.seen)[-1] == b"\x1b[?25h"
    assert b"Traceback" not in terminal.seen


def test_watch_in_a_pipe_has_a_line_per_change(shop: Shop) -> None:
    shop.invoke("add", shop.rows(*clips(2)))
    out = shop.logs / "out"
    with open(out, "wb") as file:
        process = subprocess.Popen(
            shop.command("status", "--watch"), cwd=shop.folder, env=shop.env, stdout=file
        )
        until(lambda: b"2 queued" in out.read_bytes())
        assert shop.run().returncode == 0
        assert process.wait(15) == 0
    lines = out.read_bytes().splitlines()
    assert lines[-1].startswith(b"2 completed")
    assert len(lines) == len(set(lines))


@POSIX
def test_window_that_changes_its_size_in_mid_run(shop: Shop) -> None:
    """Wide, narrow, tiny and wide again: the run ends, and no line is wider than its window."""
    shop.server.reads_to_finish = 12
    rows = shop.rows(*clips(6))
    terminal = Terminal(
        ["run", rows, *QUICK[2:], "--poll-interval", "0.1s"], shop.folder, shop.env, (30, 200)
    )
    terminal.wait_for(b"job id")
    for size in ((24, 80), (12, 40), (5, 20), (24, 80)):
        seen = len(terminal.seen)
        terminal.resize(*size)
        terminal.process.send_signal(signal.SIGWINCH)
        until(lambda seen=seen: terminal._read(0.05) and len(terminal.seen) > seen)  # type: ignore[misc]
    assert terminal.end() == 0, terminal.seen
    assert b"6 completed" in terminal.seen
    assert b"Traceback" not in terminal.seen


@POSIX
def test_events_on_the_terminal_that_shows_the_run(shop: Shop) -> None:
    """With both streams on one terminal the events stand alone: no table is drawn over them."""
    terminal = Terminal(
        ["run", shop.rows(*clips(2)), *QUICK, "--json"], shop.folder, shop.env, (24, 200)
    )
    assert terminal.end() == 0
    assert b"\x1b" not in terminal.seen
    lines = [line for line in terminal.seen.splitlines() if line.startswith(b"{")]
    assert json.loads(lines[-1])["exit_code"] == 0
