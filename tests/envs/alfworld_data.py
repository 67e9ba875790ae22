"""The golden ALFWorld games and transcripts, as the tests need them."""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from typing import Any

from agentgym.envs.alfworld.game import Game, parse_game
from tests.shared_data import shared

DATA_SETS = ("alfworld", "alfworld_old")


@lru_cache
def transcripts(data_set: str) -> list[dict[str, Any]]:
    with gzip.open(shared("data", data_set, "transcripts.jsonl.gz"), "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@lru_cache
def game_files(data_set: str, game_id: str) -> dict[str, bytes]:
    """Content of a game's two files as the reference loader wants them."""
    record = json.loads(shared("data", data_set, "games", f"{game_id}.json").read_text("utf-8"))
    game = record["game"]
    for key in ("pddl_domain", "grammar"):
        game[key] = shared("data", data_set, *game[key].removeprefix("@").split("/")).read_text("utf-8")
    game["grammar"] = game["grammar"].replace("UNKNOWN GOAL", record["task"])
    return {"game.tw-pddl": json.dumps(game).encode(), "traj_data.json": json.dumps(record["traj_data"]).encode()}


@lru_cache
def golden_game(data_set: str, game_id: str) -> Game:
    files = game_files(data_set, game_id)
    return parse_game(files["game.tw-pddl"], files["traj_data.json"], name=game_id)


def game_ids(data_set: str) -> list[str]:
    return sorted(path.stem for path in shared("data", data_set, "games").glob("*.json"))
