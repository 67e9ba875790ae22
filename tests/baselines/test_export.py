"""A run's samples as a Parquet table: the tokens of the log, masks and a method's advantages, for other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import tests.worlds
from agentgym.baselines.core.export import export_samples
from agentgym.baselines.core.method import make_method
from agentgym.episode import Episode, final_episodes, read_episodes
from agentgym.errors import UsageError
from agentgym.evaluate import evaluate, plan
from agentgym.policies.base import Reply, Request
from tests.shared_data import need

need("pyarrow")

COLUMNS = (
    "data_source uid episode_id task_id turn role prompts responses response_mask old_log_probs advantages reward "
    "success policy_version"
)


class WindowPolicy(tests.worlds.TokenPolicy):
    """Makes its prompts afresh each turn."""

    def _reply(self, request: Request) -> Reply:
        return msgspec.structs.replace(super()._reply(request), kept_ids=0)


def play(folder: Path, policy: Any) -> Path:
    """Three tasks, four times each; some succeed."""
    config = plan("test/Count-v0", env_kwargs={"max_turns": 6}, episodes=12, repeats=4)
    evaluate(config, policy, folder, backend="serial")
    return folder


def export(run: Path, method: str = "grpo", **options: Any) -> list[dict[str, Any]]:
    import pyarrow.parquet

    out = run / "samples.parquet"
    count = export_samples(run, out, make_method(method, options))
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(out).to_pylist()
    assert len(rows) == count
    return rows


def by_id(run: Path) -> dict[str, Episode]:
    return {episode.episode_id: episode for episode in final_episodes(read_episodes(run, arrays=True))}


def outcome_advantages(episodes: dict[str, Episode]) -> dict[str, float]:
    """GRPO's, by hand."""
    found: dict[str, float] = {}
    for task in {episode.task_id for episode in episodes.values()}:
        group = [episode for episode in episodes.values() if episode.task_id == task]
        rewards = np.array([episode.total_reward for episode in group])
        centred = rewards - rewards.mean()
        scaled = centred / (centred.std(ddof=1) + 1e-6)
        found |= {episode.episode_id: value for episode, value in zip(group, scaled, strict=True)}
    return found


def test_rows_hold_the_tokens_of_the_log_and_the_advantages(tmp_path: Path) -> None:
    run = play(tmp_path, tests.worlds.TokenPolicy(noise=0.2))
    rows, episodes = export(run), by_id(run)
    assert [row["episode_id"] for row in rows] == sorted(episodes)
    assert 0 < sum(row["success"] for row in rows) < 12
    advantages = outcome_advantages(episodes)
    for row in rows:
        assert list(row) == COLUMNS.split()
        episode = episodes[row["episode_id"]]
        arrays = [turn.arrays for turn in episode.turns]
        ids = np.concatenate([part[name] for part in arrays for name in ("prompt_ids", "completion_ids")])
        assert row["prompts"] + row["responses"] == ids.tolist()
        assert row["prompts"] == [0, 1, 2, 3, 4]
        mask = row["response_mask"]
        assert mask == [1, 1, *[0, 0, 0, 0, 0, 1, 1] * (len(arrays) - 1)]
        sampled = np.concatenate([part["logprobs"] for part in arrays])
        assert [p for p, own in zip(row["old_log_probs"], mask, strict=True) if own] == sampled.tolist()
        assert row["advantages"] == pytest.approx([advantages[row["episode_id"]] * own for own in mask], abs=1e-6)
        assert row["reward"] == episode.total_reward
        assert row["success"] == (episode.outcome == "success")
        assert row["task_id"] == episode.task_id == row["uid"]
        assert (row["data_source"], row["role"], row["turn"], row["policy_version"]) == ("test/Count-v0", "agent", 0, 0)


def test_advantages_of_each_turn(tmp_path: Path) -> None:
    run, varied = play(tmp_path, tests.worlds.TokenPolicy(noise=0.2)), 0
    for row in export(run, "gigpo"):
        pairs = np.array(row["advantages"])[np.array(row["response_mask"]) == 1].reshape(-1, 2)
        assert (pairs[:, 0] == pairs[:, 1]).all()  # one a turn, at both of its tokens
        varied += len(set(pairs[:, 0])) > 1
    assert varied
    plain = export(run, "gigpo", step_weight=0.0)
    assert [row["advantages"] for row in plain] == [row["advantages"] for row in export(run)]


def test_prompts_made_afresh_give_a_row_a_turn(tmp_path: Path) -> None:
    run = play(tmp_path, WindowPolicy(noise=0.2))
    rows, episodes = export(run), by_id(run)
    assert len(rows) == sum(len(episode.turns) for episode in episodes.values()) > 12
    advantages = outcome_advantages(episodes)
    for row in rows:
        arrays = episodes[row["episode_id"]].turns[row["turn"]].arrays
        assert row["prompts"] == arrays["prompt_ids"].tolist()
        assert row["responses"] == arrays["completion_ids"].tolist()
        assert row["response_mask"] == [1, 1]
        assert row["advantages"] == pytest.approx([advantages[row["episode_id"]]] * 2, abs=1e-6)


def test_token_ids_and_numbers_keep_their_types_and_exact_values(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    run = play(tmp_path, tests.worlds.TokenPolicy(noise=0.2))
    assert max(max(row["responses"]) for row in export(run)) == 2**31 - 1
    schema = pyarrow.parquet.read_schema(run / "samples.parquet")
    for name in ("prompts", "responses", "response_mask"):
        assert pyarrow.types.is_integer(schema.field(name).type.value_type)
    for name in ("old_log_probs", "advantages"):
        assert pyarrow.types.is_floating(schema.field(name).type.value_type)
    assert schema.field("success").type == pyarrow.bool_()


def test_a_run_without_tokens_is_a_clear_error(tmp_path: Path) -> None:
    run = play(tmp_path, tests.worlds.UpPolicy())
    with pytest.raises(UsageError, match="holds no tokens: play it with a policy that records them"):
        export(run)
    assert not (run / "samples.parquet").exists()


def test_the_command(tmp_path: Path) -> None:
    import pyarrow.parquet

    from agentgym.cli import app

    run, out = play(tmp_path / "run", tests.worlds.TokenPolicy(noise=0.2)), tmp_path / "out.parquet"
    done = CliRunner().invoke(
        app, ["samples", str(run), "--out", str(out), "--method", "gigpo", "--option", "step_weight=0"]
    )
    assert done.exit_code == 0, done.output
    assert done.output.split() == ["12", "samples", "in", str(out)]
    assert pyarrow.parquet.read_table(out).to_pylist() == export(run)
