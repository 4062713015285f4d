"""Which test proves what under which fault; and the faults that need a machine of their own.

The map names each fault that can hit the product, and the tests that show what must hold. A
test that is renamed or removed without its fault turns this file red.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx  # noqa: F401  an ordinary user may not read where it lies
import pytest
import rich.table  # noqa: F401
from conftest import (
    POSIX,
    QUICK,
    Desk,
    FakeClock,
    Shop,
    clips,
    in_process,
    jsonl,
    to_schema_1,
    until,
)
from servers import FakeSume, drop_after

from sume_resume import Account, Failure, Miss, Status, Sume, open_ledger

FAULTS: dict[str, str] = {
    "kill before the key is committed": "kill:kill_and_run_again drill:drill_of_the_product",
    "kill after the key is committed, before the connect": "kill:kill_and_run_again",
    "kill after the bytes were sent": "kill:kill_and_run_again cli:kill_9_then_start_at_once",
    "kill after the accept, before the answer": "cli:kill_9_then_start_at_once drill:drill_of",
    "kill between answer and id, id and poll, poll and commit": "kill:kill_and_run_again",
    "kill in a person's decision": "kill:kill_in_a_decision",
    "kill while a ledger is made": "kill:kill_and_run_again",
    "kill in a backup": "faults:kill_in_a_backup_leaves_a_whole_copy_or_none",
    "kill in a migration": "faults:kill_in_a_migration_leaves_one_schema_or_the_other",
    "answer lost after the accept": "submit:lost_answers_keep_one_key submit:run_to_the_end_after",
    "two ids for one key": "submit:a_server_that_ignores_keys poll:a_late_answer_with_another_id",
    "id that another row has": "submit:an_id_that_another_row_holds settle:resolve_refuses_a_job",
    "slow loris": "faults:answer_that_drips engine:an_abandoned_worker_is_replaced",
    "truncated or packed answer": "submit:outcome_of_one_answer engine:an_answer_packed_twice",
    "error page, login page": "submit:outcome_of_one_answer poll:thirty_error_pages",
    "200 with an error body on a read": "poll:a_read_without_a_status_is_counted",
    "wrong content type with good JSON": "submit:content_type_does_not_matter",
    "huge or deep JSON, huge numbers, NaN": "submit:hostile_bodies poll:one_rows_hostile_answer",
    "status that is never the last": "poll:a_deadline_ends_the_run_with_rows_open",
    "unknown, missing or odd status word": "poll:an_unknown_word_stays_open poll:a_read_without",
    "older word after the last": "poll:an_older_word_on_a_reread poll:a_slow_answer_that_is_older",
    "completed without a result": "poll:completed_without_a_url settle:retry_of_a_completed_row",
    "cost missing, odd or absurd": "poll:odd_costs decisions:sum_over_ten_thousand_rows_is_exact",
    "cost that comes late or changes": "poll:a_cost_that_arrives_late engine:a_changed_cost_leaves",
    "cost that changes after the last word": "money:remote_audit_records_a_cost_that_changed",
    "kill between reserve and send": "money:cap_holds_under_kills_between_reserve_and_send",
    "job that no row names": "money:remote_audit_names_what_one_side_does_not_know",
    "job not found right after the accept": "poll:not_found_right_after_the_accept",
    "job not found or gone later": "poll:not_found_for_good_goes_to_a_person settle:way_out_by",
    "another API key": "engine:another_key_sends_nothing cli:5_another_key settle:resolve_under",
    "another origin": "engine:another_origin settle:account_of_a_ledger_with_jobs",
    "simulated ledger with a real key": "settle:simulated_ledger_never example:the_example_can",
    "clock a year off, suspend of 8 hours": "poll:a_jump_of_the_clock poll:polls_after_a_suspend",
    "suspend between claim and send": "engine:the_age_is_asked_again_at_the_moment_of_sending",
    "stopped for longer than the key's age": "faults:stopped_for_longer_than_the_keys_age",
    "disk full at the key": "engine:disk_full_at_the_key_sends_nothing faults:disk_that_takes_so",
    "disk full at the id": "engine:disk_full_at_the_id_names_the_job_once",
    "any statement or commit that fails": "steps:statement_n_fails",
    "any connect, send or receive that fails": "steps:call_n_to_the_network_fails",
    "any call to the file system that fails": "steps:call_n_to_the_file_system_fails",
    "read-only ledger or folder": "ledger:a_read_only_ledger_can_be_shown faults:folder_that_an",
    "empty, corrupt, foreign or newer ledger": "cli:8_the_ledger_cannot_be_used ledger:what_is_no",
    "ledger locked by another process": "ledger:a_writer_is_waited_for engine:a_locked_ledger",
    "two runners of one ledger": "cli:second_runner_is_refused_at_once drill:drill_of_the_product",
    "commands beside a run": "settle:cancel_beside_a_run settle:cancel_all_beside_a_run",
    "copy of a ledger, both run": "engine:an_old_copy_restored settle:backup_in_the_middle",
    "old ledger over a newer one": "engine:an_old_copy_restored",
    "lost ledger with a namespace": "cli:lost_ledger_with_a_namespace_buys_nothing_twice",
    "edited row under an old key": "engine:edit_after_a_lost_answer cli:edit_while_the_outcome",
    "key that the server forgot": "engine:a_key_that_may_be_forgotten_waits_for_a_person",
    "401 or 403 in mid-run": "submit:401_in_mid_run_changes_no_row poll:401_on_a_read_also",
    "402": "submit:402_stops_submits_and_polls_on",
    "409 of three kinds": "submit:outcome_of_one_answer decisions:outcome_of",
    "413, 422": "submit:outcome_of_one_answer cli:1_all_final_and_some_not_completed",
    "429 with any Retry-After": "submit:useless_retry_after submit:retry_after_is_honoured",
    "storm of 5xx": "submit:storm_of_500_is_bounded_and_ends_at_the_deadline",
    "full queue": "engine:a_small_queue_is_kept_full engine:a_queue_that_others_fill",
    "no network for two hours": "poll:two_hours_without_a_network submit:refused_connection_waits",
    "no names for two hours": "faults:names_that_are_not_found_for_two_hours",
    "certificate that nobody vouches for": "tls:an_unknown_certificate_stops_the_run",
    "SIGINT, SIGTERM, SIGHUP, twice": "cli:signal_while_an_answer_is_held cli:second_signal_leaves",
    "signal outside a run": "output:signal_outside_a_run_cleans_up",
    "reader that leaves": "cli:status_into_a_reader_that_leaves output:run_whose_events_nobody",
    "output that finds no room": "output:output_that_is_lost_is_no_success",
    "odd terminal or none": "display:odd_terminals display:tiny_windows output:window_that_changes",
    "hostile text": "cli:text_from_outside_is display:text_from_outside output:csv_is_the_jobs",
    "wrong encoding, BOM, odd line ends, NUL": "input:utf_16_is_named input:bom_and_line_ends",
    "huge prompt, huge cell, many rows": "input:long_prompt input:many_rows_in_flat_memory",
    "twin ids": "input:twin_id_in_one_file input:same_id_with_other_content_names_both_lines",
    "API key in any output": "cli:key_that_a_server_echoes cli:key_is_nowhere settle:long_key",
    "job id that is a path": "cli:odd_job_id_calls_no_other_route submit:odd_ids_reach_no_route",
    "redirect": "submit:outcome_of_one_answer cli:key_is_nowhere_after_failures_of_the_connection",
    "link in place of the lock or the ledger": "cli:link_in_place_of_the_lock ledger:a_link_to",
    "proxy, certificate file, base URL that is wrong": "cli:broken_connection_setting cli:base_url",
    "kill before, during and after a download": "download:kill_around_a_file drill:drill_of",
    "disk full in a download": "download:full_disk_stops download:file_size_limit",
    "download that is cut, or no clip": "download:a_file_that_is_cut download:what_is_no_clip",
    "part of another object": "download:a_part_without_proof download:another_object_is_begun",
    "link that has expired": "download:an_expired_link_is download:a_link_that_stays_dead",
    "link to another host, inside, or redirected": "download:another_origin_gets_no_key"
    " download:a_link_or_a_redirect download:a_name_that_leads_inside download:key_does_not_follow",
    "link whose spelling is signed": "download:path_and_query_reach_the_wire",
    "name that a server chose, or no file system takes": "download:no_server_names_a_file"
    " download:names_are_safe_and_distinct",
    "link in place of a file or its part": "download:links_in_the_way_are_not_followed",
    "download that hangs or drips": "download:held_downloads_keep download:a_download_that_drips",
    "signature of a link in any output": "download:the_query_of_a_link drill:drill_of_the_product",
}


def names_in(file: str) -> set[str]:
    tree = ast.parse((Path(__file__).parent / f"test_{file}.py").read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_names_tests_that_exist(fault: str) -> None:
    for place in FAULTS[fault].split():
        file, _, name = place.partition(":")
        assert any(test.startswith(f"test_{name}") for test in names_in(file)), place


# -- faults that need a machine of their own --


class Dripping(FakeClock):
    """Time goes by whenever somebody looks: each chunk of an answer comes late."""

    def awake_s(self) -> float:
        self.awake += 25.0
        return self.awake


@pytest.mark.parametrize("errand", ["submit", "read"])
def test_answer_that_drips_is_given_up_at_the_total_deadline(errand: str) -> None:
    """A byte in time, again and again, trips no timeout between bytes; the whole has one too."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            peer, _ = server.accept()
            with peer, contextlib.suppress(OSError):
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while True:
                    peer.sendall(b"x")
                    time.sleep(0.001)

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        client = Sume(Account(url + "/v1", url, "k"), Dripping(), False)
        if errand == "submit":
            answer = client.submit("video", "key", b"{}", lambda: None)
        else:
            answer = client.read("video", "job_1")
        client.close()
        thread.join(10)
    assert isinstance(answer, Failure)
    assert answer.miss is Miss.UNKNOWN
    assert "no whole answer" in answer.text


@pytest.mark.parametrize("during", ["submits", "reads"])
def test_names_that_are_not_found_for_two_hours(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    """A resolver that fails spends no budget of any row, and the first success goes on."""
    desk.add(*clips(3))
    if during == "reads":
        desk.server.reads_to_finish = 10**6
        desk.run(deadline_s=5)
        desk.server.reads_to_finish = 1
    before = {row: (job.status, job.job_id) for row, job in desk.jobs().items()}

    def fails(*args: object, **more: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", fails)
        ending = desk.run(deadline_s=7200.0)
    assert ending.deadline
    assert {row: (job.status, job.job_id) for row, job in desk.jobs().items()} == before
    assert [notice for notice in desk.notices if "offline" in notice]
    desk.run()
    assert {job.status for job in desk.jobs().values()} == {Status.COMPLETED}
    assert len(desk.server.charges) == 3


@POSIX
@pytest.mark.parametrize("when", ["before", "after"])
def test_kill_in_a_backup_leaves_a_whole_copy_or_none(shop: Shop, when: str) -> None:
    shop.invoke("add", shop.rows(*clips(3)))
    before = (shop.folder / "jobs.db").read_bytes()
    kill = "os.kill(os.getpid(), 9)"
    code = "import os, sume_resume as s; real = s._publish\ndef dies(*a):\n"
    code += f"    {kill if when == 'before' else 'real(*a)'}\n    {kill}\ns._publish = dies"
    done = shop.call("backup", "b.db", code=code)
    assert done.returncode == -9
    assert (shop.folder / "jobs.db").read_bytes() == before
    assert (shop.folder / "b.db").exists() == (when == "after")
    if when == "before":
        assert shop.invoke("backup", "b.db").returncode == 0
    with open_ledger(shop.folder / "b.db") as copy:
        copy.quick_check()
        assert copy.totals().rows == 3


@POSIX
@pytest.mark.parametrize("when", ["before", "after"])
def test_kill_in_a_migration_leaves_one_schema_or_the_other(shop: Shop, when: str) -> None:
    shop.invoke("add", shop.rows(*clips(3)))
    with contextlib.closing(sqlite3.connect(shop.folder / "jobs.db")) as db:
        to_schema_1(db)
    kill = "os.kill(os.getpid(), 9)"
    code = "import os, sume_resume as s; real = s.Ledger._commit\ndef dies(self):\n"
    code += f"    {kill if when == 'before' else 'real(self)'}\n    {kill}\ns.Ledger._commit = dies"
    assert shop.call("status", code=code).returncode == -9
    version = (shop.folder / "jobs.db").read_bytes()[60:64]
    assert int.from_bytes(version, "big") in (1, 2)
    with open_ledger(shop.folder / "jobs.db") as ledger:
        ledger.quick_check()
        assert ledger.totals().rows == 3
    assert shop.run().returncode == 0
    assert len(shop.server.charges) == 3


@POSIX
def test_stopped_for_longer_than_the_keys_age(shop: Shop) -> None:
    """SIGSTOP while a send is unanswered: when it goes on, its key is too old to be sent."""
    shop.server.on_submit = drop_after
    # A key that lives for a second, and waits that outlast it.
    short = "import sume_resume as s; s.POST_DEADLINE_S = 0.5; s.BACKOFF_FLOOR_S = 0.9"
    log = shop.logs / "err"
    start = f"{short}\ns.main()"
    with open(log, "wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", start, "run", shop.rows(*clips(1)), *QUICK, "--key-ttl", "1s"],
            cwd=shop.folder, env=shop.env | {"PYTHONPATH": str(Path(shop.command()[1]).parent)},
            stdout=subprocess.DEVNULL, stderr=err,
        )  # fmt: skip
    try:
        until(lambda: shop.server.posts)
        until(lambda: "sending" in {str(job.status) for job in shop.jobs().values()})
        process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        until(lambda: time.monotonic() - stopped > 1.1)
        process.send_signal(signal.SIGCONT)
        assert process.wait(20) == 4, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert len(shop.server.posts) == 1
    assert shop.jobs()["r1"].status is Status.REVIEW


@POSIX
@pytest.mark.parametrize("room", [0, 4096, 16384, 40960])
def test_disk_that_takes_so_much_and_no_more(shop: Shop, room: int) -> None:
    """RLIMIT_FSIZE: no row is sent whose key found no room; the next run finishes them."""
    import resource

    rows = [{"id": f"r{n}", "prompt": f"clip {n}." + "x" * 3000} for n in range(12)]
    shop.invoke("add", shop.rows(*rows))
    size = (shop.folder / "jobs.db").stat().st_size

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, size + room))

    done = subprocess.run(
        shop.command("run", *QUICK), cwd=shop.folder, env=shop.env, capture_output=True,
        preexec_fn=limit, timeout=60,
    )  # fmt: skip
    assert done.returncode in (0, 8), done.stderr
    assert b"Traceback" not in done.stderr
    if done.returncode == 8:
        assert b"jobs.db" in done.stderr
    with open_ledger(shop.folder / "jobs.db") as ledger:
        ledger.quick_check()
        known = {job.key for job in ledger.latest()}
    assert {post.key for post in shop.server.posts} <= known
    assert shop.run().returncode == 0
    assert len(shop.server.charges) == len(rows)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


def as_an_ordinary_user(work: Callable[[], Any]) -> Any:
    """Run something in a child process that owns nothing and is no root."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setegid(65534)
                os.seteuid(65534)
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(said)


@POSIX
def test_folder_that_an_ordinary_user_may_only_read(open_folder: Path, server: FakeSume) -> None:
    """`status` works or says why; a run is refused before any POST; no byte changes."""
    desk = Desk(str(open_folder / "jobs.db"), open_folder, server, clock=None)  # type: ignore[arg-type]
    desk.add(*clips(2))
    desk.path.chmod(0o644)
    (open_folder / "clips.jsonl").write_bytes(jsonl(*clips(3)))
    before = {path.name: path.read_bytes() for path in open_folder.iterdir()}
    open_folder.chmod(0o555)
    env = {"SUME_API_KEY": "k", "SUME_API_BASE_URL": server.url, "SUME_RESUME_DB": str(desk.path)}

    def commands() -> list[tuple[int, str]]:
        found = []
        for args in (["status"], ["run"], ["add", str(open_folder / "clips.jsonl")],
                     ["cancel", "--all", "--yes"]):  # fmt: skip
            done = in_process(args, dict(env))
            found.append((int(done.returncode), (done.stdout + done.stderr).decode()))
        return found

    (shown, text), *refused = as_an_ordinary_user(commands)
    assert shown == 0, text
    assert "2 queued" in text
    for code, said in refused:
        assert code == 8, said
        assert str(open_folder) in said
    assert server.requests == []
    assert {path.name: path.read_bytes() for path in open_folder.iterdir()} == before
