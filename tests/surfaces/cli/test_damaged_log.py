"""Tests of a damaged log: commands show the undamaged rest and name the missing part, and `doctor` finds the damage."""

import apsw
import pytest

from tests.surfaces.cli.shell import Project


@pytest.mark.finding("R8")
def test_commands_show_the_rest_of_a_damaged_log_and_say_what_is_missing(project: Project) -> None:
    for answer in ("first", "second"):
        assert project.run("--yes", agents={"main": [answer]}).returncode == 0
    assert "all of them whole" in project.doctor().stdout
    db = apsw.Connection(str(project.folder / ".retinue/logs/0001.db"))
    newest, batch = db.execute("SELECT tree, last_batch FROM trees ORDER BY id DESC LIMIT 1").get
    db.execute("UPDATE batches SET lines = CAST(replace(lines, '\"seq\"', '\"sEq\"') AS BLOB) WHERE id = ?", (batch,))
    db.close()
    listed = project.retinue("ps", "--all")
    assert (listed.returncode, listed.stderr, listed.stdout.count("done")) == (0, "", 2)
    tail = project.retinue("tail", newest)
    assert tail.returncode == 0 and "missing: the log is damaged here" in tail.stdout
    shown = project.retinue("show", newest)
    assert shown.returncode == 0 and "missing: the log is damaged here" in shown.stdout
    assert "Traceback" not in tail.stderr + shown.stderr
    doctor = project.doctor()
    assert "fail  logs" in doctor.stdout and "the rest of it can be read" in doctor.stdout
    other = project.retinue("ps", "--all", "--json").stdout.count(newest)
    assert other == 1
    again = project.run("--yes", agents={"main": ["third"]})
    assert (again.returncode, again.stdout) == (0, "third\n")
