"""Result files: whole and verified or absent, the key to nobody else, nothing bought for them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import signal
import socket
import threading
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import child
import httpx
import pytest
from conftest import CANARY, KEY, POSIX, Desk, FakeClock, Shop, clips, last_line, until
from servers import FakeJob, FakeSume, File, Media, Reply, Request, Reset, finished, serve_file
from servers import error as err
from test_kill import Zygote, zygote  # noqa: F401  a fixture
from test_output import events_of
from test_steps import NETWORK, Fault, disk_full, no_space, unlucky_ledger

import sume_resume
from sume_resume import (
    Account,
    Downloading,
    Ending,
    Fetched,
    FileReply,
    Got,
    Job,
    LedgerError,
    LinkRefused,
    Output,
    Part,
    PartBusy,
    Progress,
    Status,
    Sume,
    Wanted,
    ending_of,
    fetch,
    file_stem,
    is_inside,
    judge,
    open_ledger,
    part_path,
)

SECRET = "signature-5ec3e7"


def mp4(name: str, size: int = 400) -> bytes:
    """Return a file that is an MP4 from its first box to its last, and like no other."""
    filler = (hashlib.sha256(name.encode()).digest() * (size // 32 + 1))[:size]
    boxes = ((b"ftyp", b"isom\0\0\2\0isommp41"), (b"mdat", filler))
    return b"".join((8 + len(data)).to_bytes(4, "big") + kind + data for kind, data in boxes)


PNG = (
    b"\x89PNG\r\n\x1a\n" + bytes.fromhex("0000000d49484452000000010000000108060000001f15c489")
    + b"\0\0\0\0IEND\xaeB`\x82"
)  # fmt: skip


@pytest.fixture
def media() -> Iterator[Media]:
    with Media() as server:
        yield server


def stem_of(job: Job, position: int = 0) -> str:
    return file_stem(job.row, job.key, job.job_id, position)


class Batch:
    """A desk whose jobs have their files at a media server, under links that are signed."""

    def __init__(self, desk: Desk, media: Media) -> None:
        self.desk, self.media = desk, media
        self.folder = desk.folder / "out"
        self.folder.mkdir()
        desk.server.final = self.final
        self.more: Callable[[FakeJob], dict[str, Any]] = lambda job: {}

    def final(self, job: FakeJob) -> dict[str, Any]:
        path = f"/{job.id}.mp4"
        self.media.files.setdefault(path, File(mp4(job.id)))
        link = {"url": f"{self.media.url}{path}?sig={SECRET}"}
        return finished(job) | link | self.more(job)

    def run(self, **settings: Any) -> Ending:
        return self.desk.run(download=self.folder, **settings)

    def file(self, row: str = "r1", position: int = 0) -> File:
        """Return the file that a row's job has at the media server."""
        return self.media.files[f"/{self.desk.job(row).job_id}.mp4"]

    def outputs(self, row: str = "r1") -> list[Output]:
        with open_ledger(self.desk.place) as ledger:
            return ledger.outputs(ledger.find(row))

    def check(self, *rows: str) -> None:
        """Each row has its own file, whole, and the ledger knows what is in it."""
        for row in rows:
            (output,) = self.outputs(row)
            assert output.path is not None
            content = Path(output.path).read_bytes()
            assert content == self.file(row).content
            assert output.sha256 == hashlib.sha256(content).hexdigest()
            assert output.bytes == len(content)
        assert not list(self.folder.glob("*.part"))

    def url(self, row: str = "r1") -> str:
        return f"{self.media.url}/{self.desk.job(row).job_id}.mp4"

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def batch(desk: Desk, media: Media) -> Batch:
    return Batch(desk, media)


def prepared(batch: Batch, content: bytes, **more: Any) -> File:
    """Make one row, whose file is this one; it is known before the run by its job's name."""
    batch.desk.add(*clips(1))
    batch.desk.run()
    (job,) = batch.desk.server.charges
    file = batch.media.files[f"/{job.id}.mp4"] = File(content, **more)
    return file


# -- the whole way --


def test_a_row_that_ends_is_downloaded_at_once(batch: Batch) -> None:
    batch.desk.add(*clips(3))
    ending = batch.run()
    batch.check("r1", "r2", "r3")
    assert (ending.undownloaded, ending.downloads_cut) == ({}, "")
    assert len(batch.media.requests) == 3
    # Links that came with the last word need no second read.
    assert len(batch.desk.server.gets) == 3
    assert "downloaded" in batch.desk.history()


def test_the_query_of_a_link_is_stored_and_shown_nowhere(batch: Batch) -> None:
    batch.desk.add(*clips(2))
    batch.media.files["/gone"] = File(b"")
    batch.run()
    batch.file("r2").content = b"<html>"
    batch.outputs("r2")
    Path(batch.outputs("r2")[0].path or "").unlink()
    batch.run()
    assert all(SECRET in r.path for r in batch.media.requests)
    said = repr([event for event in batch.desk.events if not isinstance(event, Downloading)])
    shown = batch.desk.command("status", "r2").stdout + batch.desk.command("status").stdout
    assert SECRET not in said
    assert SECRET.encode() not in shown + batch.desk.content()
    assert SECRET not in "".join(batch.names())


def test_nothing_is_downloaded_unless_asked_for(batch: Batch) -> None:
    batch.desk.add(*clips(2))
    batch.desk.run()
    assert batch.media.requests == []
    assert batch.outputs()[0].path is None


def test_a_finished_batch_is_downloaded_later(batch: Batch) -> None:
    batch.desk.add(*clips(3))
    batch.desk.run()
    posts = len(batch.desk.server.posts)
    batch.run()
    batch.check("r1", "r2", "r3")
    batch.run()
    assert len(batch.media.requests) == 3
    assert len(batch.desk.server.posts) == posts


@pytest.mark.parametrize("how", ["deleted", "changed", "changed in place", "cut", "link"])
def test_a_file_that_is_not_what_it_was_is_had_again(batch: Batch, how: str) -> None:
    batch.desk.add(*clips(2))
    batch.run()
    path = Path(batch.outputs()[0].path or "")
    victim = batch.folder.parent / "victim"
    victim.write_bytes(b"mine")
    match how:
        case "deleted":
            path.unlink()
        case "changed":
            path.write_bytes(b"edited")
        case "changed in place":
            with open(path, "r+b") as file:
                file.seek(100)
                file.write(b"!")
        case "cut":
            os.truncate(path, 100)
        case "link":
            copy = batch.folder.parent / "copy"
            path.rename(copy)
            path.symlink_to(copy)
    batch.run()
    batch.check("r1", "r2")
    assert not path.is_symlink()
    assert len(batch.media.requests) == 3
    assert "lost" in batch.desk.history()
    assert any("downloaded again" in notice for notice in batch.desk.notices)


def test_another_folder_takes_nothing_from_the_first(batch: Batch) -> None:
    """What is in a folder that this run is not for is neither lost nor forgotten."""
    batch.desk.add(*clips(2))
    batch.run()
    first = batch.outputs("r2")[0]
    other = batch.folder.with_name("other")
    other.mkdir()
    for file in batch.media.files.values():
        file.script.extend([Reply(404, b"")] * 5)
    assert set(batch.desk.run(download=other).undownloaded) == {"r1", "r2"}
    assert batch.outputs("r2") == [first]
    assert "lost" not in batch.desk.history("r2")
    assert batch.desk.run(download=other).undownloaded == {}
    assert Path(batch.outputs("r2")[0].path or "").parent == other
    assert Path(first.path or "").exists()


def test_links_are_asked_for_at_the_pace_of_reads_and_in_order(batch: Batch) -> None:
    """A hundred finished rows take ten seconds at 600 reads a minute, not a hundred."""
    batch.desk.add(*clips(100))
    batch.desk.run()
    start, asked = batch.desk.clock.awake, len(batch.desk.server.gets)
    assert batch.run(reads_per_minute=600.0).undownloaded == {}
    assert batch.desk.clock.awake - start < 15
    ids = [request.path.rpartition("/")[2] for request in batch.desk.server.gets[asked:]]
    order = [batch.desk.job(f"r{n}").job_id for n in range(1, 101)]
    assert ids == order


def test_a_folder_that_was_moved_is_known_again(batch: Batch) -> None:
    batch.desk.add(*clips(1))
    batch.run()
    batch.folder = batch.folder.rename(batch.folder.with_name("moved"))
    batch.run()
    batch.check("r1")
    assert Path(batch.outputs()[0].path or "").parent == batch.folder
    assert len(batch.media.requests) == 1


def test_all_outputs_of_a_job_are_had(batch: Batch) -> None:
    """A list, a thumbnail, and a relative link to the API itself."""
    batch.media.files |= {
        "/b.webm": File(b"\x1aE\xdf\xa3" + b"w" * 60, "video/webm"),
        "/t.png": File(PNG, "image/png"),
    }
    batch.more = lambda job: {
        "urls": [f"{batch.media.url}/b.webm", "/v1/content/1"],
        "result": {"thumbnail_url": f"{batch.media.url}/t.png"},
    }

    def read(server: FakeSume, request: Request) -> Reply | None:
        if request.path != "/v1/content/1":
            return None
        assert request.headers["authorization"] == f"Bearer {KEY}"
        return Reply(200, mp4("relative"), {"Content-Type": "video/mp4"})

    batch.desk.server.on_read = read
    batch.desk.add(*clips(1))
    assert batch.run().undownloaded == {}
    outputs = batch.outputs()
    stem = Path(outputs[0].path or "").stem
    assert [Path(out.path or "").name for out in outputs] == [
        f"{stem}.webm", f"{stem}-2.mp4", f"{stem}-3.mp4", f"{stem}-4.png",
    ]  # fmt: skip
    assert all(out.sha256 for out in outputs)


def test_an_images_file_comes_from_its_result(batch: Batch) -> None:
    batch.desk.add({"id": "r1", "prompt": "p.", "kind": "image"})
    batch.media.files["/i.png"] = File(PNG, "image/png")
    batch.more = lambda job: {"url": f"{batch.media.url}/i.png"}
    batch.run()
    (output,) = batch.outputs()
    assert (output.path or "").endswith(".png")


def test_a_row_without_a_result_is_no_success(batch: Batch) -> None:
    """B20: asked once more by each run; had as soon as Sume names it."""
    batch.more = lambda job: {"url": None}
    batch.desk.add(*clips(1))
    assert batch.run().undownloaded == {"r1": "Sume named no result file"}
    assert batch.run().undownloaded == {"r1": "Sume named no result file"}
    assert len(batch.desk.server.posts) == 1
    batch.more = lambda job: {}
    assert batch.run().undownloaded == {}
    batch.check("r1")
    assert batch.desk.job().note is None
    assert "named" in batch.desk.history()


def test_what_a_failed_job_made_is_had_too(batch: Batch) -> None:
    batch.more = lambda job: {"status": "failed"}
    batch.desk.add(*clips(1))
    batch.run()
    batch.check("r1")
    assert batch.desk.job().status is Status.FAILED


def test_only_the_rows_of_the_file_are_downloaded(batch: Batch) -> None:
    batch.desk.add(*clips(2))
    batch.desk.run()
    batch.run(scope={"r2"})
    batch.check("r2")
    assert batch.outputs("r1")[0].path is None


# -- where the key goes --


@pytest.fixture
def keyed(batch: Batch) -> Batch:
    batch.desk.add(*clips(1))
    return batch


def secrets_in(request: Request) -> list[str]:
    words = ("authorization", "x-api-key", "cookie", "idempotency-key")
    found = [name for name in words if name in request.headers]
    return found + [name for name, value in request.headers.items() if KEY in value]


@pytest.mark.parametrize("mode", ["bearer", "x-api-key"])
def test_another_origin_gets_no_key_and_no_cookie(batch: Batch, mode: str) -> None:
    class Sume_(Sume):
        def __init__(self, account: Account, clock: Any, tls: Any) -> None:
            super().__init__(Account(account.base_url, "", KEY, mode), clock, tls)

    def answer(server: FakeSume, request: Request) -> None:
        assert KEY in str(request.headers)

    batch.desk.server.on_read = answer
    batch.desk.add(*clips(2))
    batch.run(api=Sume_)
    assert len(batch.media.requests) == 2
    assert [secrets_in(request) for request in batch.media.requests] == [[], []]


def test_cookies_of_a_media_host_are_not_sent_back(batch: Batch) -> None:
    batch.desk.add(*clips(2))
    batch.desk.run()
    for job in batch.desk.server.charges:
        cookie = {"Set-Cookie": "spy=1; Path=/", "Content-Type": "video/mp4"}
        batch.media.files[f"/{job.id}.mp4"].script.append(Reply(200, mp4(job.id), cookie))
    assert batch.run().undownloaded == {}
    assert [secrets_in(request) for request in batch.media.requests] == [[], []]


def test_key_does_not_follow_a_redirect_away_nor_come_back(keyed: Batch) -> None:
    """From the API to a media host, and back: only the first request has it."""
    media, server = keyed.media, keyed.desk.server
    seen: list[Request] = []

    def content(server: FakeSume, request: Request) -> Reply | None:
        if request.path == "/v1/content":
            seen.append(request)
            return Reply(307, b"", {"Location": f"{media.url}/hop?sig={SECRET}"})
        if request.path == "/v1/me":
            seen.append(request)
            return Reply(200, mp4("me"), {"Content-Type": "video/mp4"})
        return None

    server.on_read = content
    keyed.more = lambda job: {"url": f"{server.url}/v1/content"}
    hop = Reply(302, b"", {"Location": f"{server.url}/v1/me"})
    media.files["/hop"] = File(b"")
    media.files["/hop"].script.append(hop)
    assert keyed.run().undownloaded == {}
    assert [bool(secrets_in(request)) for request in seen] == [True, False]
    assert [secrets_in(request) for request in media.requests] == [[]]


@pytest.mark.parametrize(
    "link",
    [
        "http://169.254.169.254/latest/meta-data/",
        "https://10.0.0.7/a.mp4",
        "https://[fe80::1]/a.mp4",
        "https://192.168.1.1/a.mp4",
        "https://[::ffff:10.0.0.1]/a.mp4",
        "http://media.example/a.mp4",
        "ftp://media.example/a.mp4",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "https://user:pass@media.example/a.mp4",
        "https://api.sume.com\\@evil.example/a.mp4",
        "https://media.example/a b.mp4",
        "https://media.example/a\r\nX: y",
        "https://media.example:port/",
        "https:///a.mp4",
        "https://bad_[host/a.mp4",
        "https://mediä.example/a.mp4",
        "//[bad/a.mp4",
        "https://10.0.0.1./a.mp4",
        "https://2852039166/a.mp4",
        "https://0xa9fea9fe/a.mp4",
        "https://127.1/a.mp4",
    ],
)
def test_a_link_or_a_redirect_that_is_not_followed(keyed: Batch, link: str) -> None:
    """Judged before it is followed, and again at every hop; given up at once, and said."""
    with pytest.raises(LinkRefused):
        judge(link, keyed.desk.server.url + "/v1")
    keyed.more = lambda job: {"url": link}
    assert set(keyed.run().undownloaded) == {"r1"}
    assert (keyed.desk.job().trouble or "").startswith("no file: the link")
    assert keyed.names() == []
    if link.isprintable() and link.isascii():
        keyed.more = lambda job: {"url": f"{keyed.media.url}/hop"}
        keyed.media.files["/hop"] = File(b"")
        keyed.media.files["/hop"].script.append(Reply(302, b"", {"Location": link}))
        keyed.run()
        # A text that is no URL at all is the HTTP client's to refuse, and may come right.
        assert len(keyed.media.requests) in (1, sume_resume.DOWNLOAD_TRIES)
    assert len(keyed.desk.server.posts) == 1


@pytest.mark.parametrize(
    "link",
    [
        "http://127.0.0.1:9/a.mp4",
        "https://localhost/a.mp4",
        "https://[::1]/a.mp4",
        "http://api.sume.com/a.mp4",
    ],
)
def test_this_machine_is_no_media_host_of_a_public_api(link: str) -> None:
    with pytest.raises(LinkRefused):
        judge(link, "https://api.sume.com/v1")


@pytest.mark.parametrize(
    ("link", "origin", "own", "target"),
    [
        ("https://api.sume.com/v1/x?a=1#t", "https://api.sume.com", True, "/v1/x?a=1"),
        ("https://API.sume.com:443/x", "https://api.sume.com", True, "/x"),
        ("https://api.sume.com:8443/x", "https://api.sume.com:8443", False, "/x"),
        ("/x", "https://api.sume.com", True, "/x"),
        ("/a/../b//c?", "https://api.sume.com", True, "/a/../b//c?"),
        ("//m.example/a;?b=", "https://m.example", False, "/a;?b="),
        ("videos/j/content?index=1", "https://api.sume.com", True, "/v1/videos/j/content?index=1"),
        ("//media.sume.com/x", "https://media.sume.com", False, "/x"),
        ("https://media.sume.com", "https://media.sume.com", False, "/"),
        ("https://media.sume.com?a", "https://media.sume.com", False, "/?a"),
        ("https://api.sume.com.evil.example/x", "https://api.sume.com.evil.example", False, "/x"),
        ("https://m.example/a/../b//c/./d", "https://m.example", False, "/a/../b//c/./d"),
        ("https://m.example/%2F%2f+%20?a=&b=+&c=%2b", "https://m.example", False,
         "/%2F%2f+%20?a=&b=+&c=%2b"),
        ("https://m.example/ä?ö", "https://m.example", False, "/%C3%A4?%C3%B6"),
        ("https://8.8.8.8/x", "https://8.8.8.8", False, "/x"),
    ],
)  # fmt: skip
def test_where_a_link_leads(link: str, origin: str, own: bool, target: str) -> None:
    found = judge(link, "https://api.sume.com/v1")
    assert (found.origin, found.own, found.target) == (origin, own, target.encode())


def test_an_api_in_a_private_network_serves_its_own_files() -> None:
    assert judge("https://10.0.0.7:8443/x", "https://10.0.0.7:8443/v1").own
    with pytest.raises(LinkRefused):
        judge("https://10.0.0.8:8443/x", "https://10.0.0.7:8443/v1")


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        ("10.1.2.3", True), ("172.16.0.1", True), ("192.168.0.1", True), ("127.0.0.1", True),
        ("169.254.169.254", True), ("100.64.0.1", True), ("0.0.0.0", True), ("224.0.0.1", True),
        ("255.255.255.255", True), ("::1", True), ("fe80::1%eth0", True), ("fc00::1", True),
        ("::ffff:192.168.0.1", True), ("::ffff:8.8.8.8", False), ("8.8.8.8", False),
        ("2606:4700::1111", False), ("media.sume.com", False), ("64:ff9b::a00:1", True),
        ("64:ff9b::808:808", False), ("2002:a00:1::1", True), ("fec0::1", True),
        ("::10.0.0.1", True), ("::ffff:0:a00:1", True), ("64:ff9b:1::1", True),
    ],
)  # fmt: skip
def test_is_inside(address: str, inside: bool) -> None:
    assert is_inside(address) is inside


def test_a_name_that_leads_inside_is_refused_before_a_byte_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is the address that was connected to, whatever a name server said before."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        here = door.getsockname()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", here)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: found)
        account = Account("https://api.example/v1", "https://api.example", KEY)
        api = Sume(account, FakeClock(), httpx.create_ssl_context())
        wanted = Wanted(tmp_path, "f", Output(""), f"https://media.example:{here[1]}/a?k={SECRET}")
        done = fetch(api, wanted, Progress(), FakeClock())
        api.close()
        assert (done.got, SECRET in done.trouble) == (Got.REFUSED, False)
        assert "private network" in done.trouble
        connection, _ = door.accept()
        with connection:
            connection.settimeout(5)
            assert connection.recv(100) == b""
    assert list(tmp_path.iterdir()) == []


def test_path_and_query_reach_the_wire_byte_for_byte(keyed: Batch) -> None:
    """B31: a signature can be over how they are spelled."""
    target = "/a%2Fb/%7e/../c//d;e/%zz?sig=A%2bB+C&empty=&flag&q=%2F/?[x]|\"'{}^`"
    keyed.more = lambda job: {"url": keyed.media.url + target + "#frag"}
    keyed.media.files[target.partition("?")[0]] = File(mp4("x"))
    assert keyed.run().undownloaded == {}
    assert [request.path for request in keyed.media.requests] == [target]


def test_a_proxy_is_asked_for_the_host_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path and signature are for the other end of the tunnel."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            for _ in range(2):
                connection, _ = door.accept()
                with connection:
                    heard.append(connection.recv(65536))
                    connection.sendall(b"HTTP/1.1 403 no\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{door.getsockname()[1]}")
        account = Account("https://api.example/v1", "https://api.example", KEY)
        api = Sume(account, FakeClock(), httpx.create_ssl_context())
        for host in ("media.example", "api.example"):
            wanted = Wanted(tmp_path, "f", Output(""), f"https://{host}/clip?k={SECRET}")
            assert fetch(api, wanted, Progress(), FakeClock()).got is Got.FAILED
        api.close()
        thread.join(10)
    lines = [text.split(b"\r\n")[0] for text in heard]
    assert lines == [b"CONNECT media.example:443 HTTP/1.1", b"CONNECT api.example:443 HTTP/1.1"]
    assert SECRET.encode() not in b"".join(heard)
    assert KEY.encode() not in b"".join(heard)


def test_what_a_server_echoes_is_hidden(batch: Batch) -> None:
    """Key and signature come back in header values, and are kept nowhere."""
    file = prepared(batch, BIG)
    said = {"Content-Type": f"text/html; k={KEY}; s={SECRET}", "ETag": f'"{KEY}{SECRET}"'}
    file.script.extend([Reply(200, b"<html>", said)] * 5)
    assert "no clip" in batch.run().undownloaded["r1"]
    file.script.append(Reply(200, BIG, {"Content-Type": "video/mp4", "ETag": f'"{KEY}"'}, cut=9000))
    batch.run(deadline_s=0.01)
    stored = batch.desk.content()
    assert KEY.encode() not in stored
    assert SECRET.encode() not in stored
    assert KEY not in repr(batch.desk.events)


def test_redirects_end(keyed: Batch) -> None:
    keyed.more = lambda job: {"url": f"{keyed.media.url}/loop"}
    keyed.media.files["/loop"] = File(b"")
    loop = keyed.media.files["/loop"].script
    loop.extend([Reply(302, b"", {"Location": "/loop?again"})] * 20)
    assert "redirected over 5 times" in keyed.run().undownloaded["r1"]
    assert len(keyed.media.requests) == 6
    loop.clear()
    loop.append(Reply(302, b""))
    assert "leads nowhere" in keyed.run().undownloaded["r1"]


def test_a_proxy_never_sees_loopback(keyed: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert keyed.run().undownloaded == {}


# -- links that expire --


def test_an_expired_link_is_refreshed_by_reading_the_job(batch: Batch) -> None:
    batch.desk.add(*clips(2))
    batch.desk.run()
    batch.file("r1").script.extend([Reply(403, b"<Error/>", {"Content-Type": "application/xml"})])
    reads = len(batch.desk.server.gets)
    assert batch.run().undownloaded == {}
    batch.check("r1", "r2")
    # Two reads for the links of two rows, and one after the refusal.
    assert len(batch.desk.server.gets) - reads == 3
    assert len(batch.desk.server.posts) == 2


@pytest.mark.parametrize("code", [401, 403, 404, 410])
def test_a_link_that_stays_dead_is_given_up(batch: Batch, code: int) -> None:
    """Bounded, said, and nothing is bought: the next run tries again."""
    file = prepared(batch, mp4("x"))
    file.script.extend([Reply(code, err("gone"))] * 50)
    batch.desk.add(*clips(2))
    ending = batch.run()
    assert ending.undownloaded == {"r1": f"the link answers HTTP {code}"}
    assert len(batch.media.asked(f"/{batch.desk.job().job_id}.mp4")) == 5
    job = batch.desk.job()
    assert (job.status, job.note) == (Status.COMPLETED, None)
    assert job.trouble == f"no file: the link answers HTTP {code}"
    batch.check("r2")
    assert len(batch.desk.server.posts) == 2
    file.script.clear()
    assert batch.run().undownloaded == {}
    batch.check("r1", "r2")
    assert batch.desk.job().trouble is None


def test_job_that_sume_has_forgotten_may_still_have_its_file(batch: Batch) -> None:
    """What the ledger has of the link is tried, without a query; then it is given up."""
    prepared(batch, mp4("x"))
    batch.desk.server.jobs.clear()
    assert batch.run().undownloaded == {}
    assert [SECRET in request.path for request in batch.media.requests] == [False]
    Path(batch.outputs()[0].path or "").unlink()
    batch.media.files.clear()
    assert batch.run().undownloaded == {"r1": "the link answers HTTP 404"}
    assert len(batch.media.requests) == 2


def test_a_cost_that_is_new_comes_with_fresh_links(batch: Batch) -> None:
    prepared(batch, mp4("x"))
    batch.more = lambda job: {"usage": {"cost": 0.05}}
    batch.run()
    assert batch.desk.job().cost_micros == 50_000


def test_a_dead_account_stops_the_run(batch: Batch) -> None:
    prepared(batch, mp4("x"))
    batch.desk.server.on_read = Reply(401, err("unauthorized"))
    ending = batch.run()
    assert ending.halt is not None
    assert ending.downloads_cut
    assert batch.desk.job().status is Status.COMPLETED


def test_bad_reads_for_a_link_are_bounded(batch: Batch) -> None:
    prepared(batch, mp4("x"))
    batch.desk.server.on_read = Reply(500, b"<html>")
    batch.desk.server.results.extend([Reply(500, b"<html>")] * 50)
    batch.media.files.clear()
    reads = len(batch.desk.server.gets)
    assert set(batch.run().undownloaded) == {"r1"}
    assert len(batch.desk.server.gets) - reads < 10


def test_hours_without_a_network_use_up_no_try(batch: Batch) -> None:
    """B29 for files: the API is asked before each further try, and that waits."""
    batch.desk.add(*clips(3))
    batch.desk.run()
    start, clock = batch.desk.clock.awake, batch.desk.clock

    class Offline(Sume):
        def read(self, *args: Any) -> Any:
            if clock.awake < start + 7200:
                return sume_resume.Failure(sume_resume.Miss.NOT_SENT, "no route")
            return super().read(*args)

        def stream(self, *args: Any) -> Any:
            if clock.awake < start + 7200:
                raise httpx.ConnectError("no route")
            return super().stream(*args)

    ending = batch.run(api=Offline)
    assert clock.awake > start + 7200
    assert ending.undownloaded == {}
    batch.check("r1", "r2", "r3")
    assert batch.desk.notices[-2:][0].startswith("offline, waiting")


# -- whole or absent --


@pytest.mark.parametrize("how", ["length", "chunked", "none"])
@pytest.mark.parametrize("at", [0, 1, 7, 8, 15, 16, 100, 250, 420, 431])
def test_a_file_that_is_cut_never_gets_its_name(
    tmp_path: Path, how: str, at: int, clock: FakeClock
) -> None:
    """Cut at any byte, and whatever the answer says of its length."""
    content = mp4("x")
    assert at < len(content)
    with Wire(content, how, at) as wire:
        done = wire.fetch(tmp_path, clock)
    assert done.got in (Got.FAILED, Got.EXPIRED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["length", "chunked", "none"])
@pytest.mark.parametrize(
    ("content", "type", "ending"),
    [
        (mp4("x"), "video/mp4", "mp4"),
        (PNG, "image/png", "png"),
        (b"\xff\xd8\xff" + b"j" * 50 + b"\xff\xd9", "image/jpeg", "jpg"),
        (b"GIF89a" + b"g" * 50 + b";", "image/gif", "gif"),
        (b"RIFF" + (60).to_bytes(4, "little") + b"WEBP" + b"w" * 56, "image/webp", "webp"),
    ],
)
def test_whole_file_gets_its_name(
    tmp_path: Path, how: str, content: bytes, type: str, ending: str, clock: FakeClock
) -> None:
    with Wire(content, how, None, type) as wire:
        done = wire.fetch(tmp_path, clock)
    assert done.got is Got.WHOLE, done
    assert [path.name for path in tmp_path.iterdir()] == [f"f.{ending}"]
    assert (tmp_path / f"f.{ending}").read_bytes() == content
    assert (done.sha256, done.size) == (hashlib.sha256(content).hexdigest(), len(content))


def test_without_a_length_a_kind_that_does_not_tell_its_end_is_no_proof(
    tmp_path: Path, clock: FakeClock
) -> None:
    content = b"\x1aE\xdf\xa3" + b"w" * 60
    for how, got in (("none", Got.FAILED), ("length", Got.WHOLE)):
        with Wire(content, how, None, "video/webm") as wire:
            assert wire.fetch(tmp_path, clock).got is got


@pytest.mark.parametrize("size", [0, 1, 7])
def test_boxes_that_do_not_say_where_they_end(tmp_path: Path, size: int, clock: FakeClock) -> None:
    content = mp4("x") + size.to_bytes(4, "big") + b"mdat"
    with Wire(content, "none", None) as wire:
        assert wire.fetch(tmp_path, clock).got is Got.FAILED


class Wire:
    """Answers one request, as raw bytes, with a body that may be cut."""

    def __init__(self, content: bytes, how: str, cut: int | None, type: str = "video/mp4") -> None:
        self.content, self.how, self.cut, self.type = content, how, cut, type

    def __enter__(self) -> Wire:
        self.door = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.door.close()
        self.thread.join(10)

    def _serve(self) -> None:
        connection, _ = self.door.accept()
        with connection:
            while b"\r\n\r\n" not in connection.recv(65536):
                pass
            head = f"HTTP/1.1 200 OK\r\nContent-Type: {self.type}\r\n"
            body = self.content[: self.cut]
            if self.how == "length":
                head += f"Content-Length: {len(self.content)}\r\n"
            elif self.how == "chunked":
                head += "Transfer-Encoding: chunked\r\n"
                end = b"0\r\n\r\n" if self.cut is None else b""
                body = b"%x\r\n%b\r\n" % (len(body), body) + end if body else end
            else:
                head += "Connection: close\r\n"
            connection.sendall(head.encode() + b"\r\n" + body)

    def fetch(self, folder: Path, clock: FakeClock) -> Fetched:
        host, port = self.door.getsockname()
        account = Account(f"http://{host}:1/v1", f"http://{host}:1", KEY)
        api = Sume(account, clock, False)
        try:
            wanted = Wanted(folder, "f", Output(""), f"http://{host}:{port}/x?k={SECRET}")
            done = fetch(api, wanted, Progress(), clock)
        finally:
            api.close()
        assert SECRET not in repr(done)
        return done


@pytest.mark.parametrize(
    ("content", "type"),
    [
        (b"<!DOCTYPE html><html>log in</html>", "text/html"),
        (b"<!DOCTYPE html><html>log in</html>", "video/mp4"),
        (b'{"error": {"code": "unauthorized"}}', "application/json"),
        (b'{"error": {"code": "unauthorized"}}', "application/octet-stream"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "application/xml"),
        (b"", "video/mp4"),
        (b"\0" * 500, "video/mp4"),
        (mp4("x"), "text/html"),
        (PNG, "video/mp4"),
    ],
    ids=range(9),
)
def test_what_is_no_clip_never_gets_its_name(batch: Batch, content: bytes, type: str) -> None:
    """B32: bytes are no proof, and neither is what they are called."""
    prepared(batch, content, type=type)
    ending = batch.run()
    assert "no clip and no image" in ending.undownloaded["r1"]
    assert batch.names() == []
    assert len(batch.desk.server.posts) == 1


@pytest.mark.parametrize(
    ("head", "type", "ending"),
    [
        (b"\0\0\0\x20ftypisom", "video/mp4", "mp4"),
        (b"\0\0\0\x20ftypisom", "", "mp4"),
        (b"\0\0\0\x20ftypqt  ", "video/quicktime; x=1", "mov"),
        (b"\0\0\0\x20ftypavif", "image/avif", "avif"),
        (b"\x89PNG\r\n\x1a\n\0\0", "image/jpeg", "png"),
        (b"\x89PNG\r\n\x1a\n\0\0", "binary/octet-stream", "png"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp", "webp"),
        (b"ID3\x04", "audio/mpeg", "mp3"),
        (b"WEBVTT\n", "text/vtt", "vtt"),
        (b"<svg xmlns=", "image/svg+xml", "svg"),
        (b"<svg xmlns=", "text/html", None),
        (b"\0\0\0\x20ftypisom", "text/plain", None),
        (b"", "video/mp4", None),
    ],
)
def test_ending_of(head: bytes, type: str, ending: str | None) -> None:
    assert ending_of(head, type) == ending


def test_files_keep_their_links_when_others_come_and_go(batch: Batch) -> None:
    """No file is ever stored as another one's; one that is named no more is said."""
    media = batch.media
    for name in "abt":
        media.files[f"/{name}"] = File(mp4(name))
    links = [f"{media.url}/a?s=1", f"{media.url}/b?s=1"]
    batch.more = lambda job: {"url": None, "urls": links}
    batch.desk.add(*clips(1))
    batch.desk.run()
    batch.more = lambda job: {"url": None, "urls": links[1:]}
    assert batch.run().undownloaded == {"r1": "Sume names no link to it any more"}
    first, second = batch.outputs()
    assert first.path is None
    assert Path(second.path or "").read_bytes() == mp4("b")
    assert batch.desk.job().trouble == "no file 1: Sume names no link to it any more"
    batch.more = lambda job: {"url": None, "urls": [f"{media.url}/t", *links]}
    assert batch.run().undownloaded == {}
    assert Path(batch.outputs()[0].path or "").read_bytes() == mp4("a")
    assert batch.desk.job().trouble is None


def test_stored_links_that_are_not_one_files_alone_are_not_used(batch: Batch) -> None:
    batch.media.files["/content"] = File(mp4("x"))
    links = [f"{batch.media.url}/content?index={n}" for n in (0, 1)]
    batch.more = lambda job: {"url": None, "urls": links}
    batch.desk.add(*clips(1))
    batch.desk.run()
    batch.desk.server.jobs.clear()
    assert set(batch.run().undownloaded) == {"r1"}
    assert batch.media.requests == []


def test_trouble_with_one_file_outlasts_the_next_one(batch: Batch) -> None:
    batch.media.files["/b"] = File(mp4("b"))
    batch.more = lambda job: {"url": None, "urls": [f"{batch.media.url}/{n}" for n in "ab"]}
    batch.desk.add(*clips(1))
    assert batch.run().undownloaded == {"r1": "the link answers HTTP 404"}
    assert batch.desk.job().trouble == "no file 1: the link answers HTTP 404"
    assert [bool(output.path) for output in batch.outputs()] == [False, True]


def test_an_api_that_is_broken_for_ever_ends_the_run(batch: Batch) -> None:
    """503 to each read for links: bounded, as everything but the lack of a network is."""
    prepared(batch, mp4("x"))
    batch.desk.add(*clips(3))
    batch.desk.run()
    batch.desk.server.on_read = Reply(503, err("down"))
    batch.desk.server.results.extend([Reply(503, err("down"))] * 100)
    batch.media.files.clear()
    reads = len(batch.desk.server.gets)
    assert set(batch.run().undownloaded) == {"r1", "r2", "r3"}
    assert len(batch.desk.server.gets) - reads < 60


def test_a_byte_more_each_time_is_no_progress(batch: Batch) -> None:
    file = prepared(batch, BIG, etag='"v1"')
    cutting(file, 1000, *[1] * 100)
    assert set(batch.run().undownloaded) == {"r1"}
    assert len(batch.media.requests) < 10


# -- going on where it stopped --

BIG = mp4("big", 300_000)


def cutting(file: File, *cuts: int) -> None:
    """Let the first answers end early; each is what the server would have said then."""

    class Cut(Reply):
        pass

    whole = Reply(200, file.content, {"Content-Type": file.type, "ETag": file.etag})
    first, *rest = cuts
    file.script.append(Reply(200, whole.body, whole.headers, cut=first))
    at = first
    for size in rest:
        asked = Request("GET", "", {"range": f"bytes={at}-", "if-range": file.etag}, b"")
        file.script.append(serve_file(file, asked, cut=size))
        at += size


def test_a_broken_download_goes_on_where_it_stopped(batch: Batch) -> None:
    file = prepared(batch, BIG, etag='"v1"')
    cutting(file, 100_000, 100_000)
    assert batch.run().undownloaded == {}
    batch.check("r1")
    asked = [(r.headers.get("range"), r.headers.get("if-range")) for r in batch.media.requests]
    assert asked == [(None, None), ("bytes=100000-", '"v1"'), ("bytes=200000-", '"v1"')]


def test_progress_is_no_failure(batch: Batch) -> None:
    """A link over which a little more comes each time is not given up after five tries."""
    file = prepared(batch, BIG, etag='"v1"')
    cutting(file, *[20_000] * 12)
    assert batch.run().undownloaded == {}
    batch.check("r1")


def test_another_object_is_begun_from_zero(batch: Batch) -> None:
    file = prepared(batch, BIG, etag='"v1"')
    cutting(file, 100_000)
    file.content, file.etag = mp4("other", 300_000), '"v2"'
    assert batch.run().undownloaded == {}
    batch.check("r1")
    assert Path(batch.outputs()[0].path or "").read_bytes() == file.content


@pytest.mark.parametrize(
    "answer",
    [
        Reply(206, BIG[100_000:], {"Content-Type": "video/mp4"}),
        Reply(206, BIG[100_000:], {"ETag": '"v1"'}),
        Reply(206, BIG[100_000:], {"ETag": '"v2"', "Content-Range": "bytes 100000-300035/300036"}),
        Reply(206, BIG[90_000:], {"ETag": '"v1"', "Content-Range": "bytes 90000-300035/300036"}),
        Reply(206, b"", {"ETag": '"v1"', "Content-Range": "bytes */300036"}),
        Reply(416, b"", {"ETag": '"v1"'}),
    ],
    ids=range(6),
)
def test_a_part_without_proof_is_not_joined(batch: Batch, answer: Reply) -> None:
    file = prepared(batch, BIG, etag='"v1"')
    cutting(file, 100_000)
    file.script.append(answer)
    assert batch.run().undownloaded == {}
    batch.check("r1")
    assert batch.media.requests[-1].headers.get("range") is None


@pytest.mark.parametrize("etag", ["", 'W/"v1"', "v1"])
def test_without_a_strong_etag_it_is_begun_from_zero(batch: Batch, etag: str) -> None:
    file = prepared(batch, BIG, etag=etag)
    cutting(file, 100_000)
    assert batch.run().undownloaded == {}
    batch.check("r1")
    assert [r.headers.get("range") for r in batch.media.requests] == [None, None]


def test_trouble_of_the_server_costs_no_part(batch: Batch) -> None:
    file = prepared(batch, BIG, etag='"v1"')
    cutting(file, 100_000)
    file.script.extend([Reply(503, b"", {"Retry-After": "7"}), Reply(403, b""), Reset()])
    start = batch.desk.clock.awake
    assert batch.run().undownloaded == {}
    batch.check("r1")
    assert batch.media.requests[-1].headers.get("range") == "bytes=100000-"
    assert batch.desk.clock.awake - start >= 7


@pytest.mark.parametrize("packing", ["gzip", "gzip, gzip", "br"])
def test_an_answer_that_is_packed_is_refused(batch: Batch, packing: str) -> None:
    """It was asked not to be; unpacked, seven kB can become eight GB."""
    import gzip

    file = prepared(batch, BIG)
    headers = {"Content-Type": "video/mp4", "Content-Encoding": packing}
    file.script.append(Reply(200, gzip.compress(BIG), headers))
    assert "packed" in batch.run().undownloaded["r1"]
    assert batch.names() == []


@pytest.mark.parametrize("packing", ["identity", "aws-chunked", ""])
def test_a_packing_that_is_none_is_taken(batch: Batch, packing: str) -> None:
    file = prepared(batch, BIG)
    headers = {"Content-Type": "video/mp4", "Content-Encoding": packing}
    file.script.append(Reply(200, BIG, headers))
    assert batch.run().undownloaded == {}


@pytest.mark.parametrize("with_etag", [True, False])
def test_the_next_process_goes_on_too(batch: Batch, with_etag: bool) -> None:
    """A deadline ends the run in the middle of a file; what was durable is not asked for again."""
    file = prepared(batch, BIG, etag='"v1"' if with_etag else "")
    cutting(file, 100_000)
    ending = batch.run(deadline_s=0.01)
    assert ending.downloads_cut == "the run was stopped"
    parts = [path.stat().st_size for path in batch.folder.glob("*.part")]
    assert parts == ([100_000] if with_etag else [])
    assert batch.run().undownloaded == {}
    batch.check("r1")
    ranges = [r.headers.get("range") for r in batch.media.requests]
    assert ranges == [None, "bytes=100000-" if with_etag else None]


def test_a_part_of_one_object_is_never_taken_for_another(tmp_path: Path) -> None:
    facts = [
        ('"v1"', "https://m/a"),
        ('"v2"', "https://m/a"),
        ('"v1"', "https://m/b"),
        (None, None),
    ]
    assert len({part_path(tmp_path, "f", *one) for one in facts}) == 4


# -- what is in the way --


def in_the_way(folder: Path, name: str, how: str) -> Callable[[], None]:
    """Put something where a file is to be written; return a check that it did no harm."""
    victim, path = folder.parent / "victim", folder / name
    victim.write_bytes(b"mine")
    match how:
        case "link":
            path.symlink_to(victim)
        case "dangling":
            path.symlink_to(folder.parent / "nobody")
        case "hard link":
            os.link(victim, path)
        case "fifo":
            os.mkfifo(path)

    def check() -> None:
        assert victim.read_bytes() == b"mine"
        assert not (folder.parent / "nobody").exists()

    return check


@POSIX
@pytest.mark.parametrize("how", ["link", "dangling", "hard link", "fifo"])
@pytest.mark.parametrize("etag", ["", '"v1"'])
@pytest.mark.parametrize("name", ["part", "tagged part", "target"])
def test_links_in_the_way_are_not_followed(batch: Batch, name: str, how: str, etag: str) -> None:
    prepared(batch, BIG, etag=etag)
    job = batch.desk.job()
    stem = stem_of(job)
    names = {
        "part": f"{stem}.part",
        "tagged part": part_path(batch.folder, stem, '"v1"', batch.url()).name,
        "target": f"{stem}.mp4",
    }
    check = in_the_way(batch.folder, names[name], how)
    assert batch.run().undownloaded == {}
    check()
    (output,) = batch.outputs()
    path = Path(output.path or "")
    assert not path.is_symlink()
    assert path.stat().st_nlink == 1
    assert path.read_bytes() == BIG


def test_a_folder_in_the_way_is_said(batch: Batch) -> None:
    prepared(batch, BIG)
    batch.desk.add(*clips(2))
    (batch.folder / f"{stem_of(batch.desk.job())}.mp4").mkdir()
    assert set(batch.run().undownloaded) == {"r1"}
    batch.check("r2")


@POSIX
def test_a_part_that_another_process_writes_is_left_alone(batch: Batch) -> None:
    prepared(batch, BIG)
    with Part(part_path(batch.folder, stem_of(batch.desk.job()), None, None)) as part:
        part.keep(0)
        part.write(b"theirs")
        ending = batch.run()
        assert "another process is downloading" in ending.undownloaded["r1"]
        assert part.path.read_bytes() == b"theirs"
    assert batch.run().undownloaded == {}
    batch.check("r1")


@POSIX
def test_a_tagged_part_of_another_process_is_left_alone(batch: Batch) -> None:
    """Neither is it removed, nor does its owner's rename give a half file the final name."""
    prepared(batch, BIG, etag='"v1"')
    path = part_path(batch.folder, stem_of(batch.desk.job()), '"v1"', batch.url())
    with Part(path) as theirs:
        theirs.write(b"theirs")
        assert "another process" in batch.run().undownloaded["r1"]
        assert path.read_bytes() == b"theirs"
        path.unlink()
        path.write_bytes(b"a third one's")
        with pytest.raises(PartBusy):
            theirs.publish(batch.folder / "x.mp4")
        theirs.drop()
    assert path.read_bytes() == b"a third one's"
    assert batch.names() == [path.name]


def test_a_part_that_is_removed_costs_that_file_a_try(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch.desk.add(*clips(3))
    original = Part.sync
    removed: list[Path] = []

    def sync(self: Part) -> None:
        original(self)
        if not removed:
            removed.append(self.path)
            self.path.unlink()

    monkeypatch.setattr(Part, "sync", sync)
    ending = batch.run()
    assert (ending.undownloaded, ending.downloads_cut) == ({}, "")
    batch.check("r1", "r2", "r3")


@pytest.mark.parametrize("at", ["write", "sync", "publish"])
def test_full_disk_stops_the_downloads_and_nothing_else(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The .part goes, other rows are bought and read, and the next run has the files."""
    batch.desk.add(*clips(4))
    original = getattr(Part, at)

    def full(self: Part, *args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Part, at, full)
    ending = batch.run()
    assert "No space left" in ending.downloads_cut
    assert batch.names() == []
    assert {job.status for job in batch.desk.jobs().values()} == {Status.COMPLETED}
    monkeypatch.setattr(Part, at, original)
    assert batch.run().undownloaded == {}
    batch.check("r1", "r2", "r3", "r4")
    assert len(batch.desk.server.charges) == 4


@POSIX
def test_file_size_limit_of_the_process(shop: Shop, media: Media) -> None:
    """What the system refuses in the middle of a file leaves no part; the rest goes on."""
    link_to(shop, media, lambda job: mp4(job.id, 300_000 if b"clip 1." in job.body else 400))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    done = shop.run(shop.rows(*clips(2)), "--download", "out", code=limit)
    assert done.returncode == 1, done.stderr
    assert b"rows without all their files: 1: r1 (r1-" in done.stderr
    (name,) = (path.name for path in (shop.folder / "out").iterdir())
    assert name.startswith("r2-")
    assert shop.run("clips.jsonl", "--download", "out").returncode == 0
    assert len(shop.server.charges) == 2


# -- names --

ROW_IDS = [
    "r1", "R1", "caf\u00e9", "cafe\u0301", "CON", "con", "nul.mp4", "aux", "..", ".", "../../etc",
    "/abs", "C:\\x", "a/b", "a\\b", "-rf", " lead", "x" * 200, "x" * 199 + "y", "市場", "東京",
    "😀", "a\u202eb", "%2e%2e", "~", "trail.", "$(x)", "a:b", "a*?\"<>|b",
]  # fmt: skip


def test_names_are_safe_and_distinct_on_every_file_system() -> None:
    stems = [file_stem(row, f"sr-{n}", "job_1", 0) for n, row in enumerate(ROW_IDS)]
    same_key = [file_stem(row, "sr-same", "job_1", 0) for row in ROW_IDS]
    for names in (stems, same_key):
        folded = {unicodedata.normalize("NFC", name).casefold() for name in names}
        assert len(folded) == len(ROW_IDS)
        for name in names:
            assert len(f"{name}-99.12345678.part") <= 143
            assert name.isascii()
            assert name[0].isalnum() or name[0] == "_"
            assert set(name) <= set(
                "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
            )
    assert file_stem("r1", "k", "j", 0) != file_stem("r1", "k2", "j", 0)
    assert file_stem("r1", "k", "j", 0) != file_stem("r1", "k", "j2", 0)
    assert file_stem("r1", "k", "j", 1) == file_stem("r1", "k", "j", 0) + "-2"


def test_names_are_frozen() -> None:
    """An upgrade must know the files of before again."""
    assert file_stem("harbour", "sr-0", "job_1", 0) == "harbour-baa78ca691a5"
    assert file_stem("市場", "sr-0", "job_1", 1) == "row-6f598f303d41-2"


@pytest.mark.parametrize(
    "name", ["../../x.mp4", "/etc/passwd", "C:x", "..", "%2e%2e%2fx", "a\\..\\b", "x.exe"]
)
def test_no_server_names_a_file(keyed: Batch, name: str) -> None:
    """B33: neither a link's path nor a header chooses where bytes go."""
    path = "/" + name.lstrip("/")
    keyed.more = lambda job: {"url": f"{keyed.media.url}{path}".replace("\\", "%5c")}
    said = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Type": "video/mp4"}
    keyed.media.files[path.replace("\\", "%5c")] = File(b"")
    keyed.media.files[path.replace("\\", "%5c")].script.append(Reply(200, mp4("x"), said))
    assert keyed.run().undownloaded == {}
    assert keyed.names() == [f"{stem_of(keyed.desk.job())}.mp4"]
    assert {p.name for p in keyed.folder.parent.iterdir()} == {"jobs.db", "out"}


# -- side by side with the rest --


def link_to(shop: Shop, media: Media, content: Callable[[FakeJob], bytes]) -> None:
    def final(job: FakeJob) -> dict[str, Any]:
        media.files.setdefault(f"/{job.id}.mp4", File(content(job)))
        return finished(job) | {"url": f"{media.url}/{job.id}.mp4?sig={SECRET}"}

    shop.server.final = final


def hold(media: Media, release: threading.Event) -> None:
    def watch(request: Request) -> None:
        release.wait(20)

    media.watch = watch


@pytest.mark.parametrize("concurrency", ["2", "3", "8"])
def test_held_downloads_keep_nothing_else_waiting(
    shop: Shop, media: Media, concurrency: str
) -> None:
    """While every download hangs, all rows are sent and read to their ends."""
    release = threading.Event()
    hold(media, release)
    link_to(shop, media, lambda job: mp4(job.id))
    running = shop.start(shop.rows(*clips(12)), "--download", "out", "--concurrency", concurrency)
    ended = {Status.COMPLETED}
    until(lambda: media.requests)
    until(
        lambda: len(shop.server.charges) == 12 and {j.status for j in shop.jobs().values()} == ended
    )
    assert not list((shop.folder / "out").glob("*.mp4"))
    release.set()
    assert running.wait() == 0, running.err
    assert len(list((shop.folder / "out").glob("*.mp4"))) == 12


def test_one_worker_does_it_all(shop: Shop, media: Media) -> None:
    link_to(shop, media, lambda job: mp4(job.id))
    done = shop.run(shop.rows(*clips(5)), "--download", "out", "--concurrency", "1")
    assert done.returncode == 0, done.stderr
    assert len(list((shop.folder / "out").iterdir())) == 5


def test_one_rows_download_blocks_no_other(batch: Batch) -> None:
    batch.desk.add(*clips(6))
    batch.desk.run()
    for row in ("r1", "r2", "r3"):
        batch.file(row).script.extend([Reset()] * 100)
    ending = batch.run()
    assert set(ending.undownloaded) == {"r1", "r2", "r3"}
    batch.check("r4", "r5", "r6")
    # The others were had before the first one was given up.
    told = [
        event.job.row if isinstance(event, sume_resume.Downloaded) else event.after.trouble
        for event in batch.desk.events
        if isinstance(event, sume_resume.Downloaded)
        or (isinstance(event, sume_resume.Changed) and (event.after.trouble or "").startswith("no"))
    ]
    assert told[:3] == ["r4", "r5", "r6"]


def test_more_ended_rows_than_links_are_kept_for(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sume_resume, "LINKS_KEPT", 2)
    batch.desk.add(*clips(9))
    assert batch.run(concurrency=2).undownloaded == {}
    batch.check(*(f"r{n}" for n in range(1, 10)))
    assert len(batch.media.requests) == 9


@pytest.mark.parametrize("drip_s", [0.02])
def test_a_download_that_drips_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drip_s: float
) -> None:
    """A server that sends a byte now and then holds no worker for long."""
    monkeypatch.setattr(sume_resume, "DOWNLOAD_STALL_S", 0.3)
    monkeypatch.setattr(sume_resume, "DOWNLOAD_LEAST_BYTES", 1000)
    ended = threading.Event()

    class Drip(Wire):
        def _serve(self) -> None:
            connection, _ = self.door.accept()
            head = b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\nContent-Type: video/mp4\r\n\r\n"
            with connection:
                connection.recv(65536)
                connection.sendall(head + self.content[:30])
                while not ended.wait(drip_s):
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return

    with Drip(mp4("x"), "", None) as wire:
        done = wire.fetch(tmp_path, sume_resume.Clock())  # type: ignore[arg-type]
        ended.set()
    assert done.got is Got.FAILED
    assert list(tmp_path.iterdir()) == []


def test_a_file_over_the_cap_is_refused(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(batch, BIG)
    monkeypatch.setattr(sume_resume, "MAX_FILE_BYTES", 1000)
    assert "more than any clip" in batch.run().undownloaded["r1"]
    assert len(batch.media.requests) == 1
    assert batch.names() == []


def test_a_part_is_made_durable_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    """Only what was synced is gone on with: a power cut may leave a tail of zeros."""
    monkeypatch.setattr(sume_resume, "PART_SYNC_BYTES", 100_000)
    synced: list[int] = []
    original = Part.sync

    def sync(self: Part) -> None:
        synced.append(self.size)
        original(self)

    monkeypatch.setattr(Part, "sync", sync)
    progress = Progress()
    chunks = iter([BIG[n : n + 60_000] for n in range(0, len(BIG), 60_000)])
    headers = {"etag": '"v1"', "content-type": "video/mp4", "content-length": str(len(BIG))}
    goal = judge("https://media.example/a?sig=1", "https://api.example/v1")
    wanted = Wanted(tmp_path, "f", Output(""))
    reply = FileReply(200, headers, chunks)
    assert sume_resume._take(reply, goal, wanted, progress, clock).got is Got.WHOLE
    assert synced == [120_000, 240_000, len(BIG)]


# -- kills --

FILE_FACTS = (
    "record_downloaded",
    "record_part",
    "record_lost",
    "record_undownloaded",
    "record_named",
)
KILLS = [
    *(f"{step}:{when}:1" for step in child.PART_STEPS for when in ("before", "after")),
    *(f"record_downloaded:{when}:{nth}" for when in ("before", "after") for nth in (1, 2)),
    "record_part:before:1", "record_part:after:1",
    "record_lost:before:1", "record_lost:after:1",
    "record_named:before:1", "record_named:after:1",
    "record_undownloaded:before:1", "record_undownloaded:after:1",
]  # fmt: skip


def test_every_fact_of_a_file_is_killed_at() -> None:
    from test_kill import FILES

    assert {point.partition(":")[0] for point in KILLS} >= FILES == set(FILE_FACTS)


@pytest.mark.parametrize("point", KILLS)
def test_kill_around_a_file(batch: Batch, zygote: Zygote, point: str) -> None:  # noqa: F811
    """Whole or absent after every kill; the same command again has it, and buys nothing."""
    desk, folder = batch.desk, batch.desk.folder
    desk.add(*clips(3))
    batch.more = lambda job: {"url": None} if job.id.startswith("job_3_") else {}
    desk.run()
    batch.more = lambda job: {}
    for row in ("r1", "r2"):
        batch.file(row).content, batch.file(row).etag = BIG, '"v1"'
    batch.run(scope={"r2"})
    Path(batch.outputs("r2")[0].path or "").write_bytes(b"changed")
    cutting(batch.file("r1"), 100_000)
    if point.startswith("record_undownloaded"):
        batch.file("r1").script.extend([Reply(404, b"")] * 9)
    order = {
        "args": ["run", "--download", "out", "--poll-interval", "0.02s", "--reads-per-minute", "0"],
        "env": {"SUME_API_KEY": KEY, "SUME_API_BASE_URL": desk.server.url},
        "folder": str(folder),
        "log": str(folder / "log.txt"),
        "constants": {"BACKOFF_BASE_S": 0.02, "BACKOFF_FLOOR_S": 0.001, "TICK_S": 0.05},
    }
    assert zygote.run(order | {"point": point}) in (-9, 137), (folder / "log.txt").read_text()
    known = {BIG, b"changed", *(file.content for file in batch.media.files.values())}
    for path in batch.folder.glob("*.mp4"):
        assert path.read_bytes() in known
    for row in ("r1", "r2"):
        batch.file(row).script.clear()
    assert zygote.run(order) == 0, (folder / "log.txt").read_text()
    batch.check("r1", "r2", "r3")
    assert len(desk.server.posts) == 3


# -- step n fails, for every n --


def check_whole_or_absent(batch: Batch) -> None:
    known = {file.content for file in batch.media.files.values()}
    for path in batch.folder.iterdir():
        assert path.suffix == ".part" or path.read_bytes() in known
    with open_ledger(batch.desk.place) as ledger:
        ledger.quick_check()
        for job in ledger.latest():
            for output in ledger.outputs(job):
                if output.path is not None:
                    content = Path(output.path).read_bytes()
                    assert hashlib.sha256(content).hexdigest() == output.sha256
    assert len(batch.desk.server.posts) == 3


def ready(batch: Batch) -> None:
    """Begin anew with three jobs that have ended: one is plain, one breaks off, one was changed."""
    for path in (*batch.folder.iterdir(), batch.desk.path):
        path.unlink(missing_ok=True)
    batch.desk.server.forget()
    batch.media.files.clear()
    batch.desk.add(*clips(3))
    batch.desk.run()
    for row in ("r1", "r2", "r3"):
        batch.file(row).etag = '"v1"'
    batch.file("r2").content = BIG
    cutting(batch.file("r2"), 100_000)
    batch.run(scope={"r3"})
    Path(batch.outputs("r3")[0].path or "").write_bytes(b"changed")


@POSIX
@pytest.mark.parametrize(
    "name", ["open", "write", "read", "fsync", "replace", "close", "ftruncate", "unlink", "lstat"]
)
def test_call_n_to_the_file_system_fails(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whole or absent, whatever the disk refuses; the next run has all."""
    original = getattr(os, name)
    for n in range(1, 80):
        ready(batch)
        # What fails to be closed is closed all the same.
        fault = Fault(n, no_space, after=name == "close")
        monkeypatch.setattr(os, name, fault.around(original))
        batch.run()
        monkeypatch.setattr(os, name, original)
        for path in batch.folder.glob("*.mp4"):
            if path.read_bytes() == b"changed":
                path.unlink()
        with contextlib.suppress(FileNotFoundError):
            check_whole_or_absent(batch)
        assert batch.run().undownloaded == {}
        check_whole_or_absent(batch)
        if name in ("unlink", "lstat"):
            # What could not be taken away is still there.
            for path in batch.folder.glob("*.part"):
                path.unlink()
        batch.check("r1", "r2", "r3")
        if not fault.hit:
            break
    assert n >= 1


@pytest.mark.parametrize(
    ("step", "after"),
    [("connect", False), ("send", False), ("send", True), ("receive", False), ("receive", True)],
)
def test_call_n_to_the_network_fails(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    """One failure costs a try and no file."""
    import httpcore._backends.sync as backend

    owner, name, make = NETWORK[step]
    original = getattr(getattr(backend, owner), name)
    hang_up = (lambda *args: None) if step == "connect" else (lambda stream, *_: stream.close())
    for n in range(1, 200):
        ready(batch)
        fault = Fault(n, make, after, hang_up)
        monkeypatch.setattr(getattr(backend, owner), name, fault.around(original))
        ending = batch.run()
        monkeypatch.setattr(getattr(backend, owner), name, original)
        assert ending.undownloaded == {}
        batch.check("r1", "r2", "r3")
        assert len(batch.desk.server.posts) == 3
        if not fault.hit:
            break
    assert n > 3


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("wanted", ["execute", "commit"])
def test_statement_n_of_the_ledger_fails(batch: Batch, wanted: str, after: bool) -> None:
    """A file that is there and not recorded is had again; nothing else is lost."""
    # Statements come in groups of the same kinds: every fourth meets them all.
    for n in range(1, 400, 1 if wanted == "commit" else 4):
        ready(batch)
        fault = Fault(n, disk_full, after)
        with contextlib.suppress(LedgerError):
            batch.run(make_ledger=unlucky_ledger(fault, wanted))
        assert batch.run().undownloaded == {}
        check_whole_or_absent(batch)
        batch.check("r1", "r2", "r3")
        if not fault.hit:
            break
    assert n > (5 if wanted == "commit" else 20)


# -- the command --


def test_exit_codes_and_words_tell_the_truth(shop: Shop, media: Media) -> None:
    link_to(shop, media, lambda job: mp4(job.id))
    args = (shop.rows(*clips(2)), "--download", "out")
    assert shop.run(*args).returncode == 0
    for file in media.files.values():
        file.script.extend([Reply(404, b"")] * 30)
    for path in (shop.folder / "out").iterdir():
        path.unlink()
    code = "import sume_resume; sume_resume.BACKOFF_BASE_S = 0.01"
    done = shop.run(*args, "--json", code=code)
    assert done.returncode == 1, done.stderr
    assert b"rows without all their files: 2: r1, r2 (the link answers HTTP 404)" in done.stderr
    assert b"buys nothing for it" in done.stderr
    summary = json.loads(last_line(done.stdout))
    assert (summary["exit_code"], summary["not_downloaded"]) == (1, ["r1", "r2"])
    status = json.loads(shop.call("status", "--format", "json").stdout)
    assert status["jobs"][0]["note"] == "no file: the link answers HTTP 404"
    assert status["jobs"][0]["outputs"][0]["path"] is None
    for file in media.files.values():
        file.script.clear()
    done = shop.run(*args, "--json")
    assert done.returncode == 0
    files = [event for event in events_of(done, "run") if event["type"] == "file"]
    assert {event["row"] for event in files} == {"r1", "r2"}
    assert len(shop.server.posts) == 2


def test_a_deadline_that_cuts_downloads_is_unfinished(shop: Shop, media: Media) -> None:
    release = threading.Event()
    hold(media, release)
    link_to(shop, media, lambda job: mp4(job.id))
    try:
        done = shop.run(shop.rows(*clips(1)), "--download", "out", "--deadline", "1s")
    finally:
        release.set()
    assert done.returncode == 3, done.stderr
    assert b"rows without all their files: 1: r1 (the run was stopped)" in done.stderr


def test_a_signal_keeps_how_far_a_file_came(shop: Shop) -> None:
    """Stopped in the middle of a small file: the next run asks for the rest of it alone."""
    content = mp4("x", 300_000)
    with HalfWay(content) as half:
        shop.server.final = lambda job: finished(job) | {"url": f"{half.url}?sig={SECRET}"}
        running = shop.start(shop.rows(*clips(1)), "--download", "out")
        out = shop.folder / "out"
        until(lambda: [p for p in out.glob("*.part") if p.stat().st_size >= 100_000])
        running.send(signal.SIGTERM)
        assert running.wait() == 143, running.err
        assert shop.run("clips.jsonl", "--download", "out").returncode == 0
    assert b"\r\nrange: bytes=100000-\r\n" in half.heard[1].lower()
    (path,) = out.iterdir()
    assert path.read_bytes() == content


class HalfWay:
    """Sends the first 100,000 bytes of a file and nothing more; whoever asks again has the rest."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.heard: list[bytes] = []

    def __enter__(self) -> HalfWay:
        self.door = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.door.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.door.getsockname()[1]}/x"

    def _serve(self) -> None:
        size = len(self.content)
        said = 'ETag: "v1"\r\nContent-Type: video/mp4\r\nConnection: close\r\n'
        first, _ = self.door.accept()
        with first:
            self.heard.append(first.recv(65536))
            head = f"HTTP/1.1 200 OK\r\n{said}Content-Length: {size}\r\n\r\n"
            first.sendall(head.encode() + self.content[:100_000])
            second, _ = self.door.accept()
        with second:
            self.heard.append(second.recv(65536))
            span = f"Content-Range: bytes 100000-{size - 1}/{size}\r\n"
            head = f"HTTP/1.1 206 Partial\r\n{said}{span}Content-Length: {size - 100_000}\r\n\r\n"
            second.sendall(head.encode() + self.content[100_000:])


def test_status_maps_rows_to_files(shop: Shop, media: Media) -> None:
    link_to(shop, media, lambda job: mp4(job.id))
    shop.run(shop.rows(*clips(2)), "--download", "out")
    jobs = json.loads(shop.call("status", "--format", "json").stdout)["jobs"]
    for job in jobs:
        (output,) = job["outputs"]
        assert set(output) == {"url", "path", "sha256", "bytes"}
        content = Path(output["path"]).read_bytes()
        assert output["sha256"] == hashlib.sha256(content).hexdigest()
        assert SECRET not in output["url"]
    csv = shop.call("status", "--format", "csv").stdout.decode()
    assert jobs[0]["outputs"][0]["path"] in csv
    assert csv.splitlines()[0].endswith(",urls,files")
    card = shop.call("status", "r1").stdout.decode()
    name = Path(jobs[0]["outputs"][0]["path"]).name
    assert f"file     {Path('out') / name} (432 B, sha256 " in card


@pytest.mark.parametrize("where", ["file", "file/below", "closed", "", "/proc/x"])
def test_a_folder_that_cannot_be_is_said_before_anything(shop: Shop, where: str) -> None:
    (shop.folder / "file").write_text("x")
    (shop.folder / "closed").mkdir(mode=0o500)
    if where == "closed" and os.access(shop.folder / "closed", os.W_OK):
        where = "file"
    shop.rows(*clips(1))
    before = sorted(path.name for path in shop.folder.iterdir())
    done = shop.invoke("run", "clips.jsonl", "--download", where)
    assert done.returncode == 2, done.stderr
    assert b"--download: " in done.stderr
    assert sorted(path.name for path in shop.folder.iterdir()) == before
    assert shop.server.requests == []


def test_dry_run_and_refused_input_make_no_folder(shop: Shop) -> None:
    shop.rows(*clips(1))
    assert shop.invoke("run", "clips.jsonl", "--download", "a/b", "--dry-run").returncode == 0
    shop.rows({"prompt": 7})
    assert shop.invoke("run", "clips.jsonl", "--download", "a/b").returncode == 2
    assert not (shop.folder / "a").exists()


def test_a_batch_of_30_ends_whole(shop: Shop, media: Media) -> None:
    """Clips and images, a price list, a cap, two kills, an expired link: all there, to the cent."""
    (shop.folder / "p.toml").write_text(
        '[models."sume/auto"]\nvideo_usd_per_second = "0.1234565"\nimage_usd = "0.04"\n'
    )
    rows: list[dict[str, Any]] = [*clips(24)]
    rows += [{"id": f"i{n}", "prompt": f"image {n}.", "kind": "image"} for n in range(6)]

    def final(job: FakeJob) -> dict[str, Any]:
        video = b'"duration"' in job.body
        path = f"/{job.id}"
        file = File(mp4(job.id, 5000)) if video else File(PNG + job.id.encode(), "image/png")
        if path not in media.files and job.id.startswith("job_5_"):
            file.script.append(Reply(403, b"<Error/>"))
        media.files.setdefault(path, file)
        usage = {"captured_usd_micros": 493_826 if video else 40_000, "status": "captured"}
        return finished(job) | {"usage": usage, "url": f"{media.url}{path}?sig={SECRET}"}

    shop.server.final = final
    shop.server.reads_to_finish = 2
    args = (shop.rows(*rows), "--download", "out", "--prices", "p.toml", "--max-cost", "12.10")
    for charges in (7, 19):
        running = shop.start(*args)
        until(lambda charges=charges: len(shop.server.charges) >= charges)  # type: ignore[misc]
        running.process.kill()
        running.wait()
    done = shop.run(*args)
    assert done.returncode == 0, done.stderr
    jobs = shop.jobs()
    assert len(shop.server.charges) == len(jobs) == 30
    assert sum(job.cost_micros or 0 for job in jobs.values()) == 24 * 493_826 + 6 * 40_000
    with open_ledger(shop.folder / "jobs.db") as ledger:
        for job in jobs.values():
            (output,) = ledger.outputs(job)
            content = Path(output.path or "").read_bytes()
            assert content == media.files[f"/{job.job_id}"].content
            assert output.sha256 == hashlib.sha256(content).hexdigest()
    assert len(list((shop.folder / "out").iterdir())) == 30
    audit = shop.call("audit", "--prices", "p.toml", "--tolerance", "0")
    assert audit.returncode == 0, audit.stdout
    everything = done.stderr + done.stdout + (shop.folder / "jobs.db").read_bytes()
    for running in shop.running:
        everything += running.err.encode()
    assert SECRET.encode() not in everything
    assert CANARY.encode() not in everything
