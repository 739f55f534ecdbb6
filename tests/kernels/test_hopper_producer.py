"""The copy order of the producer of the Hopper kernels, whose code runs in Python here."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.kernels.contract import Blocks, Operands, TileLists
from transformer_jax.kernels.hopper import producer

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Part:
    """Fake part of memory or of barriers; `[...]` reads the values of a list."""

    def __init__(self, whole, index):
        self.whole, self.index = whole, index if isinstance(index, tuple) else (index,)

    def __getitem__(self, _):
        return jnp.int32(self.whole.values[tuple(int(i) for i in self.index)])


class Memory:
    """Fake reference, whose `at` returns parts."""

    def __init__(self, name, shape, values=None):
        self.name, self.shape, self.values = name, shape, values

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        return Part(self, index)


def record(monkeypatch):
    """Return the list that records the producer's actions, in order."""
    events = []

    def copy(source, slot, full):
        if source.whole.name:
            tile = int(source.index[1].start) // 64
            events.append(f"{source.whole.name}{tile}")

    def wait(barrier):
        part = isinstance(barrier, Part)
        name = f"{barrier.whole.name}{int(barrier.index[0])}" if part else barrier.name
        events.append(f"{name} free")

    def arrive(barrier):
        events.append(f"at {barrier.name}")

    def loop(first, end, body, carry):
        for i in range(int(first), int(end)):
            carry = body(jnp.int32(i), carry)
        return carry

    actions = dict(barrier_wait=wait, barrier_arrive=arrive, copy_gmem_to_smem=copy)
    monkeypatch.setattr(producer, "plgpu", SimpleNamespace(**actions))
    when = lambda condition: lambda body: body() if condition else None  # noqa: E731
    monkeypatch.setattr(producer, "pl", SimpleNamespace(when=when, ds=slice))
    monkeypatch.setattr(producer, "lax", SimpleNamespace(fori_loop=loop))
    monkeypatch.setattr(
        producer, "each_item", lambda items, body, carry: loop(0, items, body, carry)
    )
    return events


def tile_lists(lists):
    """Return tile lists in fake memory, in the same order."""
    rows, columns = len(lists), max(map(len, lists))

    def of_rows(values):
        values = np.array(values)[None, None]
        return Memory("", values.shape, values)

    order = of_rows([(*tiles, *[0] * (columns - len(tiles))) for tiles in lists])
    seen = of_rows([len(tiles) for tiles in lists])
    return TileLists(order, seen, seen, rows=of_rows(np.arange(rows)))


def copies(monkeypatch, lists, stages, backward):
    """Return the slots that a program waits for and the tiles that it copies, in order."""
    events, tiles = record(monkeypatch), tile_lists(lists)
    query, key, value = (Memory(x, (1, 64 * len(lists), 1, 64)) for x in ("Q", "K", "V"))
    barriers = {f"{x}_{y}": Memory(x, ()) for x in "qkv" for y in ("full", "empty")}
    one, ring = Memory("", (1, 64, 64)), Memory("", (stages, 64, 64))
    walk = producer.QueryWalk(one, ring, ring, **barriers, do_tile=one)
    vectors = SimpleNamespace(copy=lambda *_: None)
    do = Memory("dO", query.shape) if backward else None
    walk.produce(Blocks(64, 64, stages), tiles, Operands(query, key, value), vectors, do)
    return events


@pytest.mark.slow
def test_first_key_copy_does_not_wait_for_query_slot(monkeypatch):
    found = copies(monkeypatch, [(0, 2), (1,), (), (2,)], 2, backward=False)
    assert found == [
        *("K0", "Q0", "K2", "V0", "V2"),
        *("k0 free", "K1", "q0 free", "Q1", "v0 free", "V1"),
        *("q0 free", "Q2"),
        *("k1 free", "K2", "q0 free", "Q3", "v1 free", "V2"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_backward_pass_copies_keys_after_value_slots_are_freed(stages, monkeypatch):
    found = copies(monkeypatch, [(0, 2), (1,)], stages, backward=True)
    found = [event for event in found if "free" not in event]
    assert found == ["K0", "Q0", "dO0", "V0", "K2", "V2", "K1", "Q1", "dO1", "V1"]


@pytest.mark.slow
def test_tiles_finish_in_order_before_waiting_for_next_keys(monkeypatch):
    """Two query heads read a key head, and one item has fewer tiles than slots."""
    lists, stages = [(0, 2), (1,), (), (2,)], 3
    events, tiles = record(monkeypatch), tile_lists(lists)
    query, do = (Memory(x, (1, 64 * len(lists), 2, 64)) for x in ("Q", ""))
    key, value = (Memory(x, (1, 64 * len(lists), 1, 64)) for x in ("K", "V"))
    names = ("k_full", "k_empty", "q_full", "q_empty", "both")
    barriers = {name: Memory(name.partition("_")[0], ()) for name in names}
    one, ring, vector = Memory("", (1, 64, 64)), Memory("", (stages, 64, 64)), Memory("", ())
    walk = producer.KeyWalk(one, one, ring, ring, ring, ring, **barriers)

    def after(b, n, q0):
        events.append(f"done {int(n)}:{int(q0) // 64}")

    walk.produce(
        Blocks(64, 64, stages), tiles, Operands(query, key, value),
        SimpleNamespace(copy=lambda *_: None), do, vector, vector, together=True, after=after,
    )  # fmt: skip
    assert events == [
        *("K0", "V0", "at both", "Q0", "Q2", "Q0", "q0 free", "Q2", "done 0:0"),
        *("done 0:2", "done 1:0", "done 1:2"),
        *("k free", "K1", "V1", "at both", "q1 free", "Q1", "q2 free", "Q1"),
        *("done 0:1", "done 1:1"),
        *("k free", "K2", "V2", "at both"),
        *("k free", "K3", "V3", "at both", "q0 free", "Q2", "q1 free", "Q2"),
        *("done 0:2", "done 1:2"),
    ]
