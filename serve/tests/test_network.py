"""Web pages of other origins, host names, HTTPS, and clients behind proxies."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from serve.tests.certificates import write_certificate
from serve.tests.conftest import NAME, STDLIB, Served, read, serving
from tests.waiting import WAIT_SECONDS, wait_until

from interposer.errors import ConfigError
from interposer_adapt import Encoder, load_encoder
from interposer_engine import LanguageModel
from interposer_serve import ConnectionLimits, application
from interposer_serve._proxies import TrustedProxies
from interposer_serve._server import Server
from interposer_serve._tls import tls_context

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

PAGE = "https://app.example.org"
KEY = "a-long-key"


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """Return an encoder, because no test here depends on the model."""
    return load_encoder(STDLIB, "float32")


@contextmanager
def running(
    encoder: Encoder, connections: ConnectionLimits | None = None, **options: Any
) -> Iterator[int]:
    """Run the command's server in a thread, and yield its port."""
    lines: list[str] = []
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server(
        application(encoder, NAME),
        listening,
        connections or ConnectionLimits(),
        drain_seconds=0,
        log_level="INFO",
        name=NAME,
        print_line=lines.append,
        **options,
    )
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    try:
        wait_until(lambda: bool(lines), "the start of the server")
        scheme = "https" if options.get("tls") else "http"
        port: int = listening.getsockname()[1]
        assert lines == [f"{NAME} at {scheme}://127.0.0.1:{port}, Ctrl-C ends it"]
        yield port
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


def preflight(served: Served, origin: str, method: str = "POST", headers: str = "") -> Any:
    connection = HTTPConnection("127.0.0.1", served.port, timeout=WAIT_SECONDS)
    with closing(connection):
        sent = {"origin": origin, "access-control-request-method": method}
        sent |= {"access-control-request-headers": headers} if headers else {}
        connection.request("OPTIONS", "/v1/embeddings", headers=sent)
        return read(connection.getresponse())


def test_no_origin_is_allowed_by_default(encoder: Encoder) -> None:
    with serving(encoder) as served:
        answer = served.ask("/v1/models", origin=PAGE)
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert preflight(served, PAGE).status == 405


def test_pages_of_an_allowed_origin_use_the_server(encoder: Encoder) -> None:
    with serving(encoder, keys=[KEY], origins=[PAGE]) as served:
        # A browser sends no key in a preflight request.
        allowed = preflight(served, PAGE, headers="authorization,content-type,x-stainless-lang")
        assert allowed.status == 200
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert allowed.headers["access-control-allow-methods"] == "GET, POST"
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in allowed.headers
        # A page can read errors too.
        refused = served.ask("/v1/models", origin=PAGE)
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        answer = served.ask("/v1/models", origin=PAGE, authorization=f"Bearer {KEY}")
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert answer.headers["access-control-expose-headers"] == "retry-after, x-request-id"
        assert "Origin" in answer.headers["vary"]


@pytest.mark.parametrize(
    ("origin", "method", "headers"),
    [
        ("https://other.example.org", "POST", ""),
        ("null", "POST", ""),
        (f"{PAGE}.evil.example", "POST", ""),
        (PAGE, "DELETE", ""),
        (PAGE, "POST", "x-unknown"),
    ],
)
def test_other_preflights_are_refused(
    encoder: Encoder, origin: str, method: str, headers: str
) -> None:
    with serving(encoder, origins=[PAGE]) as served:
        assert preflight(served, origin, method, headers).status == 400
        if origin != PAGE:
            answer = served.ask("/v1/models", origin=origin)
            assert "access-control-allow-origin" not in answer.headers


def test_all_origins_are_allowed_only_with_keys(encoder: Encoder) -> None:
    with pytest.raises(ConfigError, match="Try: the exact origins, or API keys"):
        application(encoder, NAME, origins=["*"])
    with serving(encoder, keys=[KEY], origins=["*"]) as served:
        assert preflight(served, PAGE).headers["access-control-allow-origin"] == "*"
        assert served.ask("/v1/models", origin=PAGE).status == 401


@pytest.mark.parametrize(
    "origin",
    [
        "app.example.org",
        "https://app.example.org/",
        "https://App.example.org",
        "https://app.example.org:443",
        "https://me@app.example.org",
        "https://",
        "null",
        "",
    ],
)
def test_malformed_origins_are_reported(encoder: Encoder, origin: str) -> None:
    with pytest.raises(ConfigError, match=r"is not SCHEME://HOST\[:PORT\]"):
        application(encoder, NAME, origins=[origin])
    with pytest.raises(ConfigError, match="must be a list"):
        application(encoder, NAME, origins=PAGE)


def test_only_allowed_host_names_are_accepted(encoder: Encoder) -> None:
    with serving(encoder, hosts={"localhost", "Models.example.org"}) as served:
        assert served.ask("/v1/models", host="models.example.org:8000").status == 200
        refused = served.ask("/v1/models", host="evil.example")
        assert (refused.status, refused.error["code"]) == (403, "wrong_host")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x_api_key": KEY}, 200),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": "Basic YTpi", "x_api_key": KEY}, 200),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": "Bearer other", "x_api_key": KEY}, 401),
        ({"x_api_key": "other"}, 401),
        ({"x_api_key": ""}, 401),
        ({}, 401),
    ],
)
def test_a_key_is_accepted_in_either_header(
    encoder: Encoder, headers: dict[str, str], status: int
) -> None:
    with serving(encoder, keys=[KEY]) as served:
        answer = served.ask("/v1/models", **headers)
        assert answer.status == status
        if status == 401:
            assert answer.error["code"] == "invalid_api_key"


def test_the_version_and_details_of_the_model_are_listed(encoder: Encoder) -> None:
    with serving(encoder) as served:
        assert served.ask("/version").body == {"version": version("interposer-serve")}
        (entry,) = served.ask("/v1/models").body["data"]
    assert (entry["root"], entry["parent"], entry["quantization"]) == (NAME, None, None)
    assert (entry["dtype"], entry["capabilities"][0]) == ("float32", "embedding")


def test_details_of_a_language_model_are_listed(lm: LanguageModel) -> None:
    with serving(lm) as served:
        (entry,) = served.ask("/v1/models").body["data"]
    assert (entry["dtype"], entry["quantization"]) == ("float32", None)
    assert entry["capabilities"] == ["completion"]


def test_each_prompt_that_is_too_long_has_the_code_of_openai(lm: LanguageModel) -> None:
    with serving(lm) as served:
        for prompt in ("x " * 2000, [5] * 1024, [[5] * 1100], "x" * 10**6):
            for answer in (served.complete(prompt=prompt), served.complete(prompt=prompt, n=2)):
                assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
                # litellm looks for this text.
                assert "This model's maximum context length is" in answer.error["message"]
        messages = [{"role": "user", "content": "x " * 2000}]
        assert served.chat(messages=messages).error["code"] == "context_length_exceeded"
        streamed = served.chat(messages=messages, stream=True)
        assert streamed.error["code"] == "context_length_exceeded"


def test_the_server_speaks_https(encoder: Encoder, tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    client = ssl.create_default_context(cafile=str(certificate))
    with running(encoder, tls=tls_context(certificate, key)) as port:
        connection = HTTPSConnection("localhost", port, context=client, timeout=WAIT_SECONDS)
        with closing(connection):
            body = json.dumps({"model": NAME, "input": ["a", "b"]})
            # The second request has the same connection.
            for _ in range(2):
                connection.request(
                    "POST", "/v1/embeddings", body, {"content-type": "application/json"}
                )
                answer = read(connection.getresponse())
                assert (answer.status, len(answer.body["data"])) == (200, 2)
            connection.request("POST", "/v1/embeddings", b"{", {"content-type": "text/plain"})
            assert read(connection.getresponse()).status == 415
        with closing(HTTPConnection("localhost", port, timeout=WAIT_SECONDS)) as plain:
            plain.request("GET", "/health")
            with pytest.raises((OSError, HTTPException)):
                plain.getresponse()


def test_connections_are_limited_before_the_tls_handshake(encoder: Encoder, tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    client = ssl.create_default_context(cafile=str(certificate))
    limits = ConnectionLimits(connections_per_address=2)
    with running(encoder, limits, tls=tls_context(certificate, key)) as port, ExitStack() as stack:

        def connect() -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS)
            return stack.enter_context(closing(connection))

        silent = [connect() for _ in range(2)]
        refused = connect()
        with suppress(ConnectionResetError):
            assert refused.recv(1) == b""
        silent[0].close()

        def is_answered() -> bool:
            connection = HTTPSConnection("localhost", port, context=client, timeout=WAIT_SECONDS)
            with closing(connection):
                try:
                    connection.request("GET", "/health")
                    return connection.getresponse().status == 200
                except OSError:
                    return False

        wait_until(is_answered, "the end of the closed connection")


def test_an_incomplete_tls_handshake_ends(encoder: Encoder, tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    limits = ConnectionLimits(header_seconds=0.1)
    with (
        running(encoder, limits, tls=tls_context(certificate, key)) as port,
        closing(socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS)) as connection,
        suppress(ConnectionResetError),
    ):
        assert connection.recv(1) == b""


def test_unusable_tls_files_are_reported(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path / "one")
    other_certificate, _ = write_certificate(tmp_path / "two")
    _, encrypted_key = write_certificate(tmp_path / "three", password="secret")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    for files, message in (
        ((tmp_path / "none", key), "--tls-certificate .*none cannot be read: No such file.* Try:"),
        ((certificate, tmp_path), "--tls-key .* cannot be read: Is a directory"),
        ((key, key), "has no line with '-----BEGIN CERTIFICATE-----'"),
        ((certificate, certificate), "has no line with 'PRIVATE KEY-----'"),
        ((broken, key), "OpenSSL cannot use --tls-certificate .*broken.pem"),
        ((other_certificate, key), "--tls-key .* does not belong to the first certificate"),
        ((certificate, encrypted_key), "is encrypted with a password. Try: openssl pkey"),
    ):
        with pytest.raises(ConfigError, match=message):
            tls_context(*files)


def get(port: int, **headers: str) -> Any:
    with closing(HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)) as connection:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET", "/v1/models", headers=sent)
        return read(connection.getresponse())


@pytest.mark.parametrize(
    ("trusted", "forwarded", "client"),
    [
        (["127.0.0.1"], "203.0.113.7", "203.0.113.7"),
        (["127.0.0.0/8", "10.0.0.0/8"], "198.51.100.1, 203.0.113.7, 10.1.2.3", "203.0.113.7"),
        (["127.0.0.1"], "2001:DB8::7", "2001:db8::7"),
        (["127.0.0.1"], "203.0.113.7 status=200", "unknown"),
        (["127.0.0.1"], None, "127.0.0.1"),
        (["192.0.2.1"], "203.0.113.7", "127.0.0.1"),
        (None, "203.0.113.7", "127.0.0.1"),
    ],
)
def test_only_trusted_proxies_state_the_client_of_the_log(
    encoder: Encoder,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    trusted: list[str] | None,
    forwarded: str | None,
    client: str,
) -> None:
    access_log = logging.getLogger("interposer.access")
    with running(encoder, proxies=None if trusted is None else TrustedProxies(trusted)) as port:
        # The server has replaced the loggers' handlers.
        monkeypatch.setattr(access_log, "handlers", [caplog.handler])
        monkeypatch.setattr(access_log, "level", logging.INFO)
        headers = {} if forwarded is None else {"x_forwarded_for": forwarded}
        assert get(port, **headers).status == 200
        wait_until(lambda: bool(caplog.records), "the line of the request")
    assert f"client={client} method=GET " in caplog.records[0].getMessage()


def test_clients_behind_a_proxy_are_limited_one_by_one(encoder: Encoder) -> None:
    limits = ConnectionLimits(connections_per_address=2)
    proxies = TrustedProxies(["127.0.0.1"])
    with running(encoder, limits, proxies=proxies) as port, ExitStack() as stack:
        head = (
            "POST /v1/embeddings HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            "content-length: 100\r\nx-forwarded-for: 203.0.113.7\r\n\r\n"
        )
        for _ in range(2):
            connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS)
            stack.enter_context(closing(connection)).sendall(head.encode())
        # The proxy has more than two connections, of which the client has two.
        wait_until(lambda: get(port, x_forwarded_for="203.0.113.7").status == 503)
        refused = get(port, x_forwarded_for="203.0.113.7")
        assert refused.error["code"] == "too_many_connections"
        assert "203.0.113.7 has reached its limit of 2 requests" in refused.error["message"]
        assert get(port, x_forwarded_for="203.0.113.8").status == 200
        assert get(port).status == 200
    with pytest.raises(ConfigError, match=r"'proxy\.example' is no IP address or network"):
        TrustedProxies(["proxy.example"])
