"""ReAct: a thought before each action, asked for in the prompt (Yao et al. 2023, arXiv 2210.03629). Inference only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentgym.baselines.core.card import Card
from agentgym.baselines.core.method import Config, Count, Method

if TYPE_CHECKING:
    from agentgym.rollout import EpisodeSpec

INSTRUCTIONS = (
    "Work in small steps. In every turn, first write one or two sentences of thought: what you have learned so far, "
    "what is still missing, and what to do next. Then give exactly one action, in the required format, and wait for "
    "its result."
)


class ReActConfig(Config, frozen=True, kw_only=True):
    """Numbers of ReAct.

    Attributes:
        instructions: text that asks for a thought and an action each turn.
        examples: worked examples, each a transcript.
    """

    group_size: Count = 1
    instructions: str = INSTRUCTIONS
    examples: tuple[str, ...] = ()


class ReAct(Method):
    """Reasoning and acting in turns."""

    card = Card(
        name="react",
        title="ReAct",
        paper="ReAct: Synergizing Reasoning and Acting in Language Models (2210.03629)",
        grade="standard",
        source="the paper's loop, in our own words",
        families=("alfworld", "webshop", "search"),
        hooks=("context: instructions and examples",),
        differences=(
            "instructions stand in place of the paper's worked examples unless some are given",
            "how much history is shown is the prompt's setting (prompt.window)",
        ),
    )
    Config = ReActConfig
    trains = False

    def context(self, spec: EpisodeSpec) -> str:
        """Instructions, then the worked examples."""
        examples = [f"Example {number}:\n{text.strip()}" for number, text in enumerate(self.config.examples, 1)]
        return "\n\n".join(part for part in (self.config.instructions, *examples) if part)


METHOD = ReAct
