"""Media are fetched from allowed hosts only, at addresses that were checked, within limits."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve.tests.certificates import write_certificate

from interposer.errors import ConfigError
from interposer_serve import Limits
from interposer_serve._errors import ApiError
from interposer_serve._media_addresses import MediaFetcher, check_media_hosts

process = pytest.mark.process

CONTENT = b"a picture"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n" + CONTENT


def redirect(address: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {address}\r\ncontent-length: 0\r\n\r\n".encode()


class Peer:
    """An HTTP server that answers each path with chosen bytes, and then closes the connection.

    Attributes:
        heads: Headers of the requests so far.
    """

    def __init__(
        self,
        listening: socket.socket,
        answers: Mapping[str, bytes | None],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.port: int = listening.getsockname()[1]
        self.heads: list[str] = []
        self._listening = listening
        self._answers = answers
        self._tls = tls

    def serve(self) -> None:
        """Answer requests until the socket is closed; the answer None never arrives."""
        silent = []
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                connection.settimeout(60)
                with suppress(OSError):
                    if self._tls is not None:
                        connection = self._tls.wrap_socket(connection, server_side=True)
                    head = b""
                    while not head.endswith(b"\r\n\r\n") and (data := connection.recv(4096)):
                        head += data
                    if head:
                        self.heads.append(head.decode())
                        answer = self._answers[head.decode().split(" ")[1]]
                        if answer is None:
                            silent.append(connection)
                            continue
                        connection.sendall(answer)
                connection.close()
        for connection in silent:
            connection.close()


@contextmanager
def peer(answers: Mapping[str, bytes | None], tls: ssl.SSLContext | None = None) -> Iterator[Peer]:
    listening = socket.create_server(("127.0.0.1", 0))
    running = Peer(listening, answers, tls)
    thread = threading.Thread(target=running.serve)
    thread.start()
    try:
        yield running
    finally:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # ends accept()
        listening.close()
        thread.join(60)
        assert not thread.is_alive()


def fetch(
    address: str,
    hosts: Collection[str] = (),
    addresses: Sequence[str] | None = None,
    limits: Limits | None = None,
) -> bytes:
    """Fetch an address; ``addresses`` are those of every host."""
    lookups = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        lookups.append((host, port))
        assert addresses is not None
        return addresses

    fetcher = MediaFetcher(
        check_media_hosts(hosts),
        limits or Limits(),
        resolve=None if addresses is None else resolve,
    )
    content = asyncio.run(fetcher.fetch(address))
    assert len(lookups) == (addresses is not None), "a host is looked up once"
    return content


def refusal(address: str, *args: object, **options: object) -> str:
    with pytest.raises(ApiError) as caught:
        fetch(address, *args, **options)  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.code) == (400, "media_not_read")
    return str(caught.value)


@process
def test_an_allowed_host_is_read() -> None:
    chunked = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\na pi\r\n5\r\ncture\r\n0\r\n\r\n"
    )
    until_end = b"HTTP/1.1 200 OK\r\n\r\na picture"
    early = b"HTTP/1.1 103 Early Hints\r\nlink: </style.css>\r\n\r\n" + OK
    with peer({"/?a=1": OK, "/b": chunked, "/c": until_end, "/d": early}) as running:
        host = f"127.0.0.1:{running.port}"
        for path in ("?a=1#part", "/b", "/c", "/d"):
            assert fetch(f"http://{host}{path}", [host]) == CONTENT
        assert f"\r\nhost: {host}\r\n" in running.heads[0]


@process
def test_the_checked_address_is_used_and_the_name_is_sent() -> None:
    with peer({"/a": OK}) as running:
        name = f"pictures.example:{running.port}"
        hosts = [name, "127.0.0.1"]
        assert fetch(f"http://{name}/a", hosts, ["127.0.0.1"]) == CONTENT
        assert f"\r\nhost: {name}\r\n" in running.heads[0]


@process
def test_https_checks_the_certificate_for_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with peer({"/a": OK}, context) as running:
        address = f"https://127.0.0.1:{running.port}/a"
        assert "could not be fetched" in refusal(address, [f"127.0.0.1:{running.port}"])
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert fetch(address, [f"127.0.0.1:{running.port}"]) == CONTENT
        other = f"other.example:{running.port}"
        text = refusal(f"https://{other}/a", [other, "127.0.0.1"], ["127.0.0.1"])
        assert "could not be fetched" in text


@process
def test_redirects_stay_at_the_host() -> None:
    answers: dict[str, bytes | None] = {
        "/a": redirect("b"),
        "/b": OK,
        "/loop": redirect("/loop"),
        "/bad": redirect("http://["),
        "/file": redirect("file:///etc/passwd"),
    }
    with peer(answers) as other, peer(answers) as running:
        host = f"127.0.0.1:{running.port}"
        answers["/other"] = redirect(f"http://localhost:{other.port}/b")
        answers["/port"] = redirect(f"http://127.0.0.1:{other.port}/b")
        assert fetch(f"http://{host}/a", [host]) == CONTENT
        hosts = [host, f"localhost:{other.port}"]
        for path, reason in (
            ("loop", "redirects more than 3 times"),
            ("other", "redirects to another host, 'localhost'"),
            ("port", "is of a host that this server does not fetch from"),
            ("bad", "redirects to a malformed address"),
            ("file", "has the scheme 'file'"),
        ):
            assert reason in refusal(f"http://{host}/{path}", hosts), path
        assert not other.heads


@process
def test_wrong_large_and_slow_responses_are_refused() -> None:
    endless_header = b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000
    many_chunks = b"1;" + b"x" * 500 + b"\r\na\r\n"
    answers = {
        "/missing": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        "/short": b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\na picture",
        "/zipped": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\na",
        "/noise": b"\0" * 100,
        "/nothing": b"",
        "/header": endless_header,
        "/large": b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"a" * 200_000,
        "/chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + many_chunks * 400,
        "/silent": None,
    }
    with peer(answers) as running:
        host = f"127.0.0.1:{running.port}"
        for path, reason in (
            ("missing", "has the status 404"),
            ("short", "could not be fetched: the connection was closed early"),
            ("zipped", "has the encoding 'gzip'"),
            ("noise", "could not be fetched: no HTTP response"),
            ("nothing", "could not be fetched"),
            ("header", "has more than the allowed 1000 bytes"),
            ("large", "has more than the allowed 1000 bytes"),
            ("chunks", "has more than the allowed 1000 bytes"),
        ):
            text = refusal(f"http://{host}/{path}", [host], limits=Limits(media_bytes=1000))
            assert reason in text, path
        slow = refusal(f"http://{host}/silent", [host], limits=Limits(media_seconds=0.1))
        assert "could not be fetched within 0.1 s. Try: a data: address" in slow


@process
def test_a_host_without_a_server_is_named() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        host = f"127.0.0.1:{listening.getsockname()[1]}"
    assert f"http://{host}/ could not be fetched" in refusal(f"http://{host}/", [host])


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "fe80::1",
        "fd00::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "fe80::1%eth0",
        "no address",
    ],
)
@process
def test_private_addresses_of_an_allowed_name_are_refused(address: str) -> None:
    """A name whose address changes after the check (DNS rebinding) is looked up only once."""
    for addresses in ([address], ["93.184.215.14", address]):
        text = refusal("http://pictures.example/a", ["pictures.example"], addresses)
        assert "is of a host whose address is not public" in text


@process
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://other.example/a", "is of a host that this server does not fetch from"),
        ("http://allowed.example:8080/a", "is of a host that this server does not fetch from"),
        ("http://allowed.example./a", "is of a host that this server does not fetch from"),
        ("http://other.example\\@allowed.example/a", "holds a user name"),
        ("http://me:secret@allowed.example/a", "holds a user name"),
        ("file:///etc/passwd", "has the scheme 'file'; allowed is data: or http(s):"),
        ("ftp://allowed.example/a", "has the scheme 'ftp'"),
        ("/etc/passwd", "has the scheme ''"),
        ("http://allowed.example/a b", "has letters that addresses must write as %XX"),
        ("http://allowed.example/\r\nx: y", "has letters that addresses must write as %XX"),
        ("http://allowed.example:port/", "is malformed"),
        ("http://[::1", "is malformed"),
        ("http:///a", "is of a host that this server does not fetch from"),
    ],
)
def test_other_addresses_are_refused_before_a_look_up(address: str, reason: str) -> None:
    assert reason in refusal(address, ["allowed.example"])


@process
@given(st.text(max_size=40), st.sampled_from(["", "http://", "https://", "http://allowed.example"]))
def test_no_text_is_fetched_from_another_host(text: str, start: str) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        assert (host, port in (80, 443)) == ("allowed.example", True)
        raise OSError(0, "no network in this test")

    fetcher = MediaFetcher(check_media_hosts(["allowed.example"]), Limits(), resolve)
    with pytest.raises(ApiError):
        asyncio.run(fetcher.fetch(start + text))


def test_media_hosts_are_names() -> None:
    hosts = ["Images.example.org", "localhost:8443", "::1", "[0:0::1]:80", "10.0.0.1"]
    assert check_media_hosts(hosts) == {
        ("images.example.org", None),
        ("localhost", 8443),
        ("::1", None),
        ("::1", 80),
        ("10.0.0.1", None),
    }


@pytest.mark.parametrize(
    "host",
    [
        "",
        "*",
        "*.example.org",
        "https://example.org",
        "a/b",
        "a:b",
        "a:0",
        "a:65536",
        "me@a",
        "[a]",
    ],
)
def test_other_media_hosts_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a host"):
        check_media_hosts([host])


def test_media_hosts_are_a_list() -> None:
    with pytest.raises(ConfigError, match="must be a list"):
        check_media_hosts("example.org")
