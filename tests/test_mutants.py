"""Mutations of `python -m tests.mutants` and the stability of their keys."""

import pytest

from tests.mutants.operators import mutants

CHANGES = {
    "a < b": {"(a <= b)"},
    "a + b": {"(a - b)"},
    "a @ b": {"(b @ a)"},
    "-a": {"(a)"},
    "-1": {"(-1 + 1)"},
    "f(2)": {"(3)"},
    "not a": {"(a)"},
    "a and b": {"(a or b)"},
    "True": {"(False)"},
    "f(a, b)": {"(f(b, a))"},
    "f(axis=a)": {"(f())"},
    "f(*a, b)": set(),
    "a if b else a": {"(not b)"},
    "[a for a in b if a]": {"(not a)"},
    "f'{a < b}'": set(),
    "isinstance(a, B | None)": set(),
}


@pytest.mark.parametrize("old", CHANGES)
def test_each_expression_type_has_expected_mutations(old, tmp_path):
    (tmp_path / "x.py").write_text(
        f"def g(a: int, b: 'c < d' = a):\n    return (  # é\n        {old})\n"
    )
    found = mutants(tmp_path, "x.py")
    assert {mutant.new for mutant in found} == CHANGES[old]
    source = (tmp_path / "x.py").read_bytes()
    for mutant in found:
        changed = mutant.text(source).decode()
        assert mutant.new in changed and changed != source.decode()
        compile(changed, "x.py", "exec")
        assert (mutant.where, mutant.line) == ("g", 3)


def test_mutant_keys_do_not_depend_on_other_functions(tmp_path):
    texts = (
        "def f(a):\n    return a + 1\n",
        "import os\n\n\ndef f(a):\n    return a + 1\n\n\nb = f(2) < 3\n",
    )
    keys = []
    for text in texts:
        (tmp_path / "x.py").write_text(text)
        keys.append({mutant.key for mutant in mutants(tmp_path, "x.py") if mutant.where == "f"})
    assert keys[0] == keys[1] and len(keys[0]) == 2
