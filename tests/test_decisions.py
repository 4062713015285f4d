"""The pure rooms: frozen ids, bytes and keys, what answers mean, money, pacing, text."""

from __future__ import annotations

import json
import math
import random
import re
import ssl
import unicodedata
from collections import deque
from decimal import Decimal
from io import BytesIO
from typing import Any

import httpx
import pytest
from conftest import START_MS, jsonl, reading_of

import sume_resume
from sume_resume import (
    BACKOFF_CAP_S,
    BACKOFF_FLOOR_S,
    FINAL,
    KEY_TTL_S,
    MAX_MICROS,
    MAX_POLL_HINT_S,
    MIGRATIONS,
    OPEN,
    POST_DEADLINE_S,
    RETRY_AFTER_CAP_S,
    TRANSITIONS,
    Allowance,
    Budget,
    Cost,
    Defaults,
    Failure,
    Gate,
    Halt,
    InputLog,
    Kind,
    Landing,
    Miss,
    NewRow,
    Outcome,
    Output,
    Pause,
    QueueWindow,
    Reading,
    Reply,
    Said,
    Seen,
    Status,
    Step,
    UsageError,
    allowance_of,
    backoff_s,
    bare,
    canonical,
    classify,
    cost_of,
    describe,
    idempotency_key,
    inert,
    job_id_of,
    last_word,
    link_for,
    merge,
    next_step,
    outcome_of,
    parse_reply,
    parse_time,
    poll_wait_s,
    quiet,
    read_rows,
    result_links,
    retry_after_s,
    row_id,
    send_before_ms,
    show_time,
    show_usd,
    too_old,
    unwrap,
    usd_to_micros,
)

NO_COST = Cost(None, None, None)


def rows_of(*rows: dict[str, Any], name: str = "a.jsonl", **defaults: Any) -> list[NewRow]:
    log = InputLog()
    found = read_rows_of(jsonl(*rows), name, log, **defaults)
    log.check()
    return found


def read_rows_of(data: bytes, name: str, log: InputLog, **defaults: Any) -> list[NewRow]:
    return list(read_rows(BytesIO(data), name, Defaults(**defaults), log))


def reply(code: int, body: Any = None, **headers: str) -> Reply:
    """A reply as the client makes it, from the bytes of the wire."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return parse_reply(code, named, raw)


def err(code: object, message: str = "no", **more: Any) -> dict[str, Any]:
    return {"error": {"code": code, "message": message} | more}


# --- frozen: an upgrade must make the same ids, bytes and keys for ever ---

CAT = {"prompt": "cat", "duration": 4}
CAT_BODY = b'{"duration":4,"mode":"async","model":"sume/auto","prompt":"cat"}'
SET = {"model": "kling-3", "resolution": "720p", "seed": 7}

# Name: rows, defaults, and (row id, kind, body, key of attempt 1, of attempt 2) of the last.
GOLDEN: dict[str, tuple[list[dict[str, Any]], dict[str, Any], tuple[str, str, bytes, str, str]]] = {
    "plain": (
        [CAT],
        {},
        (
            "57c9cb0d30315c2d",
            "video",
            CAT_BODY,
            "sr-c61ed2a7e243c549d172ef8e2718dd6d38c1d1f4",
            "sr-2dc2fd1815ce7325df98b1dfb68f660246dbceb2",
        ),
    ),
    "names in another order": (
        [{"duration": 4, "prompt": "cat"}],
        {},
        (
            "57c9cb0d30315c2d",
            "video",
            CAT_BODY,
            "sr-c61ed2a7e243c549d172ef8e2718dd6d38c1d1f4",
            "sr-2dc2fd1815ce7325df98b1dfb68f660246dbceb2",
        ),
    ),
    "second of two equal lines": (
        [CAT, CAT],
        {},
        (
            "55875a62d4b838c1",
            "video",
            CAT_BODY,
            "sr-d85b627b19479ee604d14f85c6c449a2a827d3b0",
            "sr-b9a174582f968a5ef834ebc7a22bb12941ee6e37",
        ),
    ),
    "take 2": (
        [CAT],
        {"take": 2},
        (
            "c77eb7fca4b0107e",
            "video",
            CAT_BODY,
            "sr-beb8849e78e13aa2351877f4bf78457f1cffec9f",
            "sr-7f1f87f0b1bc869c751d518199dde6832d6b4c2a",
        ),
    ),
    "take 2, second line": (
        [CAT, CAT],
        {"take": 2},
        (
            "9f0d97d4d79bac28",
            "video",
            CAT_BODY,
            "sr-5b5e1e19e556414e6b50da9a64f56314c2035249",
            "sr-cbd15d8ba8145650cc10c09e1cef68ca2ae550b8",
        ),
    ),
    "non-ASCII prompt": (
        [{"prompt": "Zürich 日本 🎬"}],
        {},
        (
            "e3e7e92822e85829",
            "video",
            '{"mode":"async","model":"sume/auto","prompt":"Zürich 日本 🎬"}'.encode(),
            "sr-00d85bedf7fe663ededd886cbbfb9800f2e24c36",
            "sr-6ad1b39a83103ef9cd299b0152c09e284e126ec8",
        ),
    ),
    "image": (
        [{"prompt": "logo", "kind": "image"}],
        {},
        (
            "a01928e3a4d33f98",
            "image",
            b'{"mode":"async","model":"sume/auto","prompt":"logo"}',
            "sr-e629ccb4d210476f2c5d4df6ed02da1d3c9f6119",
            "sr-768f51785f558d86635b7fa27bc1afc8eaddc37f",
        ),
    ),
    # Defaults go into the body and never into the row id.
    "set fields": (
        [CAT],
        {"fields": SET},
        (
            "57c9cb0d30315c2d",
            "video",
            b'{"duration":4,"mode":"async","model":"kling-3","prompt":"cat",'
            b'"resolution":"720p","seed":7}',
            "sr-35e859a9e164ad08aab926f442fc5fe5a3fe4ee7",
            "sr-100858995f762fb302df6350abc40d7662fe5cba",
        ),
    ),
    "own id": (
        [{"id": "r1"} | CAT],
        {},
        (
            "r1",
            "video",
            CAT_BODY,
            "sr-8f051c1675bffcfca6ab9a760a2074b66a1aeff2",
            "sr-823f7f76373e59d2276e334abd2ff096d362980c",
        ),
    ),
    "own id, take 2": (
        [{"id": "r1"} | CAT],
        {"take": 2},
        (
            "r1",
            "video",
            CAT_BODY,
            "sr-8f051c1675bffcfca6ab9a760a2074b66a1aeff2",
            "sr-823f7f76373e59d2276e334abd2ff096d362980c",
        ),
    ),
    "own non-ASCII id": (
        [{"id": "zürich"} | CAT],
        {},
        ("zürich", "video", CAT_BODY, "sr-a9b2c14c308c5342155e8d6339a95bcef3a5e83e", ""),
    ),
    "own id, image by default": (
        [{"id": "r1"} | CAT],
        {"kind": "image"},
        ("r1", "image", CAT_BODY, "sr-ef66b2364957c28e648ab8c3061aa4a6d23d6089", ""),
    ),
}


@pytest.mark.parametrize(("rows", "defaults", "wanted"), GOLDEN.values(), ids=GOLDEN)
def test_golden_row_id_body_and_key(
    rows: list[dict[str, Any]], defaults: dict[str, Any], wanted: tuple[str, str, bytes, str, str]
) -> None:
    row = rows_of(*rows, **defaults)[-1]
    name, kind, body, first, second = wanted
    assert (row.row, row.kind, row.body) == (name, kind, body)
    assert idempotency_key("test", row.kind, row.row, row.body, 1) == first
    if second:
        assert idempotency_key("test", row.kind, row.row, row.body, 2) == second


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b'\xef\xbb\xbf{"prompt":"cat","duration":4}\r\n', "a.jsonl"),
        (b'[{"duration": 4, "prompt": "cat"}]', "a.json"),
        (b"prompt,duration\ncat,4\n", "a.csv"),
        (b"\xef\xbb\xbfprompt,duration,seed\r\ncat,4,\r\n", "a.csv"),
        (b'{"prompt":"cat","duration":4,"model":null,"kind":null}\n', "a.jsonl"),
    ],
    ids=["jsonl with bom and crlf", "array", "csv", "csv with an empty cell", "nulls left out"],
)
def test_the_same_row_in_any_form_is_the_same_purchase(data: bytes, name: str) -> None:
    log = InputLog()
    (row,) = read_rows_of(data, name, log)
    log.check()
    assert (row.row, row.body) == ("57c9cb0d30315c2d", CAT_BODY)


def test_golden_key_of_another_namespace() -> None:
    key = idempotency_key("build-42", "video", "r1", CAT_BODY, 1)
    assert key == "sr-293e002a38df1f4b29397dad3d03db0361a00d52"


def test_each_fact_alone_makes_another_key() -> None:
    facts: list[tuple[str, Kind, str, bytes, int]] = [
        ("a", "video", "r", b"x", 1),
        ("b", "video", "r", b"x", 1),
        ("a", "image", "r", b"x", 1),
        ("a", "video", "s", b"x", 1),
        ("a", "video", "r", b"y", 1),
        ("a", "video", "r", b"x", 2),
    ]
    keys = {idempotency_key(*each) for each in facts}
    assert len(keys) == 6
    assert all(re.fullmatch(r"sr-[0-9a-f]{40}", key) for key in keys)


def test_row_ids_differ_by_ordinal_and_take() -> None:
    own = canonical(CAT)
    ids = {row_id(own, ordinal, take) for ordinal in (1, 2, 3) for take in (1, 2, 3)}
    assert len(ids) == 9
    assert all(re.fullmatch(r"[0-9a-f]{16}", found) for found in ids)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "\ud800"], ids=["nan", "inf", "-inf", "surrogate"]
)
def test_canonical_refuses_what_has_no_canonical_form(value: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        canonical({"a": value})


# --- states ---


def test_the_schema_knows_the_statuses_of_the_code() -> None:
    text = "".join(statement for step in MIGRATIONS for statement in step)
    (listed,) = re.findall(r"CHECK \(status IN \(([^)]*)\)\)", text)
    assert sorted(re.findall(r"'(\w+)'", listed)) == sorted(Status)


def test_finals_have_no_exits_and_every_status_is_reachable() -> None:
    assert set(TRANSITIONS) == set(Status)
    assert {"completed", "failed", "cancelled", "expired", "rejected"} == FINAL
    assert all(not TRANSITIONS[status] for status in FINAL)
    reached, new = set(), {Status.QUEUED}
    while new:
        reached |= new
        new = {after for status in new for after in TRANSITIONS[status]} - reached
    assert reached == set(Status)
    # What Sume may be working on, or may have, never becomes "surely not sent".
    assert all(Status.QUEUED not in TRANSITIONS[status] for status in OPEN)


# --- requests without an answer ---

MISSES = {
    httpx.TimeoutException: Miss.UNKNOWN,
    httpx.ConnectTimeout: Miss.NOT_SENT,
    httpx.ReadTimeout: Miss.UNKNOWN,
    httpx.WriteTimeout: Miss.UNKNOWN,
    httpx.PoolTimeout: Miss.NOT_SENT,
    httpx.NetworkError: Miss.UNKNOWN,
    httpx.ConnectError: Miss.NOT_SENT,
    httpx.ReadError: Miss.UNKNOWN,
    httpx.WriteError: Miss.UNKNOWN,
    httpx.CloseError: Miss.UNKNOWN,
    httpx.ProtocolError: Miss.UNKNOWN,
    httpx.LocalProtocolError: Miss.SETTINGS,
    httpx.RemoteProtocolError: Miss.UNKNOWN,
    httpx.ProxyError: Miss.NOT_SENT,
    httpx.UnsupportedProtocol: Miss.SETTINGS,
}


def subclasses(cls: type) -> set[type]:
    direct: set[type] = set(cls.__subclasses__())
    return direct.union(*(subclasses(each) for each in direct))


def test_every_transport_error_of_httpx_is_in_the_table() -> None:
    ours = {cls for cls in subclasses(httpx.TransportError) if cls.__module__.startswith("httpx")}
    assert ours == set(MISSES)


@pytest.mark.parametrize(("cls", "miss"), MISSES.items(), ids=[cls.__name__ for cls in MISSES])
def test_transport_error(cls: Any, miss: Miss) -> None:
    failure = classify(cls("some text"))
    assert failure.miss is miss
    assert cls.__name__ in failure.text


@pytest.mark.parametrize(
    ("exc", "miss"),
    [
        (httpx.TransportError("x"), Miss.UNKNOWN),
        (httpx.DecodingError("x"), Miss.UNKNOWN),
        (httpx.TooManyRedirects("x"), Miss.UNKNOWN),
        (httpx.InvalidURL("x"), Miss.SETTINGS),
        (UnicodeEncodeError("ascii", "ü", 0, 1, "x"), Miss.SETTINGS),
        (Exception("x"), Miss.UNKNOWN),
        (ValueError(), Miss.UNKNOWN),
        (OSError(28, "x"), Miss.UNKNOWN),
        (RuntimeError("x"), Miss.UNKNOWN),
        (MemoryError(), Miss.UNKNOWN),
        (RecursionError("x"), Miss.UNKNOWN),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_other_exceptions_in_doubt_may_have_arrived(exc: Exception, miss: Miss) -> None:
    assert classify(exc).miss is miss


@pytest.mark.parametrize("how", ["cause", "context", "deep", "itself"])
def test_certificate_error_is_a_setting(how: str) -> None:
    bad = ssl.SSLCertVerificationError(1, "certificate verify failed")
    bad.verify_message = "certificate has expired"
    exc: Exception = bad
    if how != "itself":
        inner = OSError("tls")
        exc = httpx.ConnectError("x")
        if how == "cause":
            exc.__cause__ = bad
        elif how == "context":
            exc.__context__ = bad
        else:
            exc.__cause__, inner.__context__ = inner, bad
    failure = classify(exc)
    assert failure.miss is Miss.SETTINGS
    assert "certificate has expired" in failure.text


def test_other_tls_trouble_only_waits() -> None:
    exc = httpx.ConnectError("x")
    exc.__cause__ = ssl.SSLError(1, "UNEXPECTED_EOF_WHILE_READING")
    assert classify(exc).miss is Miss.NOT_SENT


# --- what the answer to a submit means (faults.md 2) ---

PAGE = b"<html><body>Bad gateway</body></html>"
L, P, H = Landing, Pause, Halt
OUTCOMES: dict[str, tuple[Reply | Failure, dict[str, Any]]] = {
    "not sent": (Failure(Miss.NOT_SENT, "x"), {"landing": L.NOT_LANDED, "pause": P.OFFLINE}),
    "settings": (Failure(Miss.SETTINGS, "x"), {"landing": L.NOT_LANDED, "halt": H.EVERYTHING}),
    "stale": (Failure(Miss.STALE, "x"), {"landing": L.STALE, "pause": P.RATE}),
    "no answer": (Failure(Miss.UNKNOWN, "x"), {"landing": L.UNKNOWN, "pause": P.RATE}),
    "202": (reply(202, {"id": "job_a"}), {"landing": L.ACCEPTED, "job_id": "job_a"}),
    "200 replay": (
        reply(200, {"data": {"job": {"id": "job_a"}, "idempotency_hit": True}}),
        {"landing": L.ACCEPTED, "job_id": "job_a", "hit": True},
    ),
    "200 replay, hit at the root": (
        reply(200, {"data": {"id": "job_a"}, "idempotency_hit": True}),
        {"landing": L.ACCEPTED, "job_id": "job_a", "hit": True},
    ),
    "hit that is no bool": (
        reply(202, {"id": "job_a", "idempotency_hit": "no"}),
        {"landing": L.ACCEPTED, "job_id": "job_a"},
    ),
    "room at the root": (
        reply(202, {"id": "job_a", "generation_limits": {"queue_capacity_remaining": 3}}),
        {"landing": L.ACCEPTED, "job_id": "job_a", "room": 3},
    ),
    "room under data": (
        reply(202, {"data": {"id": "job_a", "generation_limits": {"queue_capacity_remaining": 0}}}),
        {"landing": L.ACCEPTED, "job_id": "job_a", "room": 0},
    ),
    "room beside data": (
        reply(202, {"data": {"id": "job_a"}, "generation_limits": {"queue_capacity_remaining": 2}}),
        {"landing": L.ACCEPTED, "job_id": "job_a", "room": 2},
    ),
    "room that is no number": (
        reply(202, {"id": "job_a", "generation_limits": {"queue_capacity_remaining": True}}),
        {"landing": L.ACCEPTED, "job_id": "job_a"},
    ),
    "2xx without an id": (
        reply(200, {"ok": True}),
        {"landing": L.UNKNOWN, "doubtful": True, "stray": True},
    ),
    "2xx with a correlation id": (
        reply(202, {"request_id": "req_1"}),
        {"landing": L.UNKNOWN, "doubtful": True, "stray": True},
    ),
    "2xx web page": (reply(200, PAGE), {"landing": L.UNKNOWN, "doubtful": True, "stray": True}),
    "2xx empty": (reply(202, b""), {"landing": L.UNKNOWN, "doubtful": True, "stray": True}),
    "2xx truncated": (
        reply(202, b'{"data": {"job"'),
        {"landing": L.UNKNOWN, "doubtful": True, "stray": True},
    ),
    "2xx list": (reply(202, []), {"landing": L.UNKNOWN, "doubtful": True, "stray": True}),
    "2xx error body": (
        reply(200, err("oops")),
        {"landing": L.UNKNOWN, "doubtful": True, "stray": True},
    ),
    "301": (reply(301, b""), {"landing": L.NOT_LANDED, "halt": H.EVERYTHING}),
    "308": (reply(308, {"id": "job_a"}), {"landing": L.NOT_LANDED, "halt": H.EVERYTHING}),
    "400": (reply(400, err("bad_request")), {"landing": L.REFUSED}),
    "400 bare": (reply(400, b""), {"landing": L.REFUSED}),
    "413": (reply(413, err("too_large")), {"landing": L.REFUSED}),
    "415": (reply(415, err("bad_type")), {"landing": L.REFUSED}),
    "422": (reply(422, err("invalid_request")), {"landing": L.REFUSED}),
    "403 policy": (reply(403, err("content_policy_rejected")), {"landing": L.REFUSED}),
    "404 coded": (
        reply(404, err("not_found", "unknown model")),
        {"landing": L.REFUSED, "stray": True},
    ),
    "400 key": (reply(400, err("idempotency_mismatch")), {"landing": L.CONFLICT}),
    "422 key": (reply(422, err("idempotency_key_reused")), {"landing": L.CONFLICT}),
    "409 key": (reply(409, err("idempotency_key_reused")), {"landing": L.CONFLICT}),
    "409 nobody knows": (reply(409, err("strange")), {"landing": L.CONFLICT}),
    "409 bare": (reply(409, b""), {"landing": L.CONFLICT}),
    "409 in flight": (reply(409, err("request_in_progress")), {"landing": L.UNKNOWN}),
    "409 key in use": (reply(409, err("idempotency_key_in_use")), {"landing": L.UNKNOWN}),
    "408": (reply(408, err("timeout")), {"landing": L.UNKNOWN, "pause": P.RATE}),
    "425": (reply(425, b""), {"landing": L.UNKNOWN, "pause": P.RATE}),
    "401": (reply(401, err("unauthorized")), {"landing": L.NOT_LANDED, "halt": H.EVERYTHING}),
    "403 account": (reply(403, err("forbidden")), {"landing": L.NOT_LANDED, "halt": H.EVERYTHING}),
    "403 bare": (reply(403, PAGE), {"landing": L.NOT_LANDED, "halt": H.EVERYTHING}),
    "404 bare": (reply(404, PAGE), {"landing": L.NOT_LANDED, "halt": H.EVERYTHING}),
    "405 bare": (reply(405, b""), {"landing": L.NOT_LANDED, "halt": H.EVERYTHING}),
    "410 bare": (reply(410, b""), {"landing": L.NOT_LANDED, "halt": H.EVERYTHING}),
    "402": (reply(402, err("insufficient_credits")), {"landing": L.NOT_LANDED, "halt": H.SUBMITS}),
    "429 rate": (
        reply(429, err("rate_limit_exceeded"), Retry_After="7"),
        {"landing": L.NOT_LANDED, "pause": P.RATE, "retry_after_s": 7.0},
    ),
    "429 queue": (
        reply(429, err("queue_full"), Retry_After="7"),
        {"landing": L.NOT_LANDED, "pause": P.QUEUE, "retry_after_s": 7.0},
    ),
    "429 bare": (reply(429, b""), {"landing": L.NOT_LANDED, "pause": P.RATE}),
    "503": (
        reply(503, b"", Retry_After="7"),
        {"landing": L.UNKNOWN, "pause": P.RATE, "retry_after_s": 7.0},
    ),
    "500": (reply(500, err("internal_error")), {"landing": L.UNKNOWN, "pause": P.RATE}),
    "502": (reply(502, PAGE), {"landing": L.UNKNOWN, "pause": P.RATE}),
    "504": (reply(504, err("timeout")), {"landing": L.UNKNOWN, "pause": P.RATE}),
    "524": (reply(524, PAGE), {"landing": L.UNKNOWN, "pause": P.RATE}),
    "500 not retryable": (
        reply(500, err("x", retryable=False)),
        {"landing": L.UNKNOWN, "pause": P.RATE, "doubtful": True},
    ),
    "418": (reply(418, b""), {"landing": L.UNKNOWN, "pause": P.RATE, "doubtful": True}),
    "error as a string": (reply(400, {"error": "bad_request"}), {"landing": L.REFUSED}),
    "error code as a number": (reply(404, err(404)), {"landing": L.REFUSED, "stray": True}),
}


@pytest.mark.parametrize(("answer", "wanted"), OUTCOMES.values(), ids=OUTCOMES)
def test_outcome_of(answer: Reply | Failure, wanted: dict[str, Any]) -> None:
    outcome = outcome_of(answer)
    # Whatever is not named is at its default, the trouble's text aside.
    assert outcome == Outcome(trouble=outcome.trouble, **wanted)
    assert bool(outcome.trouble) == (outcome.landing is not Landing.ACCEPTED)
    assert "<" not in outcome.trouble


def test_no_answer_without_a_clear_no_is_ever_surely_not_sent() -> None:
    """Only codes that refuse before any work may bring a row back to queued."""
    for code in range(200, 600):
        for body in (b"", PAGE, json.dumps(err("strange")).encode()):
            outcome = outcome_of(parse_reply(code, {}, body))
            if outcome.landing is Landing.NOT_LANDED:
                assert code in {401, 402, 403, 404, 405, 410, 429} or 300 <= code < 400
            if outcome.landing is Landing.REFUSED:
                assert code in {400, 403, 404, 410, 413, 415, 422}


def test_describe_names_the_fields_and_hides_the_query() -> None:
    body = err(
        "invalid_request",
        "see https://x.invalid/p?sig=SECRET",
        details={"errors": [{"path": "duration", "message": "too long"}]},
    )
    text = describe(reply(422, body))
    assert text.startswith("HTTP 422 invalid_request: ")
    assert "duration: too long" in text
    assert "SECRET" not in text


# --- headers ---

SAID = "Wed, 21 Oct 2026 07:28:00 GMT"


@pytest.mark.parametrize(
    ("value", "date", "wanted"),
    [
        ("7", None, 7.0),
        (" 7 ", None, 7.0),
        ("0", None, 0.0),
        ("007", None, 7.0),
        (str(10**8), None, RETRY_AFTER_CAP_S),
        ("9" * 400, None, None),
        ("Wed, 21 Oct 2026 07:29:30 GMT", SAID, 90.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", SAID, 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", SAID, 0.0),
        ("Wed, 21 Oct 2099 07:28:00 GMT", SAID, RETRY_AFTER_CAP_S),
        ("Sunday, 06-Nov-94 08:49:37 GMT", "Sun, 06 Nov 1994 08:49:30 GMT", 7.0),
        # Without the server's own clock a date says nothing.
        ("Wed, 21 Oct 2026 07:29:30 GMT", None, None),
        ("Wed, 21 Oct 2026 07:29:30 GMT", "yesterday", None),
        ("Wed, 21 Oct 2026 07:29:30", SAID, None),
        ("Wed, 99 Oct 2026 07:29:30 GMT", SAID, None),
        ("Wed, 21 Oct 99999 07:29:30 GMT", SAID, None),
        ("GMT", SAID, None),
        ("", SAID, None),
        ("-1", None, None),
        ("+1", None, None),
        ("1.5", None, None),
        ("1_0", None, None),
        ("1e3", None, None),
        ("٣", None, None),
        ("\uff13", None, None),
        ("soon", SAID, None),
    ],
)
def test_retry_after(value: str, date: str | None, wanted: float | None) -> None:
    headers = {"retry-after": value} | ({"date": date} if date else {})
    assert retry_after_s(headers) == wanted


def test_retry_after_absent() -> None:
    assert retry_after_s({}) is None
    assert retry_after_s({"date": SAID}) is None


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({"ratelimit-remaining": "5", "ratelimit-reset": "30"}, Allowance(5, 30.0)),
        ({"x-ratelimit-remaining": "5", "x-ratelimit-reset": "30"}, Allowance(5, 30.0)),
        ({"ratelimit-remaining": "0", "x-ratelimit-reset": "30"}, Allowance(0, 30.0)),
        (
            {
                "ratelimit-remaining": "1",
                "ratelimit-reset": "2",
                "x-ratelimit-remaining": "8",
                "x-ratelimit-reset": "9",
            },
            Allowance(1, 2.0),
        ),
        ({"ratelimit": '"default";r=50;t=30'}, Allowance(50, 30.0)),
        ({"ratelimit": '"default"; t=30; r=0'}, Allowance(0, 30.0)),
        # As a unix time, from others: no longer than a server may ask for.
        (
            {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "179000000"},
            Allowance(0, RETRY_AFTER_CAP_S),
        ),
        ({}, None),
        ({"ratelimit-remaining": "5"}, None),
        ({"ratelimit-reset": "5"}, None),
        ({"ratelimit-remaining": "-1", "ratelimit-reset": "5"}, None),
        ({"ratelimit-remaining": "1.5", "ratelimit-reset": "5"}, None),
        ({"ratelimit-remaining": "٣", "ratelimit-reset": "5"}, None),
        ({"ratelimit-remaining": "9" * 400, "ratelimit-reset": "5"}, None),
        ({"ratelimit": '"default";r=٣;t=30'}, None),
        ({"ratelimit": '"default";r=50'}, None),
        ({"ratelimit": "garbage"}, None),
    ],
)
def test_allowance(headers: dict[str, str], wanted: Allowance | None) -> None:
    assert allowance_of(headers) == wanted


# --- job ids ---


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"data": {"job": {"id": "job_a"}}}, "job_a"),
        ({"data": {"job_id": "job_a"}}, "job_a"),
        ({"data": {"request_id": "job_a"}, "request_id": "req_1"}, "job_a"),
        ({"data": {"id": "job_a"}}, "job_a"),
        ({"id": "job_a", "request_id": "req_1"}, "job_a"),
        ({"job_id": "job_a"}, "job_a"),
        ({"job": {"id": "job_a"}}, "job_a"),
        ({"data": {"job": {"id": "job_a"}, "request_id": "job_b", "id": "job_c"}}, "job_a"),
        ({"data": None, "id": "job_a"}, "job_a"),
        ({"data": [], "id": "job_a"}, "job_a"),
        ({"id": "gen-vid-1790000000-abcdefghij0123456789"}, None),
        ({"id": "A" * 200}, None),
    ],
)
def test_job_id(body: Any, wanted: str | None) -> None:
    assert job_id_of(body) == (wanted or body["id"])


@pytest.mark.parametrize(
    "body",
    [
        {"request_id": "req_1"},
        {"request_id": "job_1"},
        {"request_id": "req_1", "data": {"status": "QUEUED"}},
        {"request_id": "req_1", "error": {"code": "x", "request_id": "req_1"}},
        {"data": {"error": {"request_id": "req_1"}}},
        {"id": ""},
        {"id": None},
        {"id": 7},
        {"id": True},
        {"id": ["job_a"]},
        {"id": "a/b"},
        {"id": "../me"},
        {"id": ".."},
        {"id": "."},
        {"id": "a?x=1"},
        {"id": "a#b"},
        {"id": "a%2fb"},
        {"id": "a b"},
        {"id": "job_a\n"},
        {"id": "jöb"},
        {"id": "٣"},
        {"id": "x" * 201},
        {},
        [],
        None,
        "job_a",
    ],
    ids=repr,
)
def test_no_job_id(body: Any) -> None:
    assert job_id_of(body) is None


# --- what a read says ---

WORDS = {
    Status.PENDING: ["pending", "queued", "in_queue"],
    Status.IN_PROGRESS: ["in_progress", "processing", "running"],
    Status.COMPLETED: ["completed", "complete", "success", "succeeded", "ready"],
    Status.FAILED: ["failed", "error", "errored", "aborted"],
    Status.CANCELLED: ["cancelled", "canceled"],
    Status.EXPIRED: ["expired"],
}
FORMS: dict[str, Any] = {
    "as is": str,
    "upper": str.upper,
    "title": str.title,
    "padded": lambda word: f" {word}\t",
    "dashed": lambda word: word.replace("_", "-"),
    "spaced": lambda word: word.replace("_", " "),
}
SHAPES: dict[str, Any] = {
    "flat": lambda word: {"status": word},
    "sume_status": lambda word: {"sume_status": word},
    "in data": lambda word: {"data": {"status": word}, "request_id": "req_1"},
    "in data.job": lambda word: {"data": {"job": {"status": word}}},
    "data is null": lambda word: {"data": None, "status": word},
    "beside a twin": lambda word: {"data": {"status": "TWIN", "sume_status": word}},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("word", "status"), [(word, status) for status, words in WORDS.items() for word in words]
)
def test_status_words(word: str, status: Status, shape: Any) -> None:
    for form in FORMS.values():
        reading = reading_of(reply(200, shape(form(word))))
        assert reading.said is Said.STATUS
        assert reading.status is status
        assert reading.word == form(word).strip()
        assert not reading.ended


@pytest.mark.parametrize("word", ["on_hold", "COMPLETED!", "un completed", "完了", "none"])
@pytest.mark.parametrize("terminal", [None, False, "true", 1])
def test_unknown_word_stays_open(word: str, terminal: object) -> None:
    reading = reading_of(reply(200, {"status": word, "terminal": terminal}))
    assert (reading.said, reading.status, reading.word) == (Said.STATUS, None, word)
    assert not reading.ended
    assert next_step("video", reading, Seen()) is Step.POLL


@pytest.mark.parametrize(
    ("word", "ended"),
    [("on_hold", True), ("processing", True), ("completed", False), ("failed", False)],
)
@pytest.mark.parametrize("enveloped", [False, True])
def test_terminal_is_believed_over_a_word_that_is_not_final(
    word: str, ended: bool, enveloped: bool
) -> None:
    job = {"status": word, "terminal": True}
    reading = reading_of(reply(200, {"data": job} if enveloped else job))
    assert reading.ended is ended


@pytest.mark.parametrize(
    "body",
    [
        {"status": None},
        {"status": ""},
        {"status": "  "},
        {"status": 7},
        {"status": True},
        {"status": ["completed"]},
        {"data": {"terminal": True}},
        {},
        [],
        None,
        "completed",
        err("oops"),
        {"request_id": "req_1", "error": "oops"},
        PAGE,
        b"",
        b'{"status": "comp',
        b"[" * 100_000,
        b'{"status": "completed", "n": ' + b"9" * 5000 + b"}",
        b"\xff\xfe{",
    ],
    ids=lambda body: repr(body)[:40],
)
def test_a_read_without_a_status_is_a_bad_read(body: Any) -> None:
    reading = reading_of(reply(200, body))
    assert reading.said is Said.BAD
    assert reading.trouble
    assert "<" not in reading.trouble


@pytest.mark.parametrize(
    ("answer", "said", "pause"),
    [
        (Failure(Miss.NOT_SENT, "x"), Said.PAUSED, Pause.OFFLINE),
        (Failure(Miss.SETTINGS, "x"), Said.HALTED, None),
        (Failure(Miss.UNKNOWN, "x"), Said.BAD, None),
        (reply(429, err("rate_limit_exceeded")), Said.PAUSED, Pause.RATE),
        (reply(503, b""), Said.PAUSED, Pause.RATE),
        (reply(401, err("unauthorized")), Said.HALTED, None),
        (reply(403, err("forbidden")), Said.HALTED, None),
        (reply(404, err("not_found")), Said.GONE, None),
        (reply(404, {"error": "not_found"}), Said.GONE, None),
        (reply(410, err("gone")), Said.GONE, None),
        (reply(404, PAGE), Said.HALTED, None),
        (reply(404, b""), Said.HALTED, None),
        (reply(404, {"detail": "Not Found"}), Said.HALTED, None),
        (reply(404, err("route_not_found")), Said.HALTED, None),
        (reply(410, b""), Said.HALTED, None),
        (reply(405, b""), Said.HALTED, None),
        (reply(302, b""), Said.HALTED, None),
        (reply(409, err("job_not_completed")), Said.NOT_READY, None),
        (reply(409, err("strange")), Said.BAD, None),
        (reply(400, err("bad_request")), Said.BAD, None),
        (reply(408, b""), Said.BAD, None),
        (reply(500, err("internal_error")), Said.BAD, None),
        (reply(502, PAGE), Said.BAD, None),
        (reply(504, b""), Said.BAD, None),
        (reply(204, b""), Said.BAD, None),
    ],
    ids=lambda value: (
        f"{value.code} {str(value.data or value.flaw)[:30]}"
        if isinstance(value, Reply)
        else (f"{value.miss.name}" if isinstance(value, Failure) else "")
    ),
)
def test_reading_of_codes(answer: Reply | Failure, said: Said, pause: Pause | None) -> None:
    for of_result in (False, True):
        reading = reading_of(answer, of_result)
        code = answer.code if isinstance(answer, Reply) else 0
        # 408 and 425 ask to come again.
        refused = 300 <= code < 500 and code not in (408, 425, 429)
        refused = refused and said is not Said.NOT_READY
        # A result route that refuses says nothing of the job, which was read.
        wanted = Said.GONE if of_result and refused else said
        assert (reading.said, reading.pause) == (wanted, pause)
        assert reading.trouble
        assert "<" not in reading.trouble


def test_no_code_and_no_failure_of_a_read_is_a_last_word() -> None:
    for code in range(200, 600):
        reading = reading_of(parse_reply(code, {}, json.dumps(err("failed")).encode()))
        assert reading.said is not Said.STATUS
        assert reading.status is None


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("next_poll_after_seconds", 40, 40.0),
        ("next_poll_after_seconds", 2.5, 2.5),
        ("next_poll_after_seconds", 300, 300.0),
        ("next_poll_after_seconds", 301, MAX_POLL_HINT_S),
        ("next_poll_after_seconds", 10**400, MAX_POLL_HINT_S),
        ("next_poll_after_seconds", 0, None),
        ("next_poll_after_seconds", -5, None),
        ("next_poll_after_seconds", None, None),
        ("next_poll_after_seconds", True, None),
        ("next_poll_after_seconds", False, None),
        ("next_poll_after_seconds", "40", None),
        ("next_poll_after_seconds", [40], None),
        ("recommended_poll_interval_seconds", 2, 2.0),
        ("recommended_poll_interval_seconds", 10**9, MAX_POLL_HINT_S),
        ("elsewhere", 2, None),
    ],
)
@pytest.mark.parametrize("enveloped", [False, True])
def test_poll_hint(name: str, value: object, wanted: float | None, enveloped: bool) -> None:
    job = {"status": "processing", name: value}
    reading = reading_of(reply(200, {"data": job} if enveloped else job))
    assert reading.hint_s == wanted
    assert MAX_POLL_HINT_S == 300


def test_the_first_named_hint_comes_first() -> None:
    job = {
        "status": "processing",
        "next_poll_after_seconds": 40,
        "recommended_poll_interval_seconds": 2,
    }
    assert reading_of(reply(200, job)).hint_s == 40
    job["next_poll_after_seconds"] = None
    assert reading_of(reply(200, job)).hint_s == 2


@pytest.mark.parametrize(
    "job",
    [
        {"error": "it broke"},
        {"error": {"code": "x", "message": "it broke"}},
        {"error": {"message": "it broke"}},
        {"error": {"public_reason": "it broke"}},
        {"job": {"error": {"message": "it broke"}}},
    ],
    ids=repr,
)
def test_error_of_a_job(job: dict[str, Any]) -> None:
    for body in ({"status": "failed"} | job, {"data": {"status": "failed"} | job}):
        assert reading_of(reply(200, body)).error == "it broke"


@pytest.mark.parametrize("error", [None, "", {}, [], 0, False])
def test_no_error_of_a_job(error: object) -> None:
    reading = reading_of(reply(200, {"status": "completed", "error": error}))
    assert (reading.said, reading.error) == (Said.STATUS, "")


def test_a_result_without_a_word_is_completed_by_its_file() -> None:
    body = {"data": {"result": {"video_url": "https://m.invalid/a.mp4"}}}
    assert reading_of(reply(200, body), of_result=True).status is Status.COMPLETED
    assert reading_of(reply(200, body)).said is Said.BAD


def test_allowance_of_a_read() -> None:
    answer = reply(200, {"status": "queued"}, RateLimit_Remaining="3", RateLimit_Reset="9")
    assert reading_of(answer).allowance == Allowance(3, 9.0)
    assert reading_of(reply(429, b"", Retry_After="4")).retry_after_s == 4.0


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ({"data": {"a": 1}, "b": 2}, {"a": 1}),
        ({"data": [1], "b": 2}, {"data": [1], "b": 2}),
        ({"b": 2}, {"b": 2}),
        ([], {}),
        (None, {}),
    ],
)
def test_unwrap(data: object, wanted: object) -> None:
    assert unwrap(data) == wanted


# --- money ---


def cost_on_the_wire(usage: str) -> Cost:
    """Read a cost from the bytes of an answer, so that odd literals take their real way."""
    answer = parse_reply(200, {}, b'{"status":"completed","usage":%s}' % usage.encode())
    cost: Cost = reading_of(answer).cost
    return cost


@pytest.mark.parametrize(
    ("usage", "micros", "state"),
    [
        ('{"captured_usd_micros": 100, "refunded_usd_micros": 30}', 70, "refunded"),
        ('{"captured_usd_micros": 100, "refunded_usd_micros": 100}', 0, "refunded"),
        ('{"captured_usd_micros": 100, "refunded_usd_micros": 0}', 100, "captured"),
        ('{"captured_usd_micros": 100}', 100, "captured"),
        ('{"captured_amount_usd_micros": 100}', 100, "captured"),
        ('{"captured_usd_micros": 0}', 0, "captured"),
        ('{"captured_usd_micros": 100, "status": "Captured"}', 100, "captured"),
        ('{"captured_usd_micros": 100, "billable_usd_micros": 90, "cost": 5}', 100, "captured"),
        ('{"billable_usd_micros": 90, "cost": 5}', 90, "billable"),
        ('{"billable_amount_usd_micros": 90}', 90, "billable"),
        ('{"captured_usd_micros": null, "billable_usd_micros": 90}', 90, "billable"),
        ('{"captured_usd_cents": 12}', 120_000, "captured"),
        ('{"captured_usd_cents": 12, "captured_usd_micros": 119999}', 119_999, "captured"),
        ('{"captured_usd_micros": 119999, "captured_usd_cents": 12}', 119_999, "captured"),
        ('{"captured_usd_cents": 12, "refunded_usd_micros": 20000}', 100_000, "refunded"),
        ('{"captured_usd_micros": 1000000000000}', MAX_MICROS, "captured"),
        ('{"captured_usd_micros": 1000000000001}', None, None),
        ('{"captured_usd_micros": 0, "status": "reserved"}', None, "reserved"),
        (
            '{"captured_usd_micros": 0, "billable_usd_micros": 250, "status": "reserved"}',
            250,
            "reserved",
        ),
        ('{"captured_usd_micros": 500, "refunded_usd_micros": "all"}', None, None),
        ('{"cost": 0.1}', 100_000, "stated"),
        ('{"cost": "0.10"}', 100_000, "stated"),
        ('{"cost": 0}', 0, "stated"),
        ('{"cost": 0.0}', 0, "stated"),
        ('{"cost": 3}', 3_000_000, "stated"),
        ('{"cost": 1e-6}', 1, "stated"),
        ('{"cost": 1.0000004}', 1_000_000, "stated"),
        ('{"cost": 1.0000006}', 1_000_001, "stated"),
        # As a float this is 1.1000000000000000888; as a decimal it is exact.
        ('{"cost": 1.1}', 1_100_000, "stated"),
        ('{"cost": 450359.627371}', 450_359_627_371, "stated"),
        ('{"cost": 0.1, "usage_status": "refunded"}', 100_000, "refunded"),
        # Never a cost: estimates and what is only set aside.
        ('{"reserved_usd_micros": 100, "status": "reserved"}', None, "reserved"),
        ('{"estimated_usd_micros": 100}', None, None),
        ('{"provider_estimated_cost_usd_micros": 100}', None, None),
        ('{"refunded_usd_micros": 100}', None, None),
        ('{"released_usd_micros": 100}', None, None),
        # No price.
        ('{"cost": NaN}', None, None),
        ('{"cost": Infinity}', None, None),
        ('{"cost": -Infinity}', None, None),
        ('{"cost": 1e999}', None, None),
        ('{"cost": 1e9999999999999999999}', None, None),
        ('{"cost": 9223372036854775808}', None, None),
        ('{"cost": -1}', None, None),
        ('{"cost": -0.1}', None, None),
        ('{"cost": true}', None, None),
        ('{"cost": []}', None, None),
        ('{"cost": {"usd": 1}}', None, None),
        ('{"cost": null}', None, None),
        ('{"cost": "NaN"}', None, None),
        ('{"cost": "1_0"}', None, None),
        ('{"cost": "1e3"}', None, None),
        ('{"cost": "$1"}', None, None),
        ('{"cost": " 1"}', None, None),
        ('{"cost": "-1"}', None, None),
        ('{"cost": "٣"}', None, None),
        ('{"cost": ""}', None, None),
        ('{"captured_usd_micros": 0.5}', None, None),
        ('{"captured_usd_micros": "100"}', None, None),
        ('{"captured_usd_micros": true}', None, None),
        ('{"captured_usd_micros": -1}', None, None),
        ('{"captured_usd_micros": 9223372036854775808}', None, None),
        ('{"captured_usd_cents": 9223372036854775807}', None, None),
    ],
)
def test_cost(usage: str, micros: int | None, state: str | None) -> None:
    cost = cost_on_the_wire(usage)
    assert (cost.micros, cost.state) == (micros, state)
    assert cost.micros is None or type(cost.micros) is int
    # The text is kept, readable or not.
    assert cost.raw is not None
    assert set(json.loads(cost.raw)) == set(re.findall(r'"(\w+)":', usage)) - {"usd"}


@pytest.mark.parametrize("usage", [None, [], "0.1", 5, True, {}], ids=repr)
def test_no_usage_is_no_cost(usage: object) -> None:
    assert cost_of(usage) == NO_COST


@pytest.mark.parametrize("where", ["root", "data", "job", "beside data"])
def test_usage_in_its_places(where: str) -> None:
    usage = {"usage": {"cost": 0.1}}
    bodies: dict[str, Any] = {
        "root": {"status": "completed"} | usage,
        "data": {"data": {"status": "completed"} | usage},
        "job": {"data": {"status": "completed", "job": usage}},
        "beside data": {"data": {"status": "completed"}} | usage,
    }
    assert reading_of(reply(200, bodies[where])).cost.micros == 100_000


def test_a_float_is_never_a_price() -> None:
    assert usd_to_micros(0.1) is None
    assert usd_to_micros(Decimal("0.1")) == 100_000


@pytest.mark.parametrize("usage", ['{"cost":0.1}', '{"cost":"0.1"}'])
def test_sum_over_ten_thousand_rows_is_exact(usage: str) -> None:
    total = sum(cost_on_the_wire(usage).micros or 0 for _ in range(10_000))
    assert total == 1_000_000_000
    assert show_usd(total) == "1000.000000"


def test_show_usd() -> None:
    assert show_usd(None) is None
    assert show_usd(0) == "0.000000"
    assert show_usd(1) == "0.000001"
    assert show_usd(1_234_567) == "1.234567"
    assert show_usd(MAX_MICROS) == "1000000.000000"


# --- results ---

MEDIA = "https://media.invalid/artifacts"


@pytest.mark.parametrize(
    ("job", "wanted"),
    [
        ({"url": f"{MEDIA}/a.mp4"}, ["a"]),
        ({"video_url": f"{MEDIA}/a.mp4"}, ["a"]),
        ({"media_url": f"{MEDIA}/a.mp4"}, ["a"]),
        ({"urls": [f"{MEDIA}/a.mp4", f"{MEDIA}/b.mp4"]}, ["a", "b"]),
        ({"urls": [{"url": f"{MEDIA}/a.mp4"}]}, ["a"]),
        ({"unsigned_urls": [f"{MEDIA}/a.mp4"]}, ["a"]),
        ({"artifacts": [{"url": f"{MEDIA}/a.mp4", "type": "video"}]}, ["a"]),
        ({"result": {"artifacts": [{"url": f"{MEDIA}/a.mp4"}]}}, ["a"]),
        ({"result": {"urls": [f"{MEDIA}/a.mp4"]}}, ["a"]),
        ({"result": {"url": f"{MEDIA}/a.mp4"}}, ["a"]),
        (
            {"result": {"video_url": f"{MEDIA}/a.mp4", "thumbnail_url": f"{MEDIA}/b.mp4"}},
            ["a", "b"],
        ),
        # Each once, in order.
        ({"url": f"{MEDIA}/a.mp4", "result": {"video_url": f"{MEDIA}/a.mp4"}}, ["a"]),
        ({"url": f"{MEDIA}/a.mp4?sig=1", "video_url": f"{MEDIA}/a.mp4?sig=2#t"}, ["a"]),
        # Not results.
        (
            dict.fromkeys(
                ("status_url", "result_url", "polling_url", "webhook_url", "image_url"),
                f"{MEDIA}/a.mp4",
            ),
            [],
        ),
        ({"result": {"status_url": "u", "result_url": "u", "polling_url": "u"}}, []),
        ({"url": None}, []),
        ({"url": 7}, []),
        ({"url": ""}, []),
        ({"urls": "text", "artifacts": {"url": "u"}, "result": [1]}, []),
        ({"artifacts": [None, 7, {}, {"url": None}]}, []),
        ({}, []),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_result_links(job: dict[str, Any], wanted: list[str]) -> None:
    assert tuple(map(bare, result_links(job))) == tuple(f"{MEDIA}/{name}.mp4" for name in wanted)


@pytest.mark.parametrize(
    "url", [f"{MEDIA}/a.mp4?X-Signature=SECRET", f"{MEDIA}/a.mp4#SECRET", "/a.mp4?k=SECRET"]
)
def test_result_urls_hold_no_signature(url: str) -> None:
    """The link is followed as it is; what is stored and shown of it has no query."""
    for job in ({"url": url}, {"urls": [url]}, {"result": {"video_url": url}}):
        assert result_links(job) == (url,)
        (found,) = Reading(said=Said.STATUS, links=result_links(job)).urls
        assert "SECRET" not in found
        assert found.endswith("a.mp4")


def test_files_that_differ_in_the_query_alone_are_two() -> None:
    links = [f"{MEDIA}/content?index={n}" for n in (0, 1)]
    assert result_links({"unsigned_urls": links, "url": links[0]}) == tuple(links)


def test_fresh_links_find_their_files() -> None:
    """By what is stored of the old one where that is clear, else by their place."""
    outputs = [Output(f"{MEDIA}/{name}.mp4") for name in "ab"]
    swapped = [f"{MEDIA}/b.mp4?s=1", f"{MEDIA}/a.mp4?s=2"]
    assert [link_for(swapped, outputs, n) for n in (0, 1)] == swapped[::-1]
    other = [f"{MEDIA}/x?s=1", f"{MEDIA}/y?s=2"]
    assert [link_for(other, outputs, n) for n in (0, 1)] == other
    same = [Output(f"{MEDIA}/content")] * 2
    asked = [f"{MEDIA}/content?index={n}" for n in (0, 1)]
    assert [link_for(asked, same, n) for n in (0, 1)] == asked
    assert link_for(other[:1], outputs, 1) is None


# --- what comes next for an open row ---

COST = Cost(100_000, "stated", "{}")


def read_as(status: Status | None, **more: Any) -> Reading:
    return Reading(said=Said.STATUS, word=str(status or "on_hold"), status=status, **more)


URLS = {"links": ("u",)}
STEPS: dict[str, tuple[Kind, Reading, Seen, Step]] = {
    "pending": ("video", read_as(Status.PENDING), Seen(), Step.POLL),
    "in progress": ("video", read_as(Status.IN_PROGRESS, **URLS), Seen(), Step.POLL),
    "unknown word": ("video", read_as(None, **URLS), Seen(), Step.POLL),
    "failed": ("video", read_as(Status.FAILED), Seen(), Step.FINISH),
    "failed image": ("image", read_as(Status.FAILED), Seen(), Step.FINISH),
    "cancelled": ("video", read_as(Status.CANCELLED), Seen(), Step.FINISH),
    "expired": ("video", read_as(Status.EXPIRED), Seen(), Step.FINISH),
    "all there": ("video", read_as(Status.COMPLETED, cost=COST, **URLS), Seen(), Step.FINISH),
    "no url": ("video", read_as(Status.COMPLETED, cost=COST), Seen(), Step.RESULT),
    "no url, read": (
        "video",
        read_as(Status.COMPLETED, cost=COST),
        Seen(result_read=True),
        Step.FINISH,
    ),
    "image": ("image", read_as(Status.COMPLETED, cost=COST, **URLS), Seen(), Step.RESULT),
    "image, read": (
        "image",
        read_as(Status.COMPLETED, cost=COST, **URLS),
        Seen(result_read=True),
        Step.FINISH,
    ),
    "no cost": ("video", read_as(Status.COMPLETED, **URLS), Seen(), Step.REREAD),
    "no cost, twice": ("video", read_as(Status.COMPLETED, **URLS), Seen(rereads=2), Step.REREAD),
    "no cost, thrice": ("video", read_as(Status.COMPLETED, **URLS), Seen(rereads=3), Step.FINISH),
    "a cost of zero": (
        "video",
        read_as(Status.COMPLETED, cost=Cost(0, "stated", "{}"), **URLS),
        Seen(),
        Step.FINISH,
    ),
    "ended": ("video", read_as(None, ended=True), Seen(), Step.RESULT),
    "ended, read": ("video", read_as(None, ended=True), Seen(result_read=True), Step.FINISH),
    "ended, url": ("video", read_as(None, ended=True, **URLS), Seen(), Step.REREAD),
    "ended, url, cost": (
        "video",
        read_as(None, ended=True, cost=COST, **URLS),
        Seen(),
        Step.FINISH,
    ),
}


@pytest.mark.parametrize(("kind", "reading", "seen", "step"), STEPS.values(), ids=STEPS)
def test_next_step(kind: Kind, reading: Reading, seen: Seen, step: Step) -> None:
    assert next_step(kind, reading, seen) is step


@pytest.mark.parametrize(
    ("reading", "wanted"),
    [
        (read_as(None, ended=True), Status.REVIEW),
        (read_as(None, ended=True, **URLS), Status.COMPLETED),
        (read_as(Status.IN_PROGRESS, ended=True), Status.REVIEW),
        (read_as(Status.COMPLETED, **URLS), Status.COMPLETED),
        (read_as(Status.COMPLETED), Status.COMPLETED),
        (read_as(Status.COMPLETED, error="filtered"), Status.FAILED),
        (read_as(Status.COMPLETED, error="a warning", **URLS), Status.COMPLETED),
        (read_as(Status.FAILED, **URLS), Status.FAILED),
        (read_as(Status.CANCELLED), Status.CANCELLED),
        (read_as(Status.EXPIRED), Status.EXPIRED),
    ],
)
def test_last_word(reading: Reading, wanted: Status) -> None:
    assert last_word(reading) is wanted


def test_merge_keeps_what_was_once_named() -> None:
    first = read_as(Status.COMPLETED, cost=COST, links=("u",), error="e")
    bare = read_as(Status.COMPLETED)
    assert merge(None, bare) == bare
    joined = merge(first, bare)
    assert (joined.cost, joined.urls, joined.error) == (COST, ("u",), "e")
    later = read_as(Status.COMPLETED, cost=Cost(0, "refunded", "{}"), links=("v",), error="f")
    joined = merge(first, later)
    assert (joined.cost.micros, joined.urls, joined.error) == (0, ("v",), "f")


@pytest.mark.parametrize("status", [Status.PENDING, Status.IN_PROGRESS, None])
def test_merge_never_takes_a_last_word_back(status: Status | None) -> None:
    """Terminal, then an older state: terminal stays (faults.md 3), whatever was read."""
    joined = merge(read_as(Status.COMPLETED), read_as(status, **URLS))
    assert joined.status is Status.COMPLETED
    assert joined.word == "completed"
    assert joined.urls == ("u",)


# --- ages and waits ---

TTL = 3600.0
LAST_MS = round((TTL - POST_DEADLINE_S) * 1000)


@pytest.mark.parametrize(
    ("age_ms", "old"),
    [
        (0, False),
        (1, False),
        (LAST_MS - 1, False),
        (LAST_MS, True),
        (LAST_MS + 1, True),
        (10**12, True),
        (-1, True),
        (-(10**12), True),
    ],
)
def test_key_age(age_ms: int, old: bool) -> None:
    """Too old from the time to live less the time a POST may take; also before its birth."""
    assert (too_old(START_MS, START_MS + age_ms, TTL) is not None) == old
    until = send_before_ms(START_MS, TTL)
    assert until == START_MS + LAST_MS
    assert (START_MS + age_ms < until) == (not old or age_ms < 0)


def test_key_age_of_the_default_and_of_a_stand_in() -> None:
    assert KEY_TTL_S == 24 * 3600
    assert send_before_ms(START_MS, KEY_TTL_S) == START_MS + 86_400_000 - 60_000
    assert send_before_ms(START_MS, None) is None
    assert too_old(START_MS, START_MS + 10**12, None) is None
    assert too_old(START_MS, START_MS - 10**12, None) is None
    assert "25h" in (too_old(START_MS, START_MS + 25 * 3_600_000, KEY_TTL_S) or "")


@pytest.mark.parametrize("step", [0, 1, 2, 3, 4, 5, 6, 30, 31, 5000])
def test_backoff_bounds(step: int) -> None:
    rng = random.Random(step)
    most = min(BACKOFF_CAP_S, 2.0 * 2.0 ** min(step, 30))
    waits = [backoff_s(step, rng, cap_s=BACKOFF_CAP_S) for _ in range(2000)]
    assert all(BACKOFF_FLOOR_S <= wait <= most for wait in waits)
    # Full jitter: the whole range is used, so that clients do not come back together.
    assert max(waits) > most * 0.95
    assert min(waits) < max(most * 0.05, BACKOFF_FLOOR_S * 1.05)


def test_backoff_with_a_small_cap() -> None:
    rng = random.Random(1)
    assert all(0 < backoff_s(9, rng, cap_s=0.2) <= 0.2 for _ in range(100))


def test_poll_waits_are_spread_upwards() -> None:
    rng = random.Random(1)
    waits = [poll_wait_s(15.0, rng) for _ in range(2000)]
    assert all(15.0 <= wait <= 16.5 for wait in waits)
    assert min(waits) < 15.05
    assert max(waits) > 16.45


# --- budgets, gates, the window ---


def most_in_window(times: list[float], window_s: float) -> int:
    """Return the most events in any half-open window."""
    most, inside = 0, deque[float]()
    for at in times:
        inside.append(at)
        while inside[0] <= at - window_s:
            inside.popleft()
        most = max(most, len(inside))
    return most


@pytest.mark.parametrize("per_minute", [120.0, 300.0, 600.0])
@pytest.mark.parametrize("late_s", [0.0, 0.008, 0.3], ids=["punctual", "8 ms late", "300 ms late"])
def test_budget_fits_every_sliding_window(per_minute: float, late_s: float) -> None:
    """B: 300 sends at the plan's pace; no 60 s window holds more than the plan allows."""
    budget, rng, now = Budget(per_minute), random.Random(3), 1000.0
    times: list[float] = []
    for _ in range(round(per_minute * 2.5)):
        now = max(now, budget.ready_s) + rng.uniform(0.0, late_s)
        budget.take(now)
        times.append(now)
    assert most_in_window(times, 60.0) <= per_minute
    if late_s <= 0.02:
        # And it is not much slower than the plan allows either.
        assert times[-1] - times[0] <= 2.5 * 60.0 * 1.05


def test_budget_after_an_idle_time_has_no_burst() -> None:
    budget = Budget(60.0)
    budget.take(1000.0)
    budget.take(5000.0)
    assert budget.ready_s > 5000.9


def test_budget_is_not_refilled_by_restarts() -> None:
    """Each send from a new process, with a start-up of any length between them."""
    rng, now, last = random.Random(5), 0.0, None
    times: list[float] = []
    for _ in range(300):
        budget = Budget(120.0)
        now += rng.uniform(0.0, 0.6)
        if last is not None:
            budget.seed(now, now - last)
        now = max(now, budget.ready_s)
        budget.take(now)
        last = now
        times.append(now)
    assert most_in_window(times, 60.0) <= 120


@pytest.mark.parametrize(
    ("since_s", "wait_s"), [(0.0, 1.0), (0.4, 0.6), (5.0, 0.0), (-3600.0, 1.0), (1e9, 0.0)]
)
def test_budget_seed(since_s: float, wait_s: float) -> None:
    budget = Budget(60.0)
    budget.seed(50.0, since_s)
    assert budget.ready_s == pytest.approx(50.0 + wait_s, abs=0.02)


def test_budget_of_zero_is_off() -> None:
    budget = Budget(0.0)
    for _ in range(5):
        assert budget.ready_s <= 7.0
        budget.take(7.0)


def test_gate_lets_one_probe_through_until_one_passes() -> None:
    gate, rng = Gate(), random.Random(1)
    assert gate.ready(0.0, 7)
    until = gate.shut(10.0, 9.0, None, rng)
    assert 10.0 + BACKOFF_FLOOR_S <= until <= 12.0
    assert not gate.ready(until - 0.01, 0)
    assert gate.ready(until, 0)
    assert not gate.ready(until, 1)
    # An answer to what left before it was shut is no proof that it is open.
    gate.passed(9.5)
    assert not gate.ready(until, 1)
    gate.passed(until)
    assert gate.ready(until, 1)


def test_gate_counts_one_refusal_for_requests_that_left_together() -> None:
    gate, rng = Gate(), random.Random(1)
    gate.shut(10.0, 9.0, None, rng)
    for _ in range(20):
        gate.shut(10.1, 9.0, None, rng)
    assert gate.step == 1
    assert gate.until_s <= 12.0
    gate.shut(10.2, 9.0, 30.0, rng)
    assert 40.2 <= gate.until_s <= 43.2
    assert gate.step == 1


@pytest.mark.parametrize("asked", [None, 0.0])
def test_gate_never_opens_faster_than_its_own_backoff(asked: float | None) -> None:
    """B27: a Retry-After of zero does not reset the backoff."""
    gate, rng, now = Gate(), random.Random(2), 0.0
    waits = []
    for _ in range(200):
        until = gate.shut(now, now, asked, rng)
        waits.append(until - now)
        now = until
    assert all(BACKOFF_FLOOR_S - 1e-6 <= wait <= BACKOFF_CAP_S + 1e-6 for wait in waits)
    # Full jitter under a cap of 60 s is 30 s on average.
    assert 20 <= sum(waits[10:]) / len(waits[10:]) <= 40


def test_gate_waits_as_long_as_it_is_asked_to() -> None:
    for seed in range(50):
        gate = Gate()
        until = gate.shut(0.0, 0.0, 90.0, random.Random(seed))
        assert 90.0 <= until <= 99.0
        # And a shorter wait later takes nothing back.
        assert gate.shut(1.0, 1.0, 2.0, random.Random(seed)) >= until


def test_gate_held_is_no_failure() -> None:
    gate = Gate()
    gate.hold(20.0)
    gate.hold(10.0)
    assert not gate.ready(19.9, 0)
    assert gate.ready(20.0, 7)


def test_window_is_the_least_that_was_reported() -> None:
    window = QueueWindow()
    assert window.has_room(10**6, 0.0)
    window.accepted(5, 3)
    assert window.size == 8
    window.accepted(2, 4)
    assert window.size == 6
    assert window.has_room(5, 0.0)
    assert not window.has_room(6, 0.0)


def test_window_believes_more_room_after_a_windowful_of_reports() -> None:
    """Jobs that ended and were not read count as ours: one report of more says little."""
    window = QueueWindow()
    window.accepted(0, 4)
    for _ in range(3):
        window.accepted(1, 4)
    assert window.size == 4
    window.accepted(1, 4)
    assert window.size == 5
    # One that reports no more starts the count anew.
    for _ in range(4):
        window.accepted(2, 4)
    window.accepted(1, 4)
    for _ in range(4):
        window.accepted(2, 4)
    assert window.size == 5
    window.accepted(2, 4)
    assert window.size == 6


def test_window_grows_by_one_an_answer_to_what_is_reported() -> None:
    window = QueueWindow()
    window.full(1, 0.0)
    sizes = []
    for _ in range(60):
        window.accepted(max(0, 50 - int(window.size)), int(window.size))
        sizes.append(window.size)
    assert sizes[:4] == [2, 3, 4, 5]
    assert max(sizes) == 50


def test_window_is_not_misled_by_jobs_that_ended_unread() -> None:
    """Twenty places, jobs that end all at once and are read one by one: no submit too many."""
    window, capacity, ours, at_sume = QueueWindow(), 20, 0, 0
    for _ in range(30):
        at_sume = 0
        while True:
            while window.has_room(ours, 0.0):
                assert at_sume < capacity
                ours, at_sume = ours + 1, at_sume + 1
                window.accepted(capacity - at_sume, ours)
            if ours == at_sume:
                break
            # One more of those that ended is read.
            ours -= 1
        assert at_sume == capacity


def test_window_does_not_take_silence_for_a_report() -> None:
    """An answer without a report, now and then, neither grows the window nor keeps it small."""
    window = QueueWindow()
    window.accepted(0, 20)
    sizes = []
    for number in range(60):
        window.accepted(None if number % 7 == 6 else 1, 20)
        sizes.append(window.size)
    # Twenty reports, and the three answers between them that said nothing.
    assert sizes.index(21) + 1 == 20 + 3
    assert sizes[-1] == 21


def test_window_without_reports_grows_like_a_slow_start() -> None:
    window = QueueWindow()
    window.full(0, 0.0)
    accepts = 0
    while window.size < 8:
        window.accepted(None, 1)
        accepts += 1
    assert accepts <= 30
    for _ in range(8):
        window.accepted(None, 1)
    assert window.size == 9


def test_window_after_a_full_queue() -> None:
    window = QueueWindow()
    window.full(4, 100.0)
    assert window.has_room(3, 100.0)
    assert not window.has_room(4, 100.0)
    # A minute later one is tried beyond it, and only one.
    assert window.has_room(4, 160.0)
    window.sent(4, 160.0)
    assert not window.has_room(4, 160.0)
    window.accepted(None, 5)
    assert window.size >= 5
    # With nothing there, one probe.
    window.full(0, 200.0)
    assert window.has_room(0, 200.0)
    assert not window.has_room(1, 200.0)


def test_window_without_reports_stays_open() -> None:
    window = QueueWindow()
    for ours in range(100):
        window.accepted(None, ours)
    assert window.has_room(10**6, 0.0)


# --- text ---

ACTIVE = [
    char
    for char in map(chr, range(0x10000))
    if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")
    or unicodedata.bidirectional(char)
    in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    or char in "\u061c\u200e\u200f\ufeff"
]


@pytest.mark.parametrize("clean", [inert, quiet], ids=["inert", "quiet"])
def test_no_active_character_is_left(clean: Any) -> None:
    assert len(ACTIVE) > 32 + 33
    for char in ACTIVE:
        assert clean(f"a{char}b") == "a b"
    assert clean("\x1b[2J\x1b]0;title\x07x\u202e\r\n") == "[2J ]0;title x"


@pytest.mark.parametrize("text", ["日本 Zürich 🎬", "[/x] [red]", "a  b", "שלום", "e\u0301"])
def test_plain_text_is_left_alone(text: str) -> None:
    assert inert(text) == text
    assert quiet(text) == text


@pytest.mark.parametrize("clean", [inert, quiet], ids=["inert", "quiet"])
@pytest.mark.parametrize("limit", [1, 2, 60, 300])
def test_length_is_limited(clean: Any, limit: int) -> None:
    assert clean("x" * limit, limit) == "x" * limit
    assert len(clean("x" * (limit + 1), limit)) == limit
    assert clean("x" * (limit + 1), limit).endswith("…")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("key sume_live_abc_DEF9 x", "key [key] x"),
        ("sume_test_SECRET", "[key]"),
        ("Authorization: Bearer SECRET", "Authorization: Bearer [key]"),
        ("authorization: bearer\tSECRET", None),
        ("X-Api-Key: SECRET", "X-Api-Key: [key]"),
        ("x-api-key:SECRET", None),
        ("GET https://m.invalid/a.mp4?sig=SECRET x", "GET https://m.invalid/a.mp4 x"),
        ("HTTPS://m.invalid/a.mp4?sig=SECRET", None),
        ("http://127.0.0.1:8/?a=SECRET&b=SECRET", None),
        ("'https://m.invalid/a?sig=SECRET'", "'https://m.invalid/a'"),
        ("https://a.invalid/?k=SECRET https://b.invalid/?k=SECRET", None),
        ("proxy http://user:SECRET@proxy.invalid:8080", "proxy http://proxy.invalid:8080"),
        ("https://SECRET@proxy.invalid/p?x=SECRET", "https://proxy.invalid/p"),
        ("http://user:pass@SECRET@proxy.invalid:8080", None),
    ],
)
def test_quiet_holds_no_secret(text: str, wanted: str | None) -> None:
    said = quiet(text)
    assert "SECRET" not in said
    if wanted is not None:
        assert said == wanted


def test_a_secret_at_the_cut_is_not_half_shown() -> None:
    for start in range(280, 300):
        assert "SECRET" not in quiet("x" * start + " sume_live_SECRETSECRET")
        assert "sig" not in quiet("x" * (start - 10) + " https://m.invalid/?sig=1")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0.2s", 0.2),
        ("90s", 90.0),
        ("30m", 1800.0),
        ("2h", 7200.0),
        ("1.5h", 5400.0),
        ("2d", 172_800.0),
        ("250ms", 0.25),
        (" 5s ", 5.0),
        ("0.001s", 0.001),
    ],
)
def test_parse_time(text: str, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "s", "-5s", "+5s", "0s", "0.0h", "5 s", "5sec", "1e3s", "1_0s", "5s5s"),
        *(".5s", "5.s", "nan", "infs", "9" * 400 + "s", "99999999999h", "\x1b[2J"),
    ],
    ids=lambda text: repr(text)[:20],
)
def test_parse_time_refuses(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_time(text)
    assert "\x1b" not in str(caught.value)
    assert "90s" in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0, "0s"),
        (0.4, "0s"),
        (45, "45s"),
        (99, "99s"),
        (120, "2m"),
        (99 * 60, "99m"),
        (100 * 60, "1h40m"),
        (3 * 3600 + 10 * 60, "3h10m"),
        (25 * 3600 + 60, "25h01m"),
        (48 * 3600, "2d0h"),
        (52 * 3600, "2d4h"),
    ],
)
def test_show_time(seconds: float, text: str) -> None:
    assert show_time(seconds) == text


# --- what is skipped for speed ---


def test_no_secret_is_without_a_sign_of_one() -> None:
    """Text without a sign is not searched further, so each kind of secret needs one."""
    samples = (
        "sume_live_abc", "BEARER abc", "x-api-key: abc", "https://me:word@host/",
        "HTTPS://host/file?signature=abc",
    )  # fmt: skip
    for pattern, _ in sume_resume._SECRETS:
        found = [text for text in samples if re.search(pattern, text)]
        assert found, pattern
        assert all(re.search(sume_resume._SECRET_SIGNS, text) for text in found)
        assert all(sume_resume.quiet(text) != text for text in found)


def test_every_active_character_is_not_printable() -> None:
    active = [c for c in map(chr, range(0x110000)) if re.match(sume_resume._ACTIVE_TEXT, c)]
    assert active
    assert not any(c.isprintable() for c in active)


def test_every_field_that_has_a_rule_is_checked() -> None:
    for name in ("id", "prompt", "model", "duration", "kind", "mode"):
        assert sume_resume._expected(name, ["no field takes a list"]) is not None
        assert name in sume_resume._CHECKED
    assert sume_resume._expected("other", ["anything"]) is None
