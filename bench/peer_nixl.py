"""NIXL's WRITE of 256 MB into another process, over UCX's shared memory, as its users call it.

Run by `bench.put` in the peer's own environment. The last line is GB/s, median of the repeats.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

SIZE = 256 << 20
REPEATS = 9


def make_agent(name: str) -> tuple[object, np.ndarray]:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = np.ones(SIZE, dtype=np.uint8)
    agent.register_memory([(memory.ctypes.data, SIZE, 0, "")], "DRAM")
    return agent, memory


def target(pipe: Connection) -> None:
    agent, memory = make_agent("target")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    pipe.recv()
    if not (memory == 7).all():
        raise SystemExit("the bytes are not there")
    pipe.send("ok")


def main() -> None:
    os.environ.setdefault("UCX_TLS", "posix,sysv,cma,self,tcp")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    agent, memory = make_agent("initiator")
    metadata, address = ours.recv()
    peer = agent.add_remote_agent(metadata)
    memory[:] = 7
    local = agent.get_xfer_descs([(memory.ctypes.data, SIZE, 0)], "DRAM")
    remote = agent.get_xfer_descs([(address, SIZE, 0)], "DRAM")
    rates = []
    for _ in range(REPEATS + 1):
        handle = agent.initialize_xfer("WRITE", local, remote, peer)
        began = time.perf_counter()
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = agent.check_xfer_state(handle)
        if state == "ERR":
            raise SystemExit("the transfer failed")
        rates.append(SIZE / (time.perf_counter() - began) / 1e9)
        agent.release_xfer_handle(handle)
    ours.send("done")
    if ours.recv() != "ok":
        raise SystemExit("the bytes are not there")
    print(statistics.median(rates[1:]))


if __name__ == "__main__":
    main()
