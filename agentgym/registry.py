"""Ids of environments and task sets, found through card files: no family is named here.

A family is a folder with a `card.toml`. Built-in ones lie in `agentgym/envs/*` and `agentgym/tasks/*`; a third-party
distribution names its own package in the entry-point group "agentgym.families", and the card beside that package's
`__init__.py` is read without importing it.

    [[env]]                                   [[tasks]]
    id = "agentgym/ALFWorld-v0"               name = "alfworld/generated"
    family = "alfworld"                       entry_point = "agentgym.tasks.alfworld.sets:generated"
    title = "ALFWorld"                        title = "Generated household games"
    entry_point = "agentgym.envs.alfworld.env:ALFWorldEnv"
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import tomllib
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import msgspec

from agentgym.errors import DataError, UsageError, choices

if TYPE_CHECKING:
    from agentgym.env import AgentEnv
    from agentgym.task import TaskSet

PLUGIN_GROUP = "agentgym.families"


class EnvCard(msgspec.Struct, frozen=True, kw_only=True):
    """One registered environment.

    Attributes:
        id: Gymnasium id, ending in -vN.
        family: short name, as in `--env alfworld`.
        title: name for tables and pages.
        entry_point: "module:Class", imported at the first use.
        summary: one line for `agentgym list`.
        extra: extra of the distribution that it needs, or "".
        smoke: options with which the conformance tests make it.
    """

    id: str
    family: str
    entry_point: str
    title: str = ""
    summary: str = ""
    extra: str = ""
    smoke: dict[str, Any] = {}


class TasksCard(msgspec.Struct, frozen=True, kw_only=True):
    """One registered task set; `entry_point` names a function `(variant: str, **options) -> TaskSet`."""

    name: str
    entry_point: str
    title: str = ""
    licence: str = ""
    offline: bool = True


class DataCard(msgspec.Struct, frozen=True, kw_only=True):
    """Official data that `agentgym data fetch NAME` brings.

    `entry_point` names a function `(target: Path, *, source_dir: Path | None, progress) -> str`, see
    `agentgym.cli.data`.
    """

    name: str
    entry_point: str
    title: str = ""
    licence: str = ""
    size: str = ""


class _Card(msgspec.Struct, forbid_unknown_fields=True):
    env: list[EnvCard] = []
    tasks: list[TasksCard] = []
    data: list[DataCard] = []


_envs: dict[str, EnvCard] = {}
_tasks: dict[str, TasksCard] = {}
_data: dict[str, DataCard] = {}
_plugins_read = False


def read_card(path: Path) -> None:
    """Registers everything that a card file names.

    Raises:
        DataError: if the file is not a card.
        UsageError: if an id is taken by another entry point.
    """
    try:
        card = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Card)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise DataError(
            path, f"not a usable card ({error})", "Compare it with docs/guides/add-an-environment.md"
        ) from error
    for env in card.env:
        register_env(env)
    for tasks in card.tasks:
        register_tasks(tasks)
    for data in card.data:
        if data.name in _data and _data[data.name] != data:
            raise UsageError(
                f"data set {data.name!r} is already registered by {_data[data.name].entry_point}; rename one"
            )
        _data[data.name] = data


def register_env(card: EnvCard) -> None:
    """Registers one environment with us and with Gymnasium; the same card twice is fine.

    Raises:
        UsageError: if the id is malformed or taken by something else.
    """
    if not re.fullmatch(r"[\w-]+/[\w-]+-v\d+", card.id):
        raise UsageError(f"environment id {card.id!r} must look like namespace/Name-v0")
    known = _envs.get(card.id)
    if known is not None and known.entry_point != card.entry_point:
        raise UsageError(f"environment id {card.id!r} is already registered by {known.entry_point}; rename one of them")
    _envs[card.id] = card
    if card.id not in gymnasium.registry:
        gymnasium.register(id=card.id, entry_point=card.entry_point, order_enforce=False)  # AgentEnv does it itself


def register_tasks(card: TasksCard) -> None:
    """Registers one task set; the same card twice is fine."""
    known = _tasks.get(card.name)
    if known is not None and known.entry_point != card.entry_point:
        raise UsageError(f"task set {card.name!r} is already registered by {known.entry_point}; rename one of them")
    _tasks[card.name] = card


def register_plugins() -> list[str]:
    """Reads the cards of installed third-party families, once a process.

    Returns:
        Names of the entry points read.

    A plug-in without a usable card is left out with a warning.
    """
    global _plugins_read
    if _plugins_read:
        return []
    _plugins_read = True
    found = []
    for point in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        try:
            spec = importlib.util.find_spec(point.value)
            if spec is None or not spec.submodule_search_locations:
                raise UsageError(f"entry point {point.name!r} names no installed package")
            read_card(Path(next(iter(spec.submodule_search_locations))) / "card.toml")
        except (DataError, UsageError, ImportError, ValueError) as error:  # one bad plug-in must not stop the others
            warnings.warn(f"plug-in {point.name!r} is left out: {error}. Reinstall or remove it", stacklevel=2)
            continue
        found.append(point.name)
    return found


def register_builtin() -> None:
    """Reads the cards that lie in this distribution."""
    here = Path(__file__).parent
    for folder in ("envs", "tasks"):
        for card in sorted((here / folder).glob("*/card.toml")):
            read_card(card)


def env_cards() -> list[EnvCard]:
    """All registered environments, plug-ins included, by id."""
    register_plugins()
    return [_envs[key] for key in sorted(_envs)]


def task_cards() -> list[TasksCard]:
    """All registered task sets, plug-ins included, by name."""
    register_plugins()
    return [_tasks[key] for key in sorted(_tasks)]


def data_cards() -> list[DataCard]:
    """All official data that can be fetched, by name."""
    register_plugins()
    return [_data[key] for key in sorted(_data)]


def find_env(name: str) -> EnvCard:
    """The environment of an id, of a versionless id, or of a family's short name (its newest version).

    Raises:
        UsageError: if there is none.
    """
    if name not in _envs:
        register_plugins()
    if name in _envs:
        return _envs[name]
    matches = [card for card in _envs.values() if card.family == name or card.id.rsplit("-v", 1)[0] == name]
    if not matches:
        raise choices("environment", name, sorted({card.family for card in _envs.values()} | set(_envs)))
    return max(matches, key=lambda card: int(card.id.rsplit("-v", 1)[1]))


def load_entry_point(entry_point: str) -> Any:
    """Imports "module:attribute".

    Raises:
        UsageError: if the string is malformed or the attribute is missing.
    """
    module, _, attribute = entry_point.partition(":")
    if not module or not attribute:
        raise UsageError(f"{entry_point!r} must look like 'package.module:Name'")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise UsageError(f"module {module} has no {attribute!r}; check the spelling of {entry_point!r}") from None
    except ModuleNotFoundError as error:
        raise UsageError(f"cannot import {module} for {entry_point!r} ({error}); is it installed?") from error


def env_class(name: str) -> type[AgentEnv]:
    """The class of a registered environment."""
    cls: type[AgentEnv] = load_entry_point(find_env(name).entry_point)
    return cls


def make_env(name: str, **kwargs: Any) -> AgentEnv:
    """The bare environment, without Gymnasium's wrappers (`gym.make` adds them).

    Args:
        name: id or family name.
        **kwargs: options of the environment.

    Raises:
        UsageError: for an unknown id or option.
    """
    cls = env_class(name)
    return cls(**kwargs)


def known_options(cls: type) -> list[str]:
    """Names of the options of an environment class, its own first."""
    names = [
        parameter.name
        for base in cls.__mro__
        if "__init__" in vars(base) and base is not object
        for parameter in inspect.signature(vars(base)["__init__"]).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    return list(dict.fromkeys(names))


@lru_cache(maxsize=64)
def _cached_task_set(name: str, options: tuple[tuple[str, Any], ...]) -> TaskSet:
    base, _, variant = name.partition(":")
    if base not in _tasks:
        register_plugins()
    if base not in _tasks:
        raise choices("task set", base, sorted(_tasks))
    maker: Callable[..., TaskSet] = load_entry_point(_tasks[base].entry_point)
    return maker(variant, **dict(options))


def make_task_set(name: str, **options: Any) -> TaskSet:
    """The task set of a name such as "alfworld/generated" or "alfworld/generated:s".

    Sets are immutable, so equal calls share one object.

    Raises:
        UsageError: for an unknown name, variant or option.
        DataError: if its data is missing or damaged.
    """
    return _cached_task_set(name, tuple(sorted(options.items())))
