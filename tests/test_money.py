"""Price lists, estimates, the cap, and the audit: exact, and true under kills."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from conftest import FILE_ONLY, START_MS, Desk, Shop, clips, to_schema_1
from servers import FakeJob, Reply, accept_and_say, drop_after, error, finished
from test_output import events_of

import sume_resume
from sume_resume import InputError, Ledger, Prices, Status, open_ledger, parse_prices

TOML = """\
[models."seedance-2.5"]
video_usd_per_second = "0.40"
[models."seedance-2.5".resolution."480p"]
video_usd_per_second = "0.12"
[models."gpt-image-2"]
image_usd = "0.04"
[models."sume/auto"]
video_usd_per_second = 0.025
image_usd = "0.0000001"
"""


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "p", **fields}).encode()


# -- price lists --


@pytest.mark.parametrize(
    ("kind", "model", "fields", "micros"),
    [
        ("video", "seedance-2.5", {"duration": 5}, 2_000_000),
        ("video", "seedance-2.5", {"duration": 5, "resolution": "480p"}, 600_000),
        ("video", "seedance-2.5", {"duration": 5, "resolution": "720p"}, 2_000_000),
        ("video", "seedance-2.5", {}, None),
        ("video", "seedance-2.5", {"duration": "5"}, None),
        ("image", "seedance-2.5", {}, None),
        ("image", "gpt-image-2", {}, 40_000),
        ("video", "gpt-image-2", {"duration": 5}, None),
        ("video", "sume/auto", {"duration": 3}, 75_000),
        ("image", "sume/auto", {}, 1),
        ("video", "nobody", {"duration": 3}, None),
    ],
)
def test_estimate_is_exact_and_never_a_guess(
    kind: Any, model: str, fields: dict[str, Any], micros: int | None
) -> None:
    """Parts of a micro-dollar are rounded up: a cap must hold."""
    assert parse_prices(TOML, "p.toml").estimate(kind, model, body(**fields)) == micros


def test_json_list_says_the_same() -> None:
    data = {
        "models": {
            "seedance-2.5": {
                "video_usd_per_second": "0.40",
                "resolution": {"480p": {"video_usd_per_second": "0.12"}},
            },
            "gpt-image-2": {"image_usd": "0.04"},
            "sume/auto": {"video_usd_per_second": 0.025, "image_usd": "0.0000001"},
        }
    }
    assert parse_prices(json.dumps(data), "p.json") == parse_prices(TOML, "p.toml")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"0.40"', '"0,40"', "p.toml:2: models.seedance-2.5.video_usd_per_second: expected"),
        ('"0.40"', "true", "p.toml:2: "),
        ('"0.40"', '"-1"', "p.toml:2: "),
        ('"0.40"', '"1e3"', "p.toml:2: "),
        ('"0.40"', "inf", "p.toml:2: "),
        ('"0.40"', '"10000000"', "p.toml:2: "),
        ('"0.12"', "[]", "p.toml:4: models.seedance-2.5.resolution.480p.video_usd_per_second"),
        ("image_usd = \"0.04\"", "image = \"0.04\"", "p.toml:6: models.gpt-image-2.image: "),
        ('[models."gpt-image-2"]', "[[models.gpt]]", "models.gpt: expected a table"),
        ('[models."seedance-2.5"]', "[models", "line 1"),
        (TOML, "", "expected a table of models"),
        (TOML, "[model.x]\nimage_usd = 1\n", "model: expected one of models"),
        (TOML, "models = 3\n", "models: expected a table"),
    ],
)  # fmt: skip
def test_bad_price_is_named_by_line_and_field(old: str, new: str, said: str) -> None:
    with pytest.raises(InputError) as refusal:
        parse_prices(TOML.replace(old, new), "p.toml")
    assert said in str(refusal.value)


def test_misspelled_price_never_counts_as_none(shop: Shop) -> None:
    (shop.folder / "p.toml").write_text(TOML.replace("video_usd_per_second", "video_usd"))
    before = shop.files()
    shop.rows(*clips(1))
    for args in (("run", "clips.jsonl", "--prices", "p.toml"), ("audit", "--prices", "p.toml")):
        done = shop.invoke(*args)
        assert done.returncode == 2
        assert b"p.toml:2" in done.stderr
    assert set(shop.files()) == {*before, "clips.jsonl"}


@pytest.mark.parametrize(
    "args",
    [
        ("--max-cost", "5"),
        ("--max-cost", "five", "--prices", "p.toml"),
        ("--max-cost", "-1", "--prices", "p.toml"),
        ("--prices", "absent.toml"),
    ],
    ids=" ".join,
)
def test_cap_that_is_not_clear_changes_nothing(shop: Shop, args: tuple[str, ...]) -> None:
    (shop.folder / "p.toml").write_text(TOML)
    shop.rows(*clips(1))
    before = shop.files()
    assert shop.invoke("run", "clips.jsonl", *args).returncode == 2
    assert shop.files() == before


# -- the cap --

PRICES = Prices({"sume/auto": sume_resume.Price(Decimal("0.025"))}, {})
# A row of clips() has 4 seconds, so it is expected to cost 100,000 micros, and it does.


def capped(desk: Desk, usd: str, **more: Any) -> sume_resume.Ending:
    micros = sume_resume.usd_to_micros(usd)
    return desk.run(max_cost_micros=micros, prices=more.pop("prices", PRICES), **more)


def test_cap_holds_under_concurrency_and_polls_go_on(desk: Desk) -> None:
    desk.add(*clips(6))
    desk.server.reads_to_finish = 3
    ending = capped(desk, "0.35", latency_s=0.5)
    assert len(desk.server.charges) == 3
    assert ending.capped is not None
    assert ending.capped[:3] == (3, 0, 600_000)
    found = Counter(str(job.status) for job in desk.jobs().values())
    assert found == {"completed": 3, "queued": 3}
    assert capped(desk, "0.60").capped is None
    assert len(desk.server.charges) == 6


def test_room_that_settlement_frees_is_used(desk: Desk) -> None:
    """Each costs half of what was reserved: twice as many fit in the end."""
    desk.add(*clips(8))
    desk.server.final = lambda job: finished(job) | {"usage": {"cost": 0.05}}
    ending = capped(desk, "0.40", latency_s=0.5, poll_interval_s=1.0)
    # Seven are spent with 0.35; one more could bring it over 0.40.
    assert len(desk.server.charges) == 7
    assert ending.capped is not None
    assert ending.capped[:3] == (1, 0, 450_000)


def test_excess_counts_at_once(desk: Desk) -> None:
    desk.add(*clips(4))
    desk.server.final = lambda job: finished(job) | {"usage": {"cost": 0.25}}
    capped(desk, "0.40", concurrency=2)
    spent = sum(job.cost_micros or 0 for job in desk.jobs().values())
    assert spent >= 250_000
    charges = len(desk.server.charges)
    capped(desk, "0.40")
    assert len(desk.server.charges) == charges


def test_what_may_have_been_bought_counts_even_when_final(desk: Desk) -> None:
    """All attempts ever made: a dropped one of unknown cost keeps its estimate."""
    desk.server.submits.append(Reply(409, error("strange")))
    desk.add(*clips(3))
    capped(desk, "0.10", concurrency=2)
    assert [str(job.status) for job in desk.jobs().values()] == ["review", "queued", "queued"]
    with open_ledger(desk.place) as ledger:
        ledger.record_dropped(ledger.find("r1"), START_MS, "given up")
    ending = capped(desk, "0.15")
    assert ending.capped is not None
    assert desk.server.charges == []
    capped(desk, "0.20")
    assert len(desk.server.charges) == 1


def test_what_was_sent_without_prices_is_estimated_first(desk: Desk) -> None:
    desk.server.on_submit = drop_after
    desk.add(*clips(3))
    desk.run(deadline_s=0.5, limit=1)
    desk.server.on_submit = None
    assert desk.job().estimate_micros is None
    capped(desk, "0.20")
    assert len(desk.server.charges) == 2
    assert "its price was estimated" in desk.command("status", "r1").stdout.decode()


def test_nothing_is_sent_while_a_sent_row_has_no_price(desk: Desk) -> None:
    desk.server.on_submit = drop_after
    desk.add({"id": "odd", "prompt": "odd.", "model": "other", "duration": 4}, *clips(1))
    desk.run(deadline_s=0.5, limit=1)
    desk.server.submits.append(Reply(409, error("strange")))
    ending = capped(desk, "9.00")
    assert ending.capped is not None
    assert any("under --max-cost nothing is sent" in notice for notice in desk.notices)
    assert desk.server.charges_of("clip 1.") == 0


def test_what_blocks_a_cap_is_named_with_what_helps(shop: Shop) -> None:
    """And a dry run says the same before anything is sent."""
    (shop.folder / "p.toml").write_text(TOML)
    shop.server.final = lambda job: {k: v for k, v in finished(job).items() if k != "usage"}
    shop.rows({"id": "odd", "prompt": "odd.", "model": "other", "duration": 4}, name="a.jsonl")
    code = "import sume_resume; sume_resume.COST_REREAD_S = ()"
    assert shop.run("a.jsonl", code=code).returncode == 0
    args = (shop.rows(*clips(2)), "--prices", "p.toml", "--max-cost", "9")
    plan = shop.call("run", *args, "--dry-run")
    done = shop.run(*args)
    assert done.returncode == 6
    for said in (plan.stderr, done.stderr):
        assert b"row 'odd' (attempt 1) may have cost something" in said
        assert b"add a price of other to the list" in said
    assert b"higher --max-cost" not in done.stderr
    assert len(shop.server.charges) == 1


def test_dry_run_says_how_far_a_cap_reaches(shop: Shop) -> None:
    (shop.folder / "p.toml").write_text(TOML)
    args = (shop.rows(*clips(5)), "--prices", "p.toml", "--max-cost", "0.25")
    said = shop.invoke("run", *args, "--dry-run").stderr.decode()
    assert "room for 2 of 5 rows; for all with a price it would have to be $0.500000" in said


def test_row_without_a_price_is_not_sent_under_a_cap(desk: Desk) -> None:
    desk.add({"id": "odd", "prompt": "odd.", "model": "other", "duration": 4}, *clips(2))
    ending = capped(desk, "9.00")
    assert ending.capped is not None
    assert ending.capped[:3] == (1, 1, 200_000)
    assert len(desk.server.charges) == 2


def test_refused_rows_give_their_room_back(desk: Desk) -> None:
    desk.server.submits.append(Reply(422, error("invalid_request")))
    desk.add(*clips(2))
    assert capped(desk, "0.10", concurrency=2).capped is None
    assert len(desk.server.charges) == 1


class Killed(BaseException):
    pass


def dying(rng: random.Random) -> type[Ledger]:
    """Return a ledger whose process dies before or after a commit that reserves."""
    left = rng.randrange(1, 12)

    class Dying(Ledger):
        def _commit(self) -> None:
            nonlocal left
            left -= 1
            if left == 0 and rng.random() < 0.5:
                raise Killed
            super()._commit()
            if left == 0:
                raise Killed

    return Dying


@pytest.mark.parametrize("block", range(8))
def test_cap_holds_under_kills_between_reserve_and_send(
    tmp_path: Path, block: int, server: Any, clock: Any
) -> None:
    """200 seeded lives against the charge log: what was charged never exceeds the cap."""
    for seed in range(block * 25, block * 25 + 25):
        rng = random.Random(seed)
        desk = Desk(str(tmp_path / f"{seed}.db"), tmp_path, server, clock, seed=seed)
        server.forget()
        server.submits.clear()
        rows = [
            {"id": f"r{n}", "prompt": f"{seed} {n}.", "duration": rng.randint(1, 8)}
            for n in range(8)
        ]
        server.final = lambda job: (
            finished(job)
            | {"usage": {"captured_usd_micros": 25_000 * json.loads(job.body)["duration"]}}
        )
        server.submits.extend(
            rng.choice([drop_after, accept_and_say(500, None), Reply(429, error("rate_limit"))])
            for _ in range(rng.randint(0, 3))
        )
        cap = rng.randint(0, 900_000)
        desk.add(*rows)
        for _ in range(3):
            try:
                desk.run(
                    max_cost_micros=cap, prices=PRICES, make_ledger=dying(rng),
                    concurrency=rng.randint(2, 8), latency_s=rng.choice([0.0, 0.3]),
                )  # fmt: skip
            except Killed:
                continue
        ending = desk.run(max_cost_micros=cap, prices=PRICES)
        charged = [25_000 * json.loads(job.body)["duration"] for job in server.charges]
        assert sum(charged) <= cap, seed
        assert len({job.body for job in server.charges}) == len(charged), seed
        with open_ledger(desk.place) as ledger:
            totals = ledger.totals()
        assert (totals.cost_micros, totals.reserved_micros) == (sum(charged), 0), seed
        if ending.capped is None:
            assert len(charged) == len(rows), seed


def test_exit_6_says_what_is_left_and_what_would_be_needed(shop: Shop) -> None:
    (shop.folder / "p.toml").write_text(TOML)
    shop.rows(*clips(3), {"id": "odd", "prompt": "odd.", "model": "nobody"})
    done = shop.run("clips.jsonl", "--prices", "p.toml", "--max-cost", "0.15", "--json")
    assert done.returncode == 6, done.stderr
    assert b"to send: 4 rows, estimate $0.300000, without a known price: 1" in done.stderr
    assert (
        b"--max-cost $0.150000: $0.000000 is spent or reserved, room for 1 of 4 rows" in done.stderr
    )
    assert b"--max-cost keeps back 3 rows: $0.100000 is spent or reserved" in done.stderr
    assert b"it would have to be $0.300000; without a known price" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["exit_code"] == 6
    assert shop.run("clips.jsonl", "--prices", "p.toml", "--max-cost", "0.30").returncode == 6
    assert len(shop.server.charges) == 3
    assert shop.run("clips.jsonl").returncode == 0


def test_6_goes_before_4(shop: Shop) -> None:
    (shop.folder / "p.toml").write_text(TOML)
    shop.server.submits.append(Reply(409, error("strange")))
    args = ("--prices", "p.toml", "--max-cost", "0.10", "--concurrency", "2")
    assert shop.run(shop.rows(*clips(2)), *args).returncode == 6


# -- the audit --


def test_audit_compares_what_was_billed(desk: Desk, tmp_path: Path) -> None:
    desk.add(*clips(3))
    costs = {"clip 1.": 0.1, "clip 2.": 0.1009, "clip 3.": 0.2}

    def final(job: FakeJob) -> dict[str, Any]:
        return finished(job) | {"usage": {"cost": costs[json.loads(job.body)["prompt"]]}}

    desk.server.final = final
    desk.run()
    prices = tmp_path / "p.toml"
    prices.write_text(TOML)
    done = desk.command("audit", "--prices", str(prices))
    assert done.returncode == 1
    assert b"row 'r3' (attempt 1): billed $0.200000, expected $0.100000" in done.stderr
    assert b"1 of 3 attempts flagged" in done.stderr
    assert desk.command("audit", "--prices", str(prices), "--tolerance", "100").returncode == 0
    assert desk.command("audit", "--prices", str(prices), "--tolerance", "0").returncode == 1


def test_audit_says_what_it_could_not_compare(desk: Desk) -> None:
    desk.add(*clips(2))
    desk.run()
    done = desk.command("audit", "--json")
    assert b"2 without a known price, and not compared" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["not_compared"] == 2


def test_audit_without_prices_uses_what_was_reserved(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.server.final = lambda job: finished(job) | {"usage": {"cost": 0.3}}
    capped(desk, "0.10")
    assert desk.command("audit").returncode == 1


def test_unknown_cost_is_flagged_and_never_counted_as_0(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.server.final = lambda job: {k: v for k, v in finished(job).items() if k != "usage"}
    desk.run()
    done = desk.command("audit", "--json")
    line = json.loads(done.stdout.splitlines()[0])
    assert (line["billed_usd"], line["flag"]) == (None, "ended, and its cost is not known")
    assert done.returncode == 1


def test_failed_job_that_was_billed_is_flagged(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.server.final = lambda job: finished(job) | {"status": "failed"}
    desk.run()
    assert desk.command("audit").returncode == 1


def audit_remote(desk: Desk) -> tuple[int, list[dict[str, Any]], str]:
    done = desk.command("audit", "--remote", "--json")
    events_of(done, "audit")
    return (
        done.returncode,
        [json.loads(line) for line in done.stdout.splitlines()],
        done.stderr.decode(),
    )


def test_remote_audit_records_a_cost_that_changed(desk: Desk) -> None:
    desk.add(*clips(2))
    desk.run()
    refund = {"captured_usd_micros": 100_000, "refunded_usd_micros": 100_000}
    desk.server.final = lambda job: finished(job) | {"usage": refund, "status": "failed"}
    code, _, said = audit_remote(desk)
    assert code == 0, said
    assert "cost was $0.100000, is $0.000000" in said
    assert {job.cost_micros for job in desk.jobs().values()} == {0}
    # A last word never changes.
    assert {job.status for job in desk.jobs().values()} == {Status.COMPLETED}
    assert "its cost was read afresh" in desk.command("status", "r1").stdout.decode()
    assert audit_remote(desk)[2].count("cost was") == 0


def test_remote_audit_names_what_one_side_does_not_know(desk: Desk) -> None:
    """B02: an orphan at Sume is found, and its cost is not hidden."""
    desk.add(*clips(2))
    desk.run()
    mine = [job.job_id for job in desk.jobs().values()]
    gone = desk.server.jobs.pop(mine[0] or "")
    listed = [{"id": id} for id in (*mine, "job_orphan")]
    desk.server.reads.extend([Reply(404, error("not_found")), lambda s, r: None])
    desk.server.reads.append(Reply(200, {"data": listed}))
    code, lines, said = audit_remote(desk)
    assert code == 1
    assert f"job {gone.id}: Sume does not know it" in said
    others = [line["job_id"] for line in lines if line["type"] == "other_job"]
    assert others == ["job_orphan"]
    assert desk.job().status is Status.COMPLETED
    assert desk.job().cost_micros == 100_000
    assert len(desk.server.posts) == 2


def test_remote_audit_under_another_key_reads_nothing(desk: Desk) -> None:
    desk.add(*clips(1))
    desk.run()
    reads = len(desk.server.gets)
    done = desk.command("audit", "--remote", SUME_API_KEY="another")
    assert done.returncode == 5
    assert len(desk.server.gets) == reads


@pytest.mark.parametrize("point", ["record_cost:before", "record_cost:after", "_commit:before"])
def test_kill_in_a_remote_audit(desk: Desk, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """The same command again records the rest; nothing is added up."""
    desk.add(*clips(2))
    desk.run()
    desk.server.final = lambda job: finished(job) | {"usage": {"cost": 0.3}}
    method, _, when = point.partition(":")
    original = getattr(Ledger, method)

    def dies(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        if when == "before":
            raise Killed
        original(self, *args, **kwargs)
        raise Killed

    monkeypatch.setattr(Ledger, method, dies)
    with pytest.raises(Killed):
        desk.command("audit", "--remote")
    monkeypatch.setattr(Ledger, method, original)
    audit_remote(desk)
    assert {job.cost_micros for job in desk.jobs().values()} == {300_000}


@FILE_ONLY
def test_old_ledger_gets_the_new_column_and_keeps_its_rows(desk: Desk) -> None:
    """A ledger of schema 1 is migrated when it is opened."""
    import sqlite3

    desk.add(*clips(2))
    desk.run(limit=1)
    before = desk.jobs()
    with contextlib.closing(sqlite3.connect(desk.path)) as db:
        to_schema_1(db)
        db.commit()
    assert desk.jobs() == {row: job._replace(token=0) for row, job in before.items()}
    capped(desk, "9.00")
    assert {job.status for job in desk.jobs().values()} == {Status.COMPLETED}
