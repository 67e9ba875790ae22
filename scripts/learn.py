"""What `make learn` does: a cold start by imitation, then reinforcement learning, with a table and plots at the end.

Stopped at any time, it goes on where it was.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from agentgym.baselines.core.record import read_status

AGENTGYM = [sys.executable, "-m", "agentgym"]
CONFIGS = Path(__file__).resolve().parents[1] / "baselines" / "configs"


def cold_start(config: Path, out: Path) -> None:
    """Imitates the expert, unless that is done."""
    state = read_status(out)["state"]
    if state == "finished":
        return
    going_on = ["--resume", str(out)] if state != "new" else ["--config", str(config), "--out", str(out)]
    subprocess.run([*AGENTGYM, "train", *going_on], check=True)


def main() -> int:
    """Trains and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="the smallest world, about three minutes")
    arguments = parser.parse_args()
    console = Console()
    world, start = ("xs", "xs") if arguments.short else ("l4", "l4-a")
    console.rule(f"Cold start: a model of 0.09 M parameters imitates the expert (world {world})")
    cold_start(CONFIGS / f"alfworld-{world}-sft.toml", Path("runs/cold") / start)
    console.rule("Reinforcement learning from there")
    study = CONFIGS / f"learn-{world}.toml"
    return subprocess.run([*AGENTGYM, "study", str(study), "--results", "runs/results"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
