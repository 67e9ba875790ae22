"""Prompt with the slots of verl-agent's ALFWorld prompt (langfengQ/verl-agent, Apache-2.0), in words of our own."""

from __future__ import annotations

from agentgym.prompts import Message, PromptConfig, View

_FIRST = """\
You are a skilled agent in the household world ALFRED.
This is what you observe: {observation}
These actions are admissible now: [
{admissible}
].

It is your turn to act. Reason step by step about where you are, inside <think> </think> tags. When you have finished
reasoning, choose one admissible action and present it inside <action> </action> tags."""

_LATER = """\
You are a skilled agent in the household world ALFRED. Your task: {task}
So far you have taken {steps} step(s). Here are your last {shown} observations with the actions you took: {history}
This is step {current}, and you observe: {observation}
These actions are admissible now: [
{admissible}
].

It is your turn to act. Reason step by step about where you are, inside <think> </think> tags. When you have finished
reasoning, choose one admissible action and present it inside <action> </action> tags."""


def verl_agent(view: View, config: PromptConfig) -> list[Message]:
    """One user message a turn, no system message; the last `window` (default 2) pairs of observation and action."""
    window = 2 if config.window is None else config.window
    current, past = view.history[-1], view.history[:-1]
    commands = [command for command in current.admissible or () if command != "help"]
    admissible = "\n ".join(f"'{command}'" for command in commands) if config.admissible else ""
    shown = past[len(past) - min(window, len(past)) :]
    if not past or not shown:
        text = _FIRST.format(observation=current.observation, admissible=admissible)
    else:
        first = len(past) - len(shown) + 1
        history = "\n".join(
            f"[Observation {number}: '{exchange.observation}', Action {number}: '{exchange.action}']"
            for number, exchange in enumerate(shown, first)
        )
        text = _LATER.format(
            task=view.instruction,
            steps=len(past),
            shown=len(shown),
            history=history,
            current=len(past) + 1,
            observation=current.observation,
            admissible=admissible,
        )
    return [{"role": "user", "content": text}]
