"""The calls of CUDA: what needs no GPU, and on a GPU memory and copies within one process."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from cuda_devices import needs_cuda
from kv_helpers import small_layout

from kvcache.errors import BadRequest, Internal, PeerUnreachable
from kvcache.memory import DeviceRegion, cuda
from kvcache.memory.cuda import CudaDevice
from kvcache.memory.cuda_copies import CudaCopies
from kvcache.tiers.store import DevicePages, HostStore
from kvcache.types import PageId

GIB = 1 << 30


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "runtime", cuda.runtime.__wrapped__)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BadRequest, match=r"extra cuda"):
        cuda.runtime()


def test_results_and_errors_of_calls(monkeypatch: pytest.MonkeyPatch):
    calls = ModuleType("runtime")
    calls.none = lambda: (0,)  # type: ignore[attr-defined]
    calls.one = lambda value: (0, value)  # type: ignore[attr-defined]
    calls.two = lambda: (0, 1, 2)  # type: ignore[attr-defined]
    calls.bad = lambda: (719, None)  # type: ignore[attr-defined]
    calls.cudaGetErrorString = lambda code: (0, b"unspecified launch failure")  # type: ignore[attr-defined]
    calls.cudaGetLastError = lambda: (719,)  # type: ignore[attr-defined]
    monkeypatch.setattr(cuda, "runtime", lambda: calls)
    assert cuda.call("none") == ()
    assert cuda.call("one", 7) == 7
    assert cuda.call("two") == (1, 2)
    with pytest.raises(cuda.CudaCallError, match=r"bad: unspecified launch failure \(719\)"):
        cuda.call("bad")


class Stream:
    """A stream whose `synchronize` raises each of `errors` in turn, if it is not empty."""

    def __init__(self, *errors: str) -> None:
        self._errors = list(errors)

    def synchronize(self) -> None:
        error = self._errors.pop(0)
        if error:
            raise RuntimeError(error)


@pytest.mark.parametrize("lasting", [False, True])
def test_an_error_of_a_copy_is_typed_and_a_lasting_one_is_remembered(
    lasting: bool, monkeypatch: pytest.MonkeyPatch
):
    copies = CudaCopies.__new__(CudaCopies)
    copies._lost, copies.by_kernel = "", True
    copies._stream = Stream("an illegal access", "the same" if lasting else "", "", "")  # type: ignore[assignment]
    monkeypatch.setattr(copies, "_start_kernel", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    nothing = torch.zeros(0), torch.zeros(0), np.zeros((0, 3), dtype=np.int64)
    with pytest.raises(Internal, match="restarted" if lasting else "a copy on the GPU failed"):
        copies.copy(*nothing)
    if lasting:
        with pytest.raises(Internal, match="illegal access"):
            copies.copy(*nothing)
    else:
        copies.copy(*nothing)


# On a GPU


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(torch.device("cuda"))


@needs_cuda
def test_memory_is_zeroed_and_freed_with_the_last_reference(device: CudaDevice):
    gc.collect()
    before = torch.cuda.mem_get_info()[0]
    layout = small_layout(3)
    layout = replace(layout, pages=2 * GIB // layout.page_bytes)
    region = DeviceRegion.on(device, layout, 1)
    assert region.pool.is_cuda and region.pool.shape == layout.shape
    assert not bool(region.memory.any())
    assert torch.cuda.mem_get_info()[0] < before - GIB
    region.close()
    assert region.pool.device == device.device  # it is still there
    del region
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > before - GIB


@needs_cuda
def test_a_pool_that_does_not_fit_says_what_is_free(device: CudaDevice):
    with pytest.raises(BadRequest, match=r"1024\.00 GiB .* free"):
        device.allocate(1024 * GIB)
    assert float(torch.ones(10, device="cuda").sum()) == 10.0


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pools_have_any_dtype(device: CudaDevice, dtype: torch.dtype):
    region = DeviceRegion.on(device, replace(small_layout(3), dtype=dtype), 1)
    region.pool[:, 2] = 1.5
    assert region.pool.dtype == dtype
    assert float(region.pool.sum()) == 1.5 * region.pool[:, 2].numel()
    region.close()


@needs_cuda
def test_a_handle_of_this_process_is_the_own_memory(device: CudaDevice):
    allocation = device.allocate(1000)
    other = CudaDevice(torch.device("cuda"))
    assert other.uuid == device.uuid and len(device.uuid) == 32
    mapped = other.open_peer(allocation.handle, 1000, device.uuid)
    assert mapped.memory.data_ptr() == allocation.memory.data_ptr()


@needs_cuda
def test_handles_that_nobody_has_are_unreachable(device: CudaDevice):
    freed = device.allocate(1000).handle
    gc.collect()
    for handle in (b"", freed):
        with pytest.raises(PeerUnreachable):
            device.open_peer(handle, 1000, device.uuid)
    assert float(torch.ones(10, device="cuda").sum()) == 10.0


@needs_cuda
def test_copies_use_the_kernel(device: CudaDevice):
    """Otherwise a warning says why not."""
    assert device.copies().by_kernel  # type: ignore[attr-defined]


@needs_cuda
@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize(("unit", "longest"), [(16, 512), (16, 1 << 18), (8, 4096), (1, 4096)])
def test_copies_are_exact(device: CudaDevice, by_kernel: bool, unit: int, longest: int):
    copies = device.copies()
    copies.by_kernel &= by_kernel  # type: ignore[attr-defined]
    random = np.random.default_rng(unit)
    size = 1 << 24
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    for count in (1, 2, 5000):  # the last needs more room than there is at first
        lengths = random.integers(0, min(longest, size // count // 2) // unit + 1, count) * unit
        ends = np.cumsum(lengths)
        begins = random.integers(0, (size - longest) // unit, count) * unit
        runs = np.stack((begins, ends - lengths, lengths), axis=1).astype(np.int64)
        target, host = torch.zeros_like(source), source.cpu().numpy()
        wanted = np.zeros(size, dtype=np.uint8)
        for begin, to, length in runs.tolist():
            wanted[to : to + length] = host[begin : begin + length]
        torch.cuda.synchronize()  # copies do not wait for other streams
        copies.copy(source, target, runs)
        assert np.array_equal(target.cpu().numpy(), wanted)


@needs_cuda
def test_events_are_done_behind_the_work_before_them(device: CudaDevice):
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # some 0.2 s
    event = device.record_event()
    assert not device.event_done(event)
    device.copies().copy(*(torch.zeros(16, dtype=torch.uint8, device="cuda"),) * 2, one_run())
    torch.cuda.synchronize()
    assert device.event_done(event)


def one_run() -> np.ndarray:
    return np.array([[0, 0, 16]], dtype=np.int64)


@needs_cuda
def test_tiers_copy_pages_of_the_pool(device: CudaDevice):
    layout = small_layout(4)
    region = DeviceRegion.on(device, layout, 1)
    region.pool[:, 2] = torch.rand_like(region.pool[:, 2])
    store, pages = HostStore(layout, 2, pinned=True), DevicePages(region.pool)
    pages.read(PageId(2), store.buffer(PageId(1)))
    pages.write(PageId(3), store.fetch(PageId(1)))
    assert torch.equal(region.pool[:, 3], region.pool[:, 2])
    assert not bool(region.pool[:, 1].any()) and not bool(region.pool[:, 4].any())
    region.close()
