#!/usr/bin/python3
"""Wait until an address answers with success. systemd ends the wait when the server dies or its time is up."""

import sys
import time
import urllib.error
import urllib.request

POLL_S = 0.5
ANSWER_TIMEOUT_S = 60.0

while True:
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=ANSWER_TIMEOUT_S) as answer:  # noqa: S310
            if answer.status == 200:
                sys.exit(0)
    except (OSError, urllib.error.URLError):
        pass
    time.sleep(POLL_S)
