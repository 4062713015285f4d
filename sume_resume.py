#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.11"
# dependencies = ["httpx>=0.28,<0.29", "typer>=0.26,<0.29", "rich>=13.9,<16"]
# ///
"""Buy AI clips from Sume in batches, each exactly once, and finish after any kill.

One command adds the rows of a file to a ledger (one SQLite file), sends each with an
idempotency key that was committed before the request left, polls until every row is
final, and shows it in a live table. When anything dies, the same command again
finishes the rest.

What is promised, and what the tests check:

P1  One attempt of a row causes at most one charge, across any crash, restart or
    second runner. When Sume may have forgotten the key, the row waits for a person.
P2  Every job that Sume accepted can be named from the ledger, or by replaying a key
    that is in the ledger.
P3  No input row is lost, merged in silence, or shown another row's clip.
P4  Cost is an exact integer (micro-USD), never guessed: unknown is shown as unknown.
P5  A result file is whole and verified, or absent under its final name.
P6  Exit code and summary tell the truth: "stopped waiting" is not "failed".
P7  The API key and the query of a signed URL appear in no output and no file.
P8  What cannot be recorded is not bought: no ledger write, no POST.

The rooms, top to bottom; a name is used only below the place where it is defined:

    constants    limits and defaults, each with its unit and its reason
    errors       what can end a command, and the exit code it ends with
    text         words from outside, made inert; times as a person writes them
    clock        the one source of time
    states       the words for an attempt, and what may follow what
    money        from what Sume says to exact micro-dollars
    decisions    pure: row id, key, what an answer means, when to read again
    input        from what a person wrote to checked rows
    pacing       pure: budgets, gates and the queue window
    schema       all SQL text of the ledger
    files        locks, and names that last: what SQLite does not do
    database     SQLite and Postgres: how statements reach them, what their errors mean
    ledger       one method per fact; nothing else writes
    api          one HTTP request and its answer; knows no ledger
    download     one result file: its part, its proof, its name
    engine       the scheduler: the only room that holds both ledger and api
    display      what a person sees of the engine's events
    stand-in     a small Sume on loopback, for --simulate
    drill        kills real processes at every point, and counts the charges
    cli          commands, flags, the error boundary
    end          main() and the guard
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import functools
import hashlib
import heapq
import json
import os
import queue
import re
import signal
import sqlite3
import stat
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal
from itertools import chain, count, groupby, islice
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    BinaryIO,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    TextIO,
    assert_never,
    cast,
    get_type_hints,
)

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    import random
    import ssl
    import subprocess
    from http.server import ThreadingHTTPServer

    import httpx
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

__version__ = "0.1.0"

__all__ = [
    "AccountError",
    "Engine",
    "InputError",
    "Job",
    "Ledger",
    "LedgerError",
    "LockedError",
    "Status",
    "Sume",
    "SumeResumeError",
    "UsageError",
    "app",
    "main",
]


# --- constants ---------------------------------------------------------------
# Limits and defaults. Every number has its unit in its name and its reason beside it.

DEFAULT_BASE_URL = "https://api.sume.com"
# The one model name that Sume's own pages show; a row or --model names another.
DEFAULT_MODEL = "sume/auto"
DEFAULT_LEDGER = "jobs.db"
DEFAULT_SIMULATED_LEDGER = "simulated.db"
# What a ledger on Postgres is called, where ?schema= does not say it.
DEFAULT_SCHEMA = "sume_resume"
STAND_IN = "stand-in"

# A submit that has no whole answer by then counts as "may have arrived". Sume's own
# clients wait 20 s and 90 s; a slower accept is found again by its key.
POST_DEADLINE_S = 60.0
READ_DEADLINE_S = 30.0
CONNECT_TIMEOUT_S = 10.0
# Past its deadline by this much, a request is taken from its worker and given up.
OVERRUN_GRACE_S = 2.0
# A first signal waits this long for submits in flight; CI kills 7.5 s after SIGINT.
SIGNAL_GRACE_S = 5.0
# No real key is so short.
MAX_MADE_UP_KEY_CHARS = 4
# An answer is some kB of JSON; a larger one is not read to its end.
MAX_ANSWER_BYTES = 8 * 1024 * 1024

# Sume publishes no lifetime for keys; the shortest that peers of it publish is 24 h.
KEY_TTL_S = 24 * 3600.0
# A wall clock that fell this far behind the steady one says nothing about a key's age.
CLOCK_FALL_LIMIT_S = 300.0
# A budget that was used so far in the future says that the clock was set back.
CLOCK_FALL_MS = 60_000

# Sume's Free plan allows 120 writes a minute (300 on Pro); reads are "generous".
WRITES_PER_MINUTE = 120.0
READS_PER_MINUTE = 600.0
# Exactly the allowed pace trips a sliding window whenever a request arrives early.
BUDGET_SHARE = 0.985
# A scheduler wakes some ms late; so much lateness is made up for, and less than the share
# that is kept free in the shortest window that servers use, a second.
BUDGET_CREDIT_S = 0.01
CONCURRENCY = 8

POLL_INTERVAL_S = 15.0
SIMULATED_POLL_INTERVAL_S = 1.0
# No hint to wait longer is followed; a due time beyond it means that the clock moved.
MAX_POLL_HINT_S = 300.0
# Polls are spread by this share of their interval, so that they never line up.
POLL_JITTER = 0.1
# Sume may not know a job in the first seconds after it accepted it (read-after-write).
GONE_GRACE_S = 120.0
# A completed job whose cost is not there yet is read again after these waits.
COST_REREAD_S = (2.0, 4.0, 8.0)
RESULT_TRIES = 3

BACKOFF_BASE_S = 2.0
BACKOFF_CAP_S = 60.0
# With full jitter a wait can come out near zero; a broken server gets this much rest.
BACKOFF_FLOOR_S = 0.5
OFFLINE_CAP_S = 30.0
# The longest pause a server can ask for: past it, one probe finds out.
RETRY_AFTER_CAP_S = 900.0

# Answers that settle nothing, in this number, send the row to a person.
DOUBT_LIMIT = 5
# So many different rows answered without a job id, or not found: this is not Sume.
STRAY_ROWS = 3
# After so many answers without a report of room, at the most, the queue window grows by one.
ROOM_VOTES = 8
# So often a full queue is asked again while jobs of ours are in it: a refusal is free.
QUEUE_PROBE_S = 60.0

# A download that stands still so long, or brings less than a kB a second for so long, ends.
DOWNLOAD_STALL_S = 30.0
DOWNLOAD_LEAST_BYTES = 30 * 1024
# And so does one that takes longer and can go on where it stopped: the worker is wanted.
DOWNLOAD_DEADLINE_S = 600.0
# Ten minutes of 4K at 50 Mbit/s; a link to more is no clip.
MAX_FILE_BYTES = 4 * 1024**3
# At its end a run waits so long for downloads to stop in order.
PARK_S = 1.0
# So much of a part is made durable at a time: a power cut costs no more.
PART_SYNC_BYTES = 4 * 1024 * 1024
MAX_REDIRECTS = 5
MAX_LINK_CHARS = 8000
# A job that names more files than this is not believed.
MAX_FILES = 200
# A file that brings nothing new in so many tries, each with a fresh link, is given up.
DOWNLOAD_TRIES = 5
# Links of so many rows are kept until their turn comes; others are asked for again.
LINKS_KEPT = 1000
# File systems take 255 bytes in a name, encrypted ones 143.
MAX_STEM_CHARS = 60

MAX_BODY_BYTES = 1024 * 1024
MAX_LINE_BYTES = 8 * 1024 * 1024
MAX_ROW_ID_CHARS = 200
MAX_NOTE_CHARS = 300
MAX_USAGE_CHARS = 2000
MAX_INPUT_ERRORS = 10
# Rows are written, and held, so many at a time: enough to save most of the round trips.
ADD_ROWS = 500
# A million dollars for one clip is no price; sums of a million rows still fit 64 bits.
MAX_MICROS = 10**12

# SQLite waits so long for another writer before it says "locked".
BUSY_TIMEOUT_MS = 5000
# A run that holds no answer gives up after so many of those waits: a minute.
BUSY_TRIES = 12
QUICK_CHECK_MAX_BYTES = 64 * 1024 * 1024
# A worker on Postgres holds a row for so long; no request takes as long (a POST 62 s at the
# most), and a download renews it. A worker that is killed delays its rows by this.
LEASE_S = 120.0
# Queued rows that are not to be sent are passed so many at a time.
PASSED_ROWS = 1000
# So many rows a claim looks at: more than any turn sends, few enough for others to have some.
CLAIM_ROWS = 32
PG_CONNECT_TIMEOUT_S = 10
# A command makes a broken connection again so often; a run does for as long as it may last.
RECONNECTS = 3
# A dead peer is noticed after so long, in ms, whatever the network swallows.
PG_TCP_TIMEOUT_MS = 30_000
# "SuRe" in ASCII: says that a SQLite file is one of our ledgers.
APPLICATION_ID = 0x53755265

# The scheduler looks up at least so often: rows may be added beside it.
TICK_S = 1.0
# Counts are taken anew so soon after another process wrote; a million rows take 0.1 s.
RECOUNT_S = 2.0
REDRAW_S = 0.25
# Drawing takes no more than this share of the time, however slow the machine is.
DRAW_SHARE = 0.02
# But a terminal that was stopped for a while (Ctrl-S) is not slow.
REDRAW_MOST_S = 5.0
HEARTBEAT_S = 30.0
TOTALS_RELOAD_S = 30.0


class Exit(enum.IntEnum):
    """Exit codes, in the README and in --help."""

    DONE = 0
    NOT_ALL_COMPLETED = 1
    USAGE = 2
    UNFINISHED = 3
    REVIEW = 4
    ACCOUNT = 5
    CAPPED = 6
    LOCKED = 7
    LEDGER = 8
    INTERNAL = 70
    HANGUP = 129
    INTERRUPTED = 130
    TERMINATED = 143


EXIT_CODES = """\
Exit codes:
  0  every row is completed; of other commands: done
  1  all rows final, some not completed, or a file missing; of cancel: some were not
  2  usage or input error; nothing was changed
  3  unfinished: a deadline or limit ended the run; run again
  4  rows need review
  5  account or connection settings need fixing
  6  stopped at --max-cost
  7  another run holds this ledger
  8  the ledger cannot be used
  70  a fault in this program; the ledger is safe
  129, 130, 143  hung up, interrupted, terminated
"""


# --- errors ------------------------------------------------------------------
# What can end a command. Each class carries its exit code; a message says what
# happened, to which row or file, and what helps.
#
#   SumeResumeError
#   ├── UsageError      2  flags, environment
#   ├── InputError      2  rows that a person wrote
#   ├── AccountError    5  key, credits, certificate, base URL, guard
#   ├── LockedError     7  another run holds the ledger
#   ├── LedgerError     8  the ledger cannot be used
#   │   └── LedgerBusy  8  another process is writing; waiting may help
#   │       └── LedgerLost  8  the connection to it broke; what was not committed is undone
#   └── RowChanged      2  another process changed the row first (never leaves a run)


class SumeResumeError(Exception):
    """Something a person can act on."""

    exit_code: Exit = Exit.INTERNAL


class UsageError(SumeResumeError):
    """A flag or a setting is wrong."""

    exit_code = Exit.USAGE


class InputError(SumeResumeError):
    """Rows of the input are wrong; none was added."""

    exit_code = Exit.USAGE

    def __init__(self, problems: Sequence[str], count: int | None = None) -> None:
        self.problems = list(problems)
        more = (count or len(problems)) - len(problems)
        lines = [*self.problems, *([f"… and {more} more"] if more > 0 else [])]
        super().__init__("\n".join(lines))


class AccountError(SumeResumeError):
    """The account or the connection settings need fixing."""

    exit_code = Exit.ACCOUNT


class LockedError(SumeResumeError):
    """Another run holds this ledger."""

    exit_code = Exit.LOCKED


class LedgerError(SumeResumeError):
    """The ledger cannot be used."""

    exit_code = Exit.LEDGER


class LedgerBusy(LedgerError):
    """Another process is writing to the ledger."""


class LedgerLost(LedgerBusy):
    """The connection to the ledger broke: its transaction is undone, or its commit not known."""


class Stopped(BaseException):
    """A signal that ends a command; a run hears signals by itself."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signum)


class RowChanged(SumeResumeError):
    """The row is not in the state that this fact expects."""

    exit_code = Exit.USAGE

    def __init__(self, row: str, why: str) -> None:
        self.row, self.why = row, why
        super().__init__(f"row '{row}' {why}")


# --- text --------------------------------------------------------------------
# Text from outside is data: it moves no cursor and carries no secret.


# Control characters, bidi overrides and line separators move a terminal's cursor or
# turn its text around; text from prompts and servers never may.
# Patterns are kept as text: re compiles each at its first use, and start-up pays for none.
_ACTIVE_TEXT = (
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]+"
)


def inert(text: object, limit: int = MAX_NOTE_CHARS) -> str:
    """Return text that cannot move a cursor, on one line, at most limit characters."""
    flat = str(text)
    # What is printable holds none of it, and that is most text.
    flat = (flat if flat.isprintable() else re.sub(_ACTIVE_TEXT, " ", flat)).strip()
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


# What a key looks like (sume-api.md 1.1), an auth header, and the query of a URL: a
# server's error text or an exception may hold any of them.
_SECRETS = (
    (r"sume_(?:live|test)_[\w-]+", "[key]"),
    (r"(?i)\b((?:bearer|basic|x-api-key)(?:\s*:\s*|\s+))\S+", r"\1[key]"),
    (r"(?i)(https?://)[^\s/\"']*@", r"\1"),
    (r"(?i)(https?://[^\s?\"'<>]+)\?[^\s\"'<>]*", r"\1"),
)
# Without one of these no pattern above can match.
_SECRET_SIGNS = r"(?i)sume_|bearer|basic|x-api-key|https?://"


def quiet(text: object, limit: int = MAX_NOTE_CHARS) -> str:
    """Return inert text without keys, auth headers, URL passwords and URL queries."""
    flat = str(text)
    if re.search(_SECRET_SIGNS, flat):
        for pattern, instead in _SECRETS:
            flat = re.sub(pattern, instead, flat)
    return inert(flat, limit)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 row, 2 rows."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Dsn:
    """Where a ledger lies in Postgres. No text of it holds a password."""

    conninfo: str = field(repr=False)
    schema: str
    shown: str

    def __str__(self) -> str:
        return self.shown

    @property
    def url(self) -> str:
        """Return what names it to another process; it may hold the password."""
        return f"{self.conninfo}{'&' if '?' in self.conninfo else '?'}schema={self.schema}"


# Where a ledger is.
Place = Path | Dsn


def place_of(text: str) -> Place:
    """Return the place that --db names: a file, or a schema of a Postgres database.

    Raises UsageError; no message holds a password.
    """
    from urllib.parse import parse_qsl, urlencode, urlsplit

    if not re.match(r"postgres(ql)?://", text):
        return Path(text)
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", f":{parts.port}" if parts.port else ""
    except ValueError:
        raise UsageError("--db: that is not a Postgres URL") from None
    asked = parse_qsl(parts.query, keep_blank_values=True)
    schemas = [value for name, value in asked if name == "schema"] or [DEFAULT_SCHEMA]
    if len(schemas) > 1 or not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schemas[0]):
        raise UsageError("--db: schema must be one name of small letters, digits and _")
    rest = [(name, value) for name, value in asked if name != "schema"]
    plain = [(name, value) for name, value in rest if "pass" not in name]
    plain += [("schema", schemas[0])] if schemas[0] != DEFAULT_SCHEMA else []
    user = f"{parts.username}@" if parts.username else ""
    shown_host = f"[{host}]" if ":" in host else host
    query = urlencode(plain, safe="/")
    shown = f"postgresql://{user}{shown_host}{port}{parts.path}" + (f"?{query}" if query else "")
    # Not geturl(), which takes the slashes away where there is no host.
    conninfo = f"postgresql://{parts.netloc}{parts.path}" + (f"?{urlencode(rest)}" if rest else "")
    return Dsn(conninfo, schemas[0], shown)


def db_flag(ledger: Place) -> str:
    """Return the flag that names a ledger in a command to copy; none for the usual name."""
    import shlex

    name = str(ledger)
    if name == DEFAULT_LEDGER:
        return ""
    # A name like a flag's is no value of a flag.
    return f" --db {shlex.quote(f'./{name}' if name.startswith('-') else name)}"


def shell_word(text: str) -> str:
    """Return text as the last word of a shell command, also where it looks like a flag."""
    import shlex

    return ("-- " if text.startswith("-") else "") + shlex.quote(text)


TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_time(text: str) -> float:
    """Return the seconds that a TIME such as 0.2s, 90s, 30m or 2h names.

    Raises UsageError for anything else, and for a time of zero or less.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)", text.strip())
    seconds = float(match[1]) * TIME_UNITS[match[2]] if match else 0.0
    if not 0 < seconds < 1e9:
        raise UsageError(f"'{inert(text, 40)}' is not a time: write 0.2s, 90s, 30m, 2h")
    return seconds


def show_time(seconds: float) -> str:
    """Return a short text for a number of seconds: 45s, 12m, 3h10m, 2d4h."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 10:
        return f"{minutes}m" + (f"{whole % 60:02}s" if whole % 60 else "")
    if minutes < 100:
        return f"{minutes}m"
    if hours < 48:
        return f"{hours}h{minutes % 60:02}m"
    return f"{days}d{hours % 24}h"


# --- clock -------------------------------------------------------------------
# The one source of time, so that tests can own it.


class Clock:
    """Wall time for what is stored, steady time for what is waited for."""

    def wall_ms(self) -> int:
        """Now, in ms since 1970 UTC."""
        return time.time_ns() // 1_000_000

    def awake_s(self) -> float:
        """Seconds that do not count while the machine is suspended (on Linux)."""
        return time.monotonic()

    def elapsed_ms(self) -> int:
        """Steady ms that do count a suspend, where the system offers such a clock."""
        if sys.platform == "linux":
            return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        return time.monotonic_ns() // 1_000_000

    def ahead_ms(self) -> int:
        """How far the wall clock is ahead of the steady one; a fall is a clock set back."""
        return self.wall_ms() - self.elapsed_ms()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)


# --- states ------------------------------------------------------------------
# The words for an attempt, what may follow what, and the records that rooms exchange.


class Status(enum.StrEnum):
    """What we know of one attempt; Sume's own word is kept beside it."""

    # Every send so far surely did not arrive, or was refused without a job.
    QUEUED = "queued"
    # Key and body are durable, a POST may have left; the outcome is not known.
    SENDING = "sending"
    # Sume has it; the job id is stored.
    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    # Sume's last word.
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    # Refused at submit for what it asks; surely not billed.
    REJECTED = "rejected"
    # A person must decide; the note says why.
    REVIEW = "review"


OPEN = frozenset({Status.PENDING, Status.IN_PROGRESS})
_SUME_FINAL = {Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.EXPIRED}

TRANSITIONS: Mapping[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.SENDING, Status.CANCELLED}),
    Status.SENDING: frozenset(
        {Status.SENDING, Status.QUEUED, Status.PENDING, Status.REJECTED, Status.REVIEW}
    ),
    Status.PENDING: OPEN | _SUME_FINAL | {Status.REVIEW},
    Status.IN_PROGRESS: OPEN | _SUME_FINAL | {Status.REVIEW},
    Status.REVIEW: frozenset({Status.REVIEW, Status.PENDING, Status.CANCELLED}),
    Status.COMPLETED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
    Status.EXPIRED: frozenset(),
    Status.REJECTED: frozenset(),
}
FINAL = frozenset(status for status, after in TRANSITIONS.items() if not after)

Kind = Literal["video", "image"]
KINDS: tuple[Kind, ...] = ("video", "image")


class Job(NamedTuple):
    """One attempt of a row, as the ledger holds it. Times are ms since 1970 UTC."""

    id: int
    row: str
    attempt: int
    latest: int
    key: str
    job_id: str | None
    kind: Kind
    model: str
    duration_s: int | None
    own: str
    body: bytes
    source: str
    status: Status
    sume_status: str | None
    cost_micros: int | None
    cost_state: str | None
    usage: str | None
    tries: int
    first_sent_at: int | None
    accepted_at: int | None
    finished_at: int | None
    next_poll_at: int | None
    poll_errors: int
    trouble: str | None
    note: str | None
    created_at: int
    updated_at: int
    # What it is expected to cost, reserved when it is sent under a price list.
    estimate_micros: int | None = None
    # Counts claims: who writes must still have the number that its claim brought.
    token: int = 0
    # On Postgres, the worker that has it, and until when; a time alone is a wait.
    lease_until: int | None = None
    worker: str | None = None

    @property
    def reserved_micros(self) -> int:
        """What it counts against a cap while its cost is not known."""
        return (self.estimate_micros or 0) if self.cost_unknown else 0

    @property
    def prompt(self) -> str:
        """The prompt, from the stored body."""
        return str(json.loads(self.body).get("prompt", ""))

    @property
    def cost_unknown(self) -> bool:
        """Whether this attempt may have cost something that nobody has stated yet."""
        return (
            self.cost_micros is None
            and self.first_sent_at is not None
            and (self.status is not Status.REJECTED or self.job_id is not None)
        )


class NewRow(NamedTuple):
    """A checked row, ready to be added. `given` holds the defaults given now."""

    row: str
    kind: Kind
    model: str
    duration_s: int | None
    own: str
    body: bytes
    source: str
    given: Mapping[str, Any]

    @property
    def prompt(self) -> str:
        """The prompt, from the built body."""
        return str(json.loads(self.body).get("prompt", ""))


def new_row_of(job: Job) -> NewRow:
    """Return what an attempt was made from; its body is never built anew."""
    return NewRow(
        job.row, job.kind, job.model, job.duration_s, job.own, job.body, job.source, given={}
    )


class Output(NamedTuple):
    """A result file that a job names; the query of its URL is never kept."""

    url: str
    # Where it was downloaded to, whole and verified; None until then.
    path: str | None = None
    sha256: str | None = None
    bytes: int | None = None
    # Of a download that was broken off: the object's ETag, how much of it is durable, and
    # from where it came.
    etag: str | None = None
    part_bytes: int | None = None
    part_url: str | None = None

    def facts(self) -> dict[str, Any]:
        """Return what programs read of it."""
        return {"url": self.url, "path": self.path, "sha256": self.sha256, "bytes": self.bytes}


class Recorded(NamedTuple):
    """A line of an attempt's history: one fact, and the status before and after it."""

    id: int
    at: int
    job: int
    event: str
    before: Status | None
    after: Status
    detail: str | None


@dataclass(slots=True)
class Totals:
    """Counts by status look at each row's latest attempt; money looks at them all."""

    by_status: Counter[Status] = field(default_factory=Counter)
    cost_micros: int = 0
    cost_unknown_rows: int = 0
    cost_known_rows: int = 0
    # Estimates of what may have been bought and has no cost yet.
    reserved_micros: int = 0

    @property
    def rows(self) -> int:
        return self.by_status.total()

    @property
    def final(self) -> int:
        return sum(self.by_status[status] for status in FINAL)

    def move(self, before: Job, after: Job) -> None:
        """Follow one change of one attempt."""
        self.by_status[before.status] -= 1
        self.by_status[after.status] += 1
        self.cost_micros += (after.cost_micros or 0) - (before.cost_micros or 0)
        self.cost_known_rows += (after.cost_micros is not None) - (before.cost_micros is not None)
        self.cost_unknown_rows += after.cost_unknown - before.cost_unknown
        self.reserved_micros += after.reserved_micros - before.reserved_micros


# What the engine tells its listeners. It prints nothing itself.


class Started(NamedTuple):
    """A run begins: the totals, and the attempts that Sume may be working on."""

    totals: Totals
    open_jobs: Sequence[Job]
    at_ms: int


class Recounted(NamedTuple):
    """Another command changed rows beside the run: the totals and what is open, afresh."""

    totals: Totals
    open_jobs: Sequence[Job]
    at_ms: int


class Changed(NamedTuple):
    """An attempt moved on, or something was learned about it."""

    before: Job
    after: Job
    at_ms: int


class Notice(NamedTuple):
    """Something a person should read; `row` where it is about one."""

    text: str
    row: str | None = None

    def words(self) -> str:
        return f"row '{self.row}': {self.text}" if self.row else self.text


class Downloading(NamedTuple):
    """A result file is on its way: so many bytes of it, of all where that is known."""

    job: Job
    received: int
    total: int | None
    at_ms: int


class Downloaded(NamedTuple):
    """A result file is on the disk, whole and verified."""

    job: Job
    output: Output
    at_ms: int


@dataclass(slots=True)
class Progress:
    """How far a download is; written by its worker, read by the scheduler."""

    received: int = 0
    total: int | None = None
    # What a broken-off download can go on with: the object's strong ETag and where it is from,
    # and how many bytes are durable.
    etag: str | None = None
    url: str | None = None
    durable: int = 0
    # Steady time at which something came last.
    alive_s: float = 0.0
    given_up: bool = False
    # The connection, while there is one.
    socket: Any = None

    def give_up(self) -> None:
        """End it from another thread: whatever it waits for, the connection is cut."""
        import socket

        self.given_up = True
        with contextlib.suppress(OSError, AttributeError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def part_of(self, known: Output) -> Output | None:
        """Return a file with what is durable of it, where that can be gone on with."""
        if self.etag is None or not self.durable:
            return None
        return known._replace(etag=self.etag, part_bytes=self.durable, part_url=self.url)


class Tick(NamedTuple):
    """Nothing happened, time went by. `waiting` says what for, where it is known."""

    at_ms: int
    waiting: str | None


Event = Started | Recounted | Changed | Notice | Downloading | Downloaded | Tick


# --- money -------------------------------------------------------------------
# From what Sume says to exact micro-dollars. Nothing is guessed and nothing is added up.


class Cost(NamedTuple):
    """What an answer says about money: exact micros, or None, and the text it came from."""

    micros: int | None
    state: str | None
    raw: str | None


# /v1/jobs states money as integers (sume-api.md 1.5: *_usd_micros, older *_usd_cents);
# the word between is seen as "amount", "cost" and nothing.
_MONEY_FIELD = r"(billable|captured|refunded)(?:_amount|_cost)?_usd_(micros|cents)"
_MICROS_PER = {"micros": 1, "cents": 10_000}
# Decimal() alone would also take underscores and the digits of other scripts.
_DECIMAL = r"[0-9]{1,20}(\.[0-9]{1,20})?"


def decimal_of(value: object) -> Decimal | None:
    """Return a number, or its text, as the exact decimal that it is written as."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal | str):
        return None
    if isinstance(value, str) and not re.fullmatch(_DECIMAL, value):
        return None
    try:
        return Decimal(value)
    except (ArithmeticError, ValueError):
        return None


def usd_to_micros(value: object) -> int | None:
    """Return decimal USD as micro-USD, rounded to the nearest one; None if it is no price.

    A number or its text is read as a decimal, so that 0.10 is exactly 100000.
    """
    usd = decimal_of(value)
    try:
        micros = (usd * 1_000_000).to_integral_value() if usd is not None else None
    except ArithmeticError:
        return None
    if micros is None:
        return None
    return int(micros) if micros.is_finite() and 0 <= micros <= MAX_MICROS else None


def _whole_micros(value: object, unit: str) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    micros = value * _MICROS_PER[unit]
    return micros if 0 <= micros <= MAX_MICROS else None


def cost_of(usage: object) -> Cost:
    """Read a job's `usage` object.

    Captured minus refunded where money was captured, else the billable amount, else
    `usage.cost` (decimal USD). Estimates and reservations are never a cost. Text that
    states no price is kept in `raw`, with micros None.
    """
    if not isinstance(usage, dict):
        return Cost(None, None, None)
    found: dict[str, int] = {}
    odd: set[str] = set()
    for name, value in usage.items():
        match = re.fullmatch(_MONEY_FIELD, str(name))
        micros = _whole_micros(value, match[2]) if match else None
        if match and micros is None and value is not None:
            odd.add(match[1])
        elif match and micros is not None and (match[2] == "micros" or match[1] not in found):
            found[match[1]] = micros
    said = usage.get("status", usage.get("usage_status"))
    state = inert(said, 40).lower() if isinstance(said, str) else None
    try:
        raw = json.dumps(usage, default=str)[:MAX_USAGE_CHARS]
    except RecursionError:
        raw = "nested too deep"
    if odd & {"captured", "refunded"}:
        # What was given back cannot be read, so what it cost in the end is not known.
        return Cost(None, state, raw)
    refunded = found.get("refunded", 0)
    # While the money is only reserved, a captured amount of 0 says nothing.
    early = state in ("reserved", "estimated") and not found.get("captured")
    if "captured" in found and not early:
        micros = max(0, found["captured"] - refunded)
        return Cost(micros, state or ("refunded" if refunded else "captured"), raw)
    if "billable" in found:
        return Cost(found["billable"], state or "billable", raw)
    micros = usd_to_micros(usage.get("cost"))
    if micros is None:
        return Cost(None, state, raw if usage else None)
    return Cost(micros, state or "stated", raw)


def show_usd(micros: int | None) -> str | None:
    """Return micros as decimal USD with six places, or None where the cost is not known."""
    if micros is None:
        return None
    return f"{micros // 1_000_000}.{micros % 1_000_000:06}"


def spent_usd(totals: Totals) -> str | None:
    """Return what is known to be spent; None while nothing is, and something may be."""
    if totals.cost_unknown_rows and not totals.cost_known_rows:
        return None
    return show_usd(totals.cost_micros)


# --- decisions ---------------------------------------------------------------
# Pure: row id, key, what an answer means, when to read again. Time is passed in.


_CANONICAL = json.JSONEncoder(
    sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False
)


def canonical(value: object) -> str:
    """Return JSON that is equal for equal values: sorted names, no spaces.

    Raises ValueError for NaN, infinities, and text that is no valid Unicode.
    """
    text = _CANONICAL.encode(value)
    if not text.isascii():
        text.encode()
    return text


def row_id(own: str, ordinal: int, take: int) -> str:
    """Derive a row's id: 16 hex over its own fields as written and its ordinal.

    `own` is canonical JSON of the fields before any default, `ordinal` counts equal
    lines of one input from 1, and `take` above 1 buys the same lines once more.
    """
    parts = [own, ordinal] if take == 1 else [own, ordinal, take]
    return hashlib.sha256(canonical(parts).encode()).hexdigest()[:16]


def idempotency_key(namespace: str, kind: Kind, row: str, body: bytes, attempt: int) -> str:
    """Return the key of one attempt: equal for equal facts, on any machine.

    Peers of Sume limit keys to visible ASCII of 128 to 255 characters (sume-api.md 1.8);
    these are 43 of [a-z0-9-].
    """
    facts = [namespace, kind, row, hashlib.sha256(body).hexdigest(), attempt]
    return "sr-" + hashlib.sha256(canonical(facts).encode()).hexdigest()[:40]


def send_before_ms(first_sent_at: int, key_ttl_s: float | None) -> int | None:
    """Return the wall time after which a key must not be sent any more, None for never.

    A POST may take its whole deadline to arrive, so that much is kept in hand.
    """
    if key_ttl_s is None:
        return None
    return first_sent_at + round((key_ttl_s - POST_DEADLINE_S) * 1000)


def too_old(first_sent_at: int, now_ms: int, key_ttl_s: float | None) -> str | None:
    """Say why a key that may have arrived must not be replayed, or None if it may be."""
    before_ms = send_before_ms(first_sent_at, key_ttl_s)
    if before_ms is None:
        return None
    if now_ms < first_sent_at:
        return "the clock is behind the time of the first send"
    if now_ms >= before_ms:
        age = show_time((now_ms - first_sent_at) / 1000)
        return f"its first send was {age} ago and Sume may have forgotten the key"
    return None


class Reply(NamedTuple):
    """An HTTP answer, read whole. `data` is its JSON; `flaw` says why there is none."""

    code: int
    headers: Mapping[str, str]
    data: Any
    flaw: str = ""


class Miss(enum.Enum):
    """What is known of a request that brought no answer."""

    # No byte of the request left: no connection, or none in time.
    NOT_SENT = enum.auto()
    # The request was held back at the last moment: its key is too old to send.
    STALE = enum.auto()
    # The request was held back at the last moment: another worker may have the row by now.
    LEASE = enum.auto()
    # Nothing was sent, and nothing will be until a person changes a setting.
    SETTINGS = enum.auto()
    # It may have arrived.
    UNKNOWN = enum.auto()


class Failure(NamedTuple):
    """A request without an answer."""

    miss: Miss
    text: str


def parse_reply(code: int, headers: Mapping[str, str], body: bytes) -> Reply:
    """Read a body tolerantly: money as exact decimals, anything unreadable as a flaw."""
    lower = {name.lower(): value for name, value in headers.items()}
    try:
        data = json.loads(body, parse_float=_exact, parse_constant=str)
    except (ValueError, RecursionError):
        page = body.lstrip()[:1] == b"<"
        flaw = "a web page instead of JSON" if page else "no JSON"
        return Reply(code, lower, None, flaw if body else "an empty answer")
    return Reply(code, lower, data)


def _exact(text: str) -> Decimal | str:
    """Return a JSON number as it is written; one beyond all bounds stays text."""
    try:
        return Decimal(text)
    except ArithmeticError:
        return text


class ApiError(NamedTuple):
    """The error envelope of an answer (sume-api.md 1.6)."""

    code: str
    message: str
    retryable: bool = True


def error_of(data: object) -> ApiError | None:
    """Return the error envelope of an answer or of a job, None where there is none."""
    error = data.get("error") if isinstance(data, dict) else None
    if isinstance(error, str) and error:
        coded = re.fullmatch(r"[A-Za-z0-9_.-]+", error)
        return ApiError(error if coded else "", error)
    if not isinstance(error, dict) or not error:
        return None
    code = error.get("code", error.get("public_reason"))
    known = isinstance(code, str | int) and not isinstance(code, bool)
    message = error.get("message") or error.get("public_reason") or ""
    details = error.get("details")
    problems = details.get("errors") if isinstance(details, dict) else None
    for problem in problems[:5] if isinstance(problems, list) else ():
        if isinstance(problem, dict):
            message = f"{message}; {problem.get('path')}: {problem.get('message')}"
    return ApiError(str(code) if known else "", str(message), error.get("retryable") is not False)


def unwrap(data: object) -> dict[str, Any]:
    """Return the object that holds the facts: `data` where it is one, else the root.

    Sume's own pages read some answers at the top and its own tools read the same ones
    under `data` (sume-api.md 1.3).
    """
    if not isinstance(data, dict):
        return {}
    inner = data.get("data")
    return inner if isinstance(inner, dict) else data


# One path segment, and nothing that a server or a proxy would read as a path.
_JOB_ID = r"(?!\.+$)[A-Za-z0-9._~:-]{1,200}"


def job_id_of(data: object) -> str | None:
    """Return the job id of a submit's answer, None where there is no usable one.

    The root's `request_id` is a correlation id and never a job (sume-api.md 1.2).
    """
    if not isinstance(data, dict):
        return None
    places = []
    inner = data.get("data")
    if isinstance(inner, dict):
        places = [_dig(inner, "job", "id"), inner.get("job_id"), inner.get("request_id")]
        places += [inner.get("id")]
    places += [data.get("id"), data.get("job_id"), _dig(data, "job", "id")]
    for place in places:
        if isinstance(place, str) and re.fullmatch(_JOB_ID, place):
            return place
    return None


def _dig(data: object, *names: str) -> Any:
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def describe(reply: Reply) -> str:
    """Say in one line what an answer was, for a note: code, error code, message."""
    error = error_of(reply.data)
    if error is None:
        return f"HTTP {reply.code}" + (f", {reply.flaw}" if reply.flaw else "")
    said = ": ".join(dict.fromkeys(part for part in (error.code, error.message) if part))
    return quiet(f"HTTP {reply.code} {said}".strip())


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that Retry-After asks for, None where it says nothing usable.

    RFC 9110 10.2.3 allows whole seconds or a date; a date is measured against the
    answer's own Date, so that this machine's clock does not matter.
    """
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", value):
        return min(float(value), RETRY_AFTER_CAP_S)
    until, said = _http_date_s(value), _http_date_s(headers.get("date", ""))
    if until is None or said is None:
        return None
    return min(max(until - said, 0.0), RETRY_AFTER_CAP_S)


def _http_date_s(value: str) -> float | None:
    from email.utils import parsedate_to_datetime

    if not value.endswith("GMT"):
        return None
    try:
        return float(parsedate_to_datetime(value).timestamp())
    except (ValueError, OverflowError):
        return None


class Allowance(NamedTuple):
    """What a server says is left of a budget, and the seconds until it is full again."""

    remaining: int
    reset_s: float


def allowance_of(headers: Mapping[str, str]) -> Allowance | None:
    """Read RateLimit-Remaining and -Reset, their X- twins, or the one-header draft form."""
    policies = headers.get("ratelimit", "").split(",")
    read = [dict(re.findall(r"\b([rt])=([0-9]{1,9})\b", policy)) for policy in policies]
    pairs = min(read, key=lambda pair: int(pair.get("r", MAX_MICROS)))
    remaining = headers.get("ratelimit-remaining", headers.get("x-ratelimit-remaining"))
    reset = headers.get("ratelimit-reset", headers.get("x-ratelimit-reset"))
    left, back = pairs.get("r", remaining), pairs.get("t", reset)
    if not (left and back and re.fullmatch(_DIGITS, left) and re.fullmatch(_DIGITS, back)):
        return None
    return Allowance(int(left), min(float(back), RETRY_AFTER_CAP_S))


_DIGITS = r"[0-9]{1,9}"


class Landing(enum.Enum):
    """Where a submit ended, as far as its answer tells."""

    ACCEPTED = enum.auto()
    # Surely no job: it did not arrive, or was turned away without a verdict on the row.
    NOT_LANDED = enum.auto()
    # It may have made a job; the same key asks again.
    UNKNOWN = enum.auto()
    # Refused for what the row asks.
    REFUSED = enum.auto()
    # The key stands for something else at Sume; a person must look.
    CONFLICT = enum.auto()
    # Not sent, because the key is too old.
    STALE = enum.auto()


class Pause(enum.Enum):
    """Which gate an answer closes."""

    RATE = "rate limit"
    QUEUE = "full queue"
    OFFLINE = "network"


class Halt(enum.Enum):
    """What an answer stops for the rest of the run."""

    SUBMITS = enum.auto()
    EVERYTHING = enum.auto()


class Outcome(NamedTuple):
    """What the answer to a submit means for its row and for the run."""

    landing: Landing
    trouble: str = ""
    job_id: str | None = None
    # An idempotency hit: Sume already had this key.
    hit: bool = False
    pause: Pause | None = None
    halt: Halt | None = None
    # An answer that settles nothing however often it comes: counted, then a person.
    doubtful: bool = False
    # A 2xx that names no job, or an unknown name: from several rows in a row, it may not
    # be Sume that answers.
    stray: bool = False
    retry_after_s: float | None = None
    allowance: Allowance | None = None
    # Free places in Sume's queue, where the answer names them.
    room: int | None = None


_IN_FLIGHT = r"(?i)in_?progress|in_?flight|in_?use|concurren|being_processed"
_KEY_CONFLICT = r"(?i)idempot|key_(re)?use|(key|payload|body|request|parameters?)_?mismatch"
_POLICY = r"(?i)polic|moderat|content|safety|nsfw|prohibit|copyright|model"
_CREDITS = r"(?i)credit|balance|billing|payment"
_ROUTE = r"(?i)route|endpoint|path|method"


def outcome_of(answer: Reply | Failure) -> Outcome:
    """Classify the answer to a submit (the table of POST outcomes, faults.md 2)."""
    if isinstance(answer, Failure):
        return _MISSED[answer.miss]._replace(trouble=answer.text)
    error = error_of(answer.data)
    code = error.code if error else ""
    text = describe(answer)
    waits: dict[str, Any] = {
        "retry_after_s": retry_after_s(answer.headers),
        "allowance": allowance_of(answer.headers),
    }
    match answer.code:
        case 402:
            return _stop(Halt.SUBMITS, f"{text}; add credits at Sume, then run again")
        case 429 if re.search(_CREDITS, code):
            return _stop(Halt.SUBMITS, f"{text}; add credits at Sume, then run again")
        case 429:
            full = Pause.QUEUE if "queue" in code.lower() else Pause.RATE
            return Outcome(Landing.NOT_LANDED, text, pause=full, **waits)
        case 401:
            return _stop(Halt.EVERYTHING, f"{text}; check SUME_API_KEY")
        case 403 if error and re.search(_POLICY, code):
            return Outcome(Landing.REFUSED, text)
        case 403:
            return _stop(Halt.EVERYTHING, f"{text}; the key has no access, or a proxy refused")
        case 404 | 410 if error and code and not re.search(_ROUTE, code):
            return Outcome(Landing.REFUSED, text, stray=True)
        case 404 | 405 | 410:
            return _stop(Halt.EVERYTHING, f"{text}; check SUME_API_BASE_URL")
        case 409:
            busy = bool(re.search(_IN_FLIGHT, code))
            landing = Landing.UNKNOWN if busy else Landing.CONFLICT
            return Outcome(landing, text, **waits)
        case 400 | 422 if re.search(_KEY_CONFLICT, code):
            return Outcome(Landing.CONFLICT, text)
        case 400 | 413 | 415 | 422:
            return Outcome(Landing.REFUSED, text)
        case status if 300 <= status < 400:
            return _stop(Halt.EVERYTHING, f"{text}, a redirect; check SUME_API_BASE_URL")
        case status if 200 <= status < 300:
            return _outcome_of_success(answer, text, waits)
        case status:
            known = status in (408, 425) or status >= 500
            final = error is not None and not error.retryable
            return Outcome(
                Landing.UNKNOWN, text, pause=Pause.RATE, doubtful=not known or final, **waits
            )


def _stop(halt: Halt, trouble: str) -> Outcome:
    return Outcome(Landing.NOT_LANDED, halt=halt, trouble=trouble)


_MISSED: Mapping[Miss, Outcome] = {
    Miss.NOT_SENT: Outcome(Landing.NOT_LANDED, pause=Pause.OFFLINE),
    Miss.STALE: Outcome(Landing.STALE, pause=Pause.RATE),
    Miss.LEASE: Outcome(Landing.NOT_LANDED),
    Miss.SETTINGS: Outcome(Landing.NOT_LANDED, halt=Halt.EVERYTHING),
    Miss.UNKNOWN: Outcome(Landing.UNKNOWN, pause=Pause.RATE),
}


def _outcome_of_success(reply: Reply, text: str, waits: dict[str, Any]) -> Outcome:
    job_id = job_id_of(reply.data)
    if job_id is None:
        return Outcome(
            Landing.UNKNOWN, f"{text}, without a job id", doubtful=True, stray=True, **waits
        )
    inner = unwrap(reply.data)
    limits = inner.get("generation_limits") or _dig(reply.data, "generation_limits")
    room = _dig(limits, "queue_capacity_remaining")
    hit = inner.get("idempotency_hit", _dig(reply.data, "idempotency_hit"))
    return Outcome(
        Landing.ACCEPTED,
        job_id=job_id,
        hit=hit is True,
        room=room if isinstance(room, int) and not isinstance(room, bool) else None,
        **waits,
    )


# sume-api.md 1.4: both planes' words, those of older generations, and `aborted`.
_WORDS = {
    Status.PENDING: "pending queued in_queue",
    Status.IN_PROGRESS: "in_progress processing running",
    Status.COMPLETED: "completed complete success succeeded ready",
    Status.FAILED: "failed error errored aborted",
    Status.CANCELLED: "cancelled canceled",
    Status.EXPIRED: "expired",
}
STATUS_WORDS = {word: status for status, words in _WORDS.items() for word in words.split()}


class Said(enum.Enum):
    """What kind of answer a read brought."""

    # A status word, known or not.
    STATUS = enum.auto()
    # Nothing usable: counted, read again later.
    BAD = enum.auto()
    # Sume says that it does not know the job, or that the result is gone.
    GONE = enum.auto()
    # The result is not there yet.
    NOT_READY = enum.auto()
    # The server or the network asks for a pause; no row is to blame.
    PAUSED = enum.auto()
    # The account or the route is wrong; no row changes.
    HALTED = enum.auto()


class Reading(NamedTuple):
    """What the answer to a read says about a job."""

    said: Said
    # The word as Sume wrote it, and what it maps to; None for a word nobody knows.
    word: str = ""
    status: Status | None = None
    # `terminal: true` beside a word that is not final.
    ended: bool = False
    cost: Cost = Cost(None, None, None)
    # With their queries, which may be secrets: never stored and never shown.
    links: tuple[str, ...] = ()
    error: str = ""
    hint_s: float | None = None
    trouble: str = ""
    pause: Pause | None = None
    retry_after_s: float | None = None
    allowance: Allowance | None = None
    # A pause that a broken server asks for, and no limit of ours.
    broken: bool = False

    @property
    def urls(self) -> tuple[str, ...]:
        """The links as they may be stored and shown."""
        return tuple(map(bare, self.links))

    @property
    def note(self) -> str | None:
        """What Sume says about how it ended, for the row's note."""
        return f"Sume says: {self.error}" if self.error else None


def reading_of(answer: Reply | Failure, asked: str, of_result: bool = False) -> Reading:
    """Classify the answer to a read of the job `asked` for, or of its result.

    The result route is an extra that not every job need have: what it refuses says nothing
    of the account or the base URL, with which the job itself was read.
    """
    if isinstance(answer, Failure):
        if answer.miss is Miss.NOT_SENT:
            return Reading(said=Said.PAUSED, trouble=answer.text, pause=Pause.OFFLINE)
        bad = Said.HALTED if answer.miss is Miss.SETTINGS else Said.BAD
        return Reading(said=bad, trouble=answer.text)
    error, text = error_of(answer.data), describe(answer)
    wait, left = retry_after_s(answer.headers), allowance_of(answer.headers)
    match answer.code:
        case 200 | 201 | 202 | 203 | 206:
            return _reading_of_job(answer, asked, text, of_result)._replace(allowance=left)
        case 429 | 503:
            return Reading(
                said=Said.PAUSED,
                trouble=text,
                pause=Pause.RATE,
                retry_after_s=wait,
                allowance=left,
                broken=answer.code == 503,
            )
        case 409 if error and "not_completed" in error.code:
            return Reading(said=Said.NOT_READY, trouble=text)
        case status if of_result and 300 <= status < 500 and status not in (408, 425):
            return Reading(said=Said.GONE, trouble=text)
        case 401 | 403:
            return Reading(said=Said.HALTED, trouble=f"{text}; check SUME_API_KEY")
        case 404 | 410 if error and not re.search(_ROUTE, error.code):
            return Reading(said=Said.GONE, trouble=text)
        case status if status in (404, 405, 410) or 300 <= status < 400:
            return Reading(said=Said.HALTED, trouble=f"{text}; check SUME_API_BASE_URL")
        case _:
            return Reading(said=Said.BAD, trouble=text)


def _reading_of_job(reply: Reply, asked: str, text: str, of_result: bool) -> Reading:
    job = unwrap(reply.data)
    ids = [job.get("id"), job.get("job_id"), _dig(job, "job", "id")]
    named = [id for id in ids if isinstance(id, str)]
    if named and asked not in named:
        # A cache or a proxy mixed answers up: another job's clip must not end this row.
        return Reading(said=Said.BAD, trouble=f"{text}, for another job ({quiet(named[0], 60)})")
    links = result_links(job)
    words = [job.get("sume_status"), job.get("status"), _dig(job, "job", "status")]
    said = [word.strip() for word in words if isinstance(word, str) and word.strip()]
    if not said and of_result and links:
        said = [Status.COMPLETED]
    if not said:
        return Reading(said=Said.BAD, trouble=f"{text}, without a status")
    mapped = [(word, STATUS_WORDS.get(_plain(word))) for word in said]
    word, status = next((pair for pair in mapped if pair[1]), mapped[0])
    usages = [job.get("usage"), _dig(job, "job", "usage"), _dig(reply.data, "usage")]
    error = error_of(job) or error_of(job.get("job"))
    hint = job.get("next_poll_after_seconds")
    if hint is None:
        hint = job.get("recommended_poll_interval_seconds")
    return Reading(
        said=Said.STATUS,
        word=inert(word, 60),
        status=status,
        ended=job.get("terminal") is True and status not in FINAL,
        cost=cost_of(next((usage for usage in usages if usage), None)),
        links=links,
        error=quiet(error.message or error.code) if error else "",
        hint_s=_hint_s(hint),
    )


def _plain(word: str) -> str:
    return word.lower().replace("-", "_").replace(" ", "_")


def _hint_s(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return None
    # Compared before the conversion: a huge int does not fit a float.
    return min(float(min(value, 10**6)), MAX_POLL_HINT_S) if value > 0 else None


_NOT_RESULTS = {"status_url", "result_url", "polling_url", "webhook_url", "callback_url"}


# What a row asks with, which a job may repeat.
_ASKED = {"image_url", "audio_url"}


def result_links(job: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the links to result files that a job names, in order (sume-api.md 1.3).

    Within one list, links that differ in their query alone are different files
    (`/content?index=1`); in two places they are one file, signed twice.
    """
    result = job.get("result")
    result = result if isinstance(result, dict) else {}
    places: list[list[object]] = []
    inner = job.get("job")
    for holder in (job, inner if isinstance(inner, dict) else {}, result):
        for name in ("unsigned_urls", "urls", "artifacts"):
            listed = holder.get(name)
            places.append(listed if isinstance(listed, list) else [])
        places.append([holder.get("url")])
    for holder, others in ((job, _NOT_RESULTS | _ASKED), (result, _NOT_RESULTS)):
        names = (name for name in holder if name.endswith("_url") and name not in others)
        places += [[holder[name]] for name in names]
    found: list[str] = []
    for place in places:
        seen = set(map(bare, found))
        plain = [item.get("url") if isinstance(item, dict) else item for item in place]
        links = [
            link for link in plain if isinstance(link, str) and 0 < len(link) <= MAX_LINK_CHARS
        ]
        found += [link for link in dict.fromkeys(links) if bare(link) not in seen]
    return tuple(found[:MAX_FILES])


def bare(link: str) -> str:
    """Return a link without its query and fragment, as it may be stored and shown."""
    return quiet(re.split("[?#]", link)[0], 1000)


def link_for(links: Sequence[str], outputs: Sequence[Output], position: int) -> str | None:
    """Return the link to one of the files that a job named when it ended; None in doubt.

    Fresh links can come in another order, and with other queries. Links that differ in their
    query alone keep their order among themselves. A link that is another file's is never
    taken, and by its place only where as many links came as files were named.
    """
    fresh, named = list(map(bare, links)), [output.url for output in outputs]
    own = named[position]
    if own in fresh and fresh.count(own) == named.count(own):
        places = [place for place, url in enumerate(fresh) if url == own]
        return links[places[named[:position].count(own)]]
    if len(links) != len(outputs) or fresh[position] in named:
        return None
    return links[position]


@dataclass(slots=True)
class Seen:
    """What this run has learned about one row since it started; gone at its end."""

    doubts: int = 0
    # Answers in a row that were no use.
    errors: int = 0
    was_read: bool = False
    warned: bool = False
    gone_since_s: float | None = None
    # The most that the wall clock was ahead of the steady one since the first send: a fall
    # from there means that the age of the key is not known.
    ahead_ms: int = 0
    # Steady time of the accept, or of this run's start where that is later.
    since_s: float = 0.0
    rereads: int = 0
    want_result: bool = False
    result_tries: int = 0
    result_read: bool = False
    last: Reading | None = None


def merge(last: Reading | None, new: Reading) -> Reading:
    """Join what two answers say of a job that has ended: a cost or a file once named stays.

    Answers can overtake each other, so an older word never takes a last one back.
    """
    if last is None:
        return new
    word = new if last.status not in FINAL and new.status in FINAL else last
    return word._replace(
        cost=new.cost if new.cost.micros is not None else last.cost,
        links=new.links or last.links,
        error=new.error or last.error,
    )


class Step(enum.Enum):
    """What to do with an open row after a read."""

    POLL = enum.auto()
    REREAD = enum.auto()
    RESULT = enum.auto()
    FINISH = enum.auto()


def next_step(kind: Kind, reading: Reading, seen: Seen) -> Step:
    """Decide what an open row needs before its last word can be recorded.

    A completed row without a URL (an image always) has its result read once; one without
    a cost is read again three times, since Sume may book it a moment later.
    """
    if reading.ended and not reading.links:
        return Step.FINISH if seen.result_read else Step.RESULT
    if reading.status is not Status.COMPLETED and not reading.ended:
        return Step.FINISH if reading.status in FINAL else Step.POLL
    if not seen.result_read and (kind == "image" or not reading.links):
        return Step.RESULT
    if reading.cost.micros is None and seen.rereads < len(COST_REREAD_S):
        return Step.REREAD
    return Step.FINISH


def last_word(reading: Reading) -> Status:
    """Return the status to record for a job that has ended."""
    if reading.ended:
        return Status.COMPLETED if reading.links else Status.REVIEW
    if reading.status is Status.COMPLETED and reading.error and not reading.links:
        return Status.FAILED
    assert reading.status is not None
    return reading.status


def backoff_s(step: int, rng: random.Random, cap_s: float) -> float:
    """Return the wait after `step` failures in a row: exponential, full jitter, capped."""
    most = min(cap_s, BACKOFF_BASE_S * 2.0 ** min(step, 30))
    return max(min(BACKOFF_FLOOR_S, most), rng.uniform(0.0, most))


def poll_wait_s(wait_s: float, rng: random.Random) -> float:
    """Return a wait spread upwards by a tenth; never sooner than was asked for."""
    return wait_s * rng.uniform(1.0, 1.0 + POLL_JITTER)


NO_ANSWER = "no answer came"


def cancel_refusal(answer: Reply | Failure) -> str:
    """Say why Sume does not cancel a job (sume-api.md 1.3), or nothing where it does.

    Raises AccountError for an answer that no other job's request would change.
    """
    if isinstance(answer, Failure):
        if answer.miss in (Miss.SETTINGS, Miss.NOT_SENT):
            raise AccountError(f"Sume cannot be reached: {answer.text}")
        return f"{NO_ANSWER} ({answer.text})"
    error, text = error_of(answer.data), describe(answer)
    if answer.code == 401 or (answer.code == 403 and error is None):
        raise AccountError(f"{text}; check SUME_API_KEY")
    if 300 <= answer.code < 400 or (answer.code in (404, 405, 410) and error is None):
        raise AccountError(f"{text}; check SUME_API_BASE_URL")
    return "" if 200 <= answer.code < 300 and error is None else text


# What a person may ask for an attempt. Each refusal names the command that helps.


def in_doubt(job: Job) -> bool:
    """Say whether a row is final here while Sume may have a job for it, or still make one."""
    if job.status is Status.REJECTED:
        # A late answer named a job after all.
        return job.job_id is not None
    by_sume = STATUS_WORDS.get(_plain(job.sume_status or "")) is Status.CANCELLED
    return job.status is Status.CANCELLED and job.first_sent_at is not None and not by_sume


def way_out(job: Job, db: str = "") -> str:
    """Return the commands that settle a row in review; `db` is the flag that names its ledger."""
    if job.job_id:
        first, other = f"to read job {job.job_id} again", "or"
    else:
        first, other = "if its job is in Sume's list", "if not"
    return (
        f"{first}: sume-resume resolve{db} --job-id {job.job_id or 'ID'} {shell_word(job.row)};"
        f" {other}, in place of --job-id: --resend (buys it again) or --drop (gives it up)"
    )


_NOT_KNOWN = "may have been sent, and its outcome is not known; sume-resume run finds out"


def retry_refusal(job: Job, has_result: bool) -> str | None:
    """Say why a row gets no new attempt from `retry`, None where it does.

    It gets one only while the outcome of the last one is known.
    """
    match job.status:
        case Status.QUEUED if job.tries:
            return None
        case Status.QUEUED:
            return "is queued and was never sent; sume-resume run sends it"
        case Status.SENDING:
            return _NOT_KNOWN
        case Status.PENDING | Status.IN_PROGRESS:
            return f"is job {job.job_id}, which is not done; sume-resume run reads how it ends"
        case Status.REVIEW:
            return f"needs review first: {way_out(job)}"
        case Status.COMPLETED if has_result:
            return "is completed; for another clip give it a new id, or use --take"
        case _:
            return _doubt(job) if in_doubt(job) else None


def _doubt(job: Job) -> str:
    row = shell_word(job.row)
    return (
        f"is {job.status}, but Sume may have a job for it; sume-resume resolve --resend {row}"
        " buys it again, and may pay twice"
    )


def cancel_row_refusal(job: Job) -> str | None:
    """Say why a row is not to be cancelled, None where it is."""
    if job.status in FINAL:
        return f"is {job.status}; there is nothing to cancel"
    if job.status is Status.SENDING:
        return _NOT_KNOWN
    if job.status is Status.REVIEW:
        return f"needs review; sume-resume resolve --drop {shell_word(job.row)} gives it up"
    return None


def resolve_refusal(job: Job, resend: bool) -> str | None:
    """Say why there is nothing to resolve about a row, None where there is."""
    if job.status is Status.REVIEW or (resend and in_doubt(job)):
        return None
    if in_doubt(job):
        return _doubt(job)
    row = shell_word(job.row)
    if job.status in FINAL:
        helps = "" if job.status is Status.COMPLETED else f"; sume-resume retry {row} buys it again"
        return f"is {job.status}, so there is nothing to settle{helps}"
    return f"is {job.status}, so there is nothing to settle; sume-resume run goes on with it"


# --- input -------------------------------------------------------------------
# From what a person wrote to checked rows. Every problem names file, line and field.


class Defaults(NamedTuple):
    """What --model, --duration, --kind, --set and --take say for rows that do not."""

    kind: Kind | None = None
    fields: Mapping[str, Any] = MappingProxyType({})
    take: int = 1


class InputLog:
    """Collects what is wrong with an input: the first ten problems, then a count."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.count = 0

    def add(self, place: str, problem: str) -> None:
        self.count += 1
        if self.count <= MAX_INPUT_ERRORS:
            self.shown.append(f"{place}: {problem}")

    def check(self) -> None:
        """Raise InputError when anything was wrong."""
        if self.count:
            raise InputError(self.shown, self.count)


# A line number, and either the fields of one row or what is wrong with that line.
Line = tuple[int, dict[str, Any] | str]


def read_rows(stream: BinaryIO, name: str, defaults: Defaults, log: InputLog) -> Iterator[NewRow]:
    """Yield the checked rows of an input; problems go to `log`, and rows go on.

    Holds one row at a time (a JSON array is held whole), an id and its line per row, and
    a hash per distinct row without an id. Raises OSError where the stream does.
    """
    ids: dict[str, int] = {}
    equals: Counter[bytes] = Counter()
    shown = inert(name, 200)
    for line, row in _lines_of(stream, name):
        place = f"{shown}:{line}"
        problems = [row] if isinstance(row, str) else check_fields(row)
        for problem in problems:
            log.add(place, problem)
        if problems or isinstance(row, str):
            continue
        own_id = row.get("id")
        own = {k: v for k, v in row.items() if k != "id" and (v is not None or k not in _LEFT_OUT)}
        try:
            text = canonical(own)
        except (ValueError, RecursionError):
            bad = [key for key, value in own.items() if _unusable(key) or _unusable(value)]
            for key in bad or ["the row"]:
                log.add(place, f"{inert(key, 60)}: {_UNUSABLE}")
            continue
        if own_id is None:
            digest = hashlib.sha256(text.encode()).digest()[:12]
            equals[digest] += 1
            own_id = row_id(text, equals[digest], defaults.take)
        id = str(own_id)
        if id in ids:
            log.add(place, f"id: '{inert(id, 60)}' is also on line {ids[id]}")
            continue
        ids[id] = line
        try:
            yield build_row(id, own, text, place, defaults)
        except InputError as exc:
            log.add(place, str(exc))


def build_row(
    row: str, own: Mapping[str, Any], own_text: str, place: str, defaults: Defaults
) -> NewRow:
    """Build the exact body of a row: its own fields, then the defaults it does not name."""
    given = {k: v for k, v in defaults.fields.items() if k not in own}
    fields: dict[str, Any] = {"model": DEFAULT_MODEL, "mode": "async", **given, **own}
    fields.pop("kind", None)
    kind: Kind = own.get("kind") or defaults.kind or "video"
    if defaults.kind is not None and "kind" not in own:
        given["kind"] = defaults.kind
    body = canonical(fields).encode()
    if len(body) > MAX_BODY_BYTES:
        raise InputError([f"the row makes a body of {len(body)} bytes, over {MAX_BODY_BYTES}"])
    return NewRow(row, kind, fields["model"], fields.get("duration"), own_text, body, place, given)


def check_fields(row: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the fields of a row, one line per field."""
    problems = []
    if row.get("prompt") is None:
        problems.append("prompt: missing; every row needs one")
    for name, value in row.items():
        if name in _CHECKED and (expected := _expected(name, value)):
            problems.append(f"{name}: expected {expected}, got {_shown(value)}")
    return problems


# A null in one of these is a field left out; elsewhere it is a value.
_LEFT_OUT = frozenset({"model", "duration", "kind"})
# Fields that the tool knows; others go through as they are.
_CHECKED = frozenset({"id", "prompt", "model", "duration", "kind", "mode"})
_UNUSABLE = "expected valid Unicode, finite numbers and less nesting"


def _unusable(value: object) -> bool:
    """Say whether a value that was read cannot be written as JSON again."""
    if isinstance(value, int | None):
        return False
    try:
        canonical(value)
    except (ValueError, RecursionError):
        return True
    return False


def _expected(name: str, value: object) -> str | None:
    """Say what a field must be, or None where it is that already."""
    good, expected = True, ""
    match name:
        case "id":
            whole = isinstance(value, int) and not isinstance(value, bool)
            text = str(value) if whole or isinstance(value, str) else ""
            plain = text.isprintable() and text.strip() == text != ""
            good = value is None or (plain and len(text) <= MAX_ROW_ID_CHARS)
            expected = f"printable text of 1 to {MAX_ROW_ID_CHARS} characters"
        case "prompt":
            good = value is None or (isinstance(value, str) and value.strip() != "")
            expected = "text"
        case "model":
            good = value is None or (isinstance(value, str) and value.strip() != "")
            expected = "a model name"
        case "duration":
            whole = isinstance(value, int) and not isinstance(value, bool)
            good = value is None or (whole and 0 < cast(int, value) < 2**31)
            expected = "a whole number of seconds above 0"
        case "kind":
            good, expected = value is None or value in KINDS, "video or image"
        case "mode":
            good, expected = value == "async", "async (jobs are polled, not waited for)"
    return None if good else expected


def _shown(value: object) -> str:
    try:
        return inert(json.dumps(value, ensure_ascii=False, default=str), 60)
    except (ValueError, RecursionError):
        return type(value).__name__


# A number and its line as text; bytes that are no UTF-8 come as lone surrogates.
TextLine = tuple[int, str]
_JSON_FILES = {".json", ".jsonl", ".ndjson"}
_BOM = b"\xef\xbb\xbf"


def _lines_of(stream: BinaryIO, name: str) -> Iterator[Line]:
    """Pick the format by the file's extension, else by its first character."""
    head = stream.read(4096)
    stream.seek(0)
    if b"\0" in head.partition(b"\n")[0] or head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        yield 1, "the text is UTF-16 or binary; save it as UTF-8"
        return
    suffix, start = Path(name).suffix.lower(), head.removeprefix(_BOM).lstrip()[:1]
    if suffix == ".csv" or (suffix not in _JSON_FILES and start not in (b"{", b"[", b"")):
        yield from _csv_rows(_text_lines(stream, name))
    elif start == b"[":
        text = stream.read().removeprefix(_BOM).decode("utf-8", "surrogateescape")
        yield from _array_rows(text)
    else:
        yield from _json_lines(_text_lines(stream, name))


def _text_lines(stream: BinaryIO, name: str) -> Iterator[TextLine]:
    """Split on line feeds only: U+2028 and its like are text inside a JSON string."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES:
            place = f"{inert(name, 200)}:{number}"
            raise InputError([f"{place}: the line is longer than {MAX_LINE_BYTES} bytes"])
        if number == 1:
            line = line.removeprefix(_BOM)
        yield number, line.decode("utf-8", "surrogateescape")


def _json_lines(lines: Iterable[TextLine]) -> Iterator[Line]:
    for number, text in lines:
        if not text.strip():
            continue
        yield number, _json_row(text)


def _json_row(text: str) -> dict[str, Any] | str:
    if not text.isascii() and re.search(_BAD_BYTES, text):
        return "the text is not UTF-8"
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as exc:
        return _LONE_CR if "\r" in text.rstrip() else _json_flaw(exc)
    return value if isinstance(value, dict) else f"expected a JSON object, got {_shown(value)}"


_LONE_CR = "lines must end with LF or CRLF, not with CR alone"


def _json_flaw(exc: Exception) -> str:
    match exc:
        case json.JSONDecodeError():
            return f"not valid JSON: {exc.msg} at column {exc.colno}"
        case RecursionError():
            return "not usable JSON: nested too deep"
        case ValueError() if "digits" in str(exc):
            return "not usable JSON: a number is too long"
    return f"not usable JSON: {inert(exc, 100)}"


_BAD_BYTES = "[\udc80-\udcff]"


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for name, n in Counter(k for k, _ in pairs).items() if n > 1)
        raise ValueError(f"the field '{inert(twice, 60)}' is there twice")
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(object_pairs_hook=_no_twins, parse_constant=_no_constant)
# Finds the end of a value that the strict one refuses for what it says.
_LAX_DECODER = json.JSONDecoder()
_GAP = r"[ \t\r\n]*"


def _array_rows(text: str) -> Iterator[Line]:
    """Take a JSON array apart, one row at a time, each with the line that it starts on."""
    at, line, counted, expected = 0, 1, 0, "["
    while True:
        at = _skip(text, at)
        mark = text[at : at + 1]
        line, counted = line + text.count("\n", counted, at), at
        if mark == "]" and expected != "[":
            rest = text[_skip(text, at + 1) :]
            if rest:
                yield line, f"not valid JSON: {_shown(rest[:20])} after the end of the array"
            return
        if mark != expected:
            yield line, f"not valid JSON: expected '{expected}'"
            return
        at = _skip(text, at + 1)
        if expected == "[" and text[at : at + 1] == "]":
            expected = ","
            continue
        line, counted = line + text.count("\n", counted, at), at
        expected = ","
        try:
            item, end = _array_item(text, at)
        except (ValueError, RecursionError) as exc:
            broken = exc.pos if isinstance(exc, json.JSONDecodeError) else at
            yield line + text.count("\n", at, broken), _json_flaw(exc)
            return
        yield line, item
        at = end


def _skip(text: str, at: int) -> int:
    gap = re.compile(_GAP).match(text, at)
    return gap.end() if gap else at


def _array_item(text: str, at: int) -> tuple[dict[str, Any] | str, int]:
    """Return the row at a place, or what is wrong with it, and where it ends."""
    try:
        item, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except ValueError as exc:
        return _json_flaw(exc), _LAX_DECODER.raw_decode(text, at)[1]
    if re.compile(_BAD_BYTES).search(text, at, end):
        return "the text is not UTF-8", end
    return item if isinstance(item, dict) else f"expected a JSON object, got {_shown(item)}", end


def _csv_rows(lines: Iterable[TextLine]) -> Iterator[Line]:
    import csv

    # The csv module's own limit of 131,072 characters is below a long prompt.
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader((text for _, text in lines), strict=True)
    header: list[str] | None = None
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as exc:
            alone = "newline" in str(exc)
            yield start, _LONE_CR if alone else f"not valid CSV: {inert(exc, 100)}"
            return
        if cells is None:
            return
        if not any(cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            flaw = _header_flaw(header)
            if flaw:
                yield start, flaw
                return
        else:
            yield start, _csv_row(header, cells)


def _header_flaw(header: Sequence[str]) -> str | None:
    if any(re.search(_BAD_BYTES, name) for name in header):
        return "the text is not UTF-8"
    twice = [name for name, n in Counter(header).items() if n > 1]
    if twice:
        return f"the column '{inert(twice[0], 60)}' is there twice"
    if "prompt" in header:
        return None
    if len(header) == 1 and re.search("[;\t]", header[0]):
        return "expected cells that are separated by commas"
    return f"expected a header line with a column 'prompt', got {_shown(', '.join(header))}"


def _csv_row(header: Sequence[str], cells: Sequence[str]) -> dict[str, Any] | str:
    if len(cells) > len(header):
        return f"expected {len(header)} cells as in the header, got {len(cells)}"
    if any(re.search(_BAD_BYTES, cell) for cell in cells):
        return "the text is not UTF-8"
    named = zip(header, cells, strict=False)
    return {name: typed(name, cell) for name, cell in named if cell != ""}


_ALWAYS_TEXT = {"id", "prompt", "model"}


def typed(name: str, text: str) -> Any:
    """Read a CSV cell or a --set value: a valid JSON value is typed, the rest is text."""
    if name in _ALWAYS_TEXT:
        return text
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


def is_same(job: Job, row: NewRow) -> bool:
    """Say whether an input row is the one that an attempt was made from.

    Its own fields are compared, never the built body; `kind` only where it is written.
    """
    if job.own == row.own:
        return True
    had, has = json.loads(job.own), json.loads(row.own)
    had.pop("kind", None)
    same_kind = has.pop("kind", job.kind) == job.kind
    return same_kind and canonical(had) == canonical(has)


def clash(job: Job, row: NewRow) -> str | None:
    """Say which default given now differs from what a row was built with, if any."""
    if not row.given:
        return None
    built = json.loads(job.body) | {"kind": job.kind}
    for name, value in row.given.items():
        if name not in built or canonical(built[name]) != canonical(value):
            had = _shown(built[name]) if name in built else "none"
            return (
                f"{inert(name, 60)}: row '{job.row}' ({job.status}) was built with {had} and"
                f" {_shown(value)} is given now"
            )
    return None


class Fate(enum.Enum):
    """What adding a row does where a row of that id is in the ledger."""

    # Nothing: it is the same.
    SAME = enum.auto()
    # It was never bought, so it takes the new content.
    REPLACE = enum.auto()
    # It ended, and not with a clip: a new attempt gets the new content.
    BUY_AGAIN = enum.auto()


def fate_of(there: Job, row: NewRow, replace: bool) -> Fate | str:
    """Say what adding a row does to the attempt that is there; text says why it is refused."""
    if is_same(there, row):
        problem, helps = clash(there, row), "leave the flag out, or use --take or a new id"
    else:
        helps = "take the change back, or give it a new id"
        problem = (
            f"row '{there.row}' (attempt {there.attempt}, {there.status}) is in the ledger with"
            f" other content, from {there.source}"
        )
    if problem is None:
        return Fate.SAME
    fate = None
    if there.status is Status.QUEUED:
        fate = Fate.REPLACE
    elif there.status in FINAL and there.status is not Status.COMPLETED and not in_doubt(there):
        fate = Fate.BUY_AGAIN
    if fate is not None:
        return fate if replace else f"{problem}; {helps}, or use --replace"
    if not replace:
        return f"{problem}; {helps}"
    return f"{problem}; --replace cannot change a row that is {there.status}; {helps}"


# A price list says what a clip or an image of a model costs, in decimal dollars; an
# estimate from it is what a cap reserves. An estimate is never a cost.

_PRICE_FIELDS = ("video_usd_per_second", "image_usd")


class Price(NamedTuple):
    """The prices of one model, in exact dollars; None is not known."""

    video_usd_per_second: Decimal | None = None
    image_usd: Decimal | None = None


class Prices(NamedTuple):
    """The prices of all models, and of their resolutions where those differ."""

    models: Mapping[str, Price]
    resolutions: Mapping[tuple[str, str], Price]

    def estimate(self, kind: Kind, model: str, body: bytes) -> int | None:
        """Return what a row is expected to cost, in micros rounded up; None is not known.

        A resolution's own price goes before the model's. A video needs its seconds.
        """
        fields = json.loads(body)
        chosen = self.resolutions.get((model, str(fields.get("resolution"))))
        for price in (chosen, self.models.get(model)):
            if price is None:
                continue
            if kind == "image" and price.image_usd is not None:
                return _up_to_micros(price.image_usd)
            if kind == "video" and price.video_usd_per_second is not None:
                seconds = fields.get("duration")
                if not isinstance(seconds, int) or isinstance(seconds, bool):
                    return None
                return _up_to_micros(price.video_usd_per_second * seconds)
        return None


def _up_to_micros(usd: Decimal) -> int:
    return int((usd * 1_000_000).to_integral_value(ROUND_CEILING))


def parse_prices(text: str, name: str) -> Prices:
    """Read a price list, TOML or JSON by the file's name.

    Raises InputError, which names line and field, for whatever is not understood: a
    misspelled price must not count as none.
    """
    import tomllib

    try:
        if Path(name).suffix.lower() == ".json":
            data = json.loads(text, parse_float=Decimal, object_pairs_hook=_no_twins)
        else:
            data = tomllib.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as exc:
        found = getattr(exc, "lineno", None) or re.search(r"at line (\d+)", str(exc))
        line = found[1] if isinstance(found, re.Match) else found
        where = f"{name}:{line}" if line else name
        raise InputError([f"{where}: not a price list: {inert(exc, 200)}"]) from exc
    reader = _PriceReader(text, name)
    for model, table in reader.tables((), data, ("models",)).items():
        own = reader.tables(("models", model), table, ("resolution",), _PRICE_FIELDS)
        reader.models[model] = reader.price(("models", model), table)
        for resolution, prices in own.items():
            path = ("models", model, "resolution", resolution)
            reader.tables(path, prices, (), _PRICE_FIELDS)
            reader.resolutions[model, resolution] = reader.price(path, prices)
    if not reader.models and not reader.log.count:
        reader.complain(("models",), "expected a table of models")
    reader.log.check()
    return Prices(reader.models, reader.resolutions)


class _PriceReader:
    """Takes a price list apart, and collects what is wrong with it."""

    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text, name
        self.log = InputLog()
        self.models: dict[str, Price] = {}
        self.resolutions: dict[tuple[str, str], Price] = {}

    def complain(self, path: Sequence[str], problem: str) -> None:
        field_ = ".".join(inert(part, 60) for part in path) or "price list"
        self.log.add(f"{self._name}:{_line_of(self._text, path)}", f"{field_}: {problem}")

    def tables(
        self, path: tuple[str, ...], table: Any, inner: tuple[str, ...], more: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """Return the table of tables that a table may hold; other names are a problem."""
        if not isinstance(table, dict):
            self.complain(path, f"expected a table, got {_shown(table)}")
            return {}
        for name in table:
            if name not in (*inner, *more):
                helps = ""
                if isinstance(table[name], dict) and more:
                    helps = f'; a name with a dot needs quotes: [models."{path[-1]}.{name}"]'
                wanted = f"expected one of {', '.join((*more, *inner))}{helps}"
                self.complain((*path, name), wanted)
        held = table.get(inner[0], {}) if inner else {}
        if isinstance(held, dict):
            return held
        self.complain((*path, *inner), f"expected a table, got {_shown(held)}")
        return {}

    def price(self, path: tuple[str, ...], table: Any) -> Price:
        values: dict[str, Decimal] = {}
        for name in _PRICE_FIELDS:
            value = table.get(name) if isinstance(table, dict) else None
            usd = _price(value)
            if usd is not None:
                values[name] = usd
            elif value is not None:
                wanted = f'expected dollars such as "0.40", got {_shown(value)}'
                self.complain((*path, name), wanted)
        return Price(**values)


def _price(value: object) -> Decimal | None:
    """Return exact dollars; text or a number, not below 0, and no more than a price can be."""
    usd = decimal_of(value)
    if usd is None or not usd.is_finite():
        return None
    return usd if 0 <= usd <= MAX_MICROS // 1_000_000 else None


def _line_of(text: str, path: Sequence[str]) -> int:
    """Return the line on which a field of a price list stands, as far as names tell it."""
    line, lines = 1, text.split("\n")
    for part in path[1:]:
        whole = rf"(?<![\w-]){re.escape(part)}(?![\w-])"
        found = (n for n in range(line, len(lines) + 1) if re.search(whole, lines[n - 1]))
        line = next(found, line)
    return line


# --- pacing ------------------------------------------------------------------
# Pure: budgets, gates and the queue window. Times are steady seconds, passed in.


class Budget:
    """A token bucket that holds one token: requests leave evenly spaced."""

    def __init__(self, per_minute: float) -> None:
        self.interval_s = 60.0 / (per_minute * BUDGET_SHARE) if per_minute else 0.0
        self.ready_s = 0.0

    def seed(self, now_s: float, since_last_s: float) -> None:
        """Go on where an earlier process stopped: a restart does not refill the bucket."""
        wait = self.interval_s - max(0.0, since_last_s)
        self.ready_s = now_s + max(0.0, wait)

    def take(self, now_s: float) -> None:
        self.ready_s = max(self.ready_s, now_s - BUDGET_CREDIT_S) + self.interval_s

    def taken_ms(self, now_s: float, now_ms: int) -> int:
        """Return the time for which the last token was, in ms UTC: what `seed` goes on from."""
        return now_ms + round((self.ready_s - self.interval_s - now_s) * 1000)


class Gate:
    """Shut for a while after a refusal, then open for one probe at a time."""

    def __init__(self, cap_s: float = BACKOFF_CAP_S) -> None:
        self.cap_s = cap_s
        self.step = 0
        self.until_s = 0.0
        self._shut_at_s = float("-inf")

    def shut(self, now_s: float, sent_s: float, asked_s: float | None, rng: random.Random) -> float:
        """Shut for the own backoff, or for what the server asked where that is longer.

        A request that left before the gate was shut last tells nothing new: it extends
        the pause and does not raise the backoff. Returns the end of the pause.
        """
        if sent_s >= self._shut_at_s:
            wait = backoff_s(self.step, rng, self.cap_s)
            self.step += 1
            self._shut_at_s = now_s
        else:
            wait = 0.0
        if asked_s is not None:
            wait = max(wait, poll_wait_s(asked_s, rng))
        self.until_s = max(self.until_s, now_s + wait)
        return self.until_s

    def hold(self, until_s: float) -> None:
        """Stay shut until then, without a failure."""
        self.until_s = max(self.until_s, until_s)

    def passed(self, sent_s: float) -> None:
        """A request that left after the gate was shut got through."""
        if sent_s >= self._shut_at_s:
            self.step = 0

    def ready(self, now_s: float, in_flight: int) -> bool:
        return now_s >= self.until_s and (self.step == 0 or in_flight == 0)


class QueueWindow:
    """How many jobs Sume's queue takes from us, learned from its answers.

    An answer that reports room says how many fit: room + ours. That is too many by the jobs
    that have ended and that we have not read since. So a smaller number is believed at once,
    and a larger one only after as many such answers in a row as the window is large: by then
    each of ours was read. It grows by one an answer, since others may take the room too;
    without reports after a few answers. A full queue sets it to what is there; when others
    filled it, a probe a minute finds out that they have left.
    """

    def __init__(self) -> None:
        self.size: float = float("inf")
        # The last reports in a row of more, and answers without a report since the last one.
        self._more: deque[float] = deque()
        self._silent = 0
        self._probe_s = float("inf")

    def accepted(self, room: int | None, ours: int) -> None:
        """An accept was answered; `ours` counts open and in-flight jobs, this one too."""
        if room is None:
            self._heard_nothing(ours)
            return
        self._silent = 0
        if room + ours <= self.size:
            self.size = room + ours
            self._more.clear()
            return
        # A probe beyond the window got through.
        self.size = max(self.size, ours)
        self._more.append(room + ours)
        while len(self._more) > max(1, self.size):
            self._more.popleft()
        if len(self._more) >= self.size and min(self._more) > self.size:
            self.size += 1

    def _heard_nothing(self, ours: int) -> None:
        """An accept came without a report; where none ever comes, it is all there is."""
        if self.size == float("inf"):
            return
        self.size, self._silent = max(self.size, ours), self._silent + 1
        if self._silent >= min(self.size, ROOM_VOTES):
            self.size, self._silent = self.size + 1, 0

    def full(self, ours: int, now_s: float) -> None:
        """The queue was full while `ours` were in it."""
        self.size, self._silent = float(ours), 0
        self._more.clear()
        self._probe_s = now_s + QUEUE_PROBE_S

    def has_room(self, ours: int, now_s: float) -> bool:
        # With nothing of ours in it, a probe finds out; its gate sees to the pace.
        return ours < max(self.size, 1) or now_s >= self._probe_s

    def sent(self, ours: int, now_s: float) -> None:
        """One more is sent while `ours` are there: beyond the window it is the probe."""
        if ours >= self.size:
            self._probe_s = now_s + QUEUE_PROBE_S


class Pacing:
    """All that decides when a request may leave: two budgets, four gates, the queue window.

    A rate limit and a full queue are two gates: one opens by the clock, the other when jobs
    end. What must outlive the process comes out of `facts`, and goes in again by `restore`.
    """

    def __init__(
        self, writes_per_minute: float, reads_per_minute: float, rng: random.Random
    ) -> None:
        self.writes, self.reads = Budget(writes_per_minute), Budget(reads_per_minute)
        self.offline = Gate(OFFLINE_CAP_S)
        self.submit_rate, self.queue, self.read_rate = Gate(), Gate(), Gate()
        self.window = QueueWindow()
        self._rng = rng
        self._lasting = {
            "submit_pause": self.submit_rate,
            "queue_pause": self.queue,
            "read_pause": self.read_rate,
        }
        self._kept: dict[str, float] = {}

    def restore(self, kept: Callable[[str], int | None], now_s: float, now_ms: int) -> None:
        """Go on where an earlier process stopped; `kept` returns ms UTC by name."""
        for name, budget in (("writes", self.writes), ("reads", self.reads)):
            last = kept(name)
            # Another worker's turn may have begun a moment after this one.
            if last is not None and last - now_ms <= CLOCK_FALL_MS:
                budget.seed(now_s, (now_ms - last) / 1000)
            elif last is not None and not budget.ready_s:
                # The clock was set back since: as if it had been used just now.
                budget.seed(now_s, 0.0)
        for name, gate in self._lasting.items():
            until = kept(name)
            left_s = (until - now_ms) / 1000 if until is not None else 0.0
            # A longer pause was never asked for: the clock has moved.
            if 0 < left_s <= RETRY_AFTER_CAP_S * (1 + POLL_JITTER):
                gate.hold(now_s + left_s)

    def facts(self, now_s: float, now_ms: int) -> Iterator[tuple[str, int]]:
        """Yield the pauses that are new since the last call, as ms UTC by name."""
        for name, gate in self._lasting.items():
            if gate.until_s > max(now_s, self._kept.get(name, 0.0)):
                self._kept[name] = gate.until_s
                yield name, now_ms + round((gate.until_s - now_s) * 1000)

    def may_submit(self, now_s: float, submits: int, flying: int) -> bool:
        """Say whether a submit may leave, with so many submits and requests in flight."""
        return (
            self.writes.ready_s <= now_s
            and self.offline.ready(now_s, flying)
            and self.submit_rate.ready(now_s, submits)
            and self.queue.ready(now_s, submits)
        )

    def may_read(self, now_s: float, reads: int, flying: int) -> bool:
        return (
            self.reads.ready_s <= now_s
            and self.offline.ready(now_s, flying)
            and self.read_rate.ready(now_s, reads)
        )

    def submit_at_s(self) -> float:
        """Return the time before which no submit may leave."""
        gates = (self.offline, self.submit_rate, self.queue)
        return max(self.writes.ready_s, *(gate.until_s for gate in gates))

    def read_at_s(self) -> float:
        return max(self.reads.ready_s, self.offline.until_s, self.read_rate.until_s)

    def submitted(
        self, outcome: Outcome, sent_s: float, now_s: float, open_jobs: int, submits: int
    ) -> None:
        """Learn from the answer to a submit, with so many jobs open and submits in flight."""
        asked_s = outcome.retry_after_s
        match outcome.pause:
            case Pause.RATE:
                self.submit_rate.shut(now_s, sent_s, asked_s, self._rng)
            case Pause.QUEUE:
                self.window.full(open_jobs + submits, now_s)
                if open_jobs + submits == 0:
                    self.queue.shut(now_s, sent_s, asked_s, self._rng)
                elif asked_s is not None:
                    self.queue.hold(now_s + asked_s)
            case Pause.OFFLINE:
                self.offline.shut(now_s, sent_s, None, self._rng)
            case None:
                self.submit_rate.passed(sent_s)
            case _:
                assert_never(outcome.pause)
        if outcome.landing is Landing.ACCEPTED:
            self.queue.passed(sent_s)
            # The job that was accepted is not among the open ones yet.
            self.window.accepted(outcome.room, open_jobs + submits + 1)
        self._answered(outcome.pause, outcome.allowance, self.submit_rate, submits, sent_s, now_s)

    def was_read(self, reading: Reading, sent_s: float, now_s: float, reads: int) -> None:
        """Learn from the answer to a read, with so many reads in flight."""
        if reading.pause is Pause.OFFLINE:
            self.offline.shut(now_s, sent_s, None, self._rng)
        elif reading.pause is not None:
            self.read_rate.shut(now_s, sent_s, reading.retry_after_s, self._rng)
        else:
            self.read_rate.passed(sent_s)
        self._answered(reading.pause, reading.allowance, self.read_rate, reads, sent_s, now_s)

    def _answered(
        self,
        pause: Pause | None,
        left: Allowance | None,
        gate: Gate,
        flying: int,
        sent_s: float,
        now_s: float,
    ) -> None:
        """Whatever was answered, the network is there; a budget that is used up holds."""
        if pause is not Pause.OFFLINE:
            self.offline.passed(sent_s)
        if left is not None and left.remaining <= flying:
            gate.hold(now_s + left.reset_s)

    def waiting_for(self, now_s: float) -> str | None:
        """Say which gate is shut, and for how long."""
        gates = (
            ("offline", self.offline),
            ("rate limit", self.submit_rate),
            ("full queue", self.queue),
            ("a pause of reads", self.read_rate),
        )
        for name, gate in gates:
            if gate.until_s > now_s:
                return f"{name}, {show_time(gate.until_s - now_s)}"
        return None


# --- schema ------------------------------------------------------------------
# All SQL text of the ledger. Values are bound by name; the dialect is kept common to
# SQLite and Postgres as far as it goes.

# Totals need not look at the rows: what was paid, and what may still have to be.
TOTALS_INDEXES = (
    "CREATE INDEX jobs_paid ON jobs (cost_micros) WHERE cost_micros IS NOT NULL",
    """
        CREATE INDEX jobs_unpaid ON jobs (first_sent_at)
        WHERE cost_micros IS NULL AND first_sent_at IS NOT NULL
        """,
)
# Append-only: a step that has shipped is never edited. Each runs in one transaction.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # Facts about the ledger as a whole: namespace, account, when it was made.
        """
        CREATE TABLE meta (
            name TEXT PRIMARY KEY,
            value TEXT NOT NULL
        ) STRICT
        """,
        # One line per attempt: one purchase, or the wish for one, of a row.
        """
        CREATE TABLE jobs (
            id INTEGER PRIMARY KEY,
            row TEXT NOT NULL,
            attempt INTEGER NOT NULL CHECK (attempt >= 1),
            latest INTEGER NOT NULL DEFAULT 1 CHECK (latest IN (0, 1)),
            key TEXT NOT NULL UNIQUE,        -- the Idempotency-Key, byte for byte
            job_id TEXT UNIQUE,              -- Sume's name for the job
            kind TEXT NOT NULL CHECK (kind IN ('video', 'image')),
            model TEXT NOT NULL,
            duration_s INTEGER,              -- requested seconds, where the row has them
            own TEXT NOT NULL,               -- the row's fields as written, before defaults
            body BLOB NOT NULL,              -- the request body, byte for byte
            source TEXT NOT NULL,            -- file and line that the row came from
            status TEXT NOT NULL CHECK (status IN (
                'queued', 'sending', 'pending', 'in_progress', 'completed', 'failed',
                'cancelled', 'expired', 'rejected', 'review')),
            sume_status TEXT,                -- Sume's last word, verbatim
            cost_micros INTEGER CHECK (cost_micros >= 0),  -- micro-USD; NULL is unknown
            cost_state TEXT,                 -- captured, refunded, billable, stated, ...
            usage TEXT,                      -- what Sume said about money, as JSON
            tries INTEGER NOT NULL DEFAULT 0,              -- times it was sent
            first_sent_at INTEGER,           -- ms UTC; NULL while surely never sent
            accepted_at INTEGER,
            finished_at INTEGER,
            next_poll_at INTEGER,            -- ms UTC; NULL unless Sume works on it
            poll_errors INTEGER NOT NULL DEFAULT 0,
            trouble TEXT,                    -- the last thing that went wrong
            note TEXT,                       -- why it ended so, or what a person must do
            created_at INTEGER NOT NULL,
            updated_at INTEGER NOT NULL,
            UNIQUE (row, attempt),
            CHECK ((next_poll_at IS NOT NULL) = (status IN ('pending', 'in_progress'))),
            CHECK (job_id IS NOT NULL OR status NOT IN ('pending', 'in_progress')),
            CHECK (first_sent_at IS NOT NULL OR status <> 'sending'),
            CHECK (first_sent_at IS NULL OR status <> 'queued')
        ) STRICT
        """,
        "CREATE UNIQUE INDEX jobs_latest ON jobs (row) WHERE latest = 1",
        "CREATE INDEX jobs_by_status ON jobs (status, id) WHERE latest = 1",
        "CREATE INDEX jobs_due ON jobs (next_poll_at) WHERE next_poll_at IS NOT NULL",
        # The history: one line per fact, never changed and never deleted.
        """
        CREATE TABLE events (
            id INTEGER PRIMARY KEY,
            at INTEGER NOT NULL,             -- ms UTC
            job INTEGER NOT NULL REFERENCES jobs (id),
            event TEXT NOT NULL,             -- the recording method, without record_
            before TEXT,
            after TEXT NOT NULL,
            detail TEXT
        ) STRICT
        """,
        "CREATE INDEX events_by_job ON events (job)",
        # The result files that a job names.
        """
        CREATE TABLE outputs (
            job INTEGER NOT NULL REFERENCES jobs (id),
            position INTEGER NOT NULL,
            url TEXT NOT NULL,               -- without its query, which may be a secret
            path TEXT,
            sha256 TEXT,
            bytes INTEGER,
            PRIMARY KEY (job, position)
        ) STRICT
        """,
        # When the last request of a budget left, and until when a gate is shut.
        """
        CREATE TABLE pacing (
            name TEXT PRIMARY KEY,
            at INTEGER NOT NULL              -- ms UTC
        ) STRICT
        """,
        "PRAGMA application_id = 1400197733",
        "PRAGMA user_version = 1",
    ),
    (
        # What an attempt is expected to cost, reserved before it is sent; micro-USD.
        "ALTER TABLE jobs ADD COLUMN estimate_micros INTEGER CHECK (estimate_micros >= 0)",
        "PRAGMA user_version = 2",
    ),
    (
        # Of a download that was broken off: what proves that the object is the same one, how
        # many bytes of its .part are durable, and from where they came.
        "ALTER TABLE outputs ADD COLUMN etag TEXT",
        "ALTER TABLE outputs ADD COLUMN part_bytes INTEGER",
        "ALTER TABLE outputs ADD COLUMN part_url TEXT",
        "PRAGMA user_version = 3",
    ),
    (
        # Who has an attempt in hand, where several workers share a ledger.
        "ALTER TABLE jobs ADD COLUMN token INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE jobs ADD COLUMN lease_until INTEGER",
        "ALTER TABLE jobs ADD COLUMN worker TEXT",
        "PRAGMA user_version = 4",
    ),
    (*TOTALS_INDEXES, "PRAGMA user_version = 5"),
)
SCHEMA_VERSION = len(MIGRATIONS)

# The same on Postgres: one step that makes what the steps above add up to, then its own.
# Text is compared by bytes, as SQLite does.
POSTGRES_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE SCHEMA IF NOT EXISTS SCHEMA_NAME",
        """
        CREATE TABLE meta (
            name TEXT COLLATE "C" PRIMARY KEY,
            value TEXT NOT NULL
        )
        """,
        """
        CREATE TABLE jobs (
            id BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
            row TEXT COLLATE "C" NOT NULL,
            attempt BIGINT NOT NULL CHECK (attempt >= 1),
            latest INTEGER NOT NULL DEFAULT 1 CHECK (latest IN (0, 1)),
            key TEXT COLLATE "C" NOT NULL UNIQUE,
            job_id TEXT COLLATE "C" UNIQUE,
            kind TEXT NOT NULL CHECK (kind IN ('video', 'image')),
            model TEXT NOT NULL,
            duration_s BIGINT,
            own TEXT NOT NULL,
            body BYTEA NOT NULL,
            source TEXT NOT NULL,
            status TEXT NOT NULL CHECK (status IN (
                'queued', 'sending', 'pending', 'in_progress', 'completed', 'failed',
                'cancelled', 'expired', 'rejected', 'review')),
            sume_status TEXT,
            cost_micros BIGINT CHECK (cost_micros >= 0),
            cost_state TEXT,
            usage TEXT,
            tries BIGINT NOT NULL DEFAULT 0,
            first_sent_at BIGINT,
            accepted_at BIGINT,
            finished_at BIGINT,
            next_poll_at BIGINT,
            poll_errors BIGINT NOT NULL DEFAULT 0,
            trouble TEXT,
            note TEXT,
            created_at BIGINT NOT NULL,
            updated_at BIGINT NOT NULL,
            estimate_micros BIGINT CHECK (estimate_micros >= 0),
            token BIGINT NOT NULL DEFAULT 0,
            lease_until BIGINT,
            worker TEXT,
            UNIQUE (row, attempt),
            CHECK ((next_poll_at IS NOT NULL) = (status IN ('pending', 'in_progress'))),
            CHECK (job_id IS NOT NULL OR status NOT IN ('pending', 'in_progress')),
            CHECK (first_sent_at IS NOT NULL OR status <> 'sending'),
            CHECK (first_sent_at IS NULL OR status <> 'queued')
        )
        """,
        "CREATE UNIQUE INDEX jobs_latest ON jobs (row) WHERE latest = 1",
        "CREATE INDEX jobs_by_status ON jobs (status, id) WHERE latest = 1",
        "CREATE INDEX jobs_due ON jobs (next_poll_at) WHERE next_poll_at IS NOT NULL",
        "CREATE INDEX jobs_held ON jobs (worker) WHERE worker IS NOT NULL",
        """
        CREATE TABLE events (
            id BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
            at BIGINT NOT NULL,
            job BIGINT NOT NULL REFERENCES jobs (id),
            event TEXT NOT NULL,
            before TEXT,
            after TEXT NOT NULL,
            detail TEXT
        )
        """,
        "CREATE INDEX events_by_job ON events (job)",
        """
        CREATE TABLE outputs (
            job BIGINT NOT NULL REFERENCES jobs (id),
            position BIGINT NOT NULL,
            url TEXT NOT NULL,
            path TEXT,
            sha256 TEXT,
            bytes BIGINT,
            etag TEXT,
            part_bytes BIGINT,
            part_url TEXT,
            PRIMARY KEY (job, position)
        )
        """,
        """
        CREATE TABLE pacing (
            name TEXT COLLATE "C" PRIMARY KEY,
            at BIGINT NOT NULL
        )
        """,
        # Locked by whoever claims, so they must be there.
        """
        INSERT INTO pacing (name, at)
        VALUES ('writes', 0), ('reads', 0), ('submit_pause', 0), ('queue_pause', 0),
               ('read_pause', 0)
        """,
        "INSERT INTO meta (name, value) VALUES ('schema_version', '1')",
    ),
    (*TOTALS_INDEXES, "UPDATE meta SET value = '2' WHERE name = 'schema_version'"),
)
SQL_UNSET_META = "DELETE FROM meta WHERE name = :name"
SQL_SNAPSHOT = "BEGIN"
POSTGRES_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
# New lines get numbers after those that were copied.
POSTGRES_GO_ON = """
    SELECT setval(pg_get_serial_sequence('SCHEMA_NAME.jobs', 'id'),
                  (SELECT coalesce(max(id), 0) + 1 FROM jobs), false),
           setval(pg_get_serial_sequence('SCHEMA_NAME.events', 'id'),
                  (SELECT coalesce(max(id), 0) + 1 FROM events), false)
"""
# Whoever makes a schema, or a ledger in it, holds this lock; "SuRe" in ASCII.
POSTGRES_SCHEMA_LOCK = "SELECT pg_advisory_xact_lock(1400197733)"
POSTGRES_BEGIN = (
    "BEGIN; SET LOCAL statement_timeout = '60s'; SET LOCAL lock_timeout = '30s';"
    " SET LOCAL idle_in_transaction_session_timeout = '120s'"
)
# Not by to_regclass(), which may remember from before a lock was waited for.
POSTGRES_HAS_META = """
    SELECT count(*) > 0
    FROM pg_catalog.pg_class
    JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = 'SCHEMA_NAME' AND relname = 'meta'
"""
POSTGRES_DROP = "DROP SCHEMA IF EXISTS SCHEMA_NAME CASCADE"
POSTGRES_NOW = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
POSTGRES_DATA_VERSION = "SELECT coalesce(max(id), 0) FROM events"

# Durability and safety of a connection; each is read back. In rollback mode only EXTRA
# also syncs the folder, without which a power cut can undo the last commit: a paid key.
PRAGMAS: tuple[tuple[str, str, object], ...] = (
    ("PRAGMA journal_mode = DELETE", "PRAGMA journal_mode", "delete"),
    ("PRAGMA synchronous = EXTRA", "PRAGMA synchronous", 3),
    ("PRAGMA foreign_keys = ON", "PRAGMA foreign_keys", 1),
    # macOS: fsync alone is no barrier for the drive's cache. No effect elsewhere.
    ("PRAGMA fullfsync = ON", "PRAGMA fullfsync", 1),
)

SQL_BEGIN = "BEGIN IMMEDIATE"
SQL_COMMIT = "COMMIT"
SQL_ROLLBACK = "ROLLBACK"
SQL_VERSION = "PRAGMA user_version"
# A number that changes when another connection has written.
SQL_DATA_VERSION = "PRAGMA data_version"
SQL_QUICK_CHECK = "PRAGMA quick_check(1)"

SQL_META = "SELECT value FROM meta WHERE name = :name"
SQL_SET_META = """
    INSERT INTO meta (name, value)
    VALUES (:name, :value)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""
SQL_PACE = "SELECT at FROM pacing WHERE name = :name"
SQL_SET_PACE = """
    INSERT INTO pacing (name, at)
    VALUES (:name, :at)
    ON CONFLICT (name) DO UPDATE SET at = excluded.at
"""

# All of a ledger, a table at a time, for a copy in the other database.
COPIES: Mapping[str, tuple[str, str]] = {
    "meta": ("SELECT * FROM meta WHERE name <> 'schema_version' ORDER BY name", SQL_SET_META),
    "jobs": (
        "SELECT * FROM jobs ORDER BY id",
        """
        INSERT INTO jobs (
            id, row, attempt, latest, key, job_id, kind, model, duration_s, own, body, source,
            status, sume_status, cost_micros, cost_state, usage, tries, first_sent_at,
            accepted_at, finished_at, next_poll_at, poll_errors, trouble, note, created_at,
            updated_at, estimate_micros, token, lease_until, worker)
        VALUES (
            :id, :row, :attempt, :latest, :key, :job_id, :kind, :model, :duration_s, :own, :body,
            :source, :status, :sume_status, :cost_micros, :cost_state, :usage, :tries,
            :first_sent_at, :accepted_at, :finished_at, :next_poll_at, :poll_errors, :trouble,
            :note, :created_at, :updated_at, :estimate_micros, :token, NULL, NULL)
        """,
    ),
    "events": (
        "SELECT * FROM events ORDER BY id",
        """
        INSERT INTO events (id, at, job, event, before, after, detail)
        VALUES (:id, :at, :job, :event, :before, :after, :detail)
        """,
    ),
    "outputs": (
        "SELECT * FROM outputs ORDER BY job, position",
        """
        INSERT INTO outputs (
            job, position, url, path, sha256, bytes, etag, part_bytes, part_url)
        VALUES (
            :job, :position, :url, :path, :sha256, :bytes, :etag, :part_bytes, :part_url)
        """,
    ),
    "pacing": ("SELECT * FROM pacing ORDER BY name", SQL_SET_PACE),
}

# Adds an attempt of a row, unless it is there.
SQL_ADD = """
    INSERT INTO jobs (row, attempt, key, kind, model, duration_s, own, body, source,
                      status, created_at, updated_at)
    VALUES (:row, :attempt, :key, :kind, :model, :duration_s, :own, :body, :source,
            :status, :now, :now)
    ON CONFLICT DO NOTHING
"""
# The history of an attempt begins, unless it has.
SQL_ADDED_EVENT = """
    INSERT INTO events (at, job, event, before, after, detail)
    SELECT :now, id, 'added', NULL, :status, :detail
    FROM jobs
    WHERE key = :key
      AND NOT EXISTS (SELECT 1 FROM events WHERE events.job = jobs.id)
"""
# Moves one attempt on, if it is still where the fact expects it.
SQL_CHANGE = """
    UPDATE jobs
    SET status = :status, job_id = :job_id, sume_status = :sume_status,
        cost_micros = :cost_micros, cost_state = :cost_state, usage = :usage,
        tries = :tries, first_sent_at = :first_sent_at, accepted_at = :accepted_at,
        finished_at = :finished_at, next_poll_at = :next_poll_at,
        poll_errors = :poll_errors, trouble = :trouble, note = :note,
        estimate_micros = :estimate_micros, token = :token, lease_until = :lease_until,
        worker = :worker, updated_at = :updated_at
    WHERE id = :id
      AND status = :expected
      AND token = :expected_token
"""
# Takes, keeps and hands back attempts, where several workers share a ledger.
SQL_CLAIM = """
    UPDATE jobs
    SET token = token + 1, lease_until = :until, worker = :worker
    WHERE id = :id
      AND status = :expected
      AND token = :token
"""
SQL_RENEW = """
    UPDATE jobs
    SET lease_until = :until
    WHERE id = :id
      AND status = :expected
      AND token = :token
      AND worker = :worker
"""
SQL_RELEASE = """
    UPDATE jobs
    SET token = token + 1, lease_until = NULL, worker = NULL
    WHERE status = :expected
      AND worker = :worker
"""
SQL_RELEASE_ONE = """
    UPDATE jobs
    SET lease_until = NULL, worker = NULL
    WHERE id = :id
      AND status = :expected
      AND token = :token
      AND worker = :worker
"""
# Makes room for the next attempt of a row.
SQL_RETIRE = """
    UPDATE jobs
    SET latest = 0
    WHERE id = :id
      AND status = :expected
      AND latest = 1
"""
# Gives an attempt that was never bought other content, and so another key.
SQL_REPLACE = """
    UPDATE jobs
    SET key = :key, kind = :kind, model = :model, duration_s = :duration_s, own = :own,
        body = :body, source = :source, trouble = NULL, updated_at = :now
    WHERE id = :id
      AND status = :expected
"""
SQL_EVENT = """
    INSERT INTO events (at, job, event, before, after, detail)
    VALUES (:at, :job, :event, :before, :after, :detail)
"""
SQL_DROP_OUTPUTS = "DELETE FROM outputs WHERE job = :job"
SQL_ADD_OUTPUT = """
    INSERT INTO outputs (job, position, url)
    VALUES (:job, :position, :url)
"""
# What is known of a file on the disk; none of it, where it is not there any more.
SQL_SET_FILE = """
    UPDATE outputs
    SET path = :path, sha256 = :sha256, bytes = :bytes, etag = NULL, part_bytes = NULL,
        part_url = NULL
    WHERE job = :job
      AND position = :position
"""
SQL_SET_PART = """
    UPDATE outputs
    SET etag = :etag, part_bytes = :part_bytes, part_url = :part_url
    WHERE job = :job
      AND position = :position
      AND sha256 IS NULL
"""

# What of one transaction is written together, in this order.
WRITTEN_IN_ORDER = (SQL_CHANGE, SQL_EVENT, SQL_DROP_OUTPUTS, SQL_ADD_OUTPUT, SQL_SET_PACE)

SQL_JOB = "SELECT * FROM jobs WHERE id = :id"
SQL_JOBS = """
    SELECT * FROM jobs
    WHERE id IN (SELECT value FROM json_each(:ids))
       OR job_id IN (SELECT value FROM json_each(:job_ids))
"""
SQL_ROWS = """
    SELECT * FROM jobs
    WHERE latest = 1 AND row IN (SELECT value FROM json_each(:rows))
"""
# By arrays: a set of rows from a function, beside an OR, would have the whole table read.
POSTGRES_ROWS = """
    SELECT * FROM jobs
    WHERE latest = 1 AND row = ANY (ARRAY(SELECT jsonb_array_elements_text(CAST(:rows AS jsonb))))
"""
# In order, so that no two workers wait for each other.
POSTGRES_JOBS = """
    SELECT * FROM jobs
    WHERE id = ANY (ARRAY(SELECT jsonb_array_elements_text(CAST(:ids AS jsonb))::bigint))
       OR job_id = ANY (ARRAY(SELECT jsonb_array_elements_text(CAST(:job_ids AS jsonb))))
    ORDER BY id
    FOR UPDATE
"""
SQL_JOB_OF_ROW = "SELECT * FROM jobs WHERE row = :row AND latest = 1"
SQL_ATTEMPTS = "SELECT * FROM jobs WHERE row = :row ORDER BY attempt"
# Two are enough to say that a prefix is not unique.
SQL_BY_PREFIX = """
    SELECT * FROM jobs
    WHERE latest = 1 AND row >= :prefix AND row < :end
    ORDER BY row
    LIMIT 2
"""
SQL_HOLDER = "SELECT * FROM jobs WHERE job_id = :job_id"
SQL_LATEST = "SELECT * FROM jobs WHERE latest = 1 AND id > :after ORDER BY id LIMIT :limit"
SQL_BY_STATUS = """
    SELECT * FROM jobs
    WHERE latest = 1 AND status = :status AND id > :after
    ORDER BY id
    LIMIT :limit
"""
# Rows for a worker that is to have them: none that another one has.
SQL_CLAIMABLE = """
    SELECT * FROM jobs
    WHERE latest = 1 AND status = :status AND id > :after
      AND (lease_until IS NULL OR lease_until <= :now OR lease_until > :no_lease)
    ORDER BY id
    LIMIT :limit
"""
# What is due to be read: its time has come, or lies further ahead than any wait can.
SQL_CLAIMABLE_DUE = """
    SELECT * FROM jobs
    WHERE next_poll_at IS NOT NULL AND (next_poll_at <= :now OR next_poll_at > :horizon)
      AND (lease_until IS NULL OR lease_until <= :now OR lease_until > :no_lease)
    ORDER BY next_poll_at
    LIMIT :limit
"""
# Ended, and a file of it is to be had by whoever comes first.
SQL_CLAIMABLE_ENDED = """
    SELECT * FROM jobs
    WHERE latest = 1 AND finished_at IS NOT NULL AND job_id IS NOT NULL AND id > :after
      AND (lease_until IS NULL OR lease_until <= :now OR lease_until > :no_lease)
      AND EXISTS (SELECT 1 FROM outputs WHERE outputs.job = jobs.id AND sha256 IS NULL)
    ORDER BY id
    LIMIT :limit
"""
POSTGRES_SKIP_LOCKED = " FOR UPDATE OF jobs SKIP LOCKED"
# Ended, and lacking a file, whoever has it.
SQL_LACKING = """
    SELECT * FROM jobs
    WHERE latest = 1 AND finished_at IS NOT NULL AND job_id IS NOT NULL
      AND EXISTS (SELECT 1 FROM outputs WHERE outputs.job = jobs.id AND sha256 IS NULL)
    ORDER BY id
"""
# Asked in one statement: other workers move rows on from one status to the next meanwhile.
SQL_UNDER_WAY = """
    SELECT count(*) FROM (
        SELECT 1 FROM jobs
        WHERE latest = 1 AND status IN (:sending, :pending, :in_progress)
        LIMIT 1
    ) AS found
"""
SQL_HELD = "SELECT * FROM jobs WHERE worker = :worker ORDER BY id"
SQL_PACES = "SELECT name, at FROM pacing ORDER BY name"
POSTGRES_FOR_UPDATE = " FOR UPDATE"
SQL_DUE_SPAN = """
    SELECT (SELECT min(next_poll_at) FROM jobs WHERE next_poll_at IS NOT NULL),
           (SELECT max(next_poll_at) FROM jobs WHERE next_poll_at IS NOT NULL)
"""
SQL_COUNTS = "SELECT status, count(*) FROM jobs WHERE latest = 1 GROUP BY status"
# In one statement: what another worker moves from one sum to the other is in one of them.
SQL_MONEY = """
    SELECT spent.micros, unpaid.attempts, spent.attempts, unpaid.micros
    FROM (SELECT coalesce(sum(cost_micros), 0) AS micros, count(*) AS attempts
          FROM jobs
          WHERE cost_micros IS NOT NULL) AS spent,
         (SELECT coalesce(sum(estimate_micros), 0) AS micros, count(*) AS attempts
          FROM jobs
          WHERE cost_micros IS NULL AND first_sent_at IS NOT NULL
                AND (status <> :rejected OR job_id IS NOT NULL)) AS unpaid
"""
# Attempts that count against a cap, and whose estimate is not known.
SQL_UNPRICED = """
    SELECT * FROM jobs
    WHERE cost_micros IS NULL AND first_sent_at IS NOT NULL AND estimate_micros IS NULL
          AND (status <> :rejected OR job_id IS NOT NULL)
    ORDER BY id
"""
SQL_SENT = """
    SELECT * FROM jobs
    WHERE first_sent_at IS NOT NULL AND id > :after
    ORDER BY id
    LIMIT :limit
"""
SQL_FIRST_SENT = "SELECT min(first_sent_at) FROM jobs"
SQL_EVER_SENT = "SELECT 1 FROM jobs WHERE first_sent_at IS NOT NULL LIMIT 1"
SQL_EVER_ACCEPTED = "SELECT 1 FROM jobs WHERE job_id IS NOT NULL LIMIT 1"
SQL_OUTPUTS = """
    SELECT url, path, sha256, bytes, etag, part_bytes, part_url
    FROM outputs
    WHERE job = :job
    ORDER BY position
"""
# Latest attempts that ended and may have a result.
SQL_ENDED = """
    SELECT * FROM jobs
    WHERE latest = 1 AND finished_at IS NOT NULL AND job_id IS NOT NULL AND id > :after
    ORDER BY id
    LIMIT :limit
"""
SQL_EVENTS = "SELECT * FROM events WHERE job = :job ORDER BY id"


# --- files -------------------------------------------------------------------
# Locks, and names that last: what SQLite does not do.


# A link in a file's place is not followed: its target would be written to.
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
# Windows locks bytes, not files: one past the holder's name, so that it can be read.
_LOCKED_BYTE = 1 << 20


def try_lock(fd: int) -> bool:
    """Take the lock of an open file, which the kernel frees with its last handle; never wait."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
            os.lseek(fd, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    if os.name != "posix":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- database ----------------------------------------------------------------
# SQLite and Postgres: how statements reach them, and what their errors mean.


_SQLITE_MAGIC = b"SQLite format 3\x00"
# Files that this process has open: reading one with open() and closing it again would
# drop SQLite's POSIX locks on it.
_connected: Counter[str] = Counter()


def check_header(path: Path) -> None:
    """Refuse a file that is no ledger of ours, from its first 100 bytes, untouched.

    A read-only connection could not say so: it fails on a journal left by a kill.
    Raises LedgerError.
    """
    real = os.path.realpath(path)
    if _connected[real]:
        return
    try:
        if not stat.S_ISREG(os.stat(real).st_mode):
            raise LedgerError(f"{path}: is not a regular file, so it is no ledger")
        with open(real, "rb") as file:
            head = file.read(100)
    except OSError as exc:
        raise LedgerError(f"{path}: cannot be read: {exc.strerror}") from exc
    if not head:
        raise LedgerError(f"{path}: is empty, so it is no ledger; remove it or name another")
    if len(head) < 100 or not head.startswith(_SQLITE_MAGIC):
        raise LedgerError(f"{path}: is no SQLite file; nothing was changed")
    version = int.from_bytes(head[60:64], "big")
    if int.from_bytes(head[68:72], "big") != APPLICATION_ID:
        raise LedgerError(f"{path}: is a SQLite file, but no ledger; nothing was changed")
    if version > SCHEMA_VERSION:
        raise LedgerError(
            f"{path}: was written by a newer sume-resume (schema {version}, this one knows"
            f" {SCHEMA_VERSION}); upgrade with: pip install -U sume-resume"
        )


_BUSY = "another process is writing to it; try again"
# Both databases take a limit, and only one of them takes none for it.
NO_LIMIT = 2**62
# Ends of the names of files that stand beside a ledger for a while.
_SIDE_FILES = ("-journal", "-wal", "-shm", ".lock", ".new")


def check_new_name(path: Path) -> None:
    """Refuse a name at which a new ledger would not last. Raises UsageError, LedgerError."""
    if path.name.endswith(_SIDE_FILES):
        raise UsageError(f"{path}: is a name of a file beside a ledger; choose another")
    journal = Path(f"{path}-journal")
    if journal.exists():
        raise LedgerError(
            f"{journal}: was left by a kill and belongs to a ledger that is gone; SQLite would"
            " roll it into a new one. Put the ledger back, or move this file away"
        )


def check_free(path: Path) -> None:
    """Raise UsageError where a file, or a link, has the name of a copy that is to be made."""
    if os.path.lexists(path):
        raise UsageError(f"{path}: is there already, and is not replaced; name another file")


class Database(Protocol):
    """What a ledger needs of the database that it lies in."""

    shared: bool
    # So many rows are looked at, at most, by a worker that wants some.
    claim_rows: int
    # Attempts by their ids or by their jobs, each a JSON list; where others write too, locked.
    jobs_sql: str
    # Latest attempts by their rows, which come as one JSON list.
    rows_sql: str
    begin_sql: str
    snapshot_sql: str
    migrations: tuple[tuple[str, ...], ...]

    @property
    def in_transaction(self) -> bool: ...
    def close(self) -> None: ...
    def reconnect(self) -> None: ...
    def set_up(self) -> None: ...
    def lock_schema(self) -> None: ...
    def version(self) -> int: ...
    def execute(self, sql: str, values: Mapping[str, object]) -> Any: ...
    def claim(self, sql: str, values: Mapping[str, object]) -> Any: ...
    def insert(self, sql: str, values: Mapping[str, object]) -> int | None: ...
    def execute_many(self, sql: str, lines: Sequence[Mapping[str, object]]) -> int: ...
    def translated(self, name: str | None = None) -> contextlib.AbstractContextManager[None]: ...
    def check(self) -> None: ...
    def now_ms(self, clock_ms: int) -> int: ...
    def version_of_data(self) -> int: ...
    def copied(self) -> None: ...


def connect(place: Place) -> Database:
    """Return a connection to the database of a ledger. Raises LedgerError."""
    return Postgres(place) if isinstance(place, Dsn) else Sqlite(place)


class Sqlite:
    """A connection to a ledger that is a file, in this process alone."""

    # One run at a time holds it, by a lock of the system: no attempt needs a lease.
    shared = False
    claim_rows = NO_LIMIT
    jobs_sql = SQL_JOBS
    rows_sql = SQL_ROWS
    begin_sql = SQL_BEGIN
    snapshot_sql = SQL_SNAPSHOT
    migrations = MIGRATIONS

    def __init__(self, path: Path) -> None:
        """Connect to an existing file. Raises LedgerError when it cannot be opened."""
        self.name = str(path)
        self._real = os.path.realpath(path)
        with self.translated():
            self._db = sqlite3.connect(
                Path(self._real).as_uri() + "?mode=rw",
                uri=True,
                timeout=BUSY_TIMEOUT_MS / 1000,
                isolation_level=None,
            )
        _connected[self._real] += 1

    def close(self) -> None:
        self._db.close()
        _connected[self._real] -= 1

    def reconnect(self) -> None:
        """A file is not lost."""

    def lock_schema(self) -> None:
        """A transaction has the write lock already."""

    def now_ms(self, clock_ms: int) -> int:
        """Return the time that counts: this machine's."""
        return clock_ms

    def claim(self, sql: str, values: Mapping[str, object]) -> sqlite3.Cursor:
        """Read rows to have them: nobody else can, while a transaction is open."""
        return self.execute(sql, values)

    def set_up(self) -> None:
        """Set the pragmas, and read them back."""
        for statement, check, expected in PRAGMAS:
            self.execute(statement, {})
            value = self.execute(check, {}).fetchone()[0]
            if value != expected:
                raise LedgerError(f"{self.name}: {check} is {value}, not {expected}")

    def version(self) -> int:
        """Return the version of its schema."""
        return cast(int, self.execute(SQL_VERSION, {}).fetchone()[0])

    @property
    def in_transaction(self) -> bool:
        return self._db.in_transaction

    def execute(self, sql: str, values: Mapping[str, object]) -> sqlite3.Cursor:
        """Run one statement. Raises LedgerError and its kinds."""
        # Not by `translated`: a context manager for each statement showed in the profile.
        try:
            return self._db.execute(sql, values)
        except sqlite3.Error as exc:
            raise self._error(exc, self.name) from exc

    def insert(self, sql: str, values: Mapping[str, object]) -> int | None:
        """Run an INSERT; return the id of its line, or None where it made none."""
        cursor = self.execute(sql, values)
        return cursor.lastrowid if cursor.rowcount else None

    def execute_many(self, sql: str, lines: Sequence[Mapping[str, object]]) -> int:
        """Run one statement for each line; return how many lines of the database it changed."""
        try:
            return self._db.executemany(sql, lines).rowcount
        except sqlite3.Error as exc:
            raise self._error(exc, self.name) from exc

    @contextlib.contextmanager
    def translated(self, name: str | None = None) -> Iterator[None]:
        """Turn SQLite's errors into ours."""
        try:
            yield
        except sqlite3.Error as exc:
            raise self._error(exc, name or self.name) from exc

    def _error(self, exc: sqlite3.Error, name: str) -> LedgerError:
        """Say which file it is, what failed, and what helps."""
        text = f"{name}: {exc}"
        match (getattr(exc, "sqlite_errorcode", None) or 0) & 0xFF:
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return LedgerBusy(f"{name}: {_BUSY}")
            case sqlite3.SQLITE_FULL:
                text = f"{name}: the disk is full; free some space, then run again"
            case sqlite3.SQLITE_IOERR:
                text += " (check the disk and its free space, then run again)"
            case sqlite3.SQLITE_READONLY if exc.sqlite_errorname == "SQLITE_READONLY_DBMOVED":
                text = f"{name}: was removed or replaced while it was in use"
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN:
                text += " (the file and its folder must be writable)"
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                text += "; it is damaged: keep it, and go on from a backup of it"
        return LedgerError(text)

    def check(self) -> None:
        """Raise LedgerError if a small ledger is damaged; a large one is not checked."""
        if os.stat(self._real).st_size < QUICK_CHECK_MAX_BYTES:
            said = self.execute(SQL_QUICK_CHECK, {}).fetchone()[0]
            if said != "ok":
                raise LedgerError(
                    f"{self.name}: is damaged ({inert(said)}); keep it, and go on from a backup"
                )

    def version_of_data(self) -> int:
        """Return a number that changes when another connection has written."""
        return cast(int, self.execute(SQL_DATA_VERSION, {}).fetchone()[0])

    def copied(self) -> None:
        """Numbers go on after the last one by themselves."""

    def copy_to(self, target: sqlite3.Connection) -> None:
        """Copy all of it as it is at one moment. Raises LedgerBusy, sqlite3.Error."""

        def busy(code: int, remaining: int, total: int) -> None:
            # backup() itself would ask for ever.
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise LedgerBusy(f"{self.name}: {_BUSY}")

        self._db.backup(target, progress=busy)


# The tables that a statement names.
_TABLE = r"\b(FROM|INTO|UPDATE|JOIN|TABLE|REFERENCES|ON)(\s+)(meta|jobs|events|outputs|pacing)\b"


@functools.cache
def for_postgres(sql: str, schema: str) -> str:
    """Return a statement of ours as psycopg and Postgres want it.

    Tables are named with their schema in each statement: behind a transaction pooler a
    connection has no search path of its own.
    """
    named = re.sub(_TABLE, lambda match: f"{match[1]}{match[2]}{schema}.{match[3]}", sql)
    return re.sub(r"(?<!:):([a-z_0-9]+)\b", r"%(\1)s", named.replace("SCHEMA_NAME", schema))


def _without_enums(values: Mapping[str, object]) -> dict[str, object]:
    """Return values as psycopg takes them: it knows no enums."""
    return {n: v.value if isinstance(v, enum.Enum) else v for n, v in values.items()}


class Postgres:
    """A connection to a ledger in Postgres, which many workers share.

    It keeps nothing in the session, so that a transaction pooler may stand between. A
    connection that breaks raises LedgerLost; `reconnect` makes a new one.
    """

    shared = True
    claim_rows = CLAIM_ROWS
    jobs_sql = POSTGRES_JOBS
    rows_sql = POSTGRES_ROWS
    begin_sql = POSTGRES_BEGIN
    snapshot_sql = POSTGRES_SNAPSHOT
    migrations = POSTGRES_MIGRATIONS

    def __init__(self, dsn: Dsn) -> None:
        """Connect. Raises LedgerError when it cannot be reached, or psycopg is missing."""
        import logging

        try:
            import psycopg
        except ImportError:
            raise LedgerError(
                f"{dsn}: needs psycopg; install it with: pip install 'sume-resume[postgres]'"
            ) from None
        # What it logs of a pipeline that broke is raised too, and would go through the table.
        logging.getLogger("psycopg").addHandler(logging.NullHandler())
        logging.getLogger("psycopg").propagate = False
        self._psycopg, self._dsn, self.name = psycopg, dsn, str(dsn)
        self._db = self._connect()

    def _connect(self) -> Any:
        with self.translated():
            return self._psycopg.connect(
                self._dsn.conninfo,
                autocommit=True,
                prepare_threshold=None,
                connect_timeout=PG_CONNECT_TIMEOUT_S,
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=3,
                tcp_user_timeout=PG_TCP_TIMEOUT_MS,
                application_name=f"sume-resume {self._dsn.schema}"[:63],
            )

    def reconnect(self) -> None:
        self.close()
        self._db = self._connect()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._db.close()

    def set_up(self) -> None:
        """Nothing is set in a session."""

    def lock_schema(self) -> None:
        """Keep others from making the same schema or ledger, until this transaction ends."""
        self.execute(POSTGRES_SCHEMA_LOCK, {})

    def version(self) -> int:
        """Return the version of its schema; 0 where it is to be made. Raises LedgerError."""
        if not self.execute(POSTGRES_HAS_META, {}).fetchone()[0]:
            return 0
        line = self.execute(SQL_META, {"name": "schema_version"}).fetchone()
        if line is None or not line[0].isdigit():
            raise LedgerError(f"{self.name}: there are other tables in this schema; name another")
        version = int(line[0])
        if version > len(self.migrations):
            raise LedgerError(
                f"{self.name}: was written by a newer sume-resume (schema {version}, this one"
                f" knows {len(self.migrations)}); upgrade with: pip install -U sume-resume"
            )
        return version

    @property
    def in_transaction(self) -> bool:
        status = self._psycopg.pq.TransactionStatus
        return self._db.info.transaction_status in (status.INTRANS, status.INERROR, status.ACTIVE)

    def execute(self, sql: str, values: Mapping[str, object]) -> Any:
        """Run one statement. Raises LedgerError and its kinds."""
        with self.translated():
            return self._db.execute(
                for_postgres(sql, self._dsn.schema), _without_enums(values) or None
            )

    def claim(self, sql: str, values: Mapping[str, object]) -> Any:
        """Read rows and lock them, but for those that another worker has locked."""
        return self.execute(sql + POSTGRES_SKIP_LOCKED, values)

    def insert(self, sql: str, values: Mapping[str, object]) -> int | None:
        """Run an INSERT; return the id of its line, or None where it made none."""
        line = self.execute(sql + " RETURNING id", values).fetchone()
        return line[0] if line else None

    def execute_many(self, sql: str, lines: Sequence[Mapping[str, object]]) -> int:
        """Run one statement for each line, in few round trips; return how many it changed."""
        with self.translated(), self._db.cursor() as cursor:
            cursor.executemany(
                for_postgres(sql, self._dsn.schema), list(map(_without_enums, lines))
            )
            return cast(int, cursor.rowcount)

    @contextlib.contextmanager
    def translated(self, name: str | None = None) -> Iterator[None]:
        """Turn psycopg's errors into ours. No message holds the password."""
        try:
            yield
        except self._psycopg.Error as exc:
            raise self._error(exc) from None

    def _error(self, exc: Any) -> LedgerError:
        code = exc.sqlstate or ""
        said = quiet(str(exc).split("\n")[0])
        text = f"{self.name}: {said}"
        match code[:2], code:
            case _, "57014" | "55P03":
                return LedgerLost(f"{self.name}: {_BUSY} ({said})")
            case ("40", _) | (_, "25006" | "25P03" | "23505"):
                # A deadlock, a server that changes places, or two workers at one fact.
                return LedgerLost(f"{text}; what was begun is undone")
            case ("28" | "3D", _):
                return LedgerError(f"{text}; check user, password and database of --db")
            case "42", "42501":
                return LedgerError(f"{text}; the README lists the rights that a worker needs")
            case ("53", _):
                return LedgerLost(f"{text}; the server is short of room or connections")
        broken = getattr(self, "_db", None) is None or self._db.closed or self._db.broken
        if broken or code[:2] in ("08", "57"):
            return LedgerLost(f"{text}; check the network and the server")
        return LedgerError(text)

    def check(self) -> None:
        """The server looks after its files itself."""

    def now_ms(self, clock_ms: int) -> int:
        """Return the time that counts: the server's, since workers' clocks disagree."""
        return cast(int, self.execute(POSTGRES_NOW, {}).fetchone()[0])

    def version_of_data(self) -> int:
        """Return a number that changes when anybody has written."""
        return cast(int, self.execute(POSTGRES_DATA_VERSION, {}).fetchone()[0])

    def copied(self) -> None:
        """All lines of another ledger were put in, with their numbers."""
        self.execute(POSTGRES_GO_ON, {})


# --- ledger ------------------------------------------------------------------
# The durable truth. Every write is a method named after the fact it records; a fact is
# a compare-and-set with a line of history in the same transaction.


@dataclass(slots=True)
class Added:
    """What adding an input did."""

    new: int = 0
    existing: int = 0
    replaced: int = 0
    rows: set[str] = field(default_factory=set)


class Ledger:
    """The rows and all that is known of them. Use `open_ledger` or `create_ledger` to get one."""

    def __init__(self, place: Place) -> None:
        """Connect to an existing ledger, set and check its pragmas, migrate it.

        Raises LedgerError, with nothing changed, when it cannot be used.
        """
        self.place = place
        # Asked after each wait for another process's lock: returns to wait on, raises to
        # give up. By itself a ledger gives up after one wait.
        self.on_busy: Callable[[LedgerBusy, int], None] = _give_up
        self._in_transaction = False
        # Of the open transaction: attempts as they are in it, and lines to be written before
        # anything else is read, by their statements.
        self._rows: dict[int, Job] = {}
        self._asked_for: set[str] = set()
        self._unwritten: dict[str, list[dict[str, object]]] = {}
        self._db = connect(place)
        # Who claims: a name that no other worker has, also after a restart.
        self.worker = worker_name() if self.shared else ""
        try:
            self._db.set_up()
            self._migrate()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._db.close()

    @property
    def shared(self) -> bool:
        """Say whether other workers may be at it at the same time."""
        return self._db.shared

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- connection --

    def _execute(self, sql: str, **values: object) -> Any:
        """Run one statement, and wait where another process holds the ledger.

        Only the start of a transaction, its commit, and reads outside of one can meet such
        a lock, so nothing that was begun is ever done twice. A connection that breaks is made
        again, but within a transaction: that is undone, and LedgerLost says so.
        """
        self._write()
        for tries in count(1):
            try:
                if tries > 1:
                    self._db.reconnect()
                return self._db.execute(sql, values)
            except LedgerBusy as exc:
                if self._in_transaction and isinstance(exc, LedgerLost):
                    raise
                self.on_busy(exc, tries)
        raise AssertionError("count() has no end")

    def _later(self, sql: str, **values: object) -> None:
        """Write a line of this transaction before the next statement, or with the commit.

        Many lines of one statement then go together: each statement by itself costs a round
        trip, or a turn at the interpreter's lock.
        """
        self._unwritten.setdefault(sql, []).append(values)

    def _write(self) -> None:
        """Write what was put off, if anything was, an attempt's state first. Raises LedgerError.

        Their attempts were read in this transaction, so a line that is not found is a fault.
        """
        if not self._unwritten:
            return
        unwritten, self._unwritten = self._unwritten, {}
        for sql in sorted(unwritten, key=WRITTEN_IN_ORDER.index):
            lines = unwritten[sql]
            found = self._db.execute_many(sql, lines)
            if sql == SQL_CHANGE and found != len(lines):
                raise LedgerError(f"{self.place}: rows changed under a commit, which is undone")

    def _migrate(self) -> None:
        """Bring an older schema up to date, a step in one commit each."""
        steps = self._db.migrations
        if self._db.version() == len(steps):
            return
        for version, step in enumerate(steps):
            with self.transaction():
                self._db.lock_schema()
                # Asked under the lock: another process may be doing the same.
                if self._db.version() > version:
                    continue
                for statement in step:
                    self._execute(statement)

    def _one(self, sql: str, **values: object) -> Any:
        return self._execute(sql, **values).fetchone()

    def _all(self, sql: str, **values: object) -> list[Any]:
        return list(self._execute(sql, **values).fetchall())

    def _jobs(self, sql: str, **values: object) -> list[Job]:
        return [_job_from(line) for line in self._all(sql, **values)]

    def _in_batches(self, sql: str, batch: int, **values: object) -> Iterator[Job]:
        """Yield attempts in order; no read stays open between batches."""
        after = 0
        while found := self._jobs(sql, after=after, limit=batch, **values):
            yield from found
            after = found[-1].id

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all facts recorded inside one commit; inside another one, part of that.

        The write lock is taken at once, since a read that turns into a write fails
        without waiting.
        """
        if self._in_transaction:
            yield
            return
        self._execute(self._db.begin_sql)
        self._in_transaction = True
        try:
            yield
            self._write()
            self._commit()
        except BaseException:
            self._unwritten.clear()
            # After a full disk SQLite has rolled back by itself, and what broke is undone.
            if self._db.in_transaction:
                with contextlib.suppress(LedgerLost):
                    self._execute(SQL_ROLLBACK)
            raise
        finally:
            self._in_transaction = False
            self._forget()

    def _commit(self) -> None:
        self._execute(SQL_COMMIT)

    # -- reading --

    def quick_check(self) -> None:
        """Raise LedgerError if a small ledger is damaged; a large one is not checked."""
        self._db.check()

    def meta(self, name: str) -> str | None:
        line = self._one(SQL_META, name=name)
        return line[0] if line else None

    def pace(self, name: str) -> int | None:
        """Return the stored time of a budget or gate, in ms UTC."""
        line = self._one(SQL_PACE, name=name)
        return line[0] if line else None

    def job(self, id: int) -> Job:
        """Return an attempt; a transaction reads it once, and then keeps what it has recorded."""
        if not self._in_transaction:
            return self._jobs(SQL_JOB, id=id)[0]
        if id not in self._rows:
            self.hold([id])
        return self._rows[id]

    def hold(self, ids: Iterable[int], job_ids: Iterable[str] = ()) -> None:
        """Read attempts that this transaction will change, all at once; nobody else can now.

        With `job_ids`, also whatever attempts have these jobs, so that `holder` knows them.
        """
        assert self._in_transaction
        if len(self._rows) >= ADD_ROWS:
            # A commit of very many facts: what is written can be read again.
            self._write()
            self._forget()
        new = [id for id in ids if id not in self._rows]
        asked = set(job_ids) - self._asked_for
        if new or asked:
            lists = {"ids": json.dumps(new), "job_ids": json.dumps(sorted(asked))}
            self._keep(self._jobs(self._db.jobs_sql, **lists))
            self._asked_for |= asked

    def _forget(self, *ids: int) -> None:
        """Read attempts anew when they are wanted: these, or all."""
        for id in ids or list(self._rows):
            self._rows.pop(id, None)
        # Who has a job is known by the rows.
        self._asked_for.clear()

    def _keep(self, jobs: list[Job]) -> list[Job]:
        """Remember attempts that this transaction has to itself."""
        self._rows.update((job.id, job) for job in jobs)
        return jobs

    def job_of_row(self, row: str) -> Job | None:
        """Return the latest attempt of a row."""
        found = self._jobs(SQL_JOB_OF_ROW, row=row)
        return found[0] if found else None

    def holder(self, job_id: str) -> Job | None:
        """Return the attempt that has this job id."""
        for job in self._rows.values():
            if job.job_id == job_id:
                return job
        if job_id in self._asked_for:
            return None
        found = self._jobs(SQL_HOLDER, job_id=job_id)
        return found[0] if found else None

    def find(self, name: str) -> Job:
        """Return the attempt that a person means: by row id, job id, or a row's unique prefix.

        Raises UsageError where none or several fit.
        """
        if re.search(_BAD_BYTES, name):
            raise UsageError(f"{self.place}: no row or job '{inert(name, 60)}'")
        found = self._jobs(SQL_JOB_OF_ROW, row=name) or self._jobs(SQL_HOLDER, job_id=name)
        if not found and name:
            end = name + chr(sys.maxunicode)
            found = self._jobs(SQL_BY_PREFIX, prefix=name, end=end)
        if len(found) > 1:
            several = f"'{found[0].row}', '{found[1].row}'"
            raise UsageError(
                f"'{inert(name, 60)}' fits several rows ({several}, …); write more of it"
            )
        if not found:
            raise UsageError(f"{self.place}: no row or job '{inert(name, 60)}'")
        return found[0]

    def now_ms(self, clock_ms: int) -> int:
        """Return the time that counts for what is stored: this machine's, or the server's."""
        return self._db.now_ms(clock_ms)

    def with_status(self, status: Status, after: int = 0, limit: int = NO_LIMIT) -> list[Job]:
        """Return latest attempts in the order in which they were added, from `after` on."""
        return self._jobs(SQL_BY_STATUS, status=status, after=after, limit=limit)

    def every(self, *statuses: Status, batch: int = 1000) -> Iterator[Job]:
        """Yield every latest attempt in these statuses, one after the other, in order.

        No read stays open between batches.
        """
        for status in statuses:
            yield from self._in_batches(SQL_BY_STATUS, batch, status=status)

    def claimable(
        self, status: Status, now_ms: int, after: int = 0, limit: int = NO_LIMIT
    ) -> list[Job]:
        """Return latest attempts, in order, that no other worker has or is about to have.

        On Postgres they are locked until the transaction ends, and the first ones are enough.
        """
        return self._claim(SQL_CLAIMABLE, limit, status=status, now=now_ms, after=after)

    def due(self, now_ms: int, horizon_ms: int, limit: int) -> list[Job]:
        """Return the open attempts whose time to be read has come, longest due first."""
        return self._claim(SQL_CLAIMABLE_DUE, limit, now=now_ms, horizon=horizon_ms)

    def is_under_way(self) -> bool:
        """Say whether Sume may be working on any row, as of one moment."""
        words = {"sending": Status.SENDING, "pending": Status.PENDING}
        found = self._one(SQL_UNDER_WAY, **words, in_progress=Status.IN_PROGRESS)
        return bool(found[0])

    def held(self) -> list[Job]:
        """Return the attempts that this worker has."""
        return self._jobs(SQL_HELD, worker=self.worker) if self.shared else []

    def claimable_ended(self, now_ms: int, after: int) -> list[Job]:
        """Return attempts that ended and lack a file, which no other worker sees to."""
        return self._claim(SQL_CLAIMABLE_ENDED, CLAIM_ROWS, now=now_ms, after=after)

    def lacking(self) -> list[Job]:
        """Return attempts that ended and lack a file, also those that another worker sees to."""
        return self._jobs(SQL_LACKING)

    def _claim(self, sql: str, limit: int, **values: object) -> list[Job]:
        # No lease and no wait reaches further: the clock has moved.
        longest_s = max(LEASE_S, RETRY_AFTER_CAP_S) * (1 + POLL_JITTER)
        no_lease = cast(int, values["now"]) + round(longest_s * 1000)
        facts = {"limit": min(limit, self._db.claim_rows), "no_lease": no_lease, **values}
        self._write()
        found = [_job_from(line) for line in self._db.claim(sql, facts).fetchall()]
        # Of rows that are only passed there can be very many; they are read again if need be.
        few = self._in_transaction and len(self._rows) + len(found) <= ADD_ROWS
        return self._keep(found) if few else found

    def lock_paces(self) -> dict[str, int]:
        """Return the stored times of all budgets and gates, in ms UTC.

        On Postgres no other worker can have them before this transaction ends.
        """
        locked = SQL_PACES + (POSTGRES_FOR_UPDATE if self.shared else "")
        return dict(self._all(locked))

    def next_due_ms(self, horizon_ms: int) -> int | None:
        """Return when the next read is due; 0 where a due time lies beyond the horizon."""
        first, last = self._one(SQL_DUE_SPAN)
        return 0 if last is not None and last > horizon_ms else cast("int | None", first)

    def latest(self, batch: int = 1000) -> Iterator[Job]:
        """Yield every row's latest attempt, in order; no read stays open between batches."""
        return self._in_batches(SQL_LATEST, batch)

    def totals(self) -> Totals:
        counts = Counter({Status(s): n for s, n in self._all(SQL_COUNTS)})
        # Postgres adds integers up to a decimal.
        return Totals(counts, *map(int, self._one(SQL_MONEY, rejected=Status.REJECTED)))

    def data_version(self) -> int:
        """Return a number that changes when another connection has written."""
        return self._db.version_of_data()

    def sent(self, batch: int = 1000) -> Iterator[Job]:
        """Yield every attempt that may have been bought, in order."""
        return self._in_batches(SQL_SENT, batch)

    def first_sent_at(self) -> int | None:
        """Return when the first request of this ledger left, in ms UTC."""
        return cast("int | None", self._one(SQL_FIRST_SENT)[0])

    def unpriced(self) -> list[Job]:
        """Return the attempts that may have cost something, which nobody can say yet."""
        return self._jobs(SQL_UNPRICED, rejected=Status.REJECTED)

    def ever_sent(self) -> bool:
        return self._one(SQL_EVER_SENT) is not None

    def ever_accepted(self) -> bool:
        return self._one(SQL_EVER_ACCEPTED) is not None

    def outputs(self, job: Job) -> list[Output]:
        return [Output(*line) for line in self._all(SQL_OUTPUTS, job=job.id)]

    def ended(self, after: int, limit: int) -> list[Job]:
        """Return latest attempts that ended at Sume, in order, from `after` on."""
        return self._jobs(SQL_ENDED, after=after, limit=limit)

    def attempts(self, row: str) -> list[Job]:
        """Return all attempts of a row, the first one first."""
        return self._jobs(SQL_ATTEMPTS, row=row)

    def history(self, job: Job) -> list[Recorded]:
        """Return what was recorded of an attempt, oldest first."""
        return [Recorded._make(line) for line in self._all(SQL_EVENTS, job=job.id)]

    def copy_to(self, path: Path) -> None:
        """Copy the ledger as it is at one moment; its own file is only read.

        After this returns a whole copy has that name, durably; before, nothing has. Raises
        UsageError when the name is taken or cannot be, LedgerError when the copy fails.
        """
        import tempfile

        check_new_name(path)
        check_free(path)
        try:
            # Only its owner may read it, like the ledger itself.
            fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent)
        except OSError as exc:
            raise UsageError(f"{path}: cannot be made: {exc.strerror}") from exc
        try:
            os.close(fd)
            if isinstance(self._db, Sqlite):
                with (
                    self._db.translated(str(path)),
                    contextlib.closing(sqlite3.connect(name)) as copy,
                ):
                    self._db.copy_to(copy)
            else:
                with Ledger(Path(name)) as ledger:
                    ledger.record_copy_of(self)
            _publish(Path(name), path)
        except FileExistsError as exc:
            raise UsageError(f"{path}: was made by another process meanwhile") from exc
        finally:
            Path(name).unlink(missing_ok=True)

    def lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every line of every table as it is at one moment, with the statement to copy it.

        A read stays open meanwhile; nobody is kept from writing.
        """
        self._execute(self._db.snapshot_sql)
        self._in_transaction = True
        try:
            for read, write in COPIES.values():
                cursor = self._execute(read)
                names = [column[0] for column in cursor.description]
                for line in cursor:
                    yield write, dict(zip(names, line, strict=True))
        finally:
            self._in_transaction = False
            if self._db.in_transaction:
                self._execute(SQL_COMMIT)

    def digest(self) -> str:
        """Return a hash over all that two equal ledgers have in common: rows, history, files."""
        hashed = hashlib.sha256()
        for write, line in self.lines():
            if write not in (COPIES["meta"][1], COPIES["pacing"][1]):
                kept = {n: v for n, v in line.items() if n not in ("lease_until", "worker")}
                hashed.update(repr(sorted(kept.items())).encode())
        return hashed.hexdigest()

    def moved(self) -> str:
        """Say why nothing may be written here any more: where it was moved to; or nothing."""
        moving, moved = self.meta("moving"), self.meta("moved")
        if moved is not None:
            return f"{self.place}: was moved to {moved}; name that with --db"
        if moving is not None:
            where = moving.partition(" ")[2]
            return (
                f"{self.place}: is being moved to {where}; finish with: sume-resume move"
                f" {shell_word(where)}, or undo it with: sume-resume move --undo"
            )
        return ""

    # -- recording --

    def record_moving(self, move: str, target: str) -> None:
        """From here on nothing is sent from this ledger: it is being moved."""
        with self.transaction():
            # No worker is between its claim and its commit.
            self.lock_paces()
            self._execute(SQL_SET_META, name="moving", value=f"{move} {target}")

    def record_moved(self, target: str) -> None:
        """All of it is elsewhere, verified; this one is history."""
        with self.transaction():
            self._execute(SQL_SET_META, name="moved", value=target)

    def record_move_undone(self) -> None:
        """It is not moved after all, and goes on."""
        with self.transaction():
            self._execute(SQL_UNSET_META, name="moving")

    def record_copy_of(self, source: Ledger, move: str = "") -> None:
        """Everything of another ledger is in this new one, in one commit; or nothing is."""
        with self.transaction():
            self._db.lock_schema()
            if self.meta("namespace") is not None:
                raise LedgerError(f"{self.place}: is a ledger already, and is not written over")
            for write, lines in groupby(source.lines(), key=itemgetter(0)):
                while batch := [line for _, line in islice(lines, ADD_ROWS)]:
                    self._db.execute_many(write, batch)
            self._db.copied()
            self._execute(SQL_UNSET_META, name="moving")
            if move:
                self._execute(SQL_SET_META, name="move", value=move)

    def record_account(self, origin: str, fingerprint: str) -> None:
        """The ledger belongs to this API origin and this key's fingerprint."""
        with self.transaction():
            self._execute(SQL_SET_META, name="origin", value=origin)
            self._execute(SQL_SET_META, name="key_fingerprint", value=fingerprint)

    def record_namespace(self, namespace: str) -> None:
        """The keys of this ledger are made in this namespace, and the salt is drawn."""
        with self.transaction():
            self._execute(SQL_SET_META, name="namespace", value=namespace)
            self._execute(SQL_SET_META, name="salt", value=os.urandom(16).hex())

    def begin(self, namespace: str) -> bool:
        """Make this schema a ledger, within a transaction; False where it is one already."""
        self._db.lock_schema()
        if self.meta("namespace") is not None:
            return False
        self.record_namespace(namespace)
        return True

    def record_pace(self, name: str, at_ms: int) -> None:
        """A budget was used, or a gate is shut, until this time."""
        with self.transaction():
            self._later(SQL_SET_PACE, name=name, at=at_ms)

    def record_added(
        self, rows: Iterable[NewRow], log: InputLog, now_ms: int, replace: bool = False
    ) -> Added:
        """All rows of an input are in the ledger, queued; or none is, and InputError.

        A row that is there with the same content is left alone. Other content, or a
        default given now that differs from what the row was built with, is a problem;
        with `replace` it takes the place of what was not bought, as `fate_of` says.
        """
        added, namespace, left = Added(), self._namespace(), iter(rows)
        with self.transaction():
            while batch := list(islice(left, ADD_ROWS)):
                added.rows.update(row.row for row in batch)
                there = self._there(batch)
                new = [row for row in batch if row.row not in there]
                made = self._add_new(new, namespace, now_ms)
                if made < len(new):
                    # Another process added some of them at the same moment; all are there now.
                    there |= self._there(new)
                    added.existing -= made
                added.new += made
                for row in batch:
                    if row.row in there:
                        self._compare(there[row.row], row, now_ms, replace, added, log)
            log.check()
        return added

    def _there(self, rows: Iterable[NewRow]) -> dict[str, Job]:
        """Return the latest attempts of these rows, by row."""
        names = json.dumps([row.row for row in rows])
        return {job.row: job for job in self._jobs(self._db.rows_sql, rows=names)}

    def _add_new(self, rows: Sequence[NewRow], namespace: str, now_ms: int) -> int:
        """Add rows in few statements, but for what is there by now; return how many."""
        lines = [_added_facts(row, 1, namespace, now_ms) for row in rows]
        facts = {"now": now_ms, "status": Status.QUEUED.value}
        events = [facts | {"key": line["key"], "detail": quiet(line["source"])} for line in lines]
        made = self._db.execute_many(SQL_ADD, lines) if lines else 0
        if made:
            self._db.execute_many(SQL_ADDED_EVENT, events)
        return made

    def _compare(
        self, there: Job, row: NewRow, now_ms: int, replace: bool, added: Added, log: InputLog
    ) -> None:
        """Do with a row that is there what `fate_of` says."""
        match fate_of(there, row, replace):
            case Fate.SAME:
                added.existing += 1
            case Fate.REPLACE:
                self.record_replaced(there, row, now_ms)
                added.replaced += 1
            case Fate.BUY_AGAIN:
                self.record_retried(there, now_ms, row)
                added.replaced += 1
            case problem:
                log.add(row.source, problem)

    def preview(self, rows: Iterable[NewRow], log: InputLog, replace: bool) -> Iterator[NewRow]:
        """Yield the rows of an input that `record_added` would make or change; write nothing."""
        for row in rows:
            there = self.job_of_row(row.row)
            fate = fate_of(there, row, replace) if there is not None else None
            if isinstance(fate, str):
                log.add(row.source, fate)
            elif fate is not Fate.SAME:
                yield row

    def _namespace(self) -> str:
        return self.meta("namespace") or ""

    def _add(self, row: NewRow, attempt: int, namespace: str, now_ms: int, why: str) -> bool:
        self._write()
        job = self._db.insert(SQL_ADD, _added_facts(row, attempt, namespace, now_ms))
        if job is None:
            return False
        self._event(Recorded(0, now_ms, job, "added", None, Status.QUEUED, why))
        return True

    # -- recording what a person decides --

    def record_replaced(self, job: Job, row: NewRow, now_ms: int) -> None:
        """A queued row, of which no send arrived, has other content and so another key."""
        key = idempotency_key(self._namespace(), row.kind, row.row, row.body, job.attempt)
        with self.transaction():
            detail = f"now from {row.source}; was from {job.source}, with key {job.key}"
            same = self._change(job, "replaced", now_ms, detail)
            self._execute(
                SQL_REPLACE, **row._asdict(), id=same.id, expected=same.status, key=key, now=now_ms
            )
            self._forget()

    def record_retried(self, job: Job, now_ms: int, row: NewRow | None = None) -> Job:
        """A new attempt of a row is queued, and the old one is history.

        The outcome of the old one is known; one that is still queued ends as cancelled. The
        new one has the old content, or that of `row`. Returns it.
        """
        why = f"attempt {job.attempt + 1} takes its place"
        with self.transaction():
            if job.status is Status.QUEUED:
                old = self._drop(job, "retried", why, now_ms)
            else:
                old = self._change(job, "retried", now_ms, why)
            return self._next_attempt(old, row or new_row_of(old), now_ms)

    def record_resent(self, job: Job, now_ms: int) -> Job:
        """A new attempt is queued though the old one may have been bought; returns it.

        The old one ends as cancelled, and what it cost stays unknown until Sume says it.
        """
        why = f"given up for attempt {job.attempt + 1}; it may have been bought"
        with self.transaction():
            old = self._drop(job, "resent", why, now_ms)
            return self._next_attempt(old, new_row_of(old), now_ms)

    def record_dropped(self, job: Job, now_ms: int, why: str) -> Job:
        """A person gave it up: it ends as cancelled, and is never sent again."""
        return self._drop(job, "dropped", why, now_ms)

    def record_found(self, job: Job, job_id: str, now_ms: int) -> Job:
        """A person knows its job, and Sume does: it is open, and due to be read.

        Raises UsageError, with nothing changed, when another attempt has that job.
        """
        with self.transaction():
            there = self.holder(job_id)
            if there is not None and there.id != job.id:
                whose = f"row '{there.row}' (attempt {there.attempt})"
                raise UsageError(f"row '{job.row}': job {job_id} belongs to {whose} already")
            was = f" (was {job.job_id})" if job.job_id not in (None, job_id) else ""
            return self._open(job, "found", job_id, was, now_ms, now_ms)

    def record_cancel_asked(self, job: Job, refusal: str, now_ms: int) -> Job:
        """Sume was asked to cancel it, and refused or did not; it is due to be read."""
        detail = f"{job.job_id}: {refusal}" if refusal else job.job_id
        return self._change(job, "cancel_asked", now_ms, detail, next_poll_at=now_ms)

    def _drop(self, job: Job, event: str, why: str, now_ms: int) -> Job:
        if job.status is Status.CANCELLED:
            return self._change(job, event, now_ms, why)
        return self._change(job, event, now_ms, why, status=Status.CANCELLED, note=why)

    def _next_attempt(self, old: Job, row: NewRow, now_ms: int) -> Job:
        if self._execute(SQL_RETIRE, id=old.id, expected=old.status).rowcount != 1:
            raise RowChanged(old.row, "has another attempt already")
        self._forget()
        attempt = old.attempt + 1
        self._add(row, attempt, self._namespace(), now_ms, f"{row.source}, as attempt {attempt}")
        new = self.job_of_row(old.row)
        assert new is not None
        return new

    # -- recording who has it --

    def record_claimed(self, job: Job, now_ms: int) -> Job:
        """This worker has an open attempt in hand; nobody else touches it until the lease ends.

        A file has one run at a time, and needs no claims. Raises RowChanged.
        """
        if not self.shared:
            return job
        until = _lease_end(now_ms)
        self._hold(SQL_CLAIM, job, until=until, worker=self.worker)
        return job._replace(token=job.token + 1, lease_until=until, worker=self.worker)

    def record_renewed(self, job: Job, now_ms: int) -> Job:
        """This worker still has it, and will for another lease. Raises RowChanged."""
        until = _lease_end(now_ms)
        self._hold(SQL_RENEW, job, until=until, worker=self.worker)
        return job._replace(lease_until=until)

    def record_handed_back(self, job: Job) -> None:
        """This worker is done with an attempt that it had; whoever comes may have it."""
        if self.shared:
            with contextlib.suppress(RowChanged):
                self._hold(SQL_RELEASE_ONE, job, worker=self.worker)

    def record_left(self) -> None:
        """This worker ends: all that it had is free at once, and it can write no more of it."""
        if self.shared:
            with self.transaction():
                for status in Status:
                    self._execute(SQL_RELEASE, expected=status, worker=self.worker)
                self._forget()

    def _hold(self, sql: str, job: Job, **values: object) -> None:
        with self.transaction():
            facts = {"id": job.id, "expected": job.status, "token": job.token} | values
            if self._execute(sql, **facts).rowcount != 1:
                raise RowChanged(job.row, _TAKEN)
            self._forget(job.id)

    # -- recording what Sume does --

    def record_prepared(self, job: Job, now_ms: int, estimate_micros: int | None = None) -> Job:
        """Its key and body are about to be sent; after this returns they may be.

        What it is expected to cost is reserved in the same commit.
        """
        return self._change(
            job,
            "prepared",
            now_ms,
            status=Status.SENDING,
            token=job.token + 1,
            lease_until=_lease_end(now_ms) if self.shared else None,
            worker=self.worker if self.shared else None,
            tries=job.tries + 1,
            first_sent_at=job.first_sent_at or now_ms,
            trouble=None,
            estimate_micros=job.estimate_micros if estimate_micros is None else estimate_micros,
        )

    def record_estimates(self, estimates: Iterable[tuple[Job, int]], now_ms: int) -> None:
        """Attempts that were sent without a price list have an estimate now."""
        with self.transaction():
            for job, micros in estimates:
                self._change(job, "estimates", now_ms, show_usd(micros), estimate_micros=micros)

    def record_unclaimed(self, prepared: Job, before: Job, now_ms: int) -> Job:
        """It was prepared and never handed out: it is again what it was before."""
        return self._change(
            prepared,
            "unclaimed",
            now_ms,
            status=before.status,
            tries=before.tries,
            first_sent_at=before.first_sent_at,
        )

    def record_returned(self, job: Job, trouble: str, now_ms: int) -> Job:
        """No send of it arrived: it is queued, and its age is forgotten."""
        return self._change(
            job, "returned", now_ms, status=Status.QUEUED, first_sent_at=None, trouble=trouble
        )

    def record_unanswered(self, job: Job, trouble: str, now_ms: int, again_ms: int) -> Job:
        """It may have arrived; the same key will ask again, and no worker before that time."""
        wait = {"lease_until": again_ms, "worker": self.worker} if self.shared else {}
        changes: dict[str, Any] = {"status": Status.SENDING, "trouble": trouble, **wait}
        return self._change(job, "unanswered", now_ms, **changes)

    def record_accepted(
        self, job: Job, job_id: str, now_ms: int, next_poll_at: int, hit: bool = False
    ) -> Job:
        """Sume has it under this id. An id that another attempt holds sends it to review."""
        there = self.holder(job_id)
        if there is not None and there.id != job.id:
            return self.record_review(
                job, f"Sume answered with job {job_id}, which row '{there.row}' already has", now_ms
            )
        if job.job_id not in (None, job_id):
            return self.record_review(
                job, f"Sume answered with job {job_id}, and before with job {job.job_id}", now_ms
            )
        known = " (known to Sume already)" if hit else ""
        return self._open(job, "accepted", job_id, known, now_ms, next_poll_at)

    def _open(
        self, job: Job, event: str, job_id: str, how: str, now_ms: int, next_poll_at: int
    ) -> Job:
        opened: dict[str, Any] = {"job_id": job_id, "accepted_at": now_ms, "note": None}
        opened |= {"status": Status.PENDING, "next_poll_at": next_poll_at, "trouble": None}
        return self._change(job, event, now_ms, job_id + how, **opened)

    def record_late_id(self, job: Job, job_id: str, now_ms: int) -> Job:
        """A job id came home after its row had moved on; it is kept whatever the row is.

        A row without an id gets it, and stays what it is. A row with another id goes to
        review, if it is not final.
        """
        current, there = self.job(job.id), self.holder(job_id)
        if current.job_id == job_id:
            return current
        detail = f"late answer named job {job_id}"
        if current.status is Status.SENDING and there is None:
            # Another worker has it by now, and asks with the same key.
            return self._change(current, "late_id", now_ms, detail, **_held(current))
        if current.job_id is None and there is None:
            return self._change(current, "late_id", now_ms, detail, job_id=job_id)
        if there is not None:
            detail += f", which row '{there.row}' has"
        if current.job_id is not None:
            detail += f" beside job {current.job_id}"
        if current.status in FINAL:
            return self._change(current, "late_id", now_ms, detail)
        return self.record_review(current, detail, now_ms)

    def record_rejected(self, job: Job, why: str, now_ms: int) -> Job:
        """Sume refused what it asks, and no send of it can have made a job."""
        return self._change(job, "rejected", now_ms, status=Status.REJECTED, note=why)

    def record_review(self, job: Job, why: str, now_ms: int) -> Job:
        """Only a person can tell what it is worth; the note says why, and what leads out."""
        note = f"{quiet(why)}; {way_out(job, db_flag(self.place))}"
        return self._change(job, "review", now_ms, why, status=Status.REVIEW, note=note)

    def record_status(self, job: Job, reading: Reading, now_ms: int, next_poll_at: int) -> Job:
        """Sume is working on it, as far as its last word goes."""
        status = reading.status if reading.status in OPEN else Status.IN_PROGRESS
        return self._change(
            job, "status", now_ms, status=status, next_poll_at=next_poll_at, reading=reading
        )

    def record_final(
        self, job: Job, status: Status, reading: Reading, note: str | None, now_ms: int
    ) -> Job:
        """Sume's last word, its cost and its files; a final status never changes again."""
        with self.transaction():
            done = self._change(job, "final", now_ms, status=status, note=note, reading=reading)
            self._name_outputs(job, reading)
        return done

    def _name_outputs(self, job: Job, reading: Reading) -> None:
        self._later(SQL_DROP_OUTPUTS, job=job.id)
        for position, url in enumerate(reading.urls):
            self._later(SQL_ADD_OUTPUT, job=job.id, position=position, url=url)

    def record_cost(self, job: Job, cost: Cost, now_ms: int) -> Job:
        """A job was read afresh; what it cost is known, or is something else now.

        Nothing is written where nothing is new, and its status stays what it is.
        """
        with self.transaction():
            current = self.job(job.id)
            if cost.micros is None or cost.micros == current.cost_micros:
                return current
            detail = f"${show_usd(cost.micros)}"
            changes = cast("dict[str, Any]", _cost_changes(current, cost))
            return self._change(current, "cost", now_ms, detail, **changes)

    # -- recording downloads --

    def record_named(self, job: Job, reading: Reading, now_ms: int) -> Job:
        """A completed job that had named no file names one now."""
        with self.transaction():
            if self.outputs(job):
                return self.job(job.id)
            self._name_outputs(job, reading)
            files = counted(len(reading.urls), "file")
            return self._change(job, "named", now_ms, files, note=None, trouble=None)

    def record_part(self, job: Job, position: int, part: Output) -> None:
        """So many bytes of a file are durable in its .part, of the object with this ETag."""
        with self.transaction():
            self._execute(SQL_SET_PART, job=job.id, position=position, **part._asdict())

    def record_downloaded(
        self,
        job: Job,
        position: int,
        path: str,
        sha256: str,
        size: int,
        now_ms: int,
        all_well: bool = True,
    ) -> Job:
        """A result file is whole under this name: verified, and durable before this is.

        Where all is well with the row's other files, earlier trouble is over.
        """
        with self.transaction():
            file = {"path": path, "sha256": sha256, "bytes": size}
            self._execute(SQL_SET_FILE, job=job.id, position=position, **file)
            over: dict[str, Any] = {"trouble": None} if all_well else {}
            return self._change(job, "downloaded", now_ms, path, **over)

    def record_lost(self, job: Job, position: int, path: str, now_ms: int) -> Job:
        """A file that was downloaded is not there any more, or was changed."""
        with self.transaction():
            gone = {"path": None, "sha256": None, "bytes": None}
            self._execute(SQL_SET_FILE, job=job.id, position=position, **gone)
            return self._change(job, "lost", now_ms, path)

    def record_undownloaded(self, job: Job, why: str, now_ms: int) -> Job:
        """A result file could not be had in this run; the row is as final as before."""
        return self._change(job, "undownloaded", now_ms, trouble=quiet(why))

    def record_poll_error(self, job: Job, trouble: str, now_ms: int, next_poll_at: int) -> Job:
        """A read brought nothing usable; the job itself is what it was."""
        return self._change(
            job,
            "poll_error",
            now_ms,
            trouble,
            poll_errors=job.poll_errors + 1,
            trouble=trouble,
            next_poll_at=next_poll_at,
        )

    def _change(
        self,
        job: Job,
        event: str,
        now_ms: int,
        detail: str | None = None,
        *,
        reading: Reading | None = None,
        **changes: object,
    ) -> Job:
        """Record one fact about an attempt that is still in the status that `job` shows.

        Raises RowChanged, with nothing written, when it is not.
        """
        with self.transaction():
            current = self.job(job.id)
            if reading is not None:
                changes |= {"sume_status": reading.word, "trouble": None}
                changes |= _cost_changes(current, reading.cost)
                note = cast("str | None", changes.get("note"))
                detail = f"{reading.word}: {note}" if note else reading.word
            if self.shared and event in _STILL_HELD and current.worker == self.worker:
                changes |= _held(current)
            free: dict[str, Any] = {"lease_until": None, "worker": None}
            after = current._replace(**(free | cast("dict[str, Any]", changes)), updated_at=now_ms)
            if after.status not in {current.status, *OPEN}:
                after = after._replace(next_poll_at=None)
            if after.status in FINAL - {current.status}:
                after = after._replace(finished_at=now_ms)
            legal = after.status is current.status or (after.status in TRANSITIONS[current.status])
            if current.status is not job.status or not legal:
                why = f"is {current.status} by now, not {job.status}; nothing was changed"
                raise RowChanged(job.row, why)
            if current.token != job.token:
                raise RowChanged(job.row, _TAKEN)
            if current.cost_micros not in (None, after.cost_micros):
                before, now = show_usd(current.cost_micros), show_usd(after.cost_micros)
                detail = f"{detail or ''} (cost was ${before}, is ${now})".strip()
            facts = after._asdict() | {"status": after.status.value}
            was = {"expected": current.status.value, "expected_token": current.token}
            self._later(SQL_CHANGE, **facts, **was)
            self._rows[job.id] = after
            if event != "status" or _said(current) != _said(after):
                detail = detail or cast("str | None", changes.get("trouble", changes.get("note")))
                moved = (current.status, after.status)
                self._event(Recorded(0, now_ms, job.id, event, *moved, detail))
        return after

    def _event(self, fact: Recorded) -> None:
        facts = fact._asdict() | {"detail": fact.detail and quiet(fact.detail)}
        # As plain text: sqlite3 takes a detour for each enum, psycopg knows none.
        facts |= {"before": fact.before and fact.before.value, "after": fact.after.value}
        self._later(SQL_EVENT, **facts)


def _added_facts(row: NewRow, attempt: int, namespace: str, now_ms: int) -> dict[str, Any]:
    """Return what SQL_ADD stores of a new attempt."""
    key = idempotency_key(namespace, row.kind, row.row, row.body, attempt)
    facts = row._asdict()
    facts.update(attempt=attempt, key=key, status=Status.QUEUED.value, now=now_ms)
    return facts


_TAKEN = "was taken over by another worker meanwhile; nothing was changed"
# Facts after which a worker goes on with the same attempt.
_STILL_HELD = {"named", "downloaded", "lost", "undownloaded", "cost", "estimates"}


def _lease_end(now_ms: int) -> int:
    return now_ms + round(LEASE_S * 1000)


def _held(job: Job) -> dict[str, Any]:
    """Return what keeps an attempt with the worker that has it."""
    return {"lease_until": job.lease_until, "worker": job.worker}


def worker_name() -> str:
    """Return a name that no other worker has: host, pid, and a random part."""
    import socket

    return f"{inert(socket.gethostname(), 60)}:{os.getpid()}:{os.urandom(4).hex()}"


def _said(job: Job) -> tuple[object, ...]:
    """Return what a read can tell; one that tells nothing new is no line of history."""
    return job.status, job.sume_status, job.cost_micros, job.trouble


def _cost_changes(job: Job, cost: Cost) -> dict[str, object]:
    """Absence never erases a known cost; a later statement replaces it."""
    if cost.micros is None and job.cost_micros is not None:
        return {}
    return {"cost_micros": cost.micros, "cost_state": cost.state, "usage": cost.raw or job.usage}


def _give_up(exc: LedgerBusy, tries: int) -> None:
    """Wait no longer; but a connection that broke is made again at once, a few times."""
    if not isinstance(exc, LedgerLost) or tries >= RECONNECTS:
        raise exc


_STATUS_AT = Job._fields.index("status")
_STATUSES: Mapping[str, Status] = {status.value: status for status in Status}


def _job_from(line: Sequence[Any]) -> Job:
    status = _STATUSES[line[_STATUS_AT]]
    return Job._make((*line[:_STATUS_AT], status, *line[_STATUS_AT + 1 :]))


def ledger_exists(place: Place) -> bool:
    """Say whether there is something where a ledger is to be. Raises LedgerError."""
    if isinstance(place, Path):
        return place.exists()
    with contextlib.closing(Postgres(place)) as database:
        return database.version() > 0 and _namespace_in(database) is not None


def _namespace_in(database: Database) -> str | None:
    """Return the namespace of a ledger; a schema without one holds none yet."""
    line = database.execute(SQL_META, {"name": "namespace"}).fetchone()
    return line[0] if line else None


def open_ledger(place: Place) -> Ledger:
    """Open an existing ledger. Raises LedgerError, with nothing changed, if it is none."""
    if not ledger_exists(place):
        raise LedgerError(f"{place}: no such ledger; add rows first: sume-resume add FILE")
    if isinstance(place, Path):
        check_header(place)
    return Ledger(place)


def create_ledger(place: Place, namespace: str, fill: Callable[[Ledger], Added]) -> Added:
    """Make a new ledger with its first rows, all or nothing, and never over another one.

    Raises InputError from `fill`, FileExistsError when another process was first,
    LedgerError when it cannot be made.
    """
    if isinstance(place, Path):
        return _create_file(place, namespace, fill)
    with Ledger(place) as ledger, ledger.transaction():
        if not ledger.begin(namespace):
            raise FileExistsError(place)
        return fill(ledger)


def _create_file(path: Path, namespace: str | None, fill: Callable[[Ledger], Added]) -> Added:
    """Make a new file with its first rows; a copy brings its namespace along.

    It is built under a temporary name and gets its own when it is whole, so an empty
    file is never a ledger. The caller holds the RunLock: what has the temporary name
    was left by a kill.
    """
    new = path.with_name(f".{path.name}.new")
    if path.is_symlink():
        raise LedgerError(f"{path}: is a link to a file that is not there")
    check_new_name(path)
    try:
        for left in (new, new.with_name(f"{new.name}-journal")):
            left.unlink(missing_ok=True)
        # SQLite gives its journal the mode of the file: readable by the owner alone.
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            with Ledger(new) as ledger, ledger.transaction():
                # What goes wrong is said of the name that a person knows.
                ledger.place = path
                if namespace is not None:
                    ledger.record_namespace(namespace)
                added = fill(ledger)
            _publish(new, path)
        finally:
            new.unlink(missing_ok=True)
    except FileExistsError:
        raise
    except OSError as exc:
        raise LedgerError(f"{path}: cannot be made: {exc.strerror}") from exc
    return added


def _publish(new: Path, path: Path) -> None:
    """Give a whole file its name, unless a file has it; durable once this returns."""
    try:
        os.link(new, path)
    except FileExistsError:
        raise
    except OSError:
        # No hard links on this file system. Where rename would replace, look first.
        if path.exists():
            raise FileExistsError(path) from None
        os.rename(new, path)
    sync_folder(path.parent)


def move_ledger(source: Ledger, place: Place, clock: Clock, say: Callable[[str], None]) -> None:
    """Move a ledger to another place; after a kill the same call goes on.

    The source is marked first, and sends nothing from then on; then all is copied in one
    commit, compared, and the source marked as moved. Raises LedgerError, with the source as it
    was or marked.
    """
    marked = source.meta("moving")
    move, _, where = (marked or "").partition(" ")
    if marked is not None and where != str(place):
        raise LedgerError(source.moved())
    if marked is None:
        if ledger_exists(place):
            raise LedgerError(f"{place}: is there already, and is not written over")
        move = os.urandom(8).hex()
        source.record_moving(move, str(place))
    _await_workers(source, clock, say)
    if not ledger_exists(place):
        _copy_ledger(source, place, move)
    with open_ledger(place) as target:
        if target.meta("move") != move:
            raise LedgerError(f"{place}: is another ledger; undo with: sume-resume move --undo")
        if source.meta("moved") is None and target.digest() != source.digest():
            raise LedgerError(f"{place}: is not what {source.place} holds; nothing was marked")
    source.record_moved(str(place))


def _await_workers(source: Ledger, clock: Clock, say: Callable[[str], None]) -> None:
    """Wait until no worker has anything of a ledger in hand: they stop when they see the mark."""
    for tries in count(1):
        now_ms = source.now_ms(clock.wall_ms())
        busy = [job for job in source.latest() if job.worker and (job.lease_until or 0) > now_ms]
        if not busy:
            return
        if tries == 1:
            say(f"waiting for workers that have {counted(len(busy), 'row')} in hand")
        clock.sleep(TICK_S)


def _copy_ledger(source: Ledger, place: Place, move: str) -> None:
    if isinstance(place, Dsn):
        with Ledger(place) as target:
            target.record_copy_of(source, move)
        return

    def fill(target: Ledger) -> Added:
        target.record_copy_of(source, move)
        return Added()

    with RunLock(place):
        _create_file(place, None, fill)


class RunLock:
    """One run per ledger, by a lock that the kernel frees when its holder dies."""

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger
        self.path = Path(os.path.realpath(ledger) + ".lock")

    def __enter__(self) -> RunLock:
        """Take the lock. Raises LockedError at once when a live run holds it."""
        while True:
            try:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o600)
            except OSError as exc:
                raise LedgerError(
                    f"{self.ledger}: cannot be used: {exc.strerror} ({self.path})"
                ) from exc
            if not try_lock(self._fd):
                holder = self._holder()
                os.close(self._fd)
                raise LockedError(
                    f"{self.ledger}: another run holds it{holder}; wait for it or stop it"
                )
            if self._is_current():
                break
            # Deleted and made anew between open and lock: this one guards nothing.
            os.close(self._fd)
        import socket

        # The name is for people; a full disk must not keep a run from a lock it has.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.write(self._fd, f"pid {os.getpid()} on {socket.gethostname()}".encode())
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave no file behind; whoever waits for this one finds that it is gone."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self._fd)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _holder(self) -> str:
        os.lseek(self._fd, 0, os.SEEK_SET)
        name = inert(os.read(self._fd, 200).decode(errors="replace"), 100)
        return f" ({name})" if name else ""


# --- api ---------------------------------------------------------------------
# One HTTP request and its answer. Knows no ledger, retries nothing, decides nothing.


@dataclass(frozen=True, slots=True)
class Account:
    """Where requests go, and as whom. The key is shown by no repr."""

    base_url: str
    origin: str
    api_key: str = field(repr=False)
    auth_mode: str = "bearer"

    def fingerprint(self, salt: str) -> str:
        """Return what a ledger keeps of the key: enough to know it again, no more."""
        return hashlib.sha256(f"{salt}:{self.api_key}".encode()).hexdigest()[:16]


AUTH_MODES = ("bearer", "x-api-key")


def account_from(environ: Mapping[str, str]) -> Account:
    """Read SUME_API_KEY, SUME_API_BASE_URL and SUME_API_AUTH_MODE, as Sume's tools do.

    Raises UsageError; no message holds the key or a password.
    """
    from urllib.parse import urlsplit

    key = environ.get("SUME_API_KEY", "").strip()
    if not key:
        raise UsageError("SUME_API_KEY is not set; export it (only --simulate needs none)")
    if not re.fullmatch(r"[\x21-\x7e]{1,500}", key):
        raise UsageError("SUME_API_KEY holds a space or a character that no key has")
    mode = environ.get("SUME_API_AUTH_MODE", "").strip().lower() or "bearer"
    if mode not in AUTH_MODES:
        raise UsageError("SUME_API_AUTH_MODE must be bearer or x-api-key")
    text = environ.get("SUME_API_BASE_URL", "").strip() or DEFAULT_BASE_URL
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise UsageError("SUME_API_BASE_URL is not a URL") from None
    if parts.scheme not in ("https", "http") or not host or parts.query or parts.fragment:
        raise UsageError("SUME_API_BASE_URL must look like https://api.sume.com")
    if parts.username is not None or parts.password is not None:
        raise UsageError("SUME_API_BASE_URL must not hold a user or a password")
    if parts.scheme == "http" and not is_loopback(host):
        raise UsageError("SUME_API_BASE_URL: http:// would send the key in clear; use https://")
    origin = origin_of(text)
    path = parts.path.rstrip("/")
    return Account(origin + (path if path.endswith("/v1") else path + "/v1"), origin, key, mode)


def is_loopback(host: str) -> bool:
    """Say whether a host name can only mean this machine."""
    import ipaddress

    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def origin_of(url: str) -> str:
    """Return scheme, host and port of a URL, the port only where it is not the usual one.

    Raises ValueError where there are none.
    """
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    host = parts.hostname
    if not host:
        raise ValueError("no host")
    standard = parts.port in (None, 443 if parts.scheme == "https" else 80)
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + ("" if standard else f":{parts.port}")


class _Held(Exception):
    """The request was held back before its first byte left; the argument says why."""


class LinkRefused(Exception):
    """A link to a result file that is not followed. The text holds no query."""


# Spaces, control characters, half characters, and what some programs take for a slash.
_NO_LINK_TEXT = r"[\x00-\x20\x7f\ud800-\udfff\\]"


class Link(NamedTuple):
    """A link that may be followed."""

    origin: str
    host: str
    # Path and query, byte for byte: a signature can be over how they are spelled.
    target: bytes
    # Of the API itself, where the key may go.
    own: bool
    loopback: bool


def joined(base: str, text: str) -> str:
    """Return where a link leads that stands in an answer from `base`, as it is written.

    The standard library's own joining would resolve dots and drop an empty query.
    """
    if re.match(r"(?i)[a-z][a-z0-9+.-]*:", text):
        return text
    scheme, _, rest = base.partition("://")
    if text.startswith("//"):
        return f"{scheme}:{text}"
    host, _, path = rest.partition("/")
    if text.startswith("/"):
        return f"{scheme}://{host}{text}"
    folder = path.partition("?")[0].rpartition("/")[0]
    return f"{scheme}://{host}/{folder}{'/' if folder else ''}{text}"


def is_address(host: str) -> bool:
    """Say whether a host is an IP address as it is usually written."""
    import ipaddress

    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def judge(text: str, base_url: str) -> Link:
    """Say where a link of a job leads, if that is where a result file may come from.

    https alone; http, and this machine at all, only where the API is on this machine itself.
    Raises LinkRefused.
    """
    from urllib.parse import quote, urlsplit

    if re.search(_NO_LINK_TEXT, text):
        raise LinkRefused("the link holds a character that no link has")
    own_origin = origin_of(base_url)
    whole = joined(f"{base_url}/", text)
    if not re.match(r"(?i)https?:", whole):
        raise LinkRefused(f"the link is not https ({quiet(whole.partition(':')[0], 20)}:)")
    try:
        parts = urlsplit(whole)
        origin, host = origin_of(whole), (parts.hostname or "").rstrip(".")
    except ValueError:
        raise LinkRefused("the link is no URL") from None
    if parts.username is not None or parts.password is not None:
        raise LinkRefused("the link holds a user or a password")
    if not re.fullmatch(r"[a-z0-9._-]+|[0-9a-f:.]+", host):
        raise LinkRefused(f"the link's host '{quiet(host, 60)}' is no plain host name")
    if re.fullmatch(r"(.*\.)?(0x[0-9a-f]*|[0-9]+)", host) and not is_address(host):
        # Name look-ups take such a number for an address, each in its own way.
        raise LinkRefused(f"the link's host '{quiet(host, 60)}' is a number and no address")
    loopback, own = is_loopback(host), origin == own_origin
    if loopback and not is_loopback(urlsplit(base_url).hostname or ""):
        raise LinkRefused(f"the link leads to this machine ({origin})")
    if parts.scheme != "https" and not (parts.scheme == "http" and loopback):
        raise LinkRefused(f"the link is not https ({quiet(parts.scheme, 20)}://{host})")
    if not own and not loopback and is_inside(host):
        raise LinkRefused(f"the link leads into a private network ({origin})")
    target = whole[whole.index("//") + 2 + len(parts.netloc) :].partition("#")[0]
    target = target if target.startswith("/") else f"/{target}"
    return Link(origin, host, quote(target, safe=_VISIBLE).encode(), own, loopback)


# All that a request line can hold; anything else is not ASCII, and is spelled in percents.
_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))


def is_inside(address: str) -> bool:
    """Say whether an address is not one of the public internet; a name is no address.

    Of IPv6 only what is handed out for use counts (2000::/3), but for tunnels of IPv4; an
    IPv4 address within one is looked at itself.
    """
    import ipaddress

    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        within = ip in ipaddress.ip_network("64:ff9b::/96") or ip.ipv4_mapped is not None
        if not within:
            tunnel = ip.sixtofour is not None or ip.teredo is not None
            handed_out = ip in ipaddress.ip_network("2000::/3")
            return tunnel or not handed_out or not ip.is_global
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return not ip.is_global or ip.is_multicast


class FileReply(NamedTuple):
    """The answer to a request for a file; its body comes in chunks, as it is."""

    code: int
    headers: Mapping[str, str]
    chunks: Iterator[bytes]


@functools.cache
def _exact_url() -> Callable[[httpx.URL, bytes], httpx.URL]:
    import httpx

    class Exact(httpx.URL):
        def __init__(self, base: httpx.URL, target: bytes) -> None:
            super().__init__(base)
            self._target = target

        @property
        def raw_path(self) -> bytes:
            return self._target

    return Exact


def exact_url(base: httpx.URL, target: bytes) -> httpx.URL:
    """Return a URL whose path and query go on the wire as they are: httpx would spell them anew.

    A proxy is still asked for host and port alone.
    """
    return _exact_url()(base, target)


class Sume:
    """A client for one thread. Every method returns an answer or says why there is none."""

    def __init__(self, account: Account, clock: Clock, tls: ssl.SSLContext | bool) -> None:
        """Raises UsageError when proxy or certificate settings cannot be used."""
        from urllib.parse import quote

        import httpx

        self._account = account
        self._clock = clock
        auth = {"x-api-key": account.api_key}
        if account.auth_mode == "bearer":
            auth = {"Authorization": f"Bearer {account.api_key}"}
        # An answer is a few kB: compressed, it could only hide how large it becomes.
        agent = {
            "User-Agent": f"sume-resume/{__version__}",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
        }
        key = account.api_key
        forms = (key, json.dumps(key)[1:-1], quote(key, safe=""), quote(key))
        # A made-up key of a letter or two stands in every word, and is no secret.
        self._forms = forms if len(key) > MAX_MADE_UP_KEY_CHARS else ()
        self._base = httpx.URL(account.base_url)
        self._host = self._base.netloc.decode()
        self._headers = httpx.Headers(auth | agent)
        # Loopback is reached directly: a proxy would get the key in clear.
        trust = not is_loopback(self._base.host)

        def client(kept: int) -> httpx.Client:
            limits = httpx.Limits(max_keepalive_connections=kept)
            return httpx.Client(headers=self._headers, verify=tls, trust_env=trust, limits=limits)

        # Clients without the key, made when a link needs them: by whether they go directly.
        self._tls = tls
        self._visitors: dict[bool, httpx.Client] = {}
        try:
            self._reader = client(kept=1)
            # Each submit has a connection of its own: what a server says twice on one
            # would be taken for the answer to the next row.
            self._submitter = client(kept=0)
        except (ValueError, ImportError, OSError, httpx.InvalidURL) as exc:
            raise _bad_connection(exc) from exc

    def close(self) -> None:
        for client in (self._reader, self._submitter, *self._visitors.values()):
            client.close()

    def _hide(self, text: str) -> str:
        """Take the key out of a text: a server may echo it, in JSON's spelling or a URL's."""
        for form in self._forms:
            text = text.replace(form, "[key]")
        return text

    def _scrub(self, data: Any) -> Any:
        """Take the key out of an answer, before any of it is cut or kept."""
        match data:
            case str():
                return self._hide(data)
            case list():
                return [self._scrub(item) for item in data]
            case dict():
                return {self._hide(name): self._scrub(value) for name, value in data.items()}
        return data

    def submit(
        self, kind: Kind, key: str, body: bytes, held: Callable[[], Miss | None]
    ) -> Reply | Failure:
        """POST a body under its key (sume-api.md 1.2).

        `held` is asked at the last moment, when name, connection and TLS are done and no
        byte of the request has left; if it says why not, nothing is sent.
        """

        def trace(event: str, info: object) -> None:
            if event == "http11.send_request_headers.started" and (why := held()):
                raise _Held(why)

        return self._request(
            self._submitter,
            "POST",
            f"/{kind}s",
            POST_DEADLINE_S,
            body,
            {"Idempotency-Key": key},
            trace,
        )

    def read(self, kind: Kind, job_id: str) -> Reply | Failure:
        """GET a job: videos have a route of their own, images have the jobs' one."""
        path = f"/videos/{job_id}" if kind == "video" else f"/jobs/{job_id}/status"
        return self._request(self._reader, "GET", path, READ_DEADLINE_S)

    def result(self, job_id: str) -> Reply | Failure:
        """GET the result of a job that has ended (sume-api.md 1.3)."""
        return self._request(self._reader, "GET", f"/jobs/{job_id}/result", READ_DEADLINE_S)

    def jobs(self) -> Reply | Failure:
        """GET the newest jobs of the account (sume-api.md 1.3)."""
        return self._request(self._reader, "GET", "/jobs?limit=100", READ_DEADLINE_S)

    def cancel(self, job_id: str) -> Reply | Failure:
        """POST a wish that a job is not made (sume-api.md 1.3); asking again changes nothing."""
        return self._request(
            self._submitter, "POST", f"/jobs/{job_id}/cancel", READ_DEADLINE_S, b"{}"
        )

    def judge(self, link: str) -> Link:
        """Say where a link leads. Raises LinkRefused where it must not be followed."""
        return judge(link, self._account.base_url)

    @contextlib.contextmanager
    def stream(
        self, link: Link, keyed: bool, more: Mapping[str, str], progress: Progress
    ) -> Iterator[FileReply]:
        """GET a file, without following a redirect; with `keyed` the key goes along.

        `progress.give_up` ends it from another thread. Raises LinkRefused when the name leads
        into a private network, and whatever the network does; `trouble_of` makes words of it.
        """
        import httpx

        assert link.own or not keyed
        client = self._submitter if keyed else self._visitor(link.loopback)
        client.cookies.clear()
        request = client.build_request(
            "GET",
            f"{link.origin}/",
            headers={"Accept": "*/*", "Accept-Encoding": "identity", **more},
            timeout=httpx.Timeout(DOWNLOAD_STALL_S, connect=CONNECT_TIMEOUT_S),
            extensions={"trace": _Doorman(link, progress)},
        )
        request.url = exact_url(httpx.URL(f"{link.origin}/"), link.target)
        with contextlib.closing(client.send(request, stream=True)) as response:
            headers = {
                name.lower(): self._hide_link(value, link)
                for name, value in response.headers.items()
            }
            yield FileReply(response.status_code, headers, response.iter_raw())

    def _hide_link(self, text: str, link: Link) -> str:
        """Take key and query out of what a server says: it may echo either."""
        query = link.target.decode().partition("?")[2]
        text = self._hide(text)
        for secret in (query, *re.findall(r"=([^&=]{8,})", query)):
            text = text.replace(secret, "…") if len(secret) >= 8 else text
        return text

    def _visitor(self, loopback: bool) -> Any:
        """Return a client that knows no key; loopback is reached without a proxy."""
        import httpx

        if loopback not in self._visitors:
            agent = {"User-Agent": f"sume-resume/{__version__}"}
            # An API on this machine may speak http, and the link https.
            limits = httpx.Limits(max_keepalive_connections=0)
            try:
                tls = self._tls or httpx.create_ssl_context()
                made = httpx.Client(
                    headers=agent, verify=tls, trust_env=not loopback, limits=limits
                )
            except (ValueError, ImportError, OSError, httpx.InvalidURL) as exc:
                raise LinkRefused(str(_bad_connection(exc))) from exc
            self._visitors[loopback] = made
        return self._visitors[loopback]

    def trouble_of(self, exc: Exception, link: Link) -> str:
        """Say what went wrong with a file, without anything that its server wrote."""
        import httpx

        if isinstance(exc, httpx.RemoteProtocolError | httpx.DecodingError):
            text = "it came only in part, or not as HTTP"
        elif isinstance(exc, httpx.TimeoutException):
            text = "no answer in time" if not str(exc) else f"no answer in time ({exc})"
        else:
            text = classify(exc).text
        return quiet(f"{self._hide_link(text, link)} ({link.origin})")

    def _request(
        self,
        client: Any,
        method: str,
        path: str,
        deadline_s: float,
        content: bytes | None = None,
        more_headers: Mapping[str, str] = MappingProxyType({}),
        trace: Callable[[str, object], None] | None = None,
    ) -> Reply | Failure:
        limit_s = self._clock.awake_s() + deadline_s
        try:
            request = self._build_request(method, path, deadline_s, content, more_headers, trace)
            with contextlib.closing(client.send(request, stream=True)) as response:
                packing = response.headers.get("content-encoding")
                if "," in (packing or ""):
                    return Failure(Miss.UNKNOWN, "an answer that is packed more than once")
                body = bytearray()
                # What is not packed, which is nearly all, can skip the unpacking.
                for chunk in response.iter_bytes() if packing else response.iter_raw():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        return Failure(Miss.UNKNOWN, f"an answer over {MAX_ANSWER_BYTES} bytes")
                    if self._clock.awake_s() > limit_s:
                        return Failure(Miss.UNKNOWN, f"no whole answer in {deadline_s:.0f} s")
                reply = parse_reply(response.status_code, response.headers, bytes(body))
                return reply._replace(data=self._scrub(reply.data))
        except _Held as exc:
            return Failure(exc.args[0], _HELD[exc.args[0]])
        except Exception as exc:
            failure = classify(exc)
            return Failure(failure.miss, quiet(f"{self._hide(failure.text)} ({self._host})"))

    def _build_request(
        self,
        method: str,
        path: str,
        deadline_s: float,
        content: bytes | None,
        more_headers: Mapping[str, str],
        trace: Callable[[str, object], None] | None,
    ) -> httpx.Request:
        """Return a request; no cookie of an earlier answer goes along.

        The client's own way would merge URL, headers and cookies anew for each.
        """
        import httpx

        headers = self._headers.copy()
        headers.update(more_headers)
        if content is not None:
            headers["Content-Type"] = "application/json"
        timeout = httpx.Timeout(deadline_s, connect=CONNECT_TIMEOUT_S)
        extensions: dict[str, Any] = {"timeout": timeout.as_dict()}
        if trace is not None:
            extensions["trace"] = trace
        request = httpx.Request(
            method, self._base, headers=headers, content=content, extensions=extensions
        )
        request.url = exact_url(self._base, self._base.raw_path + path.encode())
        return request


_HELD: Mapping[Miss, str] = {
    Miss.STALE: "held back: the key is too old to be sent",
    Miss.LEASE: "held back: the lease has run out",
}


class _Doorman:
    """Judges the address that a name led to, before the first byte is sent there.

    A name server can answer with another address each time, so what was connected to
    counts. Through a proxy it is the proxy that looks names up.
    """

    def __init__(self, link: Link, progress: Progress) -> None:
        self._link, self._progress, self._host = link, progress, ""

    def __call__(self, event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.started":
            self._host = info["host"]
        if event == "connection.connect_tcp.complete":
            self._look_at(info["return_value"])

    def _look_at(self, stream: Any) -> None:
        import httpx

        try:
            self._progress.socket = stream.get_extra_info("socket")
            address = str(stream.get_extra_info("server_addr")[0])
        except OSError as exc:
            raise httpx.ConnectError("the other side hung up") from exc
        judged = self._host == self._link.host and not (self._link.own or self._link.loopback)
        if judged and is_inside(address):
            stream.close()
            raise LinkRefused(f"the link leads into a private network ({self._host}, {address})")


def classify(exc: Exception) -> Failure:
    """Say what an exception means for the request that met it; in doubt, it may have arrived.

    The table of POST outcomes (faults.md 2). "Server disconnected" has the same text
    whether or not the request was read, so it counts as unknown.
    """
    import ssl

    import httpx

    text = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
    chain: BaseException | None = exc
    while chain is not None:
        if getattr(chain, "reason", "") in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            return Failure(Miss.SETTINGS, "no TLS is spoken there; check SUME_API_BASE_URL")
        if isinstance(chain, ssl.SSLCertVerificationError):
            hint = "check the clock, SSL_CERT_FILE and the proxy"
            return Failure(Miss.SETTINGS, f"certificate refused: {chain.verify_message}; {hint}")
        chain = chain.__cause__ or chain.__context__
    settings = (
        httpx.UnsupportedProtocol,
        httpx.LocalProtocolError,
        httpx.InvalidURL,
        UnicodeEncodeError,
    )
    not_sent = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
    if isinstance(exc, settings):
        return Failure(Miss.SETTINGS, f"{text}; check SUME_API_BASE_URL and the proxy")
    return Failure(Miss.NOT_SENT if isinstance(exc, not_sent) else Miss.UNKNOWN, text)


def client_factory(account: Account, clock: Clock) -> Callable[[], Sume]:
    """Return what makes a worker's client. The trusted certificates are loaded once.

    Raises UsageError when proxy or certificate settings cannot be used.
    """
    import httpx

    tls: ssl.SSLContext | bool = False
    if account.base_url.startswith("https:"):
        try:
            tls = httpx.create_ssl_context()
        except (ValueError, OSError) as exc:
            raise _bad_connection(exc) from exc
    Sume(account, clock, tls).close()
    return lambda: Sume(account, clock, tls)


def _bad_connection(exc: Exception) -> UsageError:
    return UsageError(
        f"the connection cannot be set up: {quiet(exc)}; check HTTPS_PROXY, ALL_PROXY,"
        " SSL_CERT_FILE and SSL_CERT_DIR"
    )


# --- download ----------------------------------------------------------------
# One result file: its part, its proof, its name. Knows no ledger.


def file_stem(row: str, key: str, job_id: str | None, position: int) -> str:
    """Return the name of a result file without its ending.

    It is safe on every file system, and distinct where row ids differ in case or in Unicode
    form only: ASCII of the row id, then a hash of the attempt's key and its job, so that no
    two purchases share a name. No server names a file.
    """
    import unicodedata

    plain = unicodedata.normalize("NFKD", row).encode("ascii", "ignore").decode()
    slug = re.sub("[^A-Za-z0-9_]+", "-", plain).strip("-")[:MAX_STEM_CHARS].rstrip("-")
    facts = canonical([row, key, job_id])
    hashed = hashlib.sha256(facts.encode()).hexdigest()[:12]
    return f"{slug or 'row'}-{hashed}" + (f"-{position + 1}" if position else "")


# What files of a kind begin with: the place, the bytes, the ending, and what their content
# type may be called.
_MAGIC: tuple[tuple[int, bytes, str, str], ...] = (
    (4, b"ftypqt", "mov", "video"),
    (4, b"ftypavi", "avif", "image"),
    (4, b"ftyphei", "heic", "image"),
    (4, b"ftypmif1", "heic", "image"),
    (4, b"ftypM4A", "m4a", "audio"),
    (4, b"ftyp", "mp4", "video audio"),
    (4, b"moov", "mov", "video"),
    (4, b"mdat", "mov", "video"),
    (4, b"wide", "mov", "video"),
    (0, b"\x1aE\xdf\xa3", "webm", "video audio"),
    (0, b"\x89PNG\r\n\x1a\n", "png", "image"),
    (0, b"\xff\xd8\xff", "jpg", "image"),
    (8, b"WEBP", "webp", "image"),
    (8, b"AVI ", "avi", "video"),
    (8, b"WAVE", "wav", "audio"),
    (0, b"GIF87a", "gif", "image video"),
    (0, b"GIF89a", "gif", "image video"),
    (0, b"\x00\x00\x00\x0cJXL ", "jxl", "image"),
    (0, b"II*\x00", "tiff", "image"),
    (0, b"MM\x00*", "tiff", "image"),
    (0, b"ID3", "mp3", "audio"),
    (0, b"\xff\xfb", "mp3", "audio"),
    (0, b"\xff\xf3", "mp3", "audio"),
    (0, b"fLaC", "flac", "audio"),
    (0, b"OggS", "ogg", "audio video"),
    (0, b"WEBVTT", "vtt", "text"),
)
_HEAD_BYTES = 16
# Content types that say nothing of what a file is.
_ANY_TYPE = ("", "application/octet-stream", "binary/octet-stream", "application/mp4")


def ending_of(head: bytes, content_type: str) -> str | None:
    """Return the ending for a file that begins so; None where it is not what it is called.

    Bytes decide, since servers name types carelessly; but nothing that is called a web page,
    or a video and is a picture, is taken for the clip.
    """
    called = content_type.partition(";")[0].strip().lower()
    for place, magic, ending, kinds in _MAGIC:
        if head[place : place + len(magic)] == magic:
            fits = called in _ANY_TYPE or called.partition("/")[0] in kinds.split()
            return ending if fits else None
    if called == "image/svg+xml" and head.lstrip().startswith((b"<svg", b"<?xml")):
        return "svg"
    return None


class Got(enum.Enum):
    """What came of the wish to have a result file."""

    # It is on the disk, whole and verified.
    WHOLE = enum.auto()
    # It is not there, and no link to it is known.
    NO_LINK = enum.auto()
    # The link is no good any more, or leads to something else; a fresh one may be better.
    EXPIRED = enum.auto()
    # It did not come whole, or not at all.
    FAILED = enum.auto()
    # No other try would end otherwise.
    REFUSED = enum.auto()
    # No file can be written there.
    DISK = enum.auto()


class Fetched(NamedTuple):
    """What came of it, and of a whole file: where it is, and what it holds."""

    got: Got
    trouble: str = ""
    path: str = ""
    sha256: str = ""
    size: int = 0
    retry_after_s: float | None = None
    # Whether it was downloaded just now, and not found.
    fresh: bool = False
    # What is wrong with the file that was there before.
    missing: str = ""


class Wanted(NamedTuple):
    """A result file to have, and what is known of it."""

    folder: Path
    stem: str
    known: Output
    # With its query; None where it is not known, and only the disk is looked at.
    link: str | None = None


class PartBusy(Exception):
    """Another process is writing this part."""


class Part:
    """The .part of one file: opened without following a link, locked, hashed as it grows."""

    def __init__(self, path: Path) -> None:
        """Open what a dead process left, or make a new one. Raises PartBusy and OSError."""
        self._fd = -1
        self._open(path)

    def _open(self, path: Path) -> None:
        self.path = path
        while True:
            self._remove_stranger()
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
            try:
                if not try_lock(self._fd):
                    raise PartBusy
                if _is_at(path, self._fd):
                    break
            except BaseException:
                self._close()
                raise
            # It got its final name, or was removed, between open and lock.
            self._close()
        self._forget(os.fstat(self._fd).st_size)

    def _forget(self, size: int) -> None:
        self.size, self.head, self._sha256 = size, b"", hashlib.sha256()

    def _remove_stranger(self) -> None:
        """Take away what is no file of ours: writing to a link would change its target."""
        with contextlib.suppress(FileNotFoundError):
            there = os.lstat(self.path)
            if not stat.S_ISREG(there.st_mode) or there.st_nlink != 1:
                os.unlink(self.path)

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def keep(self, size: int) -> None:
        """Go on after so many bytes, which are hashed anew; 0 starts over."""
        os.ftruncate(self._fd, size)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._forget(0)
        while self.size < size and (block := os.read(self._fd, _BLOCK_BYTES)):
            self._took(block)

    def write(self, chunk: bytes) -> None:
        left = memoryview(chunk)
        while left:
            left = left[os.write(self._fd, left) :]
        self._took(chunk)

    def _took(self, chunk: bytes) -> None:
        if len(self.head) < _HEAD_BYTES:
            self.head += chunk[: _HEAD_BYTES - len(self.head)]
        self._sha256.update(chunk)
        self.size += len(chunk)

    def peek(self, count: int, at: int) -> bytes:
        """Return bytes from within; nothing is written after it."""
        os.lseek(self._fd, max(at, 0), os.SEEK_SET)
        return os.read(self._fd, count)

    def sync(self) -> None:
        """Make durable what was written so far."""
        os.fsync(self._fd)

    def publish(self, path: Path) -> None:
        """Give a whole file its name, in place of whatever has it; durable once this returns.

        A link that has the name is replaced itself; its target is not touched.
        """
        self.sync()
        if not _is_at(self.path, self._fd):
            raise PartBusy
        if os.name == "nt":
            # Windows renames no file that is open.
            self._close()
        os.replace(self.path, path)
        sync_folder(path.parent)

    def drop(self) -> None:
        """Leave nothing behind; what is another process's by now is let be."""
        with contextlib.suppress(OSError):
            mine = self._fd >= 0 and _is_at(self.path, self._fd)
            if os.name == "nt":
                self._close()
            if mine:
                os.unlink(self.path)


_BLOCK_BYTES = 1024 * 1024


def _is_at(path: Path, fd: int) -> bool:
    """Say whether an open file still has this name, and no other."""
    here = os.fstat(fd)
    try:
        return os.path.samestat(here, os.lstat(path)) and here.st_nlink == 1
    except FileNotFoundError:
        return False


def part_path(folder: Path, stem: str, etag: str | None, url: str | None) -> Path:
    """Return the name of a part; objects that can be told apart have parts of their own."""
    facts = canonical([etag, url]).encode()
    tag = f".{hashlib.sha256(facts).hexdigest()[:8]}" if etag else ""
    return folder / f"{stem}{tag}.part"


def fetch(api: Sume, wanted: Wanted, progress: Progress, clock: Clock) -> Fetched:
    """Have a result file on the disk: verify what is there, else download it by its link.

    After WHOLE is returned the file is durable under its name; after anything else that
    name holds what it held before. Raises nothing that a link or a disk can bring about.
    """
    progress.alive_s = clock.awake_s()
    there = verified(wanted, progress, clock)
    if isinstance(there, Fetched):
        return there
    if wanted.link is None:
        return Fetched(Got.NO_LINK, missing=there)
    return _download_safely(api, wanted, progress, clock)._replace(missing=there)


def _download_safely(api: Sume, wanted: Wanted, progress: Progress, clock: Clock) -> Fetched:
    """Download a file, and make words of what the disk refuses."""
    try:
        return _download(api, wanted, progress, clock)
    except PartBusy:
        progress.durable = 0
        return Fetched(Got.FAILED, f"another process is downloading to {wanted.stem}.part")
    except OSError as exc:
        progress.durable = 0
        # Of a rename, the second name is the one that is in the way.
        name = os.path.basename(exc.filename2 or exc.filename or f"{wanted.stem}.part")
        why = f"{name} cannot be written: {exc.strerror}"
        everything = exc.errno in _DISK_TROUBLE or not wanted.folder.is_dir()
        lost = isinstance(exc, FileNotFoundError) and not everything
        return Fetched(Got.FAILED if lost else Got.DISK if everything else Got.REFUSED, why)


# What would stop every other file too.
_DISK_TROUBLE = {errno.ENOSPC, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)}


def verified(wanted: Wanted, progress: Progress, clock: Clock) -> Fetched | str:
    """Return a file that was downloaded before, if its bytes are the same.

    Else say what is wrong with it; nothing, where none was there.
    """
    known = wanted.known
    name = os.path.basename(known.path or "")
    if known.sha256 is None or not name.startswith(f"{wanted.stem}."):
        return ""
    path = wanted.folder / name
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return "is no file any more"
        fd = os.open(path, os.O_RDONLY | NO_FOLLOW)
        try:
            hashed = hashlib.sha256()
            if os.fstat(fd).st_size != known.bytes:
                return "was changed"
            while block := os.read(fd, _BLOCK_BYTES):
                hashed.update(block)
                progress.alive_s = clock.awake_s()
        finally:
            os.close(fd)
    except OSError as exc:
        return "is not there" if isinstance(exc, FileNotFoundError) else "cannot be read"
    if hashed.hexdigest() != known.sha256:
        return "was changed"
    return Fetched(Got.WHOLE, "", str(path), known.sha256, known.bytes)


def _download(api: Sume, wanted: Wanted, progress: Progress, clock: Clock) -> Fetched:
    """Follow a link, hop by hop, and take what it leads to."""
    known, link, keyed = wanted.known, wanted.link or "", True
    more: dict[str, str] = {}
    held = _held_bytes(wanted)
    if held and known.etag:
        # The answer is a part only if the object is still the one that this ETag names.
        more = {"Range": f"bytes={held}-", "If-Range": known.etag}
        progress.received = progress.durable = held
        progress.etag, progress.url = known.etag, known.part_url
    for _ in range(MAX_REDIRECTS + 1):
        try:
            goal = api.judge(link)
        except LinkRefused as exc:
            return Fetched(Got.REFUSED, quiet(exc))
        # Whoever redirects from elsewhere must not choose what is asked with our key.
        keyed = keyed and goal.own
        try:
            with api.stream(goal, keyed, more, progress) as reply:
                if reply.code not in (301, 302, 303, 307, 308):
                    return _take(reply, goal, wanted, progress, clock)
                if not (location := reply.headers.get("location", "")):
                    return Fetched(Got.REFUSED, "a redirect leads nowhere")
                link = joined(goal.origin + goal.target.decode(), location)
        except LinkRefused as exc:
            return Fetched(Got.REFUSED, quiet(exc))
        except (OSError, PartBusy):
            raise
        except Exception as exc:
            return Fetched(Got.FAILED, api.trouble_of(exc, goal))
    return Fetched(Got.REFUSED, f"the link was redirected over {MAX_REDIRECTS} times")


def _held_bytes(wanted: Wanted) -> int:
    """Return how much of a file an earlier try left, durable and of a known object."""
    known = wanted.known
    if known.etag is None:
        return 0
    path = part_path(wanted.folder, wanted.stem, known.etag, known.part_url)
    try:
        return min(os.lstat(path).st_size, known.part_bytes or 0)
    except OSError:
        return 0


def _take(
    reply: FileReply, goal: Link, wanted: Wanted, progress: Progress, clock: Clock
) -> Fetched:
    """Judge an answer, stream its body into the part, and publish it if it is whole."""
    headers, known = reply.headers, wanted.known
    etag, url = headers.get("etag", ""), bare(goal.origin + goal.target.decode())
    if headers.get("content-encoding", "").strip().lower() not in _AS_IT_IS:
        return Fetched(Got.REFUSED, "the answer is packed, though it was asked not to be")
    total: int | None = None
    kept = 0
    match reply.code:
        case 401 | 403 | 404 | 410:
            return Fetched(Got.EXPIRED, f"the link answers HTTP {reply.code}")
        case 200:
            if re.fullmatch(_DIGITS_LONG, headers.get("content-length", "")):
                total = int(headers["content-length"])
            # The ledger may vouch for bytes of this object, which are written over now.
            again = (etag, url) == (known.etag, known.part_url)
            strong = re.fullmatch(_STRONG_ETAG, etag) and not again
            progress.etag, progress.url = (etag, url) if strong else (None, None)
            progress.durable = 0
        case 206 if (etag, url) == (progress.etag, progress.url) and (span := _span(headers))[
            0
        ] == progress.durable:
            kept, total = span
        case 206 | 416:
            progress.durable = 0
            _drop_left(wanted)
            return Fetched(Got.FAILED, "the rest of it could not be had; it is begun anew")
        case code:
            return Fetched(Got.FAILED, f"HTTP {code}", retry_after_s=retry_after_s(headers))
    if total is not None and total > MAX_FILE_BYTES:
        return Fetched(Got.REFUSED, f"it has {total} bytes, more than any clip")
    progress.total = total
    if not kept:
        _drop_left(wanted)
    with Part(part_path(wanted.folder, wanted.stem, progress.etag, progress.url)) as part:
        try:
            part.keep(kept)
            done = _fill(reply, wanted, part, progress, clock)
        except OSError:
            part.drop()
            raise
        finally:
            if not progress.durable:
                part.drop()
    return done


def _drop_left(wanted: Wanted) -> None:
    """Take away what an earlier try left, where it cannot be gone on with."""
    known = wanted.known
    if known.etag is not None:
        with Part(part_path(wanted.folder, wanted.stem, known.etag, known.part_url)) as part:
            part.drop()


# aws-chunked is how it was uploaded, and says nothing of how it comes.
_AS_IT_IS = ("", "identity", "aws-chunked")
_DIGITS_LONG = r"[0-9]{1,18}"
# A weak one (W/) only says that two objects mean the same.
_STRONG_ETAG = r'"[\x21\x23-\x7e]{1,200}"'


def _fill(
    reply: FileReply, wanted: Wanted, part: Part, progress: Progress, clock: Clock
) -> Fetched:
    """Stream a body into its part; publish what is whole."""
    headers, total = reply.headers, progress.total
    called = headers.get("content-type", "")
    trouble = _pour(reply, part, progress, clock)
    ending = ending_of(part.head, called)
    if part.size > MAX_FILE_BYTES:
        progress.durable = 0
        return Fetched(Got.REFUSED, f"it has over {MAX_FILE_BYTES} bytes, more than any clip")
    if ending is None and (part.size >= _HEAD_BYTES or not trouble):
        progress.durable = 0
        return Fetched(Got.EXPIRED, f"what came is no clip and no image ({_called(called)})")
    if not trouble and total not in (None, part.size):
        trouble = f"{part.size} bytes came, of {total}"
    proven = total is not None or "chunked" in headers.get("transfer-encoding", "").lower()
    if not trouble and not ends_whole(part, ending or "", proven):
        progress.durable = 0
        trouble = "it is cut short, or does not tell its length, nor does the answer"
    if trouble:
        return Fetched(Got.FAILED, trouble)
    progress.durable = 0
    path = wanted.folder / f"{wanted.stem}.{ending}"
    part.publish(path)
    return Fetched(Got.WHOLE, "", str(path), part.sha256, part.size, fresh=True)


def _called(content_type: str) -> str:
    return f"it is called {inert(content_type, 60)}" if content_type else "it has no type"


def _span(headers: Mapping[str, str]) -> tuple[int, int | None]:
    """Return where a partial answer begins, and how long the whole object is."""
    found = re.fullmatch(
        rf"bytes ({_DIGITS_LONG})-{_DIGITS_LONG}/({_DIGITS_LONG})",
        headers.get("content-range", "").strip(),
    )
    return (int(found[1]), int(found[2])) if found else (-1, None)


def _pour(reply: FileReply, part: Part, progress: Progress, clock: Clock) -> str:
    """Write a body into the part; return why it is not whole, or nothing.

    What came of an object that can be gone on with is durable when this ends.
    """
    called = reply.headers.get("content-type", "")
    begun_s = since_s = clock.awake_s()
    before = part.size
    try:
        for chunk in reply.chunks:
            part.write(chunk)
            progress.received = part.size
            if len(part.head) >= _HEAD_BYTES and ending_of(part.head, called) is None:
                return "not what was asked for"
            if part.size > MAX_FILE_BYTES:
                return "too long"
            if progress.etag and part.size - progress.durable >= PART_SYNC_BYTES:
                _secure(part, progress)
            now_s = progress.alive_s = clock.awake_s()
            late = progress.etag is not None and now_s - begun_s > DOWNLOAD_DEADLINE_S
            if progress.given_up or late:
                _secure(part, progress)
                return f"not whole after {DOWNLOAD_DEADLINE_S:.0f} s"
            if now_s - since_s > DOWNLOAD_STALL_S:
                if part.size - before < DOWNLOAD_LEAST_BYTES:
                    _secure(part, progress)
                    return f"{part.size - before} bytes in {DOWNLOAD_STALL_S:.0f} s"
                since_s, before = now_s, part.size
    except OSError:
        raise
    except Exception:
        # The connection broke, or was cut from the other thread.
        _secure(part, progress)
        raise
    return ""


def _secure(part: Part, progress: Progress) -> None:
    """Make durable what can be gone on with."""
    if progress.etag:
        part.sync()
        progress.durable = part.size


def ends_whole(part: Part, ending: str, proven: bool) -> bool:
    """Say whether a file tells by itself that it is whole.

    Where the answer has proven its length, what the file says counts only against it: some
    have more at their end than their kind needs.
    """
    size = part.size
    match ending:
        case "png":
            end = _chunks_end(part)
            return end == size or (proven and 0 < end < size)
        case "jpg" if not proven:
            return part.peek(2, size - 2) == b"\xff\xd9"
        case "gif" if not proven:
            return part.peek(1, size - 1) == b";"
        case "webp" | "avi" | "wav":
            end = 8 + int.from_bytes(part.peek(4, 4), "little")
            return end in (size, size - 1) or (proven and end < size)
        case "mp4" | "mov" | "m4a" | "avif" | "heic":
            end = _boxes_end(part)
            return end == size or (proven and end < size)
    return proven


def _boxes_end(part: Part) -> int:
    """Return where the last box of an MP4 or its kin ends; -1 where one does not say it."""
    at = 0
    while at < part.size:
        head = part.peek(16, at)
        length = int.from_bytes(head[:4], "big")
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        if length < 8:
            return -1
        at += length
    return at


def _chunks_end(part: Part) -> int:
    """Return where the last chunk of a PNG ends; -1 where it has none."""
    at = len(b"\x89PNG\r\n\x1a\n")
    while at < part.size:
        head = part.peek(8, at)
        at += 12 + int.from_bytes(head[:4], "big")
        if head[4:] == b"IEND":
            return at if at <= part.size else -1
    return -1


# --- engine ------------------------------------------------------------------
# One scheduler thread owns ledger, clock and pacing; workers only carry requests.


class Settings(NamedTuple):
    """How a run behaves. Times are seconds; None means no limit."""

    poll_interval_s: float = POLL_INTERVAL_S
    writes_per_minute: float = WRITES_PER_MINUTE
    reads_per_minute: float = READS_PER_MINUTE
    concurrency: int = CONCURRENCY
    key_ttl_s: float | None = KEY_TTL_S
    deadline_s: float | None = None
    job_deadline_s: float | None = None
    # Send at most so many rows that were never sent before.
    limit: int | None = None
    # Send nothing that could bring the costs and estimates of all attempts over this.
    max_cost_micros: int | None = None
    prices: Prices | None = None
    # The folder that gets the result files, if they are wanted.
    download: Path | None = None

    @property
    def workers(self) -> int:
        """Return how many requests there can be at once.

        Beside one or two, a download has a worker of its own: it takes minutes.
        """
        return self.concurrency + (self.download is not None and self.concurrency < 3)


class Errand(enum.Enum):
    """What a request is for."""

    SUBMIT = enum.auto()
    READ = enum.auto()
    RESULT = enum.auto()
    # A job that has ended, or its result, read for fresh links to its files.
    RELINK = enum.auto()
    RELINK_RESULT = enum.auto()
    # A result file.
    FETCH = enum.auto()

    @property
    def limit_s(self) -> float:
        """Return how long a request for this may take, in seconds; a file, without news of it."""
        if self is Errand.SUBMIT:
            return POST_DEADLINE_S
        return 2 * DOWNLOAD_STALL_S if self is Errand.FETCH else READ_DEADLINE_S


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A request on its way, with what its answer will be judged by."""

    errand: Errand
    job: Job
    sent_s: float
    # The attempt before it was claimed, and whether an earlier send may have arrived.
    before: Job
    earlier: bool = False
    # At the last moment the wall clock must be below the one, its lead above the other.
    send_before_ms: int | None = None
    least_ahead_ms: int = 0
    # On Postgres, whose clock is not this machine's: steady ms that may pass from `since_ms`.
    lease_ms: int | None = None
    age_left_ms: int | None = None
    since_ms: int = 0
    # Given up by the scheduler: its worker ends after it.
    overrun: bool = False
    # Of a FETCH: the file that is wanted, and how far it is.
    wanted: Wanted | None = None
    progress: Progress = field(default_factory=Progress)
    delivery: Delivery | None = None

    @property
    def overdue_s(self) -> float:
        since_s = max(self.sent_s, self.progress.alive_s)
        return since_s + self.errand.limit_s + OVERRUN_GRACE_S


class Answer(NamedTuple):
    call: Call
    meaning: Outcome | Reading | Fetched


def perform(api: Sume, call: Call, clock: Clock) -> Answer:
    """Carry out a call and say what its answer means. Raises nothing: in doubt, unknown."""
    job, asked = call.job, call.job.job_id or ""
    try:
        meaning: Outcome | Reading | Fetched
        match call.errand:
            case Errand.SUBMIT:
                held = lambda: held_back(call, clock)  # noqa: E731  it closes over the call
                meaning = outcome_of(api.submit(job.kind, job.key, job.body, held))
            case Errand.READ | Errand.RELINK:
                meaning = reading_of(api.read(job.kind, asked), asked)
            case Errand.RESULT | Errand.RELINK_RESULT:
                meaning = reading_of(api.result(asked), asked, of_result=True)
            case Errand.FETCH:
                assert call.wanted is not None
                meaning = fetch(api, call.wanted, call.progress, clock)
            case _:
                assert_never(call.errand)
        return Answer(call, meaning)
    except Exception as exc:
        # One odd answer must not end the run, nor touch another row.
        text = f"the answer could not be read ({type(exc).__name__})"
        return no_answer(call, text, doubtful=True)


def no_answer(call: Call, text: str, miss: Miss = Miss.UNKNOWN, doubtful: bool = False) -> Answer:
    """Return what stands for the answer to a call that brought none that can be read."""
    failure = Failure(miss, text)
    if call.errand is Errand.FETCH:
        return Answer(call, Fetched(Got.FAILED, text))
    if call.errand is not Errand.SUBMIT:
        return Answer(call, reading_of(failure, ""))
    return Answer(call, outcome_of(failure)._replace(doubtful=doubtful))


def held_back(call: Call, clock: Clock) -> Miss | None:
    """Say why a submit must not leave now, at the moment of sending; None where it may.

    Name look-up, connect and TLS stand still while a machine is suspended; a process must
    not wake up a day later and buy, nor send what another worker has taken over.
    """
    passed_ms = clock.elapsed_ms() - call.since_ms
    if call.lease_ms is not None and passed_ms >= call.lease_ms:
        return Miss.LEASE
    if call.age_left_ms is not None:
        return Miss.STALE if passed_ms >= call.age_left_ms else None
    if call.send_before_ms is None:
        return None
    now = clock.wall_ms()
    first = call.job.first_sent_at or now
    young = first <= now < call.send_before_ms and clock.ahead_ms() >= call.least_ahead_ms
    return None if young else Miss.STALE


class Carrier(Protocol):
    """What the scheduler needs of its workers; tests have one without threads."""

    def free(self) -> int: ...
    def start(self, call: Call) -> None: ...
    def wait(self, timeout_s: float) -> list[Answer]: ...
    def abandon(self, call: Call) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class Workers:
    """Threads that carry calls. Each has a client of its own."""

    def __init__(self, make_api: Callable[[], Sume], clock: Clock, count: int) -> None:
        self._make_api, self._clock, self._count = make_api, clock, count
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        # SimpleQueue, since a signal handler may put into it while a get is running.
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._busy: set[Call] = set()
        self._threads: list[threading.Thread] = []
        # Threads that will take another call: always as many as there are calls, so that
        # none waits behind another one.
        self._live = 0

    def free(self) -> int:
        return self._count - len(self._busy)

    def start(self, call: Call) -> None:
        self._busy.add(call)
        if self._live < len(self._busy):
            self._hire()
        self._calls.put(call)

    def wait(self, timeout_s: float) -> list[Answer]:
        """Return the answers that have arrived, after the first one or the timeout."""
        answers: list[Answer] = []
        with contextlib.suppress(queue.Empty):
            answer = self._answers.get(timeout=timeout_s) if timeout_s > 0 else None
            while True:
                if answer is not None:
                    answers.append(answer)
                    self._busy.discard(answer.call)
                answer = self._answers.get_nowait()
        return answers

    def abandon(self, call: Call) -> None:
        """Give a call up: its worker ends after it, and another one is hired when needed."""
        call.overrun = True
        call.progress.give_up()
        self._busy.discard(call)
        self._live -= 1

    def wake(self) -> None:
        """End a wait; safe in a signal handler."""
        self._answers.put(None)

    def close(self) -> None:
        """Let idle workers go. One that is stuck ends with the process."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(timeout=0.2 if not self._busy else 0)

    def _hire(self) -> None:
        thread = threading.Thread(target=self._work, daemon=True)
        self._threads.append(thread)
        self._live += 1
        thread.start()

    def _work(self) -> None:
        api: Sume | None = None
        while (call := self._calls.get()) is not None:
            try:
                api = api or self._make_api()
                answer = perform(api, call, self._clock)
            except Exception as exc:
                text = f"no client could be made ({type(exc).__name__})"
                answer = no_answer(call, text, Miss.SETTINGS)
            self._answers.put(answer)
            if call.overrun:
                break
        if api is not None:
            api.close()


def check_account(ledger: Ledger, account: Account, adopt: bool = False) -> None:
    """Raise AccountError, with nothing changed, where an account must not use a ledger.

    A key found under another account would be a new purchase, and a job would not be found
    there. What was simulated once can never buy anything.
    """
    origin, known = ledger.meta("origin"), ledger.meta("key_fingerprint")
    if origin not in (None, account.origin):
        simulated = origin == STAND_IN or (account.origin == STAND_IN and ledger.ever_sent())
        if simulated or ledger.ever_accepted():
            helps = ", or run it with --simulate" if origin == STAND_IN else ""
            raise AccountError(
                f"{ledger.place}: belongs to {origin}, and this command is for {account.origin};"
                f" nothing was changed; use another --db{helps}"
            )
    elif known not in (None, _fingerprint(ledger, account)) and ledger.ever_sent() and not adopt:
        raise AccountError(
            f"{ledger.place}: was used with another API key; nothing was changed. If this key is"
            " of the same account (a rotated key), say so once: run with --adopt-account"
        )


def _fingerprint(ledger: Ledger, account: Account) -> str:
    return account.fingerprint(ledger.meta("salt") or "")


def admit(ledger: Ledger, account: Account, adopt: bool, now_ms: int) -> None:
    """Check that this account may use this ledger, and remember it.

    Raises AccountError, with nothing changed.
    """
    with ledger.transaction():
        check_account(ledger, account, adopt)
        origin = ledger.meta("origin")
        if origin not in (None, account.origin):
            for job in ledger.with_status(Status.SENDING):
                why = f"it may have been sent to {origin}, and this run is for {account.origin}"
                ledger.record_review(job, why, now_ms)
        ledger.record_account(account.origin, _fingerprint(ledger, account))


def look_up(ledger: Ledger, api: Sume, account: Account, kind: Kind, job_id: str) -> Reading:
    """Read a job that a person names. Raises UsageError when Sume does not know it.

    Raises AccountError when no answer says whether it does, or another origin would be asked.
    """
    if ledger.meta("origin") != account.origin:
        raise AccountError(
            f"{ledger.place}: its rows were sent to {ledger.meta('origin')}, and SUME_API_BASE_URL"
            f" names {account.origin}; nothing was changed"
        )
    reading = reading_of(api.read(kind, job_id), job_id)
    if reading.said is Said.GONE:
        raise UsageError(f"Sume does not know the {kind} job {job_id} ({reading.trouble})")
    if reading.said is not Said.STATUS:
        raise AccountError(
            f"job {job_id} could not be read ({reading.trouble}); nothing was changed"
        )
    return reading


class Wish(NamedTuple):
    """What became of the wish to cancel a job."""

    before: Job
    job: Job
    # Why it is not, or may not be, cancelled; empty where it is, or Sume took the wish.
    refusal: str


# A wish that is turned away by a rate limit is said again so often.
CANCEL_TRIES = 3


def cancel_jobs(
    ledger: Ledger,
    api: Sume,
    clock: Clock,
    jobs: Iterable[Job],
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Wish]:
    """Ask Sume not to make jobs, at the pace of the write budget; say what became of each.

    Raises AccountError where no further wish would be heard either.
    """
    import random

    budget, rng = Budget(WRITES_PER_MINUTE), random.Random()
    last = ledger.pace("writes")
    if last is not None:
        budget.seed(clock.awake_s(), (clock.wall_ms() - last) / 1000)

    def ask(job_id: str) -> Reply | Failure:
        for step in count(1):
            _await(budget, clock)
            ledger.record_pace("writes", clock.wall_ms())
            answer = api.cancel(job_id)
            if isinstance(answer, Failure) or answer.code not in (429, 503) or step == CANCEL_TRIES:
                return answer
            asked_s = retry_after_s(answer.headers) or 0.0
            wait_s = max(asked_s, backoff_s(step, rng, BACKOFF_CAP_S))
            say(f"Sume asks for a pause ({describe(answer)}); waiting {show_time(wait_s)}")
            clock.sleep(wait_s)
        raise AssertionError("count() has no end")

    for job in jobs:
        before = ledger.job(job.id)
        if before.status not in OPEN:
            yield _wish(before, before, "")
            continue
        assert before.job_id is not None
        refusal = cancel_refusal(ask(before.job_id))
        reading = reading_of(api.read(before.kind, before.job_id), before.job_id)
        yield _wish(before, _after_wish(ledger, before, refusal, reading, clock), refusal)


def _await(budget: Budget, clock: Clock) -> None:
    """Wait until a request of this budget may leave, and take its place."""
    clock.sleep(max(0.0, budget.ready_s - clock.awake_s()))
    budget.take(clock.awake_s())


def _after_wish(ledger: Ledger, job: Job, refusal: str, reading: Reading, clock: Clock) -> Job:
    """Record a wish and how the job ended, if it has; a run may have read it meanwhile."""
    with ledger.transaction():
        now, now_ms = ledger.job(job.id), clock.wall_ms()
        if now.status not in OPEN:
            return now
        asked = ledger.record_cancel_asked(now, refusal, now_ms)
        status = reading.status
        if status is None or status not in FINAL or status is Status.COMPLETED:
            # A run looks for the result and the cost of what is completed.
            return asked
        return ledger.record_final(asked, status, reading, reading.note, now_ms)


def _wish(before: Job, job: Job, refusal: str) -> Wish:
    if job.status in OPEN or job.status is Status.CANCELLED:
        return Wish(before, job, refusal if job.status in OPEN else "")
    return Wish(before, job, f"it is {job.status} by now")


def reread(ledger: Ledger, api: Sume, clock: Clock) -> Iterator[tuple[Job, str, int | None]]:
    """Read every job of a ledger afresh, at the pace of the read budget; record new costs.

    Yields each attempt as it is afterwards, why it could not be read, and what it had cost.
    Raises AccountError where no further read would be answered either.
    """
    budget = Budget(READS_PER_MINUTE)
    for job in ledger.sent():
        if job.job_id is None:
            continue
        _await(budget, clock)
        reading = reading_of(api.read(job.kind, job.job_id), job.job_id)
        if reading.said is Said.HALTED:
            raise AccountError(reading.trouble)
        if reading.said is not Said.STATUS:
            gone = "Sume does not know it" if reading.said is Said.GONE else "could not be read"
            yield job, f"{gone} ({reading.trouble})", job.cost_micros
            continue
        after = ledger.record_cost(job, reading.cost, clock.wall_ms())
        yield after, "", job.cost_micros


def jobs_of_nobody(ledger: Ledger, api: Sume) -> tuple[list[str], str]:
    """Return the jobs of Sume's list that this ledger does not know, or why there is no list.

    Only the newest ones are listed (sume-api.md 1.3), and only what was made since the first
    send of this ledger could be its own.
    """
    answer = api.jobs()
    if isinstance(answer, Failure):
        return [], answer.text
    listed = unwrap(answer.data).get("jobs", _dig(answer.data, "data"))
    if not 200 <= answer.code < 300 or not isinstance(listed, list):
        return [], describe(answer)
    since = ledger.first_sent_at() or 0
    found = []
    for one in listed:
        id = job_id_of(one)
        made = _made_at_ms(one)
        if id is not None and (made is None or made >= since) and ledger.holder(id) is None:
            found.append(id)
    return found, ""


def _made_at_ms(job: object) -> int | None:
    """Return when a listed job was made, where it says so in ISO 8601."""
    from datetime import datetime

    said = _dig(job, "created_at")
    try:
        return round(datetime.fromisoformat(said).timestamp() * 1000)
    except (TypeError, ValueError):
        return None


class Capped(NamedTuple):
    """What a cap kept from being sent."""

    rows: int
    # Rows of these have no known price.
    unpriced: int
    # What the cap would have to be for the others.
    needed_micros: int
    # What is spent or reserved.
    spent_micros: int = 0
    # Attempts whose cost nobody knows: while there is one, nothing is sent.
    blockers: Sequence[Job] = ()


def blocked_words(blockers: Sequence[Job]) -> str:
    """Say what may have cost something that nobody can say, and what helps."""
    names = ", ".join(f"'{job.row}' (attempt {job.attempt})" for job in blockers[:5])
    more = f" and {len(blockers) - 5} more" if len(blockers) > 5 else ""
    models = ", ".join(sorted({job.model for job in blockers})[:5])
    return (
        f"row {names}{more} may have cost something, and neither a cost nor a price is known:"
        f" add a price of {models} to the list"
    )


class Ending(NamedTuple):
    """How a run ended: by a signal, a halt, a deadline, or with nothing left to do."""

    signal: int | None = None
    halt: str | None = None
    deadline: bool = False
    # The flags that can leave rows unfinished.
    limits: Sequence[str] = ()
    capped: Capped | None = None
    # Submits that Sume answered with a job it had already, by the key.
    hits: int = 0
    # Why it ended before every file was looked after; and the rows that lack one, and why.
    downloads_cut: str = ""
    undownloaded: Mapping[str, str] = MappingProxyType({})
    # Files that are there, and how many of those came in this run.
    files: int = 0
    fresh_files: int = 0


@dataclass(slots=True)
class Delivery:
    """What this run knows of the files of one row that has ended."""

    job: Job
    outputs: list[Output]
    # With their queries; empty while they are not known.
    links: tuple[str, ...]
    # The file that is looked after now.
    position: int = 0
    tries: int = 0
    # How much of it was durable after the last try: a try that brought more is no failure.
    durable: int = 0
    # What is asked for links next; empty where the links are not in question.
    routes: list[Errand] = field(default_factory=list)
    # The links are those of the ledger, since Sume names none any more.
    stored: bool = False
    not_before_s: float = 0.0
    trouble: str = ""


class Deliveries:
    """Sees to it that every row that has ended has its files: one file a row at a time.

    A row that ends in this run comes with its links; the others come from the ledger, and
    their links are asked for when a file of theirs is not on the disk.
    """

    def __init__(
        self, ledger: Ledger, folder: Path, wants: Callable[[Job], bool], rng: random.Random
    ) -> None:
        self._ledger, self._folder, self._wants, self._rng = ledger, folder, wants, rng
        self._ended: deque[int] = deque()
        self._links: dict[int, tuple[str, ...]] = {}
        # Rows that ended in this run, which the ledger would bring once more.
        self._mine: set[int] = set()
        self._after = 0
        # What waits for its time, the earliest first.
        self._waiting: list[tuple[float, int, Delivery]] = []
        self._flying = 0
        self._all_begun = False
        # Why nothing can be written any more.
        self.halted = ""
        # Rows without all their files, and why.
        self.failed: dict[str, str] = {}
        # Files that are whole, and how many of them came in this run.
        self.files = self.fresh = 0

    def ended(self, job: Job, links: tuple[str, ...]) -> None:
        """A row has ended, and its job names these links."""
        if not self._wants(job) or job.id in self._mine:
            return
        self._mine.add(job.id)
        self._ended.append(job.id)
        if len(self._links) < LINKS_KEPT:
            self._links[job.id] = links

    def is_left(self, now_ms: int) -> bool:
        """Say whether any file is still to be looked after."""
        if self.halted:
            return self._flying > 0
        if self._flying or self._waiting or self._ended:
            return True
        if self._ledger.shared:
            return self._is_elsewhere()
        if self._all_begun:
            return False
        following = self._next_ended(now_ms)
        if following is not None:
            self._waiting.append((0.0, following.job.id, following))
        return following is not None

    def _is_elsewhere(self) -> bool:
        """Say whether a row lacks a file that this run has not given up; look for it again.

        Another worker may have it, or died while it had: then it is free after its lease.
        """
        rows = (job for job in self._ledger.lacking() if self._wants(job))
        if all(job.row in self.failed for job in rows):
            return False
        self._after, self._all_begun = 0, False
        self._mine.clear()
        return True

    def in_hand(self) -> bool:
        """Say whether files are on their way, or wait for another try."""
        return bool(self._flying or self._waiting)

    def cut(self, now_ms: int) -> str:
        """Say why files were not looked after, though nothing is wrong with them; or nothing."""
        return self.halted or ("the run was stopped" if self.is_left(now_ms) else "")

    def due_s(self) -> float | None:
        """Return when the next file can be gone on with; None where none waits."""
        if self.halted:
            return None
        return self._waiting[0][0] if self._waiting else 0.0 if not self._all_begun else None

    def take(self, now_s: float, now_ms: int) -> Delivery | None:
        """Return the next row whose files can be seen to; `back` or `done` follows."""
        if self.halted:
            return None
        delivery = None
        if self._waiting and self._waiting[0][0] <= now_s:
            delivery = heapq.heappop(self._waiting)[2]
        elif len(self._waiting) < LINKS_KEPT:
            delivery = self._next_ended(now_ms)
        self._flying += delivery is not None
        return delivery

    def back(self, delivery: Delivery) -> None:
        """More is to be done for it, at its time."""
        self._flying -= 1
        heapq.heappush(self._waiting, (delivery.not_before_s, delivery.job.id, delivery))

    def done(self, delivery: Delivery) -> None:
        self._flying -= 1
        self._ledger.record_handed_back(delivery.job)
        # What an earlier attempt lacked matters no more.
        self.failed.pop(delivery.job.row, None)
        if delivery.trouble:
            self.failed[delivery.job.row] = delivery.trouble

    def halt(self, why: str) -> None:
        """Nothing can be written: no file is tried any more in this run."""
        self.halted = why

    def wanted(self, delivery: Delivery) -> Wanted:
        """Return what a worker needs to have the next file of a row."""
        job, position = delivery.job, delivery.position
        stem = file_stem(job.row, job.key, job.job_id, position)
        link = link_for(delivery.links, delivery.outputs, position)
        return Wanted(self._folder, stem, delivery.outputs[position], link)

    def _next_ended(self, now_ms: int) -> Delivery | None:
        while True:
            if self._ended:
                job = self._ledger.job(self._ended.popleft())
                links = self._links.pop(job.id, ())
                fresh = True
            else:
                found = None if self._all_begun else self._next_of_ledger(now_ms)
                if found is None:
                    return None
                job, links, fresh = found, (), False
            outputs = self._ledger.outputs(job)
            if outputs:
                with contextlib.suppress(RowChanged):
                    return Delivery(self._ledger.record_claimed(job, now_ms), outputs, links)
            elif job.status is Status.COMPLETED and not fresh:
                # It may name a file by now.
                return Delivery(job, [], (), routes=_routes(job))
            elif job.status is Status.COMPLETED:
                self.failed[job.row] = job.note or NO_FILE

    def _next_of_ledger(self, now_ms: int) -> Job | None:
        """Return the next row that ended before; on Postgres one whose files nobody has yet.

        Where workers have a disk each, none can say what is on another one's.
        """
        while batch := self._batch(now_ms):
            for job in batch:
                self._after = job.id
                if job.id in self._mine or not self._wants(job):
                    continue
                if not (self._ledger.shared and job.row in self.failed):
                    return job
        self._all_begun = True
        return None

    def _batch(self, now_ms: int) -> list[Job]:
        if self._ledger.shared:
            return self._ledger.claimable_ended(now_ms, self._after)
        return self._ledger.ended(self._after, 100)


NO_FILE = "Sume named no result file"


def _routes(job: Job) -> list[Errand]:
    """Return what is asked for links: first what names them most surely, as for a new job."""
    routes = [Errand.RELINK, Errand.RELINK_RESULT]
    return routes if job.kind == "video" else routes[::-1]


class Engine:
    """Sends what is queued, replays what is unknown, polls what is open, until all is final.

    Resuming is no second path: a row that was being sent when a process died is claimed
    first and sent by the same code, with the same bytes.
    """

    def __init__(
        self,
        ledger: Ledger,
        workers: Carrier,
        clock: Clock,
        settings: Settings,
        *,
        scope: set[str] | None = None,
        listen: Callable[[Event], None] = lambda event: None,
        rng: random.Random | None = None,
    ) -> None:
        """`scope` names the rows that may be sent; None allows all, also later ones."""
        self._ledger, self._workers, self._clock = ledger, workers, clock
        self._settings, self._scope, self._listen = settings, scope, listen
        if rng is None:
            import random

            rng = random.Random()
        self._rng = rng
        self._pacing = Pacing(settings.writes_per_minute, settings.reads_per_minute, rng)
        self._flying: dict[int, Call] = {}
        self._seen: dict[int, Seen] = {}
        # Open or unanswered rows that are let be for a while, to a steady time: few of all.
        self._resting: dict[int, float] = {}
        # Attempts that this run has sent, and the highest of their ids.
        self._first_sends: set[int] = set()
        self._last_first = 0
        self._strays: set[int] = set()
        # Queued attempts up to this id were looked at; out of scope ones only once.
        self._after = 0
        self._totals = Totals()
        self._untold: list[Event] = []
        self._halt: tuple[Halt, str] | None = None
        self._signal: int | None = None
        self._closing_s: float | None = None
        self._start_s = self._loaded_s = self._planned_s = clock.awake_s()
        self._holding = False
        self._hits = 0
        # Whether a call was ever given up: its late answer can move a row on while another
        # call for it is on its way.
        self._overran = False
        self._version = 0
        # How far the clock that counts is ahead of this machine's.
        self._ahead_ms = 0
        # Whether a commit is not known to have come: what it claimed is read back first.
        self._in_doubt = False
        # Attempts that count against a cap with nobody knowing how much.
        self._unpriced: list[Job] = []
        self._deliveries = self._new_deliveries()

    def _new_deliveries(self) -> Deliveries | None:
        folder = self._settings.download
        if folder is None:
            return None
        return Deliveries(self._ledger, folder, self._in_scope, self._rng)

    # -- life of a run --

    def run(self) -> Ending:
        """Work until nothing is left, a signal, a deadline or a halt; then say which.

        After this returns all submits that were answered are recorded. Raises LedgerError
        when a fact cannot be recorded; nothing is sent from then on.
        """
        answers: list[Answer] = []
        try:
            self._begin()
            while True:
                try:
                    self._turn(answers)
                except LedgerLost as exc:
                    # What the turn would have recorded and claimed is undone, or not known.
                    self._wait_for_ledger(exc, 1)
                    continue
                if self._is_over():
                    break
                answers = self._workers.wait(self._wait_s())
            self._park_downloads()
            self._leave()
            now_ms = self._now_ms()
            self._reload(self._clock.awake_s(), now_ms, last=True)
            self._emit(now_ms)
        except LedgerError as exc:
            ending = self._signal is not None or self._deadline_passed()
            if not (isinstance(exc, LedgerBusy) and ending):
                raise _with_ids(exc, [*answers, *self._last_answers(answers)]) from exc
        finally:
            self._ledger.on_busy = _give_up
        halt = self._halt[1] if self._halt else None
        settings = self._settings
        given = {"--limit": settings.limit, "--job-deadline": settings.job_deadline_s}
        limits = [flag for flag, value in given.items() if value is not None]
        end = Ending(self._signal, halt, self._deadline_passed(), limits)
        if self._deliveries is not None:
            cut, failed = self._deliveries.cut(self._now_ms()), dict(self._deliveries.failed)
            if cut:
                failed = dict.fromkeys(self._without_files(), cut) | failed
            end = end._replace(downloads_cut=cut, undownloaded=failed)
            end = end._replace(files=self._deliveries.files, fresh_files=self._deliveries.fresh)
        return end._replace(capped=self._capped(), hits=self._hits)

    def _leave(self) -> None:
        """Hand everything back; where that is lost twice, the leases end by themselves."""
        for _ in range(2):
            try:
                self._ledger.record_left()
            except LedgerLost:
                continue
            return

    def _without_files(self) -> Iterator[str]:
        """Yield the rows that are completed, and lack a file in the folder that is asked for."""
        folder = str(self._settings.download)
        for job in self._ledger.latest():
            if job.status is Status.COMPLETED and self._in_scope(job):
                paths = [output.path for output in self._ledger.outputs(job)]
                if not all(path and os.path.dirname(path) == folder for path in paths or [None]):
                    yield job.row

    def _park_downloads(self) -> None:
        """Let the downloads on their way stop where they are, and keep how far they came."""
        flying = {call for call in self._flying.values() if call.errand is Errand.FETCH}
        for call in flying:
            call.progress.give_up()
        until_s = self._clock.awake_s() + PARK_S
        while flying and (left_s := until_s - self._clock.awake_s()) > 0:
            flying -= {answer.call for answer in self._workers.wait(left_s)}
        # What is lost here is only how far they came.
        with contextlib.suppress(LedgerLost), self._ledger.transaction():
            self._record_parts()

    def _capped(self) -> Capped | None:
        """Return what the cap keeps from being sent, if it is what ended the sending."""
        limit = self._settings.limit
        if self._settings.max_cost_micros is None or self._signal is not None or self._halt:
            return None
        if limit is not None and len(self._first_sends) >= limit:
            return None
        estimates = [
            self._estimate(job) for job in self._ledger.every(Status.QUEUED) if self._in_scope(job)
        ]
        priced = [micros for micros in estimates if micros is not None]
        if not estimates or (priced and self._has_room_for(priced[0])):
            return None
        spent, unpriced = self._counted_micros(), len(estimates) - len(priced)
        return Capped(len(estimates), unpriced, spent + sum(priced), spent, self._unpriced)

    def _counted_micros(self) -> int:
        """Return what counts against a cap: known costs, and estimates of the rest."""
        return self._totals.cost_micros + self._totals.reserved_micros

    def _last_answers(self, answers: Sequence[Answer]) -> list[Answer]:
        """Wait for the submits that are still on their way when nothing can be recorded."""
        waiting = {id(call) for call in self._flying.values() if call.errand is Errand.SUBMIT}
        waiting -= {id(answer.call) for answer in answers}
        last: list[Answer] = []
        until_s = self._clock.awake_s() + SIGNAL_GRACE_S
        while waiting and (left_s := until_s - self._clock.awake_s()) > 0:
            came = self._workers.wait(left_s)
            waiting -= {id(answer.call) for answer in came}
            last += came
        return last

    def stop(self, signum: int) -> None:
        """Begin to stop, from a signal handler: submits in flight are still recorded."""
        self._signal = self._signal or signum
        self._workers.wake()

    def _now_ms(self) -> int:
        """Return the time that counts for what is stored, in ms UTC."""
        return self._clock.wall_ms() + self._ahead_ms

    def _begin(self) -> None:
        self._ledger.on_busy = self._wait_for_ledger
        now_ms = self._ledger.now_ms(self._clock.wall_ms())
        self._ahead_ms = now_ms - self._clock.wall_ms()
        self._pacing.restore(self._ledger.pace, self._start_s, now_ms)
        self._version = self._ledger.data_version()
        if self._settings.max_cost_micros is not None:
            self._price_what_was_sent(now_ms)
        self._totals = self._ledger.totals()
        jobs = self._active()
        for job in jobs:
            self._meet(job, self._start_s)
        self._listen(Started(self._totals, jobs, now_ms))

    def _price_what_was_sent(self, now_ms: int) -> None:
        """Estimate what was sent without prices, since all attempts count against a cap."""
        found = [(job, self._estimate(job)) for job in self._ledger.unpriced()]
        known = [(job, micros) for job, micros in found if micros is not None]
        self._ledger.record_estimates(known, now_ms)
        self._unpriced = [job for job, micros in found if micros is None]
        if self._unpriced:
            self._tell(f"{blocked_words(self._unpriced)}; under --max-cost nothing is sent")

    def _active(self) -> list[Job]:
        """Return the attempts that Sume may be working on."""
        active = (Status.SENDING, *OPEN)
        return [job for status in active for job in self._ledger.with_status(status)]

    def _turn(self, answers: list[Answer]) -> None:
        """Record all that has arrived and claim what is due next, in one commit.

        The times are taken when the ledger is ours, however long that took. `answers` is
        emptied once they are recorded.
        """
        self._holding = bool(answers)
        untold = len(self._untold)
        before = dict(self._flying)
        try:
            with self._ledger.transaction():
                wall_ms = self._clock.wall_ms()
                now_s, now_ms = self._clock.awake_s(), self._ledger.now_ms(wall_ms)
                self._ahead_ms, self._planned_s = now_ms - wall_ms, now_s
                came = [*answers, *self._overruns(now_s)]
                self._ledger.hold((answer.call.job.id for answer in came), _named_jobs(came))
                for answer in came:
                    self._record(answer, now_s, now_ms)
                self._record_parts()
                if self._in_doubt:
                    self._give_back_unknown()
                self._renew(now_ms)
                calls = self._claim(now_s, now_ms)
        except LedgerLost:
            self._undo(before, untold, answers)
            raise
        answers.clear()
        self._holding = self._in_doubt = False
        self._hand_out(calls, now_ms)
        self._reload(now_s, now_ms)
        self._emit(now_ms)

    def _undo(self, before: dict[int, Call], untold: int, answers: list[Answer]) -> None:
        """Forget what a turn did whose commit did not come, or is not known.

        Its answers are recorded again by the next turn: one that is recorded already changes
        nothing. What it claimed was not sent, and is read from the ledger again. Downloads
        begin anew: what is on the disk is found there.
        """
        for call in before.values():
            if call.delivery is not None and not call.overrun:
                self._workers.abandon(call)
        self._flying = {id: call for id, call in before.items() if call.delivery is None}
        answers[:] = [answer for answer in answers if answer.call.delivery is None]
        if self._deliveries is not None:
            self._deliveries = self._new_deliveries()
        del self._untold[untold:]
        self._after = 0
        self._loaded_s = float("-inf")
        self._in_doubt = True

    def _give_back_unknown(self) -> None:
        """Free what a lost commit claimed after all: nothing of it was sent by this worker."""
        for job in self._ledger.held():
            if job.id not in self._flying:
                self._ledger.record_handed_back(job)

    def _renew(self, now_ms: int) -> None:
        """Keep what is on its way: no other worker takes it while this one is alive."""
        for call in list(self._flying.values()):
            lease = call.job.lease_until
            if lease is None or lease - now_ms > LEASE_S * 500:
                continue
            try:
                call.job = self._ledger.record_renewed(call.job, now_ms)
            except RowChanged as exc:
                self._tell(exc.why, exc.row)
                continue
            call.lease_ms = self._lease_left_ms(call.job, now_ms)

    def _lease_left_ms(self, job: Job, now_ms: int) -> int | None:
        """Return the steady ms, from the call's `since_ms` on, in which a submit may leave."""
        if job.lease_until is None:
            return None
        return job.lease_until - now_ms - round(POST_DEADLINE_S * 1000)

    def _overruns(self, now_s: float) -> list[Answer]:
        """Give up the calls whose workers have been at them for too long."""
        late = [call for call in self._flying.values() if now_s >= call.overdue_s]
        for call in late:
            self._overran = True
            if not call.overrun:
                self._workers.abandon(call)
        return [no_answer(call, "no answer before the deadline") for call in late]

    def _wait_for_ledger(self, exc: LedgerBusy, tries: int) -> None:
        """Wait on, or give up: while an id may come home never, since none is dropped.

        Otherwise a minute is enough to say that something is wrong, and a signal or the
        deadline ends the wait.
        """
        ending = self._signal is not None or self._deadline_passed()
        expecting = self._holding or self._submits_flying() > 0
        lost = isinstance(exc, LedgerLost)
        if ending and (lost or not expecting):
            raise exc
        if not expecting and not lost and tries >= BUSY_TRIES:
            raise exc
        self._listen(Tick(self._now_ms(), "the ledger"))
        if tries == 1 or not lost:
            self._listen(Notice(str(exc)))
        if lost:
            self._clock.sleep(backoff_s(min(tries, 4), self._rng, OFFLINE_CAP_S))

    def _claim(self, now_s: float, now_ms: int) -> list[Call]:
        if self._closing(now_s):
            return []
        if self._ledger.shared and self._workers.free():
            if why := self._ledger.moved():
                self._stop_for(Halt.EVERYTHING, why)
                return []
            # From here to the commit no other worker can send or read anything.
            self._pacing.restore(self._ledger.lock_paces().get, now_s, now_ms)
            if self._settings.max_cost_micros is not None:
                self._totals = self._ledger.totals()
                self._unpriced = self._ledger.unpriced()
        own = self._own_free()
        submits = list(self._claim_submits(now_s, now_ms, own))
        reads = list(self._claim_reads(now_s, now_ms, own - len(submits)))
        free = self._workers.free() - len(submits) - len(reads)
        fetches = list(self._claim_fetches(now_s, now_ms, free))
        if submits:
            at_ms = self._pacing.writes.taken_ms(now_s, now_ms)
            self._ledger.record_pace("writes", at_ms)
        if reads or any(call.errand is not Errand.FETCH for call in fetches):
            self._ledger.record_pace("reads", self._pacing.reads.taken_ms(now_s, now_ms))
        for name, at_ms in self._pacing.facts(now_s, now_ms):
            self._ledger.record_pace(name, at_ms)
        return submits + reads + fetches

    def _hand_out(self, calls: list[Call], now_ms: int) -> None:
        """Give the claimed calls to the workers; after a signal, give them back instead."""
        for call in calls:
            if self._signal is None:
                call.sent_s = self._clock.awake_s()
                self._workers.start(call)
                continue
            del self._flying[call.job.id]
            if call.delivery is not None and self._deliveries is not None:
                self._deliveries.back(call.delivery)
            if call.errand is Errand.SUBMIT:
                back = self._ledger.record_unclaimed(call.job, call.before, now_ms)
                self._changed(call.job, back, now_ms)

    # -- claiming --

    def _claim_submits(self, now_s: float, now_ms: int, free: int) -> Iterator[Call]:
        """Claim what is sent now: unknown outcomes first, then new rows, in order."""
        # One worker is left for reads, so that held submits never stop the polling.
        free -= self._own_workers() > 1
        submits, reads = self._submits_flying(), self._reads_flying()
        replays, queued = self._replays(now_s, now_ms), self._sendable(free, now_ms)
        while (
            free > 0
            and self._halt is None
            and self._pacing.may_submit(now_s, submits, submits + reads)
        ):
            job = next(replays, None) or self._next_queued(queued, submits, now_s)
            if job is None:
                return
            self._pacing.writes.take(now_s)
            free, submits = free - 1, submits + 1
            yield self._prepare(job, now_s, now_ms)

    def _prepare(self, job: Job, now_s: float, now_ms: int) -> Call:
        earlier = job.status is Status.SENDING
        prepared = self._ledger.record_prepared(job, now_ms, self._estimate(job))
        ready = self._changed(job, prepared, now_ms)
        seen, ahead_ms = self._see(job), self._clock.ahead_ms()
        seen.ahead_ms = max(seen.ahead_ms, ahead_ms) if earlier else ahead_ms
        before_ms = send_before_ms(ready.first_sent_at or now_ms, self._settings.key_ttl_s)
        call = Call(
            errand=Errand.SUBMIT,
            job=ready,
            sent_s=now_s,
            before=job,
            earlier=earlier,
            send_before_ms=before_ms,
            least_ahead_ms=seen.ahead_ms - round(CLOCK_FALL_LIMIT_S * 1000),
        )
        if self._ledger.shared:
            call.since_ms = self._clock.elapsed_ms()
            call.lease_ms = self._lease_left_ms(ready, now_ms)
            call.age_left_ms = before_ms - now_ms if before_ms is not None else None
        self._flying[job.id] = call
        return call

    def _replays(self, now_s: float, now_ms: int) -> Iterator[Job]:
        """Yield rows whose last send may have arrived; one too old goes to review."""
        unanswered = self._totals.by_status[Status.SENDING]
        counted_out = not self._ledger.shared and not self._overran
        if counted_out and unanswered == self._submits_flying():
            # All of them are on their way: the ledger need not be asked.
            return
        for job in self._ledger.claimable(Status.SENDING, now_ms):
            if job.id in self._flying or self._rests(job, now_s):
                continue
            why = too_old(job.first_sent_at or 0, now_ms, self._settings.key_ttl_s)
            # Of a server's clock nobody here can say that it fell.
            fallen = (
                self._see(job).ahead_ms - self._clock.ahead_ms() if not self._ledger.shared else 0
            )
            if self._settings.key_ttl_s is not None and fallen > CLOCK_FALL_LIMIT_S * 1000:
                why = why or f"the clock was set back by {show_time(fallen / 1000)}"
            if why is None:
                yield job
            else:
                self._review(job, f"an earlier send may have arrived, and {why}", now_ms)

    def _estimate(self, job: Job) -> int | None:
        prices = self._settings.prices
        return prices.estimate(job.kind, job.model, job.body) if prices else None

    def _is_priced(self, job: Job) -> bool:
        return self._settings.max_cost_micros is None or self._estimate(job) is not None

    def _fits(self, job: Job) -> bool:
        """Say whether a row can be bought without any chance to exceed the cap."""
        if self._settings.max_cost_micros is None:
            return True
        micros = self._estimate(job)
        return micros is not None and self._has_room_for(micros)

    def _has_room_for(self, micros: int) -> bool:
        cap = self._settings.max_cost_micros
        return cap is None or (not self._unpriced and self._counted_micros() + micros <= cap)

    def _next_queued(self, queued: Iterator[Job], submits: int, now_s: float) -> Job | None:
        """Return the next row that may be sent, if Sume's queue and the cap have room."""
        window, ours = self._pacing.window, self._open_count() + submits
        job = next(queued, None) if window.has_room(ours, now_s) else None
        if job is None or not self._fits(job):
            return None
        window.sent(ours, now_s)
        self._after = job.id
        self._first_sends.add(job.id)
        self._last_first = max(self._last_first, job.id)
        return job

    def _sendable(self, wanted: int, now_ms: int | None = None) -> Iterator[Job]:
        """Yield the rows that scope and --limit allow; what they do not is passed once.

        New rows and new attempts have higher ids, and a row that returns sets `_after` back.
        With `now_ms` they are to be claimed, and rows that another worker has are passed too.
        Who takes a row sets `_after`, before it asks for the next one.
        """
        limit = self._settings.limit
        while batch := self._queued_after(wanted, now_ms):
            for job in batch:
                spent = limit is not None and len(self._first_sends) >= limit
                if spent and job.id > self._last_first:
                    # None of the rows from here on was sent before.
                    return
                again = job.id in self._first_sends
                if self._in_scope(job) and (again or not spent) and self._is_priced(job):
                    yield job
                else:
                    self._after = job.id
            # Where rows are passed, many may be.
            wanted = PASSED_ROWS

    def _queued_after(self, wanted: int, now_ms: int | None) -> list[Job]:
        if now_ms is None:
            return self._ledger.with_status(Status.QUEUED, self._after, wanted)
        return self._ledger.claimable(Status.QUEUED, now_ms, self._after, wanted)

    def _claim_reads(self, now_s: float, now_ms: int, free: int) -> Iterator[Call]:
        """Claim the reads whose time has come, evenly spaced, longest due first."""
        reading, submits = self._reads_flying(), self._submits_flying()
        # One worker is left for submits, as one is for reads.
        free = min(free, max(1, self._own_workers() - 1) - reading)
        if free <= 0 or not self._pacing.may_read(now_s, reading, reading + submits):
            return
        skip = len(self._flying) + len(self._resting)
        for job in self._ledger.due(now_ms, now_ms + self._horizon_ms(), free + skip):
            if job.id in self._flying or self._rests(job, now_s):
                continue
            if free <= 0 or not self._pacing.may_read(now_s, reading, reading + submits):
                return
            self._pacing.reads.take(now_s)
            free, reading = free - 1, reading + 1
            errand = Errand.RESULT if self._see(job).want_result else Errand.READ
            mine = self._ledger.record_claimed(job, now_ms)
            call = Call(errand=errand, job=mine, sent_s=now_s, before=job)
            self._flying[job.id] = call
            yield call

    def _claim_fetches(self, now_s: float, now_ms: int, free: int) -> Iterator[Call]:
        """Claim the next files, and reads for fresh links to them, with what workers are left.

        They have a share of the workers, so that submits and reads are never kept waiting.
        """
        deliveries = self._deliveries
        if deliveries is None:
            return
        share = max(1, (self._settings.concurrency - 1) // 2)
        free = min(free, share - self._deliveries_flying())
        held: list[Delivery] = []
        while free > 0 and (delivery := deliveries.take(now_s, now_ms)) is not None:
            reading = self._reads_flying()
            may_read = self._pacing.may_read(now_s, reading, reading + self._submits_flying())
            if delivery.routes and not may_read:
                held.append(delivery)
                if len(held) > share:
                    break
                continue
            if self._ledger.shared:
                try:
                    delivery.job = self._ledger.record_renewed(delivery.job, now_ms)
                except RowChanged:
                    # It waited for longer than its lease, and another worker has it.
                    deliveries.done(delivery)
                    continue
            call = self._call_for(delivery, now_s)
            self._flying[call.job.id] = call
            free -= 1
            yield call
        for delivery in held:
            deliveries.back(delivery)

    def _call_for(self, delivery: Delivery, now_s: float) -> Call:
        job = delivery.job
        if delivery.routes:
            self._pacing.reads.take(now_s)
            errand, wanted = delivery.routes[0], None
        else:
            assert self._deliveries is not None
            errand, wanted = Errand.FETCH, self._deliveries.wanted(delivery)
        return Call(
            errand=errand, job=job, sent_s=now_s, before=job, wanted=wanted, delivery=delivery
        )

    def _own_workers(self) -> int:
        """Return how many workers are there for submits and reads."""
        settings = self._settings
        return min(settings.concurrency, settings.workers - self._deliveries_flying())

    def _own_free(self) -> int:
        """Return how many of those have nothing to do."""
        flying = sum(call.delivery is None for call in self._flying.values())
        return min(self._workers.free(), self._own_workers() - flying)

    def _deliveries_flying(self) -> int:
        return sum(call.delivery is not None for call in self._flying.values())

    def _reads_flying(self) -> int:
        """Return how many requests to the API are on their way that are no submit."""
        others = (Errand.SUBMIT, Errand.FETCH)
        return sum(call.errand not in others for call in self._flying.values())

    def _horizon_ms(self) -> int:
        """Return the longest wait there is: what is due later is due now, the clock moved."""
        longest_s = max(MAX_POLL_HINT_S, self._settings.poll_interval_s) * (1 + POLL_JITTER)
        return round(longest_s * 1000)

    def _submits_flying(self) -> int:
        return sum(call.errand is Errand.SUBMIT for call in self._flying.values())

    def _open_count(self) -> int:
        return sum(self._totals.by_status[status] for status in OPEN)

    def _in_scope(self, job: Job) -> bool:
        return self._scope is None or job.row in self._scope

    def _rests(self, job: Job, now_s: float) -> bool:
        """Say whether a row is let be for now."""
        if self._resting.get(job.id, now_s) > now_s:
            return True
        self._resting.pop(job.id, None)
        return False

    def _see(self, job: Job) -> Seen:
        return self._seen.get(job.id) or self._meet(job, self._clock.awake_s())

    def _meet(self, job: Job, since_s: float) -> Seen:
        """Begin to remember a row, from now on or anew."""
        self._resting.pop(job.id, None)
        self._seen[job.id] = Seen(ahead_ms=self._clock.ahead_ms(), since_s=since_s)
        return self._seen[job.id]

    # -- recording --

    def _record(self, answer: Answer, now_s: float, now_ms: int) -> None:
        """Record what one answer means. A row that was changed meanwhile is let be."""
        call, meaning = answer.call, answer.meaning
        current = self._flying.get(call.job.id) is call
        if current:
            del self._flying[call.job.id]
        try:
            if isinstance(meaning, Fetched):
                if current:
                    self._record_fetched(call, meaning, now_s, now_ms)
                return
            if isinstance(meaning, Reading):
                if current and call.delivery is not None:
                    self._record_links(call, call.delivery, meaning, now_s, now_ms)
                elif current:
                    self._record_reading(call, meaning, now_s, now_ms)
                return
            if current:
                self._pace_submits(call, meaning, now_s)
                self._record_outcome(call, meaning, now_s, now_ms)
            elif meaning.job_id is not None:
                self._record_late(call, meaning.job_id, now_ms)
        except RowChanged as exc:
            self._tell(exc.why, exc.row)
            # What is shown and counted of it is out of date.
            self._loaded_s = float("-inf")
            if call.delivery is not None and self._deliveries is not None:
                # On Postgres another worker has it, and its file is looked for again.
                call.delivery.trouble = "" if self._ledger.shared else exc.why
                self._deliveries.done(call.delivery)
            if isinstance(meaning, Outcome) and meaning.job_id is not None:
                self._record_late(call, meaning.job_id, now_ms)

    def _record_outcome(self, call: Call, outcome: Outcome, now_s: float, now_ms: int) -> None:
        """Move the row of a submit on, by where the submit ended."""
        job, trouble, seen = call.job, outcome.trouble, self._see(call.job)
        match outcome.landing:
            case Landing.ACCEPTED:
                self._accept(job, outcome, now_s, now_ms)
            case Landing.REFUSED if call.earlier:
                why = f"refused now ({trouble}), but an earlier send may have arrived"
                self._review(job, why, now_ms)
            case Landing.REFUSED:
                self._changed(job, self._ledger.record_rejected(job, trouble, now_ms), now_ms)
            case Landing.CONFLICT:
                why = f"its key already stands for something else at Sume ({trouble})"
                self._review(job, why, now_ms)
            case Landing.STALE if call.earlier:
                why = "an earlier send may have arrived, and its key became too old to send again"
                self._review(job, why, now_ms)
            case Landing.NOT_LANDED | Landing.STALE if not call.earlier:
                self._changed(job, self._ledger.record_returned(job, trouble, now_ms), now_ms)
                self._after = min(self._after, job.id - 1)
            case Landing.UNKNOWN if outcome.doubtful and seen.doubts + 1 >= DOUBT_LIMIT:
                why = f"{DOUBT_LIMIT} sends brought no usable answer ({trouble})"
                self._review(job, why, now_ms)
            case _:
                # Unknown, or turned away while an earlier send may have arrived: its next
                # replay waits, whatever else is open.
                seen.doubts += outcome.doubtful
                wait = max(
                    backoff_s(seen.errors, self._rng, BACKOFF_CAP_S), outcome.retry_after_s or 0.0
                )
                self._resting[job.id] = now_s + wait
                seen.errors += 1
                again_ms = now_ms + round(wait * 1000)
                after = self._ledger.record_unanswered(job, trouble, now_ms, again_ms)
                self._changed(job, after, now_ms)

    def _accept(self, job: Job, outcome: Outcome, now_s: float, now_ms: int) -> None:
        assert outcome.job_id is not None
        wait_s = poll_wait_s(self._settings.poll_interval_s, self._rng)
        # A job that Sume knew already may have ended long ago.
        due_ms = now_ms if outcome.hit else now_ms + round(wait_s * 1000)
        self._hits += outcome.hit
        after = self._ledger.record_accepted(job, outcome.job_id, now_ms, due_ms, outcome.hit)
        self._changed(job, after, now_ms)
        if after.status is Status.REVIEW:
            self._tell(after.note or "", job.row)
            return
        self._meet(job, now_s)

    def _record_late(self, call: Call, job_id: str, now_ms: int) -> None:
        """Keep an id that came home after its row had moved on."""
        job = self._ledger.job(call.job.id)
        mine = not self._ledger.shared or job.token == call.job.token
        if job.status is Status.SENDING and mine:
            due_ms = now_ms + round(self._settings.poll_interval_s * 1000)
            after = self._ledger.record_accepted(job, job_id, now_ms, due_ms)
        else:
            after = self._ledger.record_late_id(job, job_id, now_ms)
        self._changed(job, after, now_ms)
        if after.status is Status.REVIEW and after.note != job.note:
            self._tell(after.note or "", job.row)

    def _review(self, job: Job, why: str, now_ms: int) -> None:
        after = self._changed(job, self._ledger.record_review(job, why, now_ms), now_ms)
        self._tell(f"needs review: {after.note}", job.row)

    def _pace_submits(self, call: Call, outcome: Outcome, now_s: float) -> None:
        """Let the answer to a submit shut or open the gates, or halt the run."""
        self._count_strays(call, outcome)
        if outcome.halt is not None:
            self._stop_for(outcome.halt, outcome.trouble)
        with self._telling_of_the_network(outcome.trouble):
            open_jobs, submits = self._open_count(), self._submits_flying()
            self._pacing.submitted(outcome, call.sent_s, now_s, open_jobs, submits)

    def _pace_reads(self, call: Call, reading: Reading, now_s: float) -> None:
        if reading.said is Said.HALTED:
            self._stop_for(Halt.EVERYTHING, reading.trouble)
        with self._telling_of_the_network(reading.trouble):
            self._pacing.was_read(reading, call.sent_s, now_s, self._reads_flying())

    @contextlib.contextmanager
    def _telling_of_the_network(self, trouble: str) -> Iterator[None]:
        """Say once that the network is gone, and once that it is back."""
        was = self._pacing.offline.step > 0
        yield
        now = self._pacing.offline.step > 0
        if now and not was:
            helps = "check the network, SUME_API_BASE_URL and the proxy"
            self._tell(f"offline, waiting ({trouble}); {helps}")
        elif was and not now:
            self._tell("online again")

    def _count_strays(self, call: Call, outcome: Outcome) -> None:
        """Stop where several rows in a row are answered as by no Sume.

        Where a job was ever accepted, a name that is not found is the row's own fault.
        """
        own_fault = outcome.landing is Landing.REFUSED and self._ledger.ever_accepted()
        if not outcome.stray or own_fault:
            self._strays.clear()
            return
        self._strays.add(call.job.id)
        if len(self._strays) >= STRAY_ROWS:
            trouble = f"{STRAY_ROWS} rows in a row were answered as by no Sume"
            self._stop_for(Halt.SUBMITS, f"{trouble} ({outcome.trouble}); check SUME_API_BASE_URL")

    def _stop_for(self, halt: Halt, trouble: str) -> None:
        halted = self._halt and self._halt[0]
        if halted is None or (halted is Halt.SUBMITS and halt is Halt.EVERYTHING):
            self._halt = (halt, trouble)
            self._tell(trouble)

    def _record_reading(self, call: Call, reading: Reading, now_s: float, now_ms: int) -> None:
        """Move the row of a read on, by what the answer said."""
        job, seen = call.job, self._see(call.job)
        self._pace_reads(call, reading, now_s)
        match reading.said:
            case Said.STATUS:
                self._record_word(call, reading, now_ms)
            case Said.PAUSED:
                # Another row is the next probe: one job's trouble must not stop the rest.
                self._resting[job.id] = now_s + self._settings.poll_interval_s
                self._ledger.record_handed_back(job)
                if reading.broken:
                    seen.was_read = True
                    self._poll_error(job, reading.trouble, now_ms)
            case Said.HALTED:
                self._ledger.record_handed_back(job)
            case Said.GONE if call.errand is Errand.READ:
                seen.was_read = True
                seen.gone_since_s = seen.gone_since_s or now_s
                if now_s - seen.gone_since_s < GONE_GRACE_S:
                    self._poll_error(job, reading.trouble, now_ms)
                    return
                why = f"Sume does not know job {job.job_id} ({reading.trouble})"
                self._review(job, why, now_ms)
            case Said.BAD | Said.GONE | Said.NOT_READY if call.errand is Errand.RESULT:
                seen.result_tries += 1
                gone = reading.said is Said.GONE
                seen.result_read = gone or seen.result_tries >= RESULT_TRIES
                seen.want_result = reading.said is Said.BAD and not seen.result_read
                self._poll_error(job, reading.trouble, now_ms)
            case Said.BAD | Said.NOT_READY | Said.GONE:
                seen.was_read = True
                self._poll_error(job, reading.trouble, now_ms)
            case _:
                assert_never(reading.said)

    def _record_word(self, call: Call, reading: Reading, now_ms: int) -> None:
        """Record a status word: the job goes on, needs one more read, or has ended."""
        job, seen = call.job, self._see(call.job)
        of_result = call.errand is Errand.RESULT
        seen.was_read, seen.errors, seen.gone_since_s = True, 0, None
        if of_result:
            seen.want_result, seen.result_read = False, True
        reading = merge(seen.last, reading)
        if reading.status is None and not reading.ended and not seen.warned:
            seen.warned = True
            self._tell(
                f"Sume says '{reading.word}', a word that is not known; it is read on", job.row
            )
        step = next_step(job.kind, reading, seen)
        if step is Step.FINISH:
            self._finish(job, reading, now_ms)
            return
        wait_s = 0.0
        if step is Step.POLL:
            wait_s = poll_wait_s(self._hinted_s(reading), self._rng)
        else:
            seen.last = reading
        if step is Step.RESULT:
            seen.want_result = True
        elif step is Step.REREAD:
            wait_s, seen.rereads = COST_REREAD_S[seen.rereads], seen.rereads + 1
        due_ms = now_ms + round(wait_s * 1000)
        self._changed(job, self._ledger.record_status(job, reading, now_ms, due_ms), now_ms)

    def _hinted_s(self, reading: Reading) -> float:
        """Return Sume's hint; one below a second only where a person asked for less."""
        interval_s = self._settings.poll_interval_s
        return max(reading.hint_s, min(1.0, interval_s)) if reading.hint_s else interval_s

    def _finish(self, job: Job, reading: Reading, now_ms: int) -> None:
        status = last_word(reading)
        if status is Status.REVIEW:
            self._review(job, f"Sume calls it ended, by the unknown word '{reading.word}'", now_ms)
            return
        note = reading.note
        if note is None and status is Status.COMPLETED and not reading.links:
            note = NO_FILE
        after = self._ledger.record_final(job, status, reading, note, now_ms)
        self._changed(job, after, now_ms)
        if self._deliveries is not None:
            self._deliveries.ended(after, reading.links)

    # -- recording downloads --

    def _record_parts(self) -> None:
        """Keep how much of the files on their way is durable, so that a kill costs no more."""
        for call in self._flying.values():
            if call.delivery is not None and call.errand is Errand.FETCH:
                self._keep_part(call.delivery, call.progress)

    def _keep_part(self, delivery: Delivery, progress: Progress) -> None:
        known = delivery.outputs[delivery.position]
        part = progress.part_of(known)
        if part is not None and part != known:
            self._ledger.record_part(delivery.job, delivery.position, part)
            delivery.outputs[delivery.position] = part

    def _record_fetched(self, call: Call, fetched: Fetched, now_s: float, now_ms: int) -> None:
        """Record what came of a file, and say what is next for its row."""
        deliveries, delivery = self._deliveries, call.delivery
        assert deliveries is not None
        assert delivery is not None
        if fetched.missing:
            self._look_for(delivery, fetched.missing, now_ms)
        match fetched.got:
            case Got.WHOLE:
                self._have(delivery, fetched, now_ms)
                self._next_file(delivery)
            case Got.NO_LINK if delivery.links or delivery.stored:
                # It was read afresh: this file is not among those that are named now.
                self._give_up(delivery, "Sume names no link to it any more", now_ms)
            case Got.NO_LINK:
                delivery.routes = _routes(delivery.job)
                deliveries.back(delivery)
            case Got.DISK:
                deliveries.halt(fetched.trouble)
                self._tell(f"no more downloads in this run: {fetched.trouble}")
                self._give_up(delivery, fetched.trouble, now_ms)
            case Got.REFUSED:
                self._give_up(delivery, fetched.trouble, now_ms)
            case Got.EXPIRED | Got.FAILED:
                self._try_again(call, delivery, fetched, now_s, now_ms)
            case _:
                assert_never(fetched.got)

    def _have(self, delivery: Delivery, fetched: Fetched, now_ms: int) -> None:
        """A file is there; what was verified and is known already is no news."""
        job, position = delivery.job, delivery.position
        known = delivery.outputs[position]
        output = Output(known.url, fetched.path, fetched.sha256, fetched.size)
        assert self._deliveries is not None
        self._deliveries.files += 1
        self._deliveries.fresh += fetched.fresh
        if known.path != fetched.path or known.sha256 != fetched.sha256:
            facts = (fetched.path, fetched.sha256, fetched.size)
            well = not delivery.trouble
            after = self._ledger.record_downloaded(job, position, *facts, now_ms, well)
            delivery.job = self._changed(job, after, now_ms)
            self._untold.append(Downloaded(after, output, now_ms))
        delivery.outputs[position] = output

    def _next_file(self, delivery: Delivery) -> None:
        assert self._deliveries is not None
        delivery.position, delivery.tries, delivery.durable = delivery.position + 1, 0, 0
        delivery.not_before_s = 0.0
        if delivery.position < len(delivery.outputs):
            self._deliveries.back(delivery)
        else:
            self._deliveries.done(delivery)

    def _look_for(self, delivery: Delivery, what: str, now_ms: int) -> None:
        """Record that a file of this folder is gone or changed; one of another folder is let be."""
        job, position = delivery.job, delivery.position
        path = delivery.outputs[position].path
        assert self._settings.download is not None
        if path is None or os.path.dirname(path) != str(self._settings.download):
            return
        after = self._ledger.record_lost(job, position, path, now_ms)
        delivery.job = self._changed(job, after, now_ms)
        delivery.outputs[position] = Output(delivery.outputs[position].url)
        self._tell(f"{os.path.basename(path)} {what}; it is downloaded again", job.row)

    def _try_again(
        self, call: Call, delivery: Delivery, fetched: Fetched, now_s: float, now_ms: int
    ) -> None:
        """Ask for a fresh link before the next try: that also waits while there is no network.

        A try that brought more of the file than the one before is no failure.
        """
        assert self._deliveries is not None
        progress = call.progress
        self._keep_part(delivery, progress)
        # A hundredth of it, or a megabyte where nobody says how long it is.
        step = progress.total // 100 + 1 if progress.total else 1_000_000
        if progress.durable >= delivery.durable + step:
            delivery.durable, delivery.tries = progress.durable, 0
        else:
            delivery.tries += 1
        if delivery.tries >= DOWNLOAD_TRIES or (delivery.stored and fetched.got is Got.EXPIRED):
            self._give_up(delivery, fetched.trouble, now_ms)
            return
        wait_s = backoff_s(delivery.tries, self._rng, BACKOFF_CAP_S)
        delivery.not_before_s = now_s + max(wait_s, fetched.retry_after_s or 0.0)
        if not delivery.stored:
            delivery.routes = _routes(delivery.job)
        self._untold.append(Downloading(delivery.job, 0, None, now_ms))
        self._deliveries.back(delivery)

    def _give_up(self, delivery: Delivery, why: str, now_ms: int) -> None:
        """A file cannot be had in this run; the row's other files still can."""
        job = delivery.job
        many = f" {delivery.position + 1}" if len(delivery.outputs) > 1 else ""
        trouble = f"no file{many}: {why}"
        after = self._ledger.record_undownloaded(job, trouble, now_ms)
        delivery.job, delivery.trouble = self._changed(job, after, now_ms), why
        self._next_file(delivery)

    def _record_links(
        self, call: Call, delivery: Delivery, reading: Reading, now_s: float, now_ms: int
    ) -> None:
        """Take fresh links from a read of a job that has ended; its status stays what it is."""
        assert self._deliveries is not None
        self._pace_reads(call, reading, now_s)
        if reading.cost.micros is not None:
            after = self._ledger.record_cost(delivery.job, reading.cost, now_ms)
            delivery.job = self._changed(delivery.job, after, now_ms)
        match reading.said:
            case Said.STATUS if reading.links:
                self._relink(delivery, reading, now_ms)
            case Said.PAUSED | Said.HALTED if not reading.broken:
                delivery.not_before_s = now_s + self._settings.poll_interval_s
            case Said.BAD | Said.PAUSED if delivery.tries + 1 < DOWNLOAD_TRIES:
                delivery.tries += 1
                delivery.not_before_s = now_s + backoff_s(delivery.tries, self._rng, BACKOFF_CAP_S)
            case _:
                delivery.routes.pop(0)
                if not delivery.routes:
                    self._without_links(delivery, reading)
        if delivery.position < len(delivery.outputs) or delivery.routes:
            self._deliveries.back(delivery)
        else:
            self._deliveries.done(delivery)

    def _relink(self, delivery: Delivery, reading: Reading, now_ms: int) -> None:
        delivery.links, delivery.routes = reading.links, []
        if not delivery.outputs:
            after = self._ledger.record_named(delivery.job, reading, now_ms)
            delivery.job = self._changed(delivery.job, after, now_ms)
            delivery.outputs = self._ledger.outputs(after)

    def _without_links(self, delivery: Delivery, reading: Reading) -> None:
        """Sume names no link: what the ledger has may still do, if it was no signed one."""
        urls = [output.url for output in delivery.outputs]
        delivery.links = tuple(url for url in urls if urls.count(url) == 1)
        delivery.stored = True
        if not delivery.outputs:
            delivery.trouble = reading.trouble or NO_FILE

    def _poll_error(self, job: Job, trouble: str, now_ms: int) -> None:
        seen = self._see(job)
        interval_s = self._settings.poll_interval_s
        wait_s = min(max(MAX_POLL_HINT_S, interval_s), interval_s * 2.0 ** min(seen.errors, 20))
        seen.errors += 1
        due_ms = now_ms + round(poll_wait_s(wait_s, self._rng) * 1000)
        after = self._ledger.record_poll_error(job, trouble, now_ms, due_ms)
        self._changed(job, after, now_ms)

    def _changed(self, before: Job, after: Job, now_ms: int) -> Job:
        """Follow a recorded change: totals, memory, listeners."""
        self._totals.move(before, after)
        if not after.cost_unknown:
            self._unpriced = [job for job in self._unpriced if job.id != after.id]
        if after.status in FINAL or after.status is Status.REVIEW:
            self._seen.pop(after.id, None)
            self._resting.pop(after.id, None)
        self._untold.append(Changed(before, after, now_ms))
        return after

    def _tell(self, text: str, row: str | None = None) -> None:
        self._untold.append(Notice(text, row))

    # -- waiting and ending --

    def _emit(self, now_ms: int) -> None:
        """Tell the listeners what is committed."""
        untold, self._untold = self._untold, []
        for event in untold:
            self._listen(event)
        for call in self._flying.values():
            received, total = call.progress.received, call.progress.total
            if call.errand is Errand.FETCH and received:
                self._listen(Downloading(call.job, received, total, now_ms))
        waiting = self._pacing.waiting_for(self._clock.awake_s())
        if waiting is None and self._deliveries is not None and self._deliveries.in_hand():
            waiting = "result files" if self._totals.final == self._totals.rows else None
        self._listen(Tick(now_ms, waiting))

    def _reload(self, now_s: float, now_ms: int, last: bool = False) -> None:
        """Now and then, and at the end, count again: other commands change rows beside a run."""
        if now_s - self._loaded_s < RECOUNT_S and not last:
            return
        version = self._ledger.data_version()
        if version == self._version and now_s - self._loaded_s < TOTALS_RELOAD_S and not last:
            return
        self._loaded_s, self._version = now_s, version
        if self._ledger.shared:
            # What another worker had when it was passed may be free again.
            self._after = 0
        fresh = self._ledger.totals()
        if fresh != self._totals:
            self._totals = fresh
            self._untold.append(Recounted(self._totals, self._active(), now_ms))

    def _deadline_passed(self) -> bool:
        limit = self._settings.deadline_s
        return limit is not None and self._clock.awake_s() - self._start_s >= limit

    def _closing(self, now_s: float) -> bool:
        """Say whether nothing new is begun any more, and remember since when."""
        everything = self._halt is not None and self._halt[0] is Halt.EVERYTHING
        ending = self._signal is not None or everything or self._deadline_passed()
        if ending and self._closing_s is None:
            self._closing_s = now_s
            if self._submits_flying():
                self._tell("stopping; waiting for the submits that are on their way")
        return self._closing_s is not None

    def _is_over(self) -> bool:
        now_s = self._clock.awake_s()
        if self._closing(now_s):
            assert self._closing_s is not None
            waited = now_s - self._closing_s >= SIGNAL_GRACE_S
            return waited or self._submits_flying() == 0
        return not self._flying and not self._is_work_left(now_s)

    def _is_given_up(self, job: Job, now_s: float) -> bool:
        """Say whether a job is past --job-deadline and was read in this run.

        Its row stays open, and is read on while the run has other work: the clip still
        renders and is paid for.
        """
        limit, seen = self._settings.job_deadline_s, self._see(job)
        return limit is not None and seen.was_read and now_s - seen.since_s >= limit

    def _is_work_left(self, now_s: float) -> bool:
        patient = self._settings.job_deadline_s is None and self._halt is None
        if patient and self._ledger.is_under_way():
            return True
        # Without --job-deadline no row is ever given up, so one open row answers.
        limit = 1 if self._settings.job_deadline_s is None else NO_LIMIT
        for status in OPEN:
            jobs = self._ledger.with_status(status, limit=limit)
            if any(not self._is_given_up(job, now_s) for job in jobs):
                return True
        if self._deliveries is not None and self._deliveries.is_left(self._now_ms()):
            return True
        if self._halt is not None:
            return False
        if self._ledger.with_status(Status.SENDING, limit=1):
            return True
        # What does not fit under the cap waits for what is open, and nothing is open.
        queued = next(self._sendable(1), None)
        return queued is not None and self._fits(queued)

    def _wait_s(self) -> float:
        """Return how long nothing can be due; an answer or a signal ends the wait sooner."""
        now_s = self._clock.awake_s()
        dues = [call.overdue_s for call in self._flying.values()]
        if self._settings.deadline_s is not None:
            dues.append(self._start_s + self._settings.deadline_s)
        if self._closing_s is not None:
            dues.append(self._closing_s + SIGNAL_GRACE_S)
        send_s = self._pacing.submit_at_s()
        dues += [send_s, *(max(send_s, at_s) for at_s in self._resting.values())]
        now_ms = self._now_ms()
        due_ms = self._ledger.next_due_ms(now_ms + self._horizon_ms())
        if due_ms is not None:
            due_s = now_s + (due_ms - now_ms) / 1000
            dues.append(max(self._pacing.read_at_s(), due_s))
        at_s = self._deliveries.due_s() if self._deliveries is not None else None
        dues += [at_s, self._pacing.read_at_s()] if at_s is not None else []
        # What was due when the turn was planned waits for an answer, not for a time.
        ahead = [due for due in dues if due > self._planned_s]
        return max(0.0, min(TICK_S, min(ahead, default=now_s + TICK_S) - now_s))


def _named_jobs(answers: Iterable[Answer]) -> Iterator[str]:
    """Yield the ids of the jobs that answers to submits name."""
    for answer in answers:
        if isinstance(answer.meaning, Outcome) and answer.meaning.job_id is not None:
            yield answer.meaning.job_id


def _with_ids(exc: LedgerError, answers: Sequence[Answer]) -> LedgerError:
    """Name the jobs that were accepted and could not be recorded: it is their only trace."""
    named = [
        f"row '{answer.call.job.row}' is job {answer.meaning.job_id}"
        for answer in answers
        if isinstance(answer.meaning, Outcome) and answer.meaning.job_id is not None
    ]
    if not named:
        return exc
    lost = "; ".join(named)
    return LedgerError(
        f"{exc}\naccepted, and not recorded: {lost}; the next run finds them by their keys"
    )


# --- display -----------------------------------------------------------------
# What a person sees of the engine's events. Opens nothing and decides nothing.

# In the order that a person looks: who needs them, what runs, what ended, what waits.
STYLES: Mapping[Status, str] = {
    Status.REVIEW: "bold yellow",
    Status.IN_PROGRESS: "blue",
    Status.PENDING: "cyan",
    Status.SENDING: "yellow",
    Status.REJECTED: "red",
    Status.FAILED: "red",
    Status.EXPIRED: "magenta",
    Status.CANCELLED: "magenta",
    Status.COMPLETED: "green",
    Status.QUEUED: "dim",
}
_ORDER = {status: place for place, status in enumerate(STYLES)}
# Rows that a table of a run remembers beside the ones that run.
RECENT_ROWS = 200
# Each column with the window width from which it is shown (the last column of a window
# stays empty); the rest always are.
_WIDE_COLUMNS = {
    "age": 48, "prompt": 59, "model": 89, "job id": 119, "seconds": 99, "file": 72, "trouble": 59,
}  # fmt: skip
# What is shown of these in the narrowest window is still whole.
_LEAST_WIDTHS = {"status": 11, "age": 4, "cost": 9, "model": 8, "job id": 12, "file": 8}
_MOST_WIDTHS = {"model": 20, "job id": 44}


def jobs_table(
    jobs: Sequence[Job], now_ms: int, width: int, files: Mapping[int, str] | None = None
) -> Table:
    """Return the table of attempts, with the columns that fit a window of this width.

    `files` says how far the downloads of attempts are, by their ids; None shows no such column.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, expand=width >= 59, pad_edge=False)
    shown = [name for name in (*_CELLS, "file") if width >= _WIDE_COLUMNS.get(name, 0)]
    if not any(job.note or job.trouble for job in jobs):
        shown = [name for name in shown if name != "trouble"]
    if files is None:
        shown = [name for name in shown if name != "file"]
    cell_of = _CELLS | {"file": lambda job, now: (files or {}).get(job.id, "")}
    # The row gives way first: status and cost need 29 columns beside it, and the age 7 more.
    row_width = max(4, min(24, width - (36 if "age" in shown else 29)))
    for name in shown:
        right = name in ("seconds", "age", "cost", "file")
        ratio = {"prompt": 3, "trouble": 4}.get(name)
        table.add_column(
            name,
            justify="right" if right else "left",
            ratio=ratio,
            no_wrap=True,
            overflow="ellipsis",
            min_width=_LEAST_WIDTHS.get(name),
            max_width=row_width if name == "row" else _MOST_WIDTHS.get(name),
        )
    for job in jobs:
        style = STYLES[job.status]
        cells = [cell_of[name](job, now_ms) for name in shown]
        table.add_row(
            *(
                Text(inert(c), style if n == "status" else "")
                for n, c in zip(shown, cells, strict=True)
            )
        )
    return table


def _age(job: Job, now_ms: int) -> str:
    """Return how long Sume had it so far, or took for it."""
    start = job.accepted_at or job.first_sent_at
    return show_time(((job.finished_at or now_ms) - start) / 1000) if start else ""


def _trouble(job: Job) -> str:
    """Return why it ended so, or the last trouble and how many reads went wrong."""
    if job.note or not job.trouble or job.status not in OPEN:
        return job.note or job.trouble or ""
    return f"{job.trouble} ({counted(job.poll_errors, 'bad read')})"


def _money(job: Job, now_ms: int) -> str:
    if job.cost_micros is None:
        ended = job.status in FINAL or job.status is Status.REVIEW
        return "unknown" if job.cost_unknown and ended else ""
    return f"${show_usd(job.cost_micros)}"


def show_bytes(size: int) -> str:
    """Return a short text for a number of bytes: 512 B, 3.4 kB, 12.0 MB."""
    if size < 1000:
        return f"{size} B"
    thousands = size / 1000
    for unit in ("kB", "MB"):
        if thousands < 1000:
            return f"{thousands:.1f} {unit}"
        thousands /= 1000
    return f"{thousands:.1f} GB"


def near(path: str) -> str:
    """Return a path as it is called from here, where it lies below."""
    try:
        return path.removeprefix(os.path.join(os.getcwd(), ""))
    except OSError:
        # The folder is gone.
        return path


def _progress(event: Downloading) -> str:
    """Return how far a download is."""
    if event.total:
        return f"{100 * event.received // event.total} %"
    return show_bytes(event.received)


_CELLS: dict[str, Callable[[Job, int], str]] = {
    "row": lambda job, now: job.row,
    "prompt": lambda job, now: inert(job.prompt, 60),
    "job id": lambda job, now: job.job_id or "",
    "model": lambda job, now: job.model,
    "seconds": lambda job, now: str(job.duration_s or ""),
    "status": lambda job, now: job.status,
    "age": _age,
    "cost": _money,
    "trouble": lambda job, now: _trouble(job),
}


def plain_table(jobs: Sequence[Job], now_ms: int) -> Iterator[str]:
    """Yield the lines of a table for a pipe: nothing is cut, so that it can be searched."""
    rows = [list(_CELLS), *([inert(show(job, now_ms)) for show in _CELLS.values()] for job in jobs)]
    yield from aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _totals_parts(totals: Totals) -> Iterator[tuple[str, str]]:
    for status in _ORDER:
        if totals.by_status[status]:
            yield f"{totals.by_status[status]} {status}", STYLES[status]
    spent, unknown = spent_usd(totals), totals.cost_unknown_rows
    money = [f"${spent}"] if spent is not None else []
    money += [f"{unknown} of unknown cost"] if unknown or spent is None else []
    yield f"spent{'' if spent else ':'} {' + '.join(money)}", "yellow" if unknown else ""


def totals_text(totals: Totals) -> str:
    """Return the counts by status and what was spent, on one line."""
    return "  ".join(text for text, _ in _totals_parts(totals))


def totals_line(totals: Totals) -> Text:
    """Return the same in colour."""
    from rich.text import Text

    return Text("  ").join(Text(text, style) for text, style in _totals_parts(totals))


def _shown_first(job: Job) -> tuple[int, int]:
    return _ORDER[job.status], job.id


class RunView:
    """Follows a run's events: the rows worth showing, and how fast it goes."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.open: dict[int, Job] = {}
        # By row: each is shown once, by its latest attempt. What ended last is the last.
        self.recent: dict[str, Job] = {}
        self.start_ms = self.now_ms = 0
        self.finished = 0
        self.waiting: str | None = None
        # Rows whose files are on their way, and what their cells say; files and bytes so far.
        self.loading: dict[int, Job] = {}
        self.received: dict[int, int] = {}
        self.files: dict[int, str] = {}
        self.file_count = self.file_bytes = 0

    def follow(self, event: Event) -> None:
        match event:
            case Started() | Recounted():
                self.totals, self.now_ms = event.totals, event.at_ms
                self.start_ms = self.start_ms or event.at_ms
                self.open = {job.id: job for job in event.open_jobs}
            case Changed(before=before, after=after):
                self.now_ms = event.at_ms
                self.open.pop(after.id, None)
                self.recent.pop(after.row, None)
                if after.status in OPEN or after.status is Status.SENDING:
                    self.open[after.id] = after
                elif after.status is not Status.QUEUED:
                    self.recent[after.row] = after
                    if len(self.recent) > RECENT_ROWS:
                        del self.recent[next(iter(self.recent))]
                self.finished += after.status in FINAL and before.status not in FINAL
                if self.loading.pop(after.id, None) and after.trouble:
                    self.files[after.id] = "none"
            case Downloading(job=job):
                self.now_ms = event.at_ms
                self.loading[job.id] = job
                self.received[job.id] = event.received
                self.files[job.id] = _progress(event) if event.received else "waiting"
            case Downloaded(job=job, output=output):
                self.loading.pop(job.id, None)
                self.files[job.id] = show_bytes(output.bytes or 0)
                self.file_count += 1
                self.file_bytes += output.bytes or 0
            case Tick():
                self.now_ms, self.waiting = event.at_ms, event.waiting

    def rows(self, height: int) -> list[Job]:
        """Return what to show in so many lines: what runs on top, then what ended last."""
        running = heapq.nsmallest(max(height, 0), self.open.values(), key=_shown_first)
        last = reversed(self.recent.values())
        ended = (job for job in last if job.id not in self.loading)
        return [*running, *self.loading.values(), *ended][: max(height, 0)]

    def downloads(self) -> str:
        """Return how many files came, and how many are on their way."""
        came = sum(self.received[id] for id in self.loading)
        loading = (
            f", {len(self.loading)} on the way with {show_bytes(came)}" if self.loading else ""
        )
        files = counted(self.file_count, "file")
        return f"{files} downloaded, {show_bytes(self.file_bytes)}{loading}"

    def pace(self) -> str:
        """Return how many rows a minute end, and how long the rest takes at that pace."""
        minutes = (self.now_ms - self.start_ms) / 60_000
        if not self.finished or minutes <= 0:
            return ""
        rate = self.finished / minutes
        left = self.totals.rows - self.totals.final - self.totals.by_status[Status.REVIEW]
        rest = f", about {show_time(left / rate * 60)} left" if left else ""
        return f"{rate:.1f} rows/min{rest}"


def make_console(**options: Any) -> Console:
    """Return a console that falls silent when its reader is gone: no run ends for that."""
    from rich.console import Console

    class Patient(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True

    return Patient(highlight=False, **options)


class LiveTable:
    """The live table of a run, for a terminal."""

    def __init__(
        self, console: Console, complete: Callable[[str], str] = lambda text: text
    ) -> None:
        """`complete` makes the commands in a notice ones that can be copied."""
        from rich.live import Live

        self._console, self._view, self._complete = console, RunView(), complete
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        # The steady time from which it may be drawn anew.
        self._draw_at_s = 0.0

    @property
    def height(self) -> int:
        """The lines of the window."""
        return self._console.height

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        # A closed terminal can no longer be drawn to; the ledger does not need it.
        with contextlib.suppress(OSError):
            self._live.update(self.render(), refresh=True)
            self._live.stop()

    def __call__(self, event: Event) -> None:
        self._view.follow(event)
        if isinstance(event, Notice):
            from rich.text import Text

            with contextlib.suppress(OSError):
                words = inert(self._complete(event.words()), 1000)
                self._live.console.print(Text(words, "yellow"))
        now_s = time.monotonic()
        if now_s >= self._draw_at_s:
            with contextlib.suppress(OSError):
                self._live.update(self.render(), refresh=True)
            done_s = time.monotonic()
            pause_s = min((done_s - now_s) / DRAW_SHARE, REDRAW_MOST_S)
            self._draw_at_s = done_s + max(REDRAW_S, pause_s)

    def render(self) -> RenderableType:
        """Return progress, counts, spent and pace, and as many rows as the window has room for."""
        from rich.console import Group
        from rich.constrain import Constrain
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        view, (width, height) = self._view, self._console.size
        totals = view.totals
        bar = ProgressBar(total=max(totals.rows, 1), completed=totals.final, width=width // 3)
        head = Text(f"{totals.final} of {totals.rows} rows final  {view.pace()}".rstrip())
        grid = Table.grid(padding=(0, 1))
        grid.add_row(bar, head)
        parts: list[RenderableType] = [grid if width >= 60 else head, totals_line(totals)]
        if view.files:
            parts.append(Text(view.downloads()))
        if view.waiting:
            parts.append(Text(f"waiting: {view.waiting}", "yellow"))
        # The last column stays empty: some terminals wrap a full line.
        # The table has four lines beside its rows; one more stays empty for the cursor,
        # since a terminal writes ^C where it stands. In a narrow window lines wrap.
        options = self._console.options.update(width=max(width - 1, 1))
        above = self._console.render_lines(Group(*parts), options, pad=False)
        room = height - len(above) - 7
        rows = view.rows(room)
        files = view.files or None
        table = jobs_table(rows, view.now_ms, width - 1, files) if rows else Text("")
        hidden = totals.rows - len(rows)
        more = Text(f"and {hidden} more rows" if rows and hidden > 0 else "", "dim")
        return Constrain(Group(*parts, table, more, Text("")), width - 1)


class PlainLog:
    """One line per change, and a heartbeat: for pipes, CI and dumb terminals."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._view = write, RunView()
        self._spoke_s = time.monotonic()

    def __enter__(self) -> PlainLog:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def __call__(self, event: Event) -> None:
        self._view.follow(event)
        match event:
            case Notice():
                self._say(event.words())
            case Changed(before=before, after=after):
                if after.status is not before.status:
                    self._say(self._line(after))
                elif after.trouble != before.trouble and after.status in FINAL:
                    # Of a row that has ended only its files can be in trouble.
                    self._say(f"{after.row}: {after.trouble}" if after.trouble else "")
                elif after.trouble != before.trouble:
                    self._say(self._line(after))
            case Downloaded(job=job, output=output):
                self._say(f"{job.row}: {near(output.path or '')}  {show_bytes(output.bytes or 0)}")
            case Tick():
                if time.monotonic() - self._spoke_s >= HEARTBEAT_S:
                    waiting = f"; waiting: {event.waiting}" if event.waiting else ""
                    self._say(f"{totals_text(self._view.totals)}{waiting}")

    def _line(self, job: Job) -> str:
        parts = [f"{job.row}: {job.status}"]
        parts += [job.job_id] if job.job_id else []
        parts += [_money(job, 0)] if job.status in FINAL and _money(job, 0) else []
        # A notice says why a row is in review.
        why = "" if job.status is Status.REVIEW else _trouble(job)
        return "  ".join([*parts, *([f"({why})"] if why else [])])

    def _say(self, text: str) -> None:
        if not text:
            return
        self._spoke_s = time.monotonic()
        at_s = (self._view.now_ms or 0) / 1000
        stamp = time.strftime("%H:%M:%S", time.localtime(at_s)) if at_s else "--:--:--"
        self._write(f"{stamp} {inert(text, 1000)}")


# What each recorded fact means to a person.
EVENT_WORDS: Mapping[str, str] = {
    "added": "added to the ledger",
    "replaced": "got other content, before it was bought",
    "retried": "a person wants a new attempt",
    "resent": "a person wants a new attempt, though this one may have been bought",
    "dropped": "ended by a person",
    "found": "a person named its job",
    "cancel_asked": "Sume was asked to cancel it",
    "prepared": "key and body stored, about to be sent",
    "estimates": "its price was estimated, in dollars",
    "unclaimed": "not sent after all: the run was stopped",
    "returned": "did not arrive, or was turned away; queued again",
    "unanswered": "no usable answer; the same key will ask again",
    "accepted": "accepted by Sume",
    "late_id": "a late answer named a job",
    "rejected": "refused for what it asks",
    "review": "needs a person",
    "status": "read",
    "final": "ended",
    "cost": "its cost was read afresh",
    "named": "Sume names its result files by now",
    "downloaded": "a result file is on the disk, whole",
    "lost": "a result file was not there any more, or was changed",
    "undownloaded": "a result file could not be had",
    "poll_error": "a read brought nothing usable",
}


class Story(NamedTuple):
    """All that the ledger knows of a row: its attempts, and what the named one brought."""

    job: Job
    outputs: Sequence[Output]
    # Each attempt's history, the first attempt first.
    attempts: Sequence[tuple[Job, Sequence[Recorded]]]


def job_card(story: Story, complete: Callable[[str], str]) -> Iterator[str]:
    """Yield the lines that tell all about an attempt, and the history of all its row's.

    `complete` makes the commands in the note ones that can be copied.
    """
    job = story.job
    facts = {
        "row": job.row,
        "status": job.status + (f" (Sume says: {job.sume_status})" if job.sume_status else ""),
        "note": complete(job.note or job.trouble or ""),
        "job id": job.job_id,
        "key": f"{job.key} (attempt {job.attempt}; sends: {job.tries})",
        "kind": job.kind,
        "model": job.model,
        "seconds": job.duration_s,
        "cost": _money(job, 0) + (f" ({job.cost_state})" if job.cost_state else ""),
        "prompt": job.prompt,
        "from": job.source,
    }
    for name, value in facts.items():
        if value:
            yield f"{name:8} {inert(value, 2000)}"
    for output in story.outputs:
        yield f"{'result':8} {inert(output.url, 2000)}"
        if output.path is not None:
            size = f"{show_bytes(output.bytes or 0)}, sha256 {output.sha256}"
            yield f"{'file':8} {inert(near(output.path), 2000)} ({size})"
    for attempt, history in story.attempts:
        yield ""
        if len(story.attempts) > 1:
            yield inert(_attempt_words(attempt), 2000)
        for fact in history:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fact.at / 1000))
            detail = f": {fact.detail}" if fact.detail else ""
            yield f"{at}  {EVENT_WORDS[fact.event]}{inert(detail, 2000)}"


def _attempt_words(job: Job) -> str:
    cost = _money(job, 0) and f"cost {_money(job, 0)}"
    parts = [f"attempt {job.attempt}: {job.status}", job.job_id, cost]
    return "  ".join(part for part in parts if part)


# What programs read of all this: `status --format` and the events of --json.


def status_json(jobs: Iterable[tuple[Job, Sequence[Output]]], totals: Totals) -> dict[str, Any]:
    """Return what `status --format json` prints."""
    return {
        "totals": totals_json(totals),
        "jobs": [job_json(job, outputs) for job, outputs in jobs],
    }


def totals_json(totals: Totals) -> dict[str, Any]:
    """Return the counts by status and what was spent; null where nobody has said it."""
    return {
        "rows": totals.rows,
        "by_status": {status: totals.by_status[status] for status in Status},
        "cost_usd": spent_usd(totals),
        "cost_unknown_rows": totals.cost_unknown_rows,
    }


# What programs read of an attempt, by name.
_FACTS: Mapping[str, Callable[[Job], Any]] = {
    "row": lambda job: job.row,
    "key": lambda job: job.key,
    "job_id": lambda job: job.job_id,
    "kind": lambda job: job.kind,
    "model": lambda job: job.model,
    "duration": lambda job: job.duration_s,
    "prompt": lambda job: job.prompt,
    "status": lambda job: job.status,
    "sume_status": lambda job: job.sume_status,
    "cost_usd": lambda job: show_usd(job.cost_micros),
    "attempt": lambda job: job.attempt,
    "note": lambda job: job.note or job.trouble,
}
CSV_COLUMNS = (*_FACTS, "urls", "files")
_EVENT_FACTS = ("row", "attempt", "status", "job_id", "cost_usd", "note")


def job_json(job: Job, outputs: Sequence[Output]) -> dict[str, Any]:
    """Return all that `status` prints of a row."""
    facts = {name: read(job) for name, read in _FACTS.items()}
    return facts | {"outputs": [output.facts() for output in outputs]}


def csv_cells(job: Job, outputs: Sequence[Output]) -> list[str]:
    """Return the cells of `status --format csv`: a line each, so that it can be searched."""
    paths = [out.path for out in outputs if out.path is not None]
    facts = job_json(job, outputs) | {"urls": " ".join(out.url for out in outputs)}
    facts["files"] = " ".join(paths)
    cells = [facts[name] for name in CSV_COLUMNS]
    return ["" if cell is None else inert(cell, sys.maxsize) for cell in cells]


def attempts_json(story: Story) -> list[dict[str, Any]]:
    """Return all attempts of a row with their histories, the first one first."""
    return [
        job_facts(attempt)
        | {
            "key": attempt.key,
            "history": [
                {"at_ms": at, "event": event, "before": before, "after": after, "detail": detail}
                for _, at, _, event, before, after, detail in history
            ],
        }
        for attempt, history in story.attempts
    ]


def job_facts(job: Job) -> dict[str, Any]:
    """Return what an event says of an attempt."""
    return {name: _FACTS[name](job) for name in _EVENT_FACTS} | {"at_ms": job.updated_at}


class JsonLog:
    """Tells a run's events to a program; `tell` takes a type and its facts."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell, self._totals = tell, Totals()
        self._spoke_s = time.monotonic()

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._totals = event.totals
                self._say("started", at_ms=event.at_ms, totals=totals_json(event.totals))
            case Recounted():
                self._totals = event.totals
            case Changed(before=before, after=after):
                facts = job_facts(after)
                if job_facts(before) | {"at_ms": after.updated_at} != facts:
                    self._say("row", before=before.status, **facts)
            case Notice():
                self._say("notice", row=event.row, text=inert(event.text, 1000))
            case Downloaded(job=job, output=output):
                facts = {"row": job.row, "attempt": job.attempt, "at_ms": event.at_ms}
                self._say("file", **facts, **output.facts())
            case Downloading():
                pass
            case Tick():
                if time.monotonic() - self._spoke_s >= HEARTBEAT_S:
                    totals, waiting = totals_json(self._totals), event.waiting
                    self._say("progress", at_ms=event.at_ms, waiting=waiting, totals=totals)
            case _:
                assert_never(event)

    def _say(self, type: str, **facts: object) -> None:
        self._spoke_s = time.monotonic()
        self._tell(type, **facts)


# A plan names so many rows; --json names them all.
PLAN_ROWS = 20


class Group(NamedTuple):
    """Rows of one model and kind: how many, their seconds, and what is expected of them."""

    rows: int = 0
    seconds: int = 0
    micros: int = 0
    unpriced: int = 0


def estimate_lines(rows: Iterable[NewRow], prices: Prices | None) -> Iterator[str]:
    """Yield a line per model, and with a price list the estimate of all.

    Rows without a known price are named as such, and never counted as 0.
    """
    groups: dict[tuple[str, Kind], Group] = {}
    for row in rows:
        group = groups.get((row.model, row.kind), Group())
        micros = prices.estimate(row.kind, row.model, row.body) if prices else None
        groups[row.model, row.kind] = Group(
            group.rows + 1,
            group.seconds + (row.duration_s or 0),
            group.micros + (micros or 0),
            group.unpriced + (micros is None),
        )
    for (model, kind), group in islice(groups.items(), PLAN_ROWS):
        parts = [counted(group.rows, kind)]
        parts += [f"{group.seconds} s"] if group.seconds else []
        yield f"  {inert(model)}  {', '.join([*parts, *_expected_cost(group, prices)])}"
    if len(groups) > PLAN_ROWS:
        yield f"  … and {len(groups) - PLAN_ROWS} more models"
    if prices:
        columns = list(zip(*groups.values(), strict=True))
        whole = Group(*map(sum, columns)) if columns else Group()
        yield f"to send: {', '.join([counted(whole.rows, 'row'), *_expected_cost(whole, prices)])}"


def _expected_cost(group: Group, prices: Prices | None) -> list[str]:
    if prices is None:
        return []
    known = [f"estimate ${show_usd(group.micros)}"] if group.rows > group.unpriced else []
    unknown = [f"without a known price: {group.unpriced}"] if group.unpriced else []
    return [*known, *unknown]


def cap_line(estimates: Sequence[int | None], cap_micros: int, spent_micros: int) -> str:
    """Say how far a cap reaches: rows are sent in order, and the first too dear one stops them."""
    known = [micros for micros in estimates if micros is not None]
    left, fit = cap_micros - spent_micros, 0
    for micros in known:
        if micros > left:
            break
        left, fit = left - micros, fit + 1
    words = f"--max-cost ${show_usd(cap_micros)}: ${show_usd(spent_micros)} is spent or reserved"
    words += f", room for {fit} of {counted(len(estimates), 'row')}"
    if fit < len(known):
        words += (
            f"; for all with a price it would have to be ${show_usd(spent_micros + sum(known))}"
        )
    return words


def plan_lines(
    send: Sequence[NewRow],
    replay: Sequence[Job],
    review: Sequence[Job],
    outside: Sequence[str],
    prices: Prices | None,
) -> Iterator[str]:
    """Yield what a run would do: a line per model, then the first rows."""
    yield f"would send {counted(len(send), 'row')}; nothing was sent or written"
    yield from estimate_lines(send, prices)
    for row in send[:PLAN_ROWS]:
        yield f"{row.row}: {inert(row.prompt, 60)}"
    if len(send) > PLAN_ROWS:
        yield f"… and {len(send) - PLAN_ROWS} more (--json names all)"
    for job in replay[:PLAN_ROWS]:
        yield f"{job.row}: would be sent again under its old key, which buys nothing twice"
    for job in review[:PLAN_ROWS]:
        yield f"{job.row}: may have been bought, and would need review: its key is too old"
    if outside:
        yield f"would not be sent, because they are not in the file: {len(outside)}"


class Audited(NamedTuple):
    """An attempt beside its price; a flag says what is wrong with its cost."""

    job: Job
    expected_micros: int | None
    flag: str


def audited(job: Job, prices: Prices | None, tolerance_percent: float) -> Audited:
    """Compare what an attempt cost with the price list, or with the estimate it was sent under."""
    expected = prices.estimate(job.kind, job.model, job.body) if prices else None
    expected = job.estimate_micros if expected is None else expected
    billed, flag = job.cost_micros, ""
    if billed is None:
        flag = "ended, and its cost is not known" if job.status is Status.COMPLETED else ""
    elif expected is not None and job.status is Status.COMPLETED:
        if abs(billed - expected) > expected * tolerance_percent / 100:
            flag = f"billed ${show_usd(billed)}, expected ${show_usd(expected)}"
    elif billed and job.status is not Status.COMPLETED and job.status in FINAL:
        flag = f"billed ${show_usd(billed)}, though it is {job.status}"
    return Audited(job, expected, flag)


def audited_json(one: Audited) -> dict[str, Any]:
    """Return what an event says of an audited attempt."""
    job = one.job
    return {
        "row": job.row,
        "attempt": job.attempt,
        "status": job.status,
        "job_id": job.job_id,
        "model": job.model,
        "expected_usd": show_usd(one.expected_micros),
        "billed_usd": show_usd(job.cost_micros),
        "flag": one.flag or None,
    }


def audit_lines(found: Sequence[Audited]) -> Iterator[str]:
    """Yield a table: each attempt, then the sums by model and status."""
    cells = [("row", "attempt", "model", "status", "expected", "billed", "flag")]
    sums: dict[tuple[str, Status], list[Audited]] = {}
    for one in found:
        job = one.job
        sums.setdefault((job.model, job.status), []).append(one)
        money = (_dollars(one.expected_micros), _dollars(job.cost_micros))
        flag = "!" if one.flag else ""
        cells.append((job.row, str(job.attempt), job.model, job.status, *money, flag))
    for line in aligned(cells):
        yield inert(line, 2000)
    yield ""
    for (model, status), group in sums.items():
        billed = [one.job.cost_micros for one in group if one.job.cost_micros is not None]
        unknown = len(group) - len(billed)
        rest = f" + {unknown} of unknown cost" if unknown else ""
        yield inert(f"{model}  {status}: {len(group)}  ${show_usd(sum(billed))}{rest}", 2000)


def _dollars(micros: int | None) -> str:
    return "unknown" if micros is None else f"${show_usd(micros)}"


# --- stand-in ----------------------------------------------------------------
# A small Sume on loopback: real sockets, keys remembered, jobs that take seconds, costs
# from a price table. It needs no API key and spends nothing.

STAND_IN_KEY = "no-key-is-needed-here"
STAND_IN_VIDEO_MICROS_PER_S = 50_000
STAND_IN_IMAGE_MICROS = 20_000
# Jobs that it works on at once; one more is answered with queue_full.
STAND_IN_CAPACITY = 6
STAND_IN_QUEUE_S = 1.0
STAND_IN_HINT_S = 1
# A longer clip is refused, so that a rejected row can be tried too.
STAND_IN_MAX_SECONDS = 60
# A job takes so long, and up to so much longer.
STAND_IN_LEAST_MS = 2000
STAND_IN_SPREAD_MS = 4000
# A held answer is held so long.
STAND_IN_HOLD_S = 0.3
STAND_IN_RETRY_AFTER_S = 1
# What was on its way when a rate limit was answered arrives so soon after.
STAND_IN_FLIGHT_S = 0.3
# Its links are signed, as others are; what a signature is must be kept nowhere.
STAND_IN_SIGNATURE = "signature-that-must-be-nowhere"


class Fault(enum.StrEnum):
    """What a row can ask of the stand-in by its field `stand_in`; each is played once a row."""

    # The job is made, and the connection cut in place of the answer.
    LOST = "lost answer"
    # The connection is cut, and nothing is made.
    RESET = "reset"
    # The job is made, and the answer comes late.
    HELD = "held answer"
    # The job is made, and a proxy's error page is the answer.
    PAGE = "error page"
    RATE = "rate limit"
    QUEUE = "queue full"
    # The first read is answered with an error page.
    READ = "bad read"
    # The first link to the file is answered as one that has expired.
    LINK = "expired link"
    # The key stands for something else, however often it is asked.
    CONFLICT = "conflict"


class StandInReply(NamedTuple):
    """An answer: JSON, a page where `data` is text, or a file; without a code it is cut off."""

    code: int | None
    data: Any = None
    headers: Mapping[str, str] = MappingProxyType({})


# Who asks it, before it is known where it listens.
STAND_IN_ACCOUNT = Account("", STAND_IN, STAND_IN_KEY)

STAND_IN_SCHEMA = (
    """
    CREATE TABLE IF NOT EXISTS jobs (
        id TEXT PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,
        kind TEXT NOT NULL,
        body_sha256 TEXT NOT NULL,
        cost_micros INTEGER NOT NULL,
        accepted_ms INTEGER NOT NULL,
        ends_ms INTEGER NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS charges (
        id INTEGER PRIMARY KEY,
        job TEXT NOT NULL,
        cost_micros INTEGER NOT NULL,
        at_ms INTEGER NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS cancels (
        job TEXT PRIMARY KEY,
        at_ms INTEGER NOT NULL
    )
    """,
)
STAND_IN_FIND = "SELECT id, body_sha256 FROM jobs WHERE key = :key"
STAND_IN_JOB = """
    SELECT kind, cost_micros, accepted_ms, ends_ms, at_ms
    FROM jobs
    LEFT JOIN cancels ON job = id
    WHERE id = :id
"""
STAND_IN_JOBS = "SELECT id, body_sha256 FROM jobs"
STAND_IN_AMOUNTS = "SELECT cost_micros FROM charges"
STAND_IN_RUNNING = "SELECT count(*) FROM jobs WHERE ends_ms > :now"
STAND_IN_ADD = """
    INSERT INTO jobs (id, key, kind, body_sha256, cost_micros, accepted_ms, ends_ms)
    VALUES (:id, :key, :kind, :sha256, :cost, :now, :ends)
"""
STAND_IN_CHARGE = "INSERT INTO charges (job, cost_micros, at_ms) VALUES (:id, :cost, :now)"
STAND_IN_CANCEL = "INSERT INTO cancels (job, at_ms) VALUES (:id, :now)"
STAND_IN_END = "UPDATE jobs SET ends_ms = :now WHERE id = :id"


class StandIn:
    """Serves a stand-in for Sume on a loopback port while it is open.

    Its state is a SQLite file of its own, so what it accepted survives the death of the
    process, as it does at the real service. It never forgets a key.
    """

    def __init__(
        self,
        state: Path,
        quick: bool = False,
        watch: Callable[[str], None] = lambda key: None,
        hold: Callable[[], None] = lambda: time.sleep(STAND_IN_HOLD_S),
    ) -> None:
        """With `quick` a job ends when it is read for the second time.

        `watch` is told the key of each submit, `hold` keeps a held answer back while it runs.

        Raises LedgerError when its state file cannot be used.
        """
        self._quick, self._watch, self._hold = quick, watch, hold
        self._lock = threading.Lock()
        # Faults that were played, and those that jobs ask for when they are read.
        self._played: set[str] = set()
        self._unread: set[str] = set()
        self._unlinked: set[str] = set()
        # The key of each submit, and keys that had another body before.
        self.posts: list[str] = []
        self.mismatches: set[str] = set()
        # Submits that came before the time that a rate limit had named.
        self.hasty: list[str] = []
        self._limited, self._limited_s = "", float("-inf")
        # How often a quick job was read: it ends at the second time, whatever the clock says.
        self._reads: Counter[str] = Counter()
        try:
            self._db = sqlite3.connect(state, isolation_level=None, check_same_thread=False)
            for statement in STAND_IN_SCHEMA:
                self._db.execute(statement)
        except sqlite3.Error as exc:
            raise LedgerError(f"{state}: the stand-in cannot keep its jobs there: {exc}") from exc
        self._server = _stand_in_server(self)

    def __enter__(self) -> Account:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        port = self._server.server_address[1]
        return Account(f"http://127.0.0.1:{port}/v1", STAND_IN, STAND_IN_KEY)

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            self._db.close()

    def books(self) -> tuple[list[int], list[str], int]:
        """Return all amounts that were charged, all jobs, and how many are there twice."""
        with self._lock:
            amounts = [amount for (amount,) in self._db.execute(STAND_IN_AMOUNTS)]
            jobs = self._db.execute(STAND_IN_JOBS).fetchall()
        bought = sum(amount > 0 for amount in amounts)
        bodies = {body for _, body in jobs}
        return amounts, [id for id, _ in jobs], bought - len(bodies)

    def answer(self, method: str, path: str, key: str, body: bytes) -> StandInReply:
        """Return the answer to a request; one at a time, like its database."""
        now = time.time_ns() // 1_000_000
        submit = method == "POST" and path in ("/v1/videos", "/v1/images")
        if submit:
            self._watch(key)
        with self._lock:
            if submit:
                return self._submit("image" if path == "/v1/images" else "video", key, body, now)
            if file := re.fullmatch(r"/artifacts/(job_\w+)\.(mp4|png)", path.partition("?")[0]):
                return self._file(file[1], file[2])
            if path.partition("?")[0] == "/v1/jobs":
                return StandInReply(200, {"data": [{"id": id} for id in self._newest()]})
            match = re.fullmatch(r"/v1/(?:videos|jobs)/(job_\w+)(/status|/result|/cancel)?", path)
            line = match and self._db.execute(STAND_IN_JOB, {"id": match[1]}).fetchone()
            if not match or not line:
                return _stand_in_error(404, "not_found", "no such job")
            if method == "POST" and match[2] == "/cancel":
                return self._cancel(match[1], line, now)
            if match[1] in self._unread:
                self._unread.discard(match[1])
                return StandInReply(502, "<html>bad gateway</html>")
            return self._job(match[1], match[2] == "/result", line, now)

    def _file(self, id: str, ending: str) -> StandInReply:
        if id in self._unlinked:
            self._unlinked.discard(id)
            return _stand_in_error(403, "link_expired", "the link has expired")
        type = "video/mp4" if ending == "mp4" else "image/png"
        return StandInReply(200, stand_in_file(id, ending), {"Content-Type": type})

    def _newest(self) -> list[str]:
        return [id for id, _ in self._db.execute(STAND_IN_JOBS).fetchall()[-100:]]

    def _submit(self, kind: Kind, key: str, body: bytes, now: int) -> StandInReply:
        self.posts.append(key)
        since_s = time.monotonic() - self._limited_s
        again = key == self._limited or since_s > STAND_IN_FLIGHT_S
        if again and since_s < STAND_IN_RETRY_AFTER_S:
            self.hasty.append(f"a POST came {since_s:.1f} s after a Retry-After of 1 s")
        sha256, row = hashlib.sha256(body).hexdigest(), json.loads(body)
        there = self._db.execute(STAND_IN_FIND, {"key": key}).fetchone()
        running = self._db.execute(STAND_IN_RUNNING, {"now": now}).fetchone()[0]
        fault = None if key in self._played else row.get("stand_in")
        self._played.add(key)
        if there is not None and there[1] != sha256:
            self.mismatches.add(key)
        if row.get("stand_in") == Fault.CONFLICT or key in self.mismatches:
            return _stand_in_error(409, "idempotency_key_reused", "another body has this key")
        if fault == Fault.QUEUE or (there is None and running >= STAND_IN_CAPACITY):
            return _stand_in_error(429, "queue_full", f"{running} jobs are running")
        if fault == Fault.RATE:
            reply = _stand_in_error(429, "rate_limit_exceeded", "slower")
            self._limited, self._limited_s = key, time.monotonic()
            return reply._replace(headers={"Retry-After": str(STAND_IN_RETRY_AFTER_S)})
        if fault == Fault.RESET:
            return StandInReply(None)
        if (row.get("duration") or 0) > STAND_IN_MAX_SECONDS:
            limit = f"duration: at most {STAND_IN_MAX_SECONDS} seconds"
            return _stand_in_error(422, "invalid_request", limit)
        id = there[0] if there else stand_in_job_id(key)
        if there is None:
            self._accept(id, kind, key, body, sha256, now)
            running += 1
        if fault == Fault.READ:
            self._unread.add(id)
        if fault == Fault.LINK:
            self._unlinked.add(id)
        if fault == Fault.HELD:
            self._hold()
        if fault in (Fault.LOST, Fault.PAGE):
            return StandInReply(502 if fault == Fault.PAGE else None, "<html>bad gateway</html>")
        answer = {
            "data": {"job": {"id": id, "status": "QUEUED"}, "idempotency_hit": bool(there)},
            "generation_limits": {"queue_capacity_remaining": STAND_IN_CAPACITY - running},
        }
        return StandInReply(202, answer)

    def _accept(self, id: str, kind: Kind, key: str, body: bytes, sha256: str, now: int) -> None:
        asked = json.loads(body).get("duration")
        seconds = asked if isinstance(asked, int) else 5
        video = kind == "video"
        cost = seconds * STAND_IN_VIDEO_MICROS_PER_S if video else STAND_IN_IMAGE_MICROS
        # Told by the body: the same run looks the same again.
        takes_ms = STAND_IN_LEAST_MS + int(sha256[:4], 16) % STAND_IN_SPREAD_MS
        takes_ms = 0 if self._quick else takes_ms
        facts = {"id": id, "key": key, "kind": kind, "sha256": sha256, "cost": cost, "now": now}
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(STAND_IN_ADD, facts | {"ends": now + takes_ms})
            self._db.execute(STAND_IN_CHARGE, {"id": id, "cost": cost, "now": now})

    def _cancel(self, id: str, line: Any, now: int) -> StandInReply:
        """Cancel a job that still waits, and give its price back; later ones are refused."""
        _, cost, accepted, ends, cancelled = line
        if cancelled is not None or now >= ends:
            return _stand_in_error(409, "job_not_cancelable", "it has ended")
        if now >= accepted + STAND_IN_QUEUE_S * 1000:
            return _stand_in_error(409, "job_generation_already_started", "it is being made")
        facts = {"id": id, "cost": -cost, "now": now}
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for statement in (STAND_IN_CANCEL, STAND_IN_END, STAND_IN_CHARGE):
                self._db.execute(statement, facts)
        done = {"data": {"job_id": id, "status": "CANCELED", "canceled": True}}
        return StandInReply(200, done)

    def _job(self, id: str, result: bool, line: Any, now: int) -> StandInReply:
        kind, cost, accepted, ends, cancelled = line
        if cancelled is not None:
            usage = {"captured_usd_micros": cost, "refunded_usd_micros": cost, "status": "refunded"}
            return StandInReply(200, {"id": id, "status": "cancelled", "usage": usage})
        self._reads[id] += not result
        if now < ends or (self._quick and self._reads[id] < 2):
            if result:
                return _stand_in_error(409, "job_not_completed", "it is still running")
            queued = not self._quick and now < accepted + STAND_IN_QUEUE_S * 1000
            hint = {} if self._quick else {"next_poll_after_seconds": STAND_IN_HINT_S}
            status = "pending" if queued else "in_progress"
            return StandInReply(200, {"id": id, "status": status, **hint})
        name = f"{id}.mp4" if kind == "video" else f"{id}.png"
        # Without an origin: where the stand-in listens is another place each time.
        url = f"/artifacts/{name}?signature={STAND_IN_SIGNATURE}"
        usage = {"cost": cost / 1_000_000, "captured_usd_micros": cost, "status": "captured"}
        artifacts = {"result": {"artifacts": [{"url": url}]}} if result else {}
        done = {"id": id, "status": "completed", "usage": usage, "url": url}
        return StandInReply(200, done | artifacts)


def stand_in_job_id(key: str) -> str:
    """Return the id that the stand-in gives to the job of a key."""
    return f"job_{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def stand_in_file(id: str, ending: str) -> bytes:
    """Return the file of a job: a picture of one colour, or an MP4 of which only the frame is real.

    No two jobs have the same one.
    """
    import zlib

    seed = hashlib.sha256(id.encode()).digest()
    if ending == "mp4":
        parts = ((b"ftyp", b"isom\0\0\2\0isomiso2mp41"), (b"free", id.encode()), (b"mdat", seed))
        return b"".join((8 + len(data)).to_bytes(4, "big") + name + data for name, data in parts)
    size = (64).to_bytes(4, "big") + (36).to_bytes(4, "big")
    pixels = zlib.compress((b"\0" + seed[:3] * 64) * 36)
    named = ((b"IHDR", size + b"\x08\2\0\0\0"), (b"tEXt", b"job\0" + id.encode()))
    chunks = (*named, (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")
        for name, data in chunks
    )


def _stand_in_error(status: int, code: str, message: str) -> StandInReply:
    return StandInReply(status, {"error": {"code": code, "message": f"stand-in: {message}"}})


def _stand_in_server(stand_in: StandIn) -> ThreadingHTTPServer:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Small answers must not wait for the next acknowledgement.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if len(body) < length:
                # The client died in the middle of its request: nothing was asked.
                self.close_connection = True
                return
            key = self.headers.get("Idempotency-Key") or ""
            reply = stand_in.answer(self.command, self.path, key, body)
            if reply.code is None:
                self.close_connection = True
                return
            match reply.data:
                case bytes():
                    text, type = reply.data, "application/octet-stream"
                case str():
                    text, type = reply.data.encode(), "text/html"
                case _:
                    text, type = json.dumps(reply.data).encode(), "application/json"
            self.send_response(reply.code)
            for name, value in ({"Content-Type": type} | dict(reply.headers)).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """A stand-in says nothing: the run's own display does."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hung up is no news."""

    return Server(("127.0.0.1", 0), Handler)


def stand_in_state(ledger: Place) -> Path:
    """Return where a simulated ledger's stand-in keeps its jobs: beside the ledger.

    Beside one on Postgres there is nothing; the folder in which the commands are given is.
    """
    if isinstance(ledger, Dsn):
        return Path(f"{ledger.schema}.stand-in.db")
    name = ledger.stem if ledger.suffix == ".db" else ledger.name
    return ledger.with_name(f"{name}.stand-in.db")


def copy_stand_in(memory: Path, copy: Path) -> None:
    """Copy what a stand-in remembers; a copy that fails leaves nothing. Raises LedgerError."""
    try:
        with (
            contextlib.closing(sqlite3.connect(memory)) as source,
            contextlib.closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as exc:
        copy.unlink(missing_ok=True)
        raise LedgerError(f"{copy}: the stand-in's memory cannot be copied there: {exc}") from exc


# --- drill -------------------------------------------------------------------
# The recovery drill: real processes are killed at every point and started again, and what
# was charged is counted. It touches nothing of the user's and reads no API key.

DRILL_KEY = "drill-key-that-must-be-nowhere"
# Waits of a run, cut short: the order of things is what is drilled.
DRILL_CONSTANTS = {
    "BACKOFF_BASE_S": 0.02,
    "BACKOFF_FLOOR_S": 0.001,
    "BACKOFF_CAP_S": 0.2,
    "TICK_S": 0.05,
}
# On Postgres the rows of a killed process are free after its lease.
DRILL_LEASES = {"LEASE_S": 1.2, "POST_DEADLINE_S": 0.6}
# A process that takes longer than this hangs; a busy machine takes seconds.
DRILL_LIMIT_S = 60.0
# Kills at the first commits, whatever they hold.
DRILL_COMMITS = 8
# A random kill comes so soon after the ledger is there; a run takes about so long.
DRILL_SPAN_S = 0.8
# No key is sent more often than this, whatever dies and whatever is lost.
DRILL_POSTS = 8
# What the rows of a drill do not reach: races, and what asks for a job that is known or open.
DRILL_UNREACHED = {
    "record_found", "record_cancel_asked", "record_unclaimed", "record_late_id",
    "record_estimates", "record_named", "record_part", "record_lost",
    "record_undownloaded", "record_renewed", "record_moving", "record_moved",
    "record_move_undone", "record_copy_of", "cancel", "jobs",
}  # fmt: skip

_RUN: tuple[str, ...] = (
    "--poll-interval", "0.02s", "--writes-per-minute", "0", "--reads-per-minute", "0",
    # What outlives a drill that was killed itself ends by itself.
    "--deadline", f"{DRILL_LIMIT_S:.0f}s",
)  # fmt: skip
DRILL_FILES = "clips"
_RUN += ("--download", DRILL_FILES)
DRILL_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("run", "rows.jsonl", *_RUN),
    ("retry", "refused", "--yes"),
    ("resolve", "conflict", "--resend", "--yes"),
    ("add", "more.jsonl"),
    ("add", "other.jsonl", "--replace"),
    ("cancel", "more", "--yes"),
)
# What a user does after a kill: the same command again, and what is left, twice.
DRILL_RESTART: tuple[tuple[str, ...], ...] = (DRILL_COMMANDS[0], ("run", *_RUN), ("run", *_RUN))
# Where a fault of the wire is crossed with a kill; None is no kill.
DRILL_CROSSED = (None, "record_prepared:after:1", "submit:after:1", "record_accepted:before:1")
SECOND_RUNNER = "second runner"
HELD_KILL = "killed while the answer is held"


class DrillLine(NamedTuple):
    """One trial: where the process dies, and what the wire does meanwhile."""

    point: str | None = None
    fault: Fault | None = None
    # Kills by the clock: seconds after the ledger is there, for each process.
    kills_s: tuple[float, ...] = ()
    number: int = 0

    @property
    def name(self) -> str:
        if self.kills_s:
            return f"random:{self.number}"
        return " + ".join(part for part in (self.fault, self.point) if part) or "no kill"


class Drilled(NamedTuple):
    """What a trial showed."""

    line: DrillLine
    posts: int
    jobs: int
    charges: int
    # Jobs beyond the first one of a body, and rows that are not where they must end.
    doubles: int
    lost: int
    # From the restart until the command that was killed has ended.
    recovery_s: float
    problems: Sequence[str]
    # How often the first process called what a kill can be tied to.
    counts: Mapping[str, int]

    @property
    def clean(self) -> bool:
        return not (self.doubles or self.lost or self.problems)


def crash_methods() -> list[tuple[type, str]]:
    """Return all that records a fact, calls the API or writes a result file.

    A new method is a new crash point.
    """
    records = [name for name in vars(Ledger) if name.startswith("record_")]
    found: list[tuple[type, str]] = [(Ledger, name) for name in [*records, "_commit"]]
    quiet_ones = ("close", "trouble_of", "sha256")
    for owner in (Sume, Part):
        calls = (name for name in vars(owner) if not name.startswith("_"))
        found += [(owner, name) for name in calls if name not in quiet_ones]
    return found


def be_drilled(
    run: Callable[..., object],
    commands: Sequence[Sequence[str]],
    point: str | None,
    report_file: str,
    shared: bool,
) -> NoReturn:
    """Be the process of a trial: run commands, count calls, and die at the point.

    `run` is the command line; a point reads `record_accepted:after:2`, which is after the
    commit that holds this fact. The methods are replaced in subclasses, so that no code of a
    normal run knows of drills. Codes, counts and times go to `report_file`.
    """
    globals().update(DRILL_CONSTANTS | (DRILL_LEASES if shared else {}))
    mine = Mine(point)
    for base in (Ledger, Sume, Part):
        mined = {
            name: mine.around(getattr(owner, name), name)
            for owner, name in crash_methods()
            if owner is base
        }
        globals()[base.__name__] = type(base.__name__, (base,), mined)
    codes: list[object] = []
    times_ms: list[int] = []
    for command in commands:
        try:
            run(list(command), prog_name="sume-resume")
        except SystemExit as exc:
            codes.append(exc.code)
        times_ms.append(Clock().wall_ms())
    report = {"codes": codes, "times_ms": times_ms, "counts": mine.counts}
    with contextlib.suppress(OSError), os.fdopen(os.open(report_file, _NEW_FILE, 0o600), "w") as to:
        json.dump(report, to)
    sys.exit(0)


_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class Mine:
    """Counts calls, and kills the process before or after the one that the point names."""

    def __init__(self, point: str | None) -> None:
        name, when, nth = (point or "::0").split(":")
        self._name, self._when, self._nth = name, when, int(nth)
        self._armed = False
        self.counts: Counter[str] = Counter()

    def around(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def method(ledger_or_api: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            hit = name == self._name and self.counts[name] == self._nth
            if hit and self._when == "before":
                _die()
            # A fact is there once its commit is, which may hold others.
            self._armed = self._armed or (hit and name.startswith("record_"))
            result = original(ledger_or_api, *args, **kwargs)
            if (hit and not self._armed) or (self._armed and name == "_commit"):
                _die()
            return result

        return method


def _die() -> NoReturn:
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    os._exit(137)


class _Expected(NamedTuple):
    """A row of the drill, and the statuses in which it may end."""

    fields: Mapping[str, Any]
    ends: frozenset[Status] = frozenset({Status.COMPLETED})


_ENDS_BADLY = frozenset({Status.REJECTED, Status.REVIEW, Status.CANCELLED})


def drill_rows(fault: Fault | None) -> dict[str, _Expected]:
    """Return the rows of a trial by id: with one fault, or with all that end soon."""
    rows = {"plain": _Expected({}), "picture": _Expected({"kind": "image"})}
    soon = [Fault.LOST, Fault.RESET, Fault.PAGE, Fault.QUEUE, Fault.READ, Fault.LINK]
    faults = [fault] if fault else soon
    for one in faults:
        rows[str(one).replace(" ", "-")] = _Expected({"stand_in": one})
    rows["refused"] = _Expected({"duration": STAND_IN_MAX_SECONDS + 1}, _ENDS_BADLY)
    rows["conflict"] = _Expected({"stand_in": Fault.CONFLICT}, _ENDS_BADLY)
    rows["last"] = _Expected({})
    return rows


class Trial:
    """Runs one line in a folder of its own, against a stand-in that outlives the kills."""

    def __init__(
        self,
        line: DrillLine,
        folder: Path,
        script: Path,
        environ: Mapping[str, str],
        server: Dsn | None = None,
    ) -> None:
        """With `server` the ledger is a schema of its own there, which is dropped at the end."""
        self.line, self.folder, self._script, self._environ = line, folder, script, environ
        self.place: Place = folder / DEFAULT_LEDGER
        if server is not None:
            self.place = dataclasses.replace(server, schema=f"drill_{os.urandom(6).hex()}")
        self._clock = Clock()
        self.rows = drill_rows(line.fault)
        self.problems: list[str] = []
        self._children: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._held, self._released = threading.Event(), threading.Event()

    def run(self) -> Drilled:
        """Run the commands, kill them as the line says, start again, and judge."""
        import subprocess

        try:
            return self._run()
        except subprocess.TimeoutExpired:
            self.problems.append(f"a process did not end within {DRILL_LIMIT_S:.0f} s")
        except SumeResumeError as exc:
            self.problems.append(str(exc))
        finally:
            self.stop()
            self._drop()
        return Drilled(self.line, 0, 0, 0, 0, len(self.rows), 0.0, self.problems, {})

    def _run(self) -> Drilled:
        self.folder.mkdir()
        self._write("rows.jsonl", {id: row.fields for id, row in self.rows.items()})
        self._write("more.jsonl", {"more": {}})
        self._write("other.jsonl", {"more": {"seed": 1}})
        state = self.folder / "stand-in.db"
        self._stand_in = StandIn(state, quick=True, watch=self._watch, hold=self._hold)
        with self._stand_in as account:
            self._url = account.base_url
            self._first()
            begin_ms = self._clock.wall_ms()
            self._start(DRILL_RESTART, None, "again.json").wait(DRILL_LIMIT_S)
            again = self._report("again.json")
            # Rows that need a person, or were refused, are there in any case.
            ends = (int(Exit.NOT_ALL_COMPLETED), int(Exit.REVIEW))
            if len(again["codes"]) != len(DRILL_RESTART) or set(again["codes"]) - set(ends):
                words = f"{again['codes']}: {self._last_words()}"
                self.problems.append(f"the same command again ended with {words}")
            ended_ms = next(iter(again["times_ms"]), begin_ms)
            return self._judge((ended_ms - begin_ms) / 1000)

    def stop(self) -> None:
        """Kill what runs, and start nothing more; its thread ends soon after."""
        self._stopped = True
        self._held.set()
        self._released.set()
        for child in list(self._children):
            child.kill()
            child.wait()

    def _drop(self) -> None:
        """Take the schema of a trial away again."""
        if isinstance(self.place, Dsn):
            with (
                contextlib.suppress(LedgerError),
                contextlib.closing(Postgres(self.place)) as database,
            ):
                database.execute(POSTGRES_DROP, {})

    # -- processes --

    def _first(self) -> None:
        import subprocess

        line = self.line
        for kill_s in line.kills_s:
            child = self._start(DRILL_COMMANDS, None)
            while child.poll() is None and not ledger_exists(self.place):
                self._clock.sleep(0.005)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(kill_s)
            child.kill()
            child.wait()
        if line.kills_s:
            return
        point = None if line.point in (SECOND_RUNNER, HELD_KILL) else line.point
        child = self._start(DRILL_COMMANDS, point)
        if line.point == SECOND_RUNNER:
            self._start_second()
        if line.point == HELD_KILL and self._held.wait(DRILL_LIMIT_S):
            child.kill()
        code = child.wait(DRILL_LIMIT_S)
        # Windows gives a killed process the number that the killer names.
        died = code in ((-9, 137) if os.name == "posix" else (1, signal.SIGTERM, 137))
        if line.point not in (None, SECOND_RUNNER):
            if not died:
                self.problems.append(f"the point was not reached: {self._last_words()}")
        else:
            self._check_unkilled()

    def _check_unkilled(self) -> None:
        """Nothing was killed: each command ended as it must, and did what it was asked for."""
        report = self._report("first.json")
        expected = [int(Exit.REVIEW)] + [int(Exit.DONE)] * (len(DRILL_COMMANDS) - 1)
        if report["codes"] != expected:
            codes = f"{report['codes']}, not {expected}"
            self.problems.append(f"the commands ended with {codes}: {self._last_words()}")
            return
        if self.line == DrillLine():
            reached = DRILL_UNREACHED | {name for name, n in report["counts"].items() if n}
            for _, name in crash_methods():
                if name not in reached:
                    self.problems.append(f"{name} was not called")
        with open_ledger(self.place) as ledger:
            again = [ledger.find(row).attempt for row in ("refused", "conflict")]
            more = ledger.find("more")
        if again != [2, 2]:
            self.problems.append("a row that was to be bought again has no second attempt")
        if more.status is not Status.CANCELLED or b"seed" not in more.body:
            self.problems.append("a row was not replaced, or not dropped")

    def _report(self, name: str) -> dict[str, Any]:
        """Return what a process told of itself; one that died told nothing."""
        told: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            told = json.loads(_content(self.folder / name))
        return {"codes": [], "times_ms": [], "counts": {}} | told

    def _start_second(self) -> None:
        """While a run waits for an answer, another one must be told at once who holds it."""
        import subprocess

        self._held.wait(DRILL_LIMIT_S)
        second = self._start(DRILL_COMMANDS[:1], None, "second.json")
        with contextlib.suppress(subprocess.TimeoutExpired):
            second.wait(DRILL_LIMIT_S)
        self._released.set()
        codes = self._report("second.json")["codes"]
        if codes != [int(Exit.LOCKED)]:
            self.problems.append(f"a second runner ended with {codes}, not {Exit.LOCKED:d}")

    def _start(
        self, commands: Sequence[Sequence[str]], point: str | None, report: str = "first.json"
    ) -> subprocess.Popen[bytes]:
        import subprocess

        if self._stopped:
            raise SumeResumeError("the drill was stopped")
        shared = isinstance(self.place, Dsn)
        # By its path: the file may have any name.
        code = (
            "import sys; from importlib import util; "
            f"spec = util.spec_from_file_location('drilled', {str(self._script)!r}); "
            "drilled = sys.modules['drilled'] = util.module_from_spec(spec); "
            "spec.loader.exec_module(drilled); "
            f"drilled.be_drilled(drilled.app, {commands!r}, {point!r}, {report!r}, {shared!r})"
        )
        keep = {name: text for name, text in self._environ.items() if not name.startswith("SUME_")}
        settings = {"SUME_API_KEY": DRILL_KEY, "SUME_API_BASE_URL": self._url, "TERM": "dumb"}
        if isinstance(self.place, Dsn):
            settings["SUME_RESUME_DB"] = self.place.url
        with open(self.folder / "log.txt", "ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=self.folder,
                env=keep | settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._children.add(child)
        return child

    def _hold(self) -> None:
        """Keep an answer back: for a moment, or until the second runner has been told."""
        self._held.set()
        self._released.wait(DRILL_LIMIT_S if self.line.point == SECOND_RUNNER else STAND_IN_HOLD_S)

    # -- judging --

    def _watch(self, key: str) -> None:
        """A request has arrived: its key must be in the ledger, as one that is being sent."""
        try:
            with open_ledger(self.place) as ledger:
                ledger.on_busy = lambda exc, tries: None
                sending = any(job.key == key for job in ledger.with_status(Status.SENDING))
        except SumeResumeError as exc:
            self.problems.append(f"a POST while the ledger cannot be read: {exc}")
            return
        if not sending:
            self.problems.append(f"a POST before its key was committed: {key}")

    def _judge(self, recovery_s: float) -> Drilled:
        charges, jobs, doubles = self._stand_in.books()
        with open_ledger(self.place) as ledger:
            latest = {job.row: job for job in ledger.latest()}
            attempts = [job for row in latest for job in ledger.attempts(row)]
            spent = ledger.totals().cost_micros
            for job in attempts:
                self._check_attempt(job, ledger.history(job), ledger.outputs(job))
            for row in latest:
                if sum(job.latest for job in attempts if job.row == row) != 1:
                    self.problems.append(f"row '{row}' has not one latest attempt")
        lost = sum(
            id not in latest or latest[id].status not in row.ends for id, row in self.rows.items()
        )
        named = {job.job_id for job in attempts}
        if ghosts := set(jobs) - named:
            self.problems.append(f"jobs that no row names: {', '.join(sorted(ghosts))}")
        if spent != sum(charges):
            self.problems.append(f"the ledger says {spent} micros, charged were {sum(charges)}")
        most = max(Counter(self._stand_in.posts).values(), default=0)
        if most > DRILL_POSTS:
            self.problems.append(f"one key was sent {most} times")
        if b"Traceback" in _content(self.folder / "log.txt"):
            self.problems.append(f"a traceback: {self._last_words()}")
        if self._stand_in.mismatches:
            self.problems.append("a key was sent with another body")
        if self.line.point is None and not self.line.kills_s:
            # A kill may lose a pause that was not written down yet.
            self.problems += self._stand_in.hasty
        secrets = {"the API key": DRILL_KEY, "a link's signature": STAND_IN_SIGNATURE}
        self.problems += [
            f"{what} is in {path.name}"
            for path in self.folder.rglob("*")
            for what, secret in secrets.items()
            if secret.encode() in _content(path)
        ]
        if parts := [path.name for path in self.folder.rglob("*.part")]:
            self.problems.append(f"parts of files were left: {', '.join(parts)}")
        posts = len(self._stand_in.posts)
        return Drilled(
            self.line,
            posts,
            len(jobs),
            len(charges),
            doubles,
            lost,
            recovery_s,
            tuple(dict.fromkeys(self.problems)),
            self._report("first.json")["counts"],
        )

    def _check_attempt(
        self, job: Job, history: Sequence[Recorded], outputs: Sequence[Output]
    ) -> None:
        """An attempt has the job that its key made, its files, and its whole history."""
        if job.job_id not in (None, stand_in_job_id(job.key)):
            self.problems.append(f"row '{job.row}' has the job of another row")
        if job.status is Status.COMPLETED:
            ending, id = "png" if job.kind == "image" else "mp4", job.job_id or ""
            files = [_content(Path(output.path)) for output in outputs if output.path]
            if files != [stand_in_file(id, ending)]:
                self.problems.append(f"row '{job.row}' is completed and has not its file")
        facts = [fact.event for fact in history]
        if facts[:1] != ["added"] or (job.status is Status.COMPLETED and "final" not in facts):
            self.problems.append(f"row '{job.row}' has not its whole history")
        ended = False
        for fact in history:
            if ended and fact.after not in FINAL:
                self.problems.append(f"row '{job.row}' went back from its last word")
            ended = ended or fact.after in FINAL

    def _write(self, name: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
        with os.fdopen(os.open(self.folder / name, _NEW_FILE, 0o600), "w") as file:
            for id, fields in rows.items():
                file.write(json.dumps({"id": id, "prompt": f"drill {id}", **fields}) + "\n")

    def _last_words(self) -> str:
        lines = _content(self.folder / "log.txt").decode(errors="replace").split("\n")
        return inert("".join(lines[-2:-1]), 200)


def _content(path: Path) -> bytes:
    """Return what a file of a trial holds; nobody is connected to any of them any more."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def drill_lines(counts: Mapping[str, int]) -> list[DrillLine]:
    """Return the trials: each method that a run without kills reached, and the crossed faults."""
    points = [
        f"{name}:{when}:{nth}"
        for _, name in crash_methods()
        for nth in range(1, (DRILL_COMMITS if name == "_commit" else 2) + 1)
        for when in ("before", "after")
        if counts.get(name, 0) >= nth
    ]
    wire = [fault for fault in Fault if fault is not Fault.CONFLICT]
    crossed = [DrillLine(point, fault) for fault in wire for point in DRILL_CROSSED]
    special = [DrillLine(SECOND_RUNNER, Fault.HELD), DrillLine(HELD_KILL, Fault.HELD)]
    return [*map(DrillLine, points), *crossed, *special]


def random_line(number: int, seed: int) -> DrillLine:
    """Return a trial that is killed twice, at moments that number and seed tell."""
    import random

    rng = random.Random(f"{seed}:{number}")
    kills_s = (rng.uniform(0, DRILL_SPAN_S), rng.uniform(0, DRILL_SPAN_S))
    return DrillLine(kills_s=kills_s, number=number)


DRILL_COLUMNS = ("crash point", "POSTs", "jobs", "charges", "doubles", "lost", "recovery")


def drilled_cells(result: Drilled) -> list[str]:
    """Return the cells of a trial, as text."""
    counts = (result.posts, result.jobs, result.charges, result.doubles, result.lost)
    return [result.line.name, *map(str, counts), f"{result.recovery_s:.2f} s"]


def drilled_json(result: Drilled) -> dict[str, Any]:
    """Return what an event says of a trial."""
    facts = {name: value for name, value in result._asdict().items() if name != "counts"}
    facts["recovery_s"] = round(result.recovery_s, 3)
    return facts | {"line": result.line.name, "clean": result.clean}


class Bench:
    """Runs trials side by side; what runs is killed when the drill ends early."""

    def __init__(
        self, folder: Path, script: Path, environ: Mapping[str, str], server: Dsn | None = None
    ) -> None:
        self._folder, self._script, self._environ = folder, script, environ
        self._server = server
        self._numbers = count(1)
        self._trials: list[Trial] = []

    def __enter__(self) -> Bench:
        from concurrent.futures import ThreadPoolExecutor

        # Twice as many at once as there are cores: a trial waits as much as it works.
        self._pool = ThreadPoolExecutor(max_workers=2 * (os.cpu_count() or 1))
        return self

    def __exit__(self, *exc: object) -> None:
        """Let nothing outlive the drill: no thread that writes, no process."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for trial in self._trials:
            trial.stop()
        self._pool.shutdown(wait=True)

    def trial(self, line: DrillLine) -> Drilled:
        """Run one trial to its end."""
        folder = self._folder / str(next(self._numbers))
        trial = Trial(line, folder, self._script, self._environ, self._server)
        self._trials.append(trial)
        return trial.run()

    def trials(self, lines: Sequence[DrillLine]) -> Iterator[Drilled]:
        """Run trials side by side, and yield them as they end."""
        from concurrent.futures import as_completed

        for done in as_completed([self._pool.submit(self.trial, line) for line in lines]):
            yield done.result()


# --- cli ---------------------------------------------------------------------
# Commands, flags and the one boundary where errors become a line and an exit code.


# A command of ours within a text.
_COMMAND = r"(?<!['\"])\bsume-resume (run|add|status|retry|cancel|resolve|backup|move)\b(?! --db)"


class Voice:
    """How a command speaks: words on stderr and, with --json, a line per event on stdout."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._flags = self._run_flags = ""
        self._lost = False

    def about(self, ledger: Place, simulated: bool = False) -> None:
        """Name this ledger in the commands that are said, unless they find it by themselves."""
        named = os.environ.get("SUME_RESUME_DB")
        found = place_of(named) if named else None
        self._flags = "" if ledger == found else db_flag(ledger)
        self._run_flags = self._flags
        if simulated:
            usual = ledger == (found or Path(DEFAULT_SIMULATED_LEDGER))
            self._run_flags = " --simulate" + ("" if usual else self._flags)

    def say(self, text: str) -> None:
        _complain(self.complete(text))

    def complete(self, text: str) -> str:
        """Return text in which the commands that a person may copy name the ledger."""

        def named(match: re.Match[str]) -> str:
            return match[0] + (self._run_flags if match[1] == "run" else self._flags)

        return re.sub(_COMMAND, named, text)

    def shares_a_terminal(self) -> bool:
        """Say whether events and words come to one terminal, where nothing may be drawn."""
        return self.as_json and sys.stdout.isatty() and sys.stderr.isatty()

    def tell(self, type: str, **facts: object) -> None:
        """Write an event. A reader that left (| head) is no reason to stop."""
        if not self.as_json:
            return
        try:
            print(json.dumps({"type": type, **facts}), flush=True)
        except OSError as exc:
            self.as_json = False
            if not isinstance(exc, BrokenPipeError):
                self._lost = True
                _complain(f"no more events: stdout cannot be written: {exc.strerror}")

    def end(self, code: Exit, **facts: object) -> NoReturn:
        """Write the last event, and end the command with this code, or with 8 for lost events."""
        self.tell("summary", exit_code=int(code), **facts)
        raise typer.Exit(Exit.LEDGER if self._lost and code is Exit.DONE else code)


class ErrorBoundary(TyperGroup):
    """Turns our errors into one line on stderr and their exit code; no traceback leaves."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # An error can come before the flag is parsed, and its last line must come too.
        ctx.obj = Voice("--json" in args)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SumeResumeError as exc:
            _fail(ctx, str(exc), exc.exit_code)
        except (KeyboardInterrupt, typer.Abort):
            _fail(ctx, "interrupted", Exit.INTERRUPTED)
        except Stopped as exc:
            _fail(ctx, f"stopped by {signal.Signals(exc.signum).name}", Exit(128 + exc.signum))
        except BrokenPipeError as exc:
            # The reader of a pipe has what it wanted (| head).
            raise typer.Exit(Exit.DONE) from exc
        except OSError as exc:
            where = f"{inert(exc.filename)}: " if exc.filename else ""
            _fail(ctx, f"{where}{exc.strerror}; check the path and the free space", Exit.LEDGER)
        except Exception as exc:
            if type(exc).__module__.partition(".")[0] not in ("typer", "click"):
                _fail(ctx, _internal_error(exc), Exit.INTERNAL)
            if ctx.obj and hasattr(exc, "format_message"):
                ctx.obj.tell("error", text=exc.format_message())
                ctx.obj.tell("summary", exit_code=int(Exit.USAGE))
            raise


def _fail(ctx: Any, text: str, code: Exit) -> NoReturn:
    """End a command with an error: one line, and with --json two events."""
    voice: Voice = ctx.obj or Voice(False)
    if code < Exit.HANGUP:
        voice.say(f"error: {text}")
    else:
        # The terminal has written ^C, or stands behind a question.
        voice.say(f"\n{text}" if sys.stderr.isatty() else text)
    voice.tell("error", text=voice.complete(text))
    voice.end(code)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        for line in text.splitlines():
            print(inert(line, 2000), file=sys.stderr)


def _internal_error(exc: Exception) -> str:
    """Say where the fault is, and nothing that could hold a secret or a row's text."""
    last = exc.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    place = f"{last.tb_frame.f_code.co_name}:{last.tb_lineno}" if last else "?"
    return (
        f"a fault in sume-resume {__version__}: {type(exc).__name__} in {place}."
        " The ledger is safe; run the same command again, and please report this line"
    )


app = typer.Typer(
    cls=ErrorBoundary,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    help="Buy AI clips from Sume in batches, each exactly once, and finish after any kill.",
    epilog="\b\n" + EXIT_CODES,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sume-resume {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that belong to no command."""


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command.

    Its annotations are resolved here: left as text, typer would do so three times at each start.
    """
    function.__annotations__ = get_type_hints(function, include_extras=True)
    app.command(epilog="\b\n" + EXIT_CODES)(function)
    return function


def _number(least: float, what: str) -> Callable[[str | None], float | None]:
    """Return a parser of a number that must not be below `least`."""

    def parse(text: str | None) -> float | None:
        try:
            value = float(text or "")
        except ValueError:
            value = -1.0
        if not least <= value < 1e9:
            raise typer.BadParameter(f"expected {what}")
        return value

    return parse


def _usd(text: str) -> int:
    """Return the micros of an amount such as 12.50."""
    micros = usd_to_micros(text.removeprefix("$"))
    if micros is None:
        raise typer.BadParameter("expected dollars such as 12.50")
    return micros


def _time(text: str) -> float:
    try:
        return parse_time(text)
    except UsageError as exc:
        raise typer.BadParameter(str(exc)) from exc


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, show_default=False, **more)


_PER_MINUTE = {"parser": _number(0, "a number, 0 for no limit"), "metavar": "N"}
_TIME = {"parser": _time, "metavar": "TIME"}

DbOption = Annotated[
    str | None,
    _option(
        "--db",
        envvar="SUME_RESUME_DB",
        metavar="FILE",
        help="The ledger (default jobs.db; of run --simulate simulated.db).",
    ),
]
ModelOption = Annotated[
    str | None,
    _option(
        "--model", metavar="M", help=f"Model of rows that name none (default {DEFAULT_MODEL})."
    ),
]
DurationOption = Annotated[
    int | None, _option("--duration", metavar="N", min=1, help="Seconds of rows that name none.")
]
KindOption = Annotated[
    str | None,
    _option(
        "--kind",
        metavar="video|image",
        autocompletion=lambda: list(KINDS),
        help="Kind of rows that name none (default video).",
    ),
]
SetOption = Annotated[
    list[str] | None,
    _option(
        "--set",
        metavar="NAME=VALUE",
        help="Another body field for rows that do not have it; may be given again.",
    ),
]
TakeOption = Annotated[
    int, _option("--take", metavar="N", min=1, help="Buy rows without an id once more, as take N.")
]
NamespaceOption = Annotated[
    str | None,
    _option(
        "--namespace",
        metavar="NAME",
        help="Fixes the keys of a new ledger, so that a lost one makes the same keys again.",
    ),
]


PricesOption = Annotated[
    str | None,
    _option("--prices", metavar="FILE", help="What models cost, as TOML or JSON; for estimates."),
]
ReplaceOption = Annotated[
    bool,
    _option("--replace", help="A row that was not bought takes new content, where it differs."),
]
JsonOption = Annotated[bool, _option("--json", help="Events as JSON on stdout, a line each.")]
YesOption = Annotated[bool, _option("--yes", help="Do not ask; needed where nobody can answer.")]


def _begin(
    ctx: typer.Context, as_json: bool, db: str | None, simulate: bool = False
) -> tuple[Voice, Place]:
    """Return how this command speaks, and its ledger."""
    path = place_of(db or (DEFAULT_SIMULATED_LEDGER if simulate else DEFAULT_LEDGER))
    voice = cast(Voice, ctx.obj)
    voice.as_json = as_json
    voice.about(path, simulate)
    return voice, path


def _open_to_write(voice: Voice, path: Place) -> Ledger:
    """Open the ledger of a command that changes rows."""
    ledger = _open(voice, path)
    try:
        _check_moved(ledger)
    except BaseException:
        ledger.close()
        raise
    return ledger


def _open(voice: Voice, path: Place) -> Ledger:
    """Open the ledger of a command, and let what is said be about it."""
    simulated = Path(DEFAULT_SIMULATED_LEDGER)
    usual = path == Path(DEFAULT_LEDGER) and not ledger_exists(path)
    if usual and simulated.exists():
        raise LedgerError(f"{path}: no such ledger; name the one that is there: --db {simulated}")
    ledger = open_ledger(path)
    voice.about(path, ledger.meta("origin") == STAND_IN)
    return ledger


def _defaults(
    model: str | None, duration: int | None, kind: str | None, sets: list[str] | None, take: int
) -> Defaults:
    """Check the flags that fill in what rows leave out. Raises UsageError."""
    values: dict[str, Any] = {}
    for text in sets or []:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set '{inert(text, 60)}': write NAME=VALUE")
        if name in ("id", "prompt", "model", "duration", "kind"):
            raise UsageError(f"--set {name}: this field has its own flag, or belongs in the row")
        if name in values:
            raise UsageError(f"--set {inert(name, 60)}: given twice")
        values[name] = typed(name, value)
    values |= {n: v for n, v in (("model", model), ("duration", duration)) if v is not None}
    for name, value in (values | ({"kind": kind} if kind is not None else {})).items():
        if expected := _expected(name, value):
            flag = f"--set {name}" if name == "mode" else f"--{name}"
            raise UsageError(f"{flag}: expected {expected}, got {_shown(value)}")
        if _unusable(value):
            raise UsageError(f"--set {inert(name, 60)}: {_UNUSABLE}")
    return Defaults(cast("Kind | None", kind), values, take)


def _check_namespace(namespace: str | None) -> None:
    if namespace is not None and (namespace == "" or inert(namespace, 200) != namespace):
        raise UsageError("--namespace: expected plain text of 1 to 200 characters")


def _open_input(file: str, stack: contextlib.ExitStack) -> BinaryIO:
    """Open an input that can be read twice; stdin and pipes are kept aside first."""
    import shutil
    import tempfile

    try:
        if file != "-" and stat.S_ISREG(os.stat(file).st_mode):
            return stack.enter_context(open(file, "rb"))
        aside: BinaryIO = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        if file == "-" and sys.stdin is None:
            raise UsageError("stdin is closed")
        if file == "-":
            shutil.copyfileobj(sys.stdin.buffer, aside)
        else:
            with open(file, "rb") as pipe:
                shutil.copyfileobj(pipe, aside)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not a file name"
        raise UsageError(f"{inert(file, 200)}: cannot be read: {reason}") from exc
    aside.seek(0)
    return aside


def add_rows(
    path: Place,
    stream: BinaryIO,
    name: str,
    defaults: Defaults,
    namespace: str | None,
    at_ms: int | None = None,
    replace: bool = False,
) -> Added:
    """Add an input to a ledger, which is made if there is none. All its rows, or none.

    `at_ms` is the time to record, now if not given; `replace` lets rows that were not
    bought take new content.

    Raises InputError or UsageError with nothing changed, LedgerError when the ledger
    cannot be used.
    """

    def fill(ledger: Ledger) -> Added:
        stream.seek(0)
        log = InputLog()
        rows = read_rows(stream, name, defaults, log)
        now_ms = Clock().wall_ms() if at_ms is None else at_ms
        added = ledger.record_added(rows, log, now_ms, replace)
        if not added.rows:
            raise InputError([f"{inert(name, 200)}: has no rows"])
        return added

    if not ledger_exists(path):
        with contextlib.suppress(FileExistsError):
            return create_ledger(path, namespace or os.urandom(8).hex(), fill)
    with open_ledger(path) as ledger:
        _check_moved(ledger)
        _keep_namespace(ledger, namespace)
        return fill(ledger)


def _lock_new(path: Place, stack: contextlib.ExitStack) -> None:
    """Hold the lock of a ledger that is to be made; wait while another process makes it."""
    clock = Clock()
    until_s = clock.awake_s() + BUSY_TIMEOUT_MS / 1000
    # Postgres has locks of its own.
    while isinstance(path, Path) and not path.exists():
        try:
            stack.enter_context(RunLock(path))
            return
        except LockedError:
            if clock.awake_s() >= until_s:
                raise
            clock.sleep(0.05)


def _check_moved(ledger: Ledger) -> None:
    """Raise LedgerError where a ledger was moved elsewhere, or is about to be."""
    if why := ledger.moved():
        raise LedgerError(why)


def _keep_namespace(ledger: Ledger, namespace: str | None) -> None:
    made_with = ledger.meta("namespace")
    if namespace not in (None, made_with):
        raise UsageError(
            f"--namespace: {ledger.place} was made with '{made_with}', and its keys keep it;"
            " leave the flag out, or name another --db"
        )


def _say_added(voice: Voice, added: Added, path: Place) -> None:
    text = f"{path}: {counted(added.new, 'row')} added"
    if added.replaced:
        text += f", {added.replaced} replaced"
    if added.existing:
        text += (
            f"; {added.existing} there already, not bought again (a new id or --take buys another)"
        )
    voice.say(text)
    voice.tell("added", new=added.new, existing=added.existing, replaced=added.replaced)


@_command
def add(
    ctx: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]", help="JSONL, JSON array or CSV; - for stdin.", show_default=False
        ),
    ] = None,
    prompt: Annotated[
        str | None, _option("--prompt", metavar="TEXT", help="One row, in place of a file.")
    ] = None,
    id: Annotated[str | None, _option("--id", metavar="ID", help="The id of that row.")] = None,
    db: DbOption = None,
    model: ModelOption = None,
    duration: DurationOption = None,
    kind: KindOption = None,
    set: SetOption = None,
    take: TakeOption = 1,
    replace: ReplaceOption = False,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add rows to the ledger and send nothing.

    Needs no network and no API key.

    Example: sume-resume add clips.jsonl --model seedance-2.5 --duration 5
    """
    import io

    voice, path = _begin(ctx, as_json, db)
    defaults = _defaults(model, duration, kind, set, take)
    if (file is None) == (prompt is None) or (id is not None and prompt is None):
        raise UsageError("name a FILE, or give --prompt (and --id) for one row, and not both")
    _check_namespace(namespace)
    with contextlib.ExitStack() as stack:
        _lock_new(path, stack)
        if file is not None:
            stream = _open_input(file, stack)
        else:
            row = {"prompt": prompt} | ({"id": id} if id is not None else {})
            stream = io.BytesIO(json.dumps(row).encode())
        name = _input_name(file) or "--prompt"
        added = add_rows(path, stream, name, defaults, namespace, replace=replace)
        _say_added(voice, added, path)
    if as_json:
        with open_ledger(path) as ledger:
            voice.end(Exit.DONE, totals=totals_json(ledger.totals()))


@_command
def run(
    ctx: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="Rows to add first: JSONL, JSON array or CSV; - for stdin.",
            show_default=False,
        ),
    ] = None,
    db: DbOption = None,
    model: ModelOption = None,
    duration: DurationOption = None,
    kind: KindOption = None,
    set: SetOption = None,
    take: TakeOption = 1,
    replace: ReplaceOption = False,
    namespace: NamespaceOption = None,
    limit: Annotated[
        int | None, _option("--limit", metavar="N", min=0, help="Send at most N new rows.")
    ] = None,
    deadline: Annotated[
        float | None,
        _option("--deadline", help="End the run after this time; jobs go on.", **_TIME),
    ] = None,
    job_deadline: Annotated[
        float | None, _option("--job-deadline", help="Wait for each job at most so long.", **_TIME)
    ] = None,
    poll_interval: Annotated[
        float | None,
        _option("--poll-interval", help="Time between reads of a job (default 15s).", **_TIME),
    ] = None,
    writes_per_minute: Annotated[
        float, _option("--writes-per-minute", help="Submits a minute (default 120).", **_PER_MINUTE)
    ] = WRITES_PER_MINUTE,
    reads_per_minute: Annotated[
        float, _option("--reads-per-minute", help="Reads a minute (default 600).", **_PER_MINUTE)
    ] = READS_PER_MINUTE,
    concurrency: Annotated[
        int,
        _option(
            "--concurrency", metavar="N", min=1, max=64, help="HTTP requests at once (default 8)."
        ),
    ] = CONCURRENCY,
    key_ttl: Annotated[
        float | None,
        _option("--key-ttl", help="How long Sume surely knows a key (default 24h).", **_TIME),
    ] = None,
    max_cost: Annotated[
        int | None,
        _option(
            "--max-cost",
            metavar="USD",
            parser=_usd,
            help="Send nothing that could bring all costs and estimates over this.",
        ),
    ] = None,
    prices: PricesOption = None,
    download: Annotated[
        str | None,
        _option("--download", metavar="DIR", help="Download what the rows bring into DIR."),
    ] = None,
    dry_run: Annotated[
        bool, _option("--dry-run", help="Show what would be sent; send and write nothing.")
    ] = False,
    adopt_account: Annotated[
        bool, _option("--adopt-account", help="This other API key is of the same account.")
    ] = False,
    simulate: Annotated[
        bool, _option("--simulate", help="Run against a stand-in on this machine; buys nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Add rows, send what is queued, poll to the end.

    Running it again resumes: nothing is bought twice.

    Example: sume-resume run clips.jsonl --model seedance-2.5 --deadline 2h
    """
    voice, path = _begin(ctx, as_json, db, simulate)
    intake = Intake(file, _defaults(model, duration, kind, set, take), namespace, replace)
    settings = Settings(
        poll_interval_s=poll_interval
        or (SIMULATED_POLL_INTERVAL_S if simulate else POLL_INTERVAL_S),
        writes_per_minute=writes_per_minute,
        reads_per_minute=reads_per_minute,
        concurrency=concurrency,
        key_ttl_s=key_ttl or (None if simulate else KEY_TTL_S),
        deadline_s=deadline,
        job_deadline_s=job_deadline,
        limit=limit,
        max_cost_micros=max_cost,
        prices=_read_prices(prices),
        download=_folder(download),
    )
    _check_run(path, intake, settings)
    go = _dry_run if dry_run else _run
    go(path, intake, settings, simulate, adopt_account, voice)


def _input_name(file: str | None) -> str:
    """Return what messages and the ledger call an input."""
    return "stdin" if file == "-" else file or ""


class Intake(NamedTuple):
    """The input of a run: a file or none, and how its rows are taken."""

    file: str | None
    defaults: Defaults
    namespace: str | None
    replace: bool

    @property
    def name(self) -> str:
        return _input_name(self.file)


def _check_run(path: Place, intake: Intake, settings: Settings) -> None:
    """Raise UsageError for flags that do not go together."""
    least_s = 2 * POST_DEADLINE_S
    if settings.key_ttl_s is not None and settings.key_ttl_s < least_s:
        least = show_time(least_s)
        raise UsageError(f"--key-ttl: must be at least {least}; a submit may take half of that")
    if settings.max_cost_micros is not None and settings.prices is None:
        raise UsageError("--max-cost: caps by estimates, so it needs a price list: --prices FILE")
    given = (intake.defaults != Defaults()) or intake.namespace or intake.replace
    if intake.file is None and given:
        raise UsageError("flags about input (--model, --set, ...) need a FILE")
    if intake.file is None and not ledger_exists(path):
        raise UsageError(f"no ledger {path} and no FILE; name a file of rows: sume-resume run FILE")
    _check_namespace(intake.namespace)
    if settings.download is not None:
        _check_folder(settings.download)


def _folder(name: str | None) -> Path | None:
    """Return the folder that --download names, wherever this process goes. Raises UsageError."""
    if name is not None and not name.strip():
        raise UsageError("--download: names no folder")
    return Path(os.path.abspath(name)) if name is not None else None


@contextlib.contextmanager
def _made(folder: Path | None) -> Iterator[None]:
    """Make a folder; where what follows is refused, nothing is left of it. Raises UsageError."""
    new = [path for path in (folder, *folder.parents) if not path.exists()] if folder else []
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UsageError(f"--download: {folder} cannot be made: {exc.strerror}") from exc
    try:
        yield
    except SumeResumeError:
        for path in new:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def _check_folder(folder: Path) -> None:
    """Raise UsageError where a folder can neither be used nor be made."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise UsageError(f"--download: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--download: {there} cannot be written to")


def _run(
    path: Place, intake: Intake, settings: Settings, simulate: bool, adopt: bool, voice: Voice
) -> NoReturn:
    """Add the rows, run the ledger to its end, and end the command."""
    clock = Clock()
    account = None if simulate else account_from(os.environ)
    make_api = client_factory(account, clock) if account else None
    with contextlib.ExitStack() as stack:
        if isinstance(path, Path):
            # On Postgres workers share the ledger, by claims.
            stack.enter_context(RunLock(path))
        scope = None
        if ledger_exists(path):
            with open_ledger(path) as there:
                there.quick_check()
                _check_moved(there)
                # Before a row is added: what is refused for its account changes nothing.
                check_account(there, account or STAND_IN_ACCOUNT, adopt)
        if intake.file is not None:
            stream = _open_input(intake.file, stack)
            how = (intake.name, intake.defaults, intake.namespace)
            with _made(settings.download):
                added = add_rows(path, stream, *how, replace=intake.replace)
            scope = added.rows
            _say_added(voice, added, path)
        stack.enter_context(_made(settings.download))
        ledger = stack.enter_context(open_ledger(path))
        if account is None or make_api is None:
            account = stack.enter_context(StandIn(stand_in_state(path)))
            make_api = client_factory(account, clock)
        if simulate and ledger.meta("origin") is None:
            voice.say(f"{path}: is simulated from now on, and never buys anything")
        admit(ledger, account, adopt, clock.wall_ms())
        _say_estimate(ledger, scope, settings, voice)
        workers = Workers(make_api, clock, settings.workers)
        code, facts = run_ledger(ledger, workers, clock, settings, scope, intake.file, voice)
    voice.end(code, **facts)


def _say_estimate(ledger: Ledger, scope: set[str] | None, settings: Settings, voice: Voice) -> None:
    """Say what the rows that are to be sent are expected to cost, and how far a cap reaches."""
    prices, cap = settings.prices, settings.max_cost_micros

    def mine() -> Iterator[NewRow]:
        # Read anew each time: a hundred thousand rows are not kept for a line about them.
        rows = (
            new_row_of(job)
            for job in ledger.every(Status.QUEUED)
            if scope is None or job.row in scope
        )
        return islice(rows, settings.limit)

    if prices is None:
        every = scope is None and settings.limit is None
        number = ledger.totals().by_status[Status.QUEUED] if every else sum(1 for _ in mine())
        if number:
            voice.say(f"to send: {counted(number, 'row')}, without a known price: {number}")
        return
    for line in estimate_lines(mine(), prices):
        voice.say(line)
    if cap is not None:
        estimates = [prices.estimate(row.kind, row.model, row.body) for row in mine()]
        voice.say(cap_line(estimates, cap, _spent(ledger, prices)))


def _spent(ledger: Ledger, prices: Prices | None) -> int:
    """Return what counts against a cap: known costs, and estimates of what may have cost."""
    totals = ledger.totals()
    late = [
        prices.estimate(job.kind, job.model, job.body) or 0 if prices else 0
        for job in ledger.unpriced()
    ]
    return totals.cost_micros + totals.reserved_micros + sum(late)


def _dry_run(
    path: Place, intake: Intake, settings: Settings, simulate: bool, adopt: bool, voice: Voice
) -> NoReturn:
    """Show what a run would send, write nothing, and end the command."""
    account = STAND_IN_ACCOUNT if simulate else None
    if account is None and os.environ.get("SUME_API_KEY"):
        account = account_from(os.environ)
    with contextlib.ExitStack() as stack:
        stream = _open_input(intake.file, stack) if intake.file is not None else None
        how = (intake, account, adopt, settings.key_ttl_s, settings.prices)
        plan = plan_of(path, stream, *how)
    _show_plan(plan, settings, voice)


class Plan(NamedTuple):
    """What a run would do: rows that it would send, and sends that it would repeat."""

    send: Sequence[NewRow]
    replay: Sequence[Job] = ()
    # Rows that may have been sent, and would need a person now.
    review: Sequence[Job] = ()
    # Queued rows that are not in the file, and so would not be sent.
    outside: Sequence[str] = ()
    # What counts against a cap already, and what nobody can count.
    spent_micros: int = 0
    blockers: Sequence[Job] = ()


def plan_of(
    path: Place,
    stream: BinaryIO | None,
    intake: Intake,
    account: Account | None,
    adopt: bool,
    key_ttl_s: float | None,
    prices: Prices | None = None,
) -> Plan:
    """Return what `run` would send of an input and a ledger, and write nothing.

    Raises InputError, UsageError, AccountError and LedgerError as the run would; no account
    is asked about where none is given.
    """
    log = InputLog()
    rows = []
    if stream is not None:
        rows = list(read_rows(stream, intake.name, intake.defaults, log))
    if stream is not None and not rows:
        log.check()
        raise InputError([f"{inert(intake.name, 200)}: has no rows"])
    if not ledger_exists(path):
        log.check()
        return Plan(rows)
    with open_ledger(path) as ledger:
        _keep_namespace(ledger, intake.namespace)
        changed = {row.row: row for row in ledger.preview(rows, log, intake.replace)}
        log.check()
        if account is not None:
            check_account(ledger, account, adopt)
        scope = {row.row for row in rows} if stream is not None else None
        queued = ledger.with_status(Status.QUEUED)
        mine = [job for job in queued if scope is None or job.row in scope]
        # A row that takes new content keeps its place; a new attempt has none yet.
        send = [changed.pop(job.row) if job.row in changed else new_row_of(job) for job in mine]
        outside = [job.row for job in queued if scope is not None and job.row not in scope]
        now_ms, sending = Clock().wall_ms(), ledger.with_status(Status.SENDING)
        origin = ledger.meta("origin")
        moved = account is not None and origin not in (None, account.origin)
        old = [moved or bool(too_old(job.first_sent_at or 0, now_ms, key_ttl_s)) for job in sending]
        review = [job for job, is_old in zip(sending, old, strict=True) if is_old]
        replay = [job for job, is_old in zip(sending, old, strict=True) if not is_old]
        unknown = [
            job
            for job in ledger.unpriced()
            if prices is None or prices.estimate(job.kind, job.model, job.body) is None
        ]
        rows = [*send, *changed.values()]
        return Plan(rows, replay, review, outside, _spent(ledger, prices), unknown)


def _show_plan(plan: Plan, settings: Settings, voice: Voice) -> NoReturn:
    """Print a plan, as a table by model and a list of rows, or as events; and end."""
    send, prices, cap = plan.send[: settings.limit], settings.prices, settings.max_cost_micros
    for row in send if voice.as_json else ():
        facts = {"kind": row.kind, "model": row.model, "duration": row.duration_s}
        micros = prices.estimate(row.kind, row.model, row.body) if prices else None
        voice.tell(
            "would_send", row=row.row, prompt=row.prompt, **facts, estimate_usd=show_usd(micros)
        )
    for type, jobs in (("would_replay", plan.replay), ("would_review", plan.review)):
        for job in jobs:
            voice.tell(type, **job_facts(job))
    if not voice.as_json:
        for line in plan_lines(send, plan.replay, plan.review, plan.outside, prices):
            print(line)
    if cap is not None and prices is not None:
        estimates = [prices.estimate(row.kind, row.model, row.body) for row in send]
        voice.say(cap_line(estimates, cap, plan.spent_micros))
        if plan.blockers:
            voice.say(f"{blocked_words(plan.blockers)}; under --max-cost nothing is sent")
    counts = {"would_send": len(send), "would_replay": len(plan.replay)}
    counts |= {"would_review": len(plan.review), "not_in_file": len(plan.outside)}
    voice.end(Exit.DONE, **counts, beyond_limit=len(plan.send) - len(send))


def run_ledger(
    ledger: Ledger,
    workers: Carrier,
    clock: Clock,
    settings: Settings,
    scope: set[str] | None,
    file: str | None,
    voice: Voice,
) -> tuple[Exit, dict[str, Any]]:
    """Run a ledger to its end, with a display and signal handling.

    Returns the exit code, and the facts of the last event.
    """
    with _display(voice) as show:
        events = JsonLog(voice.tell)

        def listen(event: Event) -> None:
            show(event)
            if voice.as_json:
                events(event)

        engine = Engine(ledger, workers, clock, settings, scope=scope, listen=listen)
        with _signals(engine):
            try:
                ending = engine.run()
            finally:
                workers.close()
    return _summarize(ledger, ending, scope, file, settings.download, voice)


def _display(voice: Voice) -> contextlib.AbstractContextManager[Callable[[Event], None]]:
    """Return what shows a run: a live table, a log, or nothing beside events on a terminal."""
    # FORCE_COLOR makes rich take a log for a terminal; only a real one can be redrawn.
    if voice.shares_a_terminal():
        return contextlib.nullcontext(lambda event: None)
    if _is_screen(sys.stderr):
        return LiveTable(make_console(stderr=True), voice.complete)
    return PlainLog(voice.say)


def _is_screen(stream: TextIO) -> bool:
    """Say whether what was written there can be drawn over."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


@contextlib.contextmanager
def _signals(engine: Engine) -> Iterator[None]:
    """Let the first signal end the run in order, and the second one at once."""
    seen = False

    def handle(signum: int, frame: object) -> None:
        nonlocal seen
        if seen and signum == getattr(signal, "SIGHUP", None):
            # A terminal that closes tells it twice: the kernel does, and the shell.
            return
        if seen:
            # The live table has hidden the cursor, and nothing after this shows it again.
            show = b"\x1b[?25h\n" if sys.stderr.isatty() else b""
            with contextlib.suppress(OSError):
                os.write(2, show + b"left at once; run the same command again to finish\n")
            os._exit(128 + signum)
        seen = True
        engine.stop(signum)

    names = ("SIGINT", "SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # What a parent told this process to ignore (nohup) stays ignored.
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# A summary names so many rows of each sort; `status` shows them all.
SUMMARY_ROWS = 10


def _summarize(
    ledger: Ledger,
    ending: Ending,
    scope: set[str] | None,
    file: str | None,
    folder: Path | None,
    voice: Voice,
) -> tuple[Exit, dict[str, Any]]:
    """Say how the run ended, what still runs at Sume and what helps.

    Returns the exit code, and the facts of the last event.
    """
    totals = ledger.totals()
    voice.say(totals_text(totals))
    if ending.hits:
        voice.say(f"{ending.hits} known to Sume already by their keys; not bought again")
    mine: Counter[Status] = Counter()
    outside: list[str] = []
    named: dict[Status, dict[str, list[str]]] = {}
    # Of all rows the counts are known, and only those that are named need to be looked at.
    named_ones = [s for s in Status if s not in (Status.QUEUED, Status.COMPLETED)]
    for job in ledger.latest() if scope is not None else ledger.every(*named_ones):
        if scope is not None and job.row not in scope:
            outside += [job.row] if job.status is Status.QUEUED else []
            continue
        mine[job.status] += 1
        if job.status not in (Status.QUEUED, Status.COMPLETED):
            # Both open words mean the same to a person here; a review is told by its row.
            group = Status.PENDING if job.status in OPEN else job.status
            told = group in (Status.PENDING, Status.SENDING, Status.REVIEW)
            reason = "" if told else job.note or job.trouble or ""
            text = f"{job.row} ({job.job_id})" if job.status in OPEN else job.row
            named.setdefault(group, {}).setdefault(reason, []).append(text)
    if scope is None:
        mine = totals.by_status
    for status, hint in _ENDED_HINTS.items():
        if status in named:
            voice.say(f"{status}: {_reasons(named[status])}")
            if hint:
                voice.say(hint)
    if outside:
        voice.say(
            f"not sent, because they are not in {file}: {_first(outside)}"
            " (run without a file sends them)"
        )
    unfinished = sum(n for status, n in mine.items() if status not in FINAL | {Status.REVIEW})
    why = _why_unfinished(ending) if unfinished else ending.halt
    _say_files(ending, folder, voice)
    if unfinished:
        voice.say(f"unfinished rows: {unfinished} ({why})")
        for status, words in _OPEN_WORDS.items():
            if status in named:
                voice.say(f"{words}: {_reasons(named[status])}")
        again = "run the same command again to finish"
        if ending.capped is not None:
            again = "run again with a higher --max-cost, or with prices for all, to finish"
            if ending.capped.blockers:
                again = "run again with those prices to finish"
        voice.say(f"{again}; nothing is bought twice")
    return _verdict(ending, mine), {
        "why": why,
        "by_status": {status: mine[status] for status in Status},
        "not_in_file": len(outside),
        "known_to_sume": ending.hits,
        "not_downloaded": sorted(ending.undownloaded),
        "downloads_cut": ending.downloads_cut or None,
        "totals": totals_json(totals),
    }


def _say_files(ending: Ending, folder: Path | None, voice: Voice) -> None:
    """Say how many files are there; name the rows that lack one, and what helps."""
    if folder is None:
        return
    found = ending.files - ending.fresh_files
    voice.say(
        f"{near(str(folder))}: {counted(ending.files, 'file')}, {ending.fresh_files} of them"
        f" downloaded now, {found} found there and verified"
    )
    rows: dict[str, list[str]] = {}
    for row, reason in sorted(ending.undownloaded.items()):
        rows.setdefault(reason, []).append(row)
    if rows:
        voice.say(f"rows without all their files: {len(ending.undownloaded)}: {_reasons(rows)}")
        voice.say("the same command again downloads what is missing, and buys nothing for it")


_ENDED_HINTS = {
    Status.REVIEW: "sume-resume status ROW tells why a row needs review, and what settles it",
    Status.REJECTED: "what is rejected was not bought: mend it and run again with --replace, or"
    " sume-resume retry --failed sends it again as it is",
    Status.FAILED: "sume-resume retry --failed buys again what failed",
    Status.EXPIRED: "",
    Status.CANCELLED: "",
}
_OPEN_WORDS = {
    Status.PENDING: "still running at Sume, and paid for",
    Status.SENDING: "may have been bought, and are asked about by their keys",
}


def _first(names: Sequence[str]) -> str:
    more = len(names) - SUMMARY_ROWS
    shown = ", ".join(names[:SUMMARY_ROWS])
    return f"{shown} and {more} more (sume-resume status shows all)" if more > 0 else shown


def _reasons(named: Mapping[str, Sequence[str]]) -> str:
    """Name rows by what they have in common, each reason once."""
    texts = [f"{_first(names)} ({why})" if why else _first(names) for why, names in named.items()]
    more = len(texts) - SUMMARY_ROWS
    shown = "; ".join(texts[:SUMMARY_ROWS])
    return f"{shown}; and {more} other reasons" if more > 0 else shown


def _why_unfinished(ending: Ending) -> str:
    if ending.signal is not None:
        return f"stopped by {signal.Signals(ending.signal).name}"
    if ending.halt is not None:
        return ending.halt
    if ending.capped is not None:
        return _cap_words(ending.capped)
    return "the deadline was reached" if ending.deadline else " or ".join(ending.limits)


def _cap_words(capped: Capped) -> str:
    """Say what --max-cost keeps back, and what it would have to be."""
    words = f"--max-cost keeps back {counted(capped.rows, 'row')}"
    if capped.blockers:
        return f"{words}: {blocked_words(capped.blockers)}"
    words += f": ${show_usd(capped.spent_micros)} is spent or reserved"
    if capped.rows > capped.unpriced:
        rest = "those with a known price" if capped.unpriced else "all"
        words += f", and for {rest} it would have to be ${show_usd(capped.needed_micros)}"
    if capped.unpriced:
        words += (
            f"; without a known price (of the model, or for want of a duration): {capped.unpriced}"
        )
    return words


def _verdict(ending: Ending, mine: Counter[Status]) -> Exit:
    """Return the exit code, by the precedence of the codes."""
    if ending.signal is not None:
        return Exit(128 + ending.signal)
    if ending.halt is not None:
        return Exit.ACCOUNT
    if ending.capped is not None:
        return Exit.CAPPED
    if mine[Status.REVIEW]:
        return Exit.REVIEW
    if any(n for status, n in mine.items() if status not in FINAL):
        return Exit.UNFINISHED
    if ending.downloads_cut and ending.deadline:
        return Exit.UNFINISHED
    whole = mine.total() == mine[Status.COMPLETED]
    missing = ending.undownloaded or ending.downloads_cut
    return Exit.DONE if whole and not missing else Exit.NOT_ALL_COMPLETED


_ROW_HELP = "A row id, a unique prefix of one, or a job id."
# A table longer than this is no help to a reader, and slow to lay out.
STATUS_TABLE_ROWS = 1000
FORMATS = ("table", "json", "jsonl", "csv")


@_command
def status(
    ctx: typer.Context,
    rows: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ROW]...", help=f"Rows to tell all about. {_ROW_HELP}", show_default=False
        ),
    ] = None,
    db: DbOption = None,
    format: Annotated[
        str | None,
        _option(
            "--format",
            metavar="|".join(FORMATS),
            autocompletion=lambda: list(FORMATS),
            help="Default: table.",
        ),
    ] = None,
    watch: Annotated[
        bool, _option("--watch", help="Follow the ledger until every row is final, or Ctrl-C.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show rows and totals, or one row in full.

    Needs no network and no API key.

    Example: sume-resume status --format json | jq '.totals'
    """
    voice, path = _begin(ctx, as_json, db)
    if format not in (None, *FORMATS):
        raise UsageError(f"--format: expected {', '.join(FORMATS)}, got '{inert(format, 40)}'")
    if as_json and format is not None:
        raise UsageError("--json writes events and --format another shape; leave one of them out")
    if watch and (rows or as_json or format not in (None, "table")):
        raise UsageError("--watch shows the table of all rows; leave ROW, --format and --json out")
    with _open(voice, path) as ledger:
        named = [ledger.find(row) for row in rows or []]
        totals = ledger.totals()
        if watch:
            _watch(ledger)
        elif as_json:
            _tell_jobs(ledger, named, voice)
        elif format in ("json", "jsonl", "csv"):
            pairs = ((job, ledger.outputs(job)) for job in named or ledger.latest())
            _print_jobs(format, pairs, totals)
        elif named:
            cards = [job_card(_story(ledger, job), voice.complete) for job in named]
            print("\n\n".join("\n".join(card) for card in cards))
        else:
            _print_table(ledger.latest(batch=STATUS_TABLE_ROWS + 1), totals)
            if totals.by_status[Status.REVIEW]:
                voice.say("sume-resume status ROW tells what settles a row in review")
    voice.end(Exit.DONE, totals=totals_json(totals))


def _story(ledger: Ledger, job: Job) -> Story:
    attempts = [(one, ledger.history(one)) for one in ledger.attempts(job.row)]
    return Story(job, ledger.outputs(job), attempts)


def _tell_jobs(ledger: Ledger, named: Sequence[Job], voice: Voice) -> None:
    """Write an event for each row; those that were named come with their history."""
    for job in named:
        story = _story(ledger, job)
        voice.tell("job", **job_json(job, story.outputs), attempts=attempts_json(story))
    for job in () if named else ledger.latest():
        voice.tell("job", **job_json(job, ledger.outputs(job)))


def _print_jobs(format: str, pairs: Iterable[tuple[Job, Sequence[Output]]], totals: Totals) -> None:
    match format:
        case "json":
            print(json.dumps(status_json(pairs, totals), indent=2))
        case "jsonl":
            for job, outputs in pairs:
                print(json.dumps(job_json(job, outputs)))
        case _:
            import csv

            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(CSV_COLUMNS)
            for job, outputs in pairs:
                writer.writerow(csv_cells(job, outputs))


def _print_table(jobs: Iterable[Job], totals: Totals) -> None:
    shown = list(islice(jobs, STATUS_TABLE_ROWS + 1))
    more, now_ms = len(shown) > STATUS_TABLE_ROWS, Clock().wall_ms()
    shown = shown[:STATUS_TABLE_ROWS]
    rest = f"… the first {STATUS_TABLE_ROWS} rows; --format json shows all"
    if sys.stdout.isatty():
        console = make_console()
        console.print(jobs_table(shown, now_ms, console.width))
        console.print(*([rest] if more else []), totals_line(totals), sep="\n")
        return
    for line in plain_table(shown, now_ms):
        print(line)
    print(*([rest] if more else []), "", totals_text(totals), sep="\n")


def _watch(ledger: Ledger) -> None:
    """Show what the ledger holds whenever it has changed, until every row is final."""
    clock, said = Clock(), ""
    # Another process may write for long: there is time.
    ledger.on_busy = lambda exc, tries: None
    screen = LiveTable(make_console()) if _is_screen(sys.stdout) else None
    with screen or contextlib.nullcontext():
        while True:
            totals = ledger.totals()
            if screen is not None:
                jobs = _first_rows(ledger, screen.height)
                screen(Recounted(totals, jobs, clock.wall_ms()))
            elif totals_text(totals) != said:
                said = totals_text(totals)
                print(said, flush=True)
            if totals.final == totals.rows:
                return
            clock.sleep(TICK_S)


def _first_rows(ledger: Ledger, count: int) -> list[Job]:
    """Return so many rows, in the order in which a person wants to see them."""
    found: list[Job] = []
    for status in STYLES:
        found += ledger.with_status(status, limit=count - len(found))
        if len(found) >= count:
            break
    return found


def _named(ledger: Ledger, rows: Sequence[str]) -> list[Job]:
    """Return the latest attempts of the rows that a person names, each once."""
    found = {}
    for name in rows:
        job = ledger.find(name)
        if not job.latest:
            raise UsageError(
                f"'{name}' is attempt {job.attempt} of row '{job.row}', which has a later one;"
                " name the row"
            )
        found[job.row] = job
    return list(found.values())


def _check_all(jobs: Sequence[Job], refusal: Callable[[Job], str | None]) -> None:
    """Raise InputError, which names every row that cannot be treated so; nothing was changed."""
    said = [(job.row, refusal(job)) for job in jobs]
    problems = [f"row '{row}' {why}" for row, why in said if why]
    if problems:
        shown = problems[:MAX_INPUT_ERRORS]
        raise InputError(["nothing was changed:", *shown], len(problems) + 1)


def _confirm(voice: Voice, question: str, yes: bool) -> None:
    """Ask on a terminal, and want --yes elsewhere. Without a yes the command ends here."""
    if yes:
        return
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        why = "Add --yes to mean it: there is no terminal to ask on; nothing was changed"
        raise UsageError(f"{question} {why}")
    # Not typer's own question, which writes to stdout: that is for data.
    print(f"{inert(question, 2000)} [y/N]: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        voice.say("nothing was changed")
        voice.end(Exit.USAGE)


def _list(jobs: Sequence[Job]) -> str:
    """Name rows for a question: the first ones, then how many more there are."""
    names = [f"'{inert(job.row, 60)}'" for job in jobs[:SUMMARY_ROWS]]
    more = len(jobs) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _tell_row(voice: Voice, before: Status | None, job: Job, words: str) -> None:
    voice.say(f"row '{job.row}': {words}")
    voice.tell("row", before=before, **job_facts(job))


RowsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[ROW]...", help=_ROW_HELP, show_default=False)
]


@_command
def retry(
    ctx: typer.Context,
    rows: RowsArgument = None,
    failed: Annotated[
        bool, _option("--failed", help="All rows that ended as failed, expired or rejected.")
    ] = False,
    yes: YesOption = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Buy rows again, on purpose.

    Each gets a new attempt with a new key, which the next run sends. Refused while it is not
    known how the last attempt ended.

    Example: sume-resume retry --failed
    """
    voice, path = _begin(ctx, as_json, db)
    if bool(rows) == failed:
        raise UsageError("name the rows to buy again, or give --failed, and not both")
    with _open_to_write(voice, path) as ledger:
        ended = (Status.FAILED, Status.EXPIRED, Status.REJECTED)
        jobs = _named(ledger, rows or [])
        jobs += [job for status in ended if failed for job in ledger.with_status(status)]
        if failed:
            jobs = [job for job in jobs if not in_doubt(job)]
        _check_all(jobs, lambda job: retry_refusal(job, bool(ledger.outputs(job))))
        if jobs:
            _confirm(voice, f"Buy again, as new paid attempts: {_list(jobs)}?", yes)
        now_ms = Clock().wall_ms()
        with ledger.transaction():
            again = [ledger.record_retried(job, now_ms) for job in jobs]
        for job in again:
            _tell_row(voice, None, job, f"attempt {job.attempt} is queued")
        voice.say("sume-resume run sends what is queued" if again else "no row has failed")
        voice.end(Exit.DONE, totals=totals_json(ledger.totals()))


@_command
def cancel(
    ctx: typer.Context,
    rows: RowsArgument = None,
    all: Annotated[bool, _option("--all", help="All rows that are queued or at Sume.")] = False,
    yes: YesOption = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drop queued rows; ask Sume to cancel the rest.

    Sume refuses once it has begun with a job: that renders on, and is paid for. A row that
    may have been sent is refused; run settles it first.

    Example: sume-resume cancel harbour market
    """
    voice, path = _begin(ctx, as_json, db)
    if bool(rows) == all:
        raise UsageError("name the rows to cancel, or give --all, and not both")
    with contextlib.ExitStack() as stack:
        ledger = stack.enter_context(_open_to_write(voice, path))
        can = (Status.QUEUED, *OPEN)
        jobs = _named(ledger, rows or [])
        jobs += [job for status in can if all for job in ledger.with_status(status)]
        _check_all(jobs, cancel_row_refusal)
        queued = [job for job in jobs if job.status is Status.QUEUED]
        asked = [job for job in jobs if job.status in OPEN]
        client = stack.enter_context(_client_for(ledger)) if asked else None
        parts = [f"drop {_list(queued)}"] if queued else []
        parts += [f"ask Sume to cancel {_list(asked)}"] if asked else []
        if parts:
            _confirm(voice, f"{' and '.join(parts).capitalize()}?", yes)
        moved = _drop_queued(ledger, queued, voice)
        asked += [job for job in moved if job.status in OPEN]
        sending = ledger.with_status(Status.SENDING) if all else []
        left = {job.id: job for job in [*moved, *sending] if job.status not in OPEN}
        for job in left.values():
            _tell_refused(voice, job, cancel_row_refusal(job) or "was sent in the meantime")
        code, refused = Exit.NOT_ALL_COMPLETED if left else Exit.DONE, len(left)
        if asked:
            ledger.on_busy = _wait_a_minute
            try:
                api, _ = client or stack.enter_context(_client_for(ledger))
                code, more = _ask_to_cancel(ledger, api, asked, voice, code)
            except (UsageError, AccountError) as exc:
                # A run took rows while the question was open, and there is no one to ask.
                code, more = Exit.ACCOUNT, len(asked)
                for job in asked:
                    _tell_refused(
                        voice, job, f"was sent in the meantime; Sume was not asked: {exc}"
                    )
            refused += more
        totals = ledger.totals()
        if all and totals.by_status[Status.REVIEW]:
            voice.say(
                f"left as they are: {counted(totals.by_status[Status.REVIEW], 'row')} in review"
            )
        if not jobs and not left:
            voice.say("no row is queued or at Sume")
        voice.end(code, refused=refused, totals=totals_json(totals))


def _wait_a_minute(exc: LedgerBusy, tries: int) -> None:
    """Wait for another process that writes: what Sume was asked must be recorded."""
    if tries >= BUSY_TRIES:
        raise exc


def _drop_queued(ledger: Ledger, jobs: Sequence[Job], voice: Voice) -> list[Job]:
    """Drop the rows that are queued still; return those that a run took in the meantime."""
    dropped, moved = [], []
    with ledger.transaction():
        for job in jobs:
            now = ledger.job(job.id)
            if now.status is Status.QUEUED and now.latest:
                why = "dropped by a person before it was bought"
                dropped.append(ledger.record_dropped(now, Clock().wall_ms(), why))
            else:
                moved.append(now)
    for job in dropped:
        _tell_row(voice, Status.QUEUED, job, "dropped; it was not bought")
    return moved


def _tell_refused(voice: Voice, job: Job, why: str) -> None:
    voice.say(f"row '{job.row}' {why}")
    voice.tell("refused", row=job.row, job_id=job.job_id, why=why)


def _ask_to_cancel(
    ledger: Ledger, api: Sume, jobs: Sequence[Job], voice: Voice, code: Exit
) -> tuple[Exit, int]:
    """Ask Sume to cancel jobs, one after the other; return the exit code and the refusals."""
    refused, done = 0, 0
    try:
        for before, job, refusal in cancel_jobs(ledger, api, Clock(), jobs, voice.say):
            done += 1
            if refusal:
                refused += 1
                unknown = refusal.startswith(NO_ANSWER)
                state = "may be cancelled or not" if unknown else "is not cancelled"
                _tell_refused(voice, job, f"{state}: {refusal}")
                if job.status in OPEN:
                    voice.say("sume-resume run reads how it ends; what Sume makes is paid for")
            elif job.status in OPEN:
                voice.say(f"row '{job.row}': Sume takes the wish; sume-resume run reads the rest")
            elif job.status is not before.status:
                _tell_row(voice, before.status, job, str(job.status))
            else:
                voice.say(f"row '{job.row}': is {job.status} already")
    except AccountError as exc:
        left = len(jobs) - done
        voice.say(f"error: {exc}; Sume was not asked about {counted(left, 'row')}")
        voice.tell("error", text=str(exc))
        return exc.exit_code, refused + left
    return Exit.NOT_ALL_COMPLETED if refused else code, refused


@contextlib.contextmanager
def _client_for(ledger: Ledger) -> Iterator[tuple[Sume, Account]]:
    """Give a client of the account that a ledger belongs to: a simulated one's is the stand-in.

    Raises UsageError and AccountError, with nothing changed.
    """
    clock = Clock()
    with contextlib.ExitStack() as stack:
        if ledger.meta("origin") == STAND_IN:
            account = stack.enter_context(StandIn(stand_in_state(ledger.place)))
        else:
            account = account_from(os.environ)
        check_account(ledger, account)
        api = client_factory(account, clock)()
        stack.callback(api.close)
        yield api, account


@_command
def resolve(
    ctx: typer.Context,
    rows: RowsArgument = None,
    job_id: Annotated[
        str | None,
        _option("--job-id", metavar="ID", help="Its job at Sume is this one; it is read first."),
    ] = None,
    resend: Annotated[
        bool, _option("--resend", help="Buy it again; this may pay twice for one row.")
    ] = False,
    drop: Annotated[
        bool, _option("--drop", help="Give it up; what it may have cost stays unknown.")
    ] = False,
    yes: YesOption = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Settle rows that need review.

    Their notes say what for: sume-resume status ROW.

    Example: sume-resume resolve harbour --job-id job_54577a8cfdbd
    """
    voice, path = _begin(ctx, as_json, db)
    ways = [job_id is not None, resend, drop]
    if not rows or sum(ways) != 1:
        ways_ = "--job-id ID, --resend and --drop"
        raise UsageError(f"name the rows to settle, and exactly one of {ways_}")
    if job_id is not None and (len(rows) > 1 or not re.fullmatch(_JOB_ID, job_id)):
        raise UsageError("--job-id: expected the id of one job, for one row")
    with _open_to_write(voice, path) as ledger:
        jobs = _named(ledger, rows)
        _check_all(jobs, lambda job: resolve_refusal(job, resend))
        if job_id is not None:
            _resolve_as(ledger, jobs[0], job_id, yes, voice)
        elif resend:
            doubt = "This may pay twice, since it may have been bought already."
            _confirm(voice, f"{doubt} Buy again: {_list(jobs)}?", yes)
            voice.say(doubt)
            with ledger.transaction():
                again = [ledger.record_resent(job, Clock().wall_ms()) for job in jobs]
            for job in again:
                words = f"attempt {job.attempt} is queued; sume-resume run sends it"
                _tell_row(voice, None, job, words)
        else:
            lost = "If Sume has a job for it, that was paid for, and is not named here."
            _confirm(voice, f"{lost} Give up: {_list(jobs)}?", yes)
            why = "given up by a person; it may have been bought"
            with ledger.transaction():
                dropped = [ledger.record_dropped(job, Clock().wall_ms(), why) for job in jobs]
            for job in dropped:
                words = "given up; what it may have cost stays unknown"
                _tell_row(voice, Status.REVIEW, job, words)
        voice.end(Exit.DONE, totals=totals_json(ledger.totals()))


def _resolve_as(ledger: Ledger, job: Job, job_id: str, yes: bool, voice: Voice) -> None:
    """Give a row the job that a person names, once Sume says that it knows it."""
    with _client_for(ledger) as (api, account):
        reading = look_up(ledger, api, account, job.kind, job_id)
    row = f"Row '{job.row}' ({job.kind}, {job.model}, '{inert(job.prompt, 60)}')"
    _confirm(voice, f"{row} is job {job_id}, which Sume calls {reading.word}?", yes)
    found = ledger.record_found(job, job_id, Clock().wall_ms())
    words = f"is job {job_id}; sume-resume run reads it to its end"
    _tell_row(voice, job.status, found, words)


@_command
def backup(
    ctx: typer.Context,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The copy to make.", show_default=False)
    ],
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy the ledger, also during a run.

    The copy is made in one go, and is a ledger like any other. A file that is there is never
    replaced.

    Example: sume-resume backup jobs-2026-11-29.db
    """
    voice, path = _begin(ctx, as_json, db)
    with _open(voice, path) as ledger:
        # What was simulated needs its stand-in's memory, or its jobs are not known.
        memory, copy = stand_in_state(path), stand_in_state(Path(file))
        simulated = ledger.meta("origin") == STAND_IN and memory.exists()
        if simulated:
            check_free(copy)
        ledger.copy_to(Path(file))
        if simulated:
            copy_stand_in(memory, copy)
        totals = ledger.totals()
    voice.say(f"{file}: a copy of {path}, {counted(totals.rows, 'row')}")
    voice.tell("backup", file=file, rows=totals.rows)
    voice.end(Exit.DONE, totals=totals_json(totals))


@_command
def move(
    ctx: typer.Context,
    dest: Annotated[
        str | None,
        typer.Argument(
            metavar="[DEST]", help="A new file, or a postgresql:// URL.", show_default=False
        ),
    ] = None,
    undo: Annotated[
        bool, _option("--undo", help="Give up a move that has not reached its place.")
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move the ledger, from a file to Postgres or back.

    Also in the middle of a batch: nothing is bought twice. From its start on the old place
    sends nothing. After a kill the same command goes on.

    Example: sume-resume move postgresql://clips@db.example/clips
    """
    voice, path = _begin(ctx, as_json, db)
    if (dest is None) != undo:
        raise UsageError("name the new place, or give --undo, and not both")
    with contextlib.ExitStack() as stack:
        if isinstance(path, Path) and path.exists():
            stack.enter_context(RunLock(path))
        ledger = stack.enter_context(_open(voice, path))
        if dest is None:
            _undo_move(ledger, voice)
        else:
            _move(ledger, place_of(dest), voice)
        totals = totals_json(ledger.totals())
    voice.end(Exit.DONE, totals=totals)


def _move(ledger: Ledger, place: Place, voice: Voice) -> None:
    if place == ledger.place:
        raise UsageError(f"{place}: is where it is")
    if isinstance(place, Path):
        check_new_name(place)
    memory, copy = stand_in_state(ledger.place), stand_in_state(place)
    simulated = ledger.meta("origin") == STAND_IN and memory.exists()
    if simulated and memory != copy and not copy.exists():
        # What was simulated needs its stand-in's memory, or its jobs are not known.
        copy_stand_in(memory, copy)
    move_ledger(ledger, place, Clock(), voice.say)
    voice.say(f"{ledger.place}: was moved to {place}; name that with --db from now on")
    voice.tell("moved", place=str(place))


def _undo_move(ledger: Ledger, voice: Voice) -> None:
    """Let a ledger go on whose move did not reach its place. Raises LedgerError."""
    move, _, where = (ledger.meta("moving") or "").partition(" ")
    if ledger.meta("moved") is not None or not move:
        raise LedgerError(ledger.moved() or f"{ledger.place}: is not being moved")
    place = place_of(where)
    if ledger_exists(place):
        with open_ledger(place) as target:
            if target.meta("move") == move:
                raise LedgerError(
                    f"{where}: has all of it already; finish with: sume-resume move"
                    f" {shell_word(where)}"
                )
    ledger.record_move_undone()
    voice.say(f"{ledger.place}: is not moved, and goes on")


@_command
def audit(
    ctx: typer.Context,
    prices: PricesOption = None,
    tolerance: Annotated[
        float,
        _option(
            "--tolerance",
            metavar="PERCENT",
            parser=_number(0, "a number of percent"),
            help="Flag costs that differ by more than this (default 1).",
        ),
    ] = 1.0,
    remote: Annotated[
        bool, _option("--remote", help="Read each job afresh first; record costs that changed.")
    ] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare what was billed with the price list.

    Exit 1 if a cost differs from its price by more than the tolerance, or is not known for a
    job that has ended.

    Example: sume-resume audit --prices prices.toml --remote
    """
    voice, path = _begin(ctx, as_json, db)
    known = _read_prices(prices)
    with _open(voice, path) as ledger:
        strange = _audit_remote(ledger, voice) if remote else 0
        found = [audited(job, known, tolerance) for job in ledger.sent()]
        flagged = [one for one in found if one.flag]
        for one in found:
            voice.tell("audited", **audited_json(one))
        if not as_json:
            for line in audit_lines(found):
                print(line)
        for one in flagged:
            voice.say(f"row '{one.job.row}' (attempt {one.job.attempt}): {one.flag}")
        voice.say(f"{len(flagged)} of {counted(len(found), 'attempt')} flagged")
        blind = [one for one in found if one.expected_micros is None]
        if blind:
            helps = "name a list that has their models: --prices FILE"
            voice.say(f"{len(blind)} without a known price, and not compared; {helps}")
        if strange:
            voice.say(f"jobs that Sume does not know, or did not tell of: {strange}")
        bad = bool(flagged or strange)
        code = Exit.NOT_ALL_COMPLETED if bad else Exit.DONE
        totals = totals_json(ledger.totals())
    facts = {"flagged": len(flagged), "not_compared": len(blind), "unknown_to_sume": strange}
    voice.end(code, **facts, totals=totals)


def _read_prices(name: str | None) -> Prices | None:
    """Read the price list that a person names. Raises UsageError and InputError."""
    if name is None:
        return None
    with contextlib.ExitStack() as stack:
        data = _open_input(name, stack).read(MAX_LINE_BYTES)
    try:
        return parse_prices(data.removeprefix(_BOM).decode(), name)
    except UnicodeDecodeError as exc:
        raise InputError([f"{inert(name, 200)}: the text is not UTF-8"]) from exc


def _audit_remote(ledger: Ledger, voice: Voice) -> int:
    """Read every job afresh, record what changed, and name what one side does not know.

    Returns how many jobs of this ledger Sume does not know, or did not tell of.
    """
    strange = 0
    with _client_for(ledger) as (api, _):
        for job, trouble, was in reread(ledger, api, Clock()):
            if trouble:
                strange += 1
                voice.say(f"row '{job.row}': job {job.job_id}: {trouble}")
                voice.tell("unread", row=job.row, job_id=job.job_id, why=trouble)
            elif was != job.cost_micros:
                text = f"cost was ${show_usd(was) or '?'}, is ${show_usd(job.cost_micros) or '?'}"
                _tell_row(voice, job.status, job, text)
        others, trouble = jobs_of_nobody(ledger, api)
    if trouble:
        voice.say(f"Sume's list of jobs could not be read ({trouble})")
    for id in others:
        voice.say(f"for information: job {id} is at Sume, and no row of this ledger names it")
        voice.tell("other_job", job_id=id)
    return strange


@_command
def drill(
    ctx: typer.Context,
    db: DbOption = None,
    random: Annotated[
        int,
        _option(
            "--random", metavar="N", min=0, max=10_000, help="N more trials, killed at any moment."
        ),
    ] = 0,
    seed: Annotated[
        int, _option("--seed", metavar="S", help="Tells the moments of --random (default 1).")
    ] = 1,
    only: Annotated[
        str | None, _option("--only", metavar="LINE", help="Repeat one line of a drill.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Kill runs at every point and count the charges.

    Real processes against a stand-in on this machine: needs no network and no API key, buys
    nothing, and touches no file of yours. Exit 0 if every line is clean.

    Example: sume-resume drill --random 20
    """
    import tempfile

    voice, path = _begin(ctx, as_json, db)
    server = path if isinstance(path, Dsn) else None
    beside = path.absolute().parent if isinstance(path, Path) else None
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".sume-resume-drill-", dir=beside))
    except OSError as exc:
        raise UsageError(f"--db: {beside}: cannot be written: {exc.strerror}") from exc
    with _scratch(scratch):
        with Bench(scratch, Path(__file__).absolute(), os.environ, server) as bench:
            # A run without kills tells what there is to kill.
            first = bench.trial(DrillLine())
            lines = _chosen(first, random, seed, only)
            if server is not None:
                # A second runner is welcome there.
                lines = [line for line in lines if line.point != SECOND_RUNNER]
            missed = [name for _, name in crash_methods() if not first.counts.get(name)]
            voice.tell("drill", lines=len(lines), not_reached=missed, folder=str(scratch))
            done = _drill_all(bench, first, lines, voice)
        failed = [result for result in done if not result.clean]
        _show_drill(done, missed, voice)
        for result in failed:
            again = f" --seed {seed}" if result.line.kills_s else ""
            voice.say(
                f"{result.line.name}: {'; '.join(result.problems) or 'a double or a lost row'}\n"
                f"  repeat it: sume-resume drill --only '{result.line.name}'{again}"
            )
        clean = f"{len(done) - len(failed)} of {len(done)} lines clean"
        if not failed:
            clean += f"; {sum(result.charges for result in done)} charges, none twice"
        voice.say(clean)
        code = Exit.NOT_ALL_COMPLETED if failed else Exit.DONE
    voice.end(code, lines=len(done), failed=len(failed))


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[None]:
    """Take a folder away at the end, whatever happens."""
    import shutil

    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _chosen(first: Drilled, random: int, seed: int, only: str | None) -> list[DrillLine]:
    """Return the trials that were asked for; where the first one is not clean, that alone."""
    if not first.clean:
        return [first.line]
    if only is not None and (match := re.fullmatch(r"random:([0-9]{1,6})", only)):
        return [random_line(int(match[1]), seed)]
    lines = [first.line, *drill_lines(first.counts)]
    lines += [random_line(number, seed) for number in range(1, random + 1)]
    if only is None:
        return lines
    chosen = [line for line in lines if line.name == only]
    if not chosen:
        raise UsageError(f"--only: no line '{inert(only, 80)}'; the table of a drill names them")
    return chosen


def _drill_all(
    bench: Bench, first: Drilled, lines: Sequence[DrillLine], voice: Voice
) -> list[Drilled]:
    """Run the trials but the first, which was run; show how far they are.

    Returns them in the order of their lines.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = make_console(stderr=True)
    shown = _is_screen(sys.stderr) and not voice.shares_a_terminal()
    order = {line: place for place, line in enumerate(lines)}
    rest = bench.trials([line for line in lines if line != first.line])
    done: list[Drilled] = []
    failed = 0
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not shown) as progress:
        task = progress.add_task("drilling", total=len(lines))
        for result in chain([first] if first.line in order else [], rest):
            done.append(result)
            failed += not result.clean
            progress.update(task, advance=1, description=f"drilling, {failed} not clean")
            voice.tell("line", **drilled_json(result))
    return sorted(done, key=lambda result: order[result.line])


def _show_drill(done: Sequence[Drilled], missed: Sequence[str], voice: Voice) -> None:
    if voice.as_json:
        return
    rows = [drilled_cells(result) for result in done]
    if sys.stdout.isatty():
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for n, name in enumerate(DRILL_COLUMNS):
            table.add_column(name, justify="left" if n == 0 else "right", no_wrap=n > 0)
        for result, row in zip(done, rows, strict=True):
            table.add_row(*row, style="" if result.clean else "bold red")
        make_console().print(table)
    else:
        for line in aligned([DRILL_COLUMNS, *rows]):
            print(line)
    if missed:
        print(f"not reached by these rows: {', '.join(missed)}")


# --- end ---------------------------------------------------------------------


def main() -> None:
    """Run the command line. Text that a console cannot show is replaced, never an error."""
    # A daemon may have closed them.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  open to the end
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # What a parent told this process to ignore (nohup) stays ignored.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _raise_stopped)
    code: object = Exit.DONE
    try:
        app(prog_name="sume-resume")
    except SystemExit as exc:
        code = exc.code
    except (Stopped, KeyboardInterrupt) as exc:
        # Met before a command began, or while it said its last words.
        signum = exc.signum if isinstance(exc, Stopped) else signal.SIGINT
        code = Exit(128 + signum)
    except OSError as exc:
        # Met before a command began, where the boundary is: --version on a full disk.
        _complain(f"error: {exc.strerror}")
        code = Exit.LEDGER
    sys.exit(_flushed(code))


def _raise_stopped(signum: int, frame: object) -> None:
    # Once is enough: what ends must be able to end.
    signal.signal(signum, signal.SIG_IGN)
    raise Stopped(signum)


def _flushed(code: object) -> Any:
    """Write what is left; return the exit code, which says so when stdout found no room.

    Python would flush once more at its end, and complain of a reader that left.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as exc:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if stream is sys.stdout and not isinstance(exc, BrokenPipeError):
                _complain(f"error: stdout cannot be written: {exc.strerror}")
                code = code or Exit.LEDGER
    return code


if __name__ == "__main__":
    main()
