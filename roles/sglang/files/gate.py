#!/usr/bin/python3
"""Let a start of SGLang count only when it generates, as well as its deployment asks.

Waits until the server is healthy or its process is gone (systemd ends the wait when the time is up), then sends the
canaries and, where an acceptance length is asked for, measures it on fixed prompts.

    sglang-gate GATE CONFIGURATION

GATE (JSON): {"url", "canaries": [{"prompt", "pattern", "tokens"}], "min_acceptance_length": 0.0}. CONFIGURATION is the
server's own, with its API key.
"""

import http.client
import json
import os
import re
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.5
ANSWER_TIMEOUT_S = 300.0
PROBES = (
    "List the first twenty prime numbers, separated by commas.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring and three examples.",
    "Explain in five sentences why the sky is blue.",
    "Translate into German: The quick brown fox jumps over the lazy dog, and the dog does not mind.",
)
PROBE_TOKENS = 128


class GateError(Exception):
    """A server that must not count as started; the text says why."""


@dataclass(frozen=True)
class Server:
    """A server of this machine.

    Attributes:
        url: its address without a path.
        api_key: what it asks clients for, "" where nothing.
    """

    url: str
    api_key: str = ""

    def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Send a request and return the answer.

        Raises:
            OSError, http.client.HTTPException: there is none, or its status is an error.
        """
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:  # noqa: S310
            return str(answer.read().decode())

    def healthy(self) -> bool:
        """Tell whether it generates a token."""
        try:
            self.ask("/health_generate")
        except (OSError, http.client.HTTPException):
            return False
        return True

    def generate(self, prompt: str, tokens: int, ignore_eos: bool = False) -> tuple[str, dict[str, Any]]:
        """Return the greedy continuation of a prompt, and what SGLang says about it."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": ignore_eos}
        answer = json.loads(self.ask("/generate", {"text": prompt, "sampling_params": sampling}))
        return str(answer["text"]), dict(answer["meta_info"])


def wait(server: Server, process: Path) -> None:
    """Wait until a server is healthy.

    Args:
        server: the server.
        process: folder of its main process in /proc.

    Raises:
        GateError: the process ended before.
    """
    while process.exists():
        if server.healthy():
            return
        time.sleep(POLL_S)
    raise GateError("the server has ended")


def check_canaries(server: Server, canaries: list[dict[str, Any]]) -> None:
    """Compare answers with their patterns.

    Raises:
        GateError: one does not match.
    """
    for one in canaries:
        text, _ = server.generate(one["prompt"], one["tokens"])
        if not re.search(one["pattern"], text):
            raise GateError(f"canary {one['prompt']!r}: the answer {text!r} does not match {one['pattern']!r}")


def acceptance_length(server: Server) -> float:
    """Return the mean number of tokens per verification on the fixed prompts.

    Raises:
        GateError: the server does not speculate.
    """
    tokens = verifications = 0
    for prompt in PROBES:
        _, about = server.generate(prompt, PROBE_TOKENS, ignore_eos=True)
        tokens += int(about["completion_tokens"])
        verifications += int(about.get("spec_verify_ct") or 0)
    if not verifications:
        raise GateError("min_acceptance_length: the server does not speculate. Set it to 0, or choose an algorithm")
    return tokens / verifications


def check(server: Server, wanted: dict[str, Any]) -> str:
    """Hold a healthy server against what its deployment asks, and return what was measured.

    Raises:
        GateError: it falls short.
    """
    check_canaries(server, wanted["canaries"])
    said = [f"{len(wanted['canaries'])} canaries match"]
    floor = float(wanted["min_acceptance_length"])
    if floor:
        measured = acceptance_length(server)
        if measured < floor:
            raise GateError(
                f"min_acceptance_length: {floor:g} is wanted, {measured:.2f} was measured. Look at the drafter: its "
                "block size, mask token and layer ids must be the target's"
            )
        said.append(f"acceptance length {measured:.2f}")
    return ", ".join(said)


def main() -> None:
    """Run the gate for the server whose gate file and configuration are the arguments."""
    wanted = json.loads(Path(sys.argv[1]).read_text())
    secret = json.loads(Path(sys.argv[2]).read_text())
    server = Server(wanted["url"], secret.get("api-key", ""))
    try:
        wait(server, Path("/proc") / os.environ["MAINPID"])
        print(f"gate: {check(server, wanted)}")
    except (GateError, OSError, http.client.HTTPException) as error:
        sys.exit(f"gate: {error}")


if __name__ == "__main__":
    main()
