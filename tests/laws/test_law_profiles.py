"""What the random programs of a run are."""

from law_profiles import NIGHTLY, seeds


def test_the_shares_of_all_commits_are_all_programs(monkeypatch):
    shares = []
    for count in range(1000, 1007):
        monkeypatch.setenv("LAWS_SHARE", f"{count}/7")
        shares += seeds()
    assert sorted(shares) == list(range(NIGHTLY))
