"""The memory that a process may use, read from files as they are in machines and containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.sizing import Memory, read_memory

GIB = 1 << 30
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2_MOUNTS = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with 64 GiB, of which 40 are available, without control groups."""
    return Machine(tmp_path)


class Machine:
    """A file system with the files of Linux."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 41943040 kB\nJunk\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v1(self, group: str, limit: int, used: int, *, idle: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory{group}"
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"inactive_file 7\ntotal_inactive_file {idle}\n")

    def v2(self, group: str, limit: int | None, used: int, *, idle: int = 0) -> None:
        folder = f"sys/fs/cgroup{group}"
        self.write(f"{folder}/memory.max", "max\n" if limit is None else f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {idle}\n")

    def process(self, groups: str, mounts: str, *, root: str = "/") -> None:
        self.write("proc/self/cgroup", groups)
        self.write("proc/self/mountinfo", mounts.format(root=root))

    def read(self) -> Memory:
        return read_memory(self.root)


def test_without_control_groups_it_is_the_machines(machine: Machine):
    assert machine.read() == Memory(64 * GIB, 40 * GIB)
    machine.process("", "nonsense\n1 2 3\n - cgroup2 x rw\n")
    assert machine.read() == Memory(64 * GIB, 40 * GIB)


def test_the_strictest_limit_on_the_path_applies_in_version_2(machine: Machine):
    machine.process("0::/pods/one/engine\n", V2_MOUNTS)
    machine.v2("/pods/one/engine", None, 1 * GIB)
    machine.v2("/pods/one", 8 * GIB, 5 * GIB, idle=1 * GIB)
    machine.v2("/pods", 16 * GIB, 13 * GIB)
    machine.v2("/other", 1 * GIB, 0)
    read = machine.read()
    assert (read.limit, read.available) == (8 * GIB, 3 * GIB)
    assert read.source == "the control group /sys/fs/cgroup/pods/one"


def test_the_strictest_limit_on_the_path_applies_in_version_1(machine: Machine):
    machine.process("9:name=systemd:/x\n4:memory,hugetlb:/a/b\n1:cpu:/c\n0::/\n", V1_MOUNTS)
    machine.v1("", 2**63 - 4096, 30 * GIB)
    machine.v1("/a", 12 * GIB, 4 * GIB, idle=2 * GIB)
    machine.v1("/a/b", 2**63 - 4096, 1 * GIB)
    read = machine.read()
    assert (read.limit, read.available) == (12 * GIB, 10 * GIB)
    assert read.source == "the control group /sys/fs/cgroup/memory/a"


@pytest.mark.parametrize("group", ["/docker/1", "/../1", "/elsewhere"])
def test_a_container_sees_its_group_as_the_root(machine: Machine, group: str):
    """The path is that of the host or outside the mount; the mounted group is the container's."""
    machine.process(f"4:memory:{group}\n", V1_MOUNTS, root="/docker/1")
    machine.v1("", 2 * GIB, 1 * GIB)
    machine.v1("/docker/1", 1 * GIB, 0)  # not this container's
    assert machine.read().limit == 2 * GIB


def test_the_process_may_be_below_the_mounted_group(machine: Machine):
    machine.process("0::/docker/1/engine\n", V2_MOUNTS, root="/docker/1")
    machine.v2("/engine", 2 * GIB, 0)
    assert machine.read().limit == 2 * GIB


def test_mount_points_are_unescaped(machine: Machine):
    machine.process("0::/\n", V2_MOUNTS.replace("/sys/fs/cgroup", r"/odd\040folder"))
    machine.write("odd folder/memory.max", f"{GIB}\n")
    machine.write("odd folder/memory.current", "0\n")
    assert machine.read().limit == GIB


def test_what_the_machine_lacks_is_not_available_in_a_group_either(machine: Machine):
    machine.process("0::/a\n", V2_MOUNTS)
    machine.v2("/a", 63 * GIB, 0)
    assert machine.read().available == 40 * GIB


def test_a_full_group_has_nothing_available(machine: Machine):
    machine.process("0::/a\n", V2_MOUNTS)
    machine.v2("/a", 2 * GIB, 2 * GIB + 4096)
    assert machine.read().available == 0


@pytest.mark.parametrize("text", ["", "many\n", "max\n"])
def test_unreadable_limits_do_not_count(machine: Machine, text: str):
    machine.process("0::/a\n", V2_MOUNTS)
    machine.v2("/a", None, 0)
    machine.write("sys/fs/cgroup/a/memory.max", text)
    assert machine.read() == Memory(64 * GIB, 40 * GIB)


def test_this_machine_has_memory():
    read = read_memory()
    assert 0 < read.available <= read.limit
