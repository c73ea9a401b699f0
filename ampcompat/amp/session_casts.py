"""The casts of one session: begun and ended.

A :class:`~ampcompat.amp.scaling.session.Session` says which casts it wants; here torch is told.
"""

from __future__ import annotations

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat.amp.casts import cpu_convolution
from ampcompat.amp.casts.ambience import (
    casting_sessions,
    install_casting,
    live_policies,
    set_ambient,
    uninstall_casting,
)
from ampcompat.amp.casts.contexts import cast_state
from ampcompat.amp.half.devices import device_types_of, model_index
from ampcompat.amp.scaling.session import Session


def begin_casts(session: Session) -> None:
    """Bring the casts of ``session``, if it has any, into force, and ambient casts to the devices of live models."""
    held = device_types_of(model_index.live)
    if model_index.live and not held:  # no live model has any tensor: they compute where their inputs are
        held = {_torch.accelerator(), "cpu"}
    session.device_types = held & set(_torch.autocast_device_types())
    if session.policy.casts.enabled:
        for device_type in held - session.device_types:
            _warn_of_no_autocast(session, device_type)
        install_casting(session.device_types)
        session.has_models = session.policy in live_policies()
        _come_into_force(session)
    elif session.policy.half_dtype is not None and "cpu" in session.device_types:
        cpu_convolution.install()
    # Uninstalling is due if the last O1 model has gone to another level. It clears ``device_types``, so it comes before
    # ``set_ambient``, which sets them.
    _uninstall_if_unused()
    of_init = [other.device_types for other in cast_state.sessions if not other.has_models]
    set_ambient(session.device_types.union(*of_init))


def begin_casts_of_init(session: Session) -> None:
    """Make the casts of ``session``, of ``amp.init``, ambient, and cast functions in the forwards of all models."""
    of_models = device_types_of(model_index.live) & set(_torch.autocast_device_types())
    session.device_types = of_models | {_torch.accelerator()}
    install_casting(session.device_types)
    for model in model_index.live:
        policy = model.__dict__["_amp_policy"]
        if not policy.casts.enabled:  # forwards at other levels cast functions too, into their own half dtype
            session.casting_policies.append(policy)
            policy.casts = policy.casts._replace(enabled=True)
    _come_into_force(session)
    set_ambient(session.device_types)


def _come_into_force(session: Session) -> None:
    """Make ``session`` the latest that casts functions, and forget sessions whose models are gone."""
    cast_state.sessions = [*(other for other in casting_sessions() if other is not session), session]


def _warn_of_no_autocast(session: Session, device_type: str) -> None:
    warn_once(
        f"no autocast on {device_type}",
        f"amp.initialize got opt_level={session.properties.opt_level!r} and a model on the device type"
        f" {device_type!r}, which this torch cannot autocast - no function is cast there, and it trains in"
        " float32 - use opt_level='O2' (O5 for bfloat16), which casts the model.",
    )


def end_casts(session: Session) -> None:
    """Take the casts of ``session`` back (``handle._deactivate()``)."""
    for policy in session.casting_policies:
        policy.casts = policy.casts._replace(enabled=False)
    renew_ambient_casts()


def renew_ambient_casts() -> None:
    """Make the casts of the latest session that still casts ambient; without one, take all patches off torch."""
    _uninstall_if_unused()
    set_ambient(cast_state.device_types)


def _uninstall_if_unused() -> None:
    """Take all patches off torch if no model and no ``amp.init`` casts functions any more."""
    policies = [*live_policies(), *(session.policy for session in casting_sessions())]
    if not any(policy.casts.enabled for policy in policies):
        uninstall_casting()
