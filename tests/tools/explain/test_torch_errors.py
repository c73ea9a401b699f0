"""Errors of torch's own that mixed precision provokes say what cures them, and are the same errors."""

import traceback

import pytest
import torch
import torch.nn.functional as F
from amp_training import initialized
from python_process import run_python
from torch import nn

from ampcompat import amp
from ampcompat.amp.hints import hint_for


def half(*shape):
    return torch.ones(*shape).half()


def wide(*shape):
    return torch.ones(*shape)


INDEX = torch.tensor([0])
MASK = torch.tensor([True, False])
# What each calls, and a word of the cure. All of them raise on torch 2.4 and on 2.13.
PROVOKED = {
    "masked_fill": (lambda: half(2).masked_fill(MASK, -1e9), "torch.finfo(x.dtype).min"),
    "fill_": (lambda: half(2).fill_(1e9), "torch.finfo"),
    "full": (lambda: torch.full((2,), -1e9, dtype=torch.half), "torch.finfo"),
    "clamp": (lambda: half(2).clamp(min=-1e9), "torch.finfo"),
    "pad": (lambda: F.pad(half(2), (1, 1), value=-1e9), "torch.finfo"),
    "matmul": (lambda: half(2, 2) @ wide(2, 2), "x.to(other.dtype)"),
    "matmul bfloat16": (lambda: half(2, 2).bfloat16() @ wide(2, 2), "x.to(other.dtype)"),
    "mv": (lambda: half(2, 2) @ wide(2), "x.to(other.dtype)"),
    "dot": (lambda: half(2).dot(wide(2)), "x.to(other.dtype)"),
    "addmm": (lambda: torch.addmm(wide(2), half(2, 2), half(2, 2)), "x.to(other.dtype)"),
    "linear": (lambda: F.linear(wide(2, 2), half(2, 2)), "x.to(other.dtype)"),
    "linear with bias": (lambda: F.linear(wide(2, 2), half(2, 2), half(2)), "x.to(other.dtype)"),
    "bmm": (lambda: torch.bmm(half(1, 2, 2), wide(1, 2, 2)), "x.to(other.dtype)"),
    "baddbmm": (lambda: torch.baddbmm(wide(1, 2, 2), half(1, 2, 2), half(1, 2, 2)), "x.to(other.dtype)"),
    "bilinear": (lambda: F.bilinear(half(2, 2), half(2, 2), wide(2, 2, 2)), "x.to(other.dtype)"),
    "einsum": (lambda: torch.einsum("ij,jk", half(2, 2), wide(2, 2)), "x.to(other.dtype)"),
    "tensordot": (lambda: torch.tensordot(half(2, 2), wide(2, 2), 1), "x.to(other.dtype)"),
    "conv2d": (lambda: F.conv2d(wide(1, 1, 3, 3), half(1, 1, 2, 2)), "x.to(other.dtype)"),
    "conv2d of half": (lambda: F.conv2d(half(1, 1, 3, 3), wide(1, 1, 2, 2)), "x.to(other.dtype)"),
    "conv2d bias": (lambda: F.conv2d(half(1, 1, 3, 3), half(1, 1, 2, 2), wide(1)), "x.to(other.dtype)"),
    "attention": (lambda: F.scaled_dot_product_attention(half(1, 2, 4), *[wide(1, 2, 4)] * 2), "x.to(other.dtype)"),
    "layer_norm": (lambda: F.layer_norm(wide(2, 4), (4,), half(4), half(4)), "x.to(other.dtype)"),
    "batch_norm": (lambda: F.batch_norm(wide(2, 4), *[half(4)] * 4, True), "x.to(other.dtype)"),
    "lstm": (lambda: nn.LSTM(2, 2).half()(wide(1, 1, 2)), "x.to(other.dtype)"),
    "cell": (lambda: nn.LSTMCell(2, 2).half()(wide(1, 2)), "x.to(other.dtype)"),
    "lerp": (lambda: torch.lerp(wide(2), half(2), 0.5), "x.to(other.dtype)"),
    "prelu": (lambda: F.prelu(wide(2), half(1)), "x.to(other.dtype)"),
    "class weights": (lambda: F.cross_entropy(half(2, 3), INDEX.expand(2), weight=wide(3)), "x.to(other.dtype)"),
    "index_put": (lambda: half(2).__setitem__(INDEX.expand(2), wide(2)), "source.to(target.dtype)"),
    "index_put of half": (lambda: wide(2).__setitem__(INDEX.expand(2), half(2)), "source.to(target.dtype)"),
    "index_copy": (lambda: wide(2).index_copy(0, INDEX, half(1)), "source.to(target.dtype)"),
    "index_add": (lambda: wide(2).index_add(0, INDEX, half(1)), "source.to(target.dtype)"),
    "scatter": (lambda: wide(2).scatter(0, INDEX, half(1)), "source.to(target.dtype)"),
    "scatter_add": (lambda: wide(2).scatter_add(0, INDEX, half(1)), "source.to(target.dtype)"),
    "masked_scatter": (lambda: wide(2).masked_scatter(MASK, half(2)), "source.to(target.dtype)"),
    "put_": (lambda: wide(2).put_(INDEX, half(1)), "source.to(target.dtype)"),
    "out=": (lambda: torch.mm(wide(2, 2), wide(2, 2), out=half(2, 2)), "source.to(target.dtype)"),
    "cdist": (lambda: torch.cdist(half(2, 2), half(2, 2)), "x.float()"),
    "svd": (lambda: torch.linalg.svd(half(2, 2)), "x.float()"),
    "inverse": (lambda: torch.inverse(half(2, 2)), "x.float()"),
    "quantile": (lambda: torch.quantile(half(2), 0.5), "x.float()"),
    "pinv": (lambda: torch.linalg.pinv(half(2, 2)), "x.float()"),
    "lstsq": (lambda: torch.linalg.lstsq(half(2, 2), half(2, 2)), "x.float()"),
    "ctc_loss": (lambda: F.ctc_loss(half(2, 1, 2), INDEX[None] + 1, INDEX + 2, INDEX + 1), "x.float()"),
    "fft": (lambda: torch.fft.fft(half(8)), "x.float()"),
    "numpy": (lambda: half(2).bfloat16().numpy(), "x.float().numpy()"),
    "binary_cross_entropy": (lambda: F.binary_cross_entropy(half(2), wide(2)), "target.float()"),
    "p.grad": (lambda: setattr(half(2).requires_grad_(), "grad", wide(2)), "grad.to(p.dtype)"),
    "multinomial": (lambda: torch.multinomial(wide(2) * float("nan"), 1), "ampcompat run --explain"),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_the_cure_of_each(name):
    provoke, word = PROVOKED[name]
    with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
        provoke()
    assert word in hint_for(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x2 and 3x3)"),
        RuntimeError("expected m1 and m2 to have the same dtype, but got: float != double"),
        RuntimeError("CUDA out of memory."),
        KeyError("Half"),
        ValueError("too many values to unpack (expected 2)"),
    ],
)
def test_other_errors_have_none(error):
    assert hint_for(error) is None


def test_a_long_text_is_read_in_one_pass():
    """Texts of the dispatcher and the compiler have tens of thousands of characters: in quadratic time, an hour."""
    assert hint_for(RuntimeError("a Half word " * 100_000)) is None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qk = nn.Linear(4, 4)

    def forward(self, x):
        scores = self.qk(x)
        return scores.masked_fill(torch.eye(4, dtype=torch.bool), -1e9)  # the user's line


def attending():
    model = nn.Sequential(nn.Linear(4, 4), Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level="O1", verbosity=0)


def shown(error):
    return "".join(traceback.format_exception(error))


def test_an_error_of_a_forward_gets_one_more_line():
    """The error's type and its own text stay."""
    model, _ = attending()
    with pytest.raises(RuntimeError, match="without overflow") as raised:
        model(torch.ones(4, 4))
    assert type(raised.value) is RuntimeError
    last = shown(raised.value).splitlines()[-2:]
    assert last[0].startswith("RuntimeError: value cannot be converted to type")
    assert last[1].startswith("ampcompat: a number beyond float16, which ends at 65504")
    assert last[1].endswith("or keep the module in float32: amp.initialize(..., keep_fp32=['1']).")


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_exceptions_of_the_script_pass_as_they_are(level):
    """Scripts leave forwards by exceptions of their own."""

    class Found(Exception):
        pass

    class Leaving(nn.Linear):
        def forward(self, x):
            raise Found

    model = Leaving(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with pytest.raises(Found):
        model(torch.ones(1, 2))
    with pytest.raises(Found), amp.scale_loss(torch.ones((), requires_grad=True), optimizer):
        raise Found


def test_on_an_older_python_the_line_is_part_of_the_text(monkeypatch):
    class Old:
        version_info = (3, 10)

    monkeypatch.setattr("ampcompat._torch.errors.sys", Old)
    model, _ = attending()
    with pytest.raises(RuntimeError, match="without overflow\nampcompat: a number beyond float16") as raised:
        model(torch.ones(4, 4))
    assert not hasattr(raised.value, "__notes__")


def test_the_cure_cures():
    model = nn.Sequential(nn.Linear(4, 4), Attention())
    model = amp.initialize(model, opt_level="O1", verbosity=0, keep_fp32=["1"])
    assert model(torch.ones(4, 4)).min() == -1e9


def test_an_error_of_the_loss_or_of_the_backward_pass():
    class Wide(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x @ x

        @staticmethod
        def backward(ctx, grad):
            return grad.half() @ ctx.saved_tensors[0].float()

    model = nn.Linear(4, 4)
    model, optimizer = initialized(model, "O2")
    with pytest.raises(RuntimeError) as raised, amp.scale_loss(Wide.apply(model(wide(4, 4))).sum(), optimizer) as loss:
        loss.backward()
    assert shown(raised.value).splitlines()[-1].startswith("ampcompat: half and wider tensors met in one op")


def test_models_within_models_say_it_once():
    inner = amp.initialize(Attention(), opt_level="O1", verbosity=0)
    outer = amp.initialize(nn.Sequential(inner), opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError) as raised:
        outer(torch.ones(4, 4))
    assert shown(raised.value).count("ampcompat: ") == 1


def test_errors_of_the_users_own_stay_as_they_are():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    model = amp.initialize(Broken(), opt_level="O1", verbosity=0)
    with pytest.raises(ValueError, match="not today") as raised:
        model(torch.ones(2))
    assert not getattr(raised.value, "__notes__", [])


@pytest.mark.parametrize("tool", [amp.explain_overflows, amp.report])
def test_no_frame_of_a_tool_is_in_the_traceback(tool):
    tool()
    model, optimizer = attending()
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(4, 4))
    assert "ampcompat/tools/explain" not in shown(raised.value)
    assert "ampcompat/tools/report" not in shown(raised.value)
    assert "# the user's line" in shown(raised.value)


def test_no_frame_of_the_live_probe_is_in_the_traceback():
    amp.explain_overflows()
    model = nn.Linear(4, 4)
    model, optimizer = initialized(model, "O2")
    with amp.scale_loss(model(torch.ones(4, 4)).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()  # from now on, code after the model is watched
    y = model(torch.ones(4, 4))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    with pytest.raises(ValueError, match="batch_size") as raised, amp.scale_loss(y.sum(), optimizer):
        F.cross_entropy(y, INDEX)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert "ampcompat/tools/explain" not in shown(raised.value)
    assert shown(raised.value).count(", in cross_entropy") == 1  # it asks the probe's mode, which calls it again


SCRIPT = """
import torch
from apex import amp
model = torch.nn.Linear(4, 4)
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
def loss(y):
    memory = torch.zeros(4, 4)
    memory[torch.arange(4)] = y.half()
    return memory
class Outer(torch.nn.Module):
    def forward(self, x):
        return loss(model(x))
Outer()(torch.ones(4, 4))
"""


def test_an_error_outside_models_has_its_cure(tmp_path):
    """The script runs under ``run``, and its traceback has no frame of ampcompat."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", "ampcompat", "run", "--explain", "--report=r.txt", "script.py"]
    done = run_python(command, cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("ampcompat: values of one dtype are written into a tensor of another")
    assert lines[-2].startswith("RuntimeError: ")
    assert not [line for line in lines if "/ampcompat/" in line or "eval_frame" in line]
    assert [line.strip() for line in lines if "script.py" in line][-1].endswith("in loss")


def test_a_layer_that_meets_another_dtype_is_not_proposed_to_be_kept():
    """A kept module that is given float32 returns float32, which the next layer does not take either."""

    class Parts(nn.Sequential):
        def forward(self, parts):
            return super().forward(next(parts))  # amp casts no iterator

    model, _ = initialized(Parts(nn.Linear(8, 8), nn.Linear(8, 8)), "O2")
    with pytest.raises(RuntimeError) as raised:
        model(iter([torch.ones(4, 8)]))
    assert "an input that amp did not see" in shown(raised.value)
    assert "keep_fp32" not in shown(raised.value)
