"""The scripts of the corpus: which are right after the migration, and which are marked."""

import pytest
from corpus import MARKED, RIGHT, RIGHT_MARKED, SCRIPTS, judge, script_names

from ampcompat.tools.migrate import migrate_source

#: Scripts with a mark that a person has to settle.
LEFT = {
    "amp_as_argument", "feature_gradients", "fused_adam_layernorm", "half_dtype_reader", "legacy_handle",
    "lightning_hooks", "partial_init", "stylegan2_train",
}  # fmt: skip


@pytest.mark.parametrize("name", script_names())
def test_marks_stand_where_a_person_is_needed(name):
    result = migrate_source((SCRIPTS / f"{name}.py").read_text(), "native")
    assert bool(result.todos) == (name in LEFT)
    assert migrate_source(result.code, "native").code == result.code


@pytest.mark.slow
@pytest.mark.parametrize("name", script_names())
def test_scripts_train_like_before(name):
    assert judge(name).kind in ((MARKED, RIGHT_MARKED) if name in LEFT else (RIGHT,))
