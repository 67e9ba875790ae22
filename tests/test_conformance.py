"""Every registered environment keeps Gymnasium's contract and ours."""

from __future__ import annotations

import warnings

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from agentgym.checker import check_agent_env, check_env_id
from agentgym.registry import EnvCard, env_cards, env_class
from tests.shared_data import need

CARDS = [card for card in env_cards() if not card.id.startswith("test/")]


@pytest.fixture(params=CARDS, ids=lambda card: card.id)
def card(request: pytest.FixtureRequest) -> EnvCard:
    found: EnvCard = request.param
    if found.extra:
        need(found.extra)
    return found


def test_there_is_something_to_check() -> None:
    assert CARDS


def test_gymnasiums_check_passes(card: EnvCard) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(gymnasium.make(card.id, **card.smoke).unwrapped, skip_render_check=True)


def test_our_check_passes(card: EnvCard) -> None:
    report = check_env_id(card.id)
    assert report.findings == []
    unchecked = [name for name, why in report.skipped if "does not declare" not in why]
    assert unchecked == []


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_our_check_passes_with_other_seeds_and_longer_plays(card: EnvCard, seed: int) -> None:
    check_agent_env(card.id, seed=1000 * seed, turns=30)


def test_an_episode_of_the_expert_ends_with_its_task_solved(card: EnvCard) -> None:
    if "expert" not in env_class(card.id).capabilities:
        pytest.skip(f"{card.id} declares no expert")
    env = gymnasium.make(card.id, **card.smoke)
    solved = 0
    for seed in range(10):
        _, info = env.reset(seed=seed)
        ended = False
        while not ended:
            *_, terminated, truncated, info = env.step(env.unwrapped.expert())  # type: ignore[attr-defined]
            ended = terminated or truncated
        solved += info["success"] == 1
    env.close()
    assert solved >= 8


def test_the_text_of_an_environment_can_be_rendered(card: EnvCard) -> None:
    env = gymnasium.make(card.id, render_mode="ansi", **card.smoke)
    observation, _ = env.reset(seed=0)
    assert env.render() == observation
    env.close()
