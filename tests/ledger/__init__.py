"""The requirement ledger: what was asked, as data. One module per origin, gathered here.

To take a waiting entry into work, delete its `waits_for` and write the test that cites it. To close a finding, take
it out of `findings.OPEN` and write the test that cites it.
"""

from tests.ledger import caipe, codey, cpe, findings, mass, pitfalls, sdk
from tests.ledger.shape import Requirement

REQUIREMENTS: tuple[Requirement, ...] = (
    *cpe.REQUIREMENTS,
    *sdk.REQUIREMENTS,
    *codey.REQUIREMENTS,
    *caipe.REQUIREMENTS,
    *mass.REQUIREMENTS,
)
PITFALLS: tuple[Requirement, ...] = pitfalls.PITFALLS
LEDGER: tuple[Requirement, ...] = (*REQUIREMENTS, *PITFALLS)
FINDINGS: tuple[Requirement, ...] = findings.FINDINGS
OPEN_FINDINGS: frozenset[str] = findings.OPEN

__all__ = ["FINDINGS", "LEDGER", "OPEN_FINDINGS", "PITFALLS", "REQUIREMENTS", "Requirement"]
