"""Kernels in CUDA C++, for what Triton cannot say.

They are compiled by the library that comes with torch, once for each shape; what comes of it is kept where Triton keeps
its own.
"""

import ctypes
import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

HOPPER = (9, 0)
log = logging.getLogger("bough")
OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17", b"--ftz=true")  # what is next to nothing is nothing
OPTED_IN = (48 << 10) + 1  # bytes of shared memory, from which on the driver is told that a kernel may have so many
OVERLAPPING = 6  # the attribute of a launch that may begin while the one before it ends, as the driver numbers them
NUMBERED, SWIZZLED, PROMOTED = {torch.float32: 7, torch.bfloat16: 9}, 3, 2  # likewise


@cache
def able(device: torch.device) -> bool:
    """Whether the device is of the kind that kernels are written for, and there is what compiles them."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return False
    try:
        _compiler()
    except OSError:
        return False
    return True


def with_defined(files: Sequence[str], defined: Mapping[str, object]) -> str:
    """What is in some files, with these names defined before it, and what C++ has no words for."""
    texts = (Path(__file__).with_name(each).read_text() for each in ("ptx.cuh", *files))
    return "".join((*(f"#define {each} {value}\n" for each, value in defined.items()), *texts))


class Kernel:
    """One of a source, with so many bytes of shared memory."""

    def __init__(self, name: str, source: str, shared: int, device: torch.device) -> None:
        kept = get_cache_manager(hashlib.sha256(f"{torch.version.cuda} {OPTIONS} {source}".encode()).hexdigest())
        if (path := kept.get_file(f"{name}.cubin")) is None:
            path = kept.put(compiled(source), f"{name}.cubin", binary=True)
        index = torch.cuda.current_device() if device.index is None else device.index
        self._shared, self._device = shared, device
        self._function = driver.active.utils.load_binary(name, Path(path).read_bytes(), max(shared, OPTED_IN), index)[1]

    def launch(self, blocks: int, threads: int, told: Sequence[Any], *, overlaps: bool = False) -> None:
        """On the current stream, told its arguments as C has them. It may begin before the launch before it ends, if it
        waits for that itself."""
        launch = _Launch(blocks, 1, 1, threads, 1, 1, self._shared)
        launch.stream, attribute = torch.cuda.current_stream(self._device).cuda_stream, _Attribute(OVERLAPPING, 0, 1)
        launch.attributes, launch.count = ctypes.pointer(attribute), int(overlaps)
        places = (ctypes.c_void_p * len(told))(*map(ctypes.addressof, told))
        expect(cuda().cuLaunchKernelEx(ctypes.byref(launch), ctypes.c_void_p(self._function), places, None))


def kernel(name: str, source: str, shared: int, device: torch.device) -> Kernel | None:
    """The kernel; None where it cannot be made: whoever asks has another way."""
    try:
        return Kernel(name, source, shared, device)
    except (OSError, RuntimeError) as error:
        log.warning("a kernel (%s) is not used, and steps take longer: %s", name, error)
        return None


class _Attribute(ctypes.Structure):
    _fields_ = (("name", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Launch(ctypes.Structure):
    """As the driver takes it: blocks, threads and bytes of shared memory first."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Box(NamedTuple):
    """Of a matrix, or of what has more dimensions: how much is copied at a time, the innermost first."""

    at: int  # its address
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all dimensions but the innermost
    box: tuple[int, ...]


@lru_cache(4096)
def map_of(box: Box, dtype: torch.dtype) -> Any:
    """Where the copying units find it. Lines of 128 bytes are swizzled; past an end there are zeros. None where the
    driver does not take it: whoever asks has another way."""
    room, dims = ctypes.create_string_buffer(128 + 63), len(box.sizes)
    made = (ctypes.c_char * 128).from_buffer(room, -ctypes.addressof(room) % 64)
    sizes, strides = (ctypes.c_uint64 * dims)(*box.sizes), (ctypes.c_uint64 * (dims - 1))(*box.strides)
    boxes, steps = (ctypes.c_uint32 * dims)(*box.box), (ctypes.c_uint32 * dims)(*[1] * dims)
    code = cuda().cuTensorMapEncodeTiled(
        made, NUMBERED[dtype], dims, ctypes.c_void_p(box.at), sizes, strides, boxes, steps, 0, SWIZZLED, PROMOTED, 0
    )
    if code:
        log.warning("a kernel is not used, and steps take longer: the driver takes no copies of %s (%d)", box, code)
        return None
    return made


def compiled(source: str) -> bytes:
    compiler, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    expect(compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None), "compiled")
    try:
        if compiler.nvrtcCompileProgram(program, len(options), options):
            compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            told = ctypes.create_string_buffer(size.value)
            compiler.nvrtcGetProgramLog(program, told)
            raise RuntimeError(f"it could not be compiled: {told.value.decode()}")
        expect(compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)), "compiled")
        code = ctypes.create_string_buffer(size.value)
        expect(compiler.nvrtcGetCUBIN(program, code), "compiled")
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


@cache
def cuda() -> Any:
    """The driver."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> Any:
    """Where the system finds it, or among the packages that torch comes with."""
    name, packages = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}", find_spec("nvidia")
    folders = packages.submodule_search_locations if packages is not None else None
    for place in (name, *(str(found) for folder in folders or () for found in Path(folder).glob(f"*/lib/{name}"))):
        with suppress(OSError):
            return ctypes.CDLL(place)
    raise OSError(f"there is no {name}")


def expect(code: int, done: str = "launched") -> None:
    if code:
        raise RuntimeError(f"a kernel of Bough's could not be {done}: error {code}")
