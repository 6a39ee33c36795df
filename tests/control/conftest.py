"""A project for each test."""

from pathlib import Path

import pytest

from tests.surfaces.cli.shell import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")
