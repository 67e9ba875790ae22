"""Loads official ALFWorld games, and any other folder of games in their format.

A full official set is `json_2.1.1/{train,valid_seen,valid_unseen}/<task>/<trial>/game.tw-pddl`. Its content is locked
when it is first used: digests of all files are written to the user's data folder, and a later difference is an error
that names the file. Anything else with games in it loads as an ad-hoc set named by its folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from agentgym.envs.alfworld.game import GAME_FILE, TRAJECTORY_FILE, parse_game
from agentgym.envs.alfworld.goal import TASK_TYPES
from agentgym.envs.alfworld.wording import TASK_PREFIX
from agentgym.errors import DataError, UsageError
from agentgym.paths import data_dir
from agentgym.task import ListTaskSet, Task, canonical_json

OFFICIAL_COUNTS: Mapping[str, int] = {"train": 3553, "valid_seen": 140, "valid_unseen": 134}
"""Games of each split that the reference plays: eligible and solvable."""

ROOT_NAME = "json_2.1.1"
POINTER_FILE = "source.txt"
"""In the data folder: names a folder elsewhere that holds the official data."""

_EXCLUDED = ("movable", "Sliced")
_FETCH = "Run `agentgym data fetch alfworld`, or set ALFWORLD_DATA to the folder that holds json_2.1.1."
_TASK = re.compile(re.escape(TASK_PREFIX) + r'(.*?)\.?\\*"')


class BrokenGame(msgspec.Struct, frozen=True):
    """A game that cannot be used, and why."""

    path: str
    problem: str


class _File(msgspec.Struct, frozen=True):
    sha256: str
    size: int
    mtime_ns: int


class _Entry(msgspec.Struct, frozen=True):
    """A usable game: its folder relative to the root, and what its files say."""

    folder: str
    kind: str
    instruction: str
    files: dict[str, _File]


class _Index(msgspec.Struct, frozen=True):
    """All that was found in a folder; also the content of a lock file."""

    root: str
    games: list[_Entry]
    unsolvable: list[str]
    broken: list[BrokenGame]


class FolderTasks(ListTaskSet):
    """Games in a folder, read when they are opened.

    Attributes:
        root: the folder.
        broken: games that cannot be used, with the reason.
        unsolvable: folders of games marked as unsolvable, which are left out as the reference does.
        excluded: number of games left out because their path has "movable" or "Sliced" in it.
    """

    def __init__(self, name: str, root: Path, index: _Index, *, excluded: int, version: str, licence: str) -> None:
        tasks = [_task(entry, root) for entry in index.games]
        super().__init__(name, tasks, version=version, licence=licence, source=f"files in {root.name}")
        self.root = root
        self.broken = tuple(index.broken)
        self.unsolvable = tuple(index.unsolvable)
        self.excluded = excluded

    def open(self, task: Task, name: str) -> bytes:
        """The content of one of the task's files.

        Raises:
            UsageError: if the task has no such file.
            DataError: if the file cannot be read or differs from when the set was loaded.
        """
        known = self.get(task.id)
        if name == TRAJECTORY_FILE and name not in known.files and GAME_FILE in known.files:
            return canonical_json({"task_type": known.kind, "pddl_params": known.data["pddl_params"]})
        if name not in known.files:
            raise UsageError(f"task {task.id!r} of {self.name} has no file {name!r}; it has {sorted(known.files)}")
        path = self.root / known.data["folder"] / name
        content = _read(path)
        if hashlib.sha256(content).hexdigest() != known.files[name]:
            raise DataError(path, "the file changed since this set was loaded", "Restore it, or load the set again.")
        return content


def load_default(expected: Mapping[str, int] = OFFICIAL_COUNTS) -> FolderTasks:
    """The official games from where ALFWORLD_DATA points, or else from the data folder.

    Args:
        expected: number of games of each split.

    Raises:
        DataError: if there are none, some are missing, or their content has changed.
    """
    chosen = os.environ.get("ALFWORLD_DATA")
    place = Path(chosen).expanduser() if chosen else data_dir() / "alfworld"
    pointer = place / POINTER_FILE
    if not chosen and pointer.is_file():
        place = Path(pointer.read_text(encoding="utf-8").strip())
    if not place.is_dir():
        raise DataError(place, "there are no official ALFWorld games", _FETCH)
    return load_official(place, expected)


def load_path(path: Path, expected: Mapping[str, int] = OFFICIAL_COUNTS) -> FolderTasks:
    """Games from a path: a full official set, any folder with games in it, or one game file.

    Args:
        path: file or folder.
        expected: number of games of each split of a full official set.

    Raises:
        DataError: if there are no games, or a full official set is damaged or has changed.
    """
    path = path.expanduser()
    if not path.exists():
        raise DataError(path, "there is no such file or folder", "Check the path.")
    root = official_root(path)
    if root is not None and all(
        sum(not _is_excluded(folder) for folder in _game_folders(root, split)) >= count
        for split, count in expected.items()
    ):
        return load_official(path, expected)
    return _load_folder(path)


def official_root(path: Path) -> Path | None:
    """The folder with the three splits: the path itself or json_2.1.1 in it."""
    for root in (path / ROOT_NAME, path):
        if all((root / split).is_dir() for split in OFFICIAL_COUNTS):
            return root
    return None


def load_official(path: Path, expected: Mapping[str, int] = OFFICIAL_COUNTS) -> FolderTasks:
    """A full official set, locked at its first use.

    Args:
        path: the folder with json_2.1.1, or that folder.
        expected: number of games of each split.

    Raises:
        DataError: if a split is incomplete or a file differs from the lock.
    """
    root = official_root(path)
    if root is None:
        splits = ", ".join(OFFICIAL_COUNTS)
        raise DataError(path, f"this is not the official data: it lacks the folders {splits}", _FETCH)
    root = root.resolve()
    folders = sorted(folder for split in OFFICIAL_COUNTS for folder in _game_folders(root, split))
    eligible = [folder for folder in folders if not _is_excluded(folder)]
    lock = lock_path(root)
    index = _read_lock(lock, root, eligible) if lock.exists() else _scan(root, eligible, strict=True)
    _check_counts(root, index, expected)
    if not lock.exists():
        _write_lock(lock, index)
    return FolderTasks(
        "alfworld/official",
        root,
        index,
        excluded=len(folders) - len(eligible),
        version=f"{ROOT_NAME}, unpinned",
        licence=f"MIT (unpinned: content locked at first use in {lock.name})",
    )


def lock_path(root: Path) -> Path:
    """Where the digests of an official set are kept."""
    return data_dir() / "locks" / f"alfworld-{hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]}.json"


def _load_folder(path: Path) -> FolderTasks:
    if path.is_file():
        if path.name != GAME_FILE:
            raise DataError(path, "this is not a game", f"Give a file named {GAME_FILE}, or a folder with such files.")
        path = path.parent
    path = path.resolve()
    folders = sorted(_game_folders(path, ""))
    eligible = [folder for folder in folders if not _is_excluded(folder)]
    index = _scan(path, eligible, strict=False)
    if not index.games:
        if index.broken:
            raise DataError(path / index.broken[0].path, index.broken[0].problem, "Fetch or generate the game again.")
        problem = "it has no games" if not folders else "it has only unsolvable games or games that ALFWorld leaves out"
        raise DataError(path, problem, f"Choose a folder with {GAME_FILE} files, such as json_2.1.1/valid_unseen.")
    return FolderTasks(
        f"alfworld/{path.name}",
        path,
        index,
        excluded=len(folders) - len(eligible),
        version="ad hoc, unpinned",
        licence="that of the games in this folder (unpinned)",
    )


def _game_folders(root: Path, under: str) -> list[str]:
    """Folders with a game file below a folder, relative to the root, with forward slashes."""
    found = []
    for folder, _, names in os.walk(root / under):
        if GAME_FILE in names:
            found.append(Path(folder).relative_to(root).as_posix())
    return found


def _is_excluded(folder: str) -> bool:
    return any(word in folder for word in _EXCLUDED)


def _scan(root: Path, folders: Sequence[str], *, strict: bool) -> _Index:
    """Reads every game; `strict` asks for all that the reference's loader asks for."""
    index = _Index(str(root), [], [], [])
    for folder in folders:
        try:
            entry = _read_game(root / folder, folder, strict=strict)
        except DataError as error:
            index.broken.append(BrokenGame(Path(error.path).relative_to(root).as_posix(), error.problem))
            continue
        if entry is None:
            index.unsolvable.append(folder)
        else:
            index.games.append(entry)
    return index


def _read_game(path: Path, folder: str, *, strict: bool) -> _Entry | None:
    """One game; None if it is marked as unsolvable.

    Raises:
        DataError: if it cannot be used. Its path is that of the offending file.
    """
    game_path, trajectory_path = path / GAME_FILE, path / TRAJECTORY_FILE
    files = {GAME_FILE: _fingerprint(game_path)}
    game = _decode(game_path)
    for key in ("pddl_domain", "grammar", "pddl_problem"):
        if not isinstance(game.get(key), str):
            raise DataError(game_path, f'the key "{key}" is missing or no text', _FETCH)
    if strict and "solvable" not in game:
        raise DataError(game_path, 'the key "solvable" is missing', _FETCH)
    if game.get("solvable") is False:
        return None
    sentence = _TASK.search(str(game["grammar"]))
    if sentence is None:
        raise DataError(game_path, "its grammar states no task", _FETCH)
    if trajectory_path.exists():
        files[TRAJECTORY_FILE] = _fingerprint(trajectory_path)
        kind = _decode(trajectory_path).get("task_type")
    elif strict:
        raise DataError(trajectory_path, "the file is missing", _FETCH)
    else:
        kind = parse_game(game, None, name=folder, path=str(game_path)).task_type
    if kind not in TASK_TYPES:
        raise DataError(trajectory_path, f'"task_type" is {kind!r:.80}, none of the six kinds', _FETCH)
    return _Entry(folder, str(kind), sentence[1], files)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            path, f"the file cannot be read ({error.strerror})", "Restore it or check its rights."
        ) from error


def _fingerprint(path: Path) -> _File:
    content = _read(path)
    status = path.stat()
    return _File(hashlib.sha256(content).hexdigest(), status.st_size, status.st_mtime_ns)


def _decode(path: Path) -> dict[str, object]:
    try:
        return msgspec.json.decode(_read(path), type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(path, f"the file is not one JSON object ({error})", _FETCH) from error


def _task(entry: _Entry, root: Path) -> Task:
    parts = entry.folder.split("/")
    split = next((part for part in (*parts, root.name) if part in OFFICIAL_COUNTS), "test")
    task_id = root.name if entry.folder == "." else entry.folder
    data: dict[str, object] = {"path": "/".join(task_id.split("/")[-2:]), "folder": entry.folder}
    if TRAJECTORY_FILE not in entry.files:
        data["pddl_params"] = {"object_target": "", "parent_target": "", "toggle_target": ""}
    return Task(
        id=task_id,
        family="alfworld",
        kind=entry.kind,
        split=split,
        instruction=entry.instruction,
        data=data,
        files={name: file.sha256 for name, file in entry.files.items()},
    )


def _check_counts(root: Path, index: _Index, expected: Mapping[str, int]) -> None:
    for split, count in expected.items():
        found = sum(entry.folder.startswith(f"{split}/") for entry in index.games)
        if found == count:
            continue
        problem = f"split {split} has {found} playable games instead of {count}"
        broken = [game for game in index.broken if game.path.startswith(f"{split}/")]
        if broken:
            problem += f"; {len(broken)} are broken, the first is {broken[0].path} ({broken[0].problem})"
        elif found < count:
            missing = _first_without_game(root, split)
            problem += f"; the first without its game file is {missing}" if missing else ""
        mend = "Fetch the data again; to play only what is there, give the folder of the split as tasks=PATH."
        raise DataError(root, problem, mend)


def _first_without_game(root: Path, split: str) -> str:
    """The first eligible folder with a trajectory but no game: what was probably lost."""
    lost = (
        Path(folder).relative_to(root).as_posix()
        for folder, _, names in os.walk(root / split)
        if TRAJECTORY_FILE in names and GAME_FILE not in names
    )
    return min((folder for folder in lost if not _is_excluded(folder)), default="")


def _write_lock(lock: Path, index: _Index) -> None:
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        partial = lock.with_suffix(f".{os.getpid()}.part")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1))
        partial.replace(lock)
    except OSError as error:
        warnings.warn(
            f"the content of the official games could not be locked ({error}); set AGENTGYM_DATA to a writable folder",
            stacklevel=2,
        )


def _read_lock(lock: Path, root: Path, eligible: Sequence[str]) -> _Index:
    """The locked index, after comparing it with the files; unchanged time stamps and sizes are trusted.

    Raises:
        DataError: for a file that is missing, new or different, or for a damaged lock.
    """
    accept = f"Restore it, or delete {lock} to accept the content as it is now."
    try:
        index = msgspec.json.decode(lock.read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            lock, f"the lock cannot be read ({error})", "Delete it to lock the content as it is now."
        ) from error
    known = {entry.folder for entry in index.games} | set(index.unsolvable)
    known |= {str(Path(game.path).parent.as_posix()) for game in index.broken}
    new = sorted(set(eligible) - known)
    if new:
        raise DataError(
            root / new[0] / GAME_FILE, "the game was not there at first use", accept.replace("Restore", "Remove")
        )
    for entry in index.games:
        for name, locked in entry.files.items():
            path = root / entry.folder / name
            try:
                status = path.stat()
            except OSError:
                raise DataError(path, "the file is gone since it was first used", accept) from None
            if (status.st_size, status.st_mtime_ns) == (locked.size, locked.mtime_ns):
                continue
            if _fingerprint(path).sha256 != locked.sha256:
                raise DataError(path, "the content changed since it was first used", accept)
    return index
