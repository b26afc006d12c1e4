"""The command serves, from its start to a signal."""

from __future__ import annotations

import inspect
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from serve.tests.certificates import write_certificate
from tests.adapter_files import write_adapter
from tests.commands import Command
from tests.forks import forks
from tests.processes import served

from interposer_engine.options import load_options
from interposer_serve._commands.serve import serve

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]


def forked(folder: Path, *options: str) -> list[str]:
    return forks().command("-m", "interposer_tools", "serve", str(folder), *options)


def started(
    folder: Path, *options: str
) -> AbstractContextManager[tuple[str, subprocess.Popen[str]]]:
    """Return a block in which the command runs, which is given where it serves."""
    return served(forked(folder, "--port=0", "--cache-tokens=1024", *options))


def ask(url: str, body: Any = None, key: str = "") -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return json.load(answer)


def test_the_command_serves_until_a_signal(chat_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the team\n\n  open \n")
    folder = write_adapter(tmp_path / "own", {"model.layers.0.mlp.down_proj": (256, 688)})
    adapter = f"--adapter=own={folder}"
    limits = ("--max-prompt=50", "--speculate=ngram")
    options = ["--name=mine", "--api-keys", str(keys), *limits, adapter, "--cache-tokens=1024"]
    # Not a fork, whose client would get the signal instead.
    serve_command = [sys.executable, "-m", "interposer_tools", "serve", str(chat_folder)]
    with served([*serve_command, "--port=0", *options]) as (url, process):
        assert ask(f"{url}/ready") == {"status": "ok"}
        body = {"model": "mine", "prompt": "import os", "max_tokens": 3}
        assert ask(f"{url}/v1/completions", body, "open")["usage"]["completion_tokens"] == 3
        assert ask(f"{url}/v1/completions", {**body, "model": "own"}, "open")["model"] == "own"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(f"{url}/v1/completions", body)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(f"{url}/v1/completions", {**body, "prompt": "x " * 99}, "open")
        process.send_signal(signal.SIGTERM)
        # It dies of the signal, once everything has ended.
        assert process.wait(60) in (-signal.SIGTERM, 128 + signal.SIGTERM)


STREAM = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "n": 64, "stream": True}
LOGGED = (
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO: +id=req_[0-9a-f]+ client=127\.0\.0\.1 method=POST "
    r"path=/v1/completions status=200 ms=\d+\.\d prompt_tokens=2 completion_tokens=\d+\n"
)


@pytest.mark.landing(1)
@pytest.mark.parametrize(("presses", "log_level"), [(1, "info"), (2, "warning")])
def test_ctrl_c_lets_answers_end_and_a_second_one_ends_them(
    chat_folder: Path, presses: int, log_level: str
) -> None:
    """What is cut off ends with an error, not in the midst of a stream."""
    drain = f"--drain={600 if presses == 2 else 0}"
    serve_command = [
        sys.executable,
        "-m",
        "interposer_tools",
        "serve",
        str(chat_folder),
        "--port=0",
        f"--log-level={log_level}",
    ]
    with served([*serve_command, "--name=mine", "--cache-tokens=65536", drain]) as (url, process):
        assert process.stderr is not None
        body = json.dumps({"model": "mine", **STREAM}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as stream:
            assert stream.readline().startswith(b"data: ")
            process.send_signal(signal.SIGINT)
            said = process.stderr.readline()
            assert said.startswith("draining 64 answers for up to ")
            assert said.endswith("press Ctrl-C again to stop\n")
            if presses == 2:
                process.send_signal(signal.SIGINT)
            *_, last = [line for line in stream if line.startswith(b"data: ")]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "server_ends"
        assert process.wait(60) == (130 if presses == 2 else 0)
        log = process.stderr.read()
    assert re.fullmatch(LOGGED if log_level == "info" else "", log)


@pytest.mark.slow
def test_a_second_server_on_a_port_fails_before_loading(chat_folder: Path) -> None:
    with started(chat_folder) as (url, _):
        port = url.rpartition(":")[2]
        arguments = forked(chat_folder, f"--port={port}")
        second_server = subprocess.run(
            arguments, capture_output=True, text=True, timeout=120, check=False
        )
    assert second_server.returncode == 1
    assert "cannot listen at 127.0.0.1 port" in second_server.stderr
    assert "loading" not in second_server.stderr


def test_a_used_address_fails_before_loading(chat_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = forked(chat_folder, f"--port={listener.getsockname()[1]}")
        process = subprocess.run(
            arguments, capture_output=True, text=True, timeout=120, check=False
        )
    assert process.returncode == 1
    assert "cannot listen at 127.0.0.1 port" in process.stderr
    assert "loading" not in process.stderr


def test_a_server_that_cannot_start_gives_its_port_back(
    command: Command, chat_folder: Path
) -> None:
    address = ("127.0.0.77", 0)  # of the loopback network, where no other test listens
    with socket.create_server(address) as listener:
        address = listener.getsockname()
    options = f"--host={address[0]}", f"--port={address[1]}", "--packed=of"
    code, _, errors = command("serve", chat_folder, *options)
    assert code == 2
    assert "packed" in errors
    socket.create_server(address).close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host=nowhere.invalid", "--without-keys"), "cannot listen at nowhere.invalid port"),
        (("--host=0.0.0.0",), "requests to 0.0.0.0 without a key. Try: --api-keys FILE"),
        (("--api-keys={keys}",), "holds no key"),
        (("--api-keys=nothing",), "'nothing' does not exist"),
        (("--dtype=float1",), "Unknown dtype 'float1'"),
        (("--adapter=one",), "--adapter 'one' is not NAME=FOLDER. Try: --adapter sql=./sql"),
        (("--adapter=a=x", "--adapter=a=y"), "--adapter names 'a' twice. Try: another name"),
        (("--adapter=a=x", "--embed"), "adapters is set for 'stdlib-lm', which is an encoder"),
        (("--speculate=x", "--embed"), "speculation is set for 'stdlib-lm', which is an encoder"),
        (("--expert-parallel", "--embed"), "expert_parallel is set for 'stdlib-lm', which is an"),
        (("--cors-origin=*",), "Try: the exact origins, or API keys"),
        (("--cors-origin=a.example",), "The origin 'a.example' is not SCHEME://HOST[:PORT]"),
        (("--allowed-host=http://a:1",), "--allowed-host 'http://a:1' is no host name"),
        (("--allowed-host=*.example",), "--allowed-host '*.example' is no host name"),
        (("--tls-key={keys}",), "is given alone. Try: also --tls-certificate FILE"),
        (("--tls-certificate={keys}",), "is given alone. Try: also --tls-key FILE"),
        (("--tls-certificate={keys}", "--tls-key=none"), "has no line with '-----BEGIN CERT"),
        (("--tls-certificate=none", "--tls-key=none"), "--tls-certificate none cannot be read"),
        (("--proxy-headers",), "Try: also --trusted-proxy 127.0.0.1"),
        (("--trusted-proxy=127.0.0.1",), "is given alone. Try: also --proxy-headers"),
        (("--proxy-headers", "--trusted-proxy=a"), "The trusted proxy 'a' is no IP address"),
    ],
)
def test_invalid_options_are_reported(
    command: Command, chat_folder: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# none\n")
    given = (option.format(keys=keys) for option in options)
    code, _, errors = command("serve", chat_folder, "--port=0", *given)
    assert code in (1, 2)
    assert message in errors


def test_the_command_serves_https_to_other_hosts_and_origins(
    chat_folder: Path, tmp_path: Path
) -> None:
    certificate, key = write_certificate(tmp_path)
    options = (
        f"--tls-certificate={certificate}",
        f"--tls-key={key}",
        "--cors-origin=https://app.example.org",
        "--allowed-host=models.example.org",
        "--proxy-headers",
        "--trusted-proxy=127.0.0.1",
    )
    client = ssl.create_default_context(cafile=str(certificate))
    with started(chat_folder, *options) as (url, process):
        assert url.startswith("https://127.0.0.1:")

        def status(**headers: str) -> int:
            sent = {**headers, "x-forwarded-for": "203.0.113.7"}
            request = urllib.request.Request(f"{url}/v1/models", headers=sent)
            with urllib.request.urlopen(request, timeout=60, context=client) as answer:
                allowed = answer.headers["access-control-allow-origin"]
                assert allowed == headers.get("origin")
                return int(answer.status)

        assert status(host="models.example.org", origin="https://app.example.org") == 200
        assert status(host="localhost") == 200
        with pytest.raises(urllib.error.HTTPError, match="403"):
            status(host="evil.example")
        assert process.stderr is not None
        assert "client=203.0.113.7 " in process.stderr.readline()


def test_the_command_takes_each_option_of_load() -> None:
    expected = {option.name for option in load_options()}
    assert expected <= set(inspect.signature(serve).parameters)


def test_the_command_serves_the_models_of_a_file(chat_folder: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "own", {"model.layers.0.mlp.down_proj": (256, 688)})
    (tmp_path / "beside").symlink_to(chat_folder)
    file = tmp_path / "models.toml"
    file.write_text(
        f"""
        default = "plain"
        max_loaded = 2

        [models.plain]
        path = "{chat_folder}"

        [models.small]
        path = "beside"
        quantization = "int8"
        idle_minutes = 0
        adapters = {{ own = "{folder}" }}
        config = {{ packed = "off" }}
        prefix_cache = {{ offload_bytes = 65536, offload_dir = "{tmp_path}" }}
        speculation = {{ tokens = 2 }}

        [models.vectors]
        path = "{chat_folder}"
        embed = true
        """
    )
    with served(forked(chat_folder, "--port=0", "--cache-tokens=1024", f"--models={file}")) as (
        url,
        _,
    ):
        listed = ask(f"{url}/v1/models")["data"]
        statuses = {entry["id"]: entry["status"]["value"] for entry in listed}
        assert statuses == {
            chat_folder.name: "unloaded",
            "plain": "loaded",
            "small": "unloaded",
            "own": "unloaded",
            "vectors": "unloaded",
        }
        body = {"prompt": "import os", "max_tokens": 2}
        assert ask(f"{url}/v1/completions", body)["model"] == "plain"
        for name in ("own", chat_folder.name, "small"):
            assert ask(f"{url}/v1/completions", {"model": name, **body})["model"] == name
        texts = {"model": "vectors", "input": "import os"}
        assert len(ask(f"{url}/v1/embeddings", texts)["data"][0]["embedding"]) == 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models", "cannot be read"),
        ("[models]", "has no model"),
        ("[model.a]\npath = '.'", "has the key 'model'; allowed is"),
        ("[models.a]", "models.a has no path"),
        ("[models.a]\npath = '.'\nquantisation = 'int8'", "has the key 'quantisation'; allowed is"),
        ("[models.a]\npath = 'missing'", "missing', which does not exist"),
        ("[models.a]\npath = '.'\nembed = 1", "models.a.embed is 1, must be true or false"),
        ("[models.a]\npath = '.'\nadapters = { a = 1 }", "must be a table of texts"),
        ("[models.a]\npath = '.'\nmax_sequences = 0", "max_sequences is 0"),
        ("[models.a]\npath = '.'\nspeculation = { depth = 1 }", "the fields of Speculation"),
        ("[models.a]\npath = '.'\nembed = true\noffload = '1GiB'", "offload is set for 'a'"),
        ("[models.a]\npath = '.'\nconfig = { packed = 'of' }", "packed"),
        ("default = 'b'\n[models.a]\npath = '.'", "The default model is 'b'; allowed is 'a'"),
        ("max_loaded = 'b'\n[models.a]\npath = '.'", "max_loaded is 'b', must be an integer"),
    ],
)
def test_mistakes_in_a_file_of_models_are_reported(
    command: Command, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    code, _, errors = command("serve", f"--models={file}", "--port=0")
    assert code == 2
    assert message in " ".join(errors.split())


def test_several_models_have_names_of_their_own(command: Command, chat_folder: Path) -> None:
    for options, message in (
        (["--name=a"], "--name is given with several models"),
        (["--adapter=a=b"], "--adapter is given with several models"),
        (["--tensor-parallel=2"], "--tensor-parallel is given with several models"),
        (["--packed=of"], "packed"),
        (["--prefix-offload=8GiB"], "--prefix-offload 8GiB is given alone"),
        (["--prefix-cache", "--prefix-offload=8"], "--prefix-offload '8' is no size"),
        ([], f"Two models or adapters are called '{chat_folder.name}'"),
    ):
        code, _, errors = command("serve", chat_folder, chat_folder, "--port=0", *options)
        assert code == 2
        assert message in " ".join(errors.split())
