"""The scripts of the corpus train like before; the others say what they lack."""

import pytest
from corpus import faults, script_names

#: Scripts that use what ``native_amp`` or torch does not have: what says so, when they are migrated or when they run.
LEFT = {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in script_names() if name not in LEFT])
def test_scripts_train_like_before(name, tmp_path):
    assert faults(name, tmp_path) == ([], {})
