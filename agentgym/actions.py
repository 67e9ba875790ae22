"""Action formats: how the text a model produced is read as an action.

A parser never raises: it returns the action, or says in one sentence why there is none and how to write it right.
Every format renders what it parses, and `parse(render(action)).action == action`.

| name | looks like |
|---|---|
| raw | go to fridge 1 |
| think-action | <think>why</think><action>go to fridge 1</action> |
| search-answer | <think>why</think><search>query</search>, or <answer>text</answer> |
| tool-call-json | {"name": "act", "arguments": {"command": "look"}}, also in OpenAI's function shape |
| tool-call-hermes | <tool_call>{"name": "act", "arguments": {"command": "look"}}</tool_call> |
| verl-agent | as think-action, read as verl-agent reads it: lower-cased, with its fallback |
| verl-agent-20 | the same with the shorter fallback of its WebShop |

The rules of the tagged formats: an optional thought, and behind it the action's element, once. Text outside of the
elements is ignored, tags inside the thought do not count, and a tag that is doubled, nested, unclosed or in front of
the thought is refused. Content is stripped and must not be empty. A rendered part that holds one of the format's own
tags is refused with `UsageError`; tool calls escape them instead, so they carry any text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from agentgym.errors import UsageError, choices

MAX_NESTING = 32
MAX_TEXT = 1_000_000


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that an agent may call.

    Attributes:
        name: name in the call.
        description: what it does, for the prompt.
        parameters: JSON schema of its arguments: an object with `properties` and `required`. Of a property, `type`
            and `enum` are checked. Other arguments are refused unless `additionalProperties` allows them or there are
            no `properties` at all.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """What was read.

    Attributes:
        action: the action, or None when there is none.
        error: why the text was refused and how to write it right. With verl-agent's format an action may come with
            an error: it is carried out and counted as invalid.
        thought: content of <think>.
        tool, arguments: of a tool call (for search-answer: "search" or "answer").
        spans: where parts lie in the text: think, action, search, answer, tool -> (start, end) of their content.
    """

    action: str | None = None
    error: str | None = None
    thought: str | None = None
    tool: str | None = None
    arguments: dict[str, Any] | None = None
    spans: dict[str, tuple[int, int]] = {}


class Parse(Protocol):
    """Reads a text."""

    def __call__(self, text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """Never raises, whatever the text; takes time in proportion to its length."""


class Render(Protocol):
    """Writes an action so that `Parse` reads it back."""

    def __call__(self, action: str, thought: str | None = None) -> str:
        """Raises `UsageError` for an action or a thought that the format cannot carry."""


class ActionFormat(msgspec.Struct, frozen=True):
    """A format: three functions under a name.

    Attributes:
        name: name in options and logs.
        parse: (text, tools) -> Parsed; never raises.
        render: (action, thought) -> text that parses to that action.
        instructions: tools -> text telling a model how to answer.
        calls_tools: whether an action of this format is a tool call, in JSON.
    """

    name: str
    parse: Parse
    render: Render
    instructions: Callable[[Sequence[ToolSpec]], str]
    calls_tools: bool = False


def render_command(action_format: ActionFormat, tools: Sequence[ToolSpec], command: str) -> str:
    """The text that makes an environment carry out one of its plain commands, in any format.

    Where a format calls tools, the command becomes the one required argument of the environment's only tool.

    Raises:
        UsageError: if the format calls tools and it is not plain which tool takes a command.
    """
    if not action_format.calls_tools:
        return action_format.render(command)
    required = [name for tool in tools for name in tool.parameters.get("required", ())]
    if len(tools) != 1 or len(required) != 1:
        raise UsageError(
            f"this environment has no single tool that takes a command such as {command!r:.60}; call its tools"
        )
    return action_format.render(canonical_call(tools[0].name, {required[0]: command}))


def get_format(name: str | ActionFormat) -> ActionFormat:
    """The format of a name; a format is returned as it is.

    Raises:
        UsageError: for an unknown name.
    """
    if isinstance(name, ActionFormat):
        return name
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        raise choices("action format", name, list(FORMATS)) from None


# Raw text.


def _parse_raw(text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
    return Parsed(action=text)


def _render_raw(action: str, thought: str | None = None) -> str:
    return action


def _instruct_raw(tools: Sequence[ToolSpec]) -> str:
    return "Reply with the action only."


# Tags.


def _content(text: str, tag: str) -> tuple[int, int] | str | None:
    """Span of the only <tag>...</tag>, None if there is no tag, or what is wrong with the tags."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.find(opening)
    end = text.find(closing)
    if start < 0 and end < 0:
        return None
    if start < 0 or end < 0:
        return f"{opening} needs its {closing}"
    if text.find(opening, start + 1) >= 0 or text.find(closing, end + 1) >= 0:
        return f"{opening}...{closing} must occur once"
    start += len(opening)
    return (start, end) if start <= end else f"{closing} stands before {opening}"


def _thought(text: str) -> tuple[str | None, dict[str, tuple[int, int]], str | None]:
    """Thought, its span, and what is wrong with its tags."""
    span = _content(text, "think")
    if isinstance(span, str):
        return None, {}, span
    if span is None:
        return None, {}, None
    return text[span[0] : span[1]].strip(), {"think": span}, None


def _tagged(text: str, names: tuple[str, ...], example: str) -> Parsed | tuple[str, str, Parsed]:
    """Reads an optional thought and exactly one of the named tags behind it: (tag, content, rest)."""
    if len(text) > MAX_TEXT:
        return Parsed(error=f"the answer is longer than {MAX_TEXT} characters")
    thought, spans, problem = _thought(text)
    before = text[: spans["think"][0]] if spans else ""
    after = spans["think"][1] + len("</think>") if spans else 0
    found: list[str] = []
    for name in names:
        if f"<{name}>" in before or f"</{name}>" in before:
            problem = problem or f"the thought must stand before <{name}>"
        # Inside the thought the model may mention a tag; only what stands outside of it counts.
        span = _content(text[after:], name)
        if isinstance(span, str):
            problem = problem or span
        elif span is not None:
            found.append(name)
            spans[name] = (span[0] + after, span[1] + after)
    if problem is not None:
        return Parsed(error=f"{problem}. Write: {example}", thought=thought)
    if len(found) != 1:
        why = "there is no action" if not found else f"only one of {' and '.join(found)} may be given"
        return Parsed(error=f"{why}. Write: {example}", thought=thought)
    start, end = spans[found[0]]
    content = text[start:end].strip()
    if not content:
        return Parsed(error=f"<{found[0]}> is empty. Write: {example}", thought=thought)
    if "<think>" in content or "</think>" in content:
        return Parsed(error=f"the thought must stand before <{found[0]}>. Write: {example}", thought=thought)
    return found[0], content, Parsed(thought=thought, spans=spans)


_THINK_ACTION = "<think>why</think><action>the action</action>"


def _parse_think_action(text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
    read = _tagged(text, ("action",), _THINK_ACTION)
    if isinstance(read, Parsed):
        return read
    return Parsed(action=read[1], thought=read[2].thought, spans=read[2].spans)


def _no_tags(part: str, *tags: str) -> str:
    for tag in tags:
        for mark in (f"<{tag}>", f"</{tag}>"):
            if mark in part:
                raise UsageError(f"{part!r:.60} contains {mark}, which this format cannot carry; leave it out")
    return part


def _render_thought(thought: str | None) -> str:
    return "" if thought is None else f"<think>{_no_tags(thought, 'think')}</think>"


def _render_content(content: str, *tags: str) -> str:
    stripped = _no_tags(content, *tags).strip()
    if not stripped:
        raise UsageError("an action of this format must not be empty")
    return stripped


def _render_think_action(action: str, thought: str | None = None) -> str:
    """An action is stripped, and must not contain the format's own tags."""
    return _render_thought(thought) + f"<action>{_render_content(action, 'action', 'think')}</action>"


def _instruct_think_action(tools: Sequence[ToolSpec]) -> str:
    return (
        "First think about the situation inside <think> and </think>, then give exactly one action inside <action> "
        "and </action>."
    )


_SEARCH_ANSWER = "<search>query</search> or <answer>text</answer>, after an optional <think>why</think>"
_SEARCH_KEYS = {"search": "query", "answer": "text"}


def _parse_search_answer(text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
    read = _tagged(text, ("search", "answer"), _SEARCH_ANSWER)
    if isinstance(read, Parsed):
        return read
    tag, content, rest = read
    return Parsed(
        action=f"<{tag}>{content}</{tag}>",
        tool=tag,
        arguments={_SEARCH_KEYS[tag]: content},
        thought=rest.thought,
        spans=rest.spans,
    )


def _render_search_answer(action: str, thought: str | None = None) -> str:
    """The action is a whole <search> or <answer> element; plain text is taken as an answer."""
    body = re.fullmatch(r"\s*<(search|answer)>(.*)</\1>\s*", action, re.DOTALL)
    tag, content = body.groups() if body else ("answer", action)
    return _render_thought(thought) + f"<{tag}>{_render_content(content, 'search', 'answer', 'think')}</{tag}>"


def _instruct_search_answer(tools: Sequence[ToolSpec]) -> str:
    return (
        "Think inside <think> and </think>. Then either search with <search>query</search>, or, when you know it, "
        "give the final answer with <answer>text</answer>."
    )


# Tool calls.


def canonical_call(tool: str, arguments: Mapping[str, Any]) -> str:
    """A tool call as one line of JSON with sorted keys: the action's text."""
    return msgspec.json.encode({"name": tool, "arguments": arguments}, order="deterministic").decode()


class _Refused(Exception):
    """Carries why a call is refused from the depth of its reading to the format's `parse`."""


def _decode(text: str) -> Any:
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise _Refused(f"JSON is nested deeper than {MAX_NESTING}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise _Refused(f"not JSON ({error})") from None
    level = [value]
    for _ in range(MAX_NESTING):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return value
    raise _Refused(f"JSON is nested deeper than {MAX_NESTING}")


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _read_call(text: str, tools: Sequence[ToolSpec]) -> tuple[str, dict[str, Any]]:
    """Tool and arguments of a call in any of its shapes."""
    value = _decode(text)
    if isinstance(value, list):
        if len(value) != 1:
            raise _Refused(f"exactly one call may be made at a time, not {len(value)}")
        value = value[0]
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _Refused("a call is an object with a name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = _decode(arguments)
        except _Refused as refused:
            raise _Refused(f"the arguments are {refused}") from None
    if not isinstance(arguments, dict):
        raise _Refused("the arguments must be an object")
    _check_arguments(value["name"], arguments, tools)
    return value["name"], arguments


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _check_arguments(name: str, arguments: dict[str, Any], tools: Sequence[ToolSpec]) -> None:
    if not tools:
        return
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        raise _Refused(f"there is no tool {name!r:.60}; the tools are {', '.join(tool.name for tool in tools)}")
    for key in tool.parameters.get("required", ()):
        if key not in arguments:
            raise _Refused(f"{name} needs the argument {key!r}")
    properties = tool.parameters.get("properties")
    others = tool.parameters.get("additionalProperties", properties is None)
    for key, value in arguments.items():
        schema = (properties or {}).get(key)
        if schema is None and others is False:
            raise _Refused(f"{name} has no argument {key!r:.60}; it takes {', '.join(properties or ()) or 'none'}")
        if isinstance(schema, dict):
            _check_value(f"argument {key!r} of {name}", value, schema)


def _check_value(what: str, value: Any, schema: dict[str, Any]) -> None:
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else wanted or []
    types = tuple(kind for each in names for kind in _TYPES.get(each, (object,)))
    # In Python True is an integer, in JSON it is not.
    fits = bool in types or object in types if isinstance(value, bool) else isinstance(value, types)
    if types and not fits:
        raise _Refused(f"{what} must be of type {' or '.join(names)}")
    if "enum" in schema and value not in schema["enum"]:
        raise _Refused(f"{what} must be one of {schema['enum']!r:.200}")


def _call(text: str, span: tuple[int, int], tools: Sequence[ToolSpec], thought: str | None, example: str) -> Parsed:
    try:
        tool, arguments = _read_call(text[span[0] : span[1]], tools)
    except _Refused as refused:
        why = f"the call is {refused}" if str(refused).startswith(("JSON", "not JSON")) else str(refused)
        return Parsed(error=f"{why}. Write: {example}", thought=thought)
    return Parsed(
        action=canonical_call(tool, arguments), tool=tool, arguments=arguments, thought=thought, spans={"tool": span}
    )


_CALL = '{"name": "tool", "arguments": {...}}'
_FENCE = re.compile(r"```(?:json)?[ \t\r]*\n")


def _parse_call_json(text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
    """The whole text behind an optional thought at its beginning, or the only fenced block of it, is the call."""
    if len(text) > MAX_TEXT:
        return Parsed(error=f"the answer is longer than {MAX_TEXT} characters")
    thought, spans, start = None, {}, 0
    opening = text.find("<think>")
    if opening >= 0 and not text[:opening].strip():  # further in, it is a part of the call's own text
        closing = text.find("</think>", opening)
        if closing < 0:
            return Parsed(error=f"<think> needs its </think>. Write: {_CALL}")
        spans["think"] = (opening + len("<think>"), closing)
        thought = text[slice(*spans["think"])].strip()
        start = closing + len("</think>")
    span = _fenced(text, start)
    if span is None:
        return Parsed(error=f"exactly one fenced block may be given. Write: {_CALL}", thought=thought)
    parsed = _call(text, span, tools, thought, _CALL)
    return msgspec.structs.replace(parsed, spans={**spans, **parsed.spans})


def _fenced(text: str, start: int) -> tuple[int, int] | None:
    """Span of the only fenced block after `start`; of all the rest if there is none; None if there are several."""
    fence = None if text[start:].lstrip().startswith(("{", "[")) else _FENCE.search(text, start)
    if fence is None:
        return start, len(text)
    end = text.find("```", fence.end())
    if end < 0:
        return fence.end(), len(text)
    return None if "```" in text[end + 3 :] else (fence.end(), end)


_HERMES = f"<tool_call>{_CALL}</tool_call>"


def _parse_call_hermes(text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
    read = _tagged(text, ("tool_call",), _HERMES)
    if isinstance(read, Parsed):
        return read
    spans = dict(read[2].spans)
    parsed = _call(text, spans.pop("tool_call"), tools, read[2].thought, _HERMES)
    return msgspec.structs.replace(parsed, spans={**spans, **parsed.spans})


def _canonical(action: str) -> str:
    """Checks an action's JSON and escapes "<" inside of it, so that no tag can appear in its text."""
    try:
        return canonical_call(*_read_call(action, ())).replace("<", "\\u003c")
    except _Refused as refused:
        raise UsageError(f"{action!r:.60} is no call: {refused}; an action of this format is {_CALL}") from None


def _render_call_json(action: str, thought: str | None = None) -> str:
    """The action is the JSON of a call."""
    return _render_thought(thought) + _canonical(action)


def _render_call_hermes(action: str, thought: str | None = None) -> str:
    """The action is the JSON of a call."""
    return _render_thought(thought) + f"<tool_call>{_canonical(action)}</tool_call>"


def _list_tools(tools: Sequence[ToolSpec]) -> str:
    return "\n".join(msgspec.json.encode(tool).decode() for tool in tools)


def _instruct_call_json(tools: Sequence[ToolSpec]) -> str:
    return f"Call exactly one of these tools by replying with JSON of the form {_CALL}:\n{_list_tools(tools)}"


def _instruct_call_hermes(tools: Sequence[ToolSpec]) -> str:
    return f"Call exactly one of these tools by replying with {_HERMES}:\n{_list_tools(tools)}"


# verl-agent (langfengQ/verl-agent, Apache-2.0): behaviour only.

_CJK = re.compile("[\u4e00-\u9fff]")


def _parse_verl_agent(text: str, fallback: int) -> Parsed:
    """First <action> to first </action> of the lower-cased text, else its last characters, carried out as invalid.

    A missing <think> pair and any CJK character make it invalid too, and it is still carried out.
    """
    lowered = text.lower()
    start, end = lowered.find("<action>"), lowered.find("</action>")
    thought, think = _first_thought(text)
    if start < 0 or end < 0:
        error = f"<action> or </action> is missing. Write: {_THINK_ACTION}"
        return Parsed(action=lowered[-fallback:], error=error, thought=thought, spans=think)
    start += len("<action>")
    problem = None
    if "<think>" not in text or "</think>" not in text:
        problem = f"<think> or </think> is missing. Write: {_THINK_ACTION}"
    elif _CJK.search(text):
        problem = f"Chinese characters are not allowed. Write: {_THINK_ACTION}"
    # Lower-casing makes a few letters longer; then positions in it say nothing about the text.
    spans = {**think, "action": (start, end)} if start <= end and len(lowered) == len(text) else think
    return Parsed(action=lowered[start:end].strip(), error=problem, thought=thought, spans=spans)


def _first_thought(text: str) -> tuple[str | None, dict[str, tuple[int, int]]]:
    start, end = text.find("<think>"), text.find("</think>")
    if start < 0 or end < start:
        return None, {}
    start += len("<think>")
    return text[start:end].strip(), {"think": (start, end)}


def _render_verl_agent(action: str, thought: str | None = None) -> str:
    """The action comes back in lower case."""
    for part in (action, thought or ""):
        _no_tags(part.lower(), "action", "think")
    return f"<think>{thought or ''}</think><action>{action.strip()}</action>"


def _verl_agent(name: str, fallback: int) -> ActionFormat:
    def parse(text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        return _parse_verl_agent(text, fallback)

    return ActionFormat(name, parse, _render_verl_agent, _instruct_think_action)


FORMATS: Mapping[str, ActionFormat] = {
    item.name: item
    for item in (
        ActionFormat("raw", _parse_raw, _render_raw, _instruct_raw),
        ActionFormat("think-action", _parse_think_action, _render_think_action, _instruct_think_action),
        ActionFormat("search-answer", _parse_search_answer, _render_search_answer, _instruct_search_answer),
        ActionFormat("tool-call-json", _parse_call_json, _render_call_json, _instruct_call_json, True),
        ActionFormat("tool-call-hermes", _parse_call_hermes, _render_call_hermes, _instruct_call_hermes, True),
        _verl_agent("verl-agent", 30),
        _verl_agent("verl-agent-20", 20),
    )
}
