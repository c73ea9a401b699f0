"""CUDA devices ``cuda:0`` and ``cuda:1`` on a machine without one: :func:`install`, before the first backward pass.

``emulated_cuda.cpp`` says what they are. Here it is built, on first use, and ``torch.cuda`` is made to see them. A
:class:`Log` tells what the devices did.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
DEVICES = 2


def why_not() -> str | None:
    """Why the devices cannot be emulated here; None where they can."""
    if torch.version.cuda or torch.version.hip:
        return f"torch {torch.__version__} has kernels for CUDA: devices are emulated on its CPU build"
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        return f"torch {torch.__version__}: devices are emulated from torch 2.8 on"
    if compiler() is None:
        return "no C++ compiler: install g++, or name one in $CXX"
    return None


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def built() -> Path:
    """The library, compiled for this torch unless it has been."""
    torch_home = Path(torch.__file__).parent
    options = [
        *("-std=c++20", "-O1", "-w", "-shared", "-fPIC"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    # Not of the folder of torch: the library finds the torch that the process has loaded, wherever that is installed.
    made_of = f"{compiler()} {options} {torch.__version__}".encode() + SOURCE.read_bytes()
    key = hashlib.sha256(made_of).hexdigest()[:16]
    places = [f"-I{torch_home / 'include'}", f"-L{torch_home / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = [compiler(), *options, str(SOURCE), *places]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ampcompat-tests"
    path = cache / f"emulated_cuda-{key}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / path.name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
            made.replace(path)  # at once: other processes may be building it too
    return path


class Device:
    """The library's functions: ``device.capturing()``. They take integers and return one, but for those in RESULTS."""

    RESULTS = {
        "capturing": ctypes.c_bool,
        "stop_log": ctypes.c_char_p,
        "get_stream": ctypes.c_int64,
        "get_bytes_held": ctypes.c_int64,
        "get_bytes_peak": ctypes.c_int64,
    }

    def __getattr__(self, name):
        if not library.cache_info().currsize and name != "set_up":
            raise AttributeError(name)  # pytest asks each name of a module what it has
        function = getattr(library(), name)
        function.restype = self.RESULTS.get(name, ctypes.c_int)

        def call(*arguments):  # torch's compiler asks for a function that it can hash
            return function(*arguments)

        setattr(self, name, call)
        return call


device = Device()


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(built()))


def install() -> None:
    """Put the devices into this process, for good."""
    os.environ["TORCH_DISABLE_ADDR2LINE"] = "1"  # else a C++ error takes seconds, in which it looks its stack up
    # They look at what torch.cuda has when they are imported, and would then look for a real device.
    import torch._dynamo
    import torch._inductor.utils

    device.set_up()
    for name, function in bindings().items():
        setattr(torch._C, name, function)
    torch.version.cuda = "emulated"
    torch.cuda._lazy_init = lambda: None
    torch.cuda._initialized = True
    torch.cuda._exchange_device = torch._C._cuda_exchangeDevice
    torch.cuda._maybe_exchange_device = torch._C._cuda_maybeExchangeDevice
    torch.cuda.default_generators = (torch.default_generator,) * DEVICES  # the devices draw from the CPU's
    torch.cuda.get_device_properties = lambda device=None: Properties()
    for module in (torch.cuda, torch.cuda.streams):
        module.Stream, module.Event = Stream, Event
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = device.capturing
    for module in (torch.cuda, torch.cuda.graphs):
        module.CUDAGraph = CUDAGraph
    torch.cuda.nccl.is_available = lambda tensors: False
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    storages_on_the_device()


def bindings() -> dict:
    """What ``torch._C`` has of CUDA, as far as ``torch.cuda`` and ``DataParallel`` call it."""

    def set_device(index):
        if index >= DEVICES:
            raise RuntimeError("CUDA error: invalid device ordinal")
        if index >= 0:
            device.set_device(index)

    def exchange_device(index):
        before = device.get_device()
        set_device(index)
        return before

    def maybe_exchange_device(index):  # a function of its own: torch's compiler has a handler for each
        return exchange_device(index)

    def set_stream(stream_id, device_index, device_type):
        device.set_device(device_index)
        device.set_stream(device_index, stream_id)

    def synchronize():
        if device.capturing():
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing (synchronize)")
        device.synchronize(device.get_device())

    def memory_stats(index):
        return {"allocated_bytes": {"all": {"current": device.get_bytes_held(), "peak": device.get_bytes_peak()}}}

    def there(tensor, index):
        return tensor.to(torch.device("cuda", index) if index >= 0 else "cpu", non_blocking=index >= 0)

    def scatter(tensor, devices, sizes=None, dim=0, streams=None):
        chunks = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
        return tuple(map(there, chunks, devices))

    cuda = int(torch._C._autograd.DeviceType.CUDA)
    return {
        "_cuda_getDeviceCount": lambda: DEVICES,
        "_cuda_isInBadFork": False,
        "_cuda_getDevice": device.get_device,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": maybe_exchange_device,
        "_cuda_getCurrentStream": lambda index: (device.get_stream(index), index, cuda),
        "_cuda_getDefaultStream": lambda index: (0, index, cuda),
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": synchronize,
        "_cuda_emptyCache": lambda: None,
        "_host_emptyCache": lambda: None,
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": lambda index: device.reset_bytes_peak(),
        "_cuda_set_sync_debug_mode": device.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": device.get_sync_debug_mode,
        "_cuda_isCurrentStreamCapturing": device.capturing,
        "_scatter": scatter,
        "_gather": lambda tensors, dim, index: torch.cat([there(tensor, index) for tensor in tensors], dim),
        "_broadcast": lambda tensor, indices: tuple(there(tensor, index) for index in indices),
        "_broadcast_coalesced": lambda tensors, indices, size=0: [
            [tensor if tensor.device.index == index else there(tensor, index) for tensor in tensors]
            for index in indices
        ],
    }


def storages_on_the_device() -> None:
    """Have ``torch.UntypedStorage(size, device="cuda")`` and its copies made by the device: pickling needs them."""
    make, copy = torch.UntypedStorage.__new__, torch.UntypedStorage.clone

    def empty(cls, *args, device=None, **kwargs):
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, **kwargs) if device is None else make(cls, *args, device=device, **kwargs)
        return torch.empty(*args, dtype=torch.uint8, device=device).untyped_storage()

    def clone(self):
        if self.device.type != "cuda":
            return copy(self)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self).clone().untyped_storage()

    torch.UntypedStorage.__new__ = empty
    torch.UntypedStorage.clone = clone


class Properties:
    name = "emulated"
    major, minor = 8, 0
    total_memory = 2**33
    multi_processor_count = 1


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **kwargs):
        if kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, torch.device("cuda", torch.cuda._utils._get_device_index(device, optional=True)))

    cuda_stream = property(lambda self: self.stream_id)


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    def record(self, stream=None):
        super().record(stream or torch.cuda.current_stream())

    def wait(self, stream=None):
        super().wait(stream or torch.cuda.current_stream())


class CUDAGraph:
    def capture_begin(self, *args, **kwargs):
        self.number = device.begin_capture()

    def capture_end(self):
        device.end_capture()

    def replay(self):
        device.replay(self.number)

    def reset(self):
        pass

    def pool(self):
        return (0, 0)


@contextlib.contextmanager
def late_copies(queries: int):
    """Asynchronous copies to pinned memory hold NaN until their event was asked more than ``queries`` times."""
    device.set_late_queries(queries)
    try:
        yield
    finally:
        device.set_late_queries(-1)


@dataclass
class Entry:
    """One thing that a device did.

    Attributes:
        kind: ``kernel``, ``sync`` (the host waits), ``copy`` (asynchronous, between host and device) or ``mark``.
        name: An op, or what the host waits for.
        device: Its index.
        is_slow: Whether CUDA would take a list of tensors one by one, since they are not alike.
        numels: For each tensor or list of tensors that was given, the number of elements of each tensor.
    """

    kind: str
    name: str
    device: int
    is_slow: bool
    numels: list[list[int]]

    @classmethod
    def of(cls, line: str) -> "Entry":
        kind, name, device, route, numels = line.split("\t")
        lists = [[int(numel) for numel in part.split(",")] for part in numels.split(";") if part]
        return cls(kind, name, int(device), route == "slow", lists)


@dataclass
class Log:
    """What the devices do inside of ``with Log() as log``."""

    entries: list[Entry] = field(default_factory=list, repr=False)

    def __enter__(self):
        device.start_log()
        return self

    def __exit__(self, *error):
        self.entries = list(map(Entry.of, device.stop_log().decode().splitlines()))

    def of(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]

    @property
    def kernels(self) -> int:
        return len(self.of("kernel"))

    @property
    def launches(self) -> int:
        return sum(map(launches, self.of("kernel")))

    @property
    def syncs(self) -> int:
        return len(self.of("sync"))


#: Tensors that one launch of ``multi_tensor_apply`` takes, by the number of lists: a kernel has 4 KB of arguments.
MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
MOST_WITH_SCALARS = {1: 96, 2: 64, 3: 48, 4: 36, 5: 30}
MOST_FUSED = {1: 72, 2: 60, 3: 54, 4: 36, 5: 30}
MOST_BLOCKS = 320
CHUNK = 65536


def launches(entry: Entry) -> int:
    """Launches that CUDA would take for a kernel: one, and for lists of tensors those of ``multi_tensor_apply``."""
    if not entry.name.startswith(("aten::_foreach", "aten::_fused", "aten::_amp_foreach")):
        return 1
    count = max(map(len, entry.numels))
    if entry.is_slow:
        return count
    lists = [numels for numels in entry.numels if len(numels) == count]
    if entry.name.startswith("aten::_fused"):
        depth = max(1, len(lists) - 1)  # the steps ride along
        most = MOST_FUSED.get(depth, 30)
    elif entry.name.endswith("ScalarList"):
        most = MOST_WITH_SCALARS.get(len(lists), 30)
    else:
        most = MOST_TENSORS.get(len(lists), 30)
    launched = tensors = blocks = 0
    for numel in filter(None, lists[0]):
        tensors += 1
        chunks = -(-numel // CHUNK)
        for chunk in range(1, chunks + 1):
            blocks += 1
            is_last = chunk == chunks
            if blocks == MOST_BLOCKS or (tensors == most and is_last):
                launched += 1
                blocks = 0
                tensors = 0 if is_last else 1
    return launched + bool(blocks)
