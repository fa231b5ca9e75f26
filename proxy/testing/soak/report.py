"""What a run found, as a table."""

from dataclasses import dataclass, field

_SHOWN = 20
_SHOWN_CHARACTERS = 600


@dataclass(slots=True)
class Report:
    """What was found.

    Attributes:
        rows: Name, value, and whether it is as it must be.
        wrong: What is wrong, in words.
    """

    rows: list[tuple[str, str, bool]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def note(self, name: str, value: object) -> None:
        """Add a row that cannot be wrong."""
        self.rows.append((name, str(value), True))

    def check(self, name: str, value: object, right: bool) -> None:
        """Add a row that is right or wrong."""
        self.rows.append((name, str(value), right))
        if not right:
            self.wrong.append(f"{name}: {value}")

    def faults(self, name: str, faults: list[str]) -> None:
        """Add a row that counts faults, and the faults."""
        self.rows.append((name, str(len(faults)), not faults))
        self.wrong += [f"{name}: {fault}" for fault in faults]

    def text(self) -> str:
        """Return the table."""
        width = max(len(name) for name, _, _ in self.rows)
        lines = [
            f"{' ' if right else '!'} {name:<{width}}  {value}" for name, value, right in self.rows
        ]
        lines += [f"! {text[:_SHOWN_CHARACTERS]}" for text in self.wrong[:_SHOWN]]
        lines.append(f"{len(self.wrong)} violations")
        return "\n".join(lines)
