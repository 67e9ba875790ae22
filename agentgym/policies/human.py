"""A person plays: in the terminal with Tab completion and history, or from piped lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from agentgym.actions import ActionFormat
from agentgym.env import AgentEnv, Info
from agentgym.errors import StepOrderError, UsageError
from agentgym.policies.base import Policy, Reply, Request

HELP = {
    "actions": "list what can be done now",
    "hint": "what the expert would do",
    "undo [n]": "take back the last n actions (default 1)",
    "restart": "begin this task again",
    "help": "this list",
    "quit": "leave (also Ctrl-D)",
}
NOTES = "Tab completes, the arrow keys bring back earlier lines. Begin with ! to send a word of this list as an action."


class Terminal:
    """Prints to the standard output and reads lines: with an editor on a terminal, plainly from a pipe."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.rich = sys.stdin.isatty() and sys.stdout.isatty()
        self._session: Any = None
        if self.rich:
            from prompt_toolkit import PromptSession
            from prompt_toolkit.history import InMemoryHistory

            self._session = PromptSession(history=InMemoryHistory(), complete_while_typing=False)

    def ask(self, commands: Sequence[str]) -> str | None:
        """The next line without its surrounding blanks, or None at the end of the input.

        Args:
            commands: whole lines that Tab completes.
        """
        if self._session is None:
            line = sys.stdin.readline()
            return line.strip() if line else None
        from prompt_toolkit.completion import WordCompleter

        words = [*commands, *(name.partition(" ")[0] for name in HELP)]
        completer = WordCompleter(list(dict.fromkeys(words)), sentence=True, ignore_case=True)
        while True:
            try:
                return str(self._session.prompt("> ", completer=completer)).strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                self.say("(Ctrl-D or quit to leave)", "dim")

    def say(self, text: str, style: str = "") -> None:
        """Prints text as it is: nothing in it is taken for markup."""
        self.console.print(Text(text, style=style if self.rich else ""))

    def show(self, text: str, title: str, subtitle: str = "") -> None:
        """Prints an observation under its title, in a frame on a terminal."""
        if self.rich:
            frame = Panel(Text(text), title=Text(title), subtitle=Text(subtitle), title_align="left")
            self.console.print(frame, soft_wrap=False)
        else:
            self.say(f"-- {title}{f' ({subtitle})' if subtitle else ''}")
            self.say(text)

    def list_actions(self, commands: Sequence[str] | None) -> None:
        """Prints the admissible commands."""
        if commands is None:
            self.say("this environment does not list its actions", "yellow")
        else:
            self.say("\n".join(f"  {command}" for command in commands) or "nothing can be done now")

    def help(self) -> None:
        """Prints the commands of the game itself."""
        self.say("\n".join(f"  {name:10} {meaning}" for name, meaning in HELP.items()))
        self.say(NOTES, "dim")


class _Game:
    """One task being played, with what undo needs."""

    def __init__(self, env: AgentEnv, terminal: Terminal, seed: int | None, task: str | int | None) -> None:
        self.env = env
        self.terminal = terminal
        self.options = {} if task is None else {"task": task}
        self.seed = seed
        self.saved: list[bytes] = []
        self.over = False
        self.info: Info
        self.restart()

    def restart(self) -> None:
        observation, self.info = self.env.reset(seed=self.seed, options=dict(self.options))
        if self.seed is None:
            self.options["task"] = self.info["task_id"]  # a restart must not draw another task
        self.saved.clear()
        self.over = False
        self.terminal.say(f"Task {self.info['task_id']}: {self.env.instruction}", "bold")
        self.show(observation)

    def show(self, observation: str) -> None:
        score = self.info["score"]
        subtitle = "" if score != score else f"score {score:.2f}"
        self.terminal.show(observation, f"turn {self.info['turn']} of {self.env.max_turns}", subtitle)

    def step(self, action: str) -> None:
        if self.over:
            self.terminal.say("The episode is over: undo, restart or quit.", "yellow")
            return
        completion = _render(self.env.action_format, action, self.terminal)
        if completion is None:
            return
        if "snapshot" in self.env.capabilities:
            self.saved.append(self.env.snapshot())
        observation, reward, terminated, truncated, self.info = self.env.step(completion)
        self.over = terminated or truncated
        self.show(observation)
        if reward:
            self.terminal.say(f"reward {reward:+.2f}", "cyan")
        if not self.info["valid"]:
            self.terminal.say("that was no valid action", "yellow")
        if self.over:
            verdict, style = {1: ("Solved", "bold green"), 0: ("Not solved", "bold red")}.get(
                self.info["success"], ("Ended without a verdict", "bold")
            )
            why = "the turns are used up; " if truncated else ""
            self.terminal.say(f"{verdict} after {self.info['turn']} turns ({why}undo, restart or quit).", style)

    def undo(self, argument: str) -> None:
        if "snapshot" not in self.env.capabilities:
            self.terminal.say("this environment cannot take actions back", "yellow")
            return
        if argument and not (argument.isdecimal() and int(argument) > 0):
            self.terminal.say(f"undo takes a number of actions, not {argument!r}", "yellow")
            return
        count = min(int(argument or 1), len(self.saved))
        if count == 0:
            self.terminal.say("there is nothing to take back", "yellow")
            return
        data = self.saved[-count]
        del self.saved[-count:]
        observation, self.info = self.env.restore(data)
        self.over = False
        self.terminal.say(f"took back {count} action{'s' if count > 1 else ''}", "dim")
        self.show(observation)

    def hint(self) -> None:
        advice = None
        if not self.over:
            try:
                advice = self.env.expert()
            except (UsageError, StepOrderError) as error:
                self.terminal.say(str(error), "yellow")
                return
        _say_hint(self.terminal, advice, self.env.action_format, self.env)


def play(env: AgentEnv, *, seed: int | None = None, task: str | int | None = None) -> None:
    """Lets a person play one task, until they quit or the input ends.

    Args:
        env: the environment; it is not closed.
        seed: seed of the episode.
        task: id, or position within the split; None draws one.

    Raises:
        UsageError: for an unknown task.
    """
    terminal = Terminal()
    terminal.say(f"{env.family}: type an action, or help.", "dim")
    game = _Game(env, terminal, seed, task)
    while True:
        admissible = None if game.over else game.info["admissible"]
        line = terminal.ask(admissible or ())
        if line is None or line == "quit":
            return
        word, _, rest = line.partition(" ")
        if line == "actions":
            terminal.list_actions(() if game.over else admissible)
        elif line == "hint":
            game.hint()
        elif line == "help":
            terminal.help()
        elif line == "restart":
            game.restart()
        elif word == "undo":
            game.undo(rest.strip())
        elif line:
            game.step(line.removeprefix("!"))


def _render(action_format: ActionFormat, action: str, terminal: Terminal) -> str | None:
    """The action in the environment's format, or None after saying what is wrong with it."""
    try:
        return action_format.render(action)
    except UsageError as error:
        terminal.say(str(error), "yellow")
        return None


def _say_hint(terminal: Terminal, advice: str | None, action_format: ActionFormat, source: Any) -> None:
    if advice is None:
        terminal.say("there is no hint here", "yellow")
    else:
        terminal.say(f"hint: {action_format.parse(advice, source.tools).action or advice}", "green")


class HumanPolicy(Policy):
    """Asks a person for each decision; what they quit stays to be continued with --resume."""

    name = "human"

    def __init__(self, *, hints: bool = False) -> None:
        self.hints = hints
        if hints:
            self.needs = frozenset({"expert"})
        self._terminal: Terminal | None = None

    def act(self, requests: Sequence[Request]) -> list[Reply]:
        """Asks about one request after the other.

        Raises:
            UsageError: if the person quits or the input ends, which ends the run.
        """
        if self._terminal is None:
            self._terminal = Terminal()
        return [Reply(text=self._ask(request, self._terminal)) for request in requests]

    def submit(self, requests: Sequence[Request]) -> Sequence[Reply]:
        """As `act`; quitting concerns the whole run and is raised."""
        return self.act(requests)

    def _ask(self, request: Request, terminal: Terminal) -> str:
        context, info = request.context, request.info
        if info["turn"] == 0:
            terminal.say(f"Task {context.task.id}: {context.instruction}", "bold")
        terminal.show(request.observation, f"{context.episode_id}, turn {info['turn']}")
        while True:
            line = terminal.ask(info["admissible"] or ())
            if line is None or line == "quit":
                raise UsageError("the person has left; finished episodes are kept, continue with --resume")
            if line == "actions":
                terminal.list_actions(info["admissible"])
            elif line == "hint":
                _say_hint(terminal, request.hint, context.action_format, context)
            elif line == "help":
                terminal.help()
            elif line in ("undo", "restart"):
                terminal.say("an evaluation takes nothing back", "yellow")
            elif line:
                completion = _render(context.action_format, line.removeprefix("!"), terminal)
                if completion is not None:
                    return completion

    def describe(self) -> dict[str, Any]:
        """Name, and whether hints could be asked for."""
        return {"name": self.name, "hints": self.hints}


def make(argument: str | None = None, *, hints: bool = False) -> Policy:
    """Makes the policy.

    Args:
        argument: must be None.
        hints: let the person ask for the expert's action; the log then marks every turn as hinted.
    """
    if argument is not None:
        raise UsageError("the human policy takes no argument")
    return HumanPolicy(hints=hints)
