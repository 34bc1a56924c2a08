"""What Linux lets a process arrange for itself and its children, by `prctl` and `unshare`."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

__all__ = [
    "adopt_orphans",
    "die_with_parent",
    "enter_namespaces",
    "forbid_new_privileges",
    "hide_memory",
]

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CLONE_NEWUSER, CLONE_NEWPID = 0x1000_0000, 0x2000_0000


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def hide_memory() -> None:
    """Refuse other processes of this user the memory, environment and descriptors of this one.

    Also debuggers and profilers that attach (`gdb`, `py-spy`), and there are no core dumps. The
    superuser is not refused. An `exec` ends it; children that only fork inherit it.
    """
    _prctl(PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, in whatever session they are."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    """Refuse this process and its children the rights of setuid programs."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def enter_namespaces() -> bool:
    """Give the children of this process a user and a pid namespace of their own.

    The first child is the namespace's process 1: when it ends, the kernel kills all others there.
    They can neither signal nor inspect a process outside. Return whether the kernel permits it; it
    refuses a process with several threads.
    """
    uid, gid = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0:
        return False
    # Ids keep their values. Without these maps, all of them would read as 65534.
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with suppress(OSError):
            Path(f"/proc/self/{name}").write_text(text)
    return True


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
