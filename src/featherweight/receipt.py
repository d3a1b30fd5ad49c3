"""What applying a recipe did: per module changed, kept or skipped, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Change:
    """One line of a receipt. `module` is the dotted name; bytes are of weights."""

    module: str
    action: (
        str  # "changed", "kept" (asked for, but already so or not possible), "skipped" (left out)
    )
    what: str  # e.g. "Linear → Linear4bit (nf4)", "float32 → bfloat16"
    why: str | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None


@dataclass
class Receipt:
    """The account of one `apply`; `str()` is a summary, `to_json()` the whole."""

    recipe: str
    changes: list[Change] = field(default_factory=list)
    actual: dict[str, str] = field(default_factory=dict)  # what was asked → what runs
    notes: list[str] = field(default_factory=list)  # allowed fallbacks, what undo keeps, …
    bytes_before: int = 0
    bytes_after: int = 0
    bytes_given_back: int = 0  # pages of the mapped checkpoint returned to the system
    not_served: dict[str, int] = field(default_factory=dict)  # calls so far, by reason
    verified: dict[str, float] | None = None  # by batch layout: relative RMS difference

    def record(
        self,
        module: str,
        action: str,
        what: str,
        *,
        why: str | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> None:
        """Add one line."""
        self.changes.append(Change(module, action, what, why, before, after))

    def changed(self) -> int:
        """How many modules were changed."""
        return sum(change.action == "changed" for change in self.changes)

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        mib = 1 << 20
        lines = [
            f"{self.recipe}: {self.bytes_before / mib:,.1f} MiB → {self.bytes_after / mib:,.1f} MiB"
        ]
        alike: dict[tuple[str, str, str | None], list[str]] = {}
        for c in self.changes:
            alike.setdefault((c.action, c.what, c.why), []).append(c.module)
        for (action, what, why), names in alike.items():
            where = names[0] if len(names) == 1 else f"{len(names)} modules"
            lines.append(f"  {action} {where}: {what}" + (f" ({why})" if why else ""))
        lines += [f"  {asked}: {runs}" for asked, runs in self.actual.items()]
        lines += [f"  note: {note}" for note in self.notes]
        for reason, calls in self.not_served.items():
            lines.append(f"  not served, {calls} calls went to the original forward: {reason}")
        if self.verified:
            checks = ", ".join(f"{name} {value:.2g}" for name, value in self.verified.items())
            lines.append(f"  verified, relative difference of outputs: {checks}")
        return "\n".join(lines)
