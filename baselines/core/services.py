"""What the trainer does for a method between rollout and update, see `agentgym.baselines.core.method.Services`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.baselines.core.batch import cut, read_tokens
from agentgym.baselines.core.learner import Learner, prefixed
from agentgym.baselines.core.sample import Sample
from agentgym.errors import UsageError
from agentgym.policies._generate import Row, generate
from agentgym.policies._tokens import ChatTokens

Scores = list[NDArray[np.float32]]


class TrainerServices:
    """Scoring and generation on the run's models.

    Args:
        learners: by id of the policy.
        teacher: makes the teacher's model when it is first asked for; None if there is none.
        rng: of this iteration.
    """

    def __init__(
        self, learners: Mapping[str, Learner], teacher: Callable[[], Any] | None, rng: np.random.Generator
    ) -> None:
        self.rng = rng
        self.teacher_tokens = 0
        self._learners = learners
        self._teacher = teacher

    def logp(
        self, samples: Sequence[Sample], copy: str = "policy", *, prefix: Sequence[Sequence[int]] | None = None
    ) -> Scores:
        """See the protocol."""
        if copy == "teacher":
            return self._teacher_logp(samples, prefix)
        found: dict[int, NDArray[np.float32]] = {}
        for name, learner in self._learners.items():
            places = [place for place, sample in enumerate(samples) if sample.policy_id == name]
            part = None if prefix is None else [prefix[place] for place in places]
            found |= dict(zip(places, learner.logp([samples[p] for p in places], copy, part), strict=True))
        return [found[place] for place in range(len(samples))]

    def _teacher_logp(self, samples: Sequence[Sample], prefix: Sequence[Sequence[int]] | None) -> Scores:
        if self._teacher is None:
            raise UsageError("this method needs a teacher: set `teacher` to a model's folder in the configuration")
        actor = self._teacher()
        budget = next(iter(self._learners.values())).config.token_budget
        whole = list(samples) if prefix is None else [prefixed(s, p) for s, p in zip(samples, prefix, strict=True)]
        found = read_tokens(
            cut(whole, budget),
            lambda batch: actor(batch, entropy=False, keep_logits=False).logp,
            device=actor.device,
        )
        self.teacher_tokens += sum(map(len, whole))
        return [found[id(scored)][len(scored) - len(own) :] for scored, own in zip(whole, samples, strict=True)]

    def values(self, samples: Sequence[Sample]) -> Scores:
        """See the protocol."""
        found: dict[int, NDArray[np.float32]] = {}
        for name, learner in self._learners.items():
            places = [place for place, sample in enumerate(samples) if sample.policy_id == name]
            found |= dict(zip(places, learner.values([samples[p] for p in places]), strict=True))
        return [found[place] for place in range(len(samples))]

    def encode(self, text: str, role: str = "system") -> list[int]:
        """See the protocol."""
        tokenizer = self._first.tokenizer
        message = [{"role": role, "content": text}]
        rendered = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=False))
        ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    def generate(self, prompts: Sequence[Sequence[Mapping[str, Any]]], max_new_tokens: int = 128) -> list[str]:
        """See the protocol."""
        if not prompts:
            return []
        tokens = ChatTokens(self._first.tokenizer)
        rows = [Row(tokens.whole([dict(m) for m in prompt]), self.rng.random(max_new_tokens)) for prompt in prompts]
        self._first.activate()
        temperature = self._first.config.temperature
        size = self._first.config.slots
        with self._first.sampling():
            answers = [
                answer
                for start in range(0, len(rows), size)
                for answer in generate(
                    self._first.lm, rows[start : start + size], temperature=temperature, end_ids=tokens.end_ids
                )
            ]
        return [tokens.text(answer.ids) for answer in answers]

    @property
    def _first(self) -> Learner:
        return next(iter(self._learners.values()))
