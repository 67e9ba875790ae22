"""Action formats (placeholder until the full module lands)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from agentgym.errors import choices


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed action."""

    action: str | None = None
    error: str | None = None
    thought: str | None = None
    tool: str | None = None
    arguments: dict[str, Any] | None = None
    spans: dict[str, tuple[int, int]] = {}


class ActionFormat(Protocol):
    """Format."""

    name: str

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> Parsed: ...
    def render(self, action: str, thought: str | None = None) -> str: ...


class Raw:
    """Raw."""

    name = "raw"

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        return Parsed(action=text)

    def render(self, action: str, thought: str | None = None) -> str:
        return action


def get_format(name: str | ActionFormat) -> ActionFormat:
    """By name."""
    if not isinstance(name, str):
        return name
    if name == "raw":
        return Raw()
    raise choices("format", name, ["raw"])
