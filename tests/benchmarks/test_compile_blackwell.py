"""Read from machine code what a tile of the Blackwell kernels costs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks import compile_blackwell
from benchmarks.compile_blackwell import consumers_work, cycles, shared_cycles, tensor_cycles
from transformer_jax.kernels.blackwell.backward import REGISTERS as BACKWARD_REGISTERS
from transformer_jax.kernels.blackwell.forward import REGISTERS as FORWARD_REGISTERS
from transformer_jax.kernels.contract import Blocks

LOOP = """
.L_x_{0}:
        /*{1:04x}*/                   LDTM.x32 R4, tmem[UR15] ;
        /*{2:04x}*/                   MUFU.EX2 R5, R4 ;
{3}        /*{4:04x}*/                   STTM.x16 tmem[UR15], R52 ;
        /*{5:04x}*/               @P0 BRA `(.L_x_{0}) ;
"""
ADDS = "        /*{:04x}*/                   FADD R5, R5, R4 ;\n"


def listing(*additions):
    """Return machine code of loops one after the other, with so many additions each."""
    text, at = "        /*0000*/                   MOV R1, R2 ;\n", 16
    for number, count in enumerate(additions):
        middle = "".join(ADDS.format(at + 32 + 16 * i) for i in range(count))
        end = at + 32 + 16 * count
        text += LOOP.format(number, at, at + 16, middle, end, end + 16)
        at = end + 32
    return text + f"        /*{at:04x}*/                   EXIT ;\n"


def test_loops_that_store_to_tensor_memory_are_counted_each():
    assert consumers_work(listing(3, 9)) == [(1, 7), (1, 13)]


def test_a_jump_by_a_table_may_go_to_code_that_nothing_else_leads_to():
    jump = "        /*0000*/                   BRX R4 -0xb50 ;\n"
    end = "        /*0ff0*/                   EXIT ;\n"
    bodies = [listing(count).splitlines()[1:-1] for count in (3, 9)]
    other = "\n".join(bodies[1]).replace(".L_x_0", ".L_x_7")
    code = jump + "\n".join(bodies[0]) + "\n" + end + other + "\n" + end
    assert consumers_work(code) == [(1, 7), (1, 13)]


def test_two_loops_of_a_consumer_are_over_full_tiles_and_over_longer_partial_ones():
    found = consumers_work(listing(3, 9, 2, 8))
    assert cycles(found, 2) == [f"{16:5} {7 + 6:5}", f"{16:5} {13 + 12:5}"]
    assert cycles(consumers_work(listing(3, 9)), 2) == [f"{16:5} {14:5}", f"{16:5} {26:5}"]
    with pytest.raises(ValueError, match="4 loops over tiles, not two of each of 1 consumers"):
        cycles(found, 1)


@pytest.mark.parametrize(
    ("kind", "plan", "products"),
    [
        ("forward", Blocks(256, 128), [(256, 128, 64), (256, 96, 128)]),
        ("dq", Blocks(128, 64), [(128, 64, 64), (128, 64, 96), (128, 64, 64)]),
        ("dkdv", Blocks(64, 128), [(128, 64, 64), (128, 64, 96), (128, 96, 64), (128, 64, 64)]),
    ],
)
def test_products_of_a_tile_take_what_their_sizes_say(kind, plan, products):
    expected = sum(2 * m * n * k for m, n, k in products) / 8192
    assert tensor_cycles(kind, plan, 64, 96) == expected


@pytest.mark.parametrize(
    ("kind", "plan", "lying_there", "copied"),
    [  # each factor of a product that lies in shared memory, and what a copy brings
        ("forward", Blocks(256, 128), [(256, 64), *[(128, 64), (128, 96)] * 2], 128),
        ("dq", Blocks(128, 64), [(128, 64), (64, 64), (128, 96), (64, 96), (64, 64)], 64),
        (
            "dkdv",
            Blocks(64, 128),
            [(128, 64), (64, 64), (128, 96), (64, 96), (64, 96), (64, 64)],
            64,
        ),
    ],
)
def test_traffic_of_shared_memory_is_of_factors_and_copies(kind, plan, lying_there, copied):
    numbers = sum(m * n for m, n in lying_there) + copied * (64 + 96)
    assert shared_cycles(kind, plan, 64, 96) == 2 * numbers / 128


@pytest.mark.slow
def test_kernels_compile_for_10_and_spill_nothing():
    """It runs in a process of its own: Mosaic GPU keeps the first capability it compiles for."""
    pytest.importorskip("jax_cuda13_plugin", reason="jax[cuda13] compiles for absent GPUs")
    command = [sys.executable, "-m", "benchmarks.compile_blackwell", "--head-dims", "64"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == [kind for kind in compile_blackwell.KERNELS for _ in (0, 1)]
    assert all(row[5:7] == ["0", "0"] for row in rows)
    for row in rows:  # what is there at launch is all that the warpgroups can ask for
        most, least = FORWARD_REGISTERS[2] if row[0] == "forward" else BACKWARD_REGISTERS
        assert 2 * (most + least) <= 4 * int(row[4]), row
