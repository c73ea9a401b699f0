"""Functions that torch wrote in Python are cast as a whole, however they were imported."""

import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from o1_casts import casts_on
from seeded import seeded
from torch.nn.functional import interpolate as early_interpolate
from torch.nn.functional import local_response_norm as early_lrn
from torch.nn.functional import normalize as early_normalize

pytestmark = [pytest.mark.device, pytest.mark.torch]

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture
def h():
    return torch.randn(4, 8, generator=seeded(0)).half()


def test_early_imports_are_cast(h):
    x = torch.full((1, 4, 8), 300.0).half()  # its square is beyond the largest half
    with casts_on():
        assert torch.equal(early_lrn(x, 2), F.local_response_norm(x.float(), 2))
        assert early_interpolate(x, 4, mode="area").dtype is FLOAT
        assert early_normalize(h).dtype is FLOAT
    assert early_normalize(h).dtype is HALF


def test_functions_keep_identity_signature_source_and_pickle(h):
    plain = F.normalize, inspect.signature(F.normalize), inspect.getsource(F.normalize), pickle.dumps(F.normalize)
    with casts_on():
        now = F.normalize, inspect.signature(F.normalize), inspect.getsource(F.normalize), pickle.dumps(F.normalize)
        assert now == plain
        with pytest.raises(TypeError, match=r"normalize\(\) got an unexpected keyword argument"):
            F.normalize(h, nonsense=1)
        assert torch.equal(F.normalize(h, dim=0, p=1.0), F.normalize(h.float(), 1.0, 0))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripting_reads_torchs_own_source(h):
    def run(x: torch.Tensor) -> torch.Tensor:
        return F.normalize(F.interpolate(x[None], scale_factor=2.0)[0])

    plain = run(h.float())
    with casts_on():
        assert torch.equal(torch.jit.script(run)(h.float()), plain)


def test_a_traced_module_calls_the_public_function(h):
    class Net(torch.nn.Module):
        def forward(self, x):
            return F.normalize(x)

    with casts_on():
        graph = torch.fx.symbolic_trace(Net())
        assert F.normalize in [node.target for node in graph.graph.nodes]
        assert graph(h).dtype is FLOAT


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_as_eager(h, backend):
    torch._dynamo.reset()

    def run(x):
        return (
            early_normalize(x),
            F.normalize(x, dim=0),
            F.mse_loss(x, x * 2),
            early_interpolate(x[None], 4, mode="area"),
        )

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    plain = compiled(h)
    with casts_on():
        results = [(t.dtype, t.tolist()) for t in compiled(h)]
        assert results == [(t.dtype, t.tolist()) for t in run(h)]
        assert {dtype for dtype, _ in results} == {FLOAT}
    assert [t.dtype for t in compiled(h)] == [t.dtype for t in plain]
    torch._dynamo.reset()


def test_out_is_written_to_whatever_its_dtype(h):
    for dtype in (HALF, FLOAT):
        out = torch.empty(4, 8, dtype=dtype)
        with casts_on():
            assert F.normalize(h, out=out) is out
        assert torch.equal(out, F.normalize(h.float()).to(dtype))


def test_subclasses_with_torch_function_see_the_public_function(h):
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    with casts_on():
        assert F.normalize(h.as_subclass(Watched)).dtype is FLOAT
    assert F.normalize in seen
