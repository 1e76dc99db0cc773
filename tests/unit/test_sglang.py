"""Deployments become exact units, and what cannot work is named before anything is touched."""

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
        environment={"NOTE": 'a "b" 50% $HOME'},
        start_timeout_s=60,
    )
    assert module.dropin_text(one, PYTHON, UNIT).splitlines()[1:] == [
        "[Service]",
        "Environment=CUDA_VISIBLE_DEVICES=2,3",
        'Environment="NOTE=a \\"b\\" 50%% $HOME"',
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
        "ExecStartPost=/usr/local/lib/sglang/wait_healthy http://127.0.0.1:30000/health_generate",
    ]


def test_dollars_stay_dollars_in_a_command() -> None:
    assert module.word("$HOME 5%") == '"$$HOME 5%%"'


def test_list_becomes_several_words() -> None:
    assert module.command(deployment(arguments={"cuda-graph-bs-decode": [1, 2, 4]}), PYTHON).count(" 1 2 4") == 1


def test_key_is_in_the_file_and_nowhere_else() -> None:
    one = deployment(api_key="s3cret")
    assert module.config_text(one) == '{"api-key": "s3cret"}\n'
    assert "s3cret" not in module.dropin_text(one, PYTHON, UNIT)
    assert "s3cret" not in module.hidden(module.config_text(one))


def test_another_unit_or_release_is_another_text() -> None:
    first = module.dropin_text(deployment(), PYTHON, UNIT)
    assert first != module.dropin_text(deployment(), PYTHON, UNIT + "UMask=0027\n")
    assert first != module.dropin_text(deployment(), Path("/opt/venvs/sglang/releases/def/bin/python"), UNIT)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:30000/health_generate"),
        ("::", "http://[::1]:30000/health_generate"),
        ("192.0.2.9", "http://192.0.2.9:30000/health_generate"),
    ],
)
def test_health_is_asked_where_the_server_listens(host: str, url: str) -> None:
    assert deployment(host=host).health_url == url


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([{"name": "Main"}], "name 'Main' is not made of small letters"),
        ([{}, {"port": 30001}], "the name is there twice"),
        ([{}, {"name": "second"}], "second: port 30000 is main's too"),
        ([{"gpus": (0,)}, {"name": "second", "port": 30001, "gpus": (0,)}], "second: gpus has 0, which is main's too"),
        ([{"port": 70000}], "port 70000 is not from 1 to 65535"),
        ([{"environment": {"CUDA_VISIBLE_DEVICES": "0"}}], "Name the devices in gpus instead"),
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
    monkeypatch.setattr(module, "active", lambda _: False)
    monkeypatch.setattr(module, "listens", lambda _: True)
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


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine whose systemctl notes calls; a restart fails while `broken` is in the drop-in."""

    class Machine:
        def __init__(self) -> None:
            self.calls: list[tuple[str, ...]] = []
            self.running = False

        def systemctl(self, *words: str) -> Any:
            self.calls.append(words)
            code = 0
            if words[0] == "restart":
                text = (tmp_path / "units/sglang@main.service.d/deployment.conf").read_text()
                self.running = "broken" not in text
                code = 0 if self.running else 1
            if words[0] in ("is-active", "is-enabled"):
                code = 0 if self.running else 3
            return type("Done", (), {"returncode": code, "stdout": "", "stderr": ""})()

    made = Machine()
    monkeypatch.setattr(module, "UNITS", tmp_path / "units")
    monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(module, "systemctl", made.systemctl)
    monkeypatch.setattr(module, "journal", lambda _: "the end of the journal")
    monkeypatch.setattr(module, "known_flags", lambda _: KNOWN)
    monkeypatch.setattr(module.shutil, "chown", lambda *_: None)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").touch()
    (tmp_path / "config.json").touch()
    return made


def manager(tmp_path: Path, dry: bool = False, **changes: Any) -> Any:
    one = deployment(model_path=str(tmp_path), venv=str(tmp_path / "venv"), **changes)
    return module.Manager([one], "root", UNIT, dry)


def test_change_restarts_once_and_the_second_run_changes_nothing(tmp_path: Path, machine: Any) -> None:
    assert manager(tmp_path).apply()
    assert [call for call in machine.calls if call[0] == "restart"] == [("restart", "sglang@main.service")]
    machine.calls.clear()
    assert not manager(tmp_path).apply()
    assert not [call for call in machine.calls if call[0] not in ("is-active", "is-enabled")]


def test_what_does_not_become_healthy_is_put_back(tmp_path: Path, machine: Any) -> None:
    manager(tmp_path).apply()
    good = manager(tmp_path).deployments[0].dropin.read_text()
    with pytest.raises(module.DeploymentError, match="its former form runs again"):
        manager(tmp_path, served_model_name="broken").apply()
    assert manager(tmp_path).deployments[0].dropin.read_text() == good
    assert machine.running
    assert not manager(tmp_path).apply()


def test_first_deployment_that_fails_leaves_nothing(tmp_path: Path, machine: Any) -> None:
    with pytest.raises(module.DeploymentError, match="it had no former form and is taken away again"):
        manager(tmp_path, served_model_name="broken").apply()
    assert not manager(tmp_path).deployments[0].dropin.exists()
    assert ("disable", "--now", "sglang@main.service") in machine.calls


def test_change_that_was_killed_half_way_is_completed_with_the_old_way_back(tmp_path: Path, machine: Any) -> None:
    manager(tmp_path).apply()
    changed = manager(tmp_path, served_model_name="broken")
    one = changed.deployments[0]
    before = changed.pending(one)
    before.mkdir(parents=True)
    for path in (one.dropin, one.config):
        (before / path.name).write_text(path.read_text())
    changed.install(one, changed.wanted(one))
    with pytest.raises(module.DeploymentError, match="its former form runs again"):
        manager(tmp_path, served_model_name="broken").apply()
    assert machine.running


def test_dry_run_writes_nothing(tmp_path: Path, machine: Any) -> None:
    run = manager(tmp_path, dry=True)
    assert run.apply()
    assert run.restarted == ["main"]
    assert not (tmp_path / "units").exists()
    assert not [call for call in machine.calls if call[0] == "restart"]


def test_deployment_no_longer_named_is_taken_away(tmp_path: Path, machine: Any) -> None:
    manager(tmp_path).apply()
    empty = module.Manager([], "root", UNIT, False)
    assert empty.apply()
    assert empty.removed == ["main"]
    assert ("disable", "--now", "sglang@main.service") in machine.calls
    assert not list((tmp_path / "units").glob("*.d"))
