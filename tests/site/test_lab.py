"""From a bare machine to a serving container, again without a change, and every refusal before a change."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.site.conftest import ROOT, Lab, Run

KILLED_AT = (14, 9, 22, 30, 38, 33, 45)
"""Numbers of the tasks at which runs are killed, one run after the other."""

PLAYS = {
    "host": "Hosts have one driver version",
    "container": "Containers exist and run",
    "runtime": "Containers have the host's driver version",
    "serve": "Deployments serve",
    "verify": "What is true is read back",
}


def test_dry_run_on_the_bare_lab_says_what_it_would_do(bare_run: Run) -> None:
    assert bare_run.code == 0, bare_run.output[-4000:]
    assert all(counts["changed"] > 0 for counts in bare_run.recap.values())
    assert "+lxc.cgroup2" not in bare_run.output
    assert "+lxc.start.auto = 1" in bare_run.output


def test_first_run_ends_with_what_runs_and_how_to_talk_to_it(first_run: Run, lab: Lab) -> None:
    end = first_run.output[first_run.output.rindex("Running now:") :]
    assert f"curl {lab.url}/v1/chat/completions" in end
    assert re.findall(r"^==> (.*): [\d.]+ s$", first_run.output, re.M)[-1] == "site.yml -l ct200"


@pytest.mark.usefixtures("lab")
def test_the_curl_of_the_summary_works(first_run: Run) -> None:
    (command,) = re.findall(r"(curl \S+/v1/chat/completions(?:.*\\\n)*.*)$", first_run.output, re.M)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert 0 < answer["usage"]["completion_tokens"] <= 16


def test_greedy_answer_is_the_same_twice(lab: Lab) -> None:
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    first, second = (json.loads(lab.post("/v1/completions", body))["choices"][0]["text"] for _ in range(2))
    assert first == second
    assert first


def test_streaming_sends_pieces_and_ends(lab: Lab) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0, "stream": True}
    events = [line for line in lab.post("/v1/completions", body).splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    pieces = [json.loads(event.removeprefix("data: "))["choices"] for event in events[:-1]]
    whole = json.loads(lab.post("/v1/completions", {**body, "stream": False}))["choices"][0]["text"]
    assert len(pieces) > 1
    assert "".join(piece[0]["text"] for piece in pieces if piece) == whole


def test_metrics_count_requests(lab: Lab) -> None:
    def count() -> float:
        found = re.findall(r"^sglang[:_]num_requests_total\{.*\} ([\d.e+]+)$", lab.get("/metrics"), re.M)
        return sum(float(value) for value in found)

    before = count()
    lab.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2})
    assert count() == before + 1


@pytest.mark.usefixtures("untouched")
def test_second_run_changes_nothing(lab: Lab) -> None:
    run = lab.play()
    assert run.code == 0, run.output[-4000:]
    assert set(run.recap) == {"kpro6", "ct200"}
    assert run.changed == 0, run.output


@pytest.mark.usefixtures("untouched")
def test_dry_run_on_the_finished_lab_finds_nothing_to_change(lab: Lab) -> None:
    run = lab.play("--check", "--diff")
    assert run.code == 0, run.output[-4000:]
    assert run.changed == 0, run.output


def test_disruptive_checks_pass(lab: Lab) -> None:
    words = ["make", "verify", "DISRUPTIVE=1"]
    done = subprocess.run(words, cwd=ROOT, env=lab.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 40


@pytest.mark.parametrize("tag", PLAYS)
def test_tags_select_phases(lab: Lab, tag: str) -> None:
    run = lab.play("--tags", tag, "--list-tasks")
    shown = [
        play
        for play, title in PLAYS.items()
        if re.search(rf"{re.escape(title)}.*\n(?:.*\n)*?\s+tasks:\n\s+\S", run.output)
    ]
    assert tag in shown


@pytest.mark.usefixtures("untouched")
def test_newest_ansible_changes_nothing_either(lab: Lab, tmp_path: Path) -> None:
    """The lock's other ansible-core, on the newest Python that this machine has."""
    candidates = [Path(f"/usr/bin/python3.{minor}") for minor in (14, 13, 12)]
    candidates += sorted(Path("/root/.pyenv/versions").glob("3.1[2-9]*/bin/python3"), reverse=True)
    python = next((path for path in candidates if path.exists()), None)
    if python is None:
        pytest.skip("this machine has no Python 3.12 or newer")
    uv = Path(os.environ.get("VIRTUAL_ENV", ROOT / ".venv")) / "bin/uv"
    subprocess.run([uv, "venv", "--quiet", "--python", python, tmp_path / "env"], check=True)
    sync: list[str | Path] = [
        uv,
        "pip",
        "sync",
        "--quiet",
        "--require-hashes",
        "--python",
        tmp_path / "env/bin/python",
        "locks/dev.txt",
    ]
    subprocess.run(sync, cwd=ROOT, check=True)
    argv = [str(tmp_path / "env/bin/ansible-playbook"), *lab.argv()[1:]]
    done = subprocess.run(argv, cwd=ROOT, env=lab.env, capture_output=True, text=True, check=False)
    run = Run(done.returncode, done.stdout + done.stderr, 0)
    assert run.code == 0, run.output[-4000:]
    assert run.changed == 0


def test_service_can_be_taken_away_and_comes_back(lab: Lab) -> None:
    gone = lab.play("--tags", "serve", sglang_state="absent")
    assert gone.code == 0, gone.output[-4000:]
    assert lab.container("systemctl list-units --all --no-legend 'sglang@*'") == ""
    back = lab.play("--tags", "serve")
    assert back.code == 0, back.output[-4000:]
    lab.get("/health")


def kill_at(lab: Lab, task: int) -> None:
    """Start a run and kill it, with all its children, when it has printed its task-th task."""
    process = subprocess.Popen(
        lab.argv(), cwd=ROOT, env=lab.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    seen = 0
    for line in process.stdout:
        seen += line.startswith("TASK [")
        if seen == task:
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_runs_killed_at_any_task_are_completed_by_the_next(lab: Lab) -> None:
    removed = lab.play(lxc_container_state="absent")
    assert removed.code == 0, removed.output[-4000:]
    for task in KILLED_AT:
        kill_at(lab, task)
    whole = lab.play()
    assert whole.code == 0, whole.output[-4000:]
    lab.get("/health")
    assert lab.play().changed == 0


@pytest.mark.usefixtures("untouched")
def test_dry_run_of_another_container_makes_nothing(lab: Lab) -> None:
    """A container that does not exist, on a host that carries another: nothing of it is there afterwards."""
    run = lab.play(
        "--check",
        "--diff",
        lxc_container_name="ct201",
        lxc_vmid=201,
        ansible_host=lab.settings.address(201),
    )
    assert run.code == 0, run.output[-4000:]
    assert run.recap["ct200"]["changed"] > 0
    assert "ct201" not in lab.host("lxc-ls -1")


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown GPU model": ({"gpu_preflight_model": "NVIDIA RTX 9000"}, "gpu_preflight_model"),
    "driver version": ({"nvidia_driver_version": "999.99-1"}, "nvidia_driver_version"),
    "shm larger than memory": ({"shm_size_mib": 99999999}, "shm_size_mib"),
    "device does not exist": ({"lxc_container_devices": ["/dev/nvidia7"]}, "/dev/nvidia7"),
    "mount source missing": ({"lxc_container_mounts": [{"source": "/none", "target": "/n"}]}, "/none"),
    "vmid of another container": ({"lxc_vmid": 300}, "has vmid 200"),
    "address of another machine": (
        {"lxc_container_name": "ct201", "lxc_vmid": 201, "ansible_host": "{{ lab_network }}.1"},
        "in use: a machine answers there",
    ),
    "SSH key missing": ({"lxc_container_ssh_public_keys": []}, "lxc_container_ssh_public_keys"),
    "bridge missing": ({"lxc_container_bridge": "vmbr9"}, "vmbr9"),
    "wrong type": ({"shm_size_mib": "much"}, "shm_size_mib"),
}


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_inventory_is_refused_before_a_change(lab: Lab, name: str) -> None:
    variables, word = REFUSALS[name]
    run = lab.play(**variables)
    assert run.code != 0
    assert run.changed == 0
    assert word in run.output[run.output.index("ERROR") :]


@pytest.mark.usefixtures("untouched")
def test_limit_without_the_plugin_is_refused_with_the_remedy(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(lab.env, "ANSIBLE_CALLBACKS_ENABLED", "ansible.builtin.junit")
    monkeypatch.setitem(lab.env, "JUNIT_OUTPUT_DIR", str(tmp_path))
    run = lab.play()
    assert run.code != 0
    assert "-l ct200,kpro6" in run.output


@pytest.mark.usefixtures("untouched")
def test_full_disk_in_the_container_is_refused_and_the_service_goes_on(lab: Lab) -> None:
    lab.container("mkdir -p /opt/small && mount -t tmpfs -o size=16m tmpfs /opt/small")
    try:
        run = lab.play("--tags", "runtime", uv_venv_root="/opt/small")
    finally:
        lab.container("umount /opt/small")
    assert run.code != 0
    assert "/opt/small" in run.output[run.output.index("ERROR") :]
