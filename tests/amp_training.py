"""A model under amp and its steps, for tests in which neither is what matters, and what they look into."""

import torch

from ampcompat import amp
from ampcompat._state import state
from ampcompat.amp.casts.contexts import cast_state
from ampcompat.amp.observers import observers
from ampcompat.amp.scaling.session import session_state
from ampcompat.tools.explain.observer import OverflowExplainer


def initialized(model, level, lr=0.1, **options):
    """``model`` and an SGD for it, as ``amp.initialize`` returns them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def make_step(optimizer, loss, **options):
    """Scale ``loss``, go backward, step."""
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()
    optimizer.step()


def reset():
    """Leave torch as amp found it."""
    state.reset()


def is_initialized():
    return session_state.latest is not None


def casts():
    """What the process knows of where casts are on."""
    return cast_state


def explainer():
    """The observer that ``amp.explain_overflows`` has put in place."""
    (found,) = [one for one in observers() if isinstance(one, OverflowExplainer)]
    return found


def last_words():
    """What explain would write if the run ended here: a verdict, and before it what was held back."""
    return explainer().last_words()
