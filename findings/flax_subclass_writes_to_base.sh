#!/usr/bin/env bash
# Defining a subclass of a linen module writes to its base class.
#
# flax 0.12.8, jax 0.10.2, Python 3.11.7; seen on 2026-11-29.
# Expected: a class statement changes only the new class.
# Seen: `class Sub(Base)` replaces `Base.__dataclass_fields__` with a copy that has the same names, and removes the
# keyword-only fields from the original object. A metaclass with `__setattr__` sees a change of Base, and code that
# kept the original object reads a shorter one.
#
# Output seen:
#   written to Base while Sub is defined: ['__dataclass_fields__']
#   the same object: False; the same names: True; the first object has lost ['parent', 'name']
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q jax==0.10.2 flax==0.12.8
cd "$work"
JAX_PLATFORMS=cpu env/bin/python - <<'PY'
from flax import linen as nn

written = []


class Watching(type(nn.Module)):
    def __setattr__(cls, name, value):
        written.append((cls.__name__, name))
        super().__setattr__(name, value)


class Base(nn.Module, metaclass=Watching):
    width: int = 1


fields = Base.__dataclass_fields__
before = list(fields)
written.clear()


class Sub(Base):
    depth: int = 2


names = [name for owner, name in written if owner == "Base"]
same = Base.__dataclass_fields__ is fields
equal = list(Base.__dataclass_fields__) == before
lost = [name for name in before if name not in fields]
print(f"written to Base while Sub is defined: {names}")
print(f"the same object: {same}; the same names: {equal}; the first object has lost {lost}")
assert names == ["__dataclass_fields__"] and not same and equal and lost == ["parent", "name"]
PY
