"""From a bare machine to a serving container, again without a change, and every refusal before a change."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.inventories import Carrier, Container, write
from lab.settings import Settings
from lab.up import INVENTORY
from tests.site.conftest import ROOT, Lab, Run, lab_up

KILLED_AT = (14, 9, 22, 30, 38, 33, 45)
"""Numbers of the tasks at which runs are killed, one run after the other."""

ROLES_OF_PHASE = {
    "host": {"nvidia_driver", "gpu_preflight", "gpu_devices", "lxc_container"},
    "container": {"lxc_container"},
    "runtime": {"nvidia_driver", "gpu_preflight", "shm", "uv_venv"},
    "serve": {"sglang"},
    "verify": set(),
}
"""Tags of the plays, each with the roles that it runs."""


def test_dry_run_on_the_bare_lab_says_what_it_would_do(bare_run: Run) -> None:
    assert bare_run.code == 0, bare_run.output[-4000:]
    assert all(counts["changed"] > 0 for counts in bare_run.recap.values())
    assert "+lxc.cgroup2" not in bare_run.output
    assert "+lxc.start.auto = 1" in bare_run.output


def test_wrong_inventory_leaves_a_bare_host_bare(bare_run: Run, settings: Settings) -> None:
    assert bare_run.recap
    run = Lab(settings).play(gpu_preflight_model="NVIDIA RTX 9000")
    assert run.code != 0
    assert "gpu_preflight_model" in run.output[run.output.index("ERROR") :]
    assert run.changed == 0
    assert (
        Lab(settings).host("ls /etc/apt/preferences.d /usr/local/sbin")
        == "/etc/apt/preferences.d:\n\n/usr/local/sbin:\n"
    )


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
    """By the command that made the lab."""
    run = lab_up(lab.settings)
    assert run.code == 0, run.output[-4000:]
    assert set(run.recap) == {"kpro6", "ct200"}
    assert run.changed == 0, run.output


@pytest.mark.usefixtures("untouched")
def test_dry_run_on_the_finished_lab_finds_nothing_to_change(lab: Lab) -> None:
    run = lab.play("--check", "--diff")
    assert run.code == 0, run.output[-4000:]
    assert run.changed == 0, run.output


def test_disruptive_checks_pass(lab: Lab) -> None:
    words = ["make", "verify", "DISRUPTIVE=1", "LIMIT=kpro6,ct200"]
    done = subprocess.run(words, cwd=ROOT, env=lab.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 40


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("tag", ROLES_OF_PHASE)
def test_tag_runs_its_phase_and_no_other(lab: Lab, tag: str) -> None:
    run = lab.play("--tags", tag)
    assert run.code == 0, run.output[-4000:]
    assert run.changed == 0
    assert set(re.findall(r"^TASK \[(\w+) : (?!Validating arguments)", run.output, re.M)) == ROLES_OF_PHASE[tag]
    assert ("Run the checks of each group" in run.output) == (tag == "verify")


def test_tag_mends_its_phase_and_leaves_the_others(lab: Lab) -> None:
    """What two phases made is spoiled; the tag of one brings back what is its own."""
    hold, fstab = "apt-mark showhold | grep -c nvidia", "grep -c /dev/shm /etc/fstab"
    held, lines = lab.host(hold), lab.container(fstab)
    lab.host("apt-mark unhold $(apt-mark showhold)")
    lab.container("sed -i '\\:/dev/shm:d' /etc/fstab")
    mended = lab.play("--tags", "runtime")
    assert mended.code == 0, mended.output[-4000:]
    assert lab.container(fstab) == lines
    assert lab.host(f"{hold} || true") == "0\n"
    assert lab.play("--tags", "host").code == 0
    assert lab.host(hold) == held


def newer_pythons() -> list[Path]:
    """Return a working Python of each version from 3.12 on that this machine has, on PATH or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = []
    for minor in (12, 13, 14):
        on_path = shutil.which(f"python3.{minor}")
        candidates = [*([Path(on_path)] if on_path else []), *pyenv.glob(f"3.{minor}.*/bin/python3")]
        works = [
            one
            for one in candidates
            if subprocess.run([one, "-c", ""], capture_output=True, check=False).returncode == 0
        ]
        found += works[:1]
    return found


@pytest.mark.usefixtures("untouched")
def test_newer_ansible_changes_nothing_either(lab: Lab, tmp_path: Path) -> None:
    """The lock's other ansible-core, on every newer Python that this machine has."""
    uv = Path(sys.executable).with_name("uv")
    pythons = newer_pythons()
    if not pythons:
        pytest.skip("this machine has no Python 3.12 or newer")
    for number, python in enumerate(pythons):
        environment = tmp_path / str(number)
        subprocess.run([uv, "venv", "--quiet", "--python", python, environment], check=True)
        sync = ["pip", "sync", "--quiet", "--require-hashes", "--python", str(environment), "locks/dev.txt"]
        subprocess.run([uv, *sync], cwd=ROOT, check=True)
        argv = [str(environment / "bin/ansible-playbook"), *lab.argv()[1:]]
        done = subprocess.run(argv, cwd=ROOT, env=lab.env, capture_output=True, text=True, check=False)
        run = Run(done.returncode, done.stdout + done.stderr, 0)
        assert run.code == 0, run.output[-4000:]
        assert run.changed == 0


def check_gone(lab: Lab, *roles: str) -> None:
    """Run the checks that nothing of these roles is left."""
    words = [str(Path(sys.executable).with_name("pytest")), "-p", "no:cacheprovider", "--inventory", str(INVENTORY)]
    checks = [str(ROOT / "tests/testinfra/gone" / role) for role in roles]
    done = subprocess.run([*words, *checks], cwd=ROOT, env=lab.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]


def test_everything_can_be_taken_away_and_comes_back(lab: Lab) -> None:
    """The service, then what it ran from; the container itself stays."""
    in_use = lab.play("--tags", "runtime", uv_venv_state="absent")
    assert "Take the service away first" in in_use.output
    lab.get("/health")
    gone = lab.play("--tags", "serve", sglang_state="absent")
    assert gone.code == 0, gone.output[-4000:]
    check_gone(lab, "sglang")
    others = ("uv_venv", "shm", "nvidia_driver", "gpu_devices")
    absent: dict[str, Any] = {f"{role}_state": "absent" for role in others}
    gone = lab.play("--skip-tags", "serve,verify,container", **absent)
    assert gone.code == 0, gone.output[-4000:]
    check_gone(lab, *others)
    back = lab.play()
    assert back.code == 0, back.output[-4000:]
    assert lab.play().changed == 0


def deployment(**arguments: str) -> list[dict[str, Any]]:
    """Return the lab's deployments with further arguments for the server."""
    (tiny,) = yaml.safe_load((INVENTORY / "group_vars/sglang_servers/tiny.yml").read_text())["sglang_deployments"]
    return [{**tiny, "arguments": {**tiny.get("arguments", {}), **arguments}}]


def answers_in_time(lab: Lab, seconds: float = 120) -> bool:
    """Tell whether the service answers a request for tokens before a time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            return bool(lab.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2}))
        time.sleep(1)
    return False


def kill_at(lab: Lab, task: int, *words: str, **variables: Any) -> None:
    """Start a run and kill it, with all its children, when it has printed its task-th task."""
    extra = ["-e", json.dumps(variables)] if variables else []
    process = subprocess.Popen(
        lab.argv(*words, *extra), cwd=ROOT, env=lab.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
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


@pytest.mark.slow
def test_a_run_killed_at_each_task_in_turn_is_completed(lab: Lab) -> None:
    tasks = lab.play().output.count("\nTASK [")
    removed = lab.play(lxc_container_state="absent")
    assert removed.code == 0, removed.output[-4000:]
    for task in range(2, tasks):
        kill_at(lab, task)
    whole = lab.play()
    assert whole.code == 0, whole.output[-4000:]
    assert lab.play().changed == 0


@pytest.mark.usefixtures("untouched")
def test_runs_killed_on_a_serving_container_leave_it_serving(lab: Lab) -> None:
    for task in KILLED_AT:
        kill_at(lab, task)
        lab.get("/health")


def test_a_deployment_killed_at_each_task_leaves_the_old_or_the_new_one(lab: Lab) -> None:
    """A change of the deployment is under way; at every moment the last good one or the new one answers in the end."""
    tasks = lab.play("--tags", "serve").output.count("\nTASK [")
    changed = deployment(**{"log-level": "warning"})
    for task in range(2, tasks + 1):
        kill_at(lab, task, "--tags", "serve", sglang_deployments=changed)
        assert answers_in_time(lab), f"killed at task {task}"
    whole = lab.play("--tags", "serve", sglang_deployments=changed)
    assert whole.code == 0, whole.output[-4000:]
    assert "--log-level warning" in lab.container("ps -o args= -p $(systemctl show -P MainPID sglang@tiny)")
    back = lab.play("--tags", "serve")
    assert back.code == 0, back.output[-4000:]


def test_runs_killed_at_any_task_are_completed_by_the_next(lab: Lab) -> None:
    removed = lab.play(lxc_container_state="absent")
    assert removed.code == 0, removed.output[-4000:]
    for task in KILLED_AT:
        kill_at(lab, task)
    whole = lab.play()
    assert whole.code == 0, whole.output[-4000:]
    lab.get("/health")
    assert lab.play().changed == 0


Other = Callable[..., Run]


@pytest.fixture
def other(lab: Lab, tmp_path: Path) -> Other:
    """Return a way to run site.yml for a container that does not exist, from an inventory without ct200."""

    def play(*words: str, vmid: int = 201, last: int = 201, **variables: Any) -> Run:
        guest = Container("ct201", last, vmid, variables=variables)
        inventory = write(tmp_path / "inventory", lab.settings, [Carrier()], [guest])
        return lab.play(*words, inventory=inventory, limit="ct201")

    return play


@pytest.mark.usefixtures("untouched")
def test_dry_run_of_another_container_makes_nothing(lab: Lab, other: Other) -> None:
    run = other("--check", "--diff")
    assert run.code == 0, run.output[-4000:]
    assert run.recap["ct201"]["changed"] > 0
    assert run.recap["kpro6"]["changed"] == 0
    assert "ct201" not in lab.host("lxc-ls -1")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("name", "words"),
    {
        "vmid of another container": ({"vmid": 200}, "lxc_container_vmid: 200 is used by ct200 on this host"),
        "address of another container": ({"last": 200}, "is ct200's on this host. Choose a free one"),
        "address of another machine": ({"last": 1}, "is in use: a machine answers there"),
    }.items(),
)
def test_another_container_may_not_take_what_is_used(
    lab: Lab, other: Other, name: str, words: tuple[dict[str, Any], str]
) -> None:
    run = other(**words[0])
    assert run.code != 0, name
    assert run.changed == 0
    assert words[1] in run.output
    assert "ct201" not in lab.host("lxc-ls -1")


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown GPU model": ({"gpu_preflight_model": "NVIDIA RTX 9000"}, "gpu_preflight_model", "Correct one of the two"),
    "driver version": ({"nvidia_driver_version": "999.99-1"}, "nvidia_driver_version", "Choose one of these versions"),
    "shm larger than memory": ({"shm_size_mib": 99999999}, "shm_size_mib", "Lower shm_size_mib"),
    "device does not exist": ({"lxc_container_devices": ["/dev/nvidia7"]}, "lxc_container_devices", "Add them there"),
    "mount source missing": (
        {"lxc_container_mounts": [{"source": "/none", "target": "/n"}]}, "lxc_container_mounts", "Make it, or",
    ),
    "another vmid than it was made with": ({"lxc_vmid": 300}, "vmid 200, not 300", "Correct the name or the vmid"),
    "SSH key missing": ({"lxc_container_ssh_public_keys": []}, "lxc_container_ssh_public_keys", "Give at least one"),
    "private key missing": (
        {"ansible_ssh_private_key_file": "/none/id_ed25519"}, "lxc_container_ssh_public_keys", "make what it refers to",
    ),
    "bridge missing": ({"lxc_container_bridge": "vmbr9"}, "lxc_container_bridge", "Name one of them"),
    "wrong type": ({"shm_size_mib": "much"}, "shm_size_mib", "Set it to a whole number"),
}  # fmt: skip
"""By name: variables, the variable that the message names, and the remedy; the wrong value is in the message too."""


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_inventory_is_refused_before_a_change(lab: Lab, name: str) -> None:
    variables, named, remedy = REFUSALS[name]
    run = lab.play(**variables)
    assert run.code != 0
    assert run.changed == 0
    message = run.output[run.output.index("ERROR") :].partition("Origin: ")[0]
    (value,) = variables.values()
    leaf = value[0]["source"] if value and isinstance(value, list) and isinstance(value[0], dict) else value
    missing = [part for part in (named, str(leaf or "empty").strip("[]'"), remedy) if part not in message]
    assert missing == [], message


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
@pytest.mark.parametrize(
    ("required_mib", "word"),
    {"seen before": (4096, "uv_venv_required_mib"), "met half-way": (16, "No space left")}.values(),
)
def test_full_disk_in_the_container_is_refused_and_the_service_goes_on(lab: Lab, required_mib: int, word: str) -> None:
    lab.container("mkdir -p /opt/small && mount -t tmpfs -o size=64m tmpfs /opt/small")
    try:
        run = lab.play("--tags", "runtime", uv_venv_root="/opt/small", uv_venv_required_mib=required_mib)
        left = lab.container("find /opt/small -name .complete")
    finally:
        lab.container("umount /opt/small && rmdir /opt/small")
    message = run.output[run.output.index("ERROR") :]
    assert run.code != 0
    assert "/opt/small" in message
    assert word in message
    assert left == ""
