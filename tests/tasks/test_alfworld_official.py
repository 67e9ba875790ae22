"""Official ALFWorld games from a folder: what counts, what is broken, what changed, and how they are fetched."""

from __future__ import annotations

import http.server
import io
import json
import os
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from agentgym.errors import DataError, InfrastructureError, UsageError
from agentgym.registry import make_env, make_task_set
from agentgym.task import TaskSet
from agentgym.tasks.alfworld import fetch as fetching
from agentgym.tasks.alfworld.fetch import download, fetch, unpack
from agentgym.tasks.alfworld.generate import generate
from agentgym.tasks.alfworld.official import OFFICIAL_COUNTS, load_default, load_official, load_path, lock_path
from agentgym.tasks.alfworld.sets import official

COUNTS = {"train": 4, "valid_seen": 2, "valid_unseen": 2}


@pytest.fixture(autouse=True)
def data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    return tmp_path / "data"


def write_games(root: Path, counts=COUNTS) -> dict[str, list[Path]]:
    folders: dict[str, list[Path]] = {}
    for split, count in counts.items():
        for index in range(count):
            game = generate("s", 0, index, split)
            folder = root / split / game.name
            folder.mkdir(parents=True)
            for name, content in game.files().items():
                (folder / name).write_bytes(content)
            folders.setdefault(split, []).append(folder)
    return folders


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "alf" / "json_2.1.1"


@pytest.fixture
def games(root):
    return write_games(root)


def edit(path: Path, **changes) -> None:
    content = json.loads(path.read_text("utf-8"))
    for key, value in changes.items():
        if value is None:
            del content[key]
        else:
            content[key] = value
    path.write_text(json.dumps(content), "utf-8")


def test_a_full_set_is_loaded_and_played(root, games):
    tasks = load_official(root.parent, COUNTS)
    assert isinstance(tasks, TaskSet)
    assert tasks.name == "alfworld/official"
    assert dict(tasks.splits) == COUNTS
    assert "unpinned" in tasks.version
    assert "unpinned" in tasks.licence
    task = tasks.at("valid_unseen", 1)
    assert tasks.get(task.id) == task
    assert task.id.startswith("valid_unseen/")
    source = next(g for g in (generate("s", 0, i, "valid_unseen") for i in range(2)) if task.id.endswith(g.name))
    assert (task.kind, task.instruction) == (source.kind, source.task)
    assert tasks.open(task, "game.tw-pddl") == source.files()["game.tw-pddl"]
    env = make_env("alfworld", tasks=tasks, split="valid_unseen")
    observation, _ = env.reset(options={"task": task.id})
    assert source.task in observation
    done = False
    while not done:
        _, _, done, _, info = env.step(env.expert())
    assert info["success"] == 1


def test_games_that_the_reference_leaves_out_are_left_out_here(root, games):
    for name in (
        "pick_and_place_with_movable_recep-Egg-Bowl-Fridge-1",
        "pick_and_place_simple-AppleSliced-None-Fridge-1",
    ):
        shutil.copytree(games["train"][0], root / "train" / name / "trial_1")
    extra = root / "train" / "pick_and_place_simple-Egg-None-Fridge-1" / "trial_2"
    shutil.copytree(games["train"][0], extra)
    edit(extra / "game.tw-pddl", solvable=False)
    tasks = load_official(root, COUNTS)
    assert dict(tasks.splits) == COUNTS
    assert tasks.excluded == 2
    assert len(tasks.unsolvable) == 1
    assert tasks.broken == ()


@pytest.mark.parametrize(
    ("name", "spoil", "problem"),
    [
        ("game.tw-pddl", lambda path: path.write_bytes(b"{"), "not one JSON object"),
        ("game.tw-pddl", lambda path: path.write_bytes(b"\xff\xfe"), "not one JSON object"),
        ("game.tw-pddl", lambda path: path.write_bytes(b"[]"), "not one JSON object"),
        ("game.tw-pddl", lambda path: edit(path, solvable=None), "solvable"),
        ("game.tw-pddl", lambda path: edit(path, grammar="nothing"), "states no task"),
        ("game.tw-pddl", lambda path: edit(path, pddl_problem=None), "pddl_problem"),
        ("game.tw-pddl", lambda path: path.unlink(), "the first without its game file is valid_seen/"),
        ("traj_data.json", lambda path: path.unlink(), "the file is missing"),
        ("traj_data.json", lambda path: path.write_bytes(b"null"), "not one JSON object"),
        ("traj_data.json", lambda path: edit(path, task_type="juggle"), "juggle"),
    ],
)
def test_a_damaged_game_is_named(root, games, name, spoil, problem):
    path = games["valid_seen"][0] / name
    spoil(path)
    with pytest.raises(DataError, match="valid_seen has 1 playable games instead of 2") as caught:
        load_official(root, COUNTS)
    assert problem in str(caught.value)
    assert path.parent.name in str(caught.value)
    assert "Fetch" in caught.value.mend
    assert not lock_path(root).exists()


def test_a_split_with_too_many_games_is_refused(root, games):
    with pytest.raises(DataError, match="train has 4 playable games instead of 3"):
        load_official(root, COUNTS | {"train": 3})


def test_content_is_locked_at_first_use(root, games):
    digest = load_official(root, COUNTS).digest
    assert lock_path(root).exists()
    assert load_official(root, COUNTS).digest == digest
    path = games["train"][2] / "game.tw-pddl"
    os.utime(path)  # touched, but equal
    assert load_official(root, COUNTS).digest == digest
    edit(path, walkthrough=[])
    with pytest.raises(DataError, match="content changed") as caught:
        load_official(root, COUNTS)
    assert caught.value.path == str(path)
    assert str(lock_path(root)) in caught.value.mend
    lock_path(root).unlink()
    assert load_official(root, COUNTS).digest != digest


def test_lost_and_added_games_are_noticed_after_locking(root, games):
    load_official(root, COUNTS)
    added = root / "train" / "new-game-None-x-1" / "trial_1"
    shutil.copytree(games["train"][0], added)
    with pytest.raises(DataError, match="was not there at first use"):
        load_official(root, COUNTS)
    shutil.rmtree(added)
    (games["train"][1] / "traj_data.json").unlink()
    with pytest.raises(DataError, match="is gone") as caught:
        load_official(root, COUNTS)
    assert caught.value.path.endswith("traj_data.json")


def test_a_damaged_lock_is_an_error_that_names_it(root, games):
    load_official(root, COUNTS)
    lock_path(root).write_text("{", "utf-8")
    with pytest.raises(DataError, match="lock cannot be read"):
        load_official(root, COUNTS)


def test_a_change_after_loading_is_noticed_on_opening(root, games):
    tasks = load_official(root, COUNTS)
    task = tasks.at("train", 0)
    edit(root / task.id / "game.tw-pddl", walkthrough=["look"])
    with pytest.raises(DataError, match="changed since"):
        tasks.open(task, "game.tw-pddl")
    (root / task.id / "game.tw-pddl").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        tasks.open(task, "game.tw-pddl")
    with pytest.raises(UsageError, match="has no file"):
        tasks.open(task, "other")


def test_the_environment_variable_names_the_data(root, games, monkeypatch):
    with pytest.raises(DataError, match="agentgym data fetch alfworld"):
        load_default(COUNTS)
    monkeypatch.setenv("ALFWORLD_DATA", str(root.parent))
    assert dict(load_default(COUNTS).splits) == COUNTS
    with pytest.raises(DataError, match=f"instead of {OFFICIAL_COUNTS['train']}"):
        make_task_set("alfworld/official")
    monkeypatch.setenv("ALFWORLD_DATA", str(root.parent / "nowhere"))
    with pytest.raises(DataError, match="nowhere"):
        load_default(COUNTS)
    with pytest.raises(UsageError, match="no variant"):
        official("s")


def test_a_path_to_a_full_set_is_the_official_set(root, games):
    assert load_path(root.parent, COUNTS).name == "alfworld/official"
    assert load_path(root, COUNTS).name == "alfworld/official"


def test_part_of_the_data_is_an_ad_hoc_set(root, games):
    whole = load_path(root)
    assert whole.name == "alfworld/json_2.1.1"
    assert dict(whole.splits) == COUNTS
    assert "unpinned" in whole.version
    split = load_path(root / "valid_seen")
    assert dict(split.splits) == {"valid_seen": 2}
    single = load_path(games["train"][0] / "game.tw-pddl")
    assert len(single.splits) == 1
    env = make_env("alfworld", tasks=games["train"][0] / "game.tw-pddl", split="test")
    env.reset(seed=0)


def test_other_folders_load_as_split_test_even_without_trajectory(tmp_path, games):
    folder = tmp_path / "mine"
    shutil.copytree(games["train"][0], folder / "a")
    shutil.copytree(games["train"][1], folder / "b")
    (folder / "b" / "traj_data.json").unlink()
    edit(folder / "b" / "game.tw-pddl", solvable=None)
    (folder / "c").mkdir()
    (folder / "c" / "game.tw-pddl").write_text("no", "utf-8")
    tasks = official(path=folder)
    assert tasks.name == "alfworld/mine"
    assert dict(tasks.splits) == {"test": 2}
    assert [game.path for game in tasks.broken] == ["c/game.tw-pddl"]
    env = make_env("alfworld", tasks=tasks, split="test")
    for index in range(2):
        _, info = env.reset(options={"task": index})
        assert info["kind"] == tasks.at("test", index).kind


@pytest.mark.parametrize("content", [None, "unsolvable", "broken", "file"])
def test_a_path_without_usable_games_says_so(tmp_path, games, content):
    folder = tmp_path / "empty"
    folder.mkdir()
    if content == "unsolvable":
        shutil.copytree(games["train"][0], folder / "a")
        edit(folder / "a" / "game.tw-pddl", solvable=False)
    if content == "broken":
        (folder / "game.tw-pddl").write_text("no", "utf-8")
    if content == "file":
        folder = folder / "notes.txt"
        folder.write_text("hello", "utf-8")
    with pytest.raises(DataError) as caught:
        load_path(folder)
    assert caught.value.mend
    with pytest.raises(DataError, match="no such file"):
        load_path(tmp_path / "absent")


# -- fetching -----------------------------------------------------------------------------------------------------


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; `faults` names what goes wrong with a path, once for each entry."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[str]] = {}
        self.ranges: list[str | None] = []

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        content = self.server.files.get(name)
        faults = self.server.faults.get(name, [])
        fault = faults.pop(0) if faults else ""
        if content is None or fault in ("404", "500"):
            self.send_error(404 if content is None else int(fault))
            return
        etag = f'"{hash(content)}"'
        fresh = self.headers.get("If-Range") not in (None, etag)
        start = int(wanted[6:-1]) if wanted and fault != "ignore range" and not fresh else 0
        if start > len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        if fault != "no etag":
            self.send_header("ETag", etag)
        self.end_headers()
        body = content[start:]
        self.wfile.write(body[: len(body) // 2] if fault == "break off" else body)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server():
    instance = Server()
    thread = threading.Thread(target=instance.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield instance
    instance.shutdown()
    instance.server_close()
    thread.join()


def zipped(folder: Path, keep) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and keep(path.name):
                archive.write(path, path.relative_to(folder).as_posix())
    return buffer.getvalue()


@pytest.fixture
def served(server, root, games):
    """The data in two archives, as the release has them apart."""
    server.files["json.zip"] = zipped(root.parent, lambda name: name == "traj_data.json")
    server.files["tw.zip"] = zipped(root.parent, lambda name: name != "traj_data.json")
    return [server.url("json.zip"), server.url("tw.zip")]


def run_fetch(target, urls, **options):
    return fetch(target, urls=urls, expected=COUNTS, wait=0.01, **options)


def test_fetching_downloads_checks_and_unpacks(served, data_folder):
    seen = []
    message = run_fetch(data_folder / "alfworld", served, progress=lambda *row: seen.append(row))
    assert "train 4" in message
    assert seen[-1][0] == "tw.zip"
    assert seen[-1][1] == seen[-1][2]
    assert sorted(path.name for path in (data_folder / "alfworld").iterdir()) == ["json_2.1.1"]
    assert dict(load_default(COUNTS).splits) == COUNTS
    assert "train 4" in run_fetch(data_folder / "alfworld", ["http://127.0.0.1:9/never"])


def test_a_broken_off_download_continues_where_it_stopped(server, served, data_folder):
    server.faults["tw.zip"] = ["break off", "break off"]
    run_fetch(data_folder / "alfworld", served)
    starts = [int(r[6:-1]) for r in server.ranges if r]
    assert len(starts) == 2
    assert 0 < starts[0] < starts[1] < len(server.files["tw.zip"])


def test_a_server_that_ignores_ranges_is_served_from_the_start(server, tmp_path):
    server.files["x.zip"] = bytes(range(256)) * 40
    server.faults["x.zip"] = ["break off", "ignore range"]
    path = download(server.url("x.zip"), tmp_path / "d", wait=0.01)
    assert path.read_bytes() == server.files["x.zip"]
    assert [p.name for p in path.parent.iterdir()] == ["x.zip"]


def test_a_file_that_changed_meanwhile_is_not_mixed_with_the_old_one(server, tmp_path):
    folder = tmp_path / "d"
    server.files["x.zip"] = b"old" * 1000
    server.faults["x.zip"] = ["break off"] + ["500"] * 5
    with pytest.raises(InfrastructureError, match="what has arrived is kept"):
        download(server.url("x.zip"), folder, wait=0.001)
    server.files["x.zip"] = b"new!" * 1000
    assert download(server.url("x.zip"), folder, wait=0.001).read_bytes() == b"new!" * 1000


def test_a_partial_file_longer_than_the_new_one_is_dropped(server, tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "x.zip.part").write_bytes(b"much longer than the file")
    server.files["x.zip"] = b"short"
    assert download(server.url("x.zip"), folder, wait=0.001).read_bytes() == b"short"


def test_server_errors_are_retried_and_missing_files_are_not(server, tmp_path):
    server.files["x.zip"] = b"x"
    server.faults["x.zip"] = ["500", "500"]
    assert download(server.url("x.zip"), tmp_path, wait=0.001).read_bytes() == b"x"
    count = len(server.ranges)
    with pytest.raises(DataError, match="404") as caught:
        download(server.url("gone.zip"), tmp_path, wait=0.001)
    assert "--from DIR" in caught.value.mend
    assert len(server.ranges) == count + 1


def test_no_server_at_all_is_a_fault_of_the_infrastructure(tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "_ATTEMPTS", 2)
    with pytest.raises(InfrastructureError, match="Try again later"):
        download("http://127.0.0.1:9/x.zip", tmp_path, wait=0.001)


@pytest.mark.parametrize("damage", ["no zip", "truncated", "flipped bit"])
def test_a_corrupt_archive_is_named_and_downloaded_anew_next_time(server, served, data_folder, damage):
    whole = server.files["tw.zip"]
    flipped = bytearray(whole)
    flipped[60] ^= 0xFF
    flipped[200] ^= 0xFF
    server.files["tw.zip"] = {"no zip": b"<html>sorry</html>", "truncated": whole[:-40], "flipped bit": bytes(flipped)}[
        damage
    ]
    target = data_folder / "alfworld"
    with pytest.raises(DataError, match=r"tw\.zip: the archive is damaged"):
        run_fetch(target, served)
    assert not (target / "json_2.1.1").exists()
    assert not (target / "unpacking").exists()
    server.files["tw.zip"] = whole
    assert "train 4" in run_fetch(target, served)


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/evil.txt", "a/../../evil.txt", "..\\evil.txt", "C:\\evil.txt"])
def test_members_that_lead_outside_are_refused(tmp_path, name):
    archive = tmp_path / "x.zip"
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("fine.txt", "fine")
        content.writestr(name, "evil")
    with pytest.raises(DataError, match="leads outside"):
        unpack(archive, tmp_path / "out" / "inner")
    assert not (tmp_path / "out").exists()


def test_links_in_archives_are_refused(tmp_path):
    archive = tmp_path / "x.zip"
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr(link, "/etc")
    with pytest.raises(DataError, match="is a link"):
        unpack(archive, tmp_path / "out")


def test_an_archive_larger_than_the_disk_is_refused_before_unpacking(tmp_path, monkeypatch):
    archive = tmp_path / "x.zip"
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("a", "hello")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1))
    with pytest.raises(InfrastructureError, match="Free some space"):
        unpack(archive, tmp_path / "out")
    assert archive.exists()


def test_archives_of_something_else_and_incomplete_data_are_refused(server, served, data_folder, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("a", "utf-8")
    server.files["other.zip"] = zipped(tmp_path / "other", lambda _: True)
    with pytest.raises(DataError, match="hold no train"):
        run_fetch(data_folder / "alfworld", [server.url("other.zip")])
    with pytest.raises(DataError, match="train has 0 playable games") as caught:
        run_fetch(data_folder / "alfworld", served[1:])
    assert "fetch again" in caught.value.mend


def test_an_existing_folder_is_registered_without_copying(root, games, data_folder, tmp_path):
    message = run_fetch(data_folder / "alfworld", [], source_dir=root.parent)
    assert str(root.parent) in message
    assert dict(load_default(COUNTS).splits) == COUNTS
    assert [path.name for path in (data_folder / "alfworld").iterdir()] == ["source.txt"]
    with pytest.raises(DataError, match="not the official data"):
        run_fetch(data_folder / "alfworld", [], source_dir=tmp_path / "data")
