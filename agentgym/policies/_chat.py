"""What all language-model policies share: from a request to chat messages, and the log's delta of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from agentgym.errors import UsageError, choices
from agentgym.policies.base import Request
from agentgym.prompts import Exchange, PromptConfig, find_template, render


class PromptOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every language-model policy; `agentgym.prompts.PromptConfig` explains them."""

    template: str = "chat"
    window: Annotated[int, msgspec.Meta(ge=0)] | None = None
    system: str | None = None
    admissible: bool = True
    instructions: bool = True
    max_observation: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def config(self) -> PromptConfig:
        """As the prompt renderer takes them."""
        return PromptConfig(**{name: getattr(self, name) for name in PromptConfig.__struct_fields__})

    def describe(self, *leave_out: str) -> dict[str, Any]:
        """The options that are set, but for those that change no answer, for the policy's description."""
        given = msgspec.structs.asdict(self)
        return {name: value for name, value in given.items() if value not in (None, (), {}) and name not in leave_out}


Options = TypeVar("Options", bound=PromptOptions)


def read_options(kind: type[Options], policy: str, options: Mapping[str, Any]) -> Options:
    """Checks a policy's options by name and type; numbers may come as text.

    Raises:
        UsageError: for an unknown option or a value of the wrong type or range.
    """
    for name in options:
        if name not in kind.__struct_fields__:
            raise choices(f"option of the {policy} policy", name, list(kind.__struct_fields__))
    try:
        return msgspec.convert(dict(options), kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"option of the {policy} policy: {error}") from error


Message = dict[str, Any]


class Chat:
    """Renders requests and remembers each episode's last messages, to log only what is new.

    Args:
        config: how prompts are made.
    """

    def __init__(self, config: PromptConfig) -> None:
        if ":" in config.template:
            find_template(config.template, {})  # fails before the first rollout
        self.config = config
        self._last: dict[tuple[str, str], list[Message]] = {}

    def messages(self, request: Request) -> list[Message]:
        """The whole prompt of a request: the turns of its own role, then the current observation."""
        context = request.context
        history = [
            Exchange(turn.observation, turn.admissible, turn.completion, turn.action or turn.completion)
            for turn in request.history
            if turn.role == request.role
        ]
        history.append(Exchange(request.observation, request.info["admissible"]))
        messages = render(
            self.config,
            system_prompt=context.system_prompt,
            task_instruction=context.instruction,
            history=history,
            action_format=context.action_format,
            tools=context.tools,
            templates=context.prompt_templates,
        )
        return with_addition([dict(message) for message in messages], context.addition)

    def delta(self, request: Request, messages: list[Message]) -> tuple[list[Message], int]:
        """What differs from the messages of this role's turn before, and how many of those are kept.

        An episode that was begun elsewhere (a fork) starts with all messages.
        """
        key = (request.context.episode_id, request.role)
        kept = common_prefix(self._last.get(key, []), messages)
        self._last[key] = messages
        return messages[kept:], kept

    def finish(self, episode_id: str) -> None:
        """Forgets an episode."""
        for key in [key for key in self._last if key[0] == episode_id]:
            del self._last[key]


def with_addition(messages: list[Message], text: str) -> list[Message]:
    """The messages with a text behind the system message, or as one where there is none."""
    if not text:
        return messages
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def common_prefix(old: list[Message], new: list[Message]) -> int:
    """How many leading messages are equal."""
    count = 0
    for before, after in zip(old, new, strict=False):
        if before != after:
            break
        count += 1
    return count


def turn_seed(request: Request, draw: int = 0) -> int:
    """A 31-bit seed of one decision: a function of the episode's policy seed, the turn and the draw alone."""
    text = f"{request.context.seed}|{request.role}|{len(request.history)}|{draw}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1
