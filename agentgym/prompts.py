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
from agentgym.env import cut_text
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
        max_observation: greatest length of each observation in characters, the rest being cut from its middle; None
            for no cut beyond the environment's own.
    """

    template: str = "chat"
    window: int | None = None
    system: str | None = None
    admissible: bool = True
    instructions: bool = True
    max_observation: int | None = None


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
        UsageError: for an unknown template, a window below 0, a length below 1, or a history without an open turn.
    """
    if not history or history[-1].completion is not None:
        raise UsageError("the history must end with the exchange to be decided: one whose completion is None")
    if config.max_observation is not None:
        if config.max_observation < 1:
            raise UsageError(f"max_observation must be 1 or more characters, not {config.max_observation}")
        limit = config.max_observation
        history = [exchange._replace(observation=cut_text(exchange.observation, limit)) for exchange in history]
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


def past_exchanges(view: View, window: int) -> Sequence[Exchange]:
    """The last `window` exchanges before the one to be decided."""
    past = view.history[:-1]
    return past[max(0, len(past) - window) :]


def action_taken(exchange: Exchange) -> str:
    """The action as it was read, or what the policy answered where nothing else was read from it."""
    return exchange.action if exchange.action is not None else exchange.completion or ""


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
    history = view.history if config.window is None else [*past_exchanges(view, config.window), view.history[-1]]
    messages = [{"role": "system", "content": view.system}] if view.system else []
    for index, exchange in enumerate(history):
        content = with_admissible(exchange, config)
        if index == 0 and len(history) < len(view.history) and view.instruction:
            content = f"Task: {view.instruction}\n\n{content}"  # the first observation, which names it, is cut off
        messages.append({"role": "user", "content": content})
        if exchange.completion is not None:
            messages.append({"role": "assistant", "content": exchange.completion})
    return messages


def single(view: View, config: PromptConfig) -> list[Message]:
    """One user message a turn: the task, the last exchanges (default 3) and the current observation."""
    shown = past_exchanges(view, 3 if config.window is None else config.window)
    taken = len(view.history) - 1
    parts = [f"Task: {view.instruction}"] if view.instruction else []
    if shown:
        parts.append(f"Steps taken so far: {taken}. The last {len(shown)}:")
        for number, exchange in enumerate(shown, taken - len(shown) + 1):
            parts.append(f"[{number}] You saw: {exchange.observation}\n    You did: {action_taken(exchange)}")
    parts.append(f"Now you see: {with_admissible(view.history[-1], config)}")
    messages = [{"role": "system", "content": view.system}] if view.system else []
    return [*messages, {"role": "user", "content": "\n".join(parts)}]


TEMPLATES: Mapping[str, Template] = {"chat": chat, "single": single}
