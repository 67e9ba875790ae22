"""Environments and methods that are there to break or to be watched in tests of the trainer."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.losses import LossTerm, over
from agentgym.baselines.core.method import Copy, Method, score
from agentgym.env import Outcome
from agentgym.registry import EnvCard, register_env
from agentgym.task import Task
from tests.worlds import CountEnv


class DyingEnv(CountEnv):
    """Kills its worker at the first step, as often as the file `marker` has room for; each time adds a byte.

    Args:
        marker: the file.
        deaths: how often.
    """

    def __init__(self, *, marker: str, deaths: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.marker = Path(marker)
        self.deaths = deaths

    def _act(self, action: str) -> Outcome:
        died = self.marker.stat().st_size if self.marker.exists() else 0
        if died < self.deaths:
            with open(self.marker, "ab") as file:
                file.write(b"x")
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._act(action)


class DuetEnv(CountEnv):
    """Two roles that act in turn; the left one is rewarded for "up", the right one for "down"."""

    family: ClassVar[str] = "duet"
    capabilities: ClassVar[frozenset[str]] = frozenset({"state_key", "admissible", "expert"})

    def _start(self, task: Task) -> Outcome:
        self.turn = 0
        return super()._start(task)

    def _act(self, action: str) -> Outcome:
        wanted = self.expert()
        self.turn += 1
        self.state.count += action == wanted
        return Outcome(
            f"count is {self.state.count}",
            reward=float(action == wanted),
            valid=action in ("up", "down"),
            success=1 if self.turn == 6 and self.state.count == 6 else 0,
            done=self.turn == 6,
        )

    def _role(self) -> str:
        return ("left", "right")[self.turn % 2]

    def expert(self) -> str | None:
        return ("up", "down")[self.turn % 2]


register_env(EnvCard(id="test/Dying-v0", family="dying", entry_point="tests.baselines.odd:DyingEnv"))
register_env(EnvCard(id="test/Duet-v0", family="duet", entry_point="tests.baselines.odd:DuetEnv"))

_CARD = Card(name="odd", title="Odd", paper="none", grade="standard", source="these tests")


class NotANumber(Method):
    """GRPO whose loss is not a number from the given optimiser step on."""

    card = _CARD
    at: ClassVar[int] = 3
    kind: ClassVar[str] = "loss"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps = 0

    def losses(self) -> list[LossTerm]:
        def weights(samples: Any) -> Any:
            self.steps += 1
            return over("pg_weight", "token-mean")(samples)

        def loss(batch: Any, outputs: Any) -> Any:
            if self.steps < self.at:
                return outputs.logp * 0.01
            if self.kind == "loss":
                return outputs.logp * float("nan")
            return (outputs.logp - outputs.logp.detach()).abs().sqrt()  # 0, with an infinite slope

        return [LossTerm("odd", loss, weights)]


class NoGradient(NotANumber):
    """GRPO whose gradient is not a number from the given optimiser step on."""

    kind: ClassVar[str] = "gradient"


class Copies(Method):
    """GRPO that keeps every kind of copy and reports how far the policy is from each."""

    card = _CARD
    copies: ClassVar[dict[str, Copy]] = {  # type: ignore[assignment]
        "first": Copy(),
        "stale": Copy(every=2),
        "average": Copy(decay=0.5),
        "stale_on_disk": Copy(every=2, on_disk=True),
        "average_on_disk": Copy(decay=0.5, on_disk=True),
    }

    def advantages(self, trajectories: Sequence[Any], services: Any) -> None:
        super().advantages(trajectories, services)
        for name in ("policy", *self.copies):
            score(trajectories, services, name, name)
        samples = [sample for trajectory in trajectories for sample in trajectory.samples]
        own = np.concatenate([sample.fields["policy"] for sample in samples])
        self.far = {
            f"far/{name}": np.abs(own - np.concatenate([sample.fields[name] for sample in samples])).mean()
            for name in self.copies
        }

    def after(self, iteration: int, trajectories: Sequence[Any]) -> dict[str, float]:
        return self.far


class Baseline(Method):
    """REINFORCE with a running mean of the outcomes, which goes from iteration to iteration."""

    card = _CARD

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mean = np.float64(0.0)

    def turn_advantages(self, trajectories: Sequence[Any]) -> list[Any]:
        found = [np.full(len(t), t.outcome - self.mean) for t in trajectories]
        self.mean += 0.3 * (np.mean([t.outcome for t in trajectories]) - self.mean)
        return found

    def after(self, iteration: int, trajectories: Sequence[Any]) -> dict[str, float]:
        return {"baseline": self.mean}

    def state(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.mean = np.float64(state["mean"])


class Stateless(Method):
    """Cannot be saved."""

    card = _CARD

    def state(self) -> dict[str, Any]:
        return {"what": object()}
