"""What amp keeps beside one optimizer, as ``optimizer._amp_stash``."""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ampcompat._state import state
from ampcompat._torch import HostCopy
from ampcompat.amp.adoption import adopt_masters
from ampcompat.amp.aside import Aside
from ampcompat.amp.master_index import master_of_value
from ampcompat.amp.masters import Master
from ampcompat.amp.scale_move import Flag
from ampcompat.amp.scaler import LossScaler

if TYPE_CHECKING:
    from ampcompat.amp.session import Session


class Waiting:
    """Scaled gradients that wait in ``param.grad``, and what they are scaled by.

    Args:
        scalers: Scalers whose losses they stem from (a dict, for its order).
        scaler: The last of these.
        scale: Its scale when it scaled them (0-dim float32).
        blocks: What stands for each block that they stem from, the same for every optimizer of that block.
    """

    def __init__(
        self, scalers: dict[LossScaler, None], scaler: LossScaler, scale: torch.Tensor, blocks: frozenset[object]
    ) -> None:
        self.scalers, self.scaler, self.scale, self.blocks = scalers, scaler, scale.clone(), blocks
        self._seen = scale, scale._version

    def fits(self, scaler: LossScaler) -> bool:
        """Whether a loss that ``scaler`` scales now may be added to them. No host sync."""
        scale, version = self._seen
        return scaler is self.scaler and scaler._scale is scale and scale._version == version


class AmpOptimizerState:
    """Masters and gradients of one optimizer between blocks and steps.

    The attributes in the first group carry apex's names; scripts test for them.

    Attributes:
        lazy_init_called: Always True: masters exist from ``initialize`` on.
        already_patched: Whether the next step will be skipped, as far as the host knows.
        session: The ``initialize`` call that the optimizer belongs to.
        overflows: Overflow flags noted since the last step.
        reports: By step that the device decided, on their way to the host: each flag, with the scale then in force.
        skipped: Whether the last step was skipped; None while only the device knows.

    Args:
        optimizer: The optimizer.
        session: The ``initialize`` call that it belongs to now.
        before: Its state under an earlier call.
    """

    def __init__(self, optimizer: Any, session: Session, before: AmpOptimizerState | None = None) -> None:
        self.lazy_init_called = True
        self.already_patched = False
        self.session = session
        self.groups: list[Any] = optimizer.param_groups
        self.overflows: list[Flag] = []
        self.reports: list[list[tuple[LossScaler, HostCopy]]] = []
        self.skipped: bool | None = False
        self.aside: Aside = []  # unscaled gradients of before the block
        self.waiting: Waiting | None = None  # scaled ones that earlier blocks left
        self.delayed_aside: Aside = []  # these, during a block
        self.gradients_are_local = False  # the scaled ones stem from DDP's no_sync
        self.local: list[tuple[torch.Tensor, torch.Tensor | None, int]] = []  # these, with versions, during a block
        self.in_block = False
        self.blocks = self.blocks_with_gradients = 0  # since the last step
        self.stepped = False  # since the last block
        self.began = False  # whether there was a block ever
        self.seen: list[tuple[torch.Tensor, int]] = []
        self.moves = self.param_version = 0  # blocks before which params moved past step; what one of these had then
        self._looked_up: list[list[torch.Tensor]] = []  # the params of each group
        self._masters: list[Master] = []
        self._direct: list[torch.Tensor] = []
        if before is not None:  # the gradients that it knows of are still there
            self.overflows, self.reports, self.skipped = before.overflows[:], before.reports[:], before.skipped
            self.aside, self.waiting = before.aside, before.waiting
            self.gradients_are_local = before.gradients_are_local
            self.blocks, self.blocks_with_gradients = before.blocks, before.blocks_with_gradients
            self.stepped, self.began, self.seen = before.stepped, before.began, before.seen

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether a ``delay_unscale`` block left scaled gradients behind."""
        return self.waiting is not None

    def forget_scaled(self) -> None:
        """There are no scaled gradients any more, nor any that a block has put aside."""
        self.waiting, self.gradients_are_local = None, False
        self.aside, self.delayed_aside, self.local = [], [], []

    @property
    def plain(self) -> bool:
        """Whether a step without closure is the optimizer's own and nothing else: scale one for ever, no masters."""
        pending = self._masters or self.overflows or self.reports or self.waiting or self.skipped
        return not pending and self.session.plain

    def end_step(self, verdict: dict[str, Any]) -> None:
        """A step was made or skipped (``verdict``: from :func:`overflow.decide`): the next one starts anew."""
        vars(self).update({**verdict, "stepped": True, "blocks": 0, "blocks_with_gradients": 0, "seen": []})

    def parts(self, optimizer: Any) -> tuple[list[Master], list[torch.Tensor]]:
        """Masters, and parameters without one, in ``optimizer``; looked up again when its groups changed."""
        groups = optimizer.param_groups
        if len(groups) != len(self._looked_up) or not all(map(_holds, groups, self._looked_up)):
            self.groups = groups
            adopt_masters(optimizer, self.session)
            tensors = list({id(p): p for group in groups for p in group["params"]}.values())
            held = [(p, master_of_value(p)) for p in tensors]
            self._masters = [m for _, m in held if m is not None]
            self._direct = [p for p, m in held if m is None]
            self._looked_up = [list(group["params"]) for group in groups]
        return self._masters, self._direct

    def hand_out_masters(self, optimizer: Any) -> None:
        """Masters are asked for where there is no gradient to clip: to be written (``master params`` of a file)."""
        if self.in_block or self.blocks or self.waiting is not None:
            return
        for master in self.parts(optimizer)[0]:
            if master.moved():
                master.reconcile()
            master.hand_out()

    # -- the same, by apex's names -----------------------------------------------------------------------------------
    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """Half parameters of the model: those with masters, or all half ones where there are no masters."""
        return [m.half for m in self._masters] or [p for p in self._direct if p.dtype != torch.float32]

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """Masters, in the order of :attr:`all_fp16_params`."""
        return [m.value for m in self._masters]

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """Parameters that were float32 all along."""
        return [p for p in self._direct if p.dtype == torch.float32]

    all_fp32_params = all_fp32_from_fp32_params

    def _by_group(self, pick: str) -> list[list[torch.Tensor]]:
        lists = []
        for group in self.groups:
            pairs = [(p, master_of_value(p)) for p in group["params"]]
            if pick == "half":
                lists.append([m.half for _, m in pairs if m is not None])
            elif pick == "master":
                lists.append([p for p, m in pairs if m is not None])
            else:
                lists.append([p for p, m in pairs if m is None and p.dtype == torch.float32])
        return lists

    @property
    def fp16_groups(self) -> list[list[torch.Tensor]]:
        """:attr:`all_fp16_params` by param group."""
        return self._by_group("half")

    @property
    def fp32_from_fp16_groups(self) -> list[list[torch.Tensor]]:
        """:attr:`all_fp32_from_fp16_params` by param group."""
        return self._by_group("master")

    @property
    def fp32_from_fp32_groups(self) -> list[list[torch.Tensor]]:
        """:attr:`all_fp32_from_fp32_params` by param group."""
        return self._by_group("float32")


def _holds(group: dict[str, Any], params: list[torch.Tensor]) -> bool:
    """Whether these are the params in ``group``: one may have been put in the place of another."""
    held = group["params"]
    return len(held) == len(params) and all(map(operator.is_, held, params))


def put_under_amp(optimizer: Any) -> None:
    """Have ``optimizer``, which has its ``_amp_stash``, found by :func:`optimizers_under_amp`."""
    state.room("optimizers", weakref.WeakSet).add(optimizer)


def optimizers_under_amp() -> list[Any]:
    """Every living optimizer that is under amp."""
    return [one for one in state.rooms.get("optimizers", ()) if "_amp_stash" in vars(one)]
