"""An ALFWorld game, read from its files and compiled once into immutable tables.

Objects, receptacles and locations are numbered in the order of their identifiers, which is the order in which the
reference lists them. Sets of objects or receptacles are integers used as bit sets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.envs.alfworld.goal import TASK_TYPES, Goal, read_goal_structure
from agentgym.envs.alfworld.pddl import REPAIR, read_problem
from agentgym.envs.alfworld.tables import Abilities, State, compile_tables
from agentgym.envs.alfworld.wording import (
    TASK_PREFIX,
    Grammar,
    check_domain,
    display_names,
    read_wording,
)
from agentgym.errors import DataError

GAME_FILE = "game.tw-pddl"
TRAJECTORY_FILE = "traj_data.json"

_PARAMETERS = ("object_target", "parent_target", "toggle_target")
_MAX_FILE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Game:
    """Everything about one game that does not change while it is played. Shareable between threads.

    Attributes:
        name: relative id of the game.
        task: the text after "Your task is to: ", without its final full stop.
        task_line: the whole sentence, as the first observation shows it.
        task_type: one of `agentgym.envs.alfworld.goal.TASK_TYPES`.
        grammar: wording of the game file, "move" or "put".
        help_text: feedback of `help`.
        object_names, receptacle_names, location_names: names shown to the player, in index order.
        object_types, receptacle_types: types such as `potato`, in index order; "" where the file gives none.
        goal: the goal, structured.
        goal_reachable: whether the goal holds in the delete relaxation (preconditions that something be false are
            ignored). If not, the reference raises when it loads the game.
        solvable: the file's own mark, None if it has none.
        walkthrough: commands that win the game, () if the file has none.
        pddl_params: object_target, parent_target and toggle_target of the trajectory file.
        digest: 16 bytes that identify the game's content, names included.
        initial: the initial state.
        abilities: static properties of the objects.
        receptacle_location: location index of each receptacle, -1 if it has none.
        receptacles_at: receptacle indices at each location.
        openable, sinks, microwaves, fridges: bit sets of receptacles.
        accepts: for each receptacle, the bit set of the objects that may be put there.
        shared_accepts: for each receptacle, what the other receptacles at its location accept.
        goal_objects: bit set of the objects that may satisfy the goal.
        goal_lamps: bit set of the lamps that may satisfy it.
        goal_receptacles: indices of the receptacles that may satisfy it.
        go_to: command -> receptacle index.
        go_to_from: for each location, the admissible `go to` commands there, sorted.
        holder_texts: for each object that can hold others, the feedback of examining it.
        object_index, receptacle_index: name -> index.
    """

    name: str
    task: str
    task_line: str
    task_type: str
    grammar: Grammar
    help_text: str
    object_names: tuple[str, ...]
    receptacle_names: tuple[str, ...]
    location_names: tuple[str, ...]
    object_types: tuple[str, ...]
    receptacle_types: tuple[str, ...]
    goal: Goal
    goal_reachable: bool
    solvable: bool | None
    walkthrough: tuple[str, ...]
    pddl_params: Mapping[str, str]
    digest: bytes
    initial: State
    abilities: Abilities
    receptacle_location: tuple[int, ...]
    receptacles_at: tuple[tuple[int, ...], ...]
    openable: int
    sinks: int
    microwaves: int
    fridges: int
    accepts: tuple[int, ...]
    shared_accepts: tuple[int, ...]
    goal_objects: int
    goal_lamps: int
    goal_receptacles: tuple[int, ...]
    go_to: Mapping[str, int]
    go_to_from: tuple[tuple[str, ...], ...]
    holder_texts: Mapping[int, str]
    object_index: Mapping[str, int]
    receptacle_index: Mapping[str, int]


def load_game(directory_or_file: Path, *, name: str | None = None) -> Game:
    """Reads a game from disk.

    Args:
        directory_or_file: a `game.tw-pddl` file or the folder with it. The `traj_data.json` beside it is read if it
            exists; without it, the task type is taken from the goal.
        name: relative id of the game; by default the last two folders of its path.

    Raises:
        DataError: if a file is missing or cannot be used.
    """
    path = Path(directory_or_file)
    if path.is_dir():
        path = path / GAME_FILE
    trajectory = path.with_name(TRAJECTORY_FILE)
    return parse_game(
        _read_bytes(path),
        _read_bytes(trajectory) if trajectory.exists() else None,
        name="/".join(path.absolute().parent.parts[-2:]) if name is None else name,
        path=str(path),
    )


def parse_game(
    game_json: bytes | Mapping[str, Any],
    traj_data: bytes | Mapping[str, Any] | None,
    *,
    name: str,
    path: str = "<memory>",
    shuffle: np.random.Generator | None = None,
) -> Game:
    """Compiles a game from the content of its files.

    Args:
        game_json: content of `game.tw-pddl`.
        traj_data: content of `traj_data.json`; None takes the task type from the goal.
        name: relative id of the game.
        path: where the content comes from, for error messages.
        shuffle: numbers within a class are handed out in an order drawn from this generator (the reference's
            `domain_randomization`); None keeps the fixed order.

    Raises:
        DataError: if the content cannot be used.
    """
    data = _read_json(game_json, path)
    check_domain(_text(data, "pddl_domain", path), path)
    wording = read_wording(_text(data, "grammar", path), path)
    source = _text(data, "pddl_problem", path)
    problem = read_problem(source, path)
    goal = read_goal_structure(problem.goal, path)
    task_type, parameters = _read_trajectory(traj_data, goal, path)
    solvable = data.get("solvable")
    walkthrough = data.get("walkthrough") or []
    if not (solvable is None or isinstance(solvable, bool)):
        raise DataError(path, '"solvable" is neither true nor false', REPAIR)
    if not (isinstance(walkthrough, list) and all(isinstance(step, str) for step in walkthrough)):
        raise DataError(path, '"walkthrough" is not a list of commands', REPAIR)
    entities = sorted({argument for fact in problem.facts for argument in fact[1:]})
    order = entities if shuffle is None else [entities[i] for i in shuffle.permutation(len(entities))]
    names = display_names(order)
    tables = compile_tables(problem, goal, entities, names, path)
    digest = hashlib.blake2b(digest_size=16)
    for part in (source, wording.grammar, wording.task_line, *order):
        digest.update(part.encode() + b"\0")
    return Game(
        name=name,
        task=wording.task_line.removeprefix(TASK_PREFIX).removesuffix("."),
        task_line=wording.task_line,
        task_type=task_type,
        grammar=wording.grammar,
        help_text=wording.help_text,
        goal=goal,
        solvable=solvable,
        walkthrough=tuple(walkthrough),
        pddl_params=parameters,
        digest=digest.digest(),
        **tables,
    )


def _read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise DataError(path, f"the file is larger than {_MAX_FILE_BYTES} bytes", REPAIR)
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            path, f"the file cannot be read ({error.strerror})", "Check the path and its rights."
        ) from error


def _read_json(content: bytes | Mapping[str, Any], path: str) -> Mapping[str, Any]:
    if isinstance(content, Mapping):
        return content
    try:
        text = content.decode("utf-8-sig")
        data = json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(path, f"the file is not UTF-8 at byte {error.start}", REPAIR) from error
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"the file is not JSON ({error})", REPAIR) from error
    if not isinstance(data, dict):
        raise DataError(path, "the file is not one JSON object", REPAIR)
    return data


def _text(data: Mapping[str, Any], key: str, path: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise DataError(path, f'the key "{key}" is missing or no text', REPAIR)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(path, f'"{key}" has a lone surrogate at character {error.start}', REPAIR) from error
    return value


def _read_trajectory(content: bytes | Mapping[str, Any] | None, goal: Goal, path: str) -> tuple[str, Mapping[str, str]]:
    """Task type and parameters, from the trajectory file or else from the goal."""
    if content is None:
        return goal.kind, dict(
            zip(_PARAMETERS, (goal.object_type, goal.receptacle_type, goal.toggle_type), strict=True)
        )
    where = f"{path} ({TRAJECTORY_FILE})"
    data = _read_json(content, where)
    task_type, parameters = data.get("task_type"), data.get("pddl_params")
    if task_type not in TASK_TYPES or task_type != goal.kind:
        raise DataError(where, f'"task_type" is {task_type!r:.80}, but the goal is {goal.kind}', REPAIR)
    if not isinstance(parameters, dict):
        raise DataError(where, 'the key "pddl_params" is missing or no object', REPAIR)
    values = {key: _text({key: parameters.get(key) or ""}, key, where) for key in _PARAMETERS}
    return goal.kind, values
