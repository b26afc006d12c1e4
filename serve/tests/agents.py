"""A scripted model that reasons, calls tools and answers, for the tests of the protocols."""

from __future__ import annotations

from pathlib import Path

from serve.tests.scripted import write_scripted

NAME = "agent"
# The last message decides the script. The markers are those of Hermes and Qwen.
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}
{%- for message in messages %}
[{{ message.role }}]{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{{- message.content }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}
{%- if enable_thinking %}<think>{% endif %}{{ messages[-1].content }}"""

WEATHER = ["<think>", "The user wants", " the weather.", "</think>", "Let me", " look."]
CALL = ["<tool_call>", '{"name": "weather",', ' "arguments": {"city":', ' "Göteborg"', "}}"]
SCRIPTS = {
    "hello": ["Good", " day!"],
    "ask": [*WEATHER, *CALL, "</tool_call>"],
    "sunny": ["It is", " sunny."],
    "nothing": [],
    "surrogate": [
        "<tool_call>\n",
        '{"name": "weather", "arguments": {"city": "\\ud800"}}',
        "\n</tool_call>",
    ],
    "infinity": [
        "<tool_call>\n\n",
        '{"name": "weather", "arguments": {"city": -1e999}}',
        "\n\n</tool_call>",
    ],
    "count": ["one,", "two,", "three,", "four,"],
    "broken": ["<tool_call> ", '{"name": "weather", ', '"arguments" ', "oops", "</tool_call> "],
}
QUESTION, ANSWER = "The user wants the weather.", "Let me look."
ARGUMENTS = {"city": "Göteborg"}
CITY = {"type": "string", "enum": ["Göteborg", "Oslo"]}
SCHEMA = {
    "type": "object",
    "properties": {"city": CITY},
    "required": ["city"],
    "additionalProperties": False,
}


def write_agent(folder: Path) -> Path:
    """Write the checkpoint of the scripted model."""
    return write_scripted(folder, TEMPLATE, SCRIPTS)


# The first of these texts in the messages since the last answer decides the script. Clients add
# long texts and tools of their own, so the prompt has only their beginnings.
CLIENT_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- set recent = namespace(text="") %}
{%- for message in messages %}
[{{ message.role }}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content[:80] }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}
{%- if message.role == "assistant" %}{% set recent.text = "" %}
{%- elif message.role in ("user", "tool") %}{% set recent.text = recent.text + message.content %}
{%- endif %}
{%- endfor %}
{%- for key in KEYS if key in recent.text %}{% if loop.first %}{{ key }}{% endif %}
{%- else %}hello{% endfor %}"""
CLIENT_SCRIPTS = {
    "sunny": SCRIPTS["sunny"],
    "the weather?": SCRIPTS["ask"],
    "the weather, codex?": [
        "<think>I plan</think>",
        "I run",
        " a command.",
        '<tool_call>{"name": "exec_command",',
        ' "arguments": {"cmd":',
        ' "cat weather.txt"',
        "}}</tool_call>",
    ],
    "the weather, claude?": [
        "<think>I plan</think> ",
        "I read",
        " a file.",
        '<tool_call>{"name": "Bash",',
        ' "arguments": {"command":',
        ' "cat weather.txt", "description": "Look"',
        "}}</tool_call> ",
    ],
    "hello": SCRIPTS["hello"],
}


def write_agent_for_clients(folder: Path) -> Path:
    """Write the checkpoint of a scripted model for clients that add texts to the messages."""
    template = CLIENT_TEMPLATE.replace("KEYS", repr([*CLIENT_SCRIPTS]))
    return write_scripted(folder, template, CLIENT_SCRIPTS, context=8192)
