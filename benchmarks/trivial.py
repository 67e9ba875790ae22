"""The trivial environment of the benchmarks: ten turns, no work, so that only the machinery around it is timed."""

from __future__ import annotations

from typing import Any, ClassVar

from agentgym.env import AgentEnv, Outcome
from agentgym.policies.base import Policy, Reply
from agentgym.registry import EnvCard, TasksCard, register_env, register_tasks
from agentgym.task import ListTaskSet, Task, TaskSet

TASKS = 4000


class TrivialEnv(AgentEnv):
    """Answers every action with the same words."""

    family: ClassVar[str] = "trivial"
    default_tasks: ClassVar[str] = "trivial/tasks"
    default_max_turns: ClassVar[int] = 10

    def _start(self, task: Task) -> Outcome:
        return Outcome("begin", score=0.0)

    def _act(self, action: str) -> Outcome:
        return Outcome("go on", score=0.0)


class ConstantPolicy(Policy):
    """Says the same word."""

    name = "constant"

    def act(self, requests: Any) -> list[Reply]:
        """One reply a request."""
        return [Reply(text="on") for _ in requests]


def tasks(variant: str) -> TaskSet:
    """Tasks without content."""
    return ListTaskSet("trivial/tasks", [Task(id=f"trivial/{i}", family="trivial", split="test") for i in range(TASKS)])


def register() -> None:
    """Makes the environment known to Gymnasium and agentgym."""
    register_tasks(TasksCard(name="trivial/tasks", entry_point="benchmarks.trivial:tasks"))
    register_env(EnvCard(id="bench/Trivial-v0", family="trivial", entry_point="benchmarks.trivial:TrivialEnv"))


register()
