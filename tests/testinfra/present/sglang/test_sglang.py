"""Each deployment serves, runs as its user from its environment, and stops and starts whole."""

import json
from typing import Any

import pytest
from testinfra.host import Host

from tests.testinfra.fleet import journal
from tests.testinfra.serving import Server, servers_of

GROUP = "sglang_servers"


@pytest.fixture(scope="module")
def servers(variables: dict[str, Any]) -> list[Server]:
    """Return the deployments of the host under test."""
    found = servers_of(variables)
    assert found, "sglang_deployments: empty, but the host is in sglang_servers"
    return found


def process_ids(host: Host, unit: str) -> list[str]:
    """Return the processes in a unit's control group."""
    group = host.check_output("systemctl show -P ControlGroup %s", unit)
    found = host.run("cat /sys/fs/cgroup%s/cgroup.procs /sys/fs/cgroup/systemd%s/cgroup.procs", group, group)
    return str(found.stdout).split()


def test_units_run_and_start_with_the_machine(host: Host, servers: list[Server]) -> None:
    for server in servers:
        unit = host.service(server.unit)
        assert unit.is_running, journal(host, server.unit)
        assert unit.is_enabled, server.unit


def test_no_other_deployment_is_there(host: Host, servers: list[Server]) -> None:
    listed = host.check_output("systemctl list-units --all --plain --no-legend 'sglang@*'").splitlines()
    assert {line.split()[0] for line in listed} == {server.unit for server in servers}


def test_servers_run_as_their_user_from_a_release(host: Host, variables: dict[str, Any], servers: list[Server]) -> None:
    for server in servers:
        main = host.check_output("systemctl show -P MainPID %s", server.unit)
        assert host.check_output("ps -o user= -p %s", main) == variables["sglang_user"]
        command = host.file(f"/proc/{main}/cmdline").content_string.split("\0")
        assert command[0].startswith(f"{variables['uv_venv_root']}/"), command[0]
        assert "/releases/" in command[0]
        assert not any("api-key" in word for word in command)


def test_servers_have_their_environment_variables(host: Host, variables: dict[str, Any], servers: list[Server]) -> None:
    for server, deployment in zip(servers, variables["sglang_deployments"], strict=True):
        main = host.check_output("systemctl show -P MainPID %s", server.unit)
        found = dict(pair.partition("=")[::2] for pair in host.file(f"/proc/{main}/environ").content_string.split("\0"))
        wanted = {name: str(value) for name, value in deployment.get("environment", {}).items()}
        assert {name: found.get(name) for name in wanted} == wanted


def test_service_user_can_run_its_python(host: Host, variables: dict[str, Any]) -> None:
    python = f"{variables['sglang_venv']}/bin/python"
    user = variables["sglang_user"]
    code = 'import importlib.util; print(importlib.util.find_spec("sglang").origin)'
    place = host.check_output("cd / && runuser -u %s -- %s -I -B -c %s", user, python, code)
    assert place.startswith(f"{variables['sglang_venv']}/")


def test_health_and_models(servers: list[Server]) -> None:
    for server in servers:
        server.ask("/health")
        assert [model["id"] for model in json.loads(server.ask("/v1/models"))["data"]] == [server.model]


def test_completion_and_chat(servers: list[Server]) -> None:
    for server in servers:
        body = {"model": server.model, "max_tokens": 4, "temperature": 0}
        text = json.loads(server.ask("/v1/completions", {**body, "prompt": "One, two,"}))
        assert text["usage"]["completion_tokens"] >= 1
        chat = {**body, "messages": [{"role": "user", "content": "Hello"}]}
        answer = json.loads(server.ask("/v1/chat/completions", chat))
        assert answer["choices"][0]["message"]["role"] == "assistant"


def test_streaming_ends_with_done(servers: list[Server]) -> None:
    for server in servers:
        body = {"model": server.model, "prompt": "One", "max_tokens": 4, "temperature": 0, "stream": True}
        events = [line for line in server.ask("/v1/completions", body).splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert all(json.loads(event.removeprefix("data: ")) for event in events[:-1])


def test_metrics(servers: list[Server], variables: dict[str, Any]) -> None:
    metered = {one["name"] for one in variables["sglang_deployments"] if one.get("metrics", True)}
    for server in servers:
        if server.name in metered:
            assert "sglang:num_running_reqs{" in server.ask("/metrics")


@pytest.mark.disruptive
def test_stop_leaves_no_process_and_start_serves_again(host: Host, servers: list[Server]) -> None:
    for server in servers:
        before = process_ids(host, server.unit)
        assert before
        host.check_output("systemctl stop %s", server.unit)
        left = [one for one in before if host.file(f"/proc/{one}").exists]
        assert left == [], host.run("ps -fp %s", ",".join(left)).stdout
        host.check_output("systemctl start %s", server.unit)
        server.ask("/health")


def test_watchdog_looks_at_the_servers(host: Host) -> None:
    timer = host.service("sglang-watchdog.timer")
    assert timer.is_running
    assert timer.is_enabled
    result = host.check_output("systemctl show -P Result sglang-watchdog.service")
    assert result == "success", journal(host, "sglang-watchdog.service")


def hung(host: Host, name: str) -> int:
    """Return how often the watchdog has found a deployment hung."""
    counts = host.file(f"/var/lib/sglang-watchdog/{name}.events.json")
    return int(json.loads(counts.content_string)["hung"]) if counts.exists else 0


@pytest.mark.disruptive
def test_hung_server_is_replaced(host: Host, variables: dict[str, Any], servers: list[Server]) -> None:
    looks = 4 * (variables["sglang_watchdog_interval_s"] + variables["sglang_watchdog_timeout_s"])
    for server in servers:
        before = hung(host, server.name)
        main = host.check_output("systemctl show -P MainPID %s", server.unit)
        host.check_output("systemctl kill --signal=STOP %s", server.unit)
        another = f"[ $(systemctl show -P MainPID {server.unit}) != {main} ] && systemctl is-active -q {server.unit}"
        budget = looks + variables["sglang_stop_timeout_s"] + 300
        host.check_output("timeout %s sh -c %s", str(budget), f"until {another}; do sleep 1; done")
        server.ask("/health")
        assert hung(host, server.name) == before + 1


@pytest.mark.disruptive
def test_killed_server_comes_back(host: Host, servers: list[Server]) -> None:
    for server in servers:
        main = host.check_output("systemctl show -P MainPID %s", server.unit)
        host.check_output("kill -KILL %s", main)
        another = (
            f"systemctl is-active --quiet {server.unit} && [ $(systemctl show -P MainPID {server.unit}) != {main} ]"
        )
        host.check_output("timeout 300 sh -c %s", f"until {another}; do sleep 1; done")
        server.ask("/health")
