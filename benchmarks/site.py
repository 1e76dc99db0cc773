"""How long the site takes on the lab: from nothing, unchanged, and as a dry run for many containers.

Figures of one run on one machine; compare ratios, not seconds, across machines.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.inventories import Carrier, Container, write
from lab.machine import ssh_options
from lab.settings import ROOT, LabError, Settings
from lab.up import CONTAINER, HOST

BIN = Path(sys.executable).parent
RESULT = ROOT / "build" / "bench-site.json"
FLEETS = ((1, 10), (2, 20), (5, 50))
"""Numbers of hosts and containers of the dry runs."""
FIRST_GUEST, FIRST_HOST = 100, 241
"""Last numbers of their addresses."""
REPEATS = 3


def timed_run(words: list[str], env: dict[str, str]) -> tuple[float, list[tuple[str, str, float]]]:
    """Run ansible-playbook and return its seconds, and host, task name and seconds of each task that it ran.

    Raises:
        LabError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        timing = {"ANSIBLE_CALLBACKS_ENABLED": "limit_with_hosts,ansible.builtin.junit", "JUNIT_OUTPUT_DIR": folder}
        start = time.monotonic()
        done = subprocess.run(
            [str(BIN / "ansible-playbook"), *words], cwd=ROOT, env={**os.environ, **env, **timing},
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        seconds = time.monotonic() - start
        if done.returncode:
            raise LabError(f"ansible-playbook {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
        tasks = []
        for report in Path(folder).glob("*.xml"):
            for case in ET.parse(report).iter("testcase"):  # noqa: S314
                found = re.match(r"\[(?P<host>[^]]*)\] (?P<task>.*)", case.get("name", ""))
                if found and case.find("skipped") is None:
                    name = found["task"].partition(": ")[2] or found["task"]
                    tasks.append((found["host"], name, float(case.get("time", 0))))
        return seconds, tasks


def by_role(tasks: list[tuple[str, str, float]]) -> dict[str, float]:
    """Return seconds by role, and under `checks` those of the tasks outside of roles."""
    sums: dict[str, float] = {}
    for _, name, seconds in tasks:
        role = name.partition(" : ")[0] if " : " in name else "checks"
        sums[role] = sums.get(role, 0.0) + seconds
    return sums


def ssh_seconds(settings: Settings) -> float:
    """Return the median of a command over an open SSH connection, what a task cannot be faster than."""
    control = ["-o", "ControlMaster=auto", "-o", "ControlPersist=60", "-o", f"ControlPath={settings.state}/bench-%C"]
    words = ["ssh", *ssh_options(settings), *control, f"root@{settings.address(CONTAINER[1])}", "true"]
    samples = []
    for _ in range(11):
        start = time.monotonic()
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        samples.append(time.monotonic() - start)
    return statistics.median(samples[1:])


@contextlib.contextmanager
def several_hosts(settings: Settings, number: int) -> Iterator[list[Carrier]]:
    """Give kpro6 an address for each of several hosts that are all it, as long as the block runs."""
    carriers = [Carrier(f"host{index}", FIRST_HOST + index) for index in range(number)]
    ssh = ["ssh", *ssh_options(settings), f"root@{settings.address(HOST[1])}", "ip", "address"]

    def each(verb: str) -> None:
        for one in carriers:
            words = [*ssh, verb, f"{settings.address(one.last)}/24", "dev", "vmbr0"]
            subprocess.run(words, check=verb == "add", stdin=subprocess.DEVNULL, capture_output=True)

    each("del")
    try:
        each("add")
        yield carriers
    finally:
        each("del")


def dry_run(settings: Settings, env: dict[str, str], hosts: int, containers: int) -> dict[str, Any]:
    """Measure a dry run for containers that do not exist, spread over several hosts."""
    device = {"lxc_container_devices": ["/dev/gpusim0"]}
    with tempfile.TemporaryDirectory() as folder, several_hosts(settings, hosts) as carriers:
        guests = [
            Container(f"bench{index}", FIRST_GUEST + index, 300 + index, carriers[index % hosts].name, device)
            for index in range(containers)
        ]
        inventory = write(Path(folder) / "inventory", settings, carriers, guests)
        seconds, tasks = timed_run(["site.yml", "-i", str(inventory), "--check"], env)
    on_hosts = sum(host.startswith("host") for host, _, _ in tasks)
    return {
        "hosts": hosts, "containers": containers, "seconds": seconds, "tasks": len(tasks),
        "tasks_per_host": on_hosts / hosts, "tasks_per_container": (len(tasks) - on_hosts) / containers,
    }  # fmt: skip


def unchanged(settings: Settings, env: dict[str, str]) -> dict[str, Any]:
    """Measure runs that find nothing to change, each with the checks at its end; medians."""
    runs = [timed_run(["site.yml", "-i", "inventories/lab", "-l", CONTAINER[0]], env) for _ in range(REPEATS)]
    count = len(runs[0][1])
    sums = [by_role(tasks) for _, tasks in runs]
    return {
        "seconds": statistics.median(seconds for seconds, _ in runs), "tasks": count,
        "seconds_per_task": statistics.median(
            statistics.median(seconds for _, _, seconds in tasks) for _, tasks in runs
        ),
        "by_role": {role: statistics.median(one[role] for one in sums) for role in sums[0]},
        "ssh_seconds": ssh_seconds(settings),
    }  # fmt: skip


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--from-nothing", action="store_true", help="also build the lab anew, with its caches warm")
    args = parser.parse_args()
    settings = Settings.from_environment()
    env = {"LAB_SUBNET": str(settings.subnet), "LAB_STATE": str(settings.state.parent)}
    result: dict[str, Any] = {"cores": os.cpu_count()}

    def keep(name: str, value: Any) -> None:
        result[name] = value
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")

    if args.from_nothing:
        subprocess.run([sys.executable, "-m", "lab", "down"], cwd=ROOT, check=True)
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "lab", "up"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        keep("from_nothing_s", time.monotonic() - start)
    keep("unchanged", unchanged(settings, env))
    keep("dry_runs", [])
    for hosts, containers in FLEETS:
        keep("dry_runs", [*result["dry_runs"], dry_run(settings, env, hosts, containers)])
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    unchanged = result["unchanged"]
    lines = [f"{result['cores']} cores"]
    if "from_nothing_s" in result:
        lines.append(f"from nothing to serving and verified  {result['from_nothing_s']:8.1f} s")
    ratio = unchanged["seconds_per_task"] / unchanged["ssh_seconds"]
    lines += [
        f"unchanged run with its checks          {unchanged['seconds']:8.1f} s  {unchanged['tasks']} tasks",
        f"  a task (median)                      {unchanged['seconds_per_task']:8.2f} s  "
        f"{ratio:.1f} times a command over SSH ({unchanged['ssh_seconds'] * 1000:.0f} ms)",
    ]
    lines += [f"  {role:<36}{seconds:9.2f} s" for role, seconds in sorted(unchanged["by_role"].items())]
    for dry in result["dry_runs"]:
        lines.append(
            f"dry run, {dry['hosts']} hosts, {dry['containers']:2} containers      {dry['seconds']:8.1f} s  "
            f"{dry['tasks_per_host']:.0f} tasks on each host, {dry['tasks_per_container']:.0f} on each container"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(f"bench-site: {error}")
