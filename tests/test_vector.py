"""Gymnasium's vector environments: any text arrives intact, and the last observation and info are not lost."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv

import agentgym
from agentgym.env import INFO_KEYS, Outcome
from agentgym.registry import EnvCard, register_env
from agentgym.task import Task
from tests.worlds import CountEnv

TEXTS = (
    "\U0001f642\U0001f469\u200d\U0001f680 astral",
    "e\u0301a\u0308\u0323 combining",
    "NUL \x00 inside\x00",
    "\u05e9\u05dc\u05d5\u05dd \u202eRTL\u202c",
    "",
    "\ufeff\uffff\U0010ffff edges",
    "\u4e2d" * 4000,
    "a\r\nb\tc\x1b[0m",
)


class EchoEnv(CountEnv):
    """Shows the texts above in turn; "bad" shows a lone surrogate."""

    family: ClassVar[str] = "echo"

    def _start(self, task: Task) -> Outcome:
        return super()._start(task)._replace(observation=TEXTS[0])

    def _act(self, action: str) -> Outcome:
        if action == "bad":
            return Outcome("broken \ud83d")
        outcome = super()._act(action)
        return outcome._replace(observation=TEXTS[(self._turn + 1) % len(TEXTS)])


register_env(EnvCard(id="test/Echo-v0", family="echo", entry_point="tests.test_vector:EchoEnv"))

MODES = [{}, *({"autoreset_mode": mode} for mode in AutoresetMode)]
IDS = [("test/Count-v0", {}), ("agentgym/ALFWorld-v0", {"tasks": "alfworld/generated:s"})]


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _make(name: str, kind: str, size: int = 8, *, vector: dict[str, Any] | None = None, **kwargs: Any) -> VectorEnv:
    return gymnasium.make_vec(name, size, vectorization_mode=kind, vector_kwargs=vector or {}, **kwargs)


@pytest.mark.parametrize(("name", "options"), IDS, ids=["count", "alfworld"])
def test_eight_environments_with_gymnasiums_defaults_equal_eight_single_ones(
    name: str, options: dict[str, Any], kind: str
) -> None:
    vector = _make(name, kind, **options)
    singles = [gymnasium.make(name, **options) for _ in range(8)]
    observations, infos = vector.reset(seed=5)
    alone = [env.reset(seed=5 + i) for i, env in enumerate(singles)]
    assert list(observations) == [observation for observation, _ in alone]
    actions = ["up"] * 8 if name.startswith("test") else [info["admissible"][0] for _, info in alone]
    assert list(infos["task_id"]) == [info["task_id"] for _, info in alone]
    for _ in range(2):
        observations, rewards, terminated, truncated, infos = vector.step(tuple(actions))
        steps = [env.step(action) for env, action in zip(singles, actions, strict=True)]
        assert list(observations) == [step[0] for step in steps]
        assert rewards == pytest.approx([step[1] for step in steps])
        assert not terminated.any()
        assert not truncated.any()
        for key in ("turn", "valid", "success", "state_key", "task_id"):
            assert list(infos[key]) == [step[4][key] for step in steps], key
    vector.close()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: str(mode.get("autoreset_mode", "default")))
def test_arbitrary_unicode_arrives_intact(mode: dict[str, Any], kind: str) -> None:
    vector = _make("test/Echo-v0", kind, 3, vector=mode)
    observations, _ = vector.reset(seed=0)
    seen = [observations]
    for _ in range(len(TEXTS) - 1):
        seen.append(vector.step(("nonsense",) * 3)[0])
    assert [list(each) for each in seen] == [[text] * 3 for text in TEXTS]
    vector.close()


@pytest.mark.parametrize(("name", "options"), IDS, ids=["count", "alfworld"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: str(mode.get("autoreset_mode", "default")))
def test_the_last_observation_and_info_are_not_lost(
    mode: dict[str, Any], kind: str, name: str, options: dict[str, Any]
) -> None:
    vector = _make(name, kind, 2, vector=mode, max_turns=2, **options)
    single = gymnasium.make(name, max_turns=2, **options)
    expected = []
    for i in range(2):
        single.reset(seed=i)
        single.step("nonsense")
        expected.append(single.step("nonsense"))
    vector.reset(seed=[0, 1])
    vector.step(("nonsense",) * 2)
    observations, _, _, truncated, infos = vector.step(("nonsense",) * 2)
    assert truncated.all()
    if mode.get("autoreset_mode") is AutoresetMode.SAME_STEP:
        last, last_infos = infos["final_obs"], infos["final_info"]
        assert list(infos["turn"]) == [0, 0]
    else:
        last, last_infos = observations, infos
    assert list(last) == [step[0] for step in expected]
    assert set(INFO_KEYS) <= set(last_infos)
    for key in ("task_id", "turn", "success", "valid", "state_key"):
        assert list(last_infos[key]) == [step[4][key] for step in expected], key
    for i, (*_, info) in enumerate(expected):
        admissible = last_infos["admissible"][i]
        assert (None if admissible is None else tuple(admissible)) == info["admissible"]
    if mode.get("autoreset_mode") is AutoresetMode.DISABLED:
        observations, infos = vector.reset(options={"reset_mask": np.array([True, False])})
        assert infos["turn"][0] == 0
    elif mode.get("autoreset_mode") is not AutoresetMode.SAME_STEP:
        *_, truncated, infos = vector.step(("nonsense",) * 2)
        assert list(infos["turn"]) == [0, 0]
        assert not truncated.any()
    vector.close()


def test_observations_handed_out_do_not_change_later_and_a_view_does(kind: str) -> None:
    vector = _make("test/Echo-v0", kind, 2)
    first, _ = vector.reset(seed=0)
    vector.step(("up", "up"))
    assert first == (TEXTS[0], TEXTS[0])
    vector.close()
    view = _make("test/Echo-v0", "async", 2, vector={"copy": False})
    seen, _ = view.reset(seed=0)
    assert (seen[-1], seen[0:1], len(seen)) == (TEXTS[0], (TEXTS[0],), 2)
    view.step(("up", "up"))
    assert seen == (TEXTS[1], TEXTS[1])
    with pytest.raises(IndexError):
        seen[2]
    view.close()


def test_a_lone_surrogate_is_refused_where_it_cannot_travel() -> None:
    vector = _make("test/Echo-v0", "async", 2)
    vector.reset(seed=0)
    with pytest.raises(ValueError, match=r"lone surrogate at index 7.*errors='replace'"):
        vector.step(("ok", "bad"))
    vector.close(terminate=True)


def test_a_vector_closes_twice_without_complaint(kind: str) -> None:
    vector = _make("test/Count-v0", kind, 2)
    vector.reset(seed=0)
    vector.close()
    vector.close()
    assert agentgym.__name__ == "agentgym"
