"""A program that speaks the trainer's side of a study: it writes metrics.jsonl, can be broken off, and resumes.

FAKE_TRAINER holds a JSON object: {"sleep": seconds an iteration, "crash": {name of DIR: iteration},
"effect": {method: added success}}.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import tomllib
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    config = tomllib.loads(arguments.config.read_text())
    how = json.loads(os.environ.get("FAKE_TRAINER", "{}"))
    path = arguments.out / "metrics.jsonl"
    if arguments.out.exists() and not arguments.resume:
        sys.exit(f"{arguments.out} exists")
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = max((row["iteration"] for row in rows if row["kind"] == "train"), default=-1)
    print(f"threads {os.environ.get('OMP_NUM_THREADS')}, resume {arguments.resume}, from {done + 1}", flush=True)
    crash = how.get("crash", {}).get(arguments.out.name)
    every, last = config["evaluation"]["every"], config["iterations"]
    with open(path, "a") as file:
        for iteration in range(max(done + 1, 0), last + 1):
            time.sleep(how.get("sleep", 0))
            if iteration == crash:
                print("the loss is not a number", flush=True)
                sys.exit(3)
            for row in rows_of(config, iteration, every, last, how):
                file.write(json.dumps(row) + "\n")
                file.flush()


def rows_of(config: dict[str, Any], iteration: int, every: int, last: int, how: dict[str, Any]) -> list[dict[str, Any]]:
    """What an iteration reports, the same in every run of the same settings."""
    draw = random.Random(f"{config['model']} {config['seed']} {iteration} {config['method']}")
    effect = how.get("effect", {}).get(config["method"], 0.0) + 0.02 * config["seed"]
    success = 0.35 + (0.35 + effect) * iteration / last + draw.uniform(-0.01, 0.01)
    spent = {"env_steps": 1500 * iteration, "tokens": 8000 * iteration, "seconds": 2.5 * iteration}
    rows: list[dict[str, Any]] = []
    if iteration:
        rows.append(
            {
                "kind": "train", "iteration": iteration, "success": success, "outcome": success - 0.05, "turns": 11.0,
                "episodes": 128, "faults": 0, "groups": 16, "silent_groups": 2, "invalid": 0.2, "entropy": 0.3,
                "approx_kl": 0.01, "clip_share": 0.1, "grad_norm": 0.5, "scored_tokens": 0,
                "trained_tokens": 9000 * iteration, **spent,
            }
        )  # fmt: skip
    if iteration % every == 0 or iteration == last:
        for mode in ("sampled", "greedy") if iteration == last else ("sampled",):
            number = 512 if iteration == last else 256
            won = round(number * success)
            rows.append(
                {
                    "kind": "eval", "iteration": iteration, "mode": mode, "episodes": number, "successes": won,
                    "success": won / number, "turns": 12.0 - 4 * success, "invalid": 0.25, "tokens_per_episode": 70.0,
                    "by_kind": {"pick": [won // 2, number // 2], "heat": [won - won // 2, number - number // 2]},
                    **spent,
                }
            )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
