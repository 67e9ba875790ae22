"""A third party's family: the package of the guide installs, registers itself, plays, and passes the checker."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared_data import need

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "guides"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's package, built and installed without a network into a folder of its own."""
    need("hatchling")
    source = tmp_path_factory.mktemp("source") / "example_family"
    shutil.copytree(GUIDE / "example_family", source)
    target = tmp_path_factory.mktemp("site")
    flags = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *flags, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return target


def _python(installed: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=installed,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
    )


def _agentgym(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _python(installed, "from agentgym.cli import main; main()", *arguments)


def test_an_installed_family_plays_through_gymnasium(installed: Path) -> None:
    code = """
import sys, gymnasium, agentgym
assert agentgym.register_plugins() == ["lock"]
assert "agentgym_lock.env" not in sys.modules
env = gymnasium.make("example/Lock-v0")
observation, info = env.reset(seed=3)
total, ended = 0.0, False
while not ended:
    observation, reward, terminated, truncated, info = env.step(env.unwrapped.expert())
    total, ended = total + reward, terminated or truncated
print(observation, total, info["success"], info["checkpoints"][-1])
"""
    done = _python(installed, code)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"The lock opens\. 1\.0 1 [23] right\n", done.stdout)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_installed_family_plays_in_a_vector_of_eight(installed: Path, kind: str) -> None:
    code = """
import sys, gymnasium, agentgym
if __name__ == "__main__":
    agentgym.register_plugins()
    vector = gymnasium.make_vec("example/Lock-v0", 8, vectorization_mode=sys.argv[1])
    singles = [gymnasium.make("example/Lock-v0") for _ in range(8)]
    observations, infos = vector.reset(seed=4)
    assert list(observations) == [env.reset(seed=4 + i)[0] for i, env in enumerate(singles)]
    observations, rewards, _, _, infos = vector.step(("pull",) * 8)
    steps = [env.step("pull") for env in singles]
    assert list(observations) == [step[0] for step in steps]
    assert list(rewards) == [step[1] for step in steps]
    assert list(infos["state_key"]) == [step[4]["state_key"] for step in steps]
    vector.close()
    print("equal")
"""
    done = _python(installed, code, kind)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


def test_an_installed_family_is_listed(installed: Path) -> None:
    done = _agentgym(installed, "list", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert "example/Lock-v0" in {card["id"] for card in listed["environments"]}
    assert "lock/generated" in {card["name"] for card in listed["task_sets"]}
    assert "example/Lock-v0" in _agentgym(installed, "list").stdout


def test_an_installed_family_passes_the_checker(installed: Path) -> None:
    done = _agentgym(installed, "check", "example/Lock-v0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "example/Lock-v0: 0 findings" in done.stdout
    assert "broken" not in done.stdout
    assert "other_process" in done.stdout


def test_a_family_name_near_a_plugins_is_answered_with_it(installed: Path) -> None:
    done = _agentgym(installed, "check", "lokc")
    assert done.returncode == 2
    assert "Did you mean 'lock'" in done.stderr


def test_a_plugin_without_a_card_is_named_and_left_out(installed: Path, tmp_path: Path) -> None:
    shutil.copytree(installed, tmp_path / "site")
    (tmp_path / "site" / "agentgym_lock" / "card.toml").unlink()
    done = _agentgym(tmp_path / "site", "list")
    assert done.returncode == 0
    assert "is left out" in done.stderr
    assert "not a usable card" in done.stderr
    assert "agentgym/ALFWorld-v0" in done.stdout
    assert "example/Lock-v0" not in done.stdout
    shutil.rmtree(tmp_path / "site" / "agentgym_lock")
    done = _agentgym(tmp_path / "site", "list")
    assert done.returncode == 0
    assert "names no installed package" in done.stderr


def test_the_guide_shows_what_the_package_holds() -> None:
    guide = (GUIDE / "add-an-environment.md").read_text(encoding="utf-8")
    card = (GUIDE / "example_family" / "agentgym_lock" / "card.toml").read_text(encoding="utf-8")
    shown = {line.strip() for line in guide.splitlines()}
    missing = [line for line in card.splitlines() if line and not line.startswith("summary") and line not in shown]
    assert missing == []
    assert 'lock = "agentgym_lock"' in shown
