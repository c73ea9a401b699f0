"""Which levels and dtypes a comparison runs, and in which environment."""

import pytest

from ampcompat.amp.properties import _DTYPE_NAMES
from ampcompat.tools.dtypes import SPELLINGS
from ampcompat.tools.parity.levels import Level, read_levels


@pytest.mark.parametrize(
    ("levels", "dtypes", "names"),
    [
        ("O1,O0,O2", "fp16,bf16", ["O0", "O1 fp16", "O1 bf16", "O2 fp16", "O2 bf16"]),
        ("O2", "fp16", ["O0", "O2 fp16"]),  # O0 is there if not asked for
        ("O4,O5", "fp16,bf16", ["O0", "O4", "O5"]),  # these have a dtype of their own
        (" O1, O1,", "fp16,float16", ["O0", "O1 fp16"]),
    ],
)
def test_what_is_run(levels, dtypes, names):
    assert [level.name for level in read_levels(levels, dtypes)] == names


def test_environment():
    assert Level("O1", "bfloat16").environment == {"AMPCOMPAT_OPT_LEVEL": "O1", "AMPCOMPAT_DTYPE": "bfloat16"}
    assert Level("O0").environment == {"AMPCOMPAT_OPT_LEVEL": "O0", "AMPCOMPAT_DTYPE": ""}


@pytest.mark.parametrize(
    ("levels", "dtypes", "match"),
    [
        ("01", "fp16", r"'01' is not an opt_level.*Did you mean O1, with the letter O\?"),
        ("O1", "half", "dtype"),
        ("", "fp16", "empty"),
        ("O1", ",", "empty"),
    ],
)
def test_bad_lists_are_refused(levels, dtypes, match):
    with pytest.raises(ValueError, match=match):
        read_levels(levels, dtypes)


def test_the_dtypes_are_those_that_amp_knows():
    assert set(SPELLINGS.values()) <= set(_DTYPE_NAMES)
