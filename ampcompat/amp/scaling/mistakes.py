"""Mistakes that leave no trace in plain torch, and the warning of each, with its fix.

Some are found where they happen; for others, ``misuse.watch.Watch`` looks at the first blocks of a run.
"""

from __future__ import annotations

from ampcompat._log import warn_once

_FIX = "write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`"

_MISTAKES = {
    "unscaled loss in a block": "A scale_loss block whose gradients do not come from the scaled loss - they are divided"
    " by the loss scale at its exit, and were never multiplied by it - call backward() on what the block yields, not on"
    " the loss.",
    "unreduced gradients lost": "A scale_loss block raised in its backward pass while fully_shard kept gradients of"
    " set_requires_gradient_sync(False) - they are in the same tensors as the failed ones, and are cleared with them -"
    " start the accumulation of this step again (D31).",
    "block without gradients": "optimizer.step() after scale_loss blocks that gave this optimizer no gradient - the"
    f" scaled loss must be backpropagated inside the block - {_FIX}.",
    "no block": "optimizer.step() with gradients, but no scale_loss block of this optimizer since its last step -"
    " master weights (O2, O5) have no gradient then and stay as they are; others take a gradient as it is, of a loss"
    f" that was not scaled, or that another optimizer's block has scaled - {_FIX}.",
    "scaled gradients of a later param": "A parameter with a gradient came to an optimizer, and no optimizer under amp"
    " held it just before - what blocks of others have added to that gradient is multiplied by their loss scales, so it"
    " was dropped - call zero_grad() of the model before add_param_group (or amp.initialize of a new optimizer).",
    "scaled gradients of another block": "optimizer.step() with gradients that a scale_loss block of another optimizer"
    " has added to (a generator's loss reaches the discriminator) - what it has added is still multiplied by the loss"
    " scale - step before that block, give the block both optimizers: `with amp.scale_loss(loss, [optimizer_a,"
    " optimizer_b])`, or freeze what the loss is not to train: requires_grad_(False).",
    "unknown optimizer": "{name}.step() with gradients that a scale_loss block has left multiplied by the loss scale -"
    " this optimizer was not given to amp.initialize, and a block unscales the gradients of its own optimizers - give"
    " it to amp.initialize with the others, and to the block: `with amp.scale_loss(loss, [optimizer_a, optimizer_b])`;"
    " or call its zero_grad() before the backward pass of its own loss.",
    "unreduced gradients read": "amp.master_params while gradients of no_sync() wait for the other processes - they are"
    " those of this process alone, so that a clip or a norm is wrong - clip after the block that averages them.",
    "plain gradients dropped": "A scale_loss block with half weights that have gradients already, which no block of"
    " their optimizer gave (of a loss.backward() before it?) - master weights (O2, O5) take gradients of blocks alone,"
    f" so they were dropped, as under apex - {_FIX}, for each loss.",
    "half gradients edited": "Gradients of the model's half parameters changed after scale_loss (clipped, or a second"
    " backward() outside the block?) - the optimizer steps with the float32 gradients of the masters, which did not"
    " change - clip amp.master_params(optimizer) instead of model.parameters(), and give each loss a block of its own,"
    " or add the losses up.",
    "half gradients assigned": "Gradients of the model's half parameters are other tensors than scale_loss has left"
    " (param.grad = saved, or a backward() outside the block after they were cleared?) - the optimizer steps with the"
    " float32 gradients of the masters, and the next block drops those of half parameters - save and restore the"
    " gradients of amp.master_params(optimizer), and give each loss a block of its own.",
    "half weights written in a step": "optimizer.step() itself wrote to the model's half weights - the step ends by"
    " writing the float32 masters to them, and what it wrote is lost - write to the parameters of"
    " optimizer.param_groups, which are the masters; or to the model after step(), or in a hook of"
    " optimizer.register_step_post_hook.",
}


def warn_of(mistake: str, **parts: str) -> None:
    """Warn of ``mistake``, one of the above, the first time; ``parts`` are what its text leaves open."""
    warn_once(mistake, _MISTAKES[mistake].format(**parts))
