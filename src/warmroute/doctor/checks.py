"""The result of an examination: checks of the configuration, of each node, and of the fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from warmroute.build_info import build_advice, version_and_build

State = Literal["ok", "problem", "note"]
"""`note`: not a mistake by itself, or not checked."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: State
    found: str
    """What the doctor found, as a sentence without a full stop."""
    change: str = ""
    """The flag of the engine or the lines of the configuration to change. May have several lines."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A node, or another thing that was examined."""

    name: str
    checks: list[Check] = field(default_factory=list)
    url: str = ""

    @property
    def problems(self) -> int:
        return sum(check.state == "problem" for check in self.checks)


@dataclass(frozen=True, slots=True)
class Report:
    subjects: list[Subject]

    @property
    def problems(self) -> int:
        return sum(subject.problems for subject in self.subjects)

    def describe(self) -> dict[str, Any]:
        """Return the report for --json."""
        return {
            "warmroute": version_and_build(),
            "build_advice": build_advice() or None,
            "problems": self.problems,
            "subjects": [
                {
                    "name": subject.name,
                    "url": subject.url or None,
                    "checks": [
                        {"name": one.name, "state": one.state, "found": one.found, "change": one.change or None}
                        for one in subject.checks
                    ],
                }
                for subject in self.subjects
            ],
        }
