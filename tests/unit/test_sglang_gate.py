"""A start counts when the server generates as well as its deployment asks; one that hangs is seen and counted."""

import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.loading import load

gate = load("roles/sglang/files/gate.py")
watchdog = load("roles/sglang/files/watchdog.py")


class Fake(http.server.ThreadingHTTPServer):
    """A server of SGLang's form whose answers a test sets."""

    def __init__(self) -> None:
        """Listen on a free port of loopback."""
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.statuses: list[int] = []
        self.text = "four is 4"
        self.about: dict[str, Any] = {"completion_tokens": 128, "spec_verify_ct": 40}
        self.metrics = ""
        self.seen: list[tuple[str, dict[str, Any], str | None]] = []


class Answers(http.server.BaseHTTPRequestHandler):
    """One request; a status of 0 breaks the connection off."""

    server: Fake

    def answer(self, body: dict[str, Any]) -> None:
        """Answer with the next status, 200 where none is left."""
        self.server.seen.append((self.path, body, self.headers["Authorization"]))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if not status:
            self.connection.close()
            return
        text = json.dumps({"text": self.server.text, "meta_info": self.server.about})
        content = (self.server.metrics if self.path == "/metrics" else text).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        """Answer."""
        self.answer({})

    def do_POST(self) -> None:
        """Answer."""
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def wanted(**changes: Any) -> dict[str, Any]:
    return {"canaries": [], "min_acceptance_length": 0.0} | changes


def test_gate_outlasts_a_server_that_breaks_off_or_is_not_ready(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "POLL_S", 0.0)
    fake.statuses = [0, 503]
    gate.wait(gate.Server(fake.url), Path("/proc/self"))
    assert [path for path, _, _ in fake.seen] == ["/health_generate"] * 3


def test_gate_ends_with_the_process(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(gate.GateError, match="the server has ended"):
        gate.wait(gate.Server(fake.url), tmp_path / "gone")


def test_canary_is_asked_greedily_and_with_the_key(fake: Fake) -> None:
    canary = {"prompt": "2+2=", "pattern": r"\b4\b", "tokens": 8}
    assert gate.check(gate.Server(fake.url, "s3cret"), wanted(canaries=[canary])) == "1 canaries match"
    (path, body, key) = fake.seen[0]
    assert (path, key) == ("/generate", "Bearer s3cret")
    assert body == {"text": "2+2=", "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": False}}


def test_canary_that_does_not_match_closes_the_gate(fake: Fake) -> None:
    fake.text = "five"
    with pytest.raises(gate.GateError, match=r"canary '2\+2=': the answer 'five' does not match '4'"):
        gate.check(gate.Server(fake.url), wanted(canaries=[{"prompt": "2+2=", "pattern": "4", "tokens": 8}]))


@pytest.mark.parametrize(("floor", "open_"), [(3.2, True), (3.21, False)])
def test_acceptance_length_is_tokens_per_verification(fake: Fake, floor: float, open_: bool) -> None:
    if open_:
        assert gate.check(gate.Server(fake.url), wanted(min_acceptance_length=floor)).endswith("acceptance length 3.20")
    else:
        with pytest.raises(gate.GateError, match=r"min_acceptance_length: 3\.21 is wanted, 3\.20 was measured"):
            gate.check(gate.Server(fake.url), wanted(min_acceptance_length=floor))
    assert len(fake.seen) == len(gate.PROBES)


def test_server_that_does_not_speculate_has_no_acceptance_length(fake: Fake) -> None:
    fake.about = {"completion_tokens": 128}
    with pytest.raises(gate.GateError, match="the server does not speculate"):
        gate.check(gate.Server(fake.url), wanted(min_acceptance_length=1.5))


METRICS = """\
# HELP sglang:generation_tokens_total Number of generation tokens processed.
sglang:generation_tokens_total{{model_name="a"}} {tokens}
sglang:num_running_reqs{{model_name="a"}} {running}
sglang:num_running_reqs_offline_batch{{model_name="a"}} 7
"""


def test_metrics_are_summed_over_labels() -> None:
    text = 'a{x="1"} 2\na{x="2"} 3e1\na_total 5\nb 7\n'
    assert [watchdog.total(text, name) for name in ("a", "b", "c")] == [32.0, 7.0, 0.0]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A machine on which every unit is active; what else systemctl is told is noted."""
    calls: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if words[1] != "is-active":
            calls.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(watchdog.subprocess, "run", run)
    monkeypatch.setattr(watchdog, "STATE", tmp_path / "state")
    monkeypatch.setattr(watchdog, "TEXTFILES", tmp_path / "textfiles")
    return calls


def test_server_that_works_is_left_alone(fake: Fake, machine: list[list[str]]) -> None:
    for tokens in range(5):
        fake.metrics = METRICS.format(tokens=tokens, running=1)
        assert watchdog.watch("main", fake.url, 5.0) == ""
    for _ in range(5):
        fake.metrics = METRICS.format(tokens=9, running=0)
        assert watchdog.watch("main", fake.url, 5.0) == ""
    assert machine == []


def test_hung_server_is_restarted_at_the_third_look_and_counted(
    fake: Fake, machine: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "textfiles").mkdir()
    fake.statuses = [503] * 3
    assert [watchdog.watch("main", fake.url, 5.0) for _ in range(3)] == ["hung"] * 3
    assert machine == [["systemctl", "restart", "--no-block", "sglang@main.service"]]
    shown = (tmp_path / "textfiles/sglang_deployments.prom").read_text()
    assert 'sglang_deployment_events_total{deployment="main",event="hung"} 1\n' in shown
    assert watchdog.watch("main", fake.url, 5.0) == ""


def test_server_that_recovers_is_not_restarted(fake: Fake, machine: list[list[str]]) -> None:
    fake.statuses = [503, 503]
    for _ in range(6):
        watchdog.watch("main", fake.url, 5.0)
    assert machine == []


def test_server_that_answers_and_makes_no_token_is_restarted(fake: Fake, machine: list[list[str]]) -> None:
    fake.metrics = METRICS.format(tokens=100, running=2)
    assert [watchdog.watch("main", fake.url, 5.0) for _ in range(4)] == ["", "silent", "silent", "silent"]
    assert len(machine) == 1


def test_events_of_others_are_counted_too(machine: list[list[str]], tmp_path: Path) -> None:
    assert machine == []
    for event in ("put_back", "put_back", "change_failed"):
        watchdog.count("main", event)
    counts = json.loads((tmp_path / "state/main.events.json").read_text())
    assert counts == {"hung": 0, "silent": 0, "change_failed": 1, "put_back": 2}
