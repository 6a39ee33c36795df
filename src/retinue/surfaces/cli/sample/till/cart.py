"""What is in the cart."""

from dataclasses import dataclass, field


@dataclass
class Cart:
    lines: list[tuple[str, int, int]] = field(default_factory=list)

    def add(self, name: str, cents: int, count: int = 1) -> None:
        # TODO: refuse a count of 0 or less
        self.lines.append((name, cents, count))

    def subtotal(self) -> int:
        return sum(cents * count for _, cents, count in self.lines)
