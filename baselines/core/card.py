"""What is known about a method: where its formulas come from and what was shown of it."""

from __future__ import annotations

from typing import Literal

import msgspec

Grade = Literal["A", "B", "A/B", "C", "B/C", "D", "A/D", "standard"]


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A method's card.

    Attributes:
        name: as in `--method`.
        title: of the method.
        paper: title of the paper, and arXiv id where there is one.
        grade: of the formulas: A official code or paper text read, B third-party notes or code, C summary, D abstract;
            "standard" for textbook algorithms.
        source: what the formulas follow.
        result: status of the paper's result.
        families: environment families it was published on.
        hooks: what it uses of the trainer beyond the defaults, in a few words.
        differences: where this implementation departs from the source, and why.
    """

    name: str
    title: str
    paper: str
    grade: Grade
    source: str
    result: str = "not run at paper scale"
    families: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """How a table must call it; the lower letter of a mixed grade decides."""
        if self.grade == "standard":
            return "standard algorithm"
        lowest = max(self.grade.split("/"))
        if lowest in ("C", "D"):
            return "inspired by"
        kind = "the official code or paper" if lowest == "A" else "third-party notes or code"
        return f"formulas follow {kind}"
