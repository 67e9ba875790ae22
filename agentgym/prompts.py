"""From the history of an episode to chat messages.

A template is a function `(view, config) -> messages`. "chat" keeps the whole history as a conversation whose
messages only ever grow; "single" puts a window of the history into one user message; a family may bring its own
(`AgentEnv.prompt_templates`, or "module:function").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from agentgym.actions import ActionFormat, ToolSpec
from agentgym.errors import UsageError, choices
from agentgym.registry import load_entry_point

Message = dict[str, str]


class Exchange(NamedTuple):
    """One turn as a prompt sees it.

    Attributes:
        observation: what was seen.
        admissible: the admissible commands then, or None.
        completion: what the policy answered; None for the turn to be decided.
        action: the action as it was read from the completion.
    """

    observation: str
    admissible: Sequence[str] | None = None
    completion: str | None = None
    action: str | None = None


class PromptConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts are made.

    Attributes:
        template: "chat", "single", a name of the family's templates, or "module:function".
        window: number of past exchanges shown; None for the template's default ("chat": all).
        system: system prompt; None for the environment's, "" for none.
        admissible: list the admissible commands with each observation.
        instructions: tell how to answer in the environment's action format.
    """

    template: str = "chat"
    window: int | None = None
    system: str | None = None
    admissible: bool = True
    instructions: bool = True


class View(NamedTuple):
    """What a template may use.

    Attributes:
        system: system prompt, with instructions where they are wanted.
        instruction: the task.
        history: all exchanges; the last one is to be decided.
        action_format, tools: of the environment.
    """

    system: str
    instruction: str
    history: Sequence[Exchange]
    action_format: ActionFormat
    tools: Sequence[ToolSpec]


Template = Callable[[View, PromptConfig], list[Message]]


def render(
    config: PromptConfig,
    *,
    system_prompt: str,
    task_instruction: str,
    history: Sequence[Exchange],
    action_format: ActionFormat,
    tools: Sequence[ToolSpec] = (),
    templates: Mapping[str, str] | None = None,
) -> list[Message]:
    """The messages of a decision.

    Args:
        config: how.
        system_prompt: the environment's system prompt.
        task_instruction: the task.
        history: all exchanges, the last with completion None.
        action_format: the environment's action format.
        tools: its tools.
        templates: the family's own templates: name -> "module:function".

    Raises:
        UsageError: for an unknown template or a window below 0.
    """
    if config.window is not None and config.window < 0:
        raise UsageError(f"window must be 0 or more past exchanges, not {config.window}")
    system = system_prompt if config.system is None else config.system
    if config.instructions:
        system = "\n\n".join(part for part in (system, action_format.instructions(tools)) if part)
    view = View(system, task_instruction, history, action_format, tools)
    return find_template(config.template, templates or {})(view, config)


def find_template(name: str, templates: Mapping[str, str]) -> Template:
    """The template of a name.

    Raises:
        UsageError: if there is none.
    """
    template: Template
    if name in TEMPLATES:
        return TEMPLATES[name]
    if name in templates:
        template = load_entry_point(templates[name])
    elif ":" in name:
        template = load_entry_point(name)
    else:
        raise choices("prompt template", name, [*TEMPLATES, *templates])
    return template


def with_admissible(exchange: Exchange, config: PromptConfig) -> str:
    """The observation, with the admissible commands where they are wanted and known."""
    if not config.admissible or not exchange.admissible:
        return exchange.observation
    return exchange.observation + "\n\nAdmissible actions:\n" + "\n".join(exchange.admissible)


def chat(view: View, config: PromptConfig) -> list[Message]:
    """System message, then user and assistant in turns.

    Each observation keeps its own list of admissible actions, so that with the whole history the messages of one
    turn begin with all messages of the turn before, which lets a model's cache be reused.
    """
    history = view.history if config.window is None else view.history[-(config.window + 1) :]
    messages = [{"role": "system", "content": view.system}] if view.system else []
    for index, exchange in enumerate(history):
        content = with_admissible(exchange, config)
        if index == 0 and history is not view.history and len(history) < len(view.history) and view.instruction:
            content = f"Task: {view.instruction}\n\n{content}"  # the first observation, which names it, is cut off
        messages.append({"role": "user", "content": content})
        if exchange.completion is not None:
            messages.append({"role": "assistant", "content": exchange.completion})
    return messages


def single(view: View, config: PromptConfig) -> list[Message]:
    """One user message a turn: the task, the last exchanges (default 3) and the current observation."""
    window = 3 if config.window is None else config.window
    current, past = view.history[-1], view.history[:-1]
    shown = past[len(past) - min(window, len(past)) :]
    parts = [f"Task: {view.instruction}"] if view.instruction else []
    if shown:
        parts.append(f"You have taken {len(past)} steps. The last {len(shown)}:")
        for number, exchange in enumerate(shown, len(past) - len(shown) + 1):
            parts.append(f"[{number}] You saw: {exchange.observation}\n    You did: {exchange.action}")
    parts.append(f"Now you see: {with_admissible(current, config)}")
    messages = [{"role": "system", "content": view.system}] if view.system else []
    return [*messages, {"role": "user", "content": "\n".join(parts)}]


TEMPLATES: Mapping[str, Template] = {"chat": chat, "single": single}
