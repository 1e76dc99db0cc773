"""The closing line of `make test` counts what passed and what failed, and nothing twice."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import run

REPORT = """<testsuites><testsuite>
<testcase name="good"/><testcase name="skipped"><skipped/></testcase>
<testcase name="bad"><failure/></testcase><testcase name="broken"><error/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "LOGS", tmp_path)
    return tmp_path


def test_each_test_of_a_report_is_counted(logs: Path) -> None:
    (logs / "unit.xml").write_text(REPORT)
    tally = run.Tally()
    tally.add(run.Step("unit", ("true",), junit=True), 1)
    assert tally.passed == 1
    assert tally.failed == ["unit: bad", "unit: broken"]


@pytest.mark.usefixtures("logs")
def test_step_without_a_report_counts_as_one() -> None:
    tally = run.Tally()
    tally.add(run.Step("lint", ("true",)), 0)
    tally.add(run.Step("other", ("false",)), 2)
    assert (tally.passed, tally.failed) == (1, ["other"])


@pytest.mark.usefixtures("logs")
def test_pytest_that_ends_before_its_report_has_failed() -> None:
    tally = run.Tally()
    tally.add(run.Step("unit", ("true",), junit=True), 4)
    assert (tally.passed, tally.failed) == (0, ["unit"])


def test_every_scenario_is_a_step() -> None:
    names = {step.name for step in run.steps(everything=False)}
    scenarios = {file.parent.name for file in run.ROOT.glob("molecule/*/molecule.yml")}
    assert {f"molecule-{name}" for name in scenarios} | {"lint", "unit", "ddtree", "site"} == names


def test_what_a_step_leaves_behind_is_ended(logs: Path, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    run.run(run.Step("leaves", ("sh", "-c", f"sleep 60 & echo $! >{mark}")))
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
    assert (logs / "leaves.log").exists()


def test_a_step_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "END_TIMEOUT_S", 0.3)
    words = ["sh", "-c", "trap '' INT; echo ready; sleep 60"]
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    run.end(process)
    assert process.wait() == -signal.SIGKILL
