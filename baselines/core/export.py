"""Training samples as a Parquet table, for trainers elsewhere (verl, SkyRL and others).

One row a sample. Columns follow verl's names for what they hold: a row's tokens are `prompts` (up to the first
generated token) followed by `responses`; `response_mask` marks the generated tokens of the latter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.baselines.core.method import Method
from agentgym.baselines.core.sample import Sample, Trajectory, make_trajectories, spread
from agentgym.episode import final_episodes, read_episodes
from agentgym.errors import UsageError, require_extra


def sample_rows(trajectories: Sequence[Trajectory]) -> Iterator[dict[str, Any]]:
    """The rows of trajectories' samples, in order.

    Yields:
        data_source (environment), uid (group), episode_id, task_id, turn, role, prompts, responses (lists of ids),
        response_mask, old_log_probs, advantages (one a token of responses), reward (outcome after shaping), success,
        policy_version. Parquet keeps the lists as 64-bit numbers.
    """
    for trajectory in trajectories:
        for sample in trajectory.samples:
            start = int(np.argmax(sample.action_mask))
            yield {
                "data_source": trajectory.episode.env,
                "uid": trajectory.group,
                "episode_id": sample.episode_id,
                "task_id": trajectory.episode.task_id,
                "turn": sample.turn,
                "role": sample.role,
                "prompts": sample.input_ids[:start].tolist(),
                "responses": sample.input_ids[start:].tolist(),
                "response_mask": sample.action_mask[start:].astype(np.int32).tolist(),
                "old_log_probs": _list(sample, sample.behaviour_logp, start),
                "advantages": _list(sample, sample.advantage, start),
                "reward": trajectory.outcome,
                "success": trajectory.success,
                "policy_version": sample.version,
            }


def _list(sample: Sample, values: Any, start: int) -> list[float]:
    return [float(value) for value in values[start:]]


class _NoServices:
    """Stands for the trainer, which is not there."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(f"this method's rewards ask for `services.{name}`, which only a training run has")


def export_samples(run: Path, out: Path, method: Method) -> int:
    """Writes the samples of a run directory, with a method's turn advantages.

    Args:
        run: from `agentgym eval` with a policy that records tokens (hf, vllm), or a training run with its episodes.
        out: Parquet file.
        method: reckons the advantages; one that needs no scores of a model.

    Returns:
        Number of rows.

    Raises:
        UsageError: if the run holds no tokens.
    """
    arrow = require_extra("pyarrow", extra="parquet")
    parquet = require_extra("pyarrow.parquet", extra="parquet")
    trajectories = make_trajectories(final_episodes(read_episodes(run, arrays=True)))
    if not trajectories:
        raise UsageError(
            f"{run} holds no tokens: play it with a policy that records them (--policy hf:MODEL or vllm:MODEL)"
        )
    kind = type(method)
    if kind.advantages is not Method.advantages or method.value_head or method.teacher:
        raise UsageError(
            f"{kind.card.name} reckons its advantages with a model's scores, which a run directory does not hold; "
            "export with grpo, gigpo or another method of turn advantages"
        )
    kind.rewards(method, trajectories, _NoServices())
    for trajectory, advantage in zip(trajectories, method.turn_advantages(trajectories), strict=True):
        trajectory.advantages = advantage
        spread(trajectory)
    rows = list(sample_rows(trajectories))
    part = out.with_name(out.name + ".part")
    parquet.write_table(arrow.Table.from_pylist(rows), part)
    part.replace(out)
    return len(rows)
