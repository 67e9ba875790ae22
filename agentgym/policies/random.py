"""Uniformly random over the admissible actions."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.errors import UsageError
from agentgym.policies.base import Policy, Reply, Request


class RandomPolicy(Policy):
    """Draws one of `info["admissible"]`; the environment has to list them."""

    name = "random"
    needs = frozenset({"admissible"})

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        """One draw a request, from the episode's own generator."""
        return [Reply(text=self._choose(request)) for request in requests]

    @staticmethod
    def _choose(request: Request) -> str:
        commands = request.info["admissible"] or ("",)
        return request.render(commands[int(request.rng.integers(len(commands)))])


def make(argument: str | None = None) -> Policy:
    """Makes the policy; it has no options."""
    if argument is not None:
        raise UsageError("the random policy takes no argument")
    return RandomPolicy()
