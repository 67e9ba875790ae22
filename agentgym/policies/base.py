"""The interface between the runner and whoever chooses actions.

The runner hands over all requests that are ready as one list and gets one future for each. A policy that answers at
once (scripted, or a local model that batches) implements `act`; one that waits for a server overrides `submit`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from agentgym.actions import ActionFormat, ToolSpec, render_command
from agentgym.env import Info
from agentgym.episode import Turn
from agentgym.errors import UsageError, choices
from agentgym.task import Task

if TYPE_CHECKING:
    from pathlib import Path


class Context(msgspec.Struct, gc=False):
    """What stays the same over an episode.

    Attributes:
        episode_id: the episode.
        task: its task.
        system_prompt, instruction, tools, action_format: of the environment.
        prompt_templates: the family's own templates: name -> "module:function".
        seed: seed of this episode's policy draws, the same in every run and for every number of workers.
        addition: text that language-model policies put behind their system prompt (memory, skills).
    """

    episode_id: str
    task: Task
    system_prompt: str
    instruction: str
    tools: tuple[ToolSpec, ...]
    action_format: ActionFormat
    prompt_templates: Mapping[str, str]
    seed: int
    addition: str = ""
    _rng: np.random.Generator | None = None

    @property
    def rng(self) -> np.random.Generator:
        """The generator of the episode, made when it is first asked for."""
        if self._rng is None:
            self._rng = np.random.default_rng(self.seed)
        return self._rng


class Request(msgspec.Struct, gc=False):
    """One decision to be made.

    Attributes:
        context: what stays the same over the episode.
        role: whose turn it is.
        observation, info: what the environment returned last.
        history: all turns so far, of all roles (read only).
        hint: the expert's action where the policy declares `needs = {"expert"}`.
    """

    context: Context
    role: str
    observation: str
    info: Info
    history: Sequence[Turn]
    hint: str | None = None

    @property
    def rng(self) -> np.random.Generator:
        """Generator of this episode; draws from it are reproducible."""
        return self.context.rng

    def render(self, command: str) -> str:
        """The text that makes the environment carry out one of its plain commands."""
        return render_command(self.context.action_format, self.context.tools, command)


class Reply(msgspec.Struct, kw_only=True, gc=False):
    """What a policy answers.

    Attributes:
        text: what is given to `step`.
        messages: chat messages of the prompt after the first `kept_messages` of the previous turn's prompt.
        kept_messages: see `messages`.
        prompt_ids: int32 ids after the first `kept_ids` of (previous prompt + previous completion).
        kept_ids: see `prompt_ids`.
        completion_ids: int32 ids exactly as sampled.
        logprobs: float32, of `completion_ids` under the sampling distribution's model (temperature as stated by the
            policy's description).
        usage: "prompt_tokens", "completion_tokens", "cost" (US dollars), "calls" ...
        policy_version: number of updates the policy had seen.
    """

    text: str
    messages: list[dict[str, Any]] | None = None
    kept_messages: int = 0
    prompt_ids: NDArray[np.int32] | None = None
    kept_ids: int = 0
    completion_ids: NDArray[np.int32] | None = None
    logprobs: NDArray[np.float32] | None = None
    usage: dict[str, float] = {}
    policy_version: int = 0


Decision = Reply | BaseException | Future[Reply]


class Policy:
    """Base class of policies.

    Attributes:
        name: shown in tables.
        needs: capabilities the environment must offer; "expert" makes the runner pass the expert's action as hint.
        gather: wait until every running episode waits for a decision (a local model that batches).
    """

    name: str = "policy"
    needs: frozenset[str] = frozenset()
    gather: bool = False

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        """Decides all requests at once, in order."""
        raise TypeError(f"{type(self).__name__} implements neither act nor submit")

    def submit(self, requests: Sequence[Request]) -> Sequence[Decision]:
        """Starts deciding: a reply or an exception at once, or a future of either.

        The default decides at once. An exception becomes a fault of its episode, but a `UsageError` ends the run.
        """
        try:
            replies = self.act(requests)
        except Exception as error:
            return [error] * len(requests)
        if not isinstance(replies, Sequence) or len(replies) != len(requests):
            raise UsageError(f"policy {self.name}: act must return one reply for each of {len(requests)} requests")
        return replies

    def finish(self, episode_id: str) -> None:
        """Called when an episode has ended or failed, to let go of what was kept for it."""

    def describe(self) -> dict[str, Any]:
        """What `run.toml` records: name and every option that changes behaviour; no secrets, no addresses."""
        return {"name": self.name}

    def close(self) -> None:
        """Lets go of servers, threads and memory."""


def make_policy(spec: str, **options: Any) -> Policy:
    """The policy of a name.

    Args:
        spec: a module of `agentgym.policies` ("random", "scripted", "expert", "human", "openai_compatible", "hf",
            "vllm"), optionally with its main argument after a colon ("hf:/models/qwen"), or "package.module:make"
            with a dot in the module.
        **options: options of that policy.

    Raises:
        UsageError: for an unknown policy or option.
    """
    name, _, argument = spec.partition(":")
    if "." in name or (argument and importlib.util.find_spec(f"agentgym.policies.{name}") is None):
        from agentgym.registry import load_entry_point

        maker = load_entry_point(spec)
    else:
        if name.startswith("_") or name == "base" or importlib.util.find_spec(f"agentgym.policies.{name}") is None:
            raise choices("policy", name, list_policies())
        maker = importlib.import_module(f"agentgym.policies.{name}").make
        if argument:
            options = {"argument": argument, **options}
    try:
        policy: Policy = maker(**options)
    except TypeError as error:
        if "keyword argument" in str(error) or "positional argument" in str(error):
            raise UsageError(f"policy {spec!r}: {error}") from error
        raise
    return policy


def list_policies() -> list[str]:
    """Names of the policies in this package."""
    import pkgutil

    import agentgym.policies

    names = (module.name for module in pkgutil.iter_modules(agentgym.policies.__path__))
    return [name for name in names if name != "base" and not name.startswith("_")]


def option_path(value: str | Path) -> str:
    """A model's name for run.toml: the last part of a path, or the hub id as it is."""
    from pathlib import Path

    path = Path(value)
    return path.name if path.exists() else str(value)
