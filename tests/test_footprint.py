"""What a process takes before anybody asks it for something: seconds and memory."""

import os
import subprocess
import sys


def test_the_help_is_there_at_once() -> None:
    """CPU seconds, of which other load makes no more: the best of three."""
    argv = [sys.executable, "-P", "-m", "fusionkv.gateway.cli.main", "--help"]
    seconds = []
    for _ in range(3):
        before = os.times()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) <= 0.3
