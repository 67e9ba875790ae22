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
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
            and `enum` are checked.
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


class ActionFormat(msgspec.Struct, frozen=True):
    """A format: three functions under a name.

    Attributes:
        name: name in options and logs.
        parse: (text, tools) -> Parsed; never raises.
        render: (action, thought) -> text that parses to that action.
        instructions: tools -> text telling a model how to answer.
    """

    name: str
    parse: Callable[[str, Sequence[ToolSpec]], Parsed]
    render: Callable[..., str]
    instructions: Callable[[Sequence[ToolSpec]], str]


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
    after = spans["think"][1] + len("</think>") if spans else 0
    found: list[str] = []
    for name in names:
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


def _no_tags(part: str, tags: tuple[str, ...]) -> str:
    for tag in tags:
        for mark in (f"<{tag}>", f"</{tag}>"):
            if mark in part:
                raise UsageError(f"{part!r:.60} contains {mark}, which this format cannot carry; leave it out")
    return part


def _render_thought(thought: str | None, tags: tuple[str, ...]) -> str:
    return "" if thought is None else f"<think>{_no_tags(thought, (*tags, 'think'))}</think>"


def _render_think_action(action: str, thought: str | None = None) -> str:
    """An action is stripped, and must not contain the format's own tags."""
    return _render_thought(thought, ()) + f"<action>{_no_tags(action, ('action', 'think'))}</action>"


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
    tags = ("search", "answer", "think")
    body = re.fullmatch(r"\s*<(search|answer)>(.*)</\1>\s*", action, re.DOTALL)
    tag, content = body.groups() if body else ("answer", action)
    return _render_thought(thought, ()) + f"<{tag}>{_no_tags(content, tags).strip()}</{tag}>"


def _instruct_search_answer(tools: Sequence[ToolSpec]) -> str:
    return (
        "Think inside <think> and </think>. Then either search with <search>query</search>, or, when you know it, "
        "give the final answer with <answer>text</answer>."
    )


# Tool calls.


def canonical_call(tool: str, arguments: Mapping[str, Any]) -> str:
    """A tool call as one line of JSON with sorted keys: the action's text."""
    return msgspec.json.encode({"name": tool, "arguments": arguments}, order="deterministic").decode()


def _decode(text: str) -> Any:
    """JSON, or a sentence saying why not."""
    depth = most = 0
    for mark in re.findall(r"[\[\]{}]", text):
        depth += 1 if mark in "[{" else -1
        most = max(most, depth)
    if most > MAX_NESTING:
        return f"the JSON is nested deeper than {MAX_NESTING}"
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as error:
        return f"not JSON ({error})"


def _read_call(value: Any, tools: Sequence[ToolSpec]) -> tuple[str, dict[str, Any]] | str:
    """Tool and arguments of a decoded call, or what is wrong with it."""
    if isinstance(value, list):
        if len(value) != 1:
            return f"exactly one call may be made at a time, not {len(value)}"
        value = value[0]
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "a call is an object with a name and arguments"
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _decode(arguments)
        if isinstance(arguments, str):
            return f"the arguments are {arguments}"
    if not isinstance(arguments, dict):
        return "the arguments must be an object"
    problem = _check_arguments(value["name"], arguments, tools)
    return problem if problem is not None else (value["name"], arguments)


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _check_arguments(name: str, arguments: dict[str, Any], tools: Sequence[ToolSpec]) -> str | None:
    if not tools:
        return None
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        return f"there is no tool {name!r:.60}; the tools are {', '.join(tool.name for tool in tools)}"
    properties = tool.parameters.get("properties", {})
    for key in tool.parameters.get("required", ()):
        if key not in arguments:
            return f"{name} needs the argument {key!r}"
    for key, value in arguments.items():
        schema = properties.get(key)
        if schema is None:
            if tool.parameters.get("additionalProperties", False):
                continue
            return f"{name} has no argument {key!r:.60}; it takes {', '.join(properties) or 'none'}"
        wanted = schema.get("type")
        names = [wanted] if isinstance(wanted, str) else wanted or []
        types = tuple(kind for each in names for kind in _TYPES.get(each, (object,)))
        if types and (
            not isinstance(value, types) or (isinstance(value, bool) and bool not in types and object not in types)
        ):
            return f"argument {key!r} of {name} must be of type {' or '.join(names)}"
        if "enum" in schema and value not in schema["enum"]:
            return f"argument {key!r} of {name} must be one of {schema['enum']!r:.200}"
    return None


def _call(text: str, span: tuple[int, int], tools: Sequence[ToolSpec], thought: str | None, example: str) -> Parsed:
    value = _decode(text[span[0] : span[1]])
    read = f"the call is {value}" if isinstance(value, str) else _read_call(value, tools)
    if isinstance(read, str):
        return Parsed(error=f"{read}. Write: {example}", thought=thought)
    tool, arguments = read
    return Parsed(
        action=canonical_call(tool, arguments), tool=tool, arguments=arguments, thought=thought, spans={"tool": span}
    )


_CALL = '{"name": "tool", "arguments": {...}}'
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)\n?```", re.DOTALL)


def _parse_call_json(text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
    if len(text) > MAX_TEXT:
        return Parsed(error=f"the answer is longer than {MAX_TEXT} characters")
    thought, spans, problem = _thought(text)
    if problem is not None:
        return Parsed(error=f"{problem}. Write: {_CALL}")
    start = spans["think"][1] + len("</think>") if spans else 0
    fence = _FENCE.search(text, start)
    span = fence.span(1) if fence else (start, len(text))
    parsed = _call(text, span, tools, thought, _CALL)
    return msgspec.structs.replace(parsed, spans={**spans, **parsed.spans})


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
    value = _decode(action)
    read = f"the call is {value}" if isinstance(value, str) else _read_call(value, ())
    if isinstance(read, str):
        raise UsageError(f"{read}; an action of this format is {_CALL}")
    return canonical_call(*read).replace("<", "\\u003c")


def _render_call_json(action: str, thought: str | None = None) -> str:
    """The action is the JSON of a call."""
    return _render_thought(thought, ()) + _canonical(action)


def _render_call_hermes(action: str, thought: str | None = None) -> str:
    """The action is the JSON of a call."""
    return _render_thought(thought, ()) + f"<tool_call>{_canonical(action)}</tool_call>"


def _list_tools(tools: Sequence[ToolSpec]) -> str:
    return "\n".join(msgspec.json.encode(tool).decode() for tool in tools)


def _instruct_call_json(tools: Sequence[ToolSpec]) -> str:
    return f"Call exactly one of these tools by replying with JSON of the form {_CALL}:\n{_list_tools(tools)}"


def _instruct_call_hermes(tools: Sequence[ToolSpec]) -> str:
    return f"Call exactly one of these tools by replying with {_HERMES}:\n{_list_tools(tools)}"


# verl-agent (langfengQ/verl-agent, Apache-2.0): behaviour only.

_CJK = re.compile("[\u4e00-\u9fff]")
_FALLBACK = 30


def _parse_verl_agent(text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
    """Lower-cases; first <action> to first </action>, else the last 30 characters, which are carried out as invalid.

    A missing <think> pair and any CJK character make it invalid too, and it is still carried out.
    """
    lowered = text.lower()
    start, end = lowered.find("<action>"), lowered.find("</action>")
    if start < 0 or end < 0:
        fallback = lowered[-_FALLBACK:]
        return Parsed(action=fallback, error=f"<action> or </action> is missing. Write: {_THINK_ACTION}")
    action = lowered[start + len("<action>") : end].strip()
    problem = None
    if "<think>" not in text or "</think>" not in text:
        problem = f"<think> or </think> is missing. Write: {_THINK_ACTION}"
    elif _CJK.search(text):
        problem = f"Chinese characters are not allowed. Write: {_THINK_ACTION}"
    return Parsed(action=action, error=problem)


def _render_verl_agent(action: str, thought: str | None = None) -> str:
    """The action comes back in lower case."""
    return _render_think_action(action, thought or "")


FORMATS: Mapping[str, ActionFormat] = {
    item.name: item
    for item in (
        ActionFormat("raw", _parse_raw, _render_raw, _instruct_raw),
        ActionFormat("think-action", _parse_think_action, _render_think_action, _instruct_think_action),
        ActionFormat("search-answer", _parse_search_answer, _render_search_answer, _instruct_search_answer),
        ActionFormat("tool-call-json", _parse_call_json, _render_call_json, _instruct_call_json),
        ActionFormat("tool-call-hermes", _parse_call_hermes, _render_call_hermes, _instruct_call_hermes),
        ActionFormat("verl-agent", _parse_verl_agent, _render_verl_agent, _instruct_think_action),
    )
}
