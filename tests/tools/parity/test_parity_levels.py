import pytest

from ampcompat.amp import properties
from ampcompat.amp.properties import _DTYPE_NAMES
from ampcompat.tools.dtypes import SPELLINGS
from ampcompat.tools.parity.levels import OPT_LEVELS, Level, read_levels


def test_each_level_runs_in_each_dtype():
    """O0 runs once, before the others."""
    names = [level.name for level in read_levels("O1,O0,O2", "fp16,bf16")]
    assert names == ["O0", "O1 fp16", "O1 bf16", "O2 fp16", "O2 bf16"]


def test_float32_is_there_even_if_nobody_asked():
    assert [level.name for level in read_levels("O2", "fp16")] == ["O0", "O2 fp16"]


def test_levels_with_a_dtype_of_their_own_run_once():
    assert [level.name for level in read_levels("O4,O5", "fp16,bf16")] == ["O0", "O4", "O5"]


def test_the_same_thing_twice_runs_once():
    assert len(read_levels(" O1, O1,", "fp16,float16")) == 2


def test_environment():
    assert Level("O1", "bfloat16").environment == {"AMPCOMPAT_OPT_LEVEL": "O1", "AMPCOMPAT_DTYPE": "bfloat16"}
    assert Level("O0").environment == {"AMPCOMPAT_OPT_LEVEL": "O0"}


@pytest.mark.parametrize(
    ("levels", "dtypes", "match"), [("01", "fp16", "'01' is no opt_level"), ("O1", "half", "dtype")]
)
def test_unknown_words_are_named(levels, dtypes, match):
    with pytest.raises(ValueError, match=match):
        read_levels(levels, dtypes)


@pytest.mark.parametrize(("levels", "dtypes"), [("", "fp16"), ("O1", ",")])
def test_empty_lists_are_refused(levels, dtypes):
    with pytest.raises(ValueError, match="empty"):
        read_levels(levels, dtypes)


def test_the_words_are_those_that_amp_knows():
    assert set(OPT_LEVELS) == set(properties.LEVELS)
    assert set(SPELLINGS.values()) <= set(_DTYPE_NAMES)
