"""Policies: who chooses the actions. `make_policy("random")` imports `agentgym.policies.random` and calls its `make`."""

from agentgym.policies.base import Policy, Reply, Request, make_policy

__all__ = ["Policy", "Reply", "Request", "make_policy"]
