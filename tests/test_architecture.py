"""The house rules that a script can check: import direction, file length, lazy heavy imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym.registry import env_cards

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "transformers", "textworld", "alfworld", "ray", "docker", "trl", "peft", "accelerate", "scipy"}
# who may import what, downwards only
FORBIDDEN = {
    "agentgym": ("agentgym.envs", "agentgym.tasks", "agentgym.baselines", "agentgym.leaderboard"),
    "envs": ("agentgym.tasks", "agentgym.baselines", "agentgym.leaderboard"),
    "tasks": ("agentgym.baselines", "agentgym.leaderboard"),
}


def sources(folder: str) -> list[Path]:
    files = (ROOT / folder).rglob("*.py")
    return [f for f in files if not any(part.is_symlink() for part in [f, *f.parents] if ROOT in part.parents)]


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("folder", list(FORBIDDEN))
def test_imports_flow_downward(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in imports(path)
        if name.startswith(FORBIDDEN[folder])
    ]
    assert wrong == []


def test_the_core_names_no_family() -> None:
    families = {card.family for card in env_cards() if card.entry_point.startswith("agentgym.envs")}
    assert families
    for path in sources("agentgym"):
        if "cli" in path.parts:  # the default of --env, and examples in its help
            continue
        code = ast.parse(path.read_text())
        strings = {n.value for n in ast.walk(code) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not strings & families, path


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    for folder in ("agentgym", "envs", "tasks"):
        for path in sources(folder):
            if path.name == "textworld_worker.py":  # a script of its own process
                continue
            assert not {name.split(".")[0] for name in imports(path, top_level=True)} & HEAVY, path


def test_no_file_is_longer_than_600_lines() -> None:
    folders = ("agentgym", "envs", "tasks", "baselines", "leaderboard", "benchmarks", "scripts", "tests")
    long = {
        str(p.relative_to(ROOT)): n for f in folders for p in sources(f) if (n := len(p.read_text().splitlines())) > 600
    }
    assert long == {}
