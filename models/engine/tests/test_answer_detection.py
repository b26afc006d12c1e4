"""The format of a checkpoint follows from its chat template; names override it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from interposer.errors import RequestError, UnknownNameError
from interposer_engine._answers.detection import (
    detect,
    format_by_name,
    is_in_call,
    is_in_reasoning,
    parser_for,
    reasoning_format_names,
    tool_format_names,
)
from interposer_engine._answers.formats import FORMATS, AnswerFormat
from interposer_engine._answers.parser import AnswerParser
from interposer_engine._answers.tools import ToolSchemas

BAR = "\N{FULLWIDTH VERTICAL LINE}"
SNIPPETS = {
    "gpt_oss": "<|channel|>analysis<|message|> to=functions.{{ name }}",
    "muse": "<|message|><atem:function_calls>",
    "deepseek_v4": f"<{BAR}DSML{BAR}tool_calls>",
    "deepseek_v3_2": f"<{BAR}DSML{BAR}function_calls>",
    "deepseek_v3": f"<{BAR}tool▁calls▁begin{BAR}>```json",
    "deepseek_v3_1": f"<{BAR}tool▁calls▁begin{BAR}>",
    "gigachat3_5": f"<|role_sep|><{BAR}GCML{BAR}tool_calls>",
    "kimi_k3": "<|open|> <|close|> <|sep|> argument",
    "hy3": "{%- set token = ':opensource' %}{{ '<tool_sep{}>'.format(token) }}",
    "minimax_m3": "]<]minimax[>[<tool_call>",
    "minicpm5": '<think><function name="a"><param name="b">c</param></function>',
    "command_r": 'Action:\n```json\n[{"tool_name": "a"}]```',
    "gigachat3": "<|role_sep|> function call",
    "internlm2": "<|action_start|><|plugin|>{",
    "granite_20b": "<function_call> {",
    "hunyuan": '<tool_calls>[{"name": "a"}]</tool_calls>',
    "functionary3_2": ">>>all\\n",
    "kimi_k2": "<|tool_call_begin|><|tool_call_argument_begin|>",
    "solar": "<|tool_call:begin|>",
    "gemma4": "<|tool_call>call:",
    "function_gemma": "<start_function_call>call:",
    "minimax_m2": "<minimax:tool_call><invoke name=",
    "seed_oss": "<seed:tool_call><function=<parameter=",
    "glm4": "<tool_call><arg_key><arg_value>",
    "qwen3_coder": "<tool_call><function=<parameter=",
    "command": "<|START_ACTION|><|START_RESPONSE|>",
    "command_a2": "<|START_ACTION|><|START_TEXT|>",
    "mistral": "[TOOL_CALLS]{{ name }}[ARGS]",
    "mistral_list": "[TOOL_CALLS] [",
    "nemotron": "<TOOLCALL>[",
    "apertus": "<|tools_prefix|>[",
    "minicpm3": "<|thought_start|><|tool_call_start|>",
    "xlam": "When using tools, make calls in a single JSON array",
    "lfm2": "<|tool_call_start|>[",
    "phi4": "<|tool_call|><|/tool_call|>",
    "granite3": "<|tool_call|>",
    "gigachat": "<|role_sep|><|function_call|>",
    "apriel": "[BEGIN FINAL RESPONSE]<tool_calls>[",
    "minimax_m1": "<tool_calls>\\n{",
    "hermes": "<tool_call>\\n{",
    "olmo3": "<function_calls> with pythonic calls",
    "functools": "functools[{",
    "functionary": "<function={{ name }}>{{ arguments }}</function>",
    "pythonic": "[func_name1(a=b)]",
    "llama4": "<|header_start|><|python_start|>{\"name\": , \"parameters\": ",
    "llama3": "<|start_header_id|>{\"name\": , \"parameters\": ",
    "gemma3": "```tool_code",
    "think": "<think>",
}  # fmt: skip


@pytest.mark.parametrize("name", [known.name for known in FORMATS])
def test_each_format_is_detected_by_its_markers(name: str) -> None:
    detected = detect(f"{{{{ bos_token }}}}{SNIPPETS[name]}")
    assert detected is not None
    assert detected.name == name


@pytest.mark.parametrize("template", ["", "{{ message.content }}"])
def test_other_templates_have_no_known_format(template: str) -> None:
    assert detect(template) is None


def test_a_format_has_only_the_markers_that_the_template_writes() -> None:
    plain, thinking = detect("<tool_call>"), detect("<tool_call></think>")
    assert plain is not None
    assert thinking is not None
    assert plain.reasoning is None
    assert thinking.reasoning is not None
    granite, thinking = detect("<|tool_call|>"), detect("<|tool_call|><response>")
    assert granite is not None
    assert thinking is not None
    assert (granite.text_open, thinking.text_open) == ("", "<response>")


def test_a_template_that_builds_its_markers_keeps_all_of_them() -> None:
    for name in ("kimi_k3", "hy3"):
        known = detect(SNIPPETS[name])
        assert known is not None
        assert known.reasoning is not None


@pytest.mark.parametrize(
    ("prompt", "text", "content", "names"),
    [
        ("\n\n>>>", "all\nHello >>> there.", "Hello >>> there.", []),
        ("\n\n>>>", "look\n{}>>>look\n{}", "", ["look", "look"]),
        ("\n\n>>>", ">>>look\n{}", "", ["look"]),
        ("\n\n>>>", "all\nI look.>>>look\n{}", "I look.", ["look"]),
        ("\n\n>>>", "Hello.", "Hello.", []),
        ("\n\n", ">>>all\nHello.", "Hello.", []),
        ("\n\n", "Hello.", "Hello.", []),
    ],
)
def test_a_prompt_may_open_a_call_or_text(
    prompt: str, text: str, content: str, names: list[str]
) -> None:
    known = detect(SNIPPETS["functionary3_2"])
    assert known is not None
    for position in range(len(text)):
        parser = parser_for(known, tokenizer(), prompt, [{"name": "look"}])
        for piece in (text[:position], text[position:]):
            parser.push_text(piece)
        parser.end()
        assert parser.answer.content.strip() == content
        assert [call.name for call in parser.answer.calls] == names


def test_names_override_the_detected_format() -> None:
    detected = detect("<tool_call><think>")
    assert format_by_name(None, None, detected) is detected
    changed = format_by_name("mistral", "none", detected)
    assert changed.calls is not None
    assert changed.calls.name == "mistral"
    assert changed.reasoning is None
    only_reasoning = format_by_name("none", "deepseek", detected)
    assert only_reasoning.calls is None
    assert only_reasoning.reasoning is not None
    assert only_reasoning.reasoning.calls_end_it
    for harmony in (format_by_name("harmony", None), format_by_name(None, "harmony")):
        assert harmony.channels is not None
    atem = format_by_name("atem", "atem", detected)
    assert atem.channels is not None
    assert atem.channels.name == "atem"
    assert format_by_name(None, None).calls is None
    for name in tool_format_names():
        format_by_name(name, None, detected)
    for name in reasoning_format_names():
        format_by_name(None, name, detected)


def test_unknown_names_are_refused_with_near_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"tool format 'hermis'.*'hermes'"):
        format_by_name("hermis", None)
    with pytest.raises(UnknownNameError, match=r"reasoning format 'thinking'.*'think'"):
        format_by_name(None, "thinking")


def tokenizer(**special: bool) -> Any:
    """Return a tokenizer of transformers as far as parsers read it."""
    tokens = [SimpleNamespace(content=text, special=kind) for text, kind in special.items()]
    return SimpleNamespace(added_tokens_decoder=dict(enumerate(tokens)))


def test_a_parser_knows_the_special_tokens_of_its_format() -> None:
    known = detect("[TOOL_CALLS][ARGS]")
    assert known is not None
    tokens = tokenizer(**{"[TOOL_CALLS]": True, "[ARGS]": True, "</s>": True, "[CALL_ID]": False})
    parser = parser_for(known, tokens, "[/INST]", [{"name": "look"}])
    for token, text in [(0, ""), (9, "look"), (1, ""), (9, "{}"), (2, "")]:
        parser.push(token, text)
    assert [call.name for call in parser.answer.calls] == ["look"]
    assert parser.answer.content == ""


def test_a_special_token_may_be_a_part_of_a_marker() -> None:
    known = detect(SNIPPETS["deepseek_v3_2"])
    assert known is not None
    token = f"{BAR}DSML{BAR}"
    parser = parser_for(known, tokenizer(**{token: True}), "", [{"name": "look"}])
    text = f'<{token}function_calls>\n<{token}invoke name="look">\n</{token}invoke>'
    for piece in text.replace(token, "\0").split("\0"):
        parser.push(9, piece)
        parser.push(0, "")
    assert [call.name for call in parser.answer.calls] == ["look"]


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("<|im_start|>assistant\n<think>\n", True), ("<think>", True), ("<think>\n</think>\n", False)],
)
def test_the_prompt_tells_whether_reasoning_is_open(prompt: str, is_open: bool) -> None:
    known = detect("<tool_call><think>")
    assert known is not None
    assert is_in_reasoning(known, prompt) == is_open
    parser = parser_for(known, tokenizer(), prompt, ())
    parser.push_text("Well.")
    parser.end()
    assert parser.answer.reasoning == ("Well." if is_open else "")


# Templates whose assistant turn contains calls, with the family of each.
REAL = {
    "Apertus-8B-Instruct": "apertus",
    "Apriel-1.6-15b-Thinker-fixed": "apriel",
    "Bielik-11B-v3.0-Instruct": "hermes",
    "ByteDance-Seed-OSS": "seed_oss",
    "Cohere2MoE": "command_a2",
    "CohereForAI-c4ai-command-r-plus-tool_use": "command_r",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command",
    "GLM-4.6": "glm4",
    "GLM-4.7-Flash": "glm4",
    "GigaChat3-10B-A1.8B": "gigachat3",
    "GigaChat3.1-10B-A1.8B": "gigachat",
    "Kimi-K3": "kimi_k3",
    "LFM2.5-8B-A1B": "lfm2",
    "MiMo-VL": "hermes",
    "MiniMax-M1": "minimax_m1",
    "MiniMax-M2": "minimax_m2",
    "MiniMax-M3": "minimax_m3",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "Reka-Edge": "hermes",
    "Spark2.5": "glm4",
    "StepFun3.5-Flash": "qwen3_coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v3_1",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v3_2",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "deepseek_v4",
    "google-gemma-4-31B-it": "gemma4",
    "google-gemma-4-31B-it-interleaved": "gemma4",
    "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-4.1": "hermes",
    "inclusionai-ling-3.0-flash": "glm4",
    "meetkai-functionary-medium-v3.1": "functionary",
    "meetkai-functionary-medium-v3.2": "functionary3_2",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral_list",
    "moonshotai-Kimi-K2": "kimi_k2",
    "muse-glimmer": "muse",
    "openai-gpt-oss-120b": "gpt_oss",
    "openbmb-MiniCPM5-1B": "minicpm5",
    "poolside-Laguna-S-2.1": "glm4",
    "poolside-Laguna-XS-2.1": "glm4",
    "poolside-Laguna-XS.2": "glm4",
    "tencent-Hy3": "hy3",
    "unsloth-Apriel-1.5": "apriel",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
    "upstage-Solar-Open-100B": "solar",
}
# Of templates without calls in the assistant's turn, only the detection can be checked.
ONLY_DETECTED = {
    "Kimi-K2-Instruct": "kimi_k2",
    "Kimi-K2-Thinking": "kimi_k2",
    "LFM2-8B-A1B": "lfm2",
    "LFM2.5-Instruct": "lfm2",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_v3",
    "fireworks-ai-llama-3-firefunction-v2": "functools",
    "ibm-granite-granite-3.3-2B-Instruct": "granite3",
    "llama-cpp-deepseek-r1": "deepseek_v3",
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "City."},
        "days": {"type": "integer", "description": "Days."},
        "options": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Options.",
        },
        "exact": {"type": "boolean", "description": "Exactness."},
    },
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS},
    },
    {
        "type": "function",
        "function": {
            "name": "look.again",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
ARGUMENTS = [{"city": 'Köln "x"\n\\ <b>', "days": 3, "options": {"a": [1, 2]}, "exact": True}, {}]
THOUGHT, TEXT = "I must look.", "Let me look."


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the chat templates that llama.cpp tests its parsers with."""
    folder = tmp_path_factory.mktemp("templates")
    options = ("--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--dest", str(folder))
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "llama-cpp-python==0.3.36"],
        check=True,
        capture_output=True,
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        members = [m for m in content.getmembers() if "/models/templates/" in m.name]
        content.extractall(folder, members, filter="data")
    (found,) = folder.glob("*/vendor/llama.cpp/models/templates")
    return found


def messages(as_text: bool, num_calls: int, has_text: bool) -> list[dict[str, Any]]:
    """Return a question, and an answer with calls and all usual names of reasoning."""
    calls = [
        {
            "id": f"call0000{index}",
            "type": "function",
            "function": {
                "name": tool["function"]["name"],
                "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments,
            },
        }
        for index, (tool, arguments) in enumerate(zip(TOOLS, ARGUMENTS, strict=True))
    ]
    answer = {"role": "assistant", "content": TEXT if has_text else "", "tool_calls": calls}
    answer["tool_calls"] = calls[:num_calls]
    if num_calls == 2:
        answer |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), THOUGHT)
    return [{"role": "user", "content": "Look."}, answer]


def rendered(template: str) -> tuple[str, int]:
    """Return the assistant's turn as transformers renders it, and the number of its calls."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template(template)
    variables = {"tools": TOOLS, "bos_token": "<bos>", "eos_token": "<eos>"}
    error: Exception | None = None
    for shape in [(t, n, h) for n in (2, 1) for h in (True, False) for t in (False, True)]:
        chat = messages(*shape)
        try:
            prompt = compiled.render(messages=chat[:1], add_generation_prompt=True, **variables)
            full = compiled.render(messages=chat, add_generation_prompt=False, **variables)
        except Exception as reason:  # noqa: BLE001 - templates refuse messages in their own ways
            error = reason
            continue
        same = (own == other for own, other in zip(full, prompt, strict=False))
        start = next((index for index, is_same in enumerate(same) if not is_same), len(prompt))
        if (opened := full[:start].rfind("<")) > full[:start].rfind(">"):
            start = opened  # the common text ends within a marker
        return full[start:], shape[1]
    raise AssertionError(f"the template renders no calls: {error}")


def read(known: AnswerFormat, turn: str) -> AnswerParser:
    """Return the parser of a rendered turn, which may lack the marker that opens reasoning."""
    before, thought, _ = turn.partition(THOUGHT)
    is_open = known.reasoning is not None and known.reasoning.open.strip() not in before
    is_call = is_in_call(known, ">>>") and not turn.startswith(">>>")
    parser = AnswerParser(
        known, TOOLS, starts_in_reasoning=is_open and bool(thought), starts_in_call=is_call
    )
    for character in turn:
        parser.push_text(character)
    parser.end()
    return parser


@pytest.mark.parametrize(
    "names", [("none", None), (None, "none"), ("hermes", "harmony"), ("harmony", "think")]
)
def test_channels_hold_calls_and_reasoning(names: tuple[str | None, str | None]) -> None:
    (detected,) = [known for known in FORMATS if known.name == "gpt_oss"]
    with pytest.raises(RequestError, match="one format in harmony"):
        format_by_name(*names, detected)
    assert format_by_name("none", "none", detected).channels is None
    assert format_by_name("hermes", "think", detected).channels is None
    assert format_by_name(None, None, detected) is detected


def test_options_of_a_schema_may_refer_to_each_other() -> None:
    option = {"$ref": "#/properties/k"}
    schema = {"properties": {"k": {"anyOf": [option] * 4 + [{"type": "null"}]}}}
    tools = ToolSchemas([{"name": "f", "parameters": schema}])
    assert tools.types("f", "k") == {"null"}


def test_the_page_lists_every_format() -> None:
    page = Path(__file__).parents[3] / "docs" / "tool-calls.md"
    rows = [line.split("|")[2:4] for line in page.read_text().splitlines() if line.startswith("| ")]
    listed = [{*re.findall(r"`(\w+)`", cell)} for cell in map("".join, zip(*rows, strict=True))]
    names = {*tool_format_names()} - {"none"}, {*reasoning_format_names()} - {"none"}
    assert listed == [*names]


@pytest.mark.foreign
@pytest.mark.timeout(1800)
def test_calls_that_real_templates_write_are_read(templates: Path) -> None:
    for name, expected in (REAL | ONLY_DETECTED).items():
        known = detect((templates / f"{name}.jinja").read_text())
        assert known is not None, name
        assert known.name == expected, name
    for name in REAL:
        template = (templates / f"{name}.jinja").read_text()
        known = detect(template)
        assert known is not None
        turn, num_calls = rendered(template)
        answer = read(known, turn).answer
        actual = [(call.name, json.loads(call.arguments)) for call in answer.calls]
        calls = zip(("look", "look.again"), ARGUMENTS, strict=True)
        # Some templates write only the first call; MiniCPM5's writes all calls twice.
        actual = actual[:num_calls]
        assert actual == [*calls][: min(len(actual) or 1, num_calls)], (name, turn)
        assert answer.note == "", name
        assert THOUGHT not in answer.content, (name, turn)
        assert answer.reasoning in ("", THOUGHT), (name, turn)
        assert TEXT in answer.content or TEXT not in turn, (name, turn)
