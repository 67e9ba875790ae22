"""Ids are found through card files, and a wrong one is answered with the nearest ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

import agentgym
from agentgym import registry
from agentgym.errors import DataError, UsageError
from agentgym.registry import EnvCard, TasksCard, find_env, make_env, make_task_set, read_card, register_env
from tests.worlds import CountEnv


@pytest.fixture(autouse=True)
def _keep_the_registry() -> Iterator[None]:
    tables = (registry._envs, registry._tasks, registry._data, gymnasium.registry)
    kept = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, kept, strict=True):
        table.clear()
        table.update(content)


def _card(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "card.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_card_of_the_distribution_is_complete_and_its_entry_points_exist() -> None:
    assert any(card.id == "agentgym/ALFWorld-v0" for card in registry.env_cards())
    for card in registry.env_cards():
        cls = registry.env_class(card.id)
        assert cls.version == int(card.id.rsplit("-v", 1)[1])
        assert card.id in gymnasium.registry
    for tasks in registry.task_cards():
        assert callable(registry.load_entry_point(tasks.entry_point))
    for data in registry.data_cards():
        assert callable(registry.load_entry_point(data.entry_point))
        assert data.licence


@pytest.mark.parametrize("name", ["agentgym/ALFWorld-v0", "agentgym/ALFWorld", "alfworld"])
def test_an_environment_is_found_by_id_versionless_id_and_family(name: str) -> None:
    assert find_env(name).id == "agentgym/ALFWorld-v0"


def test_a_family_name_means_its_newest_version() -> None:
    for version in (2, 10, 9):
        register_env(EnvCard(id=f"test/Aged-v{version}", family="aged", entry_point="tests.worlds:CountEnv"))
    assert find_env("aged").id == "test/Aged-v10"
    assert find_env("test/Aged").id == "test/Aged-v10"
    assert find_env("test/Aged-v9").id == "test/Aged-v9"


@pytest.mark.parametrize("name", ["alfwrld", "agentgym/AlfWorld-v0", "agentgym/ALFWorld-v1"])
def test_a_near_miss_is_answered_with_the_nearest_ids(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown environment .* Did you mean .*(alfworld|ALFWorld-v0)"):
        find_env(name)


def test_an_unknown_option_is_answered_with_the_nearest_options() -> None:
    with pytest.raises(UsageError, match=r"unknown option of count 'max_turn'. Did you mean 'max_turns'"):
        make_env("test/Count-v0", max_turn=3)
    with pytest.raises(UsageError, match=r"Did you mean 'count/tasks'"):
        make_task_set("count/task")


def test_equal_calls_for_a_task_set_share_one_object() -> None:
    assert make_task_set("count/tasks:9") is make_task_set("count/tasks:9")
    assert make_task_set("count/tasks:9") is not make_task_set("count/tasks:8")


def test_an_id_cannot_be_taken_twice_but_the_same_card_may_be_read_again() -> None:
    card = EnvCard(id="test/Twice-v0", family="twice", entry_point="tests.worlds:CountEnv")
    register_env(card)
    register_env(card)
    with pytest.raises(UsageError, match=r"already registered by tests.worlds:CountEnv; rename one of them"):
        register_env(EnvCard(id="test/Twice-v0", family="twice", entry_point="tests.worlds:FaultyEnv"))
    registry.register_tasks(TasksCard(name="twice/tasks", entry_point="tests.worlds:counter_tasks"))
    with pytest.raises(UsageError, match="rename one of them"):
        registry.register_tasks(TasksCard(name="twice/tasks", entry_point="tests.worlds:faulty_tasks"))


@pytest.mark.parametrize("name", ["Lock-v0", "a/Lock", "a/b/Lock-v0", "a/Lock-v", ""])
def test_a_malformed_id_is_refused_with_its_form(name: str) -> None:
    with pytest.raises(UsageError, match="must look like namespace/Name-v0"):
        register_env(EnvCard(id=name, family="lock", entry_point="a:b"))


@pytest.mark.parametrize(
    "text",
    [
        "[[env]\n",
        '[[env]]\nid = "a/B-v0"\n',
        '[[env]]\nid = 3\nfamily = "x"\nentry_point = "a:b"\n',
        '[[envs]]\nid = "a/B-v0"\n',
        "env = 3\n",
    ],
)
def test_a_malformed_card_is_refused_with_its_path_and_where_to_look(tmp_path: Path, text: str) -> None:
    path = _card(tmp_path, text)
    with pytest.raises(DataError, match=r"not a usable card .*docs/guides/add-an-environment.md") as caught:
        read_card(path)
    assert caught.value.path == str(path)
    with pytest.raises(DataError, match="not a usable card"):
        read_card(tmp_path / "absent.toml")


def test_a_card_registers_with_gymnasium_and_is_imported_at_the_first_use(tmp_path: Path) -> None:
    read_card(_card(tmp_path, '[[env]]\nid = "test/Card-v3"\nfamily = "card"\nentry_point = "tests.worlds:CountEnv"\n'))
    env = gymnasium.make("test/Card-v3", max_turns=4)
    assert isinstance(env.unwrapped, CountEnv)
    assert env.unwrapped.max_turns == 4
    read_card(_card(tmp_path, '[[env]]\nid = "test/Late-v0"\nfamily = "late"\nentry_point = "no_such_module:Env"\n'))
    with pytest.raises(UsageError, match=r"cannot import no_such_module .* is it installed\?"):
        make_env("late")


@pytest.mark.parametrize(
    ("entry_point", "message"),
    [
        ("tests.worlds", "must look like 'package.module:Name'"),
        (":x", "must look like"),
        ("tests.worlds:CuontEnv", "has no 'CuontEnv'"),
        ("tests.nowhere:Env", "cannot import tests.nowhere"),
    ],
)
def test_a_wrong_entry_point_is_refused_with_what_is_wrong(entry_point: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        registry.load_entry_point(entry_point)


def test_plugins_are_read_once_a_process() -> None:
    registry.env_cards()
    assert agentgym.register_plugins() == []
