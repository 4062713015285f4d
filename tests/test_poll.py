"""Every fault of a read, against a real server: no row is failed, lost or bought again by one."""

from __future__ import annotations

import itertools
import json
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from conftest import Desk, FakeClock, clips
from servers import Act, FakeJob, FakeSume, Reply, Request, closed_port
from servers import error as err

import sume_resume
from sume_resume import Reading, RowChanged, Said, Status, Sume

PAGE = b"<html><body>Bad gateway</body></html>"
HTML = Reply(502, PAGE, {"Content-Type": "text/html"})
YEAR_S = 365 * 86_400.0
# What waiting and rounding to ms may add to a time that a test measures.
SLACK_S = 0.05

# When a GET arrived, in awake seconds, and for which path.
Reads = list[tuple[float, str]]


@pytest.fixture
def reads(desk: Desk) -> Reads:
    found: Reads = []

    def watch(request: Request) -> None:
        if request.method == "GET":
            found.append((desk.clock.awake_s(), request.path))

    desk.server.watch = watch
    return found


def accept_all(desk: Desk, count: int, **more: Any) -> None:
    """Add rows and let Sume accept them; none is read yet, and no request is left in mind."""
    desk.add(*clips(count), **more)
    desk.run(deadline_s=1.0)
    assert len(desk.server.charges) == count
    assert {job.status for job in desk.jobs().values()} == {"pending"}
    desk.server.requests.clear()
    desk.events.clear()


def gaps(reads: Reads) -> list[float]:
    return [later - sooner for (sooner, _), (later, _) in itertools.pairwise(reads)]


def most_in_window(reads: Reads, window_s: float = 1.0) -> int:
    most, inside = 0, deque[float]()
    for at, _ in reads:
        inside.append(at)
        while inside[0] <= at - window_s:
            inside.popleft()
        most = max(most, len(inside))
    return most


def of_row(job: FakeJob) -> str:
    """The row of a job, by its prompt."""
    return "r" + str(json.loads(job.body)["prompt"]).removeprefix("clip ").removesuffix(".")


def read_of(server: FakeSume, request: Request) -> str:
    """The row that a GET asks for."""
    return of_row(server.jobs[request.path.split("/")[3]])


def says(status: object, **more: Any) -> Reply:
    return Reply(200, {"status": status} | more)


def results(desk: Desk) -> list[Request]:
    return [request for request in desk.server.gets if request.path.endswith("/result")]


def events_of(desk: Desk, row: str = "r1") -> Counter[str]:
    return Counter(desk.history(row))


# --- status words (B19) ---


@pytest.mark.parametrize("restarts", [1, 3])
def test_an_unknown_word_stays_open_with_one_notice(desk: Desk, restarts: int) -> None:
    accept_all(desk, 1)
    desk.server.on_read = says("on_hold")
    for _ in range(restarts):
        desk.events.clear()
        ending = desk.run(deadline_s=200.0)
        assert ending.deadline
        assert sum("on_hold" in notice for notice in desk.notices) == 1
    job = desk.job()
    assert job.status == "in_progress"
    assert job.sume_status == "on_hold"
    assert job.poll_errors == 0
    assert len(desk.server.gets) <= restarts * 200 / 15
    desk.server.on_read = None
    desk.run()
    assert desk.job().status == "completed"
    assert desk.server.posts == []


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("aborted", "failed"),
        ("Completed ", "completed"),
        ("COMPLETED", "completed"),
        ("CANCELED", "cancelled"),
        ("expired", "expired"),
        ("Ready", "completed"),
        ("errored", "failed"),
    ],
)
def test_a_last_word_in_any_spelling(desk: Desk, word: str, status: str) -> None:
    accept_all(desk, 1)
    desk.server.on_read = says(word, usage={"cost": 0.1}, url="https://media.invalid/a.mp4")
    desk.run()
    job = desk.job()
    assert job.status == status
    assert (job.sume_status or "").strip() == word.strip()
    assert job.next_poll_at is None
    assert job.finished_at is not None
    assert desk.notices == []


@pytest.mark.parametrize(
    "body",
    [
        {"status": None},
        {"status": 7},
        {"status": ""},
        {},
        [],
        err("oops"),
        {"data": {"status": None}},
        PAGE,
        b"",
        b'{"status": "comple',
    ],
    ids=repr,
)
def test_a_read_without_a_status_is_counted_and_read_again(desk: Desk, body: Any) -> None:
    accept_all(desk, 1)
    desk.server.reads.extend([Reply(200, body)] * 5)
    desk.run()
    job = desk.job()
    assert (job.status, job.poll_errors) == ("completed", 5)
    assert events_of(desk)["poll_error"] == 5
    assert len(desk.server.gets) == 6
    assert desk.server.posts == []


@pytest.mark.parametrize("enveloped", [False, True])
@pytest.mark.parametrize("kind", ["video", "image"])
def test_both_planes_are_read(desk: Desk, kind: str, enveloped: bool) -> None:
    """The answer under `data` and at the top, with the words of either plane."""
    accept_all(desk, 1, kind=kind)

    def wrap(job: dict[str, Any]) -> Reply:
        return Reply(200, {"data": job, "request_id": "req_1"} if enveloped else job)

    done = {
        "status": "COMPLETED",
        "sume_status": "completed",
        "terminal": True,
        "usage": {"captured_usd_micros": 5, "refunded_usd_micros": 2},
        "result": {"artifacts": [{"url": "https://media.invalid/a.mp4?sig=1"}]},
    }
    desk.server.reads.extend([wrap({"status": "IN_QUEUE"}), wrap({"sume_status": "processing"})])
    desk.server.on_read = wrap(done)
    desk.server.results.append(wrap(done))
    desk.run()
    job = desk.job()
    assert (job.status, job.cost_micros, job.poll_errors) == ("completed", 3, 0)
    with sume_resume.open_ledger(desk.place) as ledger:
        (output,) = ledger.outputs(job)
    assert output.url == "https://media.invalid/a.mp4"


@pytest.mark.parametrize("with_url", [False, True])
def test_terminal_with_an_unknown_word(desk: Desk, with_url: bool) -> None:
    """A result makes it completed; without one a person looks."""
    accept_all(desk, 1)
    url = {"url": "https://media.invalid/a.mp4"} if with_url else {}
    desk.server.final = lambda job: {"status": "wrapped", "terminal": True} | url
    desk.run()
    job = desk.job()
    assert job.status == ("completed" if with_url else "review")
    assert len(results(desk)) == (0 if with_url else 1)
    if with_url:
        assert job.sume_status == "wrapped"
    else:
        assert "wrapped" in (job.note or "")
    desk.run()
    assert desk.server.posts == []


def test_terminal_with_an_unknown_word_and_a_url_in_the_result(desk: Desk) -> None:
    accept_all(desk, 1)
    desk.server.on_read = says("wrapped", terminal=True)
    desk.run()
    assert desk.job().status == "completed"


# --- ended, and something is missing (B20, B21) ---


def test_completed_without_a_url(desk: Desk) -> None:
    """B20: the result route is read once, then it is completed with a note, its cost kept."""
    accept_all(desk, 1)
    desk.server.final = lambda job: {"status": "completed", "usage": {"cost": 0.1}}
    desk.run()
    job = desk.job()
    assert (job.status, job.cost_micros) == ("completed", 100_000)
    assert "result" in (job.note or "")
    assert len(results(desk)) == 1
    asked = len(desk.server.requests)
    desk.run()
    assert len(desk.server.requests) == asked
    assert desk.server.posts == []


def test_a_url_that_only_the_result_names(desk: Desk) -> None:
    accept_all(desk, 1)
    desk.server.on_read = says("completed", usage={"cost": 0.1})
    body = {"data": {"status": "COMPLETED", "result": {"video_url": "https://m.invalid/a.mp4"}}}
    desk.server.results.append(Reply(200, body))
    desk.run()
    job = desk.job()
    assert (job.status, job.note, job.cost_micros) == ("completed", None, 100_000)
    with sume_resume.open_ledger(desk.place) as ledger:
        assert [output.url for output in ledger.outputs(job)] == ["https://m.invalid/a.mp4"]


@pytest.mark.parametrize(
    ("usage", "micros"),
    [
        ({"usage": {"cost": 0}}, 0),
        ({"usage": {"captured_usd_micros": 9, "refunded_usd_micros": 9}}, 0),
        ({}, None),
    ],
    ids=["cost 0", "refunded", "no usage"],
)
def test_completed_with_an_error_and_no_result_is_failed(
    desk: Desk, usage: dict[str, Any], micros: int | None
) -> None:
    """B21: filtered, not a success; what it cost is as sent, never guessed."""
    accept_all(desk, 1)
    error = err("content_filtered", "the output was filtered")
    desk.server.final = lambda job: {"status": "completed"} | error | usage
    desk.run()
    job = desk.job()
    assert (job.status, job.sume_status, job.cost_micros) == ("failed", "completed", micros)
    assert "filtered" in (job.note or "")
    with sume_resume.open_ledger(desk.place) as ledger:
        assert ledger.totals().cost_unknown_rows == (micros is None)
    desk.run()
    assert desk.server.posts == []


def test_completed_with_an_error_and_a_result_is_completed(desk: Desk) -> None:
    accept_all(desk, 1)
    desk.server.on_read = says(
        "completed", usage={"cost": 0.1}, url="https://m.invalid/a.mp4", error="a warning"
    )
    desk.run()
    assert desk.job().status == "completed"
    assert "a warning" in (desk.job().note or "")


def test_completed_without_a_cost_is_read_again_three_times(desk: Desk, reads: Reads) -> None:
    accept_all(desk, 1)
    desk.server.final = lambda job: {"status": "completed", "url": "https://m.invalid/a.mp4"}
    desk.run()
    assert gaps(reads) == pytest.approx([2.0, 4.0, 8.0], abs=SLACK_S)
    job = desk.job()
    assert (job.status, job.cost_micros, job.poll_errors) == ("completed", None, 0)
    with sume_resume.open_ledger(desk.place) as ledger:
        assert ledger.totals().cost_unknown_rows == 1
    desk.run()
    assert len(reads) == 4


@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_cost_that_arrives_late(desk: Desk, reads: Reads, late: int) -> None:
    accept_all(desk, 1)
    desk.server.reads.extend([says("completed", url="https://m.invalid/a.mp4")] * late)
    desk.server.on_read = says("completed", usage={"cost": "0.25"})
    desk.run()
    job = desk.job()
    assert (job.status, job.cost_micros) == ("completed", 250_000)
    assert len(reads) == 1 + late
    # The file that only the first answer named is not lost.
    with sume_resume.open_ledger(desk.place) as ledger:
        assert [output.url for output in ledger.outputs(job)] == ["https://m.invalid/a.mp4"]


def test_absence_never_erases_a_known_cost(desk: Desk) -> None:
    accept_all(desk, 1)
    desk.server.reads.append(says("processing", usage={"cost": 0.5}))
    desk.server.on_read = says("completed", url="https://m.invalid/a.mp4")
    desk.run()
    assert (desk.job().status, desk.job().cost_micros) == ("completed", 500_000)


def test_a_later_cost_replaces_and_is_not_added(desk: Desk) -> None:
    accept_all(desk, 1)
    desk.server.reads.append(says("processing", usage={"cost": 0.5}))
    desk.server.on_read = says("completed", url="u", usage={"cost": 0.3})
    desk.run()
    assert desk.job().cost_micros == 300_000
    with sume_resume.open_ledger(desk.place) as ledger:
        assert ledger.totals().cost_micros == 300_000


# B17: what is no price, as it stands on the wire; and the one that is.
ODD_COSTS = {
    "r1": b"NaN",
    "r2": b"1e999",
    "r3": b"9223372036854775808",
    "r4": b'"0.10"',
    "r5": b"-1",
    "r6": b"true",
    "r7": b"[]",
    "r8": b"1e9999999999999999999",
}


def test_odd_costs(desk: Desk) -> None:
    """B17: each row completes, one has a cost, the others are unknown with their text kept."""
    accept_all(desk, len(ODD_COSTS))

    def act(server: FakeSume, request: Request) -> Reply:
        cost = ODD_COSTS[read_of(server, request)]
        return Reply(200, b'{"status":"completed","url":"u","usage":{"cost":%s}}' % cost)

    desk.server.on_read = act
    desk.run(deadline_s=200.0)
    jobs = desk.jobs()
    assert {row: str(job.status) for row, job in jobs.items()} == dict.fromkeys(
        ODD_COSTS, "completed"
    )
    costs = {row: job.cost_micros for row, job in jobs.items()}
    assert costs == dict.fromkeys(ODD_COSTS) | {"r4": 100_000}
    for row, text in {"r1": "nan", "r2": "999", "r3": "9223372036854775808", "r5": "-1"}.items():
        assert text in (jobs[row].usage or "").lower()
    with sume_resume.open_ledger(desk.place) as ledger:
        totals = ledger.totals()
    assert (totals.cost_micros, totals.cost_unknown_rows) == (100_000, len(ODD_COSTS) - 1)


def test_an_absurd_cost_is_unknown_and_harms_no_sum(desk: Desk) -> None:
    """What a server says of two rows must not make the ledger unreadable."""
    accept_all(desk, 2)
    usage = {"captured_usd_micros": 2**63 - 1}
    desk.server.on_read = says("completed", url="u", usage=usage)
    desk.run()
    assert {job.status for job in desk.jobs().values()} == {"completed"}
    assert {job.cost_micros for job in desk.jobs().values()} == {None}
    with sume_resume.open_ledger(desk.place) as ledger:
        assert ledger.totals().cost_unknown_rows == 2


# --- results ---


def test_an_images_result_is_always_read_once(desk: Desk) -> None:
    accept_all(desk, 3, kind="image")
    desk.run()
    assert {job.status for job in desk.jobs().values()} == {"completed"}
    assert len(results(desk)) == 3
    assert len({request.path for request in results(desk)}) == 3
    paths = {request.path.rsplit("/", 1)[-1] for request in desk.server.gets}
    assert paths == {"status", "result"}


def test_a_videos_result_is_not_read_when_all_is_there(desk: Desk) -> None:
    accept_all(desk, 3)
    desk.run()
    assert results(desk) == []
    assert len(desk.server.gets) == 3


def test_a_result_that_is_not_ready_keeps_polling(desk: Desk) -> None:
    accept_all(desk, 1, kind="image")
    desk.server.results.append(Reply(409, err("job_not_completed")))
    desk.run()
    job = desk.job()
    assert job.status == "completed"
    assert job.note is None
    assert len(results(desk)) == 2
    assert len(desk.server.gets) == 4


@pytest.mark.parametrize(
    "act",
    [
        Reply(409, err("job_not_completed")),
        Reply(404, err("not_found")),
        Reply(410, err("gone")),
        Reply(500, err("internal_error")),
        HTML,
        Reply(200, b"[" * 100_000),
    ],
    ids=["not ready", "404", "410", "500", "502 page", "deep"],
)
def test_a_result_that_never_comes_ends_with_a_note(desk: Desk, act: Reply) -> None:
    """The clip is paid for and done: it is completed, not failed, and its cost is kept."""
    accept_all(desk, 1, kind="image")
    desk.server.final = lambda job: {"status": "completed", "usage": {"cost": 0.1}}
    desk.server.results.extend([act] * 6)
    ending = desk.run(deadline_s=2 * 3600.0)
    assert not ending.deadline
    job = desk.job()
    assert (job.status, job.cost_micros) == ("completed", 100_000)
    assert "result" in (job.note or "")
    assert 1 <= len(results(desk)) <= 3
    assert desk.server.posts == []


# --- the job is not found (B22) ---


@pytest.mark.parametrize(
    "misses",
    [
        [Reply(404, err("not_found"))] * 2,
        [Reply(410, err("gone"))] * 2,
        [Reply(404, err("not_found")), Reply(200, err("not_found")), Reply(404, err("not_found"))],
    ],
    ids=["404", "410", "one as a 200"],
)
def test_not_found_right_after_the_accept(desk: Desk, misses: list[Act]) -> None:
    accept_all(desk, 1)
    desk.server.reads.extend(misses)
    desk.run()
    job = desk.job()
    assert (job.status, job.poll_errors) == ("completed", len(misses))
    assert desk.notices == []
    assert desk.server.posts == []


@pytest.mark.parametrize("code", [404, 410])
@pytest.mark.parametrize("restart", [False, True])
def test_not_found_for_good_goes_to_a_person(
    desk: Desk, reads: Reads, code: int, restart: bool
) -> None:
    """After the grace it is for review, never failed; its cost is kept; nothing is bought."""
    accept_all(desk, 2)
    desk.server.reads.extend([says("processing", usage={"cost": 0.5})] * 2)
    desk.server.on_read = Reply(code, err("not_found"))
    if restart:
        desk.run(deadline_s=40.0)
    desk.run()
    for job in desk.jobs().values():
        assert (job.status, job.cost_micros) == ("review", 500_000)
        assert str(job.job_id) in (job.note or "")
        assert job.next_poll_at is None
    assert desk.history("r1").count("poll_error") >= 2
    assert reads[-1][0] - reads[0][0] >= sume_resume.GONE_GRACE_S
    asked = len(reads)
    desk.run()
    assert len(reads) == asked
    assert desk.server.posts == []


def test_the_grace_begins_anew_when_the_job_was_seen(desk: Desk) -> None:
    accept_all(desk, 1)
    gone = Reply(404, err("not_found"))
    desk.server.reads.extend([gone, gone, says("processing")] * 8)
    desk.run()
    assert (desk.job().status, desk.job().poll_errors) == ("completed", 16)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(404, PAGE),
        Reply(404, b""),
        Reply(404, {"detail": "Not Found"}),
        Reply(410, b""),
        Reply(405, b""),
        Reply(302, b"", {"Location": "https://x.invalid/"}),
        Reply(401, err("unauthorized")),
        Reply(403, err("forbidden")),
        Reply(401, b""),
    ],
    ids=lambda reply: f"{reply.code} {reply.body!r}"[:30],
)
def test_a_wrong_route_or_account_halts_and_changes_no_row(desk: Desk, reply: Reply) -> None:
    accept_all(desk, 3)
    before = desk.jobs()
    desk.server.on_read = reply
    ending = desk.run()
    assert ending.halt
    assert "SUME_API_" in ending.halt
    # A claim on Postgres leaves its count behind, and nothing else.
    assert {
        row: job._replace(token=before[row].token) for row, job in desk.jobs().items()
    } == before
    assert len(desk.server.gets) <= 3
    desk.server.on_read = None
    desk.run()
    assert {job.status for job in desk.jobs().values()} == {"completed"}
    assert desk.server.posts == []


def test_401_on_a_read_also_stops_the_submits(desk: Desk) -> None:
    """B28: the key is bad for all; the rows that are left stay queued."""
    desk.add(*clips(30))
    desk.server.on_read = Reply(401, err("unauthorized"))
    ending = desk.run(writes_per_minute=60.0)
    assert ending.halt
    counts = Counter(str(job.status) for job in desk.jobs().values())
    assert set(counts) == {"pending", "queued"}
    assert 10 <= counts["pending"] <= 20


# --- reads that bring nothing (B23, B24, B30) ---


def test_thirty_error_pages_then_completed(desk: Desk, reads: Reads) -> None:
    """B23: counted, the last one shown, ever longer waits, and never failed."""
    accept_all(desk, 1)
    desk.server.reads.extend([HTML] * 30)
    shown: list[Any] = []
    desk.run(during=lambda engine, event: shown.append(getattr(event, "after", None)))
    job = desk.job()
    assert (job.status, job.poll_errors) == ("completed", 30)
    assert job.trouble is None
    troubles = {after.trouble for after in shown if after is not None and after.trouble}
    assert all("HTTP 502" in trouble and "<" not in trouble for trouble in troubles)
    assert troubles
    waits = gaps(reads)
    assert len(waits) == 30
    assert waits[0] <= 16.5 + SLACK_S
    assert all(15.0 <= wait <= 330.0 + SLACK_S for wait in waits)
    assert min(waits[6:]) >= 150.0
    assert desk.server.posts == []


def test_the_backoff_of_errors_ends_with_the_errors(desk: Desk, reads: Reads) -> None:
    accept_all(desk, 1)
    desk.server.reads.extend([HTML] * 6)
    desk.server.reads.extend([says("processing")] * 3)
    desk.run()
    waits = gaps(reads)
    assert max(waits[:6]) >= 150.0
    assert all(wait <= 16.5 + SLACK_S for wait in waits[6:])


@pytest.mark.parametrize("code", [429, 503])
def test_a_pause_of_reads_touches_no_row(desk: Desk, reads: Reads, code: int) -> None:
    accept_all(desk, 5)
    before = {row: (job.poll_errors, job.trouble) for row, job in desk.jobs().items()}
    desk.server.reads.append(Reply(code, err("rate_limit_exceeded"), {"Retry-After": "120"}))
    desk.run(reads_per_minute=600.0)
    jobs = desk.jobs()
    assert {job.status for job in jobs.values()} == {"completed"}
    after = {row: (job.poll_errors, job.trouble) for row, job in jobs.items()}
    # What a broken server says is kept with the row that met it.
    assert sum(errors for errors, _ in after.values()) == (1 if code == 503 else 0)
    if code == 429:
        assert after == before
    assert 120.0 <= gaps(reads)[0] <= 132.0 + SLACK_S
    assert len(reads) == 6


def test_a_pause_of_reads_survives_a_restart(desk: Desk, reads: Reads) -> None:
    accept_all(desk, 2)
    desk.server.reads.append(Reply(429, b"", {"Retry-After": "600"}))
    desk.run(deadline_s=60.0, reads_per_minute=600.0)
    desk.run(deadline_s=60.0)
    assert len(reads) == 1
    desk.run()
    assert {job.status for job in desk.jobs().values()} == {"completed"}
    assert gaps(reads)[0] >= 600.0


@pytest.mark.parametrize("retry_after", ["0", "-1", "9" * 400, "٣", "soon", ""])
def test_useless_retry_after_on_reads_is_no_hot_loop(desk: Desk, retry_after: str) -> None:
    """B27: never faster than the own backoff."""
    accept_all(desk, 20)
    desk.clock.advance(60.0)
    value = retry_after.encode().decode("latin-1")
    desk.server.on_read = Reply(429, err("rate_limit_exceeded"), {"Retry-After": value})
    desk.run(deadline_s=60.0, reads_per_minute=600.0)
    assert 2 <= len(desk.server.gets) <= 10
    assert all(job.poll_errors == 0 for job in desk.jobs().values())


def test_the_last_of_an_allowance_is_not_overdrawn(desk: Desk, reads: Reads) -> None:
    accept_all(desk, 6)
    desk.clock.advance(60.0)
    left = {"RateLimit-Remaining": "0", "RateLimit-Reset": "45"}
    desk.server.reads.append(Reply(200, {"status": "processing"}, left))
    desk.run(reads_per_minute=600.0)
    assert gaps(reads)[0] >= 45.0


def test_a_server_that_allows_ten_reads_a_second(desk: Desk, reads: Reads) -> None:
    """B24: 120 rows due at once; at most five requests over the limit, and all finish."""
    accept_all(desk, 120)
    desk.clock.advance(3600.0)
    allowed: deque[float] = deque()
    over = []

    def act(server: FakeSume, request: Request) -> Reply | None:
        now = desk.clock.awake_s()
        while allowed and allowed[0] <= now - 1.0:
            allowed.popleft()
        if len(allowed) >= 10:
            over.append(now)
            return Reply(429, err("rate_limit_exceeded"), {"Retry-After": "1"})
        allowed.append(now)
        return None

    desk.server.on_read = act
    started = desk.clock.awake_s()
    desk.run(reads_per_minute=600.0)
    jobs = desk.jobs().values()
    assert {job.status for job in jobs} == {"completed"}
    assert len(over) <= 5
    assert all(job.poll_errors == 0 for job in jobs)
    # Paced, and not slowly: ten a second would take 12 s.
    assert 11.0 <= desk.clock.awake_s() - started <= 20.0


def test_a_restart_makes_no_burst(desk: Desk, reads: Reads) -> None:
    accept_all(desk, 200)
    desk.clock.advance(7200.0)
    desk.run(reads_per_minute=600.0)
    assert {job.status for job in desk.jobs().values()} == {"completed"}
    assert len(reads) == 200
    assert most_in_window(reads) <= 11
    assert reads[-1][0] - reads[0][0] >= 20.0


def test_restarts_do_not_refill_the_read_budget(desk: Desk, reads: Reads) -> None:
    accept_all(desk, 40)
    desk.clock.advance(3600.0)
    for _ in range(30):
        desk.run(reads_per_minute=60.0, deadline_s=0.2)
    assert most_in_window(reads, 60.0) <= 60
    assert len(reads) <= 30 * 0.25 + 2


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000 + b"]" * 100_000, b'{"status": "completed", "n": ' + b"9" * 5000 + b"}"],
    ids=["100000 nested arrays", "5000 digits"],
)
def test_one_rows_hostile_answer_is_its_own_trouble(desk: Desk, body: bytes) -> None:
    """B30: the others finish, the row stays open and shows it, the run is not done."""
    accept_all(desk, 3)

    def act(server: FakeSume, request: Request) -> Reply | None:
        return Reply(200, body) if read_of(server, request) == "r2" else None

    desk.server.on_read = act
    ending = desk.run(deadline_s=600.0)
    assert ending.deadline
    jobs = desk.jobs()
    assert [str(job.status) for job in jobs.values()] == ["completed", "pending", "completed"]
    assert jobs["r2"].poll_errors >= 3
    assert jobs["r2"].trouble
    desk.server.on_read = None
    desk.run()
    assert desk.job("r2").status == "completed"
    assert desk.server.posts == []


def test_an_answer_too_large_is_its_own_trouble(desk: Desk) -> None:
    accept_all(desk, 2)
    large = b'{"status": "completed", "x": "' + b"x" * sume_resume.MAX_ANSWER_BYTES + b'"}'

    def act(server: FakeSume, request: Request) -> Reply | None:
        return Reply(200, large) if read_of(server, request) == "r1" else None

    desk.server.on_read = act
    desk.run(deadline_s=30.0)
    assert (desk.job("r1").status, desk.job("r2").status) == ("pending", "completed")
    assert desk.job("r1").poll_errors >= 1


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_one_rows_bad_answers_do_not_starve_the_others(desk: Desk, code: int) -> None:
    """One job that is always answered so, for ever: the others are still read to their end."""
    accept_all(desk, 4)
    desk.clock.advance(60.0)
    desk.server.reads_to_finish = 4

    def act(server: FakeSume, request: Request) -> Reply | None:
        return Reply(code, err("unavailable")) if read_of(server, request) == "r1" else None

    desk.server.on_read = act
    desk.run(deadline_s=300.0, reads_per_minute=600.0)
    jobs = desk.jobs()
    assert jobs.pop("r1").status == "pending"
    assert {row: str(job.status) for row, job in jobs.items()} == dict.fromkeys(jobs, "completed")


# --- when the next read is ---


@pytest.mark.parametrize("enveloped", [False, True])
@pytest.mark.parametrize(
    ("hint", "least", "most"),
    [
        ({"next_poll_after_seconds": 40}, 40.0, 44.0),
        ({"next_poll_after_seconds": 5}, 5.0, 5.5),
        ({"recommended_poll_interval_seconds": 5}, 5.0, 5.5),
        ({"next_poll_after_seconds": 2.5}, 2.5, 2.75),
        ({"next_poll_after_seconds": 10**9}, 300.0, 330.0),
        ({"next_poll_after_seconds": 10**400}, 300.0, 330.0),
        ({"next_poll_after_seconds": 0}, 15.0, 16.5),
        ({"next_poll_after_seconds": -3}, 15.0, 16.5),
        ({"next_poll_after_seconds": None}, 15.0, 16.5),
        ({"next_poll_after_seconds": True}, 15.0, 16.5),
        ({"next_poll_after_seconds": "5"}, 15.0, 16.5),
        ({}, 15.0, 16.5),
    ],
    ids=lambda value: repr(value)[:45],
)
def test_hints(
    desk: Desk, reads: Reads, hint: dict[str, Any], least: float, most: float, enveloped: bool
) -> None:
    accept_all(desk, 1)
    job = {"status": "processing"} | hint
    desk.server.reads.extend([Reply(200, {"data": job} if enveloped else job)] * 3)
    desk.run()
    waits = gaps(reads)
    assert len(waits) == 3
    assert all(least <= wait <= most + SLACK_S for wait in waits)
    assert desk.job().poll_errors == 0


def test_a_poll_interval_that_a_person_asks_for(desk: Desk, reads: Reads) -> None:
    """No hidden floor, and no cap either."""
    desk.add(*clips(1))
    desk.server.reads_to_finish = 4
    desk.run(poll_interval_s=0.2)
    assert all(0.2 <= gap <= 0.22 + SLACK_S for gap in gaps(reads))
    reads.clear()
    desk.add({"id": "x", "prompt": "clip 9."})
    desk.run(poll_interval_s=1200.0)
    assert all(1200.0 <= gap <= 1320.0 + SLACK_S for gap in gaps(reads))
    assert len(reads) == 4


def test_polls_do_not_line_up(desk: Desk, reads: Reads) -> None:
    """Thirty rows accepted within a moment are read apart from each other, never sooner."""
    desk.add(*clips(30))
    desk.server.reads_to_finish = 2
    desk.run()
    first, second = reads[:30], reads[30:]
    start = first[0][0]
    assert len({path for _, path in first}) == 30
    assert first[-1][0] - start >= 1.0
    assert len({round(at, 2) for at, _ in first}) >= 20
    assert second[-1][0] - second[0][0] >= 1.5
    seen: dict[str, float] = {}
    for at, path in reads:
        if path in seen:
            assert 15.0 <= at - seen[path] <= 16.5 + SLACK_S
        seen[path] = at


@pytest.mark.parametrize("ahead_s", [400.0, 86_400.0, YEAR_S])
def test_a_due_time_that_lies_too_far_ahead_is_due_at_once(
    desk: Desk, reads: Reads, ahead_s: float
) -> None:
    accept_all(desk, 1)
    desk.clock.set_back(ahead_s)
    started = desk.clock.awake_s()
    desk.run()
    assert desk.job().status == "completed"
    assert reads[0][0] - started <= 2.0


def test_a_due_time_within_a_hints_reach_is_kept(desk: Desk, reads: Reads) -> None:
    accept_all(desk, 1)
    desk.clock.set_back(200.0)
    started = desk.clock.awake_s()
    desk.run()
    assert 200.0 <= reads[0][0] - started <= 220.0


# --- clocks ---


def once_after(desk: Desk, awake_s: float, act: Callable[[FakeClock], None]) -> Any:
    """Return a listener that moves the clock one time, in the midst of a run."""
    done: list[float] = []
    at = desk.clock.awake_s() + awake_s

    def during(engine: Any, event: Any) -> None:
        if not done and desk.clock.awake_s() >= at:
            done.append(desk.clock.awake_s())
            act(desk.clock)

    during.done = done  # type: ignore[attr-defined]
    return during


JUMPS: dict[str, Callable[[FakeClock], None]] = {
    "suspended for 8 h": lambda clock: clock.suspend(8 * 3600.0),
    "clock a year ahead": lambda clock: clock.set_back(-YEAR_S),
    "clock a year back": lambda clock: clock.set_back(YEAR_S),
}


@pytest.mark.parametrize("jump", JUMPS.values(), ids=JUMPS)
def test_a_jump_of_the_clock_expires_nothing_and_makes_no_storm(
    desk: Desk, reads: Reads, jump: Callable[[FakeClock], None]
) -> None:
    accept_all(desk, 30)
    desk.server.reads_to_finish = 4
    during = once_after(desk, 40.0, jump)
    ending = desk.run(
        during=during, reads_per_minute=600.0, deadline_s=1800.0, job_deadline_s=1200.0
    )
    (at,) = during.done
    assert not ending.deadline
    assert {job.status for job in desk.jobs().values()} == {"completed"}
    assert all(job.poll_errors == 0 for job in desk.jobs().values())
    assert most_in_window(reads) <= 11
    # Each row is read once soon after, and not again before its interval.
    soon = Counter(path for when, path in reads if at <= when < at + 14.0)
    assert set(soon.values()) == {1}
    assert len(soon) == 30
    assert len(reads) == 120
    assert desk.server.posts == []
    assert not any("review" in notice for notice in desk.notices)


@pytest.mark.parametrize("jump", JUMPS.values(), ids=JUMPS)
def test_a_jump_between_two_runs(
    desk: Desk, reads: Reads, jump: Callable[[FakeClock], None]
) -> None:
    accept_all(desk, 30)
    jump(desk.clock)
    ending = desk.run(reads_per_minute=600.0, deadline_s=600.0, job_deadline_s=300.0)
    assert not ending.deadline
    assert {job.status for job in desk.jobs().values()} == {"completed"}
    assert most_in_window(reads) <= 11
    assert len(reads) == 30
    assert desk.server.posts == []


def test_polls_after_a_suspend_do_not_line_up(desk: Desk, reads: Reads) -> None:
    """Also without a read budget: the next interval is spread again."""
    accept_all(desk, 30)
    desk.server.reads_to_finish = 3
    desk.clock.suspend(8 * 3600.0)
    desk.run()
    last = reads[-30:]
    assert last[-1][0] - last[0][0] >= 1.5


# --- the end of a run ---


def test_a_deadline_ends_the_run_with_rows_open(desk: Desk) -> None:
    """B26: the job goes on; running again reads it, and buys nothing."""
    desk.add(*clips(3))
    desk.server.reads_to_finish = 10**9
    ending = desk.run(deadline_s=5.0)
    assert ending.deadline
    assert ending.halt is None
    assert {job.status for job in desk.jobs().values()} == {"pending"}
    assert all(job.job_id for job in desk.jobs().values())
    desk.run(deadline_s=60.0)
    desk.run(deadline_s=60.0)
    jobs = desk.jobs().values()
    assert {job.status for job in jobs} == {"in_progress"}
    assert all(job.poll_errors == 0 and job.note is None for job in jobs)
    assert len(desk.server.posts) == 3
    desk.server.reads_to_finish = 1
    desk.run()
    assert {job.status for job in desk.jobs().values()} == {"completed"}
    assert len(desk.server.posts) == 3


def test_a_job_deadline_gives_up_waiting_and_no_more(desk: Desk, reads: Reads) -> None:
    accept_all(desk, 3)
    desk.server.reads_to_finish = 10**9
    started = desk.clock.awake_s()
    ending = desk.run(job_deadline_s=100.0)
    assert not ending.deadline
    assert 100.0 <= desk.clock.awake_s() - started <= 120.0
    assert {job.status for job in desk.jobs().values()} == {"in_progress"}
    assert all(job.next_poll_at is not None for job in desk.jobs().values())
    assert desk.server.posts == []


def test_a_job_deadline_waits_for_one_read_in_each_run(desk: Desk, reads: Reads) -> None:
    """Every open row is read at least once per run, however short the deadline is."""
    accept_all(desk, 3)
    desk.server.reads_to_finish = 3
    for run in (1, 2, 3):
        assert not desk.run(job_deadline_s=0.1).deadline
        assert len(reads) == 3 * run
        assert len({path for _, path in reads[-3:]}) == 3
    assert {job.status for job in desk.jobs().values()} == {"completed"}
    assert desk.server.posts == []


def test_a_job_deadline_counts_from_the_accept(desk: Desk) -> None:
    """A row that is sent late in a run has its whole time."""
    desk.add(*clips(4))
    desk.server.reads_to_finish = 3
    desk.run(writes_per_minute=1.0, job_deadline_s=60.0)
    assert {job.status for job in desk.jobs().values()} == {"completed"}


def test_a_job_deadline_lets_the_others_finish(desk: Desk) -> None:
    accept_all(desk, 3)

    def act(server: FakeSume, request: Request) -> Reply | None:
        return says("processing") if read_of(server, request) == "r2" else None

    desk.server.on_read = act
    desk.run(job_deadline_s=60.0)
    found = [str(job.status) for job in desk.jobs().values()]
    assert found == ["completed", "in_progress", "completed"]


# --- a last word is the last word (B25) ---


def test_nothing_asks_or_changes_a_row_that_has_ended(desk: Desk) -> None:
    accept_all(desk, 2)
    desk.run()
    before, asked = desk.jobs(), len(desk.server.requests)
    desk.server.on_read = says("processing")
    desk.clock.advance(86_400.0)
    desk.run()
    assert desk.jobs() == before
    assert len(desk.server.requests) == asked


def test_a_slow_answer_that_is_older_changes_no_ended_row(desk: Desk) -> None:
    """B25: the ledger itself refuses, and the history gains nothing."""
    accept_all(desk, 1)
    stale = desk.job()
    desk.run()
    before, history = desk.job(), desk.history()
    reading = Reading(said=Said.STATUS, word="processing", status=Status.IN_PROGRESS)
    with sume_resume.open_ledger(desk.place) as ledger:
        for job in (stale, before):
            with pytest.raises(RowChanged):
                ledger.record_status(job, reading, 1, 2)
            with pytest.raises(RowChanged):
                ledger.record_final(stale, Status.FAILED, reading, None, 1)
    assert desk.job() == before
    assert desk.history() == history


def test_an_answer_that_comes_after_its_deadline_is_not_believed(desk: Desk) -> None:
    """A read overran and was given up; what it says later is older than what is known."""
    accept_all(desk, 1)
    desk.server.reads.append(says("failed"))

    def before(call: Any) -> None:
        assert desk.carrier is not None
        desk.carrier.latency_s = 300.0 if len(desk.server.gets) == 0 else 0.0

    desk.run(before=before)
    desk.run()
    job = desk.job()
    assert (job.status, job.poll_errors) == ("completed", 1)


@pytest.mark.parametrize("older", ["processing", "queued", "on_hold"])
def test_an_older_word_on_a_reread_does_not_take_the_last_word_back(desk: Desk, older: str) -> None:
    """Completed without a cost, then an older state for ever: completed stays (faults.md 3)."""
    accept_all(desk, 1)
    desk.server.reads.append(says("completed", url="https://m.invalid/a.mp4"))
    desk.server.on_read = says(older)
    ending = desk.run(deadline_s=200.0)
    job = desk.job()
    assert (job.status, job.sume_status, ending.deadline) == ("completed", "completed", False)
    assert len(desk.server.gets) <= 5


# --- the network (B29) ---


class Wire:
    """Whether the network is up, for all clients of one test."""

    def __init__(self, port: int) -> None:
        self.dead = httpx.URL(f"http://127.0.0.1:{port}/v1")
        self.is_down: Callable[[], bool] = lambda: False
        self.refused = 0

    def api(self) -> type[Sume]:
        wire = self

        class Unplugged(Sume):
            def _request(self, *args: Any, **parts: Any) -> Any:
                base = self._base
                if wire.is_down():
                    wire.refused += 1
                    self._base = wire.dead
                try:
                    return super()._request(*args, **parts)
                finally:
                    self._base = base

        return Unplugged


def test_two_hours_without_a_network(desk: Desk, reads: Reads) -> None:
    """One line says so, no row changes, and the first success goes on."""
    accept_all(desk, 5)
    before = desk.jobs()
    start = desk.clock.awake_s()
    with closed_port() as port:
        wire = Wire(port)
        wire.is_down = lambda: desk.clock.awake_s() < start + 7200.0
        seen: list[bool] = []

        def during(engine: Any, event: Any) -> None:
            if wire.is_down() and isinstance(event, sume_resume.Changed):
                seen.append(True)

        desk.run(api=wire.api(), during=during, reads_per_minute=600.0)
    assert sum("offline" in notice for notice in desk.notices) == 1
    assert seen == []
    # Waiting is no hot loop: 30 s at the most with full jitter, 15 s on average.
    assert 7200 / 30 <= wire.refused <= 7200 / 10
    jobs = desk.jobs()
    assert {job.status for job in jobs.values()} == {"completed"}
    assert all(job.poll_errors == before[row].poll_errors == 0 for row, job in jobs.items())
    assert reads[0][0] <= start + 7200.0 + 31.0
    assert desk.server.posts == []


def test_a_deadline_ends_a_run_without_a_network(desk: Desk) -> None:
    accept_all(desk, 3)
    before = desk.jobs()
    with closed_port() as port:
        wire = Wire(port)
        wire.is_down = lambda: True
        ending = desk.run(api=wire.api(), deadline_s=300.0)
    assert ending.deadline
    assert ending.halt is None
    assert {
        row: job._replace(token=before[row].token) for row, job in desk.jobs().items()
    } == before
    assert sum("offline" in notice for notice in desk.notices) == 1


# --- one key, two ids (B05) ---


@pytest.mark.parametrize("ended", [False, True], ids=["still open", "ended before"])
def test_a_late_answer_with_another_id(desk: Desk, ended: bool) -> None:
    """The first id stays and the second is in the history; an open row goes to a person."""
    desk.add(*clips(1))
    desk.server.keep_keys = False
    desk.server.reads_to_finish = 1 if ended else 10**9

    def before(call: Any) -> None:
        assert desk.carrier is not None
        desk.carrier.latency_s = 200.0 if not desk.server.posts else 0.0

    start = desk.clock.awake_s()
    if ended:
        # A second row keeps the run alive until the late answer is home.
        desk.add({"id": "slow", "prompt": "clip 99."})

        def act(server: FakeSume, request: Request) -> Reply | None:
            slow = read_of(server, request) == "r99" and desk.clock.awake_s() < start + 300.0
            return says("processing") if slow else None

        desk.server.on_read = act
    desk.run(before=before, deadline_s=400.0)
    job = desk.job()
    mine = [charge.id for charge in desk.server.charges if of_row(charge) == "r1"]
    assert len(mine) == 2
    late, kept = mine
    assert job.job_id == kept
    with sume_resume.open_ledger(desk.place) as ledger:
        details = " ".join(str(line[6]) for line in ledger.history(job))
    assert late in details
    assert kept in details
    if ended:
        assert job.status == "completed"
    else:
        assert job.status == "review"
        assert late in (job.note or "")
        assert kept in (job.note or "")
