"""`--part` of the tests: a CI run takes one part of the slow tests, and all other tests."""

from collections import Counter
from types import SimpleNamespace

import pytest

from tests import conftest


class Item:
    cls = None

    def __init__(self, name, slow):
        self.nodeid = self.name = self.originalname = name
        self.slow = slow

    def listchain(self):
        return []

    def get_closest_marker(self, name):
        return self if self.slow and name == "slow" else None


def test_each_slow_test_runs_in_exactly_one_part():
    tests = [Item(f"tests/test_a.py::test_b[{i}]", slow=i % 4 != 0) for i in range(400)]
    taken = Counter()
    for which in (1, 2, 3):
        items, gone = list(tests), []
        config = SimpleNamespace(
            args=[], option=SimpleNamespace(part=conftest.part(f"{which}/3")),
            hook=SimpleNamespace(pytest_deselected=lambda items, gone=gone: gone.extend(items)),
        )  # fmt: skip
        conftest.pytest_collection_modifyitems(config, items)
        assert sorted(x.name for x in items + gone) == sorted(x.name for x in tests)
        taken.update(x.name for x in items)
        assert 70 <= sum(x.slow for x in items) <= 130
    assert all(taken[x.name] == (1 if x.slow else 3) for x in tests)


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/3", "1/3/3", ""])
def test_invalid_part_argument_is_rejected(text):
    with pytest.raises(Exception, match=f"part is '{text}': must be I/N with I from 1 to N"):
        conftest.part(text)
