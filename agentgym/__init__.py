"""agentgym: a Gymnasium-style environment and benchmark suite for multi-turn LLM agents.

>>> import gymnasium as gym, agentgym
>>> env = gym.make("agentgym/ALFWorld-v0")
"""

from agentgym.env import AgentEnv, Info, Outcome
from agentgym.registry import make_env as make
from agentgym.registry import make_task_set, register_builtin, register_plugins
from agentgym.spaces import Unicode
from agentgym.task import Task, TaskSet

__version__ = "0.1.0"

__all__ = [
    "AgentEnv",
    "Info",
    "Outcome",
    "Task",
    "TaskSet",
    "Unicode",
    "make",
    "make_task_set",
    "register_plugins",
]

register_builtin()
