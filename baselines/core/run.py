"""`python -m agentgym.baselines.core.run CONFIG.toml --out DIR [--resume]`: one training run without decoration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from agentgym.errors import AgentGymError


def main() -> int:
    """Trains; 0 when the run finished, 1 when it was stopped, 2 for a bad call or bad data."""
    parser = argparse.ArgumentParser(prog="python -m agentgym.baselines.core.run", description=__doc__)
    parser.add_argument("config", type=Path, help="training configuration (TOML)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    arguments = parser.parse_args()
    try:
        from agentgym.baselines.core.config import read_train_config
        from agentgym.baselines.core.learner import Diverged
        from agentgym.baselines.core.trainer import train

        quiet()
        try:
            status = train(read_train_config(arguments.config), arguments.out, resume=arguments.resume, watch=_print)
        except Diverged as error:
            print(f"stopped: {error}", file=sys.stderr)
            return 1
    except AgentGymError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{status['state']}: {status['reason']}")
    return 0


def quiet() -> None:
    """Keeps the libraries' own progress bars off the screen."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _print(line: dict[str, Any]) -> None:
    if line["kind"] == "train":
        print(f"iteration {line['iteration']}: success {line.get('success', float('nan')):.3f}", flush=True)
    elif line["kind"] == "eval":
        print(
            f"held out after {line['iteration']}, {line['mode']}: {line.get('success', float('nan')):.3f}", flush=True
        )


if __name__ == "__main__":
    sys.exit(main())
