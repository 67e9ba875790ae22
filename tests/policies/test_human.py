"""A person at the terminal: piped lines, and a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from agentgym.errors import UsageError
from agentgym.policies.base import make_policy
from agentgym.policies.human import play
from agentgym.rollout import EpisodeSpec, rollout
from tests.worlds import CountEnv


def played(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *lines: str, **options: str) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    env = CountEnv(**options)
    play(env, seed=3, task="count/0001")
    return capsys.readouterr().out


def test_a_task_is_solved_and_the_input_may_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = played(monkeypatch, capsys, "up", "up", "up")
    assert "Task count/0001: Say 1." in out
    assert "count is 3" in out
    assert "Solved after 3 turns" in out


def test_the_turn_limit_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = played(monkeypatch, capsys, *["down"] * 11)
    assert "Not solved after 10 turns (the turns are used up" in out
    assert "The episode is over: undo, restart or quit." in out


def test_undo_goes_back_several_levels_and_past_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = played(monkeypatch, capsys, "undo", "up", "up", "up", "undo", "undo 2", "up", "undo 99", "undo x", "quit")
    assert "there is nothing to take back" in out
    assert "took back 1 action\n" in out
    assert "took back 2 actions" in out
    assert "undo takes a number of actions, not 'x'" in out
    noises = [line for line in out.splitlines() if line.startswith("count is")]
    start, first = noises[0], noises[1]
    assert noises[4].startswith("count is 2")
    assert noises[5] == start
    assert noises[6] == first  # the generator went back too
    assert noises[7] == start


def test_restart_begins_the_same_episode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = played(monkeypatch, capsys, "up", "restart", "up", "quit")
    noises = [line for line in out.splitlines() if line.startswith("count is")]
    assert noises[:2] == noises[2:]


def test_hint_actions_and_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = played(monkeypatch, capsys, "hint", "actions", "help", "!help", "", "quit", "up")
    assert "hint: up" in out
    assert "  down\n  up" in out
    assert "take back the last n actions" in out
    assert "I know only up and down" in out  # the escaped word reached the environment
    assert "that was no valid action" in out
    assert "count is 1" not in out


def test_actions_are_typed_plainly_whatever_the_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = played(monkeypatch, capsys, "up", "bad </action>", "up", "up", action_format="think-action")
    assert "Solved after 3 turns" in out
    assert "contains </action>" in out


def test_markup_in_an_action_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = played(monkeypatch, capsys, "undo [red]no[/blue]")
    assert "[red]no[/blue]" in out


def test_the_human_policy_asks_in_an_evaluation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hint\nactions\nhelp\nundo\n\nup\nup\nup\n"))
    policy = make_policy("human", hints=True)
    [episode] = rollout([EpisodeSpec(task_id="count/0000")], "test/Count-v0", policy)
    assert episode.outcome == "success"
    assert all(turn.hinted for turn in episode.turns)
    out = capsys.readouterr().out
    assert "hint: up" in out
    assert "an evaluation takes nothing back" in out


@pytest.mark.parametrize("text", ["up\n", "up\nquit\nup\nup\n"])
def test_leaving_an_evaluation_ends_the_run(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with pytest.raises(UsageError, match="--resume"):
        list(rollout([EpisodeSpec(task_id="count/0000")], "test/Count-v0", make_policy("human")))


def test_a_terminal_completes_with_tab_and_remembers_lines() -> None:
    code = (
        "from tests.worlds import CountEnv; from agentgym.policies.human import play; play(CountEnv(), seed=3, task=0)"
    )
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    seen, prompt = "", "\x1b[?2004h"  # the editor switches bracketed paste on when it asks

    def wait_for(text: str, start: int) -> None:
        nonlocal seen
        end = time.monotonic() + 15
        while text not in seen[start:]:
            assert time.monotonic() < end, f"no {text!r} in {seen[start:]!r}"
            if select.select([master], [], [], 0.2)[0]:
                seen += os.read(master, 65536).decode(errors="replace")

    try:
        wait_for(prompt, 0)
        for keys, answer in ((b"dow\t", "count is -1"), (b"\x1b[A", "count is -2")):
            start = len(seen)
            os.write(master, keys)
            wait_for("down", start)
            os.write(master, b"\r")
            wait_for(answer, start)
            wait_for(prompt, seen.rindex(answer))
        os.write(master, b"\x04")
        while True:  # the terminal closes when the game has ended
            try:
                if not os.read(master, 65536):
                    break
            except OSError:
                break
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
