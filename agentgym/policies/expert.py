"""The environment's own expert."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.errors import InfrastructureError, UsageError
from agentgym.policies.base import Policy, Reply, Request


class ExpertPolicy(Policy):
    """Does what `AgentEnv.expert` says."""

    name = "expert"
    needs = frozenset({"expert"})

    def submit(self, requests: Sequence[Request]) -> list[Reply | BaseException]:
        """The hints as they are, in the environment's action format; without one the episode is a fault."""
        return [_decide(request) for request in requests]


def _decide(request: Request) -> Reply | BaseException:
    if request.hint is None:
        return InfrastructureError(f"the expert has no action for task {request.context.task.id} at this turn")
    return Reply(text=request.hint)


def make(argument: str | None = None) -> Policy:
    """Makes the policy; it has no options."""
    if argument is not None:
        raise UsageError("the expert policy takes no argument; choose the expert with an --env-option")
    return ExpertPolicy()
