"""``help()`` and ``dir()`` of what users call."""

import inspect
import re

import pytest

from ampcompat import amp

FUNCTIONS = sorted(name for name in amp.__all__ if inspect.isfunction(getattr(amp, name)))


def test_dir_lists_the_public_names_and_no_others():
    assert dir(amp) == sorted(amp.__all__)
    assert {"initialize", "scale_loss", "on_step", "state_dict"} <= set(dir(amp))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_says_what_each_argument_is(name):
    function = getattr(amp, name)
    text = inspect.getdoc(function) or ""
    arguments = text.partition("Args:")[2]
    parameters = inspect.signature(function).parameters
    missing = [one for one in parameters if not re.search(rf"^ +\**{one}:", arguments, re.MULTILINE)]
    assert missing == []
    returns = inspect.signature(function).return_annotation
    assert returns in ("None", None) or re.search(r"Returns:|Yields:|[Rr]eturn|Whether", text)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_says_what_apex_had(name):
    assert re.search("apex", inspect.getdoc(getattr(amp, name)) or "")
