"""Every outcome of a POST, against a real server; each also after a send that may have arrived."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from conftest import Desk, clips
from servers import Act, FakeSume, Reply, Request, accept_and_say, drop_after, drop_before
from servers import error as err


@dataclass
class Case:
    """What the server does once, and where the row is left when the run is stopped there."""

    act: Act
    status: str
    status_after_earlier: str
    halts: bool = False


PAGE = b"<html><body>Bad gateway</body></html>"
ACCEPTED = {"data": {"job": {"id": "job_x1"}}}


def truncated(server: FakeSume, request: Request) -> Reply:
    job = server.make_job(request)
    return Reply(202, {"data": {"job": {"id": job.id}}}, cut=12)


def truncated_lengthless(server: FakeSume, request: Request) -> Reply:
    job = server.make_job(request)
    return Reply(202, {"data": {"job": {"id": job.id}}}, cut=12, lengthless=True)


def bad_gzip(server: FakeSume, request: Request) -> Reply:
    server.make_job(request)
    body = gzip.compress(b"x" * 500)[:20] + b"broken"
    return Reply(202, body, headers={"Content-Encoding": "gzip"})


# The table of POST outcomes (faults.md 2): what happens once, the status after it when no
# earlier send may have arrived, and when one may have.
CASES = {
    "reset before accept": Case(drop_before, "sending", "sending"),
    "reset after accept": Case(drop_after, "sending", "sending"),
    "truncated with length": Case(truncated, "sending", "sending"),
    "truncated without length": Case(truncated_lengthless, "sending", "sending"),
    "bad gzip": Case(bad_gzip, "sending", "sending"),
    "html 502": Case(Reply(502, PAGE, {"Content-Type": "text/html"}), "sending", "sending"),
    "html 200": Case(Reply(200, PAGE, {"Content-Type": "text/html"}), "sending", "sending"),
    "empty 202": Case(Reply(202, b""), "sending", "sending"),
    "200 with an error body": Case(Reply(200, err("oops")), "sending", "sending"),
    "202 with only a correlation id": Case(
        Reply(202, {"request_id": "req_1"}), "sending", "sending"
    ),
    "301": Case(Reply(301, b"", {"Location": "/v2"}), "queued", "sending", halts=True),
    "307": Case(
        Reply(307, b"", {"Location": "https://x.invalid/"}), "queued", "sending", halts=True
    ),
    "400": Case(Reply(400, err("bad_request")), "rejected", "review"),
    "400 with a key code": Case(Reply(400, err("idempotency_mismatch")), "review", "review"),
    "401": Case(Reply(401, err("unauthorized")), "queued", "sending", halts=True),
    "402": Case(Reply(402, err("insufficient_credits")), "queued", "sending", halts=True),
    "403 policy": Case(Reply(403, err("content_policy_rejected")), "rejected", "review"),
    "403 account": Case(Reply(403, err("forbidden")), "queued", "sending", halts=True),
    "403 bare": Case(Reply(403, PAGE), "queued", "sending", halts=True),
    "404 coded": Case(Reply(404, err("not_found", "unknown model")), "rejected", "review"),
    "404 bare": Case(Reply(404, PAGE), "queued", "sending", halts=True),
    "405": Case(Reply(405, b""), "queued", "sending", halts=True),
    "408": Case(Reply(408, err("timeout")), "sending", "sending"),
    "409 key conflict": Case(Reply(409, err("idempotency_key_reused")), "review", "review"),
    "409 in flight": Case(Reply(409, err("request_in_progress")), "sending", "sending"),
    "409 key in use": Case(Reply(409, err("idempotency_key_in_use")), "sending", "sending"),
    "409 nobody knows": Case(Reply(409, err("strange")), "review", "review"),
    "409 bare": Case(Reply(409, b""), "review", "review"),
    "413": Case(Reply(413, err("too_large")), "rejected", "review"),
    "415": Case(Reply(415, err("bad_type")), "rejected", "review"),
    "422": Case(Reply(422, err("invalid_request")), "rejected", "review"),
    "422 with a key code": Case(Reply(422, err("idempotency_key_reused")), "review", "review"),
    "425": Case(Reply(425, b""), "sending", "sending"),
    "429 rate": Case(Reply(429, err("rate_limit_exceeded")), "queued", "sending"),
    "429 queue": Case(Reply(429, err("queue_full")), "queued", "sending"),
    "429 bare": Case(Reply(429, b""), "queued", "sending"),
    "500": Case(Reply(500, err("internal_error")), "sending", "sending"),
    "502": Case(Reply(502, err("bad_gateway")), "sending", "sending"),
    "503": Case(Reply(503, err("unavailable")), "sending", "sending"),
    "504": Case(Reply(504, err("timeout")), "sending", "sending"),
    "520": Case(Reply(520, PAGE), "sending", "sending"),
    "418": Case(Reply(418, b""), "sending", "sending"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("earlier", [False, True], ids=["first send", "after a lost answer"])
def test_outcome_of_one_answer(desk: Desk, case: Case, earlier: bool) -> None:
    desk.add(*clips(1))
    if earlier:
        # An earlier process sent it, and died before the answer.
        desk.server.submits.append(drop_after)
    desk.server.submits.append(case.act)
    wanted = 2 if earlier else 1

    def during(engine: Any, event: Any) -> None:
        if len(desk.server.posts) >= wanted:
            engine.stop(15)

    ending = desk.run(during=during)
    job = desk.job()
    assert job.status == (case.status_after_earlier if earlier else case.status)
    assert (ending.halt is not None) == case.halts
    assert len({(post.key, post.body) for post in desk.server.posts}) == 1
    assert (job.first_sent_at is None) == (job.status == "queued")
    if job.status == "review":
        assert job.note
        assert "resolve" in job.note
    for text in (job.note, job.trouble):
        assert text is None or (len(text) <= 600 and "<" not in text)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_run_to_the_end_after_one_fault_charges_once(desk: Desk, case: Case) -> None:
    """Whatever one answer was, running on (and again) never makes a second charge."""
    desk.add(*clips(2))
    desk.server.submits.append(case.act)
    for _ in range(3):
        desk.run()
    assert all(desk.server.charges_of(f"clip {n}.") <= 1 for n in (1, 2))
    assert desk.job("r2").status == "completed"
    if case.status in ("sending", "queued"):
        assert desk.job("r1").status == "completed"
        assert len(desk.server.charges) == 2
    assert len({post.key for post in desk.server.posts}) == 2


def test_refused_connection_waits_and_goes_on(desk: Desk) -> None:
    """Nothing listens for a while: the row stays queued, and one line says so (B29)."""
    from servers import closed_port

    desk.add(*clips(3))
    with closed_port() as port:
        good = desk.server
        seen = []

        class Moved:
            url = f"http://127.0.0.1:{port}"

        desk.server = Moved()  # type: ignore[assignment]
        ending = desk.run(deadline_s=7200.0, during=lambda e, event: seen.append(event))
        desk.server = good
    assert ending.deadline
    assert [job.status for job in desk.jobs().values()] == ["queued"] * 3
    assert all(job.first_sent_at is None for job in desk.jobs().values())
    assert sum("offline" in notice for notice in desk.notices) == 1
    tries = [e for e in desk.history("r1") if e == "prepared"]
    assert len(tries) <= 7200 / 10
    desk.run()
    assert len(desk.server.charges) == 3


@pytest.mark.parametrize(
    "retry_after",
    [
        "0",
        "-1",
        "9" * 400,
        "٣",
        "1_0",
        "soon",
        "",
        "Wed, 21 Oct 2015 07:28:00 GMT",
        "Wed, 21 Oct 2015 07:28:00",
        "1.5",
    ],
)
@pytest.mark.parametrize("code", ["rate_limit_exceeded", "queue_full"])
def test_useless_retry_after_never_makes_a_hot_loop(
    desk: Desk, retry_after: str, code: str
) -> None:
    """B27: never faster than the own backoff, no exception, at most 10 requests a minute."""
    desk.add(*clips(5))
    headers = {"Retry-After": retry_after, "Date": "Wed, 21 Oct 2026 07:28:00 GMT"}
    raw = {name: value.encode().decode("latin-1") for name, value in headers.items()}
    desk.server.on_submit = Reply(429, err(code), raw)
    desk.run(deadline_s=60.0, writes_per_minute=120.0)
    assert 2 <= len(desk.server.posts) <= 10
    assert {job.status for job in desk.jobs().values()} == {"queued"}


@pytest.mark.parametrize("form", ["seconds", "date"])
@pytest.mark.parametrize("code", [429, 503])
def test_retry_after_is_honoured_for_all_rows(desk: Desk, form: str, code: int) -> None:
    """A shared pause of what the server asks, measured by the server's own clock (B27)."""
    desk.add(*clips(3))
    # The server's clock is ten minutes off ours: only the difference counts.
    said = datetime.now(UTC) + timedelta(minutes=10)
    until = said + timedelta(seconds=90)
    wait = "90" if form == "seconds" else format_datetime(until, usegmt=True)
    headers = {"Retry-After": wait, "Date": format_datetime(said, usegmt=True)}
    times: list[float] = []
    desk.server.watch = lambda r: times.append(desk.clock.awake_s()) if r.method == "POST" else None
    desk.server.submits.append(Reply(code, err("rate_limit_exceeded"), headers))
    desk.run(writes_per_minute=120.0)
    assert 88 <= times[1] - times[0] <= 105
    assert len(desk.server.charges) == 3


def test_a_pause_survives_a_restart(desk: Desk) -> None:
    desk.add(*clips(2))
    desk.server.submits.append(Reply(429, err("rate_limit_exceeded"), {"Retry-After": "300"}))
    desk.run(deadline_s=10.0, writes_per_minute=120.0)
    assert len(desk.server.posts) == 1
    desk.run(deadline_s=200.0)
    assert len(desk.server.posts) == 1
    desk.run()
    assert len(desk.server.charges) == 2


def test_storm_of_500_is_bounded_and_ends_at_the_deadline(desk: Desk) -> None:
    desk.add(*clips(50))
    desk.server.on_submit = Reply(500, err("internal_error"))
    ending = desk.run(deadline_s=3600.0)
    assert ending.deadline
    # Backoff is capped at a minute; full jitter halves it on average.
    assert len(desk.server.posts) <= 3600 / 60 * 4
    assert len({post.key for post in desk.server.posts}) < 50
    desk.server.on_submit = None
    desk.run()
    assert len(desk.server.charges) == 50


def test_lost_answers_keep_one_key(desk: Desk) -> None:
    """B01: the job is made and the connection cut, three times; then an answer."""
    desk.add(*clips(1))
    desk.server.submits.extend([drop_after] * 3)
    desk.run()
    assert len(desk.server.posts) == 4
    assert len({(p.key, p.body) for p in desk.server.posts}) == 1
    assert len(desk.server.charges) == 1
    assert desk.job().status == "completed"
    assert desk.job().job_id == desk.server.charges[0].id


def test_a_server_that_ignores_keys(desk: Desk) -> None:
    """B02: the first reply is lost, the second names another job: the history shows the send."""
    desk.server.keep_keys = False
    desk.add(*clips(1))
    desk.server.submits.append(drop_after)
    desk.run()
    assert desk.job().status == "completed"
    assert desk.job().job_id == desk.server.charges[1].id
    assert "unanswered" in desk.history()


def test_one_key_through_429_and_503(desk: Desk) -> None:
    """B03: three POSTs, one key."""
    desk.add(*clips(1))
    desk.server.submits.extend([Reply(429, err("rate_limit_exceeded")), Reply(503, b"")])
    desk.run()
    assert len(desk.server.posts) == 3
    assert len({p.key for p in desk.server.posts}) == 1


def test_no_usable_answer_five_times_goes_to_a_person(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.server.on_submit = Reply(200, {"ok": True})
    desk.run()
    assert desk.job().status == "review"
    assert len(desk.server.posts) == 5
    assert "without a job id" in (desk.job().note or "")


def test_three_rows_without_an_id_stop_the_submits(desk: Desk) -> None:
    desk.add(*clips(6))
    desk.server.on_submit = Reply(200, {"ok": True})
    ending = desk.run(writes_per_minute=120.0)
    assert "SUME_API_BASE_URL" in (ending.halt or "")
    assert len({p.key for p in desk.server.posts}) == 3


def test_402_stops_submits_and_polls_on(desk: Desk) -> None:
    desk.add(*clips(4))
    desk.server.reads_to_finish = 3
    desk.server.submits.extend([lambda s, r: None, lambda s, r: None])
    desk.server.submits.append(Reply(402, err("insufficient_credits")))
    desk.server.on_submit = Reply(402, err("insufficient_credits"))
    ending = desk.run()
    assert ending.halt is not None
    by_status = [str(job.status) for job in desk.jobs().values()]
    assert by_status.count("completed") == 2
    assert by_status.count("queued") == 2


def test_401_in_mid_run_changes_no_row(desk: Desk) -> None:
    """B28: stop at the first 401; a rotated key finishes with --adopt-account."""
    desk.add(*clips(10))
    desk.server.submits.extend([lambda s, r: None] * 3)
    desk.server.on_submit = Reply(401, err("unauthorized"))
    desk.server.on_read = Reply(401, err("unauthorized"))
    ending = desk.run(concurrency=1, writes_per_minute=60.0)
    assert ending.halt is not None
    assert [str(j.status) for j in desk.jobs().values()] == ["pending"] * 3 + ["queued"] * 7
    desk.server.on_submit = desk.server.on_read = None
    desk.key = "CANARY-key-2"
    desk.run(adopt=True)
    assert len(desk.server.charges) == 10
    assert {job.status for job in desk.jobs().values()} == {"completed"}


@pytest.mark.parametrize("code", [200, 201, 202])
@pytest.mark.parametrize(
    "body",
    [
        {"data": {"job": {"id": "job_a"}}},
        {"data": {"job_id": "job_a"}},
        {"data": {"request_id": "job_a"}, "request_id": "req_1"},
        {"data": {"id": "job_a"}},
        {"id": "job_a", "request_id": "req_1"},
        {"job_id": "job_a"},
        {"job": {"id": "job_a"}},
        {"id": "gen-vid-1790000000-abcdefghij0123456789", "status": "pending"},
    ],
)
def test_the_id_is_found_in_any_of_its_places(desk: Desk, code: int, body: Any) -> None:
    desk.add(*clips(1))
    desk.server.submits.append(Reply(code, body))
    desk.server.on_read = Reply(200, {"status": "completed", "usage": {"cost": 1}, "url": "u"})
    desk.run()
    assert desk.job().job_id in ("job_a", body.get("id"))
    assert desk.job().status == "completed"


@pytest.mark.parametrize(
    "job_id", ["../me", "a/b?x=1", "..", ".", "a b", "a\nb", "", "x" * 201, 7, None]
)
def test_odd_ids_reach_no_route(desk: Desk, job_id: Any) -> None:
    """B33: such an id is refused, and no other route is called."""
    desk.add(*clips(1))
    desk.server.on_submit = Reply(202, {"data": {"job": {"id": job_id}}})
    desk.run()
    assert desk.job().status == "review"
    assert desk.job().job_id is None
    assert desk.server.gets == []


def test_an_id_that_another_row_holds(desk: Desk) -> None:
    """One id for two rows: the second goes to review, and the first is left alone."""
    desk.add(*clips(2))
    desk.server.on_submit = Reply(202, {"data": {"job": {"id": "job_same"}}})
    desk.server.on_read = Reply(200, {"status": "completed", "usage": {"cost": 1}, "url": "u"})
    desk.run()
    first, second = desk.jobs().values()
    assert (first.status, first.job_id) == ("completed", "job_same")
    assert (second.status, second.job_id) == ("review", None)
    assert "job_same" in (second.note or "")
    assert "'r1'" in (second.note or "")


def test_late_answer_adds_its_id_and_never_moves_a_row_back(desk: Desk) -> None:
    """A worker overran; the replay was answered first, then the late answer comes home."""
    desk.add(*clips(1))
    desk.server.keep_keys = False
    desk.server.reads_to_finish = 100

    def before(call: Any) -> None:
        # The first submit's answer takes longer than any deadline.
        assert desk.carrier is not None
        desk.carrier.latency_s = 300.0 if len(desk.server.posts) == 0 else 0.0

    desk.run(before=before, deadline_s=400.0)
    job = desk.job()
    assert job.status == "review"
    assert job.job_id == desk.server.charges[1].id
    assert desk.server.charges[0].id in (job.note or "")


def test_late_refusal_does_not_move_the_row(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.server.submits.append(Reply(400, err("bad_request")))

    def before(call: Any) -> None:
        assert desk.carrier is not None
        desk.carrier.latency_s = 300.0 if len(desk.server.posts) == 0 else 0.0

    desk.run(before=before)
    assert desk.job().status == "completed"


def test_content_type_does_not_matter(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.server.submits.append(
        lambda s, r: Reply(202, s.accept(r).body, {"Content-Type": "text/plain"})
    )
    desk.run()
    assert desk.job().status == "completed"


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"id": ' + b"9" * 5000 + b"}", b"\xff\xfe{"])
def test_hostile_bodies_are_one_rows_doubt(desk: Desk, body: bytes) -> None:
    desk.add(*clips(2))
    desk.server.submits.append(accept_and_say(202, body))
    desk.run()
    assert len(desk.server.charges) == 2
    assert {job.status for job in desk.jobs().values()} == {"completed"}
