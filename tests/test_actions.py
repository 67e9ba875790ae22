"""Action formats: parsers never raise, say why they refuse, and read back what they render."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.actions import FORMATS, Parsed, ToolSpec, canonical_call, get_format
from agentgym.errors import UsageError

TOOLS = (
    ToolSpec(
        name="act",
        parameters={
            "properties": {"command": {"type": "string"}, "times": {"type": "integer", "enum": [1, 2]}},
            "required": ["command"],
        },
    ),
)
PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<action>", "</action>", "<search>", "</search>", "<answer>", "</answer>",
        "<tool_call>", "</tool_call>", '{"name": "act", "arguments": {"command": "x"}}', '{"name":', "[", "]", "{", "}",
        '"', "\\", "\n", "```json\n", "```", "\x00", "\ud800", "中", "🙂", "look", " ",
    ]
)  # fmt: skip
HOSTILE = st.one_of(st.text(), st.lists(PIECES, max_size=30).map("".join))
CLEAN = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda t: t.strip() == t and not any(mark in t for mark in ("<", ">"))
)


@pytest.mark.parametrize("name", list(FORMATS))
@given(text=HOSTILE)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_parsers_never_raise_and_say_why(name: str, text: str) -> None:
    for tools in ((), TOOLS):
        parsed = FORMATS[name].parse(text, tools)
        assert isinstance(parsed, Parsed)
        assert (parsed.action is not None) or parsed.error
        for start, end in parsed.spans.values():
            assert 0 <= start <= end <= len(text)


@pytest.mark.parametrize("name", ["think-action", "search-answer", "tool-call-hermes", "verl-agent"])
@given(inside=st.lists(PIECES, max_size=6).map("".join), thought=st.none() | st.lists(PIECES, max_size=6).map("".join))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_what_a_format_does_not_refuse_to_render_is_read_back(name: str, inside: str, thought: str | None) -> None:
    fmt = FORMATS[name]
    if name == "tool-call-hermes":
        if "\ud800" in inside:
            return  # not text, so there is no JSON of it
        action = canonical_call("act", {"command": inside})
    else:
        action = f"<search>{inside}</search>" if name == "search-answer" else inside
    try:
        text = fmt.render(action, thought)
    except UsageError:
        return
    parsed = fmt.parse(text)
    expected = f"<search>{inside.strip()}</search>" if name == "search-answer" else action.strip()
    assert parsed.action == (expected.lower() if name == "verl-agent" else expected)
    if thought is not None:
        assert parsed.thought == thought.strip()
    if name != "verl-agent":
        assert parsed.error is None


@pytest.mark.parametrize("name", ["raw", "think-action", "search-answer", "verl-agent"])
@given(action=CLEAN, thought=st.none() | CLEAN)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_rendering_is_read_back(name: str, action: str, thought: str | None) -> None:
    fmt = FORMATS[name]
    if name == "verl-agent":
        action = action.lower()
        if action.lower() != action or action.strip() != action:
            return
    parsed = fmt.parse(fmt.render(action, thought), ())
    expected = f"<answer>{action}</answer>" if name == "search-answer" else action
    assert parsed.action == expected
    if name in ("think-action", "search-answer"):
        assert parsed.thought == thought
        assert parsed.error is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("name", ["tool-call-json", "tool-call-hermes"])
@given(
    arguments=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), JSON, max_size=4),
    thought=st.none() | CLEAN,
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_tool_calls_are_read_back_with_any_arguments(
    name: str, arguments: dict[str, object], thought: str | None
) -> None:
    action = canonical_call("any tool", arguments)
    parsed = FORMATS[name].parse(FORMATS[name].render(action, thought), ())
    assert parsed.error is None
    assert parsed.action == action
    assert parsed.arguments == arguments


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize(
    "text",
    [
        "<think>" * 100_000,
        "<action>" * 100_000,
        "[" * 300_000,
        '{"a":' * 200_000,
        "```json\n" * 50_000,
        "```" + "\n" * 300_000,
        "```" + " " * 300_000,
        '{"a":"' + "<think>" * 50_000,
        "a" * 5_000_000,
    ],
)
def test_reading_takes_linear_time(name: str, text: str) -> None:
    begun = time.perf_counter()
    FORMATS[name].parse(text, TOOLS)
    assert time.perf_counter() - begun < 5.0  # quadratic reading would take hours


@pytest.mark.parametrize(
    ("text", "action", "error"),
    [
        ("<think>t</think><action> go to fridge 1 </action>", "go to fridge 1", None),
        ("<action>look</action>", "look", None),
        ("<think>maybe <action>look</action></think><action>open fridge 1</action>", "open fridge 1", None),
        ("<action>a</action><action>b</action>", None, "must occur once"),
        ("<action>a", None, "needs its </action>"),
        ("</action>a<action>", None, "stands before"),
        ("<action>  </action>", None, "is empty"),
        ("go to fridge 1", None, "there is no action"),
        ("<think>t<action>a</action>", None, "<think> needs its </think>"),
        ("<action>a</action><think>t</think>", None, "the thought must stand before <action>"),
        ("<action>a</action><think>t</think><action>b</action>", None, "the thought must stand before <action>"),
        ("<action>a<think>t</think></action>", None, "the thought must stand before <action>"),
        ("<action><action>a</action></action>", None, "must occur once"),
        ("Well: <action>a</action> That is it.", "a", None),
    ],
)
def test_think_action(text: str, action: str | None, error: str | None) -> None:
    parsed = get_format("think-action").parse(text, ())
    assert parsed.action == action
    assert (error is None) == (parsed.error is None)
    if error:
        assert error in (parsed.error or "")
        assert "Write: <think>" in (parsed.error or "")


def test_search_answer_takes_exactly_one() -> None:
    fmt = get_format("search-answer")
    parsed = fmt.parse("<think>hm</think> <search> who? </search>", ())
    assert (parsed.tool, parsed.arguments, parsed.action) == ("search", {"query": "who?"}, "<search>who?</search>")
    assert "only one of" in (fmt.parse("<search>a</search><answer>b</answer>", ()).error or "")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "act", "arguments": {"command": "look"}}',
        '{"type": "function", "function": {"name": "act", "arguments": "{\\"command\\": \\"look\\"}"}}',
        '[{"name": "act", "parameters": {"command": "look"}}]',
        'Sure:\n```json\n{"name": "act", "arguments": {"command": "look"}}\n```',
        '<think>{not json}</think>{"name": "act", "arguments": {"command": "look"}}',
        '\n{"name": "act", "arguments": {"command": "look"}}\n',
    ],
)
def test_the_shapes_of_a_tool_call(text: str) -> None:
    parsed = get_format("tool-call-json").parse(text, TOOLS)
    assert parsed.error is None
    assert (parsed.tool, parsed.arguments) == ("act", {"command": "look"})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"name": "acr", "arguments": {}}', "no tool 'acr'; the tools are act"),
        ('{"name": "act", "arguments": {}}', "needs the argument 'command'"),
        ('{"name": "act", "arguments": {"command": 3}}', "must be of type string"),
        ('{"name": "act", "arguments": {"command": "x", "times": true}}', "must be of type integer"),
        ('{"name": "act", "arguments": {"command": "x", "times": 3}}', "must be one of"),
        ('{"name": "act", "arguments": {"command": "x", "much": 3}}', "no argument 'much'; it takes command, times"),
        ('{"name": "act", "arguments": "nope"}', "the arguments are not JSON"),
        ('[{"name": "act"}, {"name": "act"}]', "exactly one call"),
        ('{"arguments": {}}', "a call is an object with a name"),
        ("look", "not JSON"),
        ('"look"', "a call is an object with a name"),
        ('{"name": "act", "arguments": "\\"x\\""}', "the arguments must be an object"),
        ('{"name": "act", "arguments": {"command": NaN}}', "not JSON"),
        ("[" * 40 + "]" * 40, "nested deeper"),
    ],
)
def test_a_refused_call_says_why(text: str, why: str) -> None:
    assert why in (get_format("tool-call-json").parse(text, TOOLS).error or "")
    assert why in (get_format("tool-call-hermes").parse(f"<tool_call>{text}</tool_call>", TOOLS).error or "")


def test_tags_and_fences_inside_a_calls_own_text_are_left_alone() -> None:
    command = "echo '<think>```json [[[[' " + "[" * 40
    parsed = get_format("tool-call-json").parse(canonical_call("act", {"command": command}), TOOLS)
    assert parsed.error is None
    assert parsed.arguments == {"command": command}
    fenced = '```json\n{"name": "act", "arguments": {"command": "look"}}\n```\n'
    assert "exactly one fenced block" in (get_format("tool-call-json").parse(fenced * 2, TOOLS).error or "")


@pytest.mark.parametrize(
    ("parameters", "accepted"),
    [
        ({}, True),
        ({"properties": {}}, False),
        ({"properties": {}, "additionalProperties": True}, True),
        ({"properties": {}, "additionalProperties": {"type": "string"}}, True),
        ({"additionalProperties": False}, False),
        ({"properties": {"x": True}}, True),
        ({"properties": {"x": {"type": ["integer", "null"]}}}, True),
        ({"properties": {"x": {"type": "number"}}}, True),
        ({"properties": {"x": {"type": ["string", "null"]}}}, False),
        ({"properties": {"x": {"anyOf": []}}}, True),
    ],
)
def test_arguments_are_checked_as_far_as_documented(parameters: dict[str, object], accepted: bool) -> None:
    tool = ToolSpec(name="t", parameters=parameters)
    parsed = get_format("tool-call-json").parse('{"name": "t", "arguments": {"x": 3}}', (tool,))
    assert (parsed.error is None) == accepted


def test_spans_are_of_the_content() -> None:
    def cut(name: str, text: str) -> dict[str, str]:
        return {part: text[slice(*span)] for part, span in FORMATS[name].parse(text).spans.items()}

    assert cut("think-action", "<think>a b</think> <action> go </action>.") == {"think": "a b", "action": " go "}
    assert cut("verl-agent", "<think>A</think><action>Go</action>") == {"think": "A", "action": "Go"}
    assert cut("verl-agent", "<think>\u0130</think><action>Go</action>") == {"think": "\u0130"}  # grows in lower case
    assert cut("search-answer", "<answer>42</answer>") == {"answer": "42"}
    call = '{"name": "t", "arguments": {}}'
    assert cut("tool-call-hermes", f"<think>x</think><tool_call>{call}</tool_call>") == {"think": "x", "tool": call}
    assert cut("tool-call-json", f"<think>x</think>{call}") == {"think": "x", "tool": call}


def test_verl_agent_reads_as_the_reference_does() -> None:
    parse = get_format("verl-agent").parse
    assert parse("<think></think></action>x<action>").action == ""  # the tags are there, with nothing between them
    assert parse("<THINK>t</THINK><ACTION>Look</ACTION>").action == "look"
    assert parse("<THINK>t</THINK><ACTION>Look</ACTION>").error is not None  # the thought's tags are read as written
    assert get_format("verl-agent-20").parse("a" * 50).action == "a" * 20
    whole = parse("<think>T</think><action>Go To Fridge 1</action><action>x</action>", ())
    assert (whole.action, whole.error) == ("go to fridge 1", None)
    cut = parse("I would like to GO TO the FRIDGE 1 and open it", ())
    assert cut.action == "go to the fridge 1 and open it"[-30:]
    assert cut.error is not None
    thoughtless = parse("<action>look</action>", ())
    assert thoughtless.action == "look"
    assert "<think>" in (thoughtless.error or "")
    cjk = parse("<think>去</think><action>look</action>", ())
    assert cjk.action == "look"
    assert cjk.error is not None


def test_what_cannot_be_carried_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot carry"):
        get_format("think-action").render("say </action> now")
    with pytest.raises(UsageError, match="must not be empty"):
        get_format("search-answer").render("<search> </search>")
    with pytest.raises(UsageError, match="cannot carry"):
        get_format("verl-agent").render("look", "or <ACTION>")
    with pytest.raises(UsageError, match="an action of this format is"):
        get_format("tool-call-json").render("look")
    with pytest.raises(UsageError, match=r"unknown action format 'think_action'. Did you mean 'think-action'"):
        get_format("think_action")
