"""Clients in environments of their own, as `make clients` installs them.

A scripted model calls a tool, and answers after its result, so that each client runs whole turns.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve.tests.agents import ANSWER, ARGUMENTS, QUESTION, write_agent_for_clients
from serve.tests.conftest import NAME, Served, serving

from interposer_engine import LanguageModel, load

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.xdist_group("serve")]

SCRIPTS = Path(__file__).parent / "clients"
CACHE = Path(__file__).parents[2] / ".clients_cache"
FINAL = "It is sunny."
CALL = {"name": "weather", "arguments": ARGUMENTS, "text": ANSWER, "answer": FINAL}
CHAT = {**CALL, "reason": "tool_calls"}
RESPONSE = {**CALL, "continued": FINAL}
MESSAGE = {**CALL, "reason": "tool_use", "thinking": QUESTION}
OPENAI = {
    "chat": CHAT,
    "chat streamed": CHAT,
    "responses": RESPONSE,
    "responses streamed": RESPONSE,
}
ANTHROPIC = {"whole": MESSAGE, "streamed": MESSAGE, "tools run": FINAL, "counted": True}


@pytest.fixture(scope="module")
def agent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agent_for_clients(tmp_path_factory.mktemp("served") / "agent")


@pytest.fixture(scope="module")
def agent(agent_folder: Path) -> Iterator[Served]:
    lm = load(agent_folder, "float32", cache_tokens=16384)
    with serving(lm, "agent") as running:
        yield running


@pytest.fixture
def work_folder(tmp_path: Path) -> Path:
    """Return a folder with the file that the scripted model reads."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "weather.txt").write_text("sunny\n")
    return folder


def program(path: str) -> str:
    """Return the path of a program in the environments of the clients."""
    if not (CACHE / path).exists():
        pytest.skip(f"needs {CACHE.name}/{path}. Try: make clients")
    return str(CACHE / path)


def run(command: list[str], folder: Path | None = None, **variables: str) -> str:
    """Run a command without settings of Anthropic's and OpenAI's clients, and return its output."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ANTHROPIC_", "CLAUDE", "CODEX_", "OPENAI_"))
    }
    process = subprocess.run(
        command,
        cwd=folder,
        env={**inherited, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def run_script(name: str, *arguments: str, environment: str = "openai-3") -> Any:
    """Run a client script in its environment, and return its last line, which is JSON."""
    if name.endswith(".py"):
        command = [program(f"{environment}/bin/python")]
    else:
        command = [shutil.which("node") or pytest.skip("needs node")]
    modules = program("node/node_modules") if name.endswith(".cjs") else ""
    output = run([*command, str(SCRIPTS / name), *arguments], NODE_PATH=modules)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(
    ("script", "results"),
    [
        ("openai_sdk.cjs", {**OPENAI, "tools run": FINAL}),
        ("openai_sdk.py", {**OPENAI, "chat parsed": True, "responses parsed": True}),
        ("anthropic_sdk.cjs", ANTHROPIC),
        ("anthropic_sdk.py", {**ANTHROPIC, "parsed": True}),
    ],
)
def test_sdks_run_turns_with_a_tool(agent: Served, script: str, results: dict[str, Any]) -> None:
    assert run_script(script, agent.url, "agent") == results


def test_frameworks_run_turns_with_a_tool(agent: Served) -> None:
    results = run_script("frameworks.py", agent.url, "agent")
    assert {*results["answers"].values()} == {FINAL}
    assert {*results["structured"].values()} == {ARGUMENTS["city"]}


def test_llama_index_runs_turns_with_a_tool(agent: Served) -> None:
    results = run_script("llama_index_chat.py", agent.url, "agent", environment="openai-2")
    assert results == {"whole": FINAL, "streamed": FINAL}


def test_lm_eval_scores_texts(agent: Served, agent_folder: Path, tmp_path: Path) -> None:
    arguments = (agent.url, "agent", str(agent_folder), str(tmp_path))
    results = run_script("lm_eval_tasks.py", *arguments, environment="openai-2")
    generation = {"generation exact_match": 1.0}
    assert results == {"completions": {"choice acc": 1.0, **generation}, "chat": generation}


def test_the_command_llm_runs_a_tool(agent: Served, tmp_path: Path) -> None:
    command = program("openai-3/bin/llm")
    settings = {
        "model_id": "mine",
        "model_name": "agent",
        "api_base": f"{agent.url}/v1",
        "supports_tools": True,
    }
    # JSON is YAML.
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([settings]))
    tool = "def weather(city: str) -> str:\n    return f'sunny in {city}'"
    for options in ([], ["--no-stream"]):
        arguments = ["-m", "mine", "--functions", tool, *options, "How is the weather?"]
        output = run([command, *arguments], LLM_USER_PATH=str(tmp_path))
        assert output.split() == f"{ANSWER} {FINAL}".split()


def test_codex_runs_a_command(agent: Served, work_folder: Path, tmp_path: Path) -> None:
    command = program("node/node_modules/.bin/codex")
    provider = f'name = "local"\nbase_url = "{agent.url}/v1"\nwire_api = "responses"\n'
    (tmp_path / "config.toml").write_text(
        'model = "agent"\nmodel_provider = "local"\nweb_search = "disabled"\n'
        f"[model_providers.local]\n{provider}"
    )
    # The sandbox of codex does not start in every container; the model runs `cat weather.txt`.
    options = ["--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"]
    arguments = ["exec", *options, "How is the weather, codex?"]
    lines = run([command, *arguments], work_folder, CODEX_HOME=str(tmp_path)).splitlines()
    events = [json.loads(line) for line in lines]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (execution,) = (item for item in items if item["type"] == "command_execution")
    assert (execution["aggregated_output"], execution["exit_code"]) == ("sunny\n", 0)
    assert items[-1]["text"] == FINAL
    assert events[-1]["type"] == "turn.completed"


def test_claude_code_runs_a_command(agent: Served, work_folder: Path, tmp_path: Path) -> None:
    command = program("node/node_modules/.bin/claude")
    options = ["--allowedTools", "Bash", "--output-format", "json"]
    output = run(
        [command, "-p", "How is the weather, claude?", *options],
        work_folder,
        ANTHROPIC_BASE_URL=agent.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL="agent",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="agent",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CONFIG_DIR=str(tmp_path),
        HOME=str(tmp_path),
    )
    result = json.loads(output)
    assert (result["result"], result["num_turns"], result["is_error"]) == (FINAL, 2, False)


def test_litellm_reads_answers_and_errors(served: Served, offline: LanguageModel) -> None:
    results = run_script("litellm_errors.py", served.url, NAME)
    messages: Any = [{"role": "user", "content": "import os"}]
    alone = offline.chat(messages, max_new_tokens=9, temperature=0.8, seed=5)
    assert results["whole"] == results["streamed"] == alone.text
    assert results["num_tokens"] == len(alone.token_ids)
    assert results["completed"] == offline.generate(["import os"], max_new_tokens=9)[0].text
    assert "temperature is -1" in results["refusal"]
