#!/usr/bin/python3
"""Restart a server of SGLang that runs and does not serve.

Looks at every deployment that systemd calls active, each time a timer starts it. A server is hung when it does not
answer its health check, which generates a token, and silent when requests run in it and no token has come since the
look before. After LOOKS such looks in a row it is restarted. Each event is counted, for Prometheus' textfile
collector too.

    sglang-watchdog [--timeout-s N]     look at every deployment
    sglang-watchdog count NAME EVENT    count an event that somebody else has seen
"""

import argparse
import http.client
import json
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

CONFIGS = Path("/etc/sglang")
STATE = Path("/var/lib/sglang-watchdog")
TEXTFILES = Path("/var/lib/prometheus/node-exporter")
LOOKS = 3
EVENTS = ("hung", "silent", "change_failed", "put_back")
METRIC = "sglang_deployment_events_total"


def active(unit: str) -> bool:
    """Tell whether a unit is active, which a server is from its first success on."""
    return subprocess.run(["systemctl", "is-active", "--quiet", unit], check=False).returncode == 0


def get(url: str, timeout_s: float) -> str:
    """Return what a URL answers, "" where it does not answer with success in time."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310
            return str(answer.read().decode()) or "\n"
    except (OSError, http.client.HTTPException):
        return ""


def total(metrics: str, name: str) -> float:
    """Return the sum of a metric over its labels in Prometheus' text format."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([-+.\deE]+)$", metrics, re.M)
    return sum(map(float, found))


def look(url: str, before: dict[str, Any], timeout_s: float) -> tuple[str, float]:
    """Return what is wrong with a server ("", "hung" or "silent") and how many tokens it has made.

    Args:
        url: its address without a path.
        before: what the look before noted.
        timeout_s: how long an answer may take.
    """
    if not get(f"{url}/health_generate", timeout_s):
        return "hung", float(before.get("tokens", 0.0))
    metrics = get(f"{url}/metrics", timeout_s)
    tokens = total(metrics, "sglang:generation_tokens_total")
    running = total(metrics, "sglang:num_running_reqs")
    silent = running > 0 and before.get("running", 0.0) > 0 and tokens == before.get("tokens")
    before["running"] = running
    return "silent" if silent else "", tokens


def read(path: Path) -> dict[str, Any]:
    """Return a JSON file, empty where there is none."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def write(path: Path, text: str) -> None:
    """Write a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.rename(path)


def count(name: str, event: str) -> None:
    """Count an event of a deployment, and show all counts to Prometheus where its collector is."""
    path = STATE / f"{name}.events.json"
    counts = dict.fromkeys(EVENTS, 0) | read(path)
    counts[event] += 1
    write(path, json.dumps(counts))
    if TEXTFILES.is_dir():
        lines = [f"# TYPE {METRIC} counter"]
        for file in sorted(STATE.glob("*.events.json")):
            deployment = file.name.removesuffix(".events.json")
            lines += [f'{METRIC}{{deployment="{deployment}",event="{key}"}} {n}' for key, n in read(file).items()]
        write(TEXTFILES / "sglang_deployments.prom", "".join(f"{line}\n" for line in lines))


def watch(name: str, url: str, timeout_s: float) -> str:
    """Look at a deployment, restart it where it is due, and return what was found."""
    state = STATE / f"{name}.json"
    if not active(f"sglang@{name}.service"):
        state.unlink(missing_ok=True)
        return ""
    before = read(state)
    wrong, tokens = look(url, before, timeout_s)
    looks = before.get("looks", 0) + 1 if wrong else 0
    if looks < LOOKS:
        write(state, json.dumps({"looks": looks, "tokens": tokens, "running": before.get("running", 0.0)}))
        return wrong
    print(f"sglang@{name}.service is {wrong} for {LOOKS} looks and is restarted", flush=True)
    count(name, wrong)
    state.unlink(missing_ok=True)
    subprocess.run(["systemctl", "restart", "--no-block", f"sglang@{name}.service"], check=False)
    return wrong


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="sglang-watchdog", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--timeout-s", type=float, default=30.0, help="seconds within which a server has to answer")
    counting = parser.add_subparsers(dest="command").add_parser("count", help="count an event of a deployment")
    counting.add_argument("name")
    counting.add_argument("event", choices=EVENTS)
    args = parser.parse_args()
    if args.command == "count":
        count(args.name, args.event)
        return
    for gate in sorted(CONFIGS.glob("*.gate")):
        watch(gate.stem, read(gate)["url"], args.timeout_s)


if __name__ == "__main__":
    main()
