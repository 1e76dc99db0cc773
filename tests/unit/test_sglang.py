"""Deployments become exact units, and what cannot work is named before anything is touched."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.unit.loading import load

module = load("roles/sglang/library/sglang_deployments.py")

UNIT = "[Service]\nType=exec\n"
PYTHON = Path("/opt/venvs/sglang/releases/abc/bin/python")


def deployment(**changes: Any) -> Any:
    return module.Deployment(**({"name": "main", "model_path": "/models/m", "port": 30000, "venv": "/v"} | changes))


def test_drop_in_is_exact() -> None:
    one = deployment(
        gpus=(2, 3),
        arguments={
            "tp_size": 2,
            "enable-mixed-chunk": True,
            "disable-radix-cache": False,
            "json-model-override-args": {},
        },
        environment={"NOTE": "x"},
        start_timeout_s=60,
    )
    assert module.dropin_text(one, PYTHON, UNIT).splitlines()[1:] == [
        "[Unit]",
        "StartLimitIntervalSec=3325",
        "StartLimitBurst=5",
        "[Service]",
        "Environment=CUDA_VISIBLE_DEVICES=2,3",
        "EnvironmentFile=/etc/sglang/main.env",
        "RestartSec=5",
        "TimeoutStartSec=60",
        f"ExecStart={PYTHON} -m sglang.launch_server --config /etc/sglang/main.yml \\",
        "  --enable-metrics \\",
        "  --enable-mixed-chunk \\",
        "  --host 0.0.0.0 \\",
        '  --json-model-override-args "{}" \\',
        "  --model-path /models/m \\",
        "  --port 30000 \\",
        "  --served-model-name main \\",
        "  --tp-size 2",
        "ExecStartPost=/usr/local/sbin/sglang-gate /etc/sglang/main.gate /etc/sglang/main.yml",
    ]


def test_dollars_stay_dollars_in_a_command() -> None:
    assert module.word("$HOME 5%") == '"$$HOME 5%%"'


def test_list_becomes_several_words() -> None:
    assert module.command(deployment(arguments={"cuda-graph-bs-decode": [1, 2, 4]}), PYTHON).count(" 1 2 4") == 1


def test_secrets_are_in_the_files_that_others_cannot_read_and_in_no_diff() -> None:
    one = deployment(
        api_key="s3cret", arguments={"admin_api_key": "s3cret"}, environment={"HF_TOKEN": "s3cret", "NOTE": "x"}
    )
    assert module.config_text(one) == '{"api-key": "s3cret", "admin-api-key": "s3cret"}\n'
    assert module.variables_text(one) == 'HF_TOKEN="s3cret"\nNOTE="x"\n'
    assert "s3cret" not in module.dropin_text(one, PYTHON, UNIT)
    assert module.hidden(module.config_text(one)) == '{"api-key": "(hidden)", "admin-api-key": "(hidden)"}\n'
    assert module.hidden(module.variables_text(one)) == 'HF_TOKEN=(hidden)\nNOTE="x"\n'


def test_a_secret_with_quotes_is_hidden_whole() -> None:
    one = deployment(api_key='a"b\\', environment={"HF_TOKEN": 'a"b'})
    assert "b" not in module.hidden(module.config_text(one)).replace("(hidden)", "")
    assert module.hidden(module.variables_text(one)) == "HF_TOKEN=(hidden)\n"


def test_variables_are_quoted_for_systemd() -> None:
    one = deployment(environment={"NOTE": 'a "b" 50% $HOME `x` \\'})
    assert module.variables_text(one) == 'NOTE="a \\"b\\" 50% \\$HOME \\`x\\` \\\\"\n'


def test_another_unit_or_release_is_another_text() -> None:
    first = module.dropin_text(deployment(), PYTHON, UNIT)
    assert first != module.dropin_text(deployment(), PYTHON, UNIT + "UMask=0027\n")
    assert first != module.dropin_text(deployment(), Path("/opt/venvs/sglang/releases/def/bin/python"), UNIT)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("::", "http://[::1]:30000"),
        ("192.0.2.9", "http://192.0.2.9:30000"),
    ],
)
def test_server_is_reached_where_it_listens(host: str, url: str) -> None:
    assert deployment(host=host).url == url


def test_gate_has_what_a_start_must_show() -> None:
    canaries = ({"prompt": "2+2=", "pattern": "4", "tokens": 8},)
    wanted = {"url": "http://127.0.0.1:30000", "canaries": list(canaries), "min_acceptance_length": 2.5}
    assert json.loads(module.gate_text(deployment(canaries=canaries, min_acceptance_length=2.5))) == wanted


def test_start_budget_follows_the_size_of_model_and_drafter(tmp_path: Path) -> None:
    for name, mib in (("model", 40960), ("drafter", 2048)):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "a.safetensors").open("wb") as file:
            file.truncate(mib * 2**20)
    one = deployment(
        model_path=str(tmp_path / "model"), arguments={"speculative_draft_model_path": str(tmp_path / "drafter")}
    )
    assert one.start_budget_s == 600 + 10 * 42
    assert deployment(model_path="org/model").start_budget_s == 600
    assert deployment(start_timeout_s=60).start_budget_s == 60


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([{"name": "Main"}], "name 'Main' is not made of small letters"),
        ([{}, {"port": 30001}], "the name is there twice"),
        ([{}, {"name": "second"}], "second: port 30000 is main's too"),
        ([{"gpus": (0,)}, {"name": "second", "port": 30001, "gpus": (0,)}], "second: gpus has 0, which is main's too"),
        ([{"port": 70000}], "port 70000 is not from 1 to 65535"),
        ([{"environment": {"CUDA_VISIBLE_DEVICES": "0"}}], "Name the devices in gpus instead"),
        (
            [{"canaries": ({"prompt": "a", "pattern": "(", "tokens": 1},)}],
            "canaries, pattern '(': missing ), unterminated",
        ),
        ([{"min_acceptance_length": 2.0}], "min_acceptance_length is 2, but arguments name no speculative-algorithm"),
        ([{"environment": {"A-B": "0"}}], "environment has 'A-B', which is not a variable's name"),
        ([{"environment": {"A": "0\n1"}}], "environment, A: the value has more than one line"),
        ([{"arguments": {"model_path": "/x"}}], "arguments has model_path. Use the key model_path for it."),
        ([{"arguments": {"api-key": "x"}}], "arguments has api-key. Use the key api_key for it."),
    ],
)
def test_definitions_that_cannot_work_are_named(others: list[dict[str, Any]], message: str) -> None:
    (problem,) = module.shape_problems([deployment(**changes) for changes in others])
    assert message in problem


def test_good_definitions_have_no_problem() -> None:
    both = [deployment(gpus=(0, 1)), deployment(name="second", port=30001, gpus=(2,))]
    assert module.shape_problems(both) == []


KNOWN: dict[str, list[str]] = {
    flag: []
    for flag in (
        "model-path",
        "served-model-name",
        "api-key",
        "admin-api-key",
        "host",
        "port",
        "enable-metrics",
        "speculative-algorithm",
        "tp-size",
    )
} | {"attention-backend": ["triton", "flashinfer"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative-algoritm": "NEXTN"}, "this SGLang has no such flag; near it are speculative-algorithm"),
        ({"mamba-scheduler-strategy": "extra_buffer"}, "mamba-scheduler-strategy: this SGLang has no such flag"),
        ({"attention_backend": "torch"}, "attention-backend: 'torch' is none of triton, flashinfer."),
    ],
)
def test_flags_are_those_of_the_program(arguments: dict[str, Any], message: str) -> None:
    (problem,) = module.flag_problems(deployment(arguments=arguments), KNOWN)
    assert message in problem


def test_known_flags_pass() -> None:
    good = deployment(arguments={"tp_size": 8, "attention-backend": "triton"})
    assert module.flag_problems(good, KNOWN) == []


def test_missing_model_and_environment_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNITS", tmp_path)
    monkeypatch.setattr(module, "taken", lambda *_: True)
    (tmp_path / "config.json").touch()
    one = deployment(
        model_path=str(tmp_path), venv=str(tmp_path / "venv"), arguments={"speculative-draft-model-path": "/none"}
    )
    problems = module.machine_problems([one], dry=False)
    assert [problem.split(": ", 1)[1].split(". ")[0] for problem in problems] == [
        "arguments, speculative-draft-model-path /none has no config.json",
        f"venv {tmp_path / 'venv'} has no Python",
        "another program listens on port 30000",
    ]


@pytest.mark.parametrize(
    ("other", "host", "expected"),
    [
        ("127.0.0.2", "0.0.0.0", True),
        ("127.0.0.2", "127.0.0.2", True),
        ("127.0.0.2", "127.0.0.1", False),
        ("0.0.0.0", "127.0.0.3", True),
        ("127.0.0.2", "192.0.2.9", False),
    ],
)
def test_port_is_taken_where_the_server_would_listen(other: str, host: str, expected: bool) -> None:
    with socket.socket() as program:
        program.bind((other, 0))
        program.listen()
        assert module.taken(host, program.getsockname()[1]) is expected
    assert not module.taken("127.0.0.1", 0)


class Machine:
    """Units of a machine: one fails to start while `broken` is in its drop-in, or another holds its port."""

    def __init__(self, units: Path) -> None:
        """Keep units in this folder."""
        self.units = units
        self.refused: set[str] = set()
        self.calls: list[tuple[str, ...]] = []
        self.states: dict[str, str] = {}
        self.enabled: set[str] = set()

    def dropin(self, unit: str) -> str:
        """Text of its drop-in."""
        return str(module.text_of(self.units / f"{unit}.d/deployment.conf"))

    def starts(self, unit: str) -> bool:
        """Tell whether it would become healthy."""
        ports = {module.resources(self.dropin(one))[0] for one, state in self.states.items() if state == "active"}
        if unit in self.refused or "broken" in self.dropin(unit):
            return False
        return module.resources(self.dropin(unit))[0] not in ports

    def systemctl(self, *words: str) -> Any:
        """Do what systemctl would do."""
        self.calls.append(words)
        unit = words[-1]
        if words[0] in ("restart", "start"):
            self.states.pop(unit, None)
            self.states[unit] = "active" if self.starts(unit) else "failed"
            code = int(self.states[unit] != "active")
        elif words[0] == "is-enabled":
            code = int(unit not in self.enabled)
        else:
            code = 0
        if words[0] == "enable":
            self.enabled.add(unit)
        if words[0] in ("stop", "disable"):
            self.states[unit] = "inactive"
        state = self.states.get(unit, "inactive") if words[0] == "is-active" else ""
        return type("Done", (), {"returncode": code, "stdout": state, "stderr": ""})()

    def started(self) -> list[str]:
        """Names of the deployments that were started since the last call."""
        found = [words[-1][7:-8] for words in self.calls if words[0] in ("restart", "start")]
        self.calls.clear()
        return found

    def active(self) -> set[str]:
        """Names of the deployments that run."""
        return {unit[7:-8] for unit, state in self.states.items() if state == "active"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path / "units")
    monkeypatch.setattr(module, "UNITS", tmp_path / "units")
    monkeypatch.setattr(module, "TEMPLATE", tmp_path / "units/sglang@.service")
    monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(module, "systemctl", made.systemctl)
    monkeypatch.setattr(module, "journal", lambda _: "the end of the journal")
    monkeypatch.setattr(module, "taken", lambda *_: False)
    monkeypatch.setattr(module, "known_flags", lambda *_: KNOWN)
    monkeypatch.setattr(module.shutil, "chown", lambda *_: None)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").touch()
    (tmp_path / "config.json").touch()
    return made


def manager(tmp_path: Path, *several: dict[str, Any], dry: bool = False, unit: str = UNIT, **changes: Any) -> Any:
    """Return a manager of the deployment main, or of several."""
    shared = {"model_path": str(tmp_path), "venv": str(tmp_path / "venv")}
    return module.Manager([deployment(**shared, **one) for one in several or (changes,)], "root", unit, {}, dry)


def left(tmp_path: Path) -> list[str]:
    """Files that a change keeps until it is over."""
    return sorted(path.name for path in (tmp_path / "configs/.before").glob("*/*"))


SECOND = {"name": "second", "port": 30001}


def test_change_restarts_once_and_the_second_run_changes_nothing(tmp_path: Path, machine: Machine) -> None:
    assert manager(tmp_path).apply()
    assert machine.started() == ["main"]
    assert not manager(tmp_path).apply()
    assert not [call for call in machine.calls if call[0] not in ("is-active", "is-enabled")]
    assert left(tmp_path) == []


def test_only_root_reads_variables_and_only_the_service_its_configuration(tmp_path: Path, machine: Machine) -> None:
    manager(tmp_path, api_key="x", environment={"HF_TOKEN": "y"}).apply()
    assert machine.active() == {"main"}
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "configs").glob("main.*")}
    assert modes == {"main.env": 0o600, "main.gate": 0o640, "main.yml": 0o640}


def test_what_does_not_become_healthy_is_put_back(tmp_path: Path, machine: Machine) -> None:
    manager(tmp_path, environment={"A": "1"}).apply()
    good = {path: path.read_text() for path in manager(tmp_path).wanted(manager(tmp_path).deployments[0])}
    with pytest.raises(module.DeploymentError, match="its former form runs again"):
        manager(tmp_path, served_model_name="broken", environment={"A": "2"}).apply()
    assert {path: path.read_text() for path in good} == good
    assert machine.active() == {"main"}
    assert left(tmp_path) == []
    assert not manager(tmp_path, environment={"A": "1"}).apply()


def test_unit_is_put_back_with_the_first_that_does_not_become_healthy(tmp_path: Path, machine: Machine) -> None:
    manager(tmp_path).apply()
    with pytest.raises(module.DeploymentError, match="its former form runs again"):
        manager(tmp_path, served_model_name="broken", unit=UNIT + "UMask=0027\n").apply()
    assert module.TEMPLATE.read_text() == UNIT
    assert not manager(tmp_path).apply()
    assert machine.active() == {"main"}


def test_server_that_died_and_does_not_start_is_not_started_twice(tmp_path: Path, machine: Machine) -> None:
    manager(tmp_path).apply()
    machine.states["sglang@main.service"] = "failed"
    machine.refused = {"sglang@main.service"}
    machine.started()
    with pytest.raises(module.DeploymentError, match="its files are what they were before"):
        manager(tmp_path).apply()
    assert machine.started() == ["main"]


def test_first_deployment_that_fails_leaves_nothing(tmp_path: Path, machine: Machine) -> None:
    with pytest.raises(module.DeploymentError, match="it had no former form and is taken away again"):
        manager(tmp_path, served_model_name="broken").apply()
    assert not manager(tmp_path).deployments[0].dropin.exists()
    assert ("disable", "--now", "sglang@main.service") in machine.calls
    assert left(tmp_path) == []


def test_change_that_was_killed_half_way_is_completed_with_the_old_way_back(tmp_path: Path, machine: Machine) -> None:
    manager(tmp_path).apply()
    killed = manager(tmp_path, served_model_name="broken")
    killed.save(killed.deployments)
    killed.install(killed.deployments[0], killed.wanted(killed.deployments[0]), UNIT)
    with pytest.raises(module.DeploymentError, match="its former form runs again"):
        manager(tmp_path, served_model_name="broken").apply()
    assert machine.active() == {"main"}
    assert not manager(tmp_path).apply()


def test_change_that_was_proved_before_the_kill_is_not_made_again(tmp_path: Path, machine: Machine) -> None:
    manager(tmp_path).apply()
    killed = manager(tmp_path, served_model_name="other")
    killed.save(killed.deployments)
    killed.replace(killed.deployments, [])
    machine.started()
    assert not manager(tmp_path, served_model_name="other").apply()
    assert machine.started() == []
    assert left(tmp_path) == []


def test_settled_is_what_needs_nothing(tmp_path: Path, machine: Machine) -> None:
    assert not manager(tmp_path).settled()
    manager(tmp_path).apply()
    assert manager(tmp_path).settled()
    assert not manager(tmp_path, served_model_name="x").settled()
    assert not manager(tmp_path, unit=UNIT + "UMask=0027\n").settled()
    assert not manager(tmp_path, SECOND).settled()
    machine.states["sglang@main.service"] = "activating"
    assert not manager(tmp_path).settled()


def test_port_that_is_none_is_named_before_it_is_tried(tmp_path: Path, machine: Machine) -> None:
    with pytest.raises(module.DeploymentError, match="port 70000 is not from 1 to 65535"):
        manager(tmp_path, port=70000).apply()
    assert machine.started() == []


def test_values_that_no_output_may_show() -> None:
    one = {"arguments": {"admin_api_key": "a", "tp-size": 2}, "environment": {"HF_TOKEN": "b", "NOTE": "c"}}
    assert module.secrets([one]) == {"a", "b"}


def test_server_that_still_starts_is_waited_for(tmp_path: Path, machine: Machine) -> None:
    manager(tmp_path).apply()
    machine.states["sglang@main.service"] = "activating"
    machine.calls.clear()
    assert not manager(tmp_path).apply()
    assert [words for words in machine.calls if words[0] in ("start", "restart")] == [("start", "sglang@main.service")]


def test_the_others_stay_as_they_are_when_one_fails(tmp_path: Path, machine: Machine) -> None:
    manager(tmp_path, {}, SECOND).apply()
    machine.started()
    with pytest.raises(module.DeploymentError, match=r"sglang@main\.service did not become healthy"):
        manager(tmp_path, {"served_model_name": "broken"}, SECOND | {"served_model_name": "x"}).apply()
    assert machine.started() == ["main", "main"]
    assert not manager(tmp_path, {}, SECOND).apply()
    assert machine.active() == {"main", "second"}


def test_ports_can_be_exchanged(tmp_path: Path, machine: Machine) -> None:
    manager(tmp_path, {}, SECOND).apply()
    assert manager(tmp_path, {"port": 30001}, SECOND | {"port": 30000}).apply()
    assert machine.active() == {"main", "second"}


def test_failed_exchange_of_ports_puts_both_back(tmp_path: Path, machine: Machine) -> None:
    manager(tmp_path, {}, SECOND).apply()
    with pytest.raises(module.DeploymentError, match=r"sglang@second\.service did not .* its former form runs again"):
        manager(tmp_path, {"port": 30001}, SECOND | {"port": 30000, "served_model_name": "broken"}).apply()
    assert not manager(tmp_path, {}, SECOND).apply()
    assert machine.active() == {"main", "second"}


def test_dry_run_writes_nothing(tmp_path: Path, machine: Machine) -> None:
    run = manager(tmp_path, dry=True)
    assert run.apply()
    assert run.restarted == ["main"]
    assert not (tmp_path / "units").exists()
    assert machine.started() == []


def test_flags_are_remembered_but_not_by_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHE", tmp_path / "cache")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'FLAGS {\"port\": []}'\n")
    python.chmod(0o755)
    os.utime(python, (1, 1))
    assert module.known_flags(python, True) == {"port": []}
    assert not (tmp_path / "cache").exists()
    assert module.known_flags(python, False) == {"port": []}
    python.write_text("#!/bin/sh\nexit 1\n")
    os.utime(python, (1, 1))
    assert module.known_flags(python, False) == {"port": []}


def test_deployment_no_longer_named_is_taken_away_when_the_others_are_healthy(tmp_path: Path, machine: Machine) -> None:
    manager(tmp_path).apply()
    with pytest.raises(module.DeploymentError):
        manager(tmp_path, SECOND | {"served_model_name": "broken"}).apply()
    assert machine.active() == {"main"}
    run = manager(tmp_path, SECOND)
    assert run.apply()
    assert run.removed == ["main"]
    assert machine.active() == {"second"}
    assert [path.name for path in (tmp_path / "units").glob("*.d")] == ["sglang@second.service.d"]


def test_port_of_one_that_goes_can_be_taken_and_is_given_back(tmp_path: Path, machine: Machine) -> None:
    manager(tmp_path).apply()
    with pytest.raises(module.DeploymentError):
        manager(tmp_path, {"name": "second", "served_model_name": "broken"}).apply()
    assert machine.active() == {"main"}
    assert manager(tmp_path, {"name": "second"}).apply()
    assert machine.active() == {"second"}


def test_absent_takes_everything_away_once(tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATE", str(tmp_path / "gate"))
    monkeypatch.setattr(module, "WATCHDOG", tmp_path / "watchdog")
    monkeypatch.setattr(module, "WATCHDOG_STATE", tmp_path / "state")
    manager(tmp_path).apply()
    for name in ("gate", "watchdog", f"units/{module.TIMER}", "units/sglang-watchdog.service"):
        (tmp_path / name).touch()
    (tmp_path / "state").mkdir()
    assert module.remove_all(dry=True)
    assert machine.active() == {"main"}
    assert module.remove_all(dry=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "units", "venv"]
    assert list((tmp_path / "units").iterdir()) == []
    assert machine.active() == set()
    assert module.remove_all(dry=False) == []


def test_another_run_is_waited_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    refused = pytest.raises(module.DeploymentError, match="another run has been at work")
    with module.exclusive(), refused, module.exclusive():
        pass


def test_shared_programs_and_units_are_kept_as_they_should_be(tmp_path: Path, machine: Machine) -> None:
    units = tmp_path / "units"
    support = {tmp_path / "sbin/gate": "program\n", units / module.TIMER: "[Timer]\n"}
    shared = {"model_path": str(tmp_path), "venv": str(tmp_path / "venv")}

    def run(**texts: str) -> Any:
        now = {path: texts.get(path.name, text) for path, text in support.items()}
        return module.Manager([deployment(**shared)], "root", UNIT, now, False)

    assert run().apply()
    assert {path: (path.read_text(), path.stat().st_mode & 0o777) for path in support} == {
        tmp_path / "sbin/gate": ("program\n", 0o755),
        units / module.TIMER: ("[Timer]\n", 0o644),
    }
    assert machine.started() == [module.TIMER[7:-8], "main"]
    assert run().settled()
    assert not run(gate="other\n").settled()
    assert run(gate="other\n").apply()
    assert machine.started() == []
    machine.states[module.TIMER] = "inactive"
    assert run(gate="other\n").apply()
    assert machine.states[module.TIMER] == "active"
