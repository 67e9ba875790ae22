"""TOY-A of the specification, and trajectories made of token counts and rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.baselines.core.losses import LossTerm
from agentgym.baselines.core.method import Method, make_method
from agentgym.baselines.core.sample import Sample, Trajectory, make_trajectories
from agentgym.episode import Episode, Turn

PROMPT = 2  # tokens of each observation

Scores = Callable[[Sample], NDArray[np.float32]]


def trajectory(
    rewards: Sequence[float],
    tokens: Sequence[int] | None = None,
    *,
    states: Sequence[str] | None = None,
    actions: Sequence[str] | None = None,
    group: str = "task",
    success: bool | None = None,
    separate: bool = False,
    logp: float = -1.0,
    number: int = 0,
    valid: Sequence[bool] | None = None,
) -> Trajectory:
    """One trajectory, through the same code as a recorded episode.

    Args:
        rewards: one a turn.
        tokens: generated tokens of each turn; one each if None.
        states, actions: of each turn; all different if None.
        group: label of its group, and its task.
        success: whether it counts as one; by the sign of the return if None.
        separate: each turn is a sample of its own.
        logp: log-probability of each generated token.
        number: makes its id unique.
        valid: of each turn.
    """
    counts = list(tokens) if tokens is not None else [1] * len(rewards)
    turns, seen = [], 0
    for index, (reward, count) in enumerate(zip(rewards, counts, strict=True)):
        arrays: dict[str, Any] = {
            "prompt_ids": np.arange(1, 1 + PROMPT, dtype=np.int32),
            "completion_ids": np.arange(10, 10 + count, dtype=np.int32),
            "logprobs": np.full(count, logp, np.float32),
        }
        turns.append(
            Turn(
                observation=f"observation {index}",
                completion=actions[index] if actions is not None else f"act {number} {index}",
                reward=reward,
                valid=valid[index] if valid is not None else True,
                state_key=states[index] if states is not None else f"{number}.{index}",
                # A turn whose context was full has no tokens.
                arrays=arrays if count else {},
                kept_ids=0 if separate else seen,
            )
        )
        seen += PROMPT + count if count else 0
    won = sum(rewards) > 0 if success is None else success
    episode = Episode(
        episode_id=f"{group}#{number}#0",
        task_id=group,
        env="toy",
        seed=number,
        outcome="success" if won else "failure",
        turns=turns,
        total_reward=float(sum(rewards)),
        group=group,
    )
    return make_trajectories([episode])[0]


def group_of(outcomes: Sequence[float], *, group: str = "task", turns: int = 1, **options: Any) -> list[Trajectory]:
    """Trajectories of one task, each with its outcome as the reward of the last turn."""
    return [
        trajectory([0.0] * (turns - 1) + [outcome], group=group, number=number, **options)
        for number, outcome in enumerate(outcomes)
    ]


def toy_a(group: str = "task") -> list[Trajectory]:
    """The four trajectories of TOY-A."""
    plays = [
        ("s0 s1", "a b", [0.0, 1.0]),
        ("s0 s1 s2", "a c d", [0.0, 0.0, 0.0]),
        ("s0 s2", "e d", [0.0, 0.0]),
        ("s0 s2 s1", "e f b", [0.0, 0.0, 1.0]),
    ]
    return [
        trajectory(rewards, states=states.split(), actions=actions.split(), group=group, number=number)
        for number, (states, actions, rewards) in enumerate(plays)
    ]


class FakeServices:
    """Scores from functions of a sample, instead of a model.

    Args:
        logp: copy -> function giving (T,) log-probabilities; a missing copy scores as the behaviour did.
        values: function giving (T,) values.
        answers: what `generate` says, one after the other.
    """

    def __init__(
        self,
        logp: Mapping[str, Scores] | None = None,
        values: Scores | None = None,
        answers: Sequence[str] = (),
    ) -> None:
        self.rng = np.random.default_rng(0)
        self.asked: list[str] = []
        self.prefixes: list[list[int]] = []
        self.prompts: list[Any] = []
        self._logp = dict(logp or {})
        self._values = values
        self._answers = list(answers)

    def logp(
        self, samples: Sequence[Sample], copy: str = "policy", *, prefix: Sequence[Sequence[int]] | None = None
    ) -> list[NDArray[np.float32]]:
        self.asked.append(copy)
        self.prefixes += [list(ids) for ids in prefix or ()]
        score = self._logp.get(copy, lambda sample: sample.behaviour_logp)
        return [score(sample).astype(np.float32) for sample in samples]

    def values(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        score = self._values or (lambda sample: np.zeros(len(sample)))
        return [score(sample).astype(np.float32) for sample in samples]

    def encode(self, text: str, role: str = "system") -> list[int]:
        return [len(word) for word in text.split()]

    def generate(self, prompts: Sequence[Any], max_new_tokens: int = 128) -> list[str]:
        self.prompts += list(prompts)
        return [self._answers.pop(0) for _ in prompts]


def on_actions(*numbers: float) -> Scores:
    """A score that gives these numbers to a sample's generated tokens and 0 to the others."""

    def score(sample: Sample) -> NDArray[np.float32]:
        result = np.zeros(len(sample), np.float32)
        result[sample.action_mask] = numbers
        return result

    return score


def run(
    method: str | Method,
    trajectories: Sequence[Trajectory],
    services: FakeServices | None = None,
    **options: Any,
) -> list[NDArray[np.float64]]:
    """Advantages at the generated tokens of each trajectory, by the hooks that training calls."""
    chosen = make_method(method, options) if isinstance(method, str) else method
    given = services or FakeServices()
    chosen.rewards(trajectories, given)
    chosen.advantages(trajectories, given)
    for each in trajectories:
        for sample in each.samples:
            sample.check()
    return [token_advantages(each) for each in trajectories]


def token_advantages(each: Trajectory) -> NDArray[np.float64]:
    """Advantages at a trajectory's generated tokens, over all its samples."""
    parts = [sample.advantage[sample.action_mask] for sample in each.samples]
    return np.concatenate(parts).astype(np.float64) if parts else np.zeros(0)


def total_loss(
    terms: Sequence[LossTerm], samples: Sequence[Sample], logp: Sequence[Sequence[float]], values: Any = None
) -> tuple[float, list[NDArray[np.float64]]]:
    """The sum of the terms over one mini-batch, and its derivatives by the log-probabilities.

    Args:
        terms: of a method.
        samples: the mini-batch.
        logp: log-probabilities of every token but the first of each sample, or of the generated ones only.
        values: the same for the value head.

    Returns:
        The loss, and (T,) derivatives for each sample, 0 where a token is in no term.
    """
    import torch

    from agentgym.baselines.core.batch import Outputs, make_batch, normalisers

    weights = normalisers(samples, terms)
    batch = make_batch(samples, weights, everything=True)
    spread_out = [_every_token(sample, given) for sample, given in zip(samples, logp, strict=True)]
    given = torch.tensor(np.concatenate([each[1:] for each in spread_out]), dtype=torch.float32, requires_grad=True)
    value = None
    if values is not None:
        whole = [_every_token(sample, each) for sample, each in zip(samples, values, strict=True)]
        value = torch.tensor(np.concatenate([each[1:] for each in whole]), dtype=torch.float32)
    outputs = Outputs(logp=given, entropy=torch.zeros_like(given), value=value, logits=given[:, None])
    loss = sum(term.coefficient * (batch.weights[term.name] * term.loss(batch, outputs)).sum() for term in terms)
    loss.backward()
    derivatives = np.split(given.grad.double().numpy(), np.cumsum([len(each) - 1 for each in samples])[:-1])
    return float(loss.detach()), [np.append(0.0, each) for each in derivatives]


def _every_token(sample: Sample, given: Sequence[float]) -> NDArray[np.float64]:
    result = np.zeros(len(sample))
    if len(given) == sample.actions:
        result[sample.action_mask] = given
    else:
        result[1:] = given
    return result
