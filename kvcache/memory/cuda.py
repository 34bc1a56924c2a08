"""A GPU as a `Device`: the calls of CUDA that torch does not offer, by way of `cuda-bindings`.

A pool is allocated with `cudaMalloc` and not by torch, so that it has an address and a handle of
its own, and torch's other memory is not shared with it.

An error of the device, such as an access to an address that is not mapped, ends all work of this
process on the GPU: every later call fails too. Such an error says so, and the engine has to be
restarted. What other processes do on the GPU continues.
"""

from __future__ import annotations

import logging
import weakref
from functools import cache
from typing import Any, Final

import torch

from kvcache.errors import BadRequest, Internal, PeerUnreachable
from kvcache.memory.cuda_copies import CudaCopies
from kvcache.memory.device import Allocation, Copies, Mapping

__all__ = ["CudaDevice", "runtime"]

log = logging.getLogger(__name__)

BLOCK: Final = 2 << 20  # CUDA would share smaller memory in whole blocks of this size
OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation
HANDLE_BYTES: Final = 64


class CudaCallError(Exception):
    """A call of the runtime has failed; `code` is its cudaError_t."""

    def __init__(self, name: str, code: int, text: str) -> None:
        super().__init__(f"{name}: {text} ({code})")
        self.code = code


@cache
def runtime() -> Any:
    """Return the module with the calls of CUDA. Raises `BadRequest` if it is not installed."""
    try:
        from cuda.bindings import runtime as calls
    except ImportError as error:
        message = f"the package cuda-bindings is needed for GPUs: install the extra cuda ({error})"
        raise BadRequest(message, param="device") from error
    return calls


def call(name: str, *args: object) -> Any:
    """Call a function of the runtime by name; return its result, a tuple if there are several.

    Raises `CudaCallError`.
    """
    code, *results = getattr(runtime(), name)(*args)
    if int(code):
        text = runtime().cudaGetErrorString(code)[1]
        runtime().cudaGetLastError()  # which forgets an error that does no lasting harm
        raise CudaCallError(name, int(code), text.decode() if text else "unknown error")
    return results[0] if len(results) == 1 else tuple(results)


class CudaDevice:
    """One GPU of this process."""

    def __init__(self, device: torch.device) -> None:
        """Raises `BadRequest` without a GPU, or without the extra `cuda`."""
        runtime()
        if not torch.cuda.is_available():
            raise BadRequest("torch finds no GPU", param="device")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.uuid = _uuids()[index]

    def allocate(self, nbytes: int) -> Allocation:
        return _CudaAllocation(self.device, nbytes)

    def open_peer(self, handle: bytes, nbytes: int, uuid: str) -> Mapping:
        own = _allocations.get(handle)
        if own is not None:  # a process cannot open its own handles
            if own.memory.numel() < nbytes:
                raise PeerUnreachable("the peer's GPU memory is smaller than its pool")
            return own
        self._check_reach(uuid)
        if len(handle) != HANDLE_BYTES:
            raise PeerUnreachable("the handle of the peer's GPU memory is not valid")
        # Puts and transports of this process share one mapping.
        key = self.device.index, handle, _rounded(nbytes)
        mapping = _mappings.get(key)
        if mapping is None:
            mapping = _mappings[key] = _CudaMapping(self.device, handle, nbytes)
        return mapping

    def record_event(self) -> object:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def event_done(self, event: object) -> bool:
        if not isinstance(event, torch.cuda.Event):
            raise Internal("not an event of a GPU")
        done: bool = event.query()  # type: ignore[no-untyped-call]
        return done

    def copies(self) -> Copies:
        return CudaCopies(self.device, memcpy_async)

    def _check_reach(self, uuid: str) -> None:
        """Raise `PeerUnreachable` if this GPU cannot write into the memory of another one."""
        if uuid not in _uuids():
            raise PeerUnreachable(
                f"the peer's pool is on the GPU {uuid}, which this process does not see: both "
                "engines need a CUDA_VISIBLE_DEVICES with all GPUs between which KV moves"
            )
        theirs = _uuids().index(uuid)
        if theirs == self.device.index:
            return
        if not call("cudaDeviceCanAccessPeer", self.device.index, theirs):
            raise PeerUnreachable(
                f"the GPUs {self.uuid} and {uuid} cannot reach each other's memory"
            )


class _CudaAllocation:
    """Implements `Allocation`."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        size = _rounded(nbytes)
        with torch.cuda.device(device):
            call("cudaSetDevice", device.index)
            torch.cuda.empty_cache()  # what torch has freed, but would use again
            try:
                address = int(call("cudaMalloc", size))
            except CudaCallError as error:
                if error.code != OUT_OF_MEMORY:
                    raise Internal(f"GPU memory cannot be allocated: {error}") from error
                free, total = call("cudaMemGetInfo")
                raise BadRequest(
                    f"{size / 2**30:.2f} GiB of GPU memory are wanted for the pool; of "
                    f"{total / 2**30:.2f} GiB there are {free / 2**30:.2f} GiB free",
                    param="pool_pages",
                ) from error
            # The tensor keeps the block, and so the memory. At exit the driver frees it.
            block = _Block(address, size)
            self._free = weakref.finalize(block, _release, "cudaFree", device.index, address)
            self._free.atexit = False
            try:
                call("cudaMemset", address, 0, size)
                call("cudaDeviceSynchronize")  # the zeros are there before a peer writes
                self.handle = bytes(call("cudaIpcGetMemHandle", address).reserved)
            except CudaCallError as error:
                raise Internal(f"GPU memory cannot be shared: {error}") from error
            self.memory = _tensor(block)
        _allocations[self.handle] = self

    def keep(self) -> None:
        self._free.detach()


class _CudaMapping:
    """Implements `Mapping`."""

    def __init__(self, device: torch.device, handle: bytes, nbytes: int) -> None:
        opaque = runtime().cudaIpcMemHandle_t()
        opaque.reserved = handle
        with torch.cuda.device(device):
            call("cudaSetDevice", device.index)
            try:
                # With the own device current and this flag, it also maps memory of another one.
                flag = 1  # cudaIpcMemLazyEnablePeerAccess
                address = int(call("cudaIpcOpenMemHandle", opaque, flag))
            except CudaCallError as error:
                raise PeerUnreachable(f"the peer's GPU memory cannot be mapped: {error}") from error
            block = _Block(address, _rounded(nbytes))
            close = weakref.finalize(
                block, _release, "cudaIpcCloseMemHandle", device.index, address
            )
            close.atexit = False
            _check_size(address, nbytes)
            self.memory = _tensor(block)


# By handle. Peers in this process, such as the engine itself, use them as they are.
_allocations: weakref.WeakValueDictionary[bytes, _CudaAllocation] = weakref.WeakValueDictionary()
# By index of the own device, handle and bytes.
_mappings: weakref.WeakValueDictionary[tuple[int, bytes, int], _CudaMapping] = (
    weakref.WeakValueDictionary()
)


def _check_size(address: int, nbytes: int) -> None:
    """Raise `PeerUnreachable` if a mapping is smaller than the pool that it should be."""
    from cuda.bindings import driver

    code, *found = driver.cuMemGetAddressRange(address)  # with its base and size
    if int(code):
        log.debug("the size of a peer's GPU memory is not known: %s", code)
    elif int(found[1]) < nbytes:
        raise PeerUnreachable(f"the peer's GPU memory has {int(found[1])} bytes, not {nbytes}")


class _Block:
    """Bytes on a GPU that torch can wrap without copying."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,  # without a stream to wait for
        }


def _tensor(block: _Block) -> torch.Tensor:
    """Return a tensor over a block, which it keeps alive. Raises `Internal`."""
    try:
        index = int(call("cudaPointerGetAttributes", block.address).device)
    except CudaCallError as error:
        raise Internal(f"an address of GPU memory is not known: {error}") from error
    tensor = torch.as_tensor(block, device=torch.device("cuda", index))
    if tensor.data_ptr() != block.address:  # for another device, torch would copy
        raise Internal("torch has copied GPU memory instead of wrapping it")
    return tensor


def memcpy_async(target: int, source: int, nbytes: int, stream: int) -> None:
    """Start a copy between addresses of GPUs on a stream. Raises `Internal`."""
    try:
        call("cudaMemcpyAsync", target, source, nbytes, _device_to_device(), stream)
    except CudaCallError as error:
        raise Internal(f"a copy on the GPU cannot be started: {error}") from error


@cache
def _device_to_device() -> Any:
    return runtime().cudaMemcpyKind.cudaMemcpyDefault  # between two GPUs as well


@cache
def _uuids() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees, by index."""
    uuids = []
    try:
        for index in range(torch.cuda.device_count()):
            properties = call("cudaGetDeviceProperties", index)  # owns what `uuid` points into
            uuids.append(properties.uuid.bytes.hex())
    except CudaCallError as error:
        raise Internal(f"the GPUs cannot be listed: {error}") from error
    return uuids


def _rounded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def _release(name: str, index: int, address: int) -> None:
    """Free or unmap memory. It never raises: it runs when the last reference goes."""
    try:
        with torch.cuda.device(index):
            call("cudaSetDevice", index)
            call(name, address)
    except Exception:
        log.warning("GPU memory could not be released", exc_info=True)
