"""What a precision report counts, against what is known to have run."""

import pytest
import torch
from amp_training import initialized, make_step
from internals import observers, reset
from report_runs import Net, one_step, train
from torch import nn

from ampcompat import _torch, amp
from ampcompat.tools import devices
from ampcompat.tools.report import PrecisionReport


def by_dtype(facts, what, direction):
    """How many ops, or FLOPs, there were in a pass, by dtype."""
    found = {}
    for one in facts["ops"]:
        is_cast = one["op"].startswith("cast from")
        if one["direction"] == direction and one[what] and not is_cast:
            found[one["dtype"]] = found.get(one["dtype"], 0) + one[what]
    return found


def casts(facts):
    found = {}
    for one in facts["ops"]:
        if one["op"].startswith("cast from "):
            pair = one["op"].removeprefix("cast from "), one["dtype"]
            found[pair] = found.get(pair, 0) + one["count"]
    return found


def test_o1():
    model, report = train("O1", bad=[2])
    facts = report.facts()
    assert facts["traced_steps"] == 2
    # forward: 2 products of 2 * rows * in * out FLOPs, twice; backward: both gradients, less the input's of the first
    inner, head = 2 * 8 * 16 * 32, 2 * 8 * 32 * 10
    assert by_dtype(facts, "flops", "forward") == {"float16": 2 * (inner + head)}
    assert by_dtype(facts, "flops", "backward") == {"float16": 2 * (inner + 2 * head)}
    assert facts["half_flops_share"] == 1.0
    ran = {(one["op"], one["direction"], one["dtype"]): one["count"] for one in facts["ops"]}
    assert ran["addmm", "forward", "float16"] == 4
    assert ran["native_layer_norm", "forward", "float32"] == 2
    assert facts["ops"][0]["flops"] == max(one["flops"] for one in facts["ops"])
    assert (facts["steps"], facts["skipped"], facts["loss_scales"]) == (4, 1, {0: 32768.0})


def test_casts_of_one_layer_at_o1():
    facts = one_step(lambda: nn.Linear(8, 5), torch.randn(4, 8), "O1").facts()
    # Input, weight, bias, the gradient of the result; the result, for the loss, and the gradients of the parameters.
    assert casts(facts) == {("float32", "float16"): 4, ("float16", "float32"): 3}
    assert by_dtype(facts, "count", "forward")["float16"] == 1
    assert by_dtype(facts, "count", "backward") == {
        "float16": 2,
        "float32": 2,
    }  # of weight and bias; of scaling and mean


def test_products_in_float32_are_named_by_their_line():
    """The report names products of the forward; the backward pass follows it."""

    class Net32(Net):
        def forward(self, x):
            features = self.norm(torch.relu(self.inner(x)))
            with amp.disable_casts():
                return self.head(features.float())  # in float32

    def outside(y):
        return y @ y.t()  # this one, too

    facts = one_step(Net32, torch.randn(8, 16), "O2", outside, keep_fp32="head").facts()
    head, outer = facts["float32_products"]
    assert head["place"].endswith(": return self.head(features.float())  # in float32")
    assert (head["op"], head["count"], head["flops"]) == ("addmm", 1, 2 * 8 * 32 * 10)
    assert outer["place"].endswith(": return y @ y.t()  # this one, too")


def test_the_float32_products_that_take_most_come_first():
    lines = [f"y = y @ torch.ones({n}, {n + 1})" for n in range(4, 12)]
    scope = {"torch": torch}
    exec(compile("def outside(y):\n    " + "\n    ".join([*lines, "return y"]), "products.py", "exec"), scope)
    facts = one_step(lambda: nn.Linear(4, 4), torch.ones(2, 4), "O2", scope["outside"]).facts()
    assert [one["place"] for one in facts["float32_products"]] == [f"products.py:{n}" for n in range(9, 1, -1)]


def test_at_o1_no_product_of_the_model_is_in_float32():
    assert train("O1")[1].facts()["float32_products"] == []


def test_each_loss_has_a_scale():
    report = amp.report()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, num_losses=2, verbosity=0)
    for loss_id, factor in ((0, 1.0), (1, float("inf"))):
        with amp.scale_loss(model(torch.ones(2, 4)).float().mean() * factor, optimizer, loss_id) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert report.facts()["loss_scales"] == {0: 65536.0, 1: 32768.0}


def test_attention_counts():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    facts = one_step(Attention, torch.randn(2, 4, 8), "O1").facts()
    linear, attention = 2 * 8 * 8 * 24, 2 * 2 * (2 * 4 * 4 * 8)
    assert by_dtype(facts, "flops", "forward") == {"float16": linear + attention}
    assert (
        by_dtype(facts, "flops", "backward")["float16"] >= linear + 2 * attention
    )  # some kernels make the scores again


def test_the_trace_ends_and_steps_are_counted_on():
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    model, report = train("O1", steps=1, traced=1)
    assert _get_current_dispatch_mode() is None
    before = report.facts()["ops"]
    model(torch.ones(8, 16))
    assert report.facts()["ops"] == before
    assert report in observers()
    report.stop()
    assert report not in observers()
    report.stop()


def test_a_mode_of_the_user_is_left_alone():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    report = amp.report(steps=1)
    model = nn.Linear(4, 4)
    model, optimizer = initialized(model, "O1")

    def step():
        make_step(optimizer, model(torch.ones(1, 4)).mean())

    with Mode() as mode:
        step()
        seen = mode.seen
        step()
        assert mode.seen > seen
    step()
    assert report.facts()["steps"] == 3
    report.stop()


def test_bitwise_the_same_run():
    def weights(watched):
        reset()
        torch.manual_seed(0)
        if watched:
            amp.report()
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        for _ in range(5):
            make_step(optimizer, model(torch.randn(8, 16)).pow(2).mean())
            optimizer.zero_grad()
        return [v.clone() for v in model.state_dict().values()]

    for a, b in zip(weights(False), weights(True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fused", [False, True])
def test_every_skip_of_a_long_run_is_counted(fused):
    """Skips that only the device knows of count too, and so do skips at the floor, where the scale stays."""
    report = amp.report(steps=1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    options = {"opt_level": "O1", "verbosity": 0, "min_loss_scale": 2.0**14}
    model, optimizer = amp.initialize(model, optimizer, **options)
    skips = (2, 3, 11, 12, 13)
    for number in range(1, 31):
        optimizer.zero_grad()
        make_step(optimizer, model(torch.ones(1, 4)).float().mean() * (float("inf") if number in skips else 1.0))
    facts = report.facts()
    assert (facts["steps"], facts["skipped"]) == (30, len(skips))


def test_devices_without_fast_half_arithmetic():
    assert "compute capability 6.1: no tensor cores for float16 (7.0 or more" in devices.slow_capability(
        (6, 1), "GTX 1080", torch.float16
    )
    assert devices.slow_capability((7, 0), "V100", torch.float16) == ""
    assert "(8.0 or more" in devices.slow_capability((7, 5), "T4", torch.bfloat16)
    assert devices.slow_capability((9, 0), "H200", torch.bfloat16) == ""


def test_a_cpu_without_half_arithmetic(monkeypatch):
    for half, text in ((frozenset([torch.float16]), "This CPU has no float16 arithmetic"), (frozenset(), "")):
        monkeypatch.setattr(_torch, "halves_without_cpu_convolution", lambda half=half: half)
        assert devices.slow_halves("cpu", torch.float16).startswith(text)
        assert bool(devices.slow_halves("cpu", torch.float16)) == bool(text)


def test_a_script_without_a_step_is_counted():
    report = amp.report()
    model = amp.initialize(nn.Linear(16, 16), opt_level="O1", verbosity=0)
    for _ in range(5):
        model(torch.ones(8, 16))
    facts = report.facts()
    assert facts["traced_steps"] == 0
    assert facts["half_flops_share"] == 1.0
    report.stop()


def test_what_runs_before_initialize_is_not_counted():
    report = amp.report(steps=1)
    model = nn.Linear(8, 8)
    torch.ones(256, 256) @ torch.ones(256, 256)
    model(torch.ones(8, 8))
    model, optimizer = initialized(model, "O2")
    make_step(optimizer, model(torch.ones(8, 8)).mean())
    facts = report.facts()
    assert by_dtype(facts, "flops", "forward") == {"float16": 2 * 8**3}


def test_a_second_initialize_forgets_nothing():
    report = amp.report(steps=1)
    first = amp.initialize(nn.Linear(8, 8), opt_level="O2", verbosity=0)
    first(torch.ones(8, 8))
    amp.initialize(nn.Linear(8, 8), opt_level="O2", verbosity=0)
    assert by_dtype(report.facts(), "flops", "forward") == {"float16": 2 * 8**3}


def test_a_report_begun_after_initialize_counts_at_once():
    model = amp.initialize(nn.Linear(8, 8), opt_level="O2", verbosity=0)
    report = amp.report(steps=1)
    model(torch.ones(8, 8))
    amp.initialize(nn.Linear(8, 8), opt_level="O2", verbosity=0)
    assert by_dtype(report.facts(), "flops", "forward") == {"float16": 2 * 8**3}


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "3"])
def test_a_wrong_number_of_steps_is_refused(steps):
    with pytest.raises(ValueError, match="positive integer"):
        amp.report(steps=steps)
    assert not observers()


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # torch's, of hooks; it says they run twice
def test_compiled_models_run_eagerly_while_traced():
    torch._dynamo.reset()
    report = amp.report(steps=1)
    model = amp.initialize(nn.Sequential(nn.Linear(8, 8)), opt_level="O1", verbosity=0)
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(8, 8))
    assert isinstance(report, PrecisionReport)
    assert report.facts()["half_flops_share"] == 1.0
