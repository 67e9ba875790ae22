"""The loop: play, reckon, update, score, save. It knows no method by name.

Everything random is a function of (seed, iteration), so a run that is continued from a checkpoint takes the same course
as one that was never interrupted.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object

from agentgym.baselines.core import checkpoint as checkpoints
from agentgym.baselines.core.ahead import Ahead, staleness_of
from agentgym.baselines.core.collect import Collector, DemonstrationPolicy
from agentgym.baselines.core.config import TrainConfig, write_train_config
from agentgym.baselines.core.distributed import is_sharded, make_accelerator
from agentgym.baselines.core.guards import (
    check_kept,
    check_metrics,
    check_rewards,
    check_specs,
    refuse_all_lost,
    silent,
)
from agentgym.baselines.core.learner import Diverged, Learner
from agentgym.baselines.core.method import Group, Method, groups_of, make_method
from agentgym.baselines.core.models import add_lora, load, model_folder
from agentgym.baselines.core.record import CONFIG, STATUS, EpisodeLog, Recorder, lock, read_status, write_status
from agentgym.baselines.core.sample import Trajectory, make_trajectories
from agentgym.baselines.core.scoring import episode_numbers, evaluation_line, evaluation_specs
from agentgym.baselines.core.services import TrainerServices
from agentgym.baselines.core.serving import ServedPolicy, make_sampler, publish
from agentgym.baselines.core.tasks import TaskDraw
from agentgym.env import require_capabilities
from agentgym.episode import Episode
from agentgym.errors import DataError, InfrastructureError, UsageError
from agentgym.policies.base import Policy
from agentgym.registry import env_class
from agentgym.rollout import EpisodeSpec

Watcher = Callable[[dict[str, Any]], None]
STOPPED = "stopped"  # folder in the run's, for weights that a guard did not let pass


class Trainer:
    """A training run in a folder.

    Args:
        config: what to train.
        out: folder of the run; made if missing.
        resume: continue from the last checkpoint in `out`.
        watch: told every line of metrics.jsonl, and {"kind": "progress", ...} while playing.

    Raises:
        UsageError: if `out` holds a run and `resume` is False, the environment lacks what the method needs, or the
            configuration contradicts itself.
    """

    def __init__(self, config: TrainConfig, out: Path, *, resume: bool = False, watch: Watcher | None = None) -> None:
        self.config = config
        self.method: Method = make_method(config.method, config.method_options)
        require_capabilities(env_class(config.env), self.method.needs, who=f"method {config.method}")
        if self.method.actor == "expert":
            require_capabilities(env_class(config.env), {"expert"}, who=f"method {config.method}")
        if self.method.teacher and not config.teacher:
            raise UsageError(f"method {config.method} distils from a teacher: set teacher = MODEL in the configuration")
        if self.method.trains and config.max_context is not None and config.max_context <= config.max_new_tokens:
            raise UsageError("max_context must be larger than max_new_tokens")
        self.accelerator = make_accelerator(config.precision, clip=config.optimiser.clip)
        self.main = self.accelerator.is_main_process
        self.watch = watch if watch and self.main else lambda line: None
        (out,) = self._agree([out])  # a folder named after the time differs
        self.out = out
        self.tasks = TaskDraw(config)
        done = self._open(resume)
        try:
            self._set_up(done)
        except BaseException:
            self._abandon(resume)
            raise

    # Setting up.

    def _set_up(self, done: Path | None) -> None:
        config, out = self.config, self.out
        self.learners = self._make_learners(done)
        self.collector = Collector(config)
        self.iteration = 0
        self.counts = {"env_steps": 0, "tokens": 0, "teacher_tokens": 0, "episodes_played": 0}
        self.seconds = 0.0
        self._teacher: Any = None
        self._evaluated = self._finished = -1
        self._best = 0.0
        self._saved = -1  # iterations done when it was last saved
        if done is not None:
            self._restore(done)
        self._begin()
        self.recorder = Recorder(out, config, self.iteration if done else None) if self.main else None
        self._log = EpisodeLog(out, config, resume=done is not None) if self.main and config.save_episodes else None
        self._policies = self._make_policies(greedy=False)
        self._new_version()
        self._ahead: Ahead | None = None
        if self._plays_ahead:
            self._ahead = Ahead(config, self.learners, self._plan_ahead, self.accelerator.autocast)

    def _abandon(self, resume: bool) -> None:
        """Leaves a folder as it was before a start that failed, so that the corrected command can have it."""
        if self.main:
            if resume:
                write_status(self.out, "stopped", reason="could not start")
            else:
                for name in (STATUS, CONFIG):
                    (self.out / name).unlink(missing_ok=True)
            self._lock.close()

    def _open(self, resume: bool) -> Path | None:
        """Makes the folder, or finds the checkpoint to go on from."""
        found, state = self._agree([checkpoints.list_checkpoints(self.out), read_status(self.out)["state"]])
        if state != "new" and not resume:
            raise UsageError(f"{self.out} holds a run already; continue it with --resume, or choose another --out")
        if self.main:
            self.out.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.out)
            write_train_config(self.out / CONFIG, self.config)
            write_status(self.out, "running")
        self.accelerator.wait_for_everyone()
        return found[-1] if resume and found else None

    def _make_learners(self, done: Path | None) -> dict[str, Learner]:
        config = self.config
        ids = list(dict.fromkeys(["policy", *config.policies.values()])) if config.policies else ["policy"]
        if config.policies and "*" in config.policies:
            raise UsageError('policies names roles; roles that are left out use "policy"')
        if config.share_base and not config.lora.rank:
            raise UsageError("share_base puts one adapter a policy on one model: set lora.rank")
        if config.share_base and config.staleness:
            raise UsageError("adapters on one model cannot be played ahead of: leave share_base or staleness out")
        if is_sharded(self.accelerator) and (config.share_base or config.staleness):
            raise UsageError("share_base and staleness need whole weights in each process: use DDP (ddp.yaml)")
        if config.staleness and config.server.base_url and self.accelerator.num_processes > 1:
            raise UsageError("staleness with a server goes with one trainer process: several would push in turn")
        if self.main and done is None and config.model == "tiny":
            model_folder(config, self.out)
        self.accelerator.wait_for_everyone()
        start = model_folder(config, self.out)
        torch.manual_seed(config.seed)  # here: the first process may have made the tiny model, with draws of its own
        learners: dict[str, Learner] = {}
        shared: Any = None
        for name in ids:
            folder = start if done is None or config.lora.rank else str(done / f"model-{name}")
            if shared is None or not config.share_base:
                lm, tokenizer = load(folder, dtype=self._weights_dtype, device=str(self.accelerator.device))
            else:
                lm = shared
            if config.lora.rank:
                lm = self._adapters(lm, name, done)
                shared = lm
            learners[name] = Learner(
                config,
                lm,
                tokenizer,
                self.accelerator,
                copies=self.method.copies,
                value_head=self.method.value_head,
                folder=self.out / "copies" / name,
                adapter=name if config.share_base else "",
            )
        return learners

    @property
    def _weights_dtype(self) -> str:
        return self.config.precision if self.config.lora.rank else "fp32"

    def _adapters(self, lm: Any, name: str, done: Path | None) -> Any:
        adapter = name if self.config.share_base else "default"
        lm = add_lora(lm, self.config.lora, adapter=adapter)
        if done is not None:
            from peft import load_peft_weights, set_peft_model_state_dict

            folder = done / f"model-{name}"
            found = folder if (folder / "adapter_config.json").exists() else folder / adapter
            set_peft_model_state_dict(lm, load_peft_weights(str(found), device="cpu"), adapter_name=adapter)
        return lm

    def _make_policies(self, *, greedy: bool) -> dict[str, Policy]:
        """Role -> who plays it."""
        if self.method.actor == "expert" and not greedy:
            first = next(iter(self.learners.values()))
            policy = DemonstrationPolicy(first.tokenizer, self.config.prompt, self.config.demonstrations.noise)
            return {"*": policy}
        return self._sampling(greedy=greedy)

    def _sampling(self, *, greedy: bool) -> dict[str, Policy]:
        by_id = {
            name: make_sampler(self.config, learner.plain.lm, learner.tokenizer, adapter=learner.adapter, greedy=greedy)
            for name, learner in self.learners.items()
        }
        if not self.config.policies:
            return {"*": by_id["policy"]}
        return {"*": by_id["policy"], **{role: by_id[name] for role, name in self.config.policies.items()}}

    def _restore(self, folder: Path) -> None:
        state = checkpoints.load_state(folder)
        if state["method"] != self.config.method:
            raise UsageError(f"{folder} is a checkpoint of method {state['method']}, not {self.config.method}")
        for name, learner in self.learners.items():
            learner.load_state(state["learners"][name])
        self.method.load_state(state["method_state"])
        self.iteration, self.counts, self.seconds = state["iteration"], dict(state["counts"]), state["seconds"]
        self._evaluated, self._finished, self._best = state["evaluated"], state["finished"], state["best"]

    # Running.

    def run(self) -> dict[str, Any]:
        """Trains until the iterations or the budget are used up.

        Returns:
            The run's status: {"state": "finished" | "stopped", "reason": ..., "iteration": ...}.

        Raises:
            Diverged: if a guard stopped it. The state is saved: in the run's folder where no step of the iteration
                was made, in its folder "stopped" otherwise; --resume continues from before that iteration.
        """
        try:
            reason = self._run()
        except Diverged as error:
            where = self._save_stopped()
            self._status("stopped", str(error))
            raise Diverged(f"{error}. Stopped at iteration {self.iteration}; the state is in {where}") from error
        except KeyboardInterrupt:
            self._status("stopped", "interrupted")
            raise
        except InfrastructureError as error:
            self._save_stopped()
            self._status("stopped", str(error))
            raise
        except OSError as error:
            mend = "Free some space or mend the folder's permissions, then continue with --resume"
            raise DataError(self.out, f"cannot be written ({error.strerror or error})", mend) from error
        except Exception as error:
            if self.accelerator.num_processes == 1 and self._saved < self.iteration:  # several would wait in vain
                self._save_stopped()
            self._status("stopped", f"{type(error).__name__}: {error}")
            raise
        finally:
            self._close()
        return self._status("finished", reason)

    def _run(self) -> str:
        config = self.config
        reason = "all iterations done"
        every = config.evaluation.every
        if every and self.iteration % every == 0 and self._evaluated < self.iteration:
            self._evaluate(config.evaluation.episodes, final=False)
        while self.iteration < config.iterations:
            spent = self._spent()
            if spent:
                reason = spent
                break
            self._iterate()
            last = self.iteration == config.iterations
            if every and self.iteration % every == 0 and not last and not self._spent():
                self._evaluate(config.evaluation.episodes, final=False)
            if config.checkpoint_every and self.iteration % config.checkpoint_every == 0 and not last:
                self._save()
        if self._finished < self.iteration:  # a finished run that is continued has its scores
            self._evaluate(config.evaluation.final, final=True)
            self._finished = self.iteration
            self._save()
        return reason

    def _spent(self) -> str:
        """Which budget is used up, "" if none."""
        config = self.config
        if config.evaluation.stop_at and self._best >= config.evaluation.stop_at:
            return f"held-out success reached {config.evaluation.stop_at:g}"
        used = {
            "max_env_steps": (self.counts["env_steps"], config.max_env_steps),
            "max_tokens": (self.counts["tokens"] + self._scored_tokens(), config.max_tokens),
            "max_seconds": (self.seconds, config.max_seconds),
        }
        over = [name for name, (value, limit) in used.items() if limit and value >= limit]
        (over,) = self._agree([over])  # the clocks of several processes differ
        return f"{over[0]} used up" if over else ""

    def _scored_tokens(self) -> int:
        return sum(learner.scored_tokens for learner in self.learners.values()) + self.counts["teacher_tokens"]

    def _agree(self, values: list[Any]) -> list[Any]:
        """The first process's values."""
        if self.accelerator.num_processes > 1:
            broadcast_object_list(values)
        return values

    def _rng(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, self.iteration, *purpose])

    def _begin(self) -> None:
        """Remembers what an iteration changes before its update, so that a broken one can be saved as not begun."""
        steps = sum(learner.steps for learner in self.learners.values())
        checkpoints.encode_state(self.method.state())  # said before anything is trained
        self._before = (steps, copy.deepcopy(self.method.state()), dict(self.counts))

    def _iterate(self) -> None:
        began = time.monotonic()
        services = TrainerServices(self.learners, self._load_teacher if self.config.teacher else None, self._rng(1))
        episodes, groups, planned, silenced = self._collect(services)
        if self._log is not None:
            self._log.write(episodes)
        trajectories = [trajectory for group in groups for trajectory in group]
        rollout_seconds = time.monotonic() - began
        line: dict[str, Any] = {"kind": "train", "iteration": self.iteration + 1, **episode_numbers(episodes)}
        if self._ahead is not None:
            line |= staleness_of(episodes, self.iteration)
        line |= {"groups": planned, "silent_groups": silenced}
        if self.method.trains and trajectories:
            self.method.advantages(trajectories, services)
            line |= self._update(trajectories)
        line |= check_metrics(self.method.after(self.iteration, trajectories), line)
        for learner in self.learners.values():
            learner.bank.after_iteration(self.iteration + 1)
        self.iteration += 1
        self.counts["teacher_tokens"] += services.teacher_tokens
        self._new_version()
        self.seconds += time.monotonic() - began
        line |= {
            **self.counts,
            "scored_tokens": self._scored_tokens(),
            "trained_tokens": sum(learner.trained_tokens for learner in self.learners.values()),
            "rollout_seconds": rollout_seconds,
            "seconds": self.seconds,
        }
        self._write(line)
        self._guard(line)
        self._begin()

    def _guard(self, line: dict[str, Any]) -> None:
        """Raises if the iteration's update, of any of the policies, went too far."""
        guard = self.config.guard
        for key, value in line.items():
            owner, _, name = key.rpartition("/")
            whose = f" of {owner}" if owner else ""
            if name in ("approx_kl", "update_kl") and guard.max_kl and not value <= guard.max_kl:
                raise Diverged(f"the update moved the policy{whose} by {value:.3g}, more than guard.max_kl allows")
            if name == "entropy" and not owner.endswith("loss") and value < guard.min_entropy:
                raise Diverged(f"the entropy{whose} {value:.3g} fell below guard.min_entropy")

    def _collect(self, services: TrainerServices) -> tuple[list[Episode], list[Group], int, int]:
        """Plays until there are enough groups to train on.

        Returns:
            All episodes, those groups, how many groups were played, and how many of them are silent.
        """
        episodes: list[Episode] = []
        groups: list[Group] = []
        planned = silenced = 0
        wanted = self.config.tasks_per_iteration
        for round in range(1 + self.method.refills):
            tasks = self.tasks.draw(self._rng(2, round), wanted)
            specs = [self._seeded(spec) for spec in self.method.plan(tasks, self.iteration, round)]
            check_specs(specs)
            played = self._play(specs, round)
            episodes += played
            trajectories = make_trajectories(played)
            refuse_all_lost(played, trajectories)
            for trajectory in trajectories:
                for sample in trajectory.samples:
                    sample.policy_id = self.config.policies.get(trajectory.role, "policy")
            self.method.rewards(trajectories, services)
            check_rewards(trajectories)
            found = groups_of(trajectories)
            planned += len(found)
            silenced += silent(found)
            groups += check_kept(self.method.keep(found))
            if len(groups) >= wanted:
                break
        self.counts["env_steps"] += sum(len(episode.turns) for episode in episodes)
        self.counts["episodes_played"] += len(episodes)
        self.counts["tokens"] += sum(
            len(turn.arrays.get("completion_ids", ())) for episode in episodes for turn in episode.turns
        )
        return episodes, groups[:wanted] if self.method.refills else groups, planned, silenced

    def _seeded(self, spec: EpisodeSpec) -> EpisodeSpec:
        """The same plan under another seed of the run draws otherwise."""
        return msgspec.structs.replace(spec, seed=(self.config.seed * 1_000_003 + spec.seed) % (1 << 31))

    def _play(self, specs: list[EpisodeSpec], round: int) -> list[Episode]:
        mine = self._mine(specs)
        ended = 0

        def observe(episode: Episode) -> None:
            nonlocal ended
            ended += 1
            self.watch(
                {"kind": "progress", "iteration": self.iteration, "done": ended, "of": len(mine), "round": round}
            )

        if self._ahead is not None and round == 0:
            episodes = self._ahead.take(self.iteration)
        else:
            with self._weights(self.method.actor), self.accelerator.autocast():
                episodes = self.collector.play(mine, self._policies, contexts=self._contexts(mine), observe=observe)
        if self.accelerator.num_processes > 1:
            order = {spec.episode_id: place for place, spec in enumerate(specs)}
            episodes = sorted(gather_object(episodes), key=lambda e: (order[e.episode_id], e.attempt))
        return episodes

    @contextlib.contextmanager
    def _weights(self, actor: str) -> Iterator[None]:
        """Holds whole weights in each process, where it samples with them."""
        with contextlib.ExitStack() as held:
            if actor == "policy" and not self.config.server.base_url:
                for learner in self.learners.values():
                    held.enter_context(learner.sampling())
            yield

    def _mine(self, specs: list[EpisodeSpec]) -> list[EpisodeSpec]:
        """This process's share: whole groups in turn."""
        groups = list(dict.fromkeys(spec.group for spec in specs))
        mine = set(groups[self.accelerator.process_index :: self.accelerator.num_processes])
        return [spec for spec in specs if spec.group in mine]

    def _update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        terms = self.method.losses()
        metrics: dict[str, float] = {}
        samples = self.method.samples(trajectories)
        torch.manual_seed(int(self._rng(4).integers(1 << 62)))  # of dropout, the same when it is continued from here
        for name, learner in self.learners.items():
            own = [sample for sample in samples if sample.policy_id == name]
            if own:
                found = learner.update(
                    own,
                    terms,
                    epochs=self.method.config.epochs,
                    rng=self._rng(3),
                    progress=self.iteration / self.config.iterations,
                )
                metrics |= found if len(self.learners) == 1 else {f"{name}/{key}": v for key, v in found.items()}
        return metrics

    def _new_version(self) -> None:
        """Tells the samplers that the weights have changed."""
        for policy in {id(policy): policy for policy in self._policies.values()}.values():
            if isinstance(policy, ServedPolicy):
                self._push(policy)
            else:
                publish(policy, self.iteration)

    def _push(self, policy: ServedPolicy) -> None:
        """The first process gives the server its weights, the others wait."""
        state = None
        if is_sharded(self.accelerator):
            if self.config.lora.rank:
                raise UsageError(
                    "adapters on sharded weights cannot be pushed to a server: train all weights, or use DDP"
                )
            state = next(iter(self.learners.values())).whole_model().state_dict
        if self.main:
            policy.pusher.push(policy.lm, self.iteration, state)
        policy.version = self.iteration
        self.accelerator.wait_for_everyone()

    @property
    def _plays_ahead(self) -> bool:
        return self.config.staleness > 0 and self.method.actor == "policy"

    def _plan_ahead(self, iteration: int) -> tuple[list[EpisodeSpec], dict[str, str]]:
        tasks = self.tasks.draw(
            np.random.default_rng([self.config.seed, iteration, 2, 0]), self.config.tasks_per_iteration
        )
        mine = self._mine([self._seeded(spec) for spec in self.method.plan(tasks, iteration)])
        return mine, self._contexts(mine)

    def _contexts(self, specs: Sequence[EpisodeSpec]) -> dict[str, str]:
        return {spec.episode_id: text for spec in specs if (text := self.method.context(spec))}

    def _load_teacher(self) -> Any:
        if self._teacher is None:
            from agentgym.baselines.core.actor import Actor

            lm, tokenizer = load(self.config.teacher, dtype="fp32", device=str(self.accelerator.device))
            own = next(iter(self.learners.values())).tokenizer
            if tokenizer.get_vocab() != own.get_vocab():
                raise UsageError("the teacher has another tokenizer than the policy: their tokens cannot be compared")
            self._teacher = Actor(lm.requires_grad_(False).eval(), temperature=self.config.temperature)
        return self._teacher

    # Scoring and saving.

    def _evaluate(self, episodes: int, *, final: bool) -> None:
        config = self.config
        for mode in ("sampled", "greedy") if final and config.evaluation.greedy else ("sampled",):
            began = time.monotonic()
            specs = evaluation_specs(self.tasks, config, episodes)
            policies = self._sampling(greedy=mode == "greedy")
            mine = self._mine(specs)
            with self._weights("policy"), self.accelerator.autocast():
                played = self.collector.play(mine, policies, contexts=self._contexts(mine))
            if self.accelerator.num_processes > 1:
                played = gather_object(played)
            line = evaluation_line(played, self.iteration, mode)
            line |= {"final": final, "split": config.evaluation.split, **self.counts, "seconds": self.seconds}
            line["scored_tokens"] = self._scored_tokens()
            line["evaluation_seconds"] = time.monotonic() - began
            self._write(line)
            if mode == "sampled":
                self._best = max(self._best, line.get("success", 0.0))
        self._evaluated = self.iteration

    def _settings(self) -> dict[str, Any]:
        """How the model was prompted and sampled, as options of the `hf` policy."""
        prompt = msgspec.structs.asdict(self.config.prompt).items()
        given = {name: value for name, value in prompt if value is not None}
        return {**given, "max_new_tokens": self.config.max_new_tokens, "temperature": self.config.temperature}

    def _save_stopped(self) -> Path:
        """Saves where an iteration broke off: as not begun, or aside if the weights have changed since."""
        steps, method_state, counts = self._before
        if steps == sum(learner.steps for learner in self.learners.values()):
            self.counts = counts
            self._save(method_state=method_state)
            return self.out
        self._save(self.out / STOPPED)
        return self.out / STOPPED

    def _save(self, out: Path | None = None, method_state: Any = None) -> None:
        # Every process is asked for its part of the weights, the first one writes.
        models = {
            f"model-{name}": (learner.whole_model(), learner.tokenizer, learner.adapter)
            for name, learner in self.learners.items()
        }
        state = {
            "iteration": self.iteration,
            "method": self.config.method,
            "method_state": self.method.state() if method_state is None else method_state,
            "learners": {name: learner.state() for name, learner in self.learners.items()},
            "counts": self.counts,
            "seconds": self.seconds,
            "evaluated": self._evaluated,
            "finished": self._finished,
            "best": self._best,
        }
        if out is None:
            self._saved = self.iteration
        if self.main:
            keep = self.config.keep_checkpoints
            checkpoints.save(out or self.out, self.iteration, models, state, keep, self._settings())
        self.accelerator.wait_for_everyone()

    def _write(self, line: dict[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.write(line)
        self.watch(line)

    def _status(self, state: str, reason: str) -> dict[str, Any]:
        status = {"state": state, "reason": reason, "iteration": self.iteration}
        if self.main:
            write_status(self.out, state, reason=reason, iteration=self.iteration)
        return status

    def _close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self.collector.close()
        if self.recorder is not None:
            self.recorder.close()
        if self._log is not None:
            self._log.close()
        if self.main:
            self._lock.close()


def train(
    config: TrainConfig, out: Path | str, *, resume: bool = False, watch: Watcher | None = None
) -> dict[str, Any]:
    """Runs a training; see `Trainer` and `Trainer.run`."""
    return Trainer(config, Path(out), resume=resume, watch=watch).run()
