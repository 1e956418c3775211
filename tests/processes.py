"""What tests see of processes that others started."""

import contextlib

import psutil


def ended(process: psutil.Process) -> bool:
    """Also if nobody has asked how."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def descendants(pid: int, word: str = "") -> list[psutil.Process]:
    """The processes of all generations below one that run and have a word in their command lines."""
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if word in " ".join(each.cmdline()):
                found.append(each)
    return found


def cpu_seconds(pid: int) -> float:
    """Of a process and its children that ended."""
    return sum(psutil.Process(pid).cpu_times()[:4])
