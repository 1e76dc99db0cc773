#!/usr/bin/python3
"""Wait until a server answers with success, or its process is gone. systemd ends the wait when the time is up."""

import os
import sys
import time
import urllib.request
from pathlib import Path

POLL_S = 0.5
ANSWER_TIMEOUT_S = 60.0

process = Path("/proc") / os.environ["MAINPID"]
while process.exists():
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=ANSWER_TIMEOUT_S) as answer:  # noqa: S310
            if answer.status == 200:
                sys.exit(0)
    except OSError:
        time.sleep(POLL_S)
sys.exit("the server has ended")
