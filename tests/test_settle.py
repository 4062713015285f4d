"""What a person decides: retry, cancel, resolve, backup, --replace, and the ways out of review."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import FILE_ONLY, KEY, POSIX, START_MS, Desk, Shop, clips, statuses
from servers import (
    Act,
    FakeJob,
    FakeSume,
    Reply,
    Request,
    Reset,
    accept_and_say,
    closed_port,
    drop_after,
    error,
    finished,
)

import sume_resume
from sume_resume import AccountError, Call, InputError, Job, RowChanged, Status, open_ledger

DAY_S = 24 * 3600.0


def attempts(desk: Desk, row: str = "r1") -> list[Job]:
    with open_ledger(desk.place) as ledger:
        return ledger.attempts(row)


def said(done: Any) -> str:
    return str((done.stdout + done.stderr).decode())


def ok(desk: Desk, *args: str) -> str:
    done = desk.command(*args)
    assert done.returncode == 0, said(done)
    return said(done)


def refused(desk: Desk, *args: str, code: int = 2) -> str:
    """Run a command that must refuse, and change nothing."""
    before = desk.content()
    posts = len(desk.server.posts)
    done = desk.command(*args)
    assert done.returncode == code, said(done)
    assert desk.content() == before
    assert len(desk.server.posts) == posts
    return said(done)


def first_answers(desk: Desk, *acts: Act) -> None:
    """Run one row, whose first submits are answered so."""
    desk.server.submits.extend(acts)
    desk.add(*clips(1))
    desk.run()


# -- ways into review, and out of it --


def refused_after_a_lost_answer(desk: Desk) -> None:
    first_answers(desk, drop_after, Reply(400, error("bad_request")))


def key_conflict(desk: Desk) -> None:
    first_answers(desk, Reply(422, error("idempotency_key_reused")))


def unknown_409(desk: Desk) -> None:
    first_answers(desk, Reply(409, error("strange")))


def never_a_usable_answer(desk: Desk) -> None:
    desk.server.on_submit = accept_and_say(202, {"hello": 1})
    desk.add(*clips(1))
    desk.run()
    desk.server.on_submit = None


def key_too_old(desk: Desk) -> None:
    desk.server.on_submit = drop_after
    desk.add(*clips(1))
    desk.run(deadline_s=5)
    desk.server.on_submit = None
    desk.clock.advance(DAY_S)
    desk.run()


def clock_set_back(desk: Desk) -> None:
    if isinstance(desk.place, sume_resume.Dsn):
        # Its server's clock is not one that somebody sets back here.
        key_too_old(desk)
        return
    desk.server.on_submit = drop_after
    desk.add(*clips(1))

    start_s = desk.clock.awake_s()

    def meddle(call: Call) -> None:
        # Late enough that the time of the first send is still in the past.
        if desk.clock.awake_s() - start_s > 600 and desk.clock.ahead_ms() > lead_ms - 1000:
            desk.clock.set_back(400)

    lead_ms = desk.clock.ahead_ms()
    desk.run(deadline_s=3600, before=meddle)
    desk.server.on_submit = None


def too_old_at_the_last_moment(desk: Desk) -> None:
    desk.server.on_submit = drop_after
    desk.add(*clips(1))
    desk.run(deadline_s=1)
    desk.server.on_submit = None
    desk.run(before=lambda call: desk.clock.suspend(DAY_S))


def id_of_another_row(desk: Desk) -> None:
    desk.add({"id": "other", "prompt": "other."}, *clips(1))
    desk.run(scope={"other"})
    there = desk.job("other").job_id
    desk.server.submits.append(Reply(202, {"data": {"job": {"id": there}}}))
    desk.run()


def two_ids_for_one_key(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.server.reads_to_finish = 10**6
    desk.run(deadline_s=5)
    desk.server.reads_to_finish = 1
    with open_ledger(desk.place) as ledger:
        ledger.record_late_id(ledger.find("r1"), "job_twin", desk.clock.wall_ms())


def another_id_than_came_late(desk: Desk) -> None:
    desk.add(*clips(1))
    with open_ledger(desk.place) as ledger:
        ledger.record_late_id(ledger.find("r1"), "job_twin", desk.clock.wall_ms())
    desk.run()


def sent_to_another_origin(desk: Desk) -> None:
    desk.server.on_submit = drop_after
    desk.add(*clips(1))
    desk.run(deadline_s=1)
    desk.server.on_submit = None
    with FakeSume() as elsewhere:
        account = sume_resume.Account(elsewhere.url + "/v1", elsewhere.url, KEY)
        with open_ledger(desk.place) as ledger:
            sume_resume.admit(ledger, account, False, desk.clock.wall_ms())
    with open_ledger(desk.place) as ledger:
        sume_resume.admit(ledger, desk.account, False, desk.clock.wall_ms())


def job_that_sume_forgot(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.server.on_read = Reply(404, error("not_found"))
    desk.run()
    desk.server.on_read = None


def ended_by_an_unknown_word(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.server.final = lambda job: {"id": job.id, "status": "vanished", "terminal": True}
    desk.run()
    desk.server.final = finished


INTO_REVIEW: list[Callable[[Desk], None]] = [
    refused_after_a_lost_answer,
    key_conflict,
    unknown_409,
    never_a_usable_answer,
    key_too_old,
    clock_set_back,
    too_old_at_the_last_moment,
    id_of_another_row,
    two_ids_for_one_key,
    sent_to_another_origin,
    job_that_sume_forgot,
    ended_by_an_unknown_word,
    another_id_than_came_late,
]
paths = pytest.mark.parametrize("into", INTO_REVIEW, ids=lambda path: path.__name__)


def command_of(note: str, way: str, job_id: str) -> list[str]:
    """Return the command that a note names, with one of its three ways."""
    match = re.search(r"sume-resume (resolve .*?--job-id \S+ .+?); (?:if not|or), in place", note)
    assert match, note
    assert all(option in note for option in ("--resend", "--drop"))
    words = shlex.split(match[1])
    assert words[3] == "--job-id"
    chosen = ["--job-id", job_id] if way == "--job-id" else [way]
    return [*words[:3], *chosen, "--yes", *words[5:]]


def job_at_sume(desk: Desk) -> str:
    """Return the row's job where Sume made one; else make it, as a person might find it."""
    made = [job for job in desk.server.charges if b"clip 1." in job.body]
    if made:
        return made[0].id
    request = Request("POST", "/v1/videos", {"idempotency-key": "by hand"}, b'{"prompt":"clip 1."}')
    return desk.server.make_job(request).id


@paths
def test_review_keeps_the_row_and_tells_the_way_out(
    desk: Desk, into: Callable[[Desk], None]
) -> None:
    into(desk)
    job = desk.job()
    assert job.status is Status.REVIEW
    posts = len(desk.server.posts)
    desk.run()
    assert desk.job().status is Status.REVIEW
    assert len(desk.server.posts) == posts
    named = command_of(job.note or "", "--job-id", "x")[-1]
    assert named == "r1"
    card = ok(desk, "status", "r1")
    assert "sume-resume resolve" in card


@paths
def test_way_out_by_its_job(desk: Desk, into: Callable[[Desk], None]) -> None:
    into(desk)
    posts, id = len(desk.server.posts), job_at_sume(desk)
    text = ok(desk, *command_of(desk.job().note or "", "--job-id", id))
    assert "sume-resume run" in text
    assert (desk.job().status, desk.job().job_id, desk.job().note) == (Status.PENDING, id, None)
    desk.run()
    assert (desk.job().status, desk.job().cost_micros) == (Status.COMPLETED, 100_000)
    assert len(desk.server.posts) == posts
    assert len(attempts(desk)) == 1


@paths
def test_way_out_by_buying_again(desk: Desk, into: Callable[[Desk], None]) -> None:
    into(desk)
    before = desk.job()
    text = ok(desk, *command_of(before.note or "", "--resend", ""))
    assert "may pay twice" in text
    desk.run()
    old, new = attempts(desk)
    assert (old.status, old.latest, old.cost_unknown) == (Status.CANCELLED, 0, True)
    assert (new.status, new.latest, new.attempt) == (Status.COMPLETED, 1, 2)
    assert new.key != old.key
    assert new.body == old.body
    assert desk.server.posts[-1].key == new.key
    with open_ledger(desk.place) as ledger:
        assert ledger.totals().cost_unknown_rows >= 1


@paths
def test_way_out_by_giving_up(desk: Desk, into: Callable[[Desk], None]) -> None:
    into(desk)
    posts = len(desk.server.posts)
    ok(desk, *command_of(desk.job().note or "", "--drop", ""))
    desk.run()
    assert desk.job().status is Status.CANCELLED
    assert desk.job().cost_unknown
    assert len(desk.server.posts) == posts
    assert "ended by a person" in ok(desk, "status", "r1")


def test_every_way_into_review_is_walked() -> None:
    """A new call that sends a row to review needs a path above."""
    source = Path(sume_resume.__file__).read_text()
    calls = re.findall(r"(?:self\._review|\.record_review)\(", source)
    # The body of `_review` is one of them; a key that is too old to be sent, and a clock
    # that was set back, share another.
    assert len(calls) == len(INTO_REVIEW) - 1


# -- resolve --


def test_resolve_reads_the_job_first_and_refuses_an_unknown_one(desk: Desk) -> None:
    unknown_409(desk)
    text = refused(desk, "resolve", "r1", "--job-id", "job_nobody", "--yes")
    assert "Sume does not know" in text
    assert [request.path for request in desk.server.gets] == ["/v1/videos/job_nobody"]


def test_resolve_refuses_a_job_that_another_row_has(desk: Desk) -> None:
    id_of_another_row(desk)
    other = desk.job("other").job_id or ""
    text = refused(desk, "resolve", "r1", "--job-id", other, "--yes")
    assert "'other'" in text


def test_resolve_refuses_a_job_of_an_older_attempt(desk: Desk) -> None:
    two_ids_for_one_key(desk)
    first = desk.job().job_id or ""
    ok(desk, "resolve", "r1", "--resend", "--yes")
    desk.server.submits.append(Reply(409, error("strange")))
    desk.run()
    assert "attempt 1" in refused(desk, "resolve", "r1", "--job-id", first, "--yes")


@pytest.mark.parametrize("bad", ["../me", "a/b?x=1", "", "a b", "-", "x" * 300])
def test_resolve_takes_no_odd_job_id(desk: Desk, bad: str) -> None:
    unknown_409(desk)
    reads = len(desk.server.gets)
    if bad == "-":
        desk.server.on_read = Reply(404, error("not_found"))
        refused(desk, "resolve", "r1", "--job-id", bad, "--yes")
        return
    assert "--job-id" in refused(desk, "resolve", "r1", "--job-id", bad, "--yes")
    assert len(desk.server.gets) == reads


@pytest.mark.parametrize(
    "reply",
    [Reply(401, error("unauthorized")), Reply(500, b"<html>"), Reply(404, b"gone"), Reset(),
     Reply(200, {"id": "job_other", "status": "completed"}), Reply(429, error("rate_limit"))],
    ids=["401", "500", "404 page", "reset", "another job", "429"],
)  # fmt: skip
def test_resolve_changes_nothing_while_sume_does_not_answer(desk: Desk, reply: Any) -> None:
    unknown_409(desk)
    desk.server.reads.append(reply)
    text = refused(desk, "resolve", "r1", "--job-id", "job_x", "--yes", code=5)
    assert "job_x could not be read" in text


def test_resolve_under_another_key_changes_nothing(desk: Desk) -> None:
    unknown_409(desk)
    reads = len(desk.server.gets)
    done = desk.command("resolve", "r1", "--job-id", "job_x", "--yes", SUME_API_KEY="another")
    assert done.returncode == 5
    assert "--adopt-account" in said(done)
    other = desk.command(
        "resolve", "r1", "--job-id", "job_x", "--yes", SUME_API_BASE_URL="https://x.invalid"
    )
    assert other.returncode == 5
    assert "x.invalid" in said(other)
    assert len(desk.server.gets) == reads
    assert desk.job().status is Status.REVIEW


@pytest.mark.parametrize("way", [("--resend",), ("--drop",), ("--job-id", "job_1")], ids=" ".join)
def test_resolve_needs_yes_off_a_terminal(desk: Desk, way: tuple[str, ...]) -> None:
    unknown_409(desk)
    desk.server.reads.append(Reply(200, {"id": "job_1", "status": "pending"}))
    text = refused(desk, "resolve", "r1", *way)
    assert "--yes" in text
    if way == ("--resend",):
        assert "may pay twice" in text


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("r1",),
        ("--drop",),
        ("r1", "--drop", "--resend"),
        ("r1", "--job-id", "job_1", "--drop"),
        ("r1", "r2", "--job-id", "job_1"),
        ("nobody", "--drop"),
    ],
    ids=" ".join,
)
def test_resolve_that_is_not_clear(desk: Desk, args: tuple[str, ...]) -> None:
    unknown_409(desk)
    refused(desk, "resolve", "--yes", *args)


@pytest.mark.parametrize("way", ["--drop", "--resend"])
def test_resolve_of_rows_that_need_none(desk: Desk, way: str) -> None:
    """All rows are checked before one is settled, and each problem is named."""
    desk.server.submits.extend([Reply(409, error("strange")), Reply(400, error("bad"))])
    desk.add(*clips(4))
    desk.run(scope={"r1", "r2", "r3"})
    text = refused(desk, "resolve", "r1", "r2", "r3", "r4", way, "--yes")
    assert "row 'r2' is rejected" in text
    assert "row 'r3' is completed" in text
    assert "row 'r4' is queued" in text
    assert "row 'r1'" not in text


def test_old_id_of_a_resolved_row_stays_in_its_history(desk: Desk) -> None:
    two_ids_for_one_key(desk)
    first = desk.job().job_id or ""
    twin = job_at_sume(desk)
    desk.server.jobs["job_twin"] = FakeJob("job_twin", "k", b"{}")
    ok(desk, "resolve", "r1", "--job-id", "job_twin", "--yes")
    assert first == twin
    assert f"job_twin (was {first})" in ok(desk, "status", "r1")


# -- retry --


def ended(desk: Desk, *words: str) -> None:
    """Make rows r1, r2, … that ended by these words of Sume's."""
    desk.add(*clips(len(words)))
    by_row = {f"clip {n}.": word for n, word in enumerate(words, 1)}

    def final(job: FakeJob) -> dict[str, Any]:
        word = next(word for text, word in by_row.items() if text.encode() in job.body)
        return {"id": job.id, "status": word, "usage": {"cost": 0.1}} | (
            {"url": "https://m/x"} if word == "completed" else {}
        )

    desk.server.final = final
    desk.run()


@pytest.mark.parametrize("word", ["failed", "cancelled", "expired"])
def test_retry_buys_again_with_a_new_key(desk: Desk, word: str) -> None:
    ended(desk, word)
    old = desk.job()
    text = ok(desk, "retry", "r1", "--yes")
    assert "attempt 2" in text
    assert "sume-resume run" in text
    assert len(desk.server.charges) == 1
    desk.server.final = finished
    desk.run()
    first, second = attempts(desk)
    assert first._replace(latest=1, updated_at=0) == old._replace(updated_at=0)
    assert (second.status, second.body, second.own) == (Status.COMPLETED, old.body, old.own)
    assert second.key != first.key
    assert len(desk.server.charges) == 2
    with open_ledger(desk.place) as ledger:
        totals = ledger.totals()
    assert (totals.rows, totals.cost_micros) == (1, 200_000)


def test_retry_of_a_rejected_row(desk: Desk) -> None:
    first_answers(desk, Reply(404, error("model_not_found")))
    ok(desk, "retry", "r1", "--yes")
    desk.run()
    assert statuses(attempts(desk)) == ["rejected", "completed"]
    assert len(desk.server.charges) == 1


def test_retry_of_a_queued_row_whose_sends_were_refused(desk: Desk) -> None:
    """Its old attempt ends in the same commit, and only the new one is ever sent."""
    desk.server.on_submit = Reply(429, error("rate_limit_exceeded"))
    desk.add(*clips(1))
    desk.run(deadline_s=5)
    assert desk.job().status is Status.QUEUED
    ok(desk, "retry", "r1", "--yes")
    desk.server.on_submit = None
    desk.run()
    first, second = attempts(desk)
    assert (first.status, first.cost_unknown) == (Status.CANCELLED, False)
    assert second.status is Status.COMPLETED
    assert [post.key for post in desk.server.posts[-1:]] == [second.key]
    assert [job.key for job in desk.server.charges] == [second.key]


def test_retry_is_refused_while_the_outcome_is_unknown(desk: Desk) -> None:
    desk.server.reads_to_finish = 10**6
    desk.server.submits.extend([Reply(409, error("strange")), drop_after])
    desk.add(*clips(5))
    desk.run(deadline_s=1, scope={"r1", "r2", "r3"}, concurrency=2)
    found = {row: job.status for row, job in desk.jobs().items()}
    assert found["r1"] is Status.REVIEW
    text = refused(desk, "retry", *found, "--yes")
    for row, status in found.items():
        assert f"row '{row}'" in text, status
    assert "sume-resume resolve" in text
    assert "sume-resume run" in text


def test_retry_of_a_completed_row_names_what_buys_another(desk: Desk) -> None:
    ended(desk, "completed")
    assert "--take" in refused(desk, "retry", "r1", "--yes")


def test_retry_of_a_completed_row_without_a_result(desk: Desk) -> None:
    desk.server.final = lambda job: {"id": job.id, "status": "completed", "usage": {"cost": 0.1}}
    desk.add(*clips(1))
    desk.run()
    assert desk.job().status is Status.COMPLETED
    ok(desk, "retry", "r1", "--yes")
    assert desk.job().attempt == 2


def test_retry_of_a_dropped_row_that_may_have_been_bought(desk: Desk) -> None:
    """Only `resolve --resend` may pay twice, and says so."""
    refused_after_a_lost_answer(desk)
    ok(desk, "resolve", "r1", "--drop", "--yes")
    assert "resolve --resend r1" in refused(desk, "retry", "r1", "--yes")
    assert "may pay twice" in ok(desk, "resolve", "--resend", "r1", "--yes")
    desk.run()
    assert statuses(attempts(desk)) == ["cancelled", "completed"]


def test_retry_failed_takes_what_failed_and_nothing_else(desk: Desk) -> None:
    ended(desk, "failed", "completed", "expired", "cancelled")
    ok(desk, "retry", "--failed", "--yes")
    assert {row: job.attempt for row, job in desk.jobs().items()} == {
        "r1": 2,
        "r2": 1,
        "r3": 2,
        "r4": 1,
    }


def test_retry_failed_of_nothing_says_so_and_asks_nothing(desk: Desk) -> None:
    ended(desk, "completed")
    assert "no row has failed" in ok(desk, "retry", "--failed")


def test_retry_names_a_row_once_however_it_is_named(desk: Desk) -> None:
    ended(desk, "failed")
    id = desk.job().job_id or ""
    ok(desk, "retry", "r1", id, "--yes")
    assert len(attempts(desk)) == 2
    ok(desk, "status", id)
    text = refused(desk, "retry", id, "--yes")
    assert "attempt 1 of row 'r1'" in text


@pytest.mark.parametrize("args", [(), ("r1", "--failed")], ids=["nothing", "both"])
def test_retry_that_is_not_clear(desk: Desk, args: tuple[str, ...]) -> None:
    ended(desk, "failed")
    refused(desk, "retry", "--yes", *args)


@pytest.mark.parametrize(
    "args", [("retry", "r1"), ("retry", "--failed"), ("cancel", "r2"), ("cancel", "--all")]
)
def test_yes_is_needed_off_a_terminal(desk: Desk, args: tuple[str, ...]) -> None:
    ended(desk, "failed")
    desk.add(*clips(2))
    text = refused(desk, *args)
    assert "--yes" in text
    assert ("'r1'" if args[0] == "retry" else "'r2'") in text


def test_row_that_a_run_changed_meanwhile_is_not_retried(desk: Desk) -> None:
    """Each decision is one compare-and-set: nothing of the batch is changed."""
    ended(desk, "failed", "failed")
    with open_ledger(desk.place) as ledger, open_ledger(desk.place) as other:
        stale = [ledger.find("r1"), ledger.find("r2")]
        other.record_retried(stale[1], START_MS)

        def retry_both() -> None:
            with ledger.transaction():
                for job in stale:
                    ledger.record_retried(job, START_MS)

        with pytest.raises(RowChanged):
            retry_both()
        assert len(ledger.attempts("r1")) == 1
        assert len(ledger.attempts("r2")) == 2


# -- cancel --


def test_cancel_drops_a_queued_row_for_good(desk: Desk) -> None:
    desk.add(*clips(2))
    ok(desk, "cancel", "r1", "--yes")
    desk.run()
    assert [job.status for job in desk.jobs().values()] == [Status.CANCELLED, Status.COMPLETED]
    assert desk.server.charges_of("clip 1.") == 0
    assert not desk.job().cost_unknown


def test_cancel_of_queued_rows_needs_no_network_and_no_key(desk: Desk) -> None:
    desk.add(*clips(2))
    done = desk.command("cancel", "--all", "--yes", SUME_API_KEY=None, HTTPS_PROXY="nonsense://")
    assert done.returncode == 0, said(done)
    assert {job.status for job in desk.jobs().values()} == {Status.CANCELLED}


def open_rows(desk: Desk, count: int = 1) -> None:
    desk.server.reads_to_finish = 10**6
    desk.add(*clips(count))
    desk.run(deadline_s=2)


def test_cancel_asks_sume_and_reads_what_became_of_it(desk: Desk) -> None:
    open_rows(desk)
    id = desk.job().job_id
    ok(desk, "cancel", "r1", "--yes")
    assert desk.server.requests[-2].path == f"/v1/jobs/{id}/cancel"
    assert desk.server.requests[-2].body == b"{}"
    job = desk.job()
    assert (job.status, job.cost_micros, job.next_poll_at) == (Status.CANCELLED, 0, None)
    assert "Sume was asked to cancel it" in ok(desk, "status", "r1")
    assert len(desk.server.posts) == 1


@pytest.mark.parametrize(
    "reply",
    [
        Reply(409, error("job_generation_already_started", "too late")),
        Reply(404, error("not_found", "no such job")),
        Reply(500, b"<html>"),
        Reply(200, error("job_not_cancelable", "ended")),
        Reset(),
    ],
    ids=["begun", "unknown", "page", "error with 200", "reset"],
)
def test_job_that_sume_does_not_cancel_goes_on(desk: Desk, reply: Any) -> None:
    open_rows(desk)
    desk.server.cancels.append(reply)
    done = desk.command("cancel", "r1", "--yes")
    assert done.returncode == 1
    unknown = isinstance(reply, Reset)
    words = "may be cancelled or not" if unknown else "is not cancelled"
    assert f"row 'r1' {words}" in said(done)
    assert "paid for" in said(done)
    assert desk.job().status in (Status.PENDING, Status.IN_PROGRESS)
    desk.server.reads_to_finish = 1
    desk.run()
    assert desk.job().status is Status.COMPLETED
    assert len(desk.server.charges) == 1


@pytest.mark.parametrize(
    "reply", [Reply(401, error("unauthorized")), Reply(404, b"<html>"), Reply(302, b"")]
)
def test_cancel_stops_where_the_account_or_the_route_is_wrong(desk: Desk, reply: Reply) -> None:
    open_rows(desk, 3)
    desk.server.cancels.extend([reply] * 3)
    before = desk.jobs()
    done = desk.command("cancel", "--all", "--yes")
    assert done.returncode == 5
    assert "check SUME_API" in said(done)
    cancels = [r for r in desk.server.requests if r.path.endswith("/cancel")]
    assert len(cancels) == 1
    assert {job.status for job in desk.jobs().values()} == {Status.PENDING}
    assert desk.jobs() == before


def test_cancel_that_takes_effect_later_is_read_by_the_next_run(desk: Desk) -> None:
    open_rows(desk)
    desk.server.cancels.append(Reply(202, {"data": {"status": "CANCELING"}}))
    text = ok(desk, "cancel", "r1", "--yes")
    assert "sume-resume run" in text
    assert desk.job().status in (Status.PENDING, Status.IN_PROGRESS)
    desk.server.cancelled.add(desk.job().job_id or "")
    desk.run()
    assert (desk.job().status, desk.job().cost_micros) == (Status.CANCELLED, 0)


def test_cancel_names_what_it_does_not_touch(desk: Desk) -> None:
    desk.server.reads_to_finish = 10**6
    desk.server.submits.extend([Reply(409, error("strange")), Reply(400, error("bad")), drop_after])
    desk.add(*clips(4))
    desk.run(deadline_s=0.5, limit=3, concurrency=2)
    found = {row: str(job.status) for row, job in desk.jobs().items()}
    assert found == {"r1": "review", "r2": "rejected", "r3": "sending", "r4": "queued"}
    text = refused(desk, "cancel", *found, "--yes")
    assert "resolve --drop r1" in text
    assert "row 'r2' is rejected" in text
    assert "row 'r3' may have been sent" in text
    assert "'r4'" not in text
    done = desk.command("cancel", "--all", "--yes")
    assert done.returncode == 1
    assert "row 'r3' may have been sent" in said(done)
    assert "left as they are: 1 row in review" in said(done)
    assert statuses(desk.jobs().values()) == ["review", "rejected", "sending", "cancelled"]


def test_cancel_under_another_key_changes_nothing(desk: Desk) -> None:
    open_rows(desk, 1)
    desk.add({"id": "q", "prompt": "queued."})
    before = desk.content()
    done = desk.command("cancel", "--all", "--yes", SUME_API_KEY="another")
    assert done.returncode == 5
    assert desk.content() == before


def test_cancels_keep_the_pace_of_the_write_budget(desk: Desk) -> None:
    open_rows(desk, 5)
    with open_ledger(desk.place) as ledger:
        jobs = ledger.with_status(Status.PENDING)
        client = sume_resume.Sume(desk.account, desk.clock, False)
        done = list(sume_resume.cancel_jobs(ledger, client, desk.clock, jobs))
        client.close()
    assert {wish.job.status for wish in done} == {Status.CANCELLED}
    assert all(0.49 <= wait <= 0.52 for wait in desk.clock.slept[1:])


def test_run_that_goes_on_beside_a_cancel_follows_it(desk: Desk) -> None:
    """The row was changed under the run: it is re-read, shown and counted as it is."""
    desk.server.reads_to_finish = 3
    desk.add(*clips(2))
    asked: list[str] = []

    def during(engine: Any, event: Any) -> None:
        open_ones = [r for r, job in desk.jobs().items() if job.status is Status.IN_PROGRESS]
        if "r1" in open_ones and not asked:
            asked.append(ok(desk, "cancel", "r1", "--yes"))

    desk.run(during=during)
    assert asked
    assert [str(job.status) for job in desk.jobs().values()] == ["cancelled", "completed"]


# -- replace --


def test_replace_of_a_queued_row(desk: Desk) -> None:
    desk.add(*clips(1))
    old = desk.job()
    changed = {"id": "r1", "prompt": "another.", "duration": 6, "model": "m"}
    with pytest.raises(InputError, match="--replace"):
        desk.add(changed, name="b.jsonl")
    added = desk.add(changed, name="b.jsonl", replace=True)
    assert (added.new, added.existing, added.replaced) == (0, 0, 1)
    new = desk.job()
    assert (new.id, new.attempt, new.status) == (old.id, 1, Status.QUEUED)
    assert (new.prompt, new.model, new.duration_s) == ("another.", "m", 6)
    assert new.key != old.key
    assert new.source == "b.jsonl:1"
    assert old.key in ok(desk, "status", "r1")
    desk.run()
    assert [post.body for post in desk.server.posts] == [new.body]
    assert desk.add(changed, name="b.jsonl", replace=True).existing == 1


@pytest.mark.parametrize("word", ["failed", "cancelled", "expired", "rejected"])
def test_replace_of_a_row_that_ended_badly_is_a_new_attempt(desk: Desk, word: str) -> None:
    if word == "rejected":
        first_answers(desk, Reply(422, error("invalid_request")))
    else:
        ended(desk, word)
    desk.server.final = finished
    assert desk.add({"id": "r1", "prompt": "better."}, replace=True).replaced == 1
    desk.run()
    first, second = attempts(desk)
    assert (str(first.status), first.prompt) == (word, "clip 1.")
    assert (second.status, second.prompt) == (Status.COMPLETED, "better.")


def test_replace_of_anything_else_is_refused(desk: Desk) -> None:
    desk.server.reads_to_finish = 10**6
    as_usual: Any = lambda server, request: None  # noqa: E731
    desk.server.submits.extend([Reply(409, error("strange")), as_usual, drop_after])
    desk.add(*clips(4))
    desk.run(deadline_s=0.5, scope={"r1", "r2", "r3"}, concurrency=2)
    kept = desk.jobs()
    assert statuses(kept.values())[1:] == ["pending", "sending", "queued"]
    others = [{"id": row, "prompt": "x."} for row in kept]
    with pytest.raises(InputError) as refusal:
        desk.add(*others, replace=True)
    text = str(refusal.value)
    assert all(f"'{row}'" in text for row in ("r1", "r2", "r3"))
    assert "'r4'" not in text
    assert desk.jobs() == kept
    desk.server.reads_to_finish = 1
    desk.run()
    with pytest.raises(InputError, match="completed"):
        desk.add({"id": "r3", "prompt": "x."}, replace=True)


def test_replace_takes_a_default_that_is_given_now(desk: Desk) -> None:
    """`--model good --replace` mends rows that a bad model had rejected."""
    desk.server.submits.append(Reply(404, error("model_not_found")))
    desk.add({"id": "r1", "prompt": "p."}, fields={"model": "bad"})
    desk.run()
    with pytest.raises(InputError, match="--replace"):
        desk.add({"id": "r1", "prompt": "p."}, fields={"model": "good"})
    desk.add({"id": "r1", "prompt": "p."}, fields={"model": "good"}, replace=True)
    desk.run()
    assert [(job.model, str(job.status)) for job in attempts(desk)] == [
        ("bad", "rejected"),
        ("good", "completed"),
    ]


def test_replace_with_the_same_content_does_nothing(desk: Desk) -> None:
    desk.server.submits.append(Reply(422, error("invalid_request")))
    desk.add(*clips(2))
    desk.run(limit=1)
    before = desk.content()
    assert desk.add(*clips(2), replace=True).existing == 2
    assert desk.jobs()["r1"].status is Status.REJECTED
    with open_ledger(desk.place) as ledger:
        assert ledger._one("SELECT count(*) FROM jobs")[0] == 2
    assert len(desk.content()) == len(before)


def test_replace_of_one_bad_row_changes_none(desk: Desk) -> None:
    desk.add(*clips(2))
    kept = desk.jobs()
    with pytest.raises(InputError):
        desk.add({"id": "r1", "prompt": "x."}, {"id": "r2", "prompt": 5}, replace=True)
    assert desk.jobs() == kept


# -- backup --


@FILE_ONLY
def test_backup_is_a_ledger_of_its_own(desk: Desk, tmp_path: Path) -> None:
    desk.add(*clips(3))
    desk.run(limit=1)
    before = desk.content()
    copy = tmp_path / "b.db"
    text = ok(desk, "backup", str(copy))
    assert "3 rows" in text
    assert desk.content() == before
    assert copy.stat().st_mode & 0o777 == 0o600
    desk.path.unlink()
    copy.rename(desk.path)
    desk.run()
    assert {job.status for job in desk.jobs().values()} == {Status.COMPLETED}
    assert len(desk.server.charges) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"jobs.db"}


@FILE_ONLY
def test_backup_in_the_middle_of_a_run_buys_nothing_twice(desk: Desk, tmp_path: Path) -> None:
    """B13: all keys are in the copy, which finishes the batch after the ledger is gone."""
    desk.add(*clips(3))
    copy = tmp_path / "b.db"

    def during(engine: Any, event: Any) -> None:
        if desk.server.posts and not copy.exists():
            ok(desk, "backup", str(copy))
            engine.stop(9)

    desk.run(during=during, writes_per_minute=120.0)
    desk.path.unlink()
    copy.rename(desk.path)
    desk.run()
    assert len(desk.server.charges) == 3
    assert {job.status for job in desk.jobs().values()} == {Status.COMPLETED}


@pytest.mark.parametrize("there", ["file", "folder", "link", "nowhere", "itself"])
def test_backup_replaces_nothing(desk: Desk, tmp_path: Path, there: str) -> None:
    desk.add(*clips(1))
    victim = tmp_path / "victim"
    target = tmp_path / "b.db"
    if there == "file":
        target.write_text("mine")
    elif there == "folder":
        target.mkdir()
    elif there == "link":
        target.symlink_to(victim)
    elif there == "nowhere":
        target = tmp_path / "none" / "b.db"
    else:
        target = desk.path
    before = {path.name for path in tmp_path.iterdir()}
    text = refused(desk, "backup", str(target))
    assert str(target) in text
    assert {path.name for path in tmp_path.iterdir()} == before
    assert not victim.exists()
    assert there != "file" or target.read_text() == "mine"


@FILE_ONLY
def test_backup_of_a_ledger_that_is_locked_gives_up(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.add(*clips(1))
    monkeypatch.setattr(sume_resume, "BUSY_TIMEOUT_MS", 10)
    with contextlib.closing(sqlite3.connect(desk.path, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        done = desk.command("backup", str(tmp_path / "b.db"))
        writer.execute("ROLLBACK")
    assert done.returncode == 8
    assert "try again" in said(done)
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.db"]


# -- the account guard --


def test_account_of_a_ledger_with_jobs(desk: Desk) -> None:
    open_rows(desk)
    elsewhere = sume_resume.Account("https://x.invalid/v1", "https://x.invalid", desk.key)
    stand_in = sume_resume.Account("", sume_resume.STAND_IN, "k")
    rotated = sume_resume.Account(desk.account.base_url, desk.account.origin, "other")
    with open_ledger(desk.place) as ledger:
        sume_resume.check_account(ledger, desk.account)
        for account in (elsewhere, stand_in):
            with pytest.raises(AccountError, match="use another --db"):
                sume_resume.check_account(ledger, account, adopt=True)
        with pytest.raises(AccountError, match="--adopt-account"):
            sume_resume.check_account(ledger, rotated)
        sume_resume.check_account(ledger, rotated, adopt=True)


# -- doubts that must stay, and words that must be true --


@FILE_ONLY
def test_simulated_ledger_never_buys_even_without_a_job(shop: Shop) -> None:
    """The stand-in's origin is for good: also where it accepted nothing, or nothing was sent."""
    shop.rows({"id": "r1", "prompt": "x", "duration": 90})
    shop.call("run", "clips.jsonl", "--simulate")
    again = shop.call("retry", "r1", "--yes", "--db", "simulated.db")
    assert b"sume-resume run --simulate sends what is queued" in again.stderr
    for limit in ((), ("--limit", "0")):
        done = shop.run("--db", "simulated.db", *limit)
        assert done.returncode == 5
        assert b"--simulate" in done.stderr
    shop.call("run", "clips.jsonl", "--simulate", "--limit", "0", "--db", "other.db")
    assert shop.run("--db", "other.db").returncode == 5
    assert shop.server.requests == []


def test_row_that_a_person_dropped_from_review_is_in_doubt(desk: Desk) -> None:
    """Only `resolve --resend` buys it again: not --replace, not retry, with a job id or not."""
    for into in (refused_after_a_lost_answer, job_that_sume_forgot):
        desk.begin_anew(into.__name__)
        desk.server.submits.clear()
        into(desk)
        ok(desk, "resolve", "r1", "--drop", "--yes")
        assert "--resend" in refused(desk, "retry", "r1", "--yes")
        with pytest.raises(InputError):
            desk.add({"id": "r1", "prompt": "other."}, replace=True)
        charges = len(desk.server.charges)
        desk.run()
        assert len(desk.server.charges) == charges
        assert "--resend" in refused(desk, "resolve", "r1", "--drop", "--yes")


@pytest.mark.parametrize("way", ["--drop", "rejected"])
def test_late_id_of_a_row_that_has_ended_puts_it_in_doubt(desk: Desk, way: str) -> None:
    if way == "--drop":
        refused_after_a_lost_answer(desk)
        ok(desk, "resolve", "r1", "--drop", "--yes")
    else:
        first_answers(desk, Reply(400, error("bad")))
    with open_ledger(desk.place) as ledger:
        ledger.record_late_id(ledger.find("r1"), "job_late", START_MS)
        assert ledger.totals().cost_unknown_rows == 1
    assert "--resend" in refused(desk, "retry", "r1", "--yes")
    assert "no row has failed" in ok(desk, "retry", "--failed", "--yes")


@pytest.mark.parametrize("word", ["cancel_failed", "cancelling", "Cancel requested"])
def test_word_like_cancelled_proves_nothing(desk: Desk, word: str) -> None:
    desk.add(*clips(1))
    desk.server.final = lambda job: {"id": job.id, "status": word, "terminal": True}
    desk.run()
    ok(desk, "resolve", "r1", "--drop", "--yes")
    assert "--resend" in refused(desk, "retry", "r1", "--yes")


@FILE_ONLY
def test_account_is_checked_before_a_row_is_added(shop: Shop) -> None:
    shop.run(shop.rows(*clips(1)))
    shop.rows(*clips(3), name="more.jsonl")
    before = shop.files()
    for args, env in ((("more.jsonl",), {"SUME_API_KEY": "another"}),
                      (("more.jsonl", "--simulate", "--db", "jobs.db"), {})):  # fmt: skip
        done = shop.run(*args, **env)
        assert done.returncode == 5
        assert b"nothing was changed" in done.stderr
        assert b"added" not in done.stderr
        assert shop.files() == before


def test_backup_of_a_simulated_ledger_is_all_or_nothing(shop: Shop) -> None:
    shop.run(shop.rows(*clips(1)), "--simulate", "--db", "try.db")
    (shop.folder / "taken.db").write_text("mine")
    (shop.folder / "half.stand-in.db").write_text("mine")
    before = shop.files()
    for name in ("none/x.db", "taken.db", "half.db"):
        done = shop.invoke("backup", name, "--db", "try.db")
        assert done.returncode == 2, done.stderr
        assert shop.files() == before
    assert shop.invoke("backup", "try.bak", "--db", "try.db").returncode == 0
    assert {"try.bak", "try.bak.stand-in.db"} <= set(shop.files())


def test_row_that_a_run_takes_during_the_question_is_told_once(desk: Desk) -> None:
    desk.add(*clips(2))
    with open_ledger(desk.place) as ledger:
        listed = ledger.with_status(Status.QUEUED)
        ledger.record_account(desk.server.url, "f")
        ledger.record_prepared(listed[0], START_MS)
        moved = sume_resume._drop_queued(ledger, listed, sume_resume.Voice(False))
        assert statuses(moved) == ["sending"]
    done = desk.command("cancel", "--all", "--yes", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["type"] for line in lines] == ["refused", "summary"]
    assert lines[-1]["refused"] == 1


@POSIX
def test_no_one_to_ask_about_a_row_that_a_run_took_is_no_exit_2(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows were dropped by then, so it is not said that nothing was changed."""
    desk.add(*clips(2))

    def question(voice: object, text: str, yes: bool) -> None:
        with open_ledger(desk.place) as ledger:
            ledger.record_account(desk.server.url, "f")
            sending = ledger.record_prepared(ledger.find("r1"), START_MS)
            ledger.record_accepted(sending, "job_1", START_MS, START_MS)

    monkeypatch.setattr(sume_resume, "_confirm", question)
    done = desk.command("cancel", "--all", SUME_API_KEY=None)
    assert done.returncode == 5
    assert "row 'r1' was sent in the meantime" in said(done)
    assert statuses(desk.jobs().values()) == ["pending", "cancelled"]


def test_notes_name_the_ledger_in_every_output(shop: Shop) -> None:
    """A hint that is copied from any of them settles the row that it is about."""
    shop.server.submits.append(Reply(409, error("strange")))
    shop.run(shop.rows(*clips(1)), "--db", "other.db", "--json")
    for args in (("status",), ("status", "r1"), ("status", "--format", "csv"),
                 ("status", "--format", "json"), ("status", "--json")):  # fmt: skip
        text = shop.invoke(*args, "--db", "other.db").stdout.decode()
        assert "sume-resume resolve --db other.db --job-id ID r1" in text, args
        assert "--db other.db --db" not in text


def test_key_in_a_urls_spelling_is_nowhere(desk: Desk) -> None:
    desk.key = "CANARY/a+b"
    message = "see https://x.invalid/CANARY%2Fa%2Bb and CANARY/a%2Bb"
    desk.server.submits.append(Reply(422, error("bad", message)))
    desk.add(*clips(1))
    desk.run()
    assert b"CANARY" not in desk.content()


def test_two_first_adds_at_once_both_add(shop: Shop) -> None:
    """The second one waits until the ledger is made."""
    for n in (1, 2):
        shop.rows(
            *({"id": f"{n}-{m}", "prompt": "p" * 500} for m in range(3000)), name=f"{n}.jsonl"
        )
    processes = [
        subprocess.Popen(shop.command("add", f"{n}.jsonl"), cwd=shop.folder, env=shop.env)
        for n in (1, 2)
    ]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len(shop.jobs()) == 6000


def test_sume_s_own_cancelled_is_not_in_doubt(desk: Desk) -> None:
    ended(desk, "canceled")
    ok(desk, "retry", "r1", "--yes")
    assert desk.job().attempt == 2


def test_cancel_beside_a_run_that_moves_rows_on(desk: Desk) -> None:
    """What was listed is old by now: each row is judged by what it is when its turn comes."""
    open_rows(desk, 3)
    with open_ledger(desk.place) as ledger:
        listed = ledger.with_status(Status.PENDING)
        for job, word in zip(listed, ("in_progress", "cancelled", "completed"), strict=True):
            ledger_read(ledger, job, word)
        client = sume_resume.Sume(desk.account, desk.clock, False)
        wishes = list(sume_resume.cancel_jobs(ledger, client, desk.clock, listed))
        client.close()
    assert [str(wish.job.status) for wish in wishes] == ["cancelled", "cancelled", "completed"]
    assert [bool(wish.refusal) for wish in wishes] == [False, False, True]
    asked = [r for r in desk.server.requests if r.path.endswith("/cancel")]
    assert len(asked) == 1


def ledger_read(ledger: sume_resume.Ledger, job: Job, word: str) -> Job:
    data = {"id": job.job_id, "status": word, "usage": {"cost": 0.1}, "url": "https://m/x"}
    reading = sume_resume.reading_of(sume_resume.Reply(200, {}, data), job.job_id or "")
    assert reading.status is not None
    if reading.status in sume_resume.FINAL:
        return ledger.record_final(job, reading.status, reading, None, START_MS)
    return ledger.record_status(job, reading, START_MS, START_MS)


def test_cancel_all_beside_a_run_drops_what_is_still_queued(desk: Desk) -> None:
    desk.server.reads_to_finish = 10**6
    desk.add(*clips(3))
    with open_ledger(desk.place) as ledger:
        listed = ledger.with_status(Status.QUEUED)
        sending = ledger.record_prepared(listed[0], START_MS)
        ledger.record_accepted(sending, "job_1", START_MS, START_MS)
        ledger.record_prepared(listed[1], START_MS)
        moved = sume_resume._drop_queued(ledger, listed, sume_resume.Voice(False))
        assert statuses(moved) == ["pending", "sending"]
        assert statuses(ledger.latest()) == ["pending", "sending", "cancelled"]


def test_cancel_that_is_turned_away_for_a_while_is_said_again(desk: Desk) -> None:
    open_rows(desk, 2)
    slow = Reply(429, error("rate_limit_exceeded"), {"Retry-After": "20"})
    desk.server.cancels.extend([slow, slow])
    with open_ledger(desk.place) as ledger:
        client = sume_resume.Sume(desk.account, desk.clock, False)
        jobs = ledger.with_status(Status.PENDING)
        wishes = list(sume_resume.cancel_jobs(ledger, client, desk.clock, jobs))
        client.close()
    assert {str(wish.job.status) for wish in wishes} == {"cancelled"}
    assert sorted(desk.clock.slept)[-2:] >= [20.0, 20.0]


def test_cancel_without_a_network_stops_at_the_first(desk: Desk) -> None:
    open_rows(desk, 3)
    desk.add({"id": "q", "prompt": "queued."})
    with closed_port() as port:
        # The origin is bound: only the port's server is gone.
        account = sume_resume.Account(f"http://127.0.0.1:{port}/v1", desk.server.url, desk.key)
        client = sume_resume.Sume(account, desk.clock, False)
        with open_ledger(desk.place) as ledger:
            jobs = ledger.with_status(Status.PENDING)
            code, count = sume_resume._ask_to_cancel(
                ledger, client, jobs, sume_resume.Voice(False), sume_resume.Exit.DONE
            )
        client.close()
    assert (code, count) == (5, 3)


def test_cancel_that_meets_a_wrong_key_says_what_it_did(desk: Desk) -> None:
    open_rows(desk, 2)
    desk.add({"id": "q", "prompt": "queued."})
    desk.server.cancels.append(Reply(401, error("unauthorized")))
    done = desk.command("cancel", "--all", "--yes", "--json")
    assert done.returncode == 5
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["type"] for line in lines] == ["row", "error", "summary"]
    assert lines[0]["row"] == "q"
    assert lines[-1]["refused"] == 2
    assert lines[-1]["totals"]["by_status"]["cancelled"] == 1


def test_key_as_a_status_word_is_nowhere(desk: Desk) -> None:
    unknown_409(desk)
    desk.server.reads.append(Reply(200, {"id": "job_1", "status": desk.key}))
    done = desk.command("resolve", "r1", "--job-id", "job_1", "--json")
    assert done.returncode == 2
    assert desk.key not in said(done)
    assert "[key]" in said(done)


def test_long_key_is_taken_out_before_anything_is_cut(desk: Desk) -> None:
    desk.key = "K" + "0123456789" * 9
    message = "x" * 250 + " " + desk.key
    desk.server.submits.append(Reply(422, error("bad", message)))
    desk.server.final = lambda job: {"id": job.id, "status": desk.key, "terminal": True}
    desk.add(*clips(2))
    desk.run()
    for name in desk.folder.iterdir():
        assert b"K0123456789" not in name.read_bytes()
    assert not any("K01234" in notice for notice in desk.notices)


@FILE_ONLY
def test_backup_onto_a_name_where_it_would_not_last(desk: Desk, tmp_path: Path) -> None:
    desk.add(*clips(1))
    for name in ("jobs.db-journal", "jobs.db.lock", ".jobs2.db.new", "x.db-wal"):
        refused(desk, "backup", str(tmp_path / name))
    (tmp_path / "old.db-journal").write_bytes(b"left by a kill")
    refused(desk, "backup", str(tmp_path / "old.db"), code=8)
    assert {path.name for path in tmp_path.iterdir()} == {"jobs.db", "old.db-journal"}


@FILE_ONLY
def test_backup_of_a_simulated_ledger_can_be_run(shop: Shop) -> None:
    shop.env.pop("SUME_API_KEY")
    shop.run(shop.rows(*clips(2)), "--simulate", "--deadline", "0.5s")
    assert shop.call("backup", "b.db", "--db", "simulated.db").returncode == 0
    assert (shop.folder / "b.stand-in.db").exists()
    done = shop.run("--simulate", "--db", "b.db")
    assert done.returncode == 0, done.stderr
    assert b"no such job" not in done.stderr


@pytest.mark.parametrize("command", ["status", "retry", "cancel", "resolve"])
def test_row_of_bytes_that_are_no_text(shop: Shop, command: str) -> None:
    shop.invoke("add", shop.rows(*clips(1)))
    more = {"resolve": ["--drop"]}.get(command, [])
    args = [os.fsencode(word) for word in shop.command(command, *more)]
    done = subprocess.run([*args, b"\xff"], cwd=shop.folder, env=shop.env, capture_output=True)
    assert done.returncode == 2, done.stderr
    assert b"no row or job" in done.stderr


def test_warning_comes_before_names_that_may_be_cut(desk: Desk) -> None:
    names = [f"{n:02}" + "n" * 190 for n in range(12)]
    desk.server.on_submit = Reply(409, error("strange"))
    desk.add(*({"id": name, "prompt": name} for name in names))
    desk.run()
    text = refused(desk, "resolve", *names, "--resend")
    assert text.index("may pay twice") < text.index("Buy again")
    assert "and 2 more" in text


# -- simulated --


@FILE_ONLY
def test_simulated_rows_can_be_settled_without_a_key(shop: Shop) -> None:
    """Cancel and resolve of a simulated ledger ask the stand-in, which gives the price back."""
    shop.env.pop("SUME_API_KEY")
    db = ("--db", "simulated.db")
    # Jobs that wait for long enough to be cancelled on a busy machine.
    slow = "import sume_resume as s; s.STAND_IN_QUEUE_S = 1e6; s.STAND_IN_LEAST_MS = 10**8"
    rows = shop.rows({"id": "r1", "prompt": "a"}, {"id": "r2", "prompt": "b", "duration": 61})
    first = shop.run(rows, "--simulate", "--deadline", "1s", code=slow)
    assert first.returncode == 3, first.stderr
    done = shop.call("cancel", "r1", "--yes", *db, code=slow)
    assert done.returncode == 0, done.stderr
    with open_ledger(shop.folder / "simulated.db") as ledger:
        r1, r2 = ledger.attempts("r1")[0], ledger.attempts("r2")[0]
        assert (str(r1.status), r1.cost_micros) == ("cancelled", 0)
        assert str(r2.status) == "rejected"
    again = shop.call("cancel", "r1", "--yes", *db)
    assert again.returncode == 2
