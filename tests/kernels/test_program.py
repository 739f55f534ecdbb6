"""Operations of mask programs and their bounds, against Python integers."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest

from transformer_jax.kernels.program import HIGH, LOW, OPERATIONS, Program, combined, number

pytestmark = pytest.mark.usefixtures("quick_compilation")


def wrapped(n: int) -> int:
    return (n + 2**31) % 2**32 - 2**31


def quotient(x: int, y: int) -> int:
    if y == 0:
        return -1  # like XLA
    return wrapped(abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1))


MEANING = {
    "add": lambda x, y: wrapped(x + y),
    "sub": lambda x, y: wrapped(x - y),
    "mul": lambda x, y: wrapped(x * y),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "min": min,
    "max": max,
    **{
        f.__name__: lambda x, y, f=f: int(f(x, y))
        for f in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
    },
    "shift_left": lambda x, y: wrapped(x << y) if 0 <= y < 32 else 0,
    "shift_right_arithmetic": lambda x, y: x >> (y if 0 <= y < 32 else 31),
    "select_n": lambda x, y, z: z if x else y,
    "div": quotient,
    "rem": lambda x, y: x if y == 0 else wrapped(x - y * quotient(x, y)),
}
ENDS = [LOW, LOW + 1, -65537, -33, -7, -2, -1, 0, 1, 2, 3, 5, 8, 31, 33, 46341, HIGH - 1, HIGH]


def program(name: str) -> Program:
    return combined(name, *(Program((), ("k", i)) for i in range(2 + (name == "select_n"))))


@pytest.mark.slow_except("*-100")
@pytest.mark.parametrize("cases", [100, 300])
@pytest.mark.parametrize("name", OPERATIONS)
def test_interval_bounds_contain_all_results(name, cases):
    """Includes results that wrap at the ends of 32 bits; bounds of single integers are exact."""
    rng = np.random.default_rng(list(OPERATIONS).index(name))
    tight = 0
    ranges = [sorted(rng.choice(ENDS, 2).tolist()) for _ in range(3 * cases)]
    ranges[::3] = [[n, n] for n, _ in ranges[::3]]
    for case in range(cases):
        ends_of = ranges[3 * case : 3 * case + 3]
        if case % 3:
            ends_of = [ends_of[i] for i in rng.permutation(3)]
        ends_of = ends_of[: 2 + (name == "select_n")]
        arrays = [tuple(np.full((1, 1, 1, 1), n, np.int32) for n in ends) for ends in ends_of]
        low, high = program(name).bounds(lambda operand: arrays[operand[1]])  # noqa: B023
        assert low.dtype == high.dtype == np.int32
        inside = [{*ends, *rng.integers(ends[0], ends[1] + 1, 3).tolist()} for ends in ends_of]
        inside = [at | {n for n in (-1, 0, 1) if min(at) <= n <= max(at)} for at in inside]
        for values in itertools.product(*inside):
            found = MEANING[name](*values)
            assert low.item() <= found <= high.item(), (ends_of, values)
        tight += low.item() > LOW or high.item() < HIGH
    assert tight > (30 if cases == 300 else 0)


@pytest.mark.parametrize("name", OPERATIONS)
def test_traced_operations_match_python_integers(name):
    few = np.array([n for n in ENDS if name != "select_n" or abs(n) < 9], np.int32)
    values = list(itertools.product(few, repeat=2 + (name == "select_n")))
    columns = [np.array(column) for column in zip(*values, strict=True)]
    program_of_both = combined("eq", program(name), Program((), ("q", 0)))
    results = np.array([MEANING[name](*map(int, value)) for value in values], np.int32)
    assert np.asarray(program_of_both([results], columns)).all()


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_logic_of_vector_and_number_uses_all_bits(name):
    values = np.arange(-9, 9, dtype=np.int32)
    of_six = combined(name, Program((), ("k", 0)), number(6))
    results = np.array([MEANING[name](int(x), 6) for x in values], np.int32)
    assert np.asarray(combined("eq", of_six, Program((), ("q", 0)))([results], [values])).all()


@pytest.mark.slow
def test_redundant_operands_and_duplicate_steps_are_simplified():
    seen = combined("le", Program((), ("k", 0)), Program((), ("q", 0)))
    assert seen & number(1) == number(1) & seen == seen | number(0)
    assert seen | number(1) == number(1)
    assert len((seen & ~seen | seen).steps) == 4  # le, not, and, or
