"""NIXL's WRITE into another process, over UCX's shared memory, as its users call it.

Run by `bench.put` in the peer's own environment, and driven over pipes: first a line with a JSON
list of `[source, target, bytes]`, offsets into two pools of `SIZE` bytes; then, for each line, one
WRITE of those runs, answered by `peer: SECONDS_IN_ALL SECONDS_OF_THE_TRANSFER`. At the end the
bytes are checked.

It reports both figures because NIXL's users may prepare a transfer's descriptors once and reuse
them. The total is from the array of runs to the last byte, the transfer from posting it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

MARK = "peer:"  # prefix of this script's lines; NIXL prints others


def make_agent(name: str, size: int) -> tuple[Any, np.ndarray]:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = np.ones(size, dtype=np.uint8)
    agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    return agent, memory


def target(pipe: Connection, size: int, runs: list[tuple[int, int, int]]) -> None:
    agent, memory = make_agent("target", size)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    pipe.recv()
    there = all((memory[to : to + length] == 7).all() for _, to, length in runs)
    pipe.send(there and int((memory == 7).sum()) == sum(length for *_, length in runs))


def main() -> None:
    os.environ.setdefault("UCX_TLS", "posix,sysv,cma,self,tcp")
    size, runs = int(sys.argv[1]), json.loads(sys.stdin.readline())
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, size, runs), daemon=True)
    process.start()
    agent, memory = make_agent("initiator", size)
    metadata, address = ours.recv()
    peer = agent.add_remote_agent(metadata)
    memory[:] = 7
    table = np.array(runs, dtype=np.uint64)
    print(MARK, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        of, to = np.zeros_like(table), np.zeros_like(table)  # address, bytes, device
        of[:, 0], of[:, 1] = table[:, 0] + np.uint64(memory.ctypes.data), table[:, 2]
        to[:, 0], to[:, 1] = table[:, 1] + np.uint64(address), table[:, 2]
        local, remote = agent.get_xfer_descs(of, "DRAM"), agent.get_xfer_descs(to, "DRAM")
        handle = agent.initialize_xfer("WRITE", local, remote, peer)
        posted = time.perf_counter()
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = agent.check_xfer_state(handle)
        ended = time.perf_counter()
        if state == "ERR":
            raise SystemExit("the transfer failed")
        agent.release_xfer_handle(handle)
        print(MARK, ended - began, ended - posted, flush=True)
    ours.send("done")
    if not ours.recv():
        raise SystemExit("the bytes are not there")


if __name__ == "__main__":
    main()
