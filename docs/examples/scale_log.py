"""Record the loss scale of a training by ``amp.on_step``, and draw it: ``python scale_log.py scale_log.png``.

The scale doubles after a number of backward passes without an overflow, 2000 by default; 40 here, so that a
run of 400 steps shows what a long one does. Needs matplotlib for the picture.
"""

import sys

import torch

from ampcompat import amp

STEPS, GROWTH_INTERVAL = 400, 40


def train():
    """Train a small network at O2, and return the record of each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    amp._amp_state.loss_scalers[0]._scale_seq_len = GROWTH_INTERVAL  # apex's name for it
    records = []
    with amp.on_step(records.append):
        for _ in range(STEPS):
            x = torch.randn(64, 16)
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    return records


def draw(records, path):
    """The scale over the steps, with a cross where a step was skipped."""
    import math

    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained", dpi=120)
    axes = figure.subplots()
    steps = [record.step for record in records]
    axes.step(steps, [math.log2(record.scale) for record in records], where="mid", color="#0072B2", linewidth=1.5)
    skipped = [record for record in records if record.skipped]
    places = [math.log2(record.scale) for record in skipped]
    axes.scatter(
        [record.step for record in skipped], places, marker="x", color="#D55E00", zorder=3, label="skipped step"
    )
    axes.set(xlabel="optimizer step", ylabel="loss scale")
    axes.yaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(color="0.9", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


if __name__ == "__main__":
    found = train()
    skips = [record.step for record in found if record.skipped]
    print(f"{len(found)} steps, {len(skips)} skipped ({', '.join(map(str, skips))}), final scale {found[-1].scale:g}")
    if len(sys.argv) > 1:
        draw(found, sys.argv[1])
