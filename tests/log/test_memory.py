"""The log in memory keeps the contract of logs."""

import pytest

from retinue.core.ports import Log, LogReader
from retinue.log.memory import MemoryLog
from tests.log.contract import LogContract


class Memory:
    def __init__(self) -> None:
        self._log = MemoryLog()

    def open(self) -> Log:
        return self._log

    def reader(self) -> LogReader:
        return self._log

    def count_watched(self, log: Log) -> int:
        assert isinstance(log, MemoryLog)
        return len(log._feeds)


class TestMemoryLog(LogContract):
    @pytest.fixture
    def backend(self) -> Memory:
        return Memory()
