"""ReAct and Reflexion: texts in the prompt, lessons after failures."""

from __future__ import annotations

import json
from typing import Any

from agentgym.baselines.core.method import make_method
from agentgym.baselines.methods.react import INSTRUCTIONS
from agentgym.task import Task
from tests.baselines.toy import FakeServices, trajectory

TASKS = [Task(id="egg", family="toy", split="test", instruction="Heat the egg."), Task(id="cup", family="toy")]


def attempt(spec: Any, won: bool) -> Any:
    return trajectory([float(won)], actions=["open fridge"], group=spec.task_id, success=won, number=spec.repeat)


def test_react_asks_for_thoughts_and_shows_examples() -> None:
    method = make_method("react", {"examples": ["> look\nYou see an egg."]})
    (spec, _) = method.plan(TASKS, 0)
    text = method.context(spec)
    assert text.startswith(INSTRUCTIONS)
    assert "You see an egg." in text
    assert not method.trains


def test_reflexion_learns_from_a_failure_and_stops_at_success() -> None:
    method = make_method("reflexion")
    services = FakeServices(answers=["Open the microwave first. Then heat. Then put it back. Then boast."])
    (first,) = method.plan(TASKS[:1], 0)
    assert "earlier attempts" not in method.context(first)
    method.rewards([attempt(first, False)], services)
    (question,) = services.prompts
    assert "Heat the egg." in question[0]["content"]
    assert "Action: open fridge" in question[0]["content"]
    assert method.lessons == {"egg": ["Open the microwave first. Then heat. Then put it back."]}
    # The failed task comes before the one that is drawn, as another episode with the same seed.
    (second,) = method.plan(TASKS[1:], 1)
    assert (second.task_id, second.split, second.seed) == ("egg", "test", first.seed)
    assert second.episode_id != first.episode_id
    assert "Open the microwave first." in method.context(second)
    method.rewards([attempt(second, True)], services)
    assert method.after(1, []) == {"solved_tasks": 1, "given_up_tasks": 0, "open_tasks": 0}
    (third,) = method.plan(TASKS[1:], 2)
    assert third.task_id == "cup"


def test_reflexion_gives_up_and_remembers_few_lessons() -> None:
    method = make_method("reflexion", {"max_trials": 4, "memory_size": 2})
    services = FakeServices(answers=["One.", "Two.", "", "Four."])
    for iteration in range(4):
        (spec,) = method.plan(TASKS[:1], iteration)
        assert spec.repeat == iteration
        method.rewards([attempt(spec, False)], services)
    assert method.lessons == {"egg": ["Two.", "Four."]}
    assert method.after(3, [])["given_up_tasks"] == 1


def test_reflexion_tries_a_task_again_whose_episode_was_lost() -> None:
    method = make_method("reflexion")
    (first,) = method.plan(TASKS[:1], 0)
    method.rewards([], FakeServices())
    (again,) = method.plan(TASKS[1:], 1)
    assert again.episode_id == first.episode_id


def test_reflexion_continues_from_its_state() -> None:
    method = make_method("reflexion")
    (spec,) = method.plan(TASKS[:1], 0)
    method.rewards([attempt(spec, False)], FakeServices(answers=["Look around."]))
    other = make_method("reflexion")
    other.load_state(json.loads(json.dumps(method.state())))
    assert other.plan(TASKS[1:], 1) == method.plan(TASKS[1:], 1)
    assert other.context(spec) == method.context(spec)
    assert other.state() == method.state()
