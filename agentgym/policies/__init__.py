"""Policies: who chooses the actions. `make_policy("random")` calls `agentgym.policies.random.make`."""

from agentgym.policies.base import Policy, Reply, Request, make_policy

__all__ = ["Policy", "Reply", "Request", "make_policy"]
