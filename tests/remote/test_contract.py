"""Every adapter of remote runs keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.remote.adapters import BENCHES
from tests.remote.contract import Check, checks_for

CASES = [
    pytest.param(bench, check, id=f"{bench}-{check.__name__}")  # type: ignore[attr-defined]
    for bench, (capabilities, _) in BENCHES.items()
    for check in checks_for(capabilities)
]


@pytest.mark.parametrize(("bench", "check"), CASES)
async def test_an_adapter_keeps_the_contract(tmp_path: Path, bench: str, check: Check) -> None:
    async with BENCHES[bench][1](tmp_path) as made:
        await check(made)
