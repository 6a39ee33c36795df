"""The shape of one ledger entry. Knows nothing of tests; `tests/test_ledger.py` pairs the two."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement: a sentence about the software, and its source.

    An entry is owed a test unless `waits_for` names the capability it comes with, or `superseded` says why nothing is
    to be built.
    """

    id: str
    text: str
    source: str
    waits_for: str | None = None
    superseded: str | None = None

    @property
    def owed(self) -> bool:
        return self.waits_for is None and self.superseded is None
