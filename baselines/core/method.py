"""What a method is: a card, numbers, and the hooks it needs. The defaults make GRPO three lines.

In each iteration the trainer calls, in this order

    plan        which episodes to play, in which groups
    context     a text added to the system prompt of an episode (skills, memory, reflections)
    rewards     shape the rewards of each turn
    keep        which groups to train on (and, with `refills`, to sample until there are enough)
    advantages  one number a turn, or one a token
    losses      terms that are summed over each mini-batch
    after       between-iteration state, new copies, decay

A method is chosen by name (a file of `agentgym.baselines.methods`) or as "module:Class".
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import pkgutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.estimators import normalise
from agentgym.baselines.core.losses import (
    Aggregation,
    LossTerm,
    clipped_policy_gradient,
    entropy_bonus,
    kl_to_reference,
)
from agentgym.baselines.core.sample import Sample, Trajectory, spread
from agentgym.errors import UsageError, choices
from agentgym.registry import load_entry_point
from agentgym.rollout import EpisodeSpec

if TYPE_CHECKING:
    from agentgym.task import Task

Group = list[Trajectory]


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of the policy's parameters that the trainer keeps.

    Attributes:
        every: iterations between refreshes from the policy; 0 for never (the reference: the weights at the start).
        decay: with a value, an exponential moving average with this decay, updated at each optimiser step.
        on_disk: keep it in a file instead of in memory.
    """

    every: int = 0
    decay: float | None = None
    on_disk: bool = False


# Ranges of numbers, refused beyond by `make_method`.
Count = Annotated[int, msgspec.Meta(ge=1)]
Whole = Annotated[int, msgspec.Meta(ge=0)]
Ddof = Annotated[int, msgspec.Meta(ge=0, le=1)]
Weight = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers that every method has.

    Attributes:
        group_size: episodes a task.
        epochs: passes over an iteration's samples.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        aggregation: how tokens are averaged, see `agentgym.baselines.core.losses.Aggregation`.
        max_length: L_max of "const-norm", in tokens.
        kl_coefficient: weight of the k3 estimate of the divergence from the reference; 0 keeps no reference.
        entropy_coefficient: weight of the entropy bonus.
        step_cost: subtracted from each turn's reward.
        invalid_penalty: subtracted from the reward of a turn whose action was invalid.
    """

    group_size: Count = 8
    epochs: Count = 1
    clip_low: Weight = 0.2
    clip_high: Weight = 0.2
    aggregation: Aggregation = "token-mean"
    max_length: Count = 1024
    kl_coefficient: Weight = 0.0
    entropy_coefficient: Weight = 0.0
    step_cost: Weight = 0.0
    invalid_penalty: Weight = 0.0


class Services(Protocol):
    """What the trainer does for a method between rollout and update; costs are booked."""

    rng: np.random.Generator

    def logp(
        self, samples: Sequence[Sample], copy: str = "policy", *, prefix: Sequence[Sequence[int]] | None = None
    ) -> list[NDArray[np.float32]]:
        """Log-probabilities of the samples' tokens under the policy or one of its copies, (T,) each, 0 at place 0.

        Args:
            samples: what to score.
            copy: "policy", a name from `copies`, or "teacher" (the model given as teacher).
            prefix: ids put before each sample's own (a privileged context); the result is about the sample's tokens.
        """

    def values(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """The value head's estimate before each token, (T,) each."""

    def encode(self, text: str, role: str = "system") -> list[int]:
        """Ids of a message with this text in the policy's chat template, to be used as a `prefix`."""

    def generate(self, prompts: Sequence[Sequence[Mapping[str, Any]]], max_new_tokens: int = 128) -> list[str]:
        """Answers of the policy to conversations (lists of {"role", "content"})."""


class Method:
    """Base of all methods; as it stands it is group-relative policy optimisation.

    Args:
        config: its numbers, of the class's own `Config`.

    Attributes:
        card: see `Card`.
        Config: class of its numbers.
        needs: capabilities that the environment must have.
        value_head: it needs the value head.
        teacher: it needs a teacher model.
        trains: it updates the model; otherwise it is a way of inference only.
        actor: who plays: "policy", or "expert" for demonstrations.
        refills: further rounds of sampling where `keep` drops groups.
    """

    card: ClassVar[Card]
    Config: ClassVar[type[Config]] = Config
    needs: frozenset[str] = frozenset()
    value_head: bool = False
    teacher: bool = False
    trains: bool = True
    actor: str = "policy"
    refills: int = 0

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def copies(self) -> dict[str, Copy]:
        """Copies of the policy that it wants; the reference where there is a KL term."""
        return {"reference": Copy()} if self.config.kl_coefficient else {}

    def plan(self, tasks: Sequence[Task], iteration: int, round: int = 0) -> list[EpisodeSpec]:
        """Episodes to play: each task `group_size` times, as one group.

        Args:
            tasks: drawn for this iteration (for each round anew).
            iteration, round: make ids unique over the run.
        """
        return group_specs(tasks, self.config.group_size, iteration, round)

    def context(self, spec: EpisodeSpec) -> str:
        """Text added to the system prompt of an episode; "" for none."""
        return ""

    def rewards(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        """Changes `trajectory.rewards` in place; the default takes off step cost and invalid penalty."""
        for trajectory in trajectories:
            invalid = np.array([not turn.valid for turn in trajectory.turns])
            trajectory.rewards -= self.config.step_cost + self.config.invalid_penalty * invalid

    def keep(self, groups: Sequence[Group]) -> list[Group]:
        """Groups to train on."""
        return list(groups)

    def turn_advantages(self, trajectories: Sequence[Trajectory]) -> list[NDArray[np.float64]]:
        """One number a turn for each trajectory; the default is the outcome normalised within its group."""
        outcome = normalise([t.outcome for t in trajectories], [t.group for t in trajectories])
        return [np.full(len(t), value) for t, value in zip(trajectories, outcome, strict=True)]

    def advantages(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        """Fills the samples' per-token fields; the default copies `turn_advantages` to the tokens of each turn."""
        given = self.turn_advantages(trajectories)
        if not isinstance(given, Sequence) or len(given) != len(trajectories):
            raise UsageError(f"`turn_advantages` must return one array for each of {len(trajectories)} trajectories")
        for trajectory, values in zip(trajectories, given, strict=True):
            advantage = np.asarray(values, dtype=np.float64)
            if advantage.shape != (len(trajectory),):
                raise UsageError(
                    f"`turn_advantages` gave {trajectory.episode.episode_id} ({trajectory.role}) shape "
                    f"{advantage.shape}; it has {len(trajectory)} turns"
                )
            trajectory.advantages = advantage
            spread(trajectory)
        if self.config.kl_coefficient:
            score(trajectories, services, "reference_logp", "reference")

    def samples(self, trajectories: Sequence[Trajectory]) -> list[Sample]:
        """What is trained on."""
        return [sample for trajectory in trajectories for sample in trajectory.samples]

    def losses(self) -> list[LossTerm]:
        """Terms of the loss; the default is the clipped policy gradient, with KL and entropy where they are wanted."""
        config = self.config
        average: dict[str, Any] = {"aggregation": config.aggregation, "max_length": config.max_length}
        terms = [clipped_policy_gradient(config.clip_low, config.clip_high, **average)]
        if config.kl_coefficient:
            terms.append(kl_to_reference(config.kl_coefficient, **average))
        if config.entropy_coefficient:
            terms.append(entropy_bonus(config.entropy_coefficient, **average))
        return terms

    def after(self, iteration: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Carries state from one iteration to the next; what it returns goes into the metrics."""
        return {}

    def state(self) -> dict[str, Any]:
        """JSON-able state for checkpoints."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` gave."""


def group_specs(tasks: Sequence[Task], size: int, iteration: int, round: int = 0) -> list[EpisodeSpec]:
    """Specs of `size` episodes for each task; each place in `tasks` is a group of its own."""
    specs = []
    for place, task in enumerate(tasks):
        group = f"{iteration}.{round}.{place}/{task.id}"
        # The seed makes the draws of a task that comes again later, or twice, differ.
        seed = (iteration * 97 + round) * 4099 + place
        specs += [
            EpisodeSpec(task_id=task.id, split=task.split, seed=seed, repeat=repeat, group=group)
            for repeat in range(size)
        ]
    return specs


def groups_of(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Trajectories by group, in order of appearance."""
    groups: dict[str, Group] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    return list(groups.values())


def score(trajectories: Sequence[Trajectory], services: Services, name: str, copy: str) -> None:
    """Stores the tokens' log-probabilities under a copy as the samples' field `name`."""
    samples = [sample for trajectory in trajectories for sample in trajectory.samples]
    for sample, logp in zip(samples, services.logp(samples, copy), strict=True):
        sample.fields[name] = logp


def list_methods() -> list[str]:
    """Names of the methods of this package."""
    import agentgym.baselines.methods as package

    return [module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")]


def find_method(name: str) -> type[Method]:
    """The class of a method.

    Args:
        name: "grpo", or "module:Class" for one of your own.

    Raises:
        UsageError: if there is none of that name, or it is no `Method`.
    """
    if ":" in name:
        found = load_entry_point(name)
    else:
        key = name.replace("-", "_").lower()
        if key not in list_methods():
            raise choices("method", name, list_methods())
        found = importlib.import_module(f"agentgym.baselines.methods.{key}").METHOD
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UsageError(f"{name!r} is {found!r:.80}, which is no subclass of agentgym.baselines.core.method.Method")
    if not isinstance(getattr(found, "card", None), Card):
        raise UsageError(f"method {name!r} has no card: set `card = Card(...)` in the class")
    return found


def make_method(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """A method with its numbers.

    Args:
        name: see `find_method`.
        options: numbers that differ from the method's defaults; "preset" names one of its `PRESETS`.

    Raises:
        UsageError: for an unknown method or option, or a value of the wrong type, out of its range or not finite.
    """
    kind = find_method(name)
    given = dict(options or {})
    presets: Mapping[str, Mapping[str, Any]] = getattr(kind, "PRESETS", {})
    if "preset" in given:
        preset = given.pop("preset")
        if preset not in presets:
            raise choices(f"preset of {name}", str(preset), list(presets))
        given = {**presets[preset], **given}
    types = {field.name: field.type for field in msgspec.structs.fields(kind.Config)}
    for option, value in given.items():
        if option not in types:
            raise choices(f"option of method {name}", option, list(types))
        if get_origin(types[option]) is Literal and value not in get_args(types[option]):
            raise choices(f"{option} of method {name}", str(value), list(get_args(types[option])))
    try:
        config = msgspec.convert(given, kind.Config, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"option of method {name}: {error}") from error
    for option in types:
        value = getattr(config, option)
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"option {option} of method {name} is {value}: give a finite number")
    return kind(config)
