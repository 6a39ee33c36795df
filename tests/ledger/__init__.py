"""The requirement ledger: what was asked, as data. One module per origin, gathered here.

To take a waiting entry into work, delete its `waits_for` and write the test that cites it.
"""

from tests.ledger import caipe, codey, cpe, mass, pitfalls, sdk
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

__all__ = ["LEDGER", "PITFALLS", "REQUIREMENTS", "Requirement"]
