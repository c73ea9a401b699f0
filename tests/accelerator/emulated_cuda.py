"""CUDA devices ``cuda:0`` and ``cuda:1`` on a machine without one: :func:`install`, once, before the first backward pass.

``emulated_cuda.cpp`` says what they are. Here it is built, on first use, and ``torch.cuda`` is made to see them. A
:class:`Log` tells what the devices did.
"""

import contextlib
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
    command = [
        *(compiler(), "-std=c++20", "-O1", "-w", "-shared", "-fPIC", str(SOURCE)),
        f"-I{torch_home / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-L{torch_home / 'lib'}", f"-Wl,-rpath,{torch_home / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]
    key = hashlib.sha256(f"{command} {torch.__version__}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ampcompat-tests"
    library = cache / f"emulated_cuda-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / library.name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
            made.replace(library)  # at once: other processes may be building it too
    return library


def install() -> None:
    """Put the devices into this process, for good."""
    # They look at what torch.cuda has when they are imported, and would then look for a real device.
    import torch._dynamo
    import torch._inductor.utils

    torch.ops.load_library(str(built()))
    emulated = torch.ops.emulated_cuda
    emulated.set_up()
    for name, function in bindings(emulated).items():
        setattr(torch._C, name, function)
    torch.version.cuda = "emulated"
    torch.cuda._lazy_init = lambda: None
    torch.cuda._initialized = True
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = torch._C._cuda_exchangeDevice
    torch.cuda.default_generators = (torch.default_generator,) * DEVICES  # the devices draw from the CPU's
    torch.cuda.get_device_properties = lambda device=None: Properties()
    for module in (torch.cuda, torch.cuda.streams):
        module.Stream, module.Event = Stream, Event
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = emulated.capturing
    for module in (torch.cuda, torch.cuda.graphs):
        module.CUDAGraph = CUDAGraph
    torch.cuda.nccl.is_available = lambda tensors: False
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    storages_on_the_device()


def bindings(emulated) -> dict:
    """What ``torch._C`` has of CUDA, as far as ``torch.cuda`` and ``DataParallel`` call it."""

    def exchange_device(device):
        before = emulated.get_device()
        if device >= 0:
            emulated.set_device(device)
        return before

    def set_stream(stream_id, device_index, device_type):
        emulated.set_device(device_index)
        emulated.set_stream(device_index, stream_id)

    def memory_stats(device):
        held, peak = emulated.memory()
        return {"allocated_bytes": {"all": {"current": held, "peak": peak}}}

    def there(tensor, device):
        return tensor.to(torch.device("cuda", device), non_blocking=True)

    def scatter(tensor, devices, sizes=None, dim=0, streams=None):
        chunks = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
        return tuple(there(chunk, device) for chunk, device in zip(chunks, devices))

    cuda = int(torch._C._autograd.DeviceType.CUDA)
    return {
        "_cuda_getDeviceCount": lambda: DEVICES,
        "_cuda_isInBadFork": False,
        "_cuda_getDevice": emulated.get_device,
        "_cuda_setDevice": emulated.set_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": exchange_device,
        "_cuda_getCurrentStream": lambda device: (emulated.get_stream(device), device, cuda),
        "_cuda_getDefaultStream": lambda device: (0, device, cuda),
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": lambda: emulated.synchronize(emulated.get_device()),
        "_cuda_emptyCache": lambda: None,
        "_host_emptyCache": lambda: None,
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": lambda device: emulated.reset_peak(),
        "_cuda_set_sync_debug_mode": emulated.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": emulated.get_sync_debug_mode,
        "_cuda_isCurrentStreamCapturing": emulated.capturing,
        "_scatter": scatter,
        "_gather": lambda tensors, dim, device: torch.cat([there(tensor, device) for tensor in tensors], dim),
        "_broadcast": lambda tensor, devices: tuple(there(tensor, device) for device in devices),
        "_broadcast_coalesced": lambda tensors, devices, size=0: [
            [tensor if tensor.device.index == device else there(tensor, device) for tensor in tensors]
            for device in devices
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
        self.number = torch.ops.emulated_cuda.begin_capture()

    def capture_end(self):
        torch.ops.emulated_cuda.end_capture()

    def replay(self):
        torch.ops.emulated_cuda.replay(self.number)

    def reset(self):
        pass

    def pool(self):
        return (0, 0)


@contextlib.contextmanager
def late_copies(queries: int):
    """Asynchronous copies to pinned memory hold NaN until their event was asked more than ``queries`` times."""
    torch.ops.emulated_cuda.set_late_queries(queries)
    try:
        yield
    finally:
        torch.ops.emulated_cuda.set_late_queries(-1)


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

    entries: list[Entry] = field(default_factory=list)

    def __enter__(self):
        torch.ops.emulated_cuda.start_log()
        return self

    def __exit__(self, *error):
        self.entries = list(map(Entry.of, torch.ops.emulated_cuda.stop_log()))

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


#: Tensors that one launch of ``multi_tensor_apply`` takes, by the number of lists: CUDA's kernels have 4 KB of arguments.
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
