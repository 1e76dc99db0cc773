"""How long the site takes on the lab: from nothing, unchanged, and as a dry run for many containers.

Figures of one run on one machine; compare ratios, not seconds, across machines.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import yaml

from lab.machine import ssh_options
from lab.settings import ROOT, LabError, Settings
from lab.up import CONTAINER, HOST

BIN = Path(sys.executable).parent
RESULT = ROOT / "build" / "bench-site.json"
FLEETS = ((1, 10), (2, 20), (5, 50))
"""Numbers of hosts and containers of the dry runs."""


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
    """Return seconds by role; tasks outside of roles are under their own name."""
    sums: dict[str, float] = {}
    for _, name, seconds in tasks:
        role = name.partition(" : ")[0]
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


def many_containers(settings: Settings, hosts: int, containers: int, folder: Path) -> list[str]:
    """Write an inventory of containers that do not exist, on hosts that are all kpro6, and return the run's words."""
    own = yaml.safe_load((ROOT / "inventories/lab/host_vars/ct200.yml").read_text())
    carrier = yaml.safe_load((ROOT / "inventories/lab/host_vars/kpro6.yml").read_text())
    names = [f"host{number}" for number in range(hosts)]
    guests: dict[str, Any] = {}
    for number in range(containers):
        address = f"10.{settings.subnet}.0.{100 + number}"
        guests[f"bench{number}"] = {
            **own, "ansible_host": address, "lxc_host": names[number % hosts], "lxc_vmid": 300 + number,
            "lxc_container_devices": ["/dev/gpusim0"],
        }  # fmt: skip
    address = settings.address(HOST[1])
    shared = {"lxc_shared_gpus": ["/dev/gpusim0"], "ansible_host": address}
    inventory = {
        "lxc_hosts": {"hosts": {name: {**carrier, **shared} for name in names}},
        "gpu_hosts": {"children": {"lxc_hosts": None}},
        "gpu_containers": {"hosts": guests},
        "sglang_servers": {"hosts": dict.fromkeys(guests)},
    }
    (folder / "group_vars").mkdir(parents=True)
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    for group in ("all", "sglang_servers"):
        (folder / "group_vars" / group).symlink_to(ROOT / "inventories/lab/group_vars" / group)
    return ["site.yml", "-i", str(folder), "--check"]


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--from-nothing", action="store_true", help="also build the lab anew, with its caches warm")
    args = parser.parse_args()
    settings = Settings.from_environment()
    env = {"LAB_SUBNET": str(settings.subnet), "LAB_STATE": str(settings.state.parent)}
    result: dict[str, Any] = {"cores": os.cpu_count()}
    if args.from_nothing:
        subprocess.run([sys.executable, "-m", "lab", "down"], cwd=ROOT, check=True)
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "lab", "up"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        result["from_nothing_s"] = time.monotonic() - start
    seconds, tasks = timed_run(["site.yml", "-i", "inventories/lab", "-l", "ct200", "--skip-tags", "verify"], env)
    result["unchanged"] = {
        "seconds": seconds, "tasks": len(tasks), "seconds_per_task": seconds / len(tasks), "by_role": by_role(tasks),
        "ssh_seconds": ssh_seconds(settings),
    }  # fmt: skip
    result["verified"] = timed_run(["site.yml", "-i", "inventories/lab", "-l", "ct200", "--tags", "verify"], env)[0]
    result["dry_runs"] = []
    for hosts, containers in FLEETS:
        with tempfile.TemporaryDirectory() as folder:
            words = many_containers(settings, hosts, containers, Path(folder) / "inventory")
            seconds, tasks = timed_run(words, env)
        on_hosts = sum(host.startswith("host") for host, _, _ in tasks)
        result["dry_runs"].append(
            {"hosts": hosts, "containers": containers, "seconds": seconds, "tasks": len(tasks),
             "host_tasks_per_host": on_hosts / hosts}
        )  # fmt: skip
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    unchanged = result["unchanged"]
    lines = [f"{result['cores']} cores"]
    if "from_nothing_s" in result:
        lines.append(f"from nothing to serving and verified  {result['from_nothing_s']:8.1f} s")
    ratio = unchanged["seconds_per_task"] / unchanged["ssh_seconds"]
    lines += [
        f"unchanged run, checks left out        {unchanged['seconds']:8.1f} s  {unchanged['tasks']} tasks",
        f"  a task                              {unchanged['seconds_per_task']:8.2f} s  "
        f"{ratio:.1f} times a command over SSH ({unchanged['ssh_seconds'] * 1000:.0f} ms)",
    ]
    lines += [f"  {role:<36}{seconds:8.2f} s" for role, seconds in sorted(unchanged["by_role"].items())]
    lines.append(f"checks                                {result['verified']:8.1f} s")
    for dry in result["dry_runs"]:
        lines.append(
            f"dry run, {dry['hosts']} hosts, {dry['containers']:2} containers     {dry['seconds']:8.1f} s  "
            f"{dry['tasks']} tasks, {dry['host_tasks_per_host']:.0f} on each host"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(f"bench-site: {error}")
