"""What a person sees: tables, the live view, the plain log, and a real terminal."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import child
import pytest
from conftest import START_MS, Desk, jsonl
from rich.cells import cell_len
from rich.console import Console
from servers import FakeSume, Request, drop_after

import sume_resume
from sume_resume import (
    FINAL,
    Changed,
    Job,
    LiveTable,
    Notice,
    PlainLog,
    RunView,
    Started,
    Status,
    Tick,
    Totals,
    jobs_table,
    status_json,
    totals_line,
)

SCRIPT = Path(sume_resume.__file__).resolve()
HOSTILE = "a \x1b]0;t\x07 \x1b[2J \x9b2J [/x] [red]r[/red] \u202e\u2066b \r\n\t日本語 é"
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)")


def job(number: int = 1, status: Status = Status.IN_PROGRESS, **more: Any) -> Job:
    prompt = more.pop("prompt", f"clip {number}.")
    facts: dict[str, Any] = {
        "id": number, "row": f"r{number}", "attempt": 1, "latest": 1, "key": f"sr-{number}",
        "job_id": f"job_{number}", "kind": "video", "model": "sume/auto", "duration_s": 4,
        "own": "{}", "body": json.dumps({"prompt": prompt}).encode(), "source": "x:1",
        "status": status, "sume_status": None, "cost_micros": None, "cost_state": None,
        "usage": None, "tries": 1, "first_sent_at": START_MS, "accepted_at": START_MS,
        "finished_at": START_MS + 90_000 if status in FINAL else None,
        "next_poll_at": None, "poll_errors": 0, "trouble": None, "note": None,
        "created_at": START_MS, "updated_at": START_MS,
    }  # fmt: skip
    return Job(**facts | more)


def console(width: int, height: int = 24, terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=terminal,
        highlight=False,
        legacy_windows=False,
        _environ={"TERM": "xterm-256color"},
    )


def written(made: Console) -> str:
    assert isinstance(made.file, io.StringIO)
    return made.file.getvalue()


def shown(renderable: Any, width: int, terminal: bool = False) -> str:
    made = console(width, terminal=terminal)
    made.print(renderable)
    return written(made)


def plain(text: str) -> str:
    return ESCAPES.sub("", text)


WIDTHS = [10, 40, 80, 200]
BOTH = pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])


# -- the table --


@BOTH
@pytest.mark.parametrize("width", [1, 5, *WIDTHS])
def test_table_of_every_status_fits_every_width(width: int, terminal: bool) -> None:
    jobs = [job(n, status, note="why " * 40) for n, status in enumerate(Status, 1)]
    text = shown(jobs_table(jobs, START_MS, width), width, terminal)
    assert all(cell_len(line) <= width for line in plain(text).splitlines())
    if width >= 40:
        assert all(status in text for status in Status)
        assert all(f"r{n}" in text for n in range(1, 11))


def test_every_status_has_a_style_and_a_place() -> None:
    assert set(sume_resume.STYLES) == set(Status)
    for status in Status:
        counts = Totals(Counter({status: 3}))
        assert f"3 {status}" in totals_line(counts).plain
        view = RunView()
        view.follow(Started(counts, [job(1, status)], START_MS))
        assert [shown_job.status for shown_job in view.rows(5)] == [status]


def test_wide_table_names_everything() -> None:
    one = job(1, Status.COMPLETED, cost_micros=123_456, note="Sume says: so")
    text = shown(jobs_table([one], START_MS, 200), 200)
    for name in ("row", "prompt", "job id", "model", "seconds", "status", "age", "cost"):
        assert name in text
    for cell in ("r1", "clip 1.", "job_1", "sume/auto", "completed", "90s", "$0.123456", "so"):
        assert cell in text


def test_narrow_table_keeps_row_status_and_cost() -> None:
    one = job(1, Status.COMPLETED, cost_micros=123_456)
    text = shown(jobs_table([one], START_MS, 40), 40)
    for cell in ("r1", "completed", "$0.123456"):
        assert cell in text


@BOTH
@pytest.mark.parametrize("width", WIDTHS)
def test_text_from_outside_is_inert_in_the_table(width: int, terminal: bool) -> None:
    row = "日本" * 40
    one = job(row=row, prompt=HOSTILE, note=HOSTILE, model=HOSTILE, job_id="job_[red]x[/red]")
    text = plain(shown(jobs_table([one], START_MS, width), width, terminal))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert all(cell_len(line) <= width for line in text.splitlines())
    if width == 200:
        assert "[/x] [red]r" in text
        assert "job_[red]x[/red]" in text


def test_table_of_nothing_is_no_crash() -> None:
    assert "status" in shown(jobs_table([], START_MS, 80), 80)


# -- money --


@pytest.mark.parametrize("status", sorted(FINAL))
@pytest.mark.parametrize("width", [40, 200])
def test_unknown_cost_is_shown_as_unknown(status: Status, width: int) -> None:
    one = job(1, status, job_id=None) if status is Status.REJECTED else job(1, status)
    text = shown(jobs_table([one], START_MS, width), width)
    assert ("unknown" in text) == (status is not Status.REJECTED)
    assert "$" not in text
    assert "0.0" not in text


def test_unknown_cost_of_a_row_in_review_is_shown() -> None:
    """Its send may have been paid; nobody knows (P4)."""
    one = job(1, Status.REVIEW, job_id=None, accepted_at=None, note="why")
    assert one.cost_unknown
    assert "unknown" in shown(jobs_table([one], START_MS, 200), 200)


def test_cost_of_nothing_is_shown_as_nothing() -> None:
    one = job(1, Status.COMPLETED, cost_micros=0)
    assert "$0.000000" in shown(jobs_table([one], START_MS, 80), 80)
    new = job(2, Status.QUEUED, first_sent_at=None, accepted_at=None, job_id=None)
    text = shown(jobs_table([new], START_MS, 80), 80)
    assert "$" not in text
    assert "unknown" not in text


def test_totals_line_says_what_is_not_known() -> None:
    totals = Totals(Counter({Status.COMPLETED: 3, Status.REVIEW: 1}), 1_234_567, 2, 1)
    text = totals_line(totals).plain
    assert "spent $1.234567 + 2 of unknown cost" in text
    assert "3 completed" in text
    assert "queued" not in text
    assert "unknown" not in totals_line(Totals(Counter(), 0, 0)).plain
    # Nothing known is not nothing spent.
    assert "0.000000" not in totals_line(Totals(Counter(), 0, 2)).plain


@pytest.mark.parametrize(
    ("micros", "text"),
    [(0, "0.000000"), (1, "0.000001"), (1_000_000, "1.000000"), (10**15 + 7, "1000000000.000007")],
)
def test_json_cost_is_a_decimal_string(micros: int, text: str) -> None:
    data = status_json([(job(1, cost_micros=micros), [])], Totals(cost_micros=micros))
    assert data["jobs"][0]["cost_usd"] == data["totals"]["cost_usd"] == text
    assert set(data["totals"]["by_status"]) == set(Status)
    assert status_json([(job(1), [])], Totals())["jobs"][0]["cost_usd"] is None


# -- the live table --


def live(width: int, height: int = 24, terminal: bool = True) -> LiveTable:
    return LiveTable(console(width, height, terminal))


def busy(*others: Status) -> tuple[Totals, list[Job]]:
    """Return 10,000 open rows, and totals in which other statuses are there too."""
    jobs = [job(n, Status.PENDING if n % 3 else Status.IN_PROGRESS) for n in range(1, 10_001)]
    counts = Counter(one.status for one in jobs)
    return Totals(counts + Counter(dict.fromkeys(others, 1000)), 123_456_789, 17), jobs


def lines_of(table: LiveTable, width: int, height: int) -> list[str]:
    made = console(width, height)
    made.print(table.render())
    return [line.rstrip() for line in written(made).splitlines()]


@pytest.mark.parametrize("others", [(), tuple(Status)], ids=["two statuses", "every status"])
@pytest.mark.parametrize("height", [20, 24, 60])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_ten_thousand_open_rows_fit_the_window(
    width: int, height: int, others: tuple[Status, ...]
) -> None:
    table = live(width, height)
    totals, jobs = busy(*others)
    table._view.follow(Started(totals, jobs, START_MS))
    table._view.follow(Changed(job(1), job(1, Status.COMPLETED), START_MS + 60_000))
    table._view.follow(Tick(START_MS + 60_000, "rate limit, 45s"))
    lines = lines_of(table, width, height)
    assert len(lines) <= height
    # Some terminals wrap a full line.
    assert all(cell_len(line) < width for line in lines)
    # The room is used: a screen with a few rows of thousands is no view.
    assert sum(line.lstrip().startswith("r") for line in lines) >= height - 15
    assert "rows final" in " ".join(lines)


@BOTH
@pytest.mark.parametrize(("width", "height"), [(10, 24), (10, 3), (1, 1), (40, 5), (80, 2)])
def test_tiny_windows_are_no_crash(width: int, height: int, terminal: bool) -> None:
    table = live(width, height, terminal)
    totals, jobs = busy()
    with table:
        table(Started(totals, jobs[:50], START_MS))
        table(Notice(HOSTILE, "r1"))
        table(Tick(START_MS + 1000, "offline, 30s"))
    assert table.render()


def test_running_rows_are_on_top() -> None:
    view = RunView()
    first = [job(n, Status.PENDING) for n in range(1, 4)]
    view.follow(Started(Totals(Counter({Status.PENDING: 3})), first, START_MS))
    for n, status in ((1, Status.COMPLETED), (2, Status.IN_PROGRESS)):
        view.follow(Changed(first[n - 1], job(n, status), START_MS + n))
    assert [(one.row, one.status) for one in view.rows(10)] == [
        ("r2", "in_progress"),
        ("r3", "pending"),
        ("r1", "completed"),
    ]
    assert [one.row for one in view.rows(2)] == ["r2", "r3"]
    assert view.rows(0) == view.rows(-5) == []


def test_view_remembers_few_rows_that_ended() -> None:
    view = RunView()
    for n in range(1, 1000):
        view.follow(Changed(job(n), job(n, Status.COMPLETED), START_MS))
    assert view.rows(10_000)[0].row == "r999"
    assert len(view.rows(10_000)) == sume_resume.RECENT_ROWS


def test_row_is_shown_once_by_its_latest_attempt() -> None:
    view = sume_resume.RunView()
    old = job(1, Status.REJECTED)
    new = job(9, Status.SENDING, row="r1", attempt=2)
    view.follow(Changed(job(1), old, START_MS))
    view.follow(Changed(job(9, Status.QUEUED, row="r1", attempt=2), new, START_MS))
    assert [one.id for one in view.rows(10)] == [9]


def test_row_that_waits_again_leaves_the_view() -> None:
    view = RunView()
    view.follow(Changed(job(1, Status.QUEUED), job(1, Status.SENDING), START_MS))
    assert [one.row for one in view.rows(5)] == ["r1"]
    view.follow(Changed(job(1, Status.SENDING), job(1, Status.QUEUED), START_MS))
    assert view.rows(5) == []


def test_pace_counts_what_ends_and_never_divides_by_nothing() -> None:
    view = RunView()
    assert view.pace() == ""
    totals = Totals(Counter({Status.PENDING: 6, Status.COMPLETED: 2}))
    view.follow(Started(totals, [], START_MS))
    for n in (1, 2):
        view.follow(Changed(job(n), job(n, Status.COMPLETED), START_MS + 60_000))
    assert view.pace() == "2.0 rows/min, about 3m left"


def test_live_table_shows_progress_and_what_it_waits_for() -> None:
    table = live(120, 30)
    totals = Totals(Counter({Status.PENDING: 1, Status.COMPLETED: 3}), 300_000)
    with table:
        table(Started(totals, [job(7, Status.PENDING)], START_MS))
        table(Tick(START_MS + 1000, "rate limit, 45s"))
    text = plain(written(table._console))
    for word in ("3 of 4 rows final", "waiting: rate limit, 45s", "clip 7.", "spent $0.300000"):
        assert word in text


def test_live_notice_is_one_inert_line() -> None:
    table = live(100)
    with table:
        table(Started(Totals(), [], START_MS))
        table(Notice(HOSTILE, "r1"))
    text = written(table._console)
    assert "row 'r1'" in text
    assert "[/x] [red]r[/red]" in text
    assert "\x07" not in text
    assert "\x1b[2J" not in text
    assert "\x9b" not in text
    assert "\u202e" not in text


def test_live_table_shows_the_cursor_again() -> None:
    table = live(80)
    with table:
        table(Started(Totals(), [], START_MS))
    assert re.findall(r"\x1b\[\?25[hl]", written(table._console))[-1] == "\x1b[?25h"


class Closed(io.StringIO):
    """A terminal that was closed."""

    closed_now = False

    def write(self, text: str) -> int:
        if self.closed_now:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("event", [Tick(START_MS, None), Notice("news")], ids=["tick", "notice"])
def test_closed_terminal_does_not_end_the_run(event: Tick | Notice) -> None:
    """The ledger work needs no terminal; what the display raises would end it."""
    file = Closed()
    made = Console(file=file, width=80, height=24, force_terminal=True)
    with LiveTable(made) as table:
        table(Started(Totals(), [], START_MS))
        file.closed_now = True
        table._draw_at_s = 0.0
        table(event)
    file.closed_now = False


def test_terminal_that_stood_still_is_drawn_to_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-S for an hour is no sign of a slow machine."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    made = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    drawn: list[float] = []

    class Slow(LiveTable):
        def render(self) -> Any:
            drawn.append(now[0])
            now[0] += 3600.0 if len(drawn) == 1 else 0.001
            return super().render()

    with Slow(made) as table:
        table(Tick(START_MS, None))
        stood_still = now[0]
        now[0] += sume_resume.REDRAW_MOST_S
        table(Tick(START_MS, None))
        assert drawn == [1000.0, stood_still + sume_resume.REDRAW_MOST_S]
        # And a quick one is drawn again after the usual pause.
        now[0] += sume_resume.REDRAW_S
        table(Tick(START_MS, None))
        assert len(drawn) == 3


# -- the plain log --


@dataclass
class Log:
    """A plain log, and a clock that the test moves."""

    log: PlainLog
    lines: list[str]
    now: list[float]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines: list[str] = []
    return Log(PlainLog(lines.append), lines, now)


def test_log_has_a_line_per_change(log: Log) -> None:
    log.log(Started(Totals(), [], START_MS))
    before = job(1, Status.SENDING, job_id=None)
    log.log(Changed(before, job(1, Status.PENDING), START_MS))
    log.log(Changed(job(1, Status.PENDING), job(1, Status.PENDING), START_MS))
    done = job(1, Status.COMPLETED, cost_micros=100_000)
    log.log(Changed(job(1, Status.PENDING), done, START_MS))
    assert len(log.lines) == 2
    assert re.fullmatch(r"\d\d:\d\d:\d\d r1: pending  job_1", log.lines[0])
    assert "completed" in log.lines[1]
    assert "$0.100000" in log.lines[1]


def test_log_says_unknown_cost(log: Log) -> None:
    log.log(Changed(job(1), job(1, Status.FAILED, note="filtered"), START_MS))
    assert "unknown" in log.lines[0]
    assert "(filtered)" in log.lines[0]
    assert "$" not in log.lines[0]


def test_log_tells_trouble_once(log: Log) -> None:
    well, ill = job(1), job(1, trouble="502 from Sume")
    for before, after in ((well, ill), (ill, ill), (ill, well)):
        log.log(Changed(before, after, START_MS))
    assert sum("502 from Sume" in line for line in log.lines) == 1


def test_log_has_a_heartbeat(log: Log) -> None:
    totals = Totals(Counter({Status.PENDING: 2}), 100_000, 1, 1)
    log.log(Started(totals, [], START_MS))
    for _ in range(100):
        log.now[0] += 1.0
        log.log(Tick(START_MS, "rate limit, 45s"))
    assert len(log.lines) == 3
    for word in ("2 pending", "spent $0.100000 + 1 of unknown cost", "waiting: rate limit, 45s"):
        assert word in log.lines[0]


def test_any_line_puts_the_heartbeat_off(log: Log) -> None:
    log.log(Started(Totals(), [], START_MS))
    log.now[0] += 29.0
    log.log(Notice("here"))
    log.now[0] += 29.0
    log.log(Tick(START_MS, None))
    assert len(log.lines) == 1


def test_log_lines_are_inert_and_single(log: Log) -> None:
    log.log(Notice(HOSTILE, "r1"))
    log.log(Changed(job(1), job(1, Status.FAILED, note=HOSTILE), START_MS))
    assert len(log.lines) == 2
    for line in log.lines:
        assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", line)
        assert "[/x] [red]r[/red]" in line
        assert "日本語" in line
        assert "r1" in line


# -- a real terminal --

pytestmark_posix = pytest.mark.skipif(os.name != "posix", reason="needs a pty")


def in_terminal(
    args: list[str],
    folder: Path,
    env: dict[str, str],
    at: Callable[[bytes, subprocess.Popen[bytes]], None] = lambda seen, process: None,
    size: tuple[int, int] = (24, 80),
) -> tuple[int, bytes]:
    """Run the command on a pty and return its exit code and all that it wrote."""
    import fcntl
    import pty
    import struct
    import termios

    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    keep = {n: v for n, v in os.environ.items() if not n.startswith(("SUME_", "COLUMNS", "LINES"))}
    keep.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *args],
        cwd=folder,
        env=keep | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | env,
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
    )
    os.close(inner)
    seen = b""
    end = time.monotonic() + 30
    try:
        while time.monotonic() < end:
            if select.select([outer], [], [], 0.2)[0]:
                try:
                    data = os.read(outer, 65536)
                except OSError:
                    break
                if not data:
                    break
                seen += data
                at(seen, process)
            elif process.poll() is not None:
                break
        return process.wait(timeout=10), seen
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(outer)


def quick_rows(count: int) -> list[dict[str, Any]]:
    """Return rows whose clips the stand-in makes in about two seconds."""
    rows: list[dict[str, Any]] = []
    for n in range(100_000):
        prompt = f"clip {n}"
        body = json.dumps(
            {"mode": "async", "model": sume_resume.DEFAULT_MODEL, "prompt": prompt},
            separators=(",", ":"),
        )
        if int(hashlib.sha256(body.encode()).hexdigest()[:4], 16) % 4000 < 60:
            rows.append({"id": f"r{n}", "prompt": prompt})
        if len(rows) == count:
            return rows
    raise AssertionError("no such rows")


@pytestmark_posix
def test_simulated_run_on_a_terminal(tmp_path: Path) -> None:
    """The first thing that a new user runs: it ends well, and the cursor is there again."""
    (tmp_path / "clips.jsonl").write_bytes(jsonl(*quick_rows(3)))
    args = ["run", "clips.jsonl", "--simulate", "--poll-interval", "0.2s", "--writes-per-minute=0"]
    code, seen = in_terminal(args, tmp_path, {})
    assert code == 0, seen
    assert re.findall(rb"\x1b\[\?25[hl]", seen)[-1] == b"\x1b[?25h"
    text = plain(seen.decode())
    assert "3 of 3 rows final" in text
    assert "3 completed" in text
    assert "Traceback" not in text
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"clips.jsonl", "simulated.db", "simulated.stand-in.db"}


@pytestmark_posix
@pytest.mark.parametrize("times", [1, 2])
def test_interrupt_on_a_terminal_gives_the_cursor_back(
    tmp_path: Path, server: FakeSume, times: int
) -> None:
    server.reads_to_finish = 10**9
    release = hold_posts(server) if times == 2 else lambda: None
    (tmp_path / "clips.jsonl").write_bytes(jsonl({"id": "r1", "prompt": "p"}))
    sent: list[int] = []

    def at(seen: bytes, process: subprocess.Popen[bytes]) -> None:
        ready = server.gets if times == 1 else b"sending" in seen
        if (not sent and ready) or (len(sent) == 1 < times and b"stopping" in seen):
            sent.append(signal.SIGINT)
            process.send_signal(signal.SIGINT)

    env = {"SUME_API_KEY": "k", "SUME_API_BASE_URL": server.url}
    args = ["run", "clips.jsonl", "--poll-interval", "0.05s", "--reads-per-minute", "0"]
    code, seen = in_terminal(args, tmp_path, env, at)
    release()
    assert code == 130
    assert len(sent) == times
    assert re.findall(rb"\x1b\[\?25[hl]", seen)[-1] == b"\x1b[?25h"


@pytestmark_posix
def test_closed_terminal_while_an_answer_is_held(tmp_path: Path, server: FakeSume) -> None:
    """The window is closed: SIGHUP comes, nothing can be written, and the id is stored."""
    import pty

    release = hold_posts(server)
    (tmp_path / "clips.jsonl").write_bytes(jsonl({"id": "r1", "prompt": "p"}))
    outer, inner = pty.openpty()
    env = {n: v for n, v in os.environ.items() if not n.startswith("SUME_")}
    env |= {"SUME_API_KEY": "k", "SUME_API_BASE_URL": server.url, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "run", "clips.jsonl", "--poll-interval", "0.05s"],
        cwd=tmp_path, env=env, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
    )  # fmt: skip
    os.close(inner)
    seen = b""
    while b"sending" not in seen and select.select([outer], [], [], 15)[0]:
        seen += os.read(outer, 65536)
    os.close(outer)
    process.send_signal(signal.SIGHUP)
    end = time.monotonic() + 1.0
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    release()
    assert process.wait(15) == 129
    with sume_resume.open_ledger(tmp_path / "jobs.db") as ledger:
        assert [one.job_id for one in ledger.latest()] == list(server.jobs)


def hold_posts(server: FakeSume) -> Callable[[], None]:
    import threading

    gate = threading.Event()

    def watch(request: Request) -> None:
        if request.method == "POST":
            gate.wait(30)

    server.watch = watch
    return gate.set


@pytestmark_posix
@pytest.mark.parametrize(
    ("env", "size"),
    [({"TERM": "dumb"}, (24, 80)), ({"NO_COLOR": "1"}, (24, 80)), ({}, (24, 10))],
    ids=["dumb", "no color", "ten columns"],
)
def test_odd_terminals(
    tmp_path: Path, server: FakeSume, env: dict[str, str], size: tuple[int, int]
) -> None:
    (tmp_path / "clips.jsonl").write_bytes(jsonl({"id": "r1", "prompt": HOSTILE}))
    env = {"SUME_API_KEY": "k", "SUME_API_BASE_URL": server.url} | env
    code, seen = in_terminal(
        ["run", "clips.jsonl", "--poll-interval", "0.05s"], tmp_path, env, size=size
    )
    assert code == 0, seen
    assert b"Traceback" not in seen
    assert b"\x1b[2J" not in seen
    assert b"\x07" not in seen
    if "TERM" in env:
        assert b"\x1b" not in seen
    if "NO_COLOR" in env:
        assert not re.search(rb"\x1b\[[0-9;]*3[0-7][;m]", seen)


def test_every_recorded_fact_has_words() -> None:

    about_rows = {"added", *(name.removeprefix("record_") for name in child.recording_methods())}
    about_rows -= {"account", "namespace", "pace", "part", "_commit"}
    # Who has a row in hand is no part of its story.
    about_rows -= {"claimed", "renewed", "handed_back", "left"}
    # Nor is where the ledger lies.
    about_rows -= {"moving", "moved", "move_undone", "copy_of"}
    assert set(sume_resume.EVENT_WORDS) == about_rows


def test_a_card_tells_all_about_a_row(desk: Desk) -> None:
    """The whole note and the history, in words; a read that tells nothing new is left out."""
    desk.add({"id": "r1", "prompt": HOSTILE})
    desk.server.reads_to_finish = 5
    desk.server.submits.append(drop_after)
    desk.run()
    with sume_resume.open_ledger(desk.place) as ledger:
        job = ledger.find("r1")
        lines = list(sume_resume.job_card(sume_resume._story(ledger, job), str))
    text = "\n".join(lines)
    assert job.job_id is not None
    assert job.job_id in text
    assert "(attempt 1; sends: 2)" in text
    assert "no usable answer; the same key will ask again" in text
    assert text.count("read: in_progress") == 1
    assert lines[-1].endswith("ended: completed")
    assert "\x1b" not in text
