"""Clients as they come: litellm, and the command llm. `make test-libraries` installs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from serve.tests.conftest import NAME, Served

from interposer_engine import LanguageModel

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.xdist_group("serve")]

NEEDS = "needs {}. Try: make test-libraries"
MESSAGES: Any = [{"role": "user", "content": "import os"}]

# Prints what litellm returns, whole and streamed, and the error that it makes of a refusal.
LITELLM = """
import json, sys
import litellm

base, name = sys.argv[1:]
asked = dict(
    model=f"openai/{name}",
    api_base=base,
    api_key="none",
    messages=[{"role": "user", "content": "import os"}],
    max_tokens=9,
    temperature=0.8,
    seed=5,
)
whole = litellm.completion(**asked)
stream = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
parts = list(stream)
written = litellm.text_completion(
    model=f"text-completion-openai/{name}", api_base=base, api_key="none", prompt="import os",
    max_tokens=9, temperature=0,
)
try:
    litellm.completion(**{**asked, "temperature": -1})
except litellm.BadRequestError as error:
    refused = str(error)
print(json.dumps({
    "whole": whole.choices[0].message.content,
    "tokens": whole.usage.completion_tokens,
    "streamed": "".join(part.choices[0].delta.content or "" for part in parts),
    "written": written.choices[0].text,
    "refused": refused,
}))
"""


def environment(**more: str) -> dict[str, str]:
    # Its list of prices would be fetched from a network.
    return {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **more}


def run(command: list[str], env: dict[str, str]) -> str:
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_litellm_works_unchanged(served: Served, offline: LanguageModel) -> None:
    if find_spec("litellm") is None:
        pytest.skip(NEEDS.format("litellm"))
    command = [sys.executable, "-c", LITELLM, f"{served.url}/v1", NAME]
    answers = json.loads(run(command, environment()).splitlines()[-1])
    alone = offline.chat(MESSAGES, max_new_tokens=9, temperature=0.8, seed=5)
    assert answers["whole"] == answers["streamed"] == alone.text
    assert answers["tokens"] == len(alone.token_ids)
    assert answers["written"] == offline.generate(["import os"], max_new_tokens=9)[0].text
    assert "temperature is -1" in answers["refused"]


def test_the_command_llm_works_unchanged(
    served: Served, offline: LanguageModel, tmp_path: Path
) -> None:
    command = shutil.which("llm", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip(NEEDS.format("llm"))
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n  model_name: {NAME}\n  api_base: {served.url}/v1\n"
    )
    env = environment(LLM_USER_PATH=str(tmp_path))
    alone = offline.chat(MESSAGES, max_new_tokens=9).text
    arguments = [
        command,
        "-m",
        "mine",
        "import os",
        "-o",
        "max_tokens",
        "9",
        "-o",
        "temperature",
        "0",
    ]
    for options in ([], ["--no-stream"]):
        assert run([*arguments, *options], env).strip() == alone.strip()
