"""Scripts: a fixed list of actions, a function of yours, or a simple explorer that knows no family."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from agentgym.errors import UsageError
from agentgym.policies.base import Policy, Reply, Request
from agentgym.registry import load_entry_point

_WORD = re.compile(r"[a-z]+")


class ScriptedPolicy(Policy):
    """Follows a script.

    By default it explores: of the admissible actions it takes one least often taken in this episode, preferring
    those that share most words with the instruction, then drawing.

    Args:
        actions: actions to take in order; after the last one it is repeated.
        function: "package.module:function", called with the `Request`, returns the text.
    """

    name = "scripted"

    def __init__(self, actions: list[str] | None = None, function: str | None = None) -> None:
        if actions is not None and function is not None:
            raise UsageError("the scripted policy takes actions or function, not both")
        if actions is not None and (not actions or not all(isinstance(action, str) for action in actions)):
            raise UsageError("actions must be a list of at least one text")
        self._actions = actions
        self._function: Callable[[Request], str] | None = load_entry_point(function) if function else None
        self._options = {"actions": actions, "function": function}
        self.needs = frozenset({"admissible"}) if actions is None and function is None else frozenset()

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        """One action a request."""
        return [Reply(text=self._choose(request)) for request in requests]

    def _choose(self, request: Request) -> str:
        if self._function is not None:
            return self._function(request)
        if self._actions is not None:
            taken = sum(turn.role == request.role for turn in request.history)
            text = self._actions[min(taken, len(self._actions) - 1)]
            return request.render(text)
        return request.render(_explore(request))

    def describe(self) -> dict[str, Any]:
        """Name and script."""
        return {"name": self.name, **{key: value for key, value in self._options.items() if value is not None}}


def _explore(request: Request) -> str:
    commands = request.info["admissible"]
    if not commands:
        return ""
    taken = Counter(turn.action or turn.completion for turn in request.history if turn.role == request.role)
    wanted = set(_WORD.findall(request.context.instruction.lower()))
    ranks = [(taken[command], -len(wanted & set(_WORD.findall(command)))) for command in commands]
    best = min(ranks)
    candidates = [command for command, rank in zip(commands, ranks, strict=True) if rank == best]
    return candidates[int(request.rng.integers(len(candidates)))]


def make(argument: str | None = None, **options: Any) -> Policy:
    """Makes the policy; `argument` is a function: "scripted:package.module:function"."""
    if argument is not None:
        options["function"] = argument
    return ScriptedPolicy(**options)
