"""TLS on loopback: a certificate that nobody vouches for is never accepted, nor retried."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Desk, clips
from servers import FakeSume

from sume_resume import Clock, Sume

# Signed by itself for sume.invalid, until 2126; made for these tests, and of no other use.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBhTCCASugAwIBAgIUKVKEX1Qzaoxy9cL/MQSdbCrHCJUwCgYIKoZIzj0EAwIw
FzEVMBMGA1UEAwwMc3VtZS5pbnZhbGlkMCAXDTI2MTEyOTE2NTI0MloYDzIxMjYx
MTA1MTY1MjQyWjAXMRUwEwYDVQQDDAxzdW1lLmludmFsaWQwWTATBgcqhkjOPQIB
BggqhkjOPQMBBwNCAARsQ9uW4siH7FbQKhHcauNzPi6tZU3ppVfZuURn6Vsy7yZw
nQV5uUQD55bAizVuXd9IL1AoGNeKRrqlu3FGcs7+o1MwUTAdBgNVHQ4EFgQUoBYk
3pYYha1WSjoj8FVRABosrxEwHwYDVR0jBBgwFoAUoBYk3pYYha1WSjoj8FVRABos
rxEwDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiAvEQjC9IlDi+du
Bs6DCbWahiLhvqZ/j4daTn2U+1D4pQIhAPtJ/aRzKdaTfvJM12k0+DHYLDPYXSW/
s2zGqSV800VH
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgsHi2S+ks+Fne3mnf
8d+5/a/8xa/gQwsdQQGKjLzIW8KhRANCAARsQ9uW4siH7FbQKhHcauNzPi6tZU3p
pVfZuURn6Vsy7yZwnQV5uUQD55bAizVuXd9IL1AoGNeKRrqlu3FGcs7+
-----END PRIVATE KEY-----
"""


class Strict(Sume):
    """The client as a real run builds it: with the certificates that this machine trusts."""

    def __init__(self, account: Any, clock: Clock, tls: object) -> None:
        super().__init__(account, clock, httpx.create_ssl_context())


class TlsSume(FakeSume):
    """Speaks TLS on a loopback port."""

    @property
    def url(self) -> str:
        return super().url.replace("http:", "https:")


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[FakeSume]:
    pem = tmp_path / "self-signed.pem"
    pem.write_text(CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with TlsSume() as server:
        assert server._server is not None
        server._server.socket = context.wrap_socket(server._server.socket, server_side=True)
        yield server


def test_an_unknown_certificate_stops_the_run(desk: Desk, tls_server: FakeSume) -> None:
    """Not sent, a setting: exit 5, no row changed, and never a try without verification."""
    desk.server = tls_server
    desk.add(*clips(3))
    ending = desk.run(api=Strict, writes_per_minute=120.0)
    assert "certificate refused" in (ending.halt or "")
    assert tls_server.requests == []
    assert [str(job.status) for job in desk.jobs().values()] == ["queued"] * 3
    assert len(desk.history("r1")) == 3


def test_https_where_no_tls_is_spoken_is_a_wrong_base_url(desk: Desk) -> None:
    class Wrong:
        url = desk.server.url.replace("http:", "https:")

    desk.server, plain = Wrong(), desk.server  # type: ignore[assignment]
    desk.add(*clips(1))
    ending = desk.run(api=Strict)
    assert "SUME_API_BASE_URL" in (ending.halt or "")
    assert plain.requests == []
    assert desk.job().status == "queued"
