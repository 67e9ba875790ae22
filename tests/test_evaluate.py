"""Evaluation: whatever interrupts a run, --resume ends it with each episode exactly once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tests.worlds as worlds
from agentgym.episode import (
    EPISODES,
    Episode,
    RunConfig,
    RunWriter,
    final_episodes,
    read_config,
    read_episodes,
)
from agentgym.errors import DataError, UsageError
from agentgym.evaluate import PolicySpec, evaluate, is_complete, plan, policies_of
from agentgym.replay import replay_run
from tests.test_rollout import comparable

POLICY = {"*": PolicySpec(spec="tests.worlds:UpPolicy", options={"noise": 0.3})}


def play(out: Path, n: int = 10, **kwargs: Any) -> RunConfig:
    config = plan("count", episodes=n, **{k: kwargs.pop(k) for k in ("repeats", "seed") if k in kwargs})
    evaluate(config, POLICY, out, **{"backend": "serial", **kwargs})
    return read_config(out)


def test_a_run_can_be_read_resumed_and_replayed(tmp_path: Path) -> None:
    config = play(tmp_path / "run", repeats=2, seed=4)
    episodes = read_episodes(tmp_path / "run")
    assert sorted(e.episode_id for e in episodes) == sorted(config.episode_ids())
    assert is_complete(config, episodes)
    again = evaluate(config, policies_of(config), tmp_path / "run", resume=True, backend="serial")
    assert again.overall.episodes == 10
    assert len(read_episodes(tmp_path / "run")) == 10
    report = replay_run(tmp_path / "run", backend="serial")
    assert report.ok
    assert report.episodes == 10


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_change_the_log(tmp_path: Path, workers: int) -> None:
    play(tmp_path / "alone")
    play(tmp_path / "many", backend="processes", workers=workers, envs_per_worker=2)
    assert comparable(read_episodes(tmp_path / "alone")) == comparable(read_episodes(tmp_path / "many"))


CHILD = """
import sys, tests.worlds
from pathlib import Path
from agentgym.cli import main
sys.argv = ["agentgym", "eval", *sys.argv[1:]]
main()
"""


def start(out: Path, resume: bool, tmp_path: Path) -> subprocess.Popen[bytes]:
    if resume:
        arguments = ["--resume", str(out)]
    else:
        arguments = [
            "--env",
            "count",
            "--policy",
            "tests.worlds:UpPolicy",
            "-P",
            "noise=0.3",
            "-n",
            "40",
            "--out",
            str(out),
        ]
        arguments += ["-E", "delay=0.005"]
    arguments += ["--workers", "2", "--no-report"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with open(tmp_path / "log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments], stdout=log, stderr=log, env=environment, start_new_session=True
        )


@pytest.mark.slow
def test_kill_loop_neither_loses_nor_repeats_an_episode(tmp_path: Path) -> None:
    """SIGKILL, SIGTERM and Ctrl-C at random moments, until the run is complete."""
    out = tmp_path / "run"
    rng = random.Random(7)
    kills = 0
    for attempt in range(60):
        child = start(out, (out / "run.toml").exists(), tmp_path)
        signum = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT][attempt % 3]
        try:
            # from before the interpreter is up to well into the episodes
            child.wait(timeout=rng.uniform(0.2, 2.2) if attempt else 0.9)
            break
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signum)
            child.wait(timeout=30)
            kills += 1
    log = (tmp_path / "log").read_text()
    assert child.returncode == 0, log[-3000:]
    assert kills >= 2, "the loop must interrupt at least twice to mean anything"
    config, episodes = read_config(out), read_episodes(out)
    assert sorted(e.episode_id for e in episodes) == sorted(config.episode_ids())
    assert all(e.outcome != "fault" for e in episodes)
    whole = tmp_path / "whole"
    evaluate(msgspec.structs.replace(config, name="whole"), policies_of(config), whole, backend="serial")
    assert comparable(final_episodes(episodes)) == comparable(read_episodes(whole))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _workers_of(child.pid):
        time.sleep(0.05)
    assert not _workers_of(child.pid), "worker processes outlived their runner"


def _workers_of(session: int) -> list[str]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(status.parent.name)
    return found


def test_token_arrays_come_back_as_they_were_sampled_also_after_a_crash(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = plan("count", episodes=6)
    specs = {"*": PolicySpec(spec="tests.worlds:TokenPolicy", options={"noise": 0.3})}
    evaluate(config, specs, run, backend="serial")
    config = read_config(run)
    whole = read_episodes(run, arrays=True)
    for episode in whole:
        for index, turn in enumerate(episode.turns):
            assert turn.arrays["prompt_ids"].tolist() == list(range(10 * index, 10 * index + 5))
            assert turn.arrays["completion_ids"].tolist() == [index, 2**31 - 1]
            assert turn.arrays["logprobs"].dtype == np.float32
            assert turn.kept_ids == 7 * index
    log, arrays = run / EPISODES, run / "arrays.bin"
    log.write_bytes(log.read_bytes()[:-20])  # torn line, its arrays already written
    arrays.write_bytes(arrays.read_bytes() + b"torn")
    evaluate(config, specs, run, resume=True, backend="serial")
    again = read_episodes(run, arrays=True)
    assert [e.episode_id for e in again] == [e.episode_id for e in whole]
    for before, after in zip(whole, again, strict=True):
        for one, two in zip(before.turns, after.turns, strict=True):
            assert all(np.array_equal(one.arrays[name], two.arrays[name]) for name in one.arrays)
    arrays.write_bytes(arrays.read_bytes()[:40])
    with pytest.raises(DataError, match="lies outside the file"):
        read_episodes(run, arrays=True)
    notices: list[str] = []
    evaluate(config, specs, run, resume=True, backend="serial", notice=notices.append)
    assert "lacks the token arrays" in notices[0]
    assert len(read_episodes(run, arrays=True)) == 6


def test_a_torn_last_line_is_dropped_with_a_notice_and_played_again(tmp_path: Path) -> None:
    config = play(tmp_path / "run")
    log = tmp_path / "run" / EPISODES
    whole = comparable(read_episodes(tmp_path / "run"))
    for cut in (1, 30, 300):
        log.write_bytes(log.read_bytes()[:-cut])
        notices: list[str] = []
        evaluate(config, POLICY, tmp_path / "run", resume=True, backend="serial", notice=notices.append)
        assert len(notices) == 1
        assert "torn last line" in notices[0]
        assert comparable(read_episodes(tmp_path / "run")) == whole


def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    play(tmp_path / "run")
    log = tmp_path / "run" / EPISODES
    lines = log.read_bytes().splitlines(keepends=True)
    for bad in (b"\n", b"{}\n", lines[3][:50] + b"\n", b'{"episode_id": 3}\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n"):
        log.write_bytes(b"".join([*lines[:3], bad, *lines[4:]]))
        with pytest.raises(DataError, match=r"line 4 is damaged.*sed -i '4d'"):
            read_episodes(tmp_path / "run")


def test_another_schema_or_another_run_is_refused(tmp_path: Path) -> None:
    config = play(tmp_path / "run")
    with pytest.raises(UsageError, match="already holds a run"):
        evaluate(config, POLICY, tmp_path / "run", backend="serial")
    with pytest.raises(UsageError, match="policies differs"):
        evaluate(config, {"*": PolicySpec(spec="random")}, tmp_path / "run", resume=True, backend="serial")
    with pytest.raises(UsageError, match="seed differs"):
        evaluate(msgspec.structs.replace(config, seed=1), POLICY, tmp_path / "run", resume=True, backend="serial")
    file = tmp_path / "run" / "run.toml"
    file.write_text(file.read_text().replace("schema = 1", "schema = 99"))
    with pytest.raises(DataError, match="schema 99"):
        read_config(tmp_path / "run")
    file.write_text("not toml [")
    with pytest.raises(DataError, match="cannot be read"):
        read_config(tmp_path / "run")
    with pytest.raises(DataError, match="no such file"):
        read_config(tmp_path / "nowhere")


def test_two_writers_cannot_share_a_directory(tmp_path: Path) -> None:
    config = play(tmp_path / "run")
    with RunWriter(tmp_path / "run", config, resume=True), pytest.raises(UsageError, match="another process"):
        RunWriter(tmp_path / "run", config, resume=True)


def test_a_full_disk_ends_the_run_and_keeps_what_was_finished(tmp_path: Path) -> None:
    """A file-size limit stands for the full disk: the write fails half-way as it would there."""
    code = """
import resource, signal, sys, tests.worlds
from agentgym.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
sys.argv = ["agentgym", "eval", "--env", "count", "--policy", "tests.worlds:UpPolicy", "-n", "30", "--no-report",
            "--backend", "serial", "--out", sys.argv[1]]
main()
"""
    out = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "--resume" in done.stderr
    kept = read_episodes(out)
    assert 0 < len(kept) < 30
    config = read_config(out)
    evaluate(config, policies_of(config), out, resume=True, backend="serial")
    assert len(read_episodes(out)) == 30


def test_replay_names_the_first_turn_that_differs(tmp_path: Path) -> None:
    play(tmp_path / "run")
    log = tmp_path / "run" / EPISODES
    episodes = read_episodes(tmp_path / "run")
    victim = episodes[2]
    forgeries = {
        "observation": lambda e: setattr(e.turns[1], "observation", "count is 7, noise 0.5"),
        "reward": lambda e: setattr(e.turns[1], "reward", 1.0),
        "outcome": lambda e: setattr(e, "outcome", "failure" if e.outcome == "success" else "success"),
        "final_observation": lambda e: setattr(e, "final_observation", "won"),
    }
    whole = log.read_bytes()
    for field, forge in forgeries.items():
        edited = msgspec.json.decode(msgspec.json.encode(victim), type=type(victim))
        forge(edited)
        lines = [msgspec.json.encode(edited if e is victim else e) for e in episodes]
        log.write_bytes(b"\n".join(lines) + b"\n")
        report = replay_run(tmp_path / "run", backend="serial")
        assert [d.field for d in report.differences] == [field]
        assert report.differences[0].episode_id == victim.episode_id
        assert report.differences[0].turn == (1 if field in ("observation", "reward") else -1)
        log.write_bytes(whole)
    shorter = msgspec.json.decode(msgspec.json.encode(victim), type=type(victim))
    shorter.turns = shorter.turns[:-1]
    log.write_bytes(b"\n".join(msgspec.json.encode(shorter if e is victim else e) for e in episodes) + b"\n")
    (difference,) = replay_run(tmp_path / "run", backend="serial").differences
    assert "goes on after the last recorded turn" in difference.replayed


def test_replay_notices_what_is_missing_repeated_or_renamed(tmp_path: Path) -> None:
    play(tmp_path / "run")
    log = tmp_path / "run" / EPISODES
    episodes = read_episodes(tmp_path / "run")

    def verdict(changed: list[Episode]) -> str:
        log.write_bytes(b"".join(msgspec.json.encode(episode) + b"\n" for episode in changed))
        report = replay_run(tmp_path / "run", backend="serial")
        assert not report.ok
        return "; ".join([*report.problems, *map(str, report.differences)])

    def copy(episode: Episode, **changes: Any) -> Episode:
        return msgspec.structs.replace(episode, **changes)

    assert "8 of 10 planned episodes are missing" in verdict(episodes[:2])
    assert "10 of 10 planned episodes are missing" in verdict([])
    assert "more than one end" in verdict([*episodes, episodes[0]])
    assert "not in the plan" in verdict([*episodes, copy(episodes[0], episode_id="count/0000#9#0", seed=9)])
    easy = [copy(episodes[0], episode_id=episode.episode_id) for episode in episodes]
    assert "episode_id was count/0001#0#0" in verdict(easy)
    hidden = copy(episodes[0], outcome="fault", cause="infrastructure", total_reward=None)
    assert "had already ended" in verdict([hidden, *episodes[1:]])
    for field, value in (("kind", "easy"), ("split", "train"), ("env", "test/Other-v0")):
        assert f"{field} was '{value}'" in verdict([copy(episodes[0], **{field: value}), *episodes[1:]])


def test_a_policy_object_can_be_evaluated(tmp_path: Path) -> None:
    summary = evaluate(plan("count", episodes=3), worlds.UpPolicy(), str(tmp_path / "run"), backend="serial")
    assert summary.overall.success.value == 1.0
    with pytest.raises(UsageError, match="unknown back end"):
        evaluate(plan("count", episodes=3), worlds.UpPolicy(), tmp_path / "other", backend="seriel")
    assert not (tmp_path / "other").exists()


def test_plans_refuse_what_cannot_be_played(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lower --episodes or raise --repeats"):
        plan("count", episodes=41)
    with pytest.raises(UsageError, match="must be a multiple of repeats"):
        plan("count", episodes=6, repeats=4)
    with pytest.raises(UsageError, match="each only once"):
        plan("count", tasks=["count/0000", "count/0000"])
    with pytest.raises(UsageError, match="seed must be"):
        plan("count", seed=-1)
    with pytest.raises(UsageError, match="unknown split"):
        plan("count", split="tset")
    with pytest.raises(UsageError, match="unknown option"):
        plan("count", env_kwargs={"dealy": 1})
    assert len(plan("count", episodes=80, repeats=2).tasks) == 40
    assert worlds.CountEnv.family == plan("count", episodes=1).tasks[0].split("/")[0]
