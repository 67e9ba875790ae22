"""Child process that plays ALFWorld games with the reference packages. Run as a script, never imported.

It speaks JSON, one object a line: requests on standard input, one answer each on standard output. It ends when
standard input ends, even while the planner's C++ code is running. Nothing of agentgym is imported here.
"""

from __future__ import annotations

import json
import os
import queue
import random
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any


def _requests() -> Iterator[dict[str, Any]]:
    """Requests as they come; a thread reads them, so that the end of the parent is noticed at any time."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            waiting.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield waiting.get()


class _Player:
    """The one environment object of this process: the reference never frees the library that each one maps."""

    def __init__(self, shuffle: bool, expert: bool, plan: bool) -> None:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredExpert, AlfredInfos
        from textworld.envs import PddlEnv

        class TolerantExpert(AlfredExpert):  # type: ignore[misc]  # upstream is untyped
            """The hand-coded expert, whose exceptions do not end the episode."""

            def _gather_infos(self) -> None:
                try:
                    super()._gather_infos()
                except Exception as error:
                    self.state["extra.expert_plan"] = [None]
                    self.state["extra.expert_error"] = f"{type(error).__name__}: {error}"

        wrappers = [lambda env: AlfredDemangler(env, shuffle=shuffle), AlfredInfos]
        if expert:
            wrappers.append(TolerantExpert)
        infos = textworld.EnvInfos(won=True, admissible_commands=True, policy_commands=plan)
        self._env = PddlEnv(infos)
        for wrapper in wrappers:
            self._env = wrapper(self._env)

    def load(self, game_file: str) -> None:
        self._env.load(game_file)

    def reset(self) -> dict[str, Any]:
        return self._answer(self._env.reset())

    def step(self, command: str) -> dict[str, Any]:
        return self._answer(self._env.step(command)[0])

    @staticmethod
    def _answer(state: Any) -> dict[str, Any]:
        plan = state.get("extra.expert_plan") or [None]
        return {
            "feedback": state["feedback"],
            "admissible": state["admissible_commands"],
            "won": state["won"],
            "expert": plan[0],
            "expert_error": state.get("extra.expert_error"),
            "plan": state.get("policy_commands"),
        }


def main() -> None:
    """Answers requests until standard input ends."""
    answers: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the reference prints, and swaps sys.stdout while it translates
    player: _Player | None = None
    for request in _requests():
        try:
            kind = request["kind"]
            answer: dict[str, Any] = {}
            if kind == "start":
                random.seed(request["seed"])
                if request["memory"]:
                    import resource

                    resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
                player = _Player(request["shuffle"], request["expert"], request["plan"])
            elif player is None:
                raise RuntimeError("the first request must be a start")
            elif kind == "load":
                player.load(request["file"])
            else:
                answer = player.reset() if kind == "reset" else player.step(request["command"])
        except BaseException as error:  # the translator ends with SystemExit on files it cannot read
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
