"""Reflexion: after a failure the model writes itself a lesson and tries again (Shinn et al. 2023, arXiv 2303.11366)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.method import Count, Services, Whole, group_specs
from agentgym.baselines.core.sample import Trajectory
from agentgym.baselines.methods.react import ReAct, ReActConfig
from agentgym.baselines.methods.rft import action_strings
from agentgym.env import cut_text
from agentgym.task import Task

if TYPE_CHECKING:
    from agentgym.rollout import EpisodeSpec


class ReflexionConfig(ReActConfig, frozen=True, kw_only=True):
    """Numbers of Reflexion.

    Attributes:
        max_trials: attempts at a task.
        memory_size: lessons kept a task, the last ones.
        lesson_tokens: longest lesson.
        lesson_sentences: most sentences of a lesson.
        max_transcript: characters of the failed attempt that the model rereads, the rest being cut from its middle.
    """

    max_trials: Count = 3
    memory_size: Whole = 3
    lesson_tokens: Count = 128
    lesson_sentences: Count = 3
    max_transcript: Count = 8000


class _Open(msgspec.Struct):
    """A task that is being tried: how often it was, and the seed of its episodes."""

    task: Task
    seed: int
    trials: int = 0


class Reflexion(ReAct):
    """Verbal reinforcement learning."""

    card = Card(
        name="reflexion",
        title="Reflexion",
        paper="Reflexion: Language Agents with Verbal Reinforcement Learning (2303.11366)",
        grade="standard",
        source="the paper's loop, in our own words",
        families=("alfworld", "webshop", "search"),
        hooks=("plan: retries", "context: lessons", "generation: reflections", "state: lessons by task"),
        differences=("three trials and three lessons a task (our choice)", "the verdict is the environment's"),
    )
    Config = ReflexionConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lessons: dict[str, list[str]] = {}
        self._open: dict[str, _Open] = {}
        self._solved = self._given_up = 0

    def plan(self, tasks: Sequence[Task], iteration: int, round: int = 0) -> list[EpisodeSpec]:
        """Tasks that failed come first, with their own seed again; the drawn ones fill the remaining places."""
        size = self.config.group_size
        chosen = list(self._open.values())[: len(tasks)]
        fresh = {task.id: task for task in tasks if task.id not in self._open}
        chosen += [_Open(task, -1) for task in fresh.values()][: len(tasks) - len(chosen)]
        specs = []
        for place, spec in enumerate(group_specs([each.task for each in chosen], size, iteration, round)):
            each = chosen[place // size]
            if each.seed < 0:
                each.seed = spec.seed
            self._open[each.task.id] = each
            specs.append(msgspec.structs.replace(spec, seed=each.seed, repeat=each.trials * size + spec.repeat))
        return specs

    def context(self, spec: EpisodeSpec) -> str:
        """ReAct's text and the lessons of the task."""
        lessons = self.lessons.get(spec.task_id, [])
        told = "\n".join(["What you noted after earlier attempts at this task:", *(f"- {text}" for text in lessons)])
        return "\n\n".join(part for part in (super().context(spec), told if lessons else "") if part)

    def rewards(self, trajectories: Sequence[Trajectory], services: Services) -> None:
        """Shapes nothing beyond the default; asks for a lesson for each task that failed."""
        super().rewards(trajectories, services)
        by_task: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            by_task.setdefault(trajectory.episode.task_id, []).append(trajectory)
        failed = {}
        for task, attempts in by_task.items():
            if any(attempt.success for attempt in attempts):
                self._solved += self._open.pop(task, None) is not None
            else:
                failed[task] = attempts[0]
        answers = services.generate(
            [self._question(task, attempt) for task, attempt in failed.items()], self.config.lesson_tokens
        )
        for task, answer in zip(failed, answers, strict=True):
            lesson = " ".join(re.split(r"(?<=[.!?])\s+", answer.strip())[: self.config.lesson_sentences])
            if lesson:
                known = [*self.lessons.get(task, []), lesson]
                self.lessons[task] = known[max(0, len(known) - self.config.memory_size) :]
            if task in self._open:
                self._open[task].trials += 1
                if self._open[task].trials >= self.config.max_trials:
                    del self._open[task]
                    self._given_up += 1

    def _question(self, task: str, attempt: Trajectory) -> list[dict[str, str]]:
        lines = []
        for turn, action in zip(attempt.turns, action_strings(attempt), strict=True):
            lines += [f"Observation: {turn.observation}", f"Action: {action}"]
        lines.append(f"Observation: {attempt.episode.final_observation}")
        instruction = self._open[task].task.instruction if task in self._open else ""
        transcript = cut_text("\n".join(lines), self.config.max_transcript)
        request = (
            "This attempt failed. Say what went wrong and what to do differently next time, in at most "
            f"{self.config.lesson_sentences} sentences and without repeating the transcript."
        )
        parts = [f"Task: {instruction}" if instruction else "", transcript, request]
        return [{"role": "user", "content": "\n\n".join(part for part in parts if part)}]

    def after(self, iteration: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Counts of tasks that were solved, given up, and are still tried."""
        counts = {"solved_tasks": self._solved, "given_up_tasks": self._given_up, "open_tasks": len(self._open)}
        return {name: float(value) for name, value in counts.items()}

    def state(self) -> dict[str, Any]:
        """Lessons, open tasks and counts."""
        tried = msgspec.to_builtins(list(self._open.values()))
        return {"lessons": self.lessons, "open": tried, "solved": self._solved, "given_up": self._given_up}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` gave."""
        self.lessons = {task: list(lessons) for task, lessons in state["lessons"].items()}
        self._open = {each.task.id: each for each in msgspec.convert(state["open"], list[_Open])}
        self._solved, self._given_up = state["solved"], state["given_up"]


METHOD = Reflexion
