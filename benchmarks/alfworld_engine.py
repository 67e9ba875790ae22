"""The native ALFWorld engine against the `alfworld` package, side by side in one run.

    python benchmarks/alfworld_engine.py [--game FOLDER] [--episodes 6] [--resets 5]

Both play the same commands of one game of real size (20 or more receptacles, 50 or more objects; generated unless
--game names one), feedback and admissible commands are compared at every step, and step times, reset times and the
memory that one more environment costs are printed with their ratios. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from agentgym.envs.alfworld.engine import Engine
from agentgym.envs.alfworld.game import GAME_FILE, TRAJECTORY_FILE, Game, parse_game
from agentgym.envs.alfworld.textworld_backend import TextWorldEngine

TARGETS = {"step": 300.0, "reset": 100.0, "memory": 10.0}
COMMANDS_AN_EPISODE = 40


def read_files(folder: Path | None) -> dict[str, bytes]:
    """Contents of the game's two files."""
    if folder is not None:
        return {name: (folder / name).read_bytes() for name in (GAME_FILE, TRAJECTORY_FILE)}
    from agentgym.tasks.alfworld.generate import generate

    return generate(size="real", seed=0, index=0, split="train").files()


def parse(files: dict[str, bytes], name: str = "benchmark") -> Game:
    return parse_game(files[GAME_FILE], files[TRAJECTORY_FILE], name=name)


def record_episodes(game: Game, count: int) -> list[list[str]]:
    """Random episodes that handle things more often than they walk about, with some junk."""
    rng = random.Random(0)
    episodes = []
    for _ in range(count):
        engine, commands = Engine(game), []
        for _ in range(COMMANDS_AN_EPISODE):
            admissible = engine.admissible()
            local = [command for command in admissible if not command.startswith(("go to", "help", "inv"))]
            command = rng.choice(local if rng.random() < 0.6 else admissible)
            commands.append("juggle everything" if rng.random() < 0.1 else command)
            engine.step(commands[-1])
        episodes.append(commands)
    return episodes


def play(engine: Engine | TextWorldEngine, commands: list[str]) -> tuple[list[float], list[object]]:
    """Seconds of each step with its admissible commands, and what was said."""
    engine.reset()
    seconds, said = [], []
    for command in commands:
        start = time.perf_counter()
        feedback, admissible, won = engine.step(command), engine.admissible(), engine.won
        seconds.append(time.perf_counter() - start)
        said.append((feedback, admissible, won))
    return seconds, said


def median_time(call: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def report(what: str, ours: float, theirs: float, unit: str, scale: float) -> float:
    ratio = theirs / ours
    print(f"{what:42} native {ours * scale:11.4g} {unit:3} reference {theirs * scale:9.4g} {unit:3} {ratio:9.0f} x")
    return ratio


def native_memory(files: dict[str, bytes], distinct_games: bool) -> float:
    """Bytes that one more environment costs, measured in a fresh process over many of them."""
    code = (
        "import sys, gc, json, psutil\n"
        "from agentgym.envs.alfworld.engine import Engine\n"
        "from benchmarks.alfworld_engine import parse\n"
        "files, distinct = json.load(sys.stdin)\n"
        "files = {name: text.encode() for name, text in files.items()}\n"
        "def make(count, game):\n"
        "    made = [Engine(parse(files) if distinct else game) for _ in range(count)]\n"
        "    for e in made: e.reset(), e.step(e.admissible()[0]), e.admissible()\n"
        "    return made\n"
        "game = parse(files)\n"
        "count = 200 if distinct else 2000\n"
        "keep = make(10, game); gc.collect(); before = psutil.Process().memory_info().rss\n"
        "keep += make(count, game); gc.collect()\n"
        "print((psutil.Process().memory_info().rss - before) / count)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([{name: content.decode() for name, content in files.items()}, distinct_games]).encode(),
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    return float(done.stdout)


def reference_memory(files: dict[str, bytes], imported: int) -> tuple[float, float]:
    """Bytes of one environment in its own process: over a process that has only imported the packages, and in all."""
    with TextWorldEngine(files) as engine:
        engine.reset()
        for command in engine.admissible()[:5]:
            engine.step(command)
        rss = psutil.Process(engine.process_id).memory_info().rss
    return float(rss - imported), float(rss)


def import_baseline() -> int:
    """Resident bytes of a process after importing the reference packages."""
    code = (
        "import psutil, textworld, textworld.envs\n"
        "from alfworld.agents.environment import alfred_tw_env\n"
        "print(psutil.Process().memory_info().rss)"
    )
    return int(subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True).stdout)


def reference_leak(files: dict[str, bytes]) -> float:
    """Bytes that every further environment object keeps for ever inside one reference process."""
    code = (
        "import sys, json, psutil, textworld\n"
        "from textworld.envs import PddlEnv\n"
        "data = json.load(sys.stdin)\n"
        "def one():\n"
        "    env = PddlEnv(textworld.EnvInfos()); env.load(data)\n"
        "for _ in range(2): one()\n"
        "before = psutil.Process().memory_info().rss\n"
        "for _ in range(8): one()\n"
        "sys.stderr.write(str((psutil.Process().memory_info().rss - before) / 8))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], input=files[GAME_FILE], capture_output=True, check=True)
    return float(done.stderr.split()[-1])


def profile(game: Game, episodes: list[list[str]]) -> None:
    engine = Engine(game)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(20):
        for commands in episodes:
            play(engine, commands)
    profiler.disable()
    print("\nWhere the native engine's time goes (cProfile, own time):")
    rows = sorted(pstats.Stats(profiler).stats.items(), key=lambda row: -row[1][2])  # type: ignore[attr-defined]
    total = sum(row[1][2] for row in rows)
    for (file, _, function), (_, calls, own, _, _) in rows[:8]:
        print(f"  {100 * own / total:5.1f} %  {calls:8d} calls  {Path(file).name}:{function}")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--game", type=Path, help="folder with game.tw-pddl and traj_data.json")
    arguments.add_argument("--episodes", type=int, default=6)
    arguments.add_argument("--resets", type=int, default=5)
    options = arguments.parse_args()

    files = read_files(options.game)
    game = parse(files)
    print(f"{len(game.receptacle_names)} receptacles, {len(game.object_names)} objects: {game.task}\n")
    episodes = record_episodes(game, options.episodes)

    native = Engine(game)
    with TextWorldEngine(files) as reference:
        their_reset = median_time(reference.reset, options.resets)
        their_load = median_time(lambda: reference.load(files), 2)
        their_steps, our_steps = [], []
        for commands in episodes:
            seconds, theirs = play(reference, commands)
            their_steps += seconds
            _, ours = play(native, commands)
            if ours != theirs:
                raise SystemExit("the two engines differ; run tests/envs/test_alfworld_textworld.py")
            for _ in range(20):
                our_steps += play(native, commands)[0]
    lengths = [len(admissible) for commands in episodes for _, admissible, _ in play(native, commands)[1]]  # type: ignore[misc]
    print(f"{len(their_steps)} equal steps; {statistics.mean(lengths):.0f} admissible commands on average")

    def first_look() -> object:
        native.step("look")  # leaves the state alone, so that reset really builds everything anew
        return native.reset(), native.admissible()

    def from_files() -> object:
        engine = Engine(parse(files))
        return engine.reset(), engine.admissible()

    ratios = {
        "step": report(
            "step with admissible commands (median)",
            statistics.median(our_steps),
            statistics.median(their_steps),
            "us",
            1e6,
        )
    }
    report("step with admissible commands (mean)", statistics.mean(our_steps), statistics.mean(their_steps), "us", 1e6)
    report("reset, game parsed already", median_time(first_look, 500), their_reset, "us", 1e6)
    ratios["reset"] = report("reset, files parsed anew", median_time(from_files, 30), their_reset, "us", 1e6)
    report("load and reset another game", median_time(from_files, 30), their_load + their_reset, "us", 1e6)

    print()
    baseline = import_baseline()
    added, whole = reference_memory(files, baseline)
    shared, distinct = native_memory(files, False), native_memory(files, True)
    report("memory of one more environment, same game", shared, added, "KB", 1 / 1024)
    ratios["memory"] = report("memory of one more environment, new game", distinct, added, "KB", 1 / 1024)
    report("the same, against its whole process", distinct, whole, "KB", 1 / 1024)
    report("against what each new object leaks", distinct, reference_leak(files), "KB", 1 / 1024)
    print(
        f"(the reference's process holds {baseline / 2**20:.0f} MB after its imports; a snapshot of ours has "
        f"{len(native.snapshot())} bytes)"
    )

    profile(game, episodes)
    print()
    missed = [
        f"{what} {ratios[what]:.0f} x < {target:.0f} x" for what, target in TARGETS.items() if ratios[what] < target
    ]
    print("targets missed: " + ", ".join(missed) if missed else "all targets met")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
