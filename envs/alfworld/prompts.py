"""Prompt with the slots of verl-agent's ALFWorld prompt (langfengQ/verl-agent, Apache-2.0), in words of our own."""

from __future__ import annotations

from agentgym.prompts import Message, PromptConfig, View, action_taken, past_exchanges

_FIRST = """\
You are a skilled agent in the household world ALFRED.
This is what you observe: {observation}
"""

_LATER = """\
You are a skilled agent in the household world ALFRED. Your task: {task}
So far you have taken {steps} step(s). Here are your last {shown} observations with the actions you took: {history}
This is step {current}, and you observe: {observation}
"""

_ADMISSIBLE = """\
These actions are admissible now: [
{admissible}
].
"""

_TURN = """
It is your turn to act. Reason step by step about where you are, inside <think> </think> tags. When you have finished
reasoning, choose one admissible action and present it inside <action> </action> tags."""


def verl_agent(view: View, config: PromptConfig) -> list[Message]:
    """One user message a turn, no system message; the last `window` (default 2) pairs of observation and action.

    The options `system` and `instructions` have no place in it; `admissible=False` leaves out the list of actions.
    """
    current = view.history[-1]
    taken = len(view.history) - 1
    shown = past_exchanges(view, 2 if config.window is None else config.window)
    if shown:
        text = _LATER.format(
            task=view.instruction,
            steps=taken,
            shown=len(shown),
            history="\n".join(
                f"[Observation {number}: '{exchange.observation}', Action {number}: '{action_taken(exchange)}']"
                for number, exchange in enumerate(shown, taken - len(shown) + 1)
            ),
            current=taken + 1,
            observation=current.observation,
        )
    else:
        text = _FIRST.format(observation=current.observation)
    if config.admissible and current.admissible is not None:
        commands = (f"'{command}'" for command in current.admissible if command != "help")
        text += _ADMISSIBLE.format(admissible="\n ".join(commands))
    return [{"role": "user", "content": text + _TURN}]
