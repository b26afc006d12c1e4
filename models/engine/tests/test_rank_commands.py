"""Commands whose model two processes compute: what they print, and signals to them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from models.engine.tests.test_rank_ends import STDLIB, wait_for_ends
from tests.forks import forks
from tests.processes import shared_files
from tests.waiting import WAIT_SECONDS

from interposer_engine import load

# The command, behind the id of its process.
RUN = """
import os, runpy, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
print(os.getpid(), flush=True)
runpy.run_module("interposer_tools", run_name="__main__")
"""
TURN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
pytestmark = [
    pytest.mark.process,
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif("not os.path.isdir('/proc/self')", reason="needs /proc"),
]


def interposer(*arguments: str | Path, asked: str = "") -> subprocess.CompletedProcess[str]:
    command = forks().command("-m", "interposer_tools", *arguments, "--tensor-parallel", "2")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        input=asked,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env=environment,
    )


@pytest.mark.slow
def test_a_chat_of_two_ranks_equals_that_of_one(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(STDLIB, path)
    (path / "chat_template.jinja").write_text(TURN)
    options = ("--max-new-tokens", "12", "--temperature", "0", "--dtype", "float32")
    done = interposer("chat", path, *options, asked="import os\n/exit\n")
    assert done.returncode == 0, done.stderr
    lm = load(path, "float32", cache_tokens=256, max_sequences=1)
    prompt = lm.chat_prompt([{"role": "user", "content": "import os"}])
    assert done.stdout == lm.generate([prompt], max_new_tokens=12)[0].text + "\n"
    assert "12 tokens (length)" in done.stderr


@pytest.mark.slow
def test_bench_measures_two_ranks() -> None:
    sizes = ("--prompt", "24", "--contexts", "16", "--new-tokens", "4", "--batch", "2")
    done = interposer("bench", STDLIB, *sizes, "--rounds", "1", "--read-mib", "1", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    rows = {row["name"]: row for row in told["rows"]}
    assert {"prefill", "decode_16"} <= rows.keys()
    assert all(row["tokens_per_second"]["low"] > 0 for row in rows.values())
    assert any(
        "2 ranks: weights, memory and rooflines are those of rank 0" in n for n in told["notes"]
    )


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGTERM, -15, marks=pytest.mark.slow), (signal.SIGINT, 130)],
)
def test_a_signal_to_run_ends_both_ranks(number: signal.Signals, code: int) -> None:
    options = ("--max-new-tokens", "1000", "--tensor-parallel", "2")
    command = forks().command("-c", RUN, "run", STDLIB, "--prompt", "import os", *options)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        leader = int(process.stdout.readline())
        assert process.stdout.read(1), process.communicate()[1]  # of what is generated
        children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
        named = {int(c): Path(f"/proc/{c}/cmdline").read_text() for c in children}
        (follower,) = (child for child, name in named.items() if "_distributed.launcher" in name)
        files = shared_files(leader, follower)
        os.kill(leader, number)
        wait_for_ends(leader, follower)
        _, told = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == code
    assert "Traceback" not in told
    assert not any(file.exists() for file in files)
