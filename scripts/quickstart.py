"""What `make run` does: games in the official file format, three policies, one table and one report."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from rich.console import Console

from agentgym.cli.data import export_tasks
from agentgym.cli.evaluate import run_plan
from agentgym.cli.show import show
from agentgym.evaluate import PolicySpec, plan
from agentgym.registry import make_task_set

POLICIES = ("expert", "scripted", "random")


def main() -> None:
    """Evaluates and shows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    arguments = parser.parse_args()
    console = Console()
    out: Path = arguments.out
    if out.exists():
        shutil.rmtree(out)

    console.rule("ALFWorld: games of real size, written in the official file format")
    games = out / "games"
    tasks = make_task_set("alfworld/generated")
    export_tasks(tasks, "valid_unseen", arguments.episodes, games)
    console.print(f"{arguments.episodes} games of {tasks.name} in {games}")

    runs = [out / policy for policy in POLICIES]
    for policy, run in zip(POLICIES, runs, strict=True):
        console.rule(policy)
        config = plan("alfworld", env_kwargs={"tasks": str(games)}, split="valid_unseen", name=policy)
        run_plan(
            config,
            {"*": PolicySpec(spec=policy)},
            run,
            resume=False,
            backend="processes",
            workers=arguments.workers,
            envs_per_worker=1,
            console=console,
        )
    console.rule("Results")
    show(runs, html=out / "report.html")


if __name__ == "__main__":
    main()
