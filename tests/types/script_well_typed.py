"""A user's script as a type checker sees it; never run. mypy and pyright must find nothing here."""

from typing import Any

import torch
from typing_extensions import assert_type

import ampcompat
from ampcompat import amp
from ampcompat.amp.handle import AmpHandle
from ampcompat.contrib.optimizers import FusedSGD
from ampcompat.optimizers import FusedAdam, FusedLAMB
from ampcompat.parallel import LARC
from ampcompat.tools.scale_log import StepHandle, StepRecord


class Net(torch.nn.Module):
    head: torch.nn.Linear


class Other(torch.nn.Module): ...


net, other = Net(), Other()
sgd, adam = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.Adam(other.parameters())

model, optimizer = amp.initialize(net, sgd, opt_level="O2", keep_batchnorm_fp32=True, loss_scale="dynamic")
assert_type(model, Net)
assert_type(optimizer, torch.optim.SGD)
model.head.weight
assert_type(amp.initialize(net, opt_level="O1"), Net)
assert_type(amp.initialize(net, None), Net)
assert_type(amp.initialize(net, sgd, False, "O3", verbosity=0), tuple[Net, torch.optim.SGD])
assert_type(amp.initialize(net, [sgd, sgd]), tuple[Net, list[torch.optim.SGD]])
assert_type(amp.initialize([net, net], [sgd]), tuple[list[Net], list[torch.optim.SGD]])
assert_type(amp.initialize((net, net), sgd, num_losses=2), tuple[tuple[Net, Net], torch.optim.SGD])
assert_type(amp.initialize([net, net]), list[Net])
assert_type(amp.initialize(net, opt_level="O4", patch_torch_functions_type=torch.bfloat16), Net)
assert_type(amp.init(True, "dynamic", False), AmpHandle)
assert_type(amp.init(True, "dynamic", torch.bfloat16, False), AmpHandle)
assert_type(amp.init(patch_type=torch.bfloat16, verbose=True), AmpHandle)
both: tuple[list[torch.nn.Module], list[torch.optim.Optimizer]] = amp.initialize([net, other], [sgd, adam])


def at(level: str) -> None:
    amp.initialize(net, sgd, opt_level=level)


with amp.scale_loss(torch.ones(()), optimizer) as scaled:
    assert_type(scaled, torch.Tensor)
    scaled.backward()  # type: ignore[no-untyped-call, unused-ignore]


def show(record: StepRecord) -> None:
    print(record.step, record.scale * 2.0, record.skipped)


handle = amp.on_step(show)
assert_type(handle, StepHandle)
handle.remove()
assert_type(amp.step_was_skipped(optimizer), bool)

fused = FusedAdam([{"params": net.head.parameters(), "lr": 0.1}, {"params": other.parameters()}], lr=1e-3)
assert_type(amp.initialize(net, fused), tuple[Net, FusedAdam])
assert_type(ampcompat.optimizers.FusedLAMB(net.parameters()), FusedLAMB)
assert_type(FusedSGD(net.parameters(), lr=0.1).param_groups[0]["lr"] * 2.0, Any)
assert_type(ampcompat.parallel.LARC(sgd), LARC)
fused.step(lambda: torch.ones(()))
for op in amp.report().facts()["ops"]:
    print(op["dtype"])
