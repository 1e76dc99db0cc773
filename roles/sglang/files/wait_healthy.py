#!/usr/bin/python3
"""Wait until a server answers with success, or its process is gone. systemd ends the wait when the time is up."""

import http.client
import os
import sys
import time
import urllib.request
from pathlib import Path

POLL_S = 0.5
ANSWER_TIMEOUT_S = 60.0


def healthy(url: str) -> bool:
    """Tell whether a server answers with success."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def wait(url: str, process: Path) -> bool:
    """Wait until a server is healthy and return true; false where its process ends before.

    Args:
        url: what to ask.
        process: its folder in /proc.
    """
    while process.exists():
        if healthy(url):
            return True
        time.sleep(POLL_S)
    return False


if __name__ == "__main__":
    if not wait(sys.argv[1], Path("/proc") / os.environ["MAINPID"]):
        sys.exit("the server has ended")
