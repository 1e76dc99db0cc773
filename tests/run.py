"""Run every check of the project, print each phase with its time, and end with `N passed, N failed`.

The machines of the tests live in a lab of their own (LAB_SUBNET 78 where it is not set), beside one of `make lab`.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "test"
BIN = Path(sys.executable).parent
TEST_SUBNET = "78"
SHOWN_LINES = 80
END_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Step:
    """One phase.

    Attributes:
        name: what it is called in the output and in build/test.
        argv: the command; exit status 0 is success.
        junit: whether it writes pytest results to build/test/NAME.xml, each of which is counted.
    """

    name: str
    argv: tuple[str, ...]
    junit: bool = False


@dataclass
class Tally:
    """What passed and what failed."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)

    def add(self, step: Step, code: int) -> None:
        """Count a step's tests, or the step itself where it has none."""
        report = LOGS / f"{step.name}.xml"
        if step.junit and report.exists():
            for case in ET.parse(report).iter("testcase"):  # noqa: S314
                outcome = {child.tag for child in case}
                if outcome & {"failure", "error"}:
                    self.failed.append(f"{step.name}: {case.get('name')}")
                elif "skipped" not in outcome:
                    self.passed += 1
        if code and not any(name.startswith(f"{step.name}:") for name in self.failed):
            self.failed.append(step.name)
        elif not code and not step.junit:
            self.passed += 1


def pytest(name: str, *words: str) -> Step:
    """Return a step that runs pytest."""
    report = f"--junit-xml={LOGS / name}.xml"
    return Step(name, (str(BIN / "pytest"), "-p", "no:cacheprovider", report, *words), junit=True)


def steps(everything: bool) -> list[Step]:
    """Return the steps in order, the quickest first.

    Args:
        everything: also what takes long.
    """
    found = [Step("lint", ("make", "lint")), pytest("unit", "tests/unit")]
    report = f"--junit-xml={LOGS / 'ddtree'}.xml"
    found.append(Step("ddtree", ("make", "ddtree", f"PYTEST={report}{' --slow' if everything else ''}"), junit=True))
    for scenario in sorted(ROOT.glob("molecule/*/molecule.yml")):
        name = scenario.parent.name
        found.append(Step(f"molecule-{name}", (str(BIN / "molecule"), "test", "--no-command-borders", "-s", name)))
    found.append(pytest("site", "tests/site", *(["--slow"] if everything else [])))
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """End what a step has left running, with time to clean up after itself."""
    for number in (signal.SIGINT, signal.SIGKILL):
        limit = time.monotonic() + END_TIMEOUT_S
        try:
            os.killpg(process.pid, number)
            while time.monotonic() < limit:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        except ProcessLookupError:
            return


def run(step: Step) -> int:
    """Run a step with its output in build/test/NAME.log; on failure its end is shown too."""
    log = LOGS / f"{step.name}.log"
    start = time.monotonic()
    print(f"==> {step.name}", flush=True)
    with log.open("w") as output:
        env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            step.argv, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait()
        finally:
            end(process)
    verdict = "passed" if code == 0 else f"FAILED ({code}), the end of {log.relative_to(ROOT)}:"
    print(f"==> {step.name}: {time.monotonic() - start:.1f} s, {verdict}", flush=True)
    if code:
        print("\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]), flush=True)
    return code


def main() -> None:
    """Run the steps between two cleanings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="also what takes long")
    parser.add_argument("--only", metavar="NAME", action="append", help="only this step; several times for several")
    args = parser.parse_args()
    os.environ.setdefault("LAB_SUBNET", TEST_SUBNET)
    for received in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(received, lambda *_: sys.exit(1))
    LOGS.mkdir(parents=True, exist_ok=True)
    for old in LOGS.iterdir():
        old.unlink()
    lab = (sys.executable, "-m", "lab")
    tally = Tally()
    chosen = [step for step in steps(args.all) if not args.only or step.name in args.only]
    try:
        prepare = [Step(name, (*lab, name)) for name in ("packages", "down", "provide")]
        for step in [*prepare, *chosen]:
            tally.add(step, run(step))
    finally:
        for received in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(received, signal.SIG_IGN)
        last = Step("down-again", (*lab, "down"))
        tally.add(last, run(last))
    for name in tally.failed:
        print(f"failed: {name}")
    print(f"{tally.passed} passed, {len(tally.failed)} failed")
    sys.exit(1 if tally.failed else 0)


if __name__ == "__main__":
    main()
