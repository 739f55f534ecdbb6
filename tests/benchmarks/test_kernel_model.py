"""Machine code is read by its loops, and the kernels' own schedule shares out their own tiles."""

import json
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernel_cost, kernel_model, kernel_program, packed_queries, sass
from benchmarks.kernel_cost import Cost, Work
from benchmarks.specs import AttentionCase
from transformer_jax.kernels.hopper import schedule

LISTING = """
ptxas info    : Used 168 registers, used 9 barriers
.text.a_kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   ISETP.GE.AND P0, PT, R0, 0x80, PT ;
        /*0020*/               @P0 BRA `(.L_x_9) ;
.L_x_0:
        /*0030*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0040*/              @!P1 BRA `(.L_x_3) ;
.L_x_1:
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR6], R3 ;
        /*0060*/              @!P2 BRA `(.L_x_7) ;
.L_x_2:
        /*0070*/                   WARPGROUP.ARRIVE ;
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0090*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*00a0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00b0*/                   FMNMX R4, R24, R25, !PT ;
        /*00c0*/                   MUFU.EX2 R24, R24 ;
        /*00d0*/                   BRA.U UP0, `(.L_x_11) ;
        /*00e0*/                   HGMMA.64x32x16.F32.BF16 R88, R152, gdesc[UR8], R88, gsb0 ;
        /*00f0*/                   BRA `(.L_x_12) ;
.L_x_11:
        /*00f8*/                   FMUL R4, R4, R4 ;
        /*0100*/                   FADD R4, R4, R4 ;
        /*0110*/                   HGMMA.64x32x16.F32.BF16 R88, R152, gdesc[UR10], R88, gsb0 ;
.L_x_12:
        /*0120*/               @P4 BRA `(.L_x_1) ;
.L_x_3:
        /*0130*/              @!P5 BRA `(.L_x_5) ;
.L_x_4:
        /*0140*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0150*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0160*/                   ISETP.GE.AND P6, PT, R5, R6, PT ;
        /*0170*/                   FSEL R24, R24, -INF , P6 ;
        /*0180*/                   LDL R7, [R1] ;
        /*0190*/                   HGMMA.64x32x16.F32.BF16 R88, R152, gdesc[UR8], R88, gsb0 ;
        /*01a0*/               @P4 BRA `(.L_x_4) ;
.L_x_5:
        /*01b0*/                   BSSY.RECONVERGENT B0, `(.L_x_6) ;
        /*01c0*/                   STG.E desc[UR4][R2.64], R24 ;
.L_x_6:
        /*01d0*/                   BSYNC.RECONVERGENT B0 ;
        /*01e0*/               @P3 BRA `(.L_x_0) ;
        /*01f0*/                   EXIT ;
.L_x_7:
        /*0200*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR6], R3 ;
        /*0210*/              @!P2 BRA `(.L_x_7) ;
        /*0220*/                   BRA `(.L_x_2) ;
.L_x_9:
        /*0230*/                   UTMALDG.3D [UR4], [UR6], desc[UR8] ;
        /*0240*/               @P1 BRA `(.L_x_9) ;
        /*0250*/                   EXIT ;
.L_x_10:
        /*0260*/                   BRA `(.L_x_10) ;
"""
TILE = Counter({(64, 128, 16): 2, (64, 32, 16): 1})


def opcodes(code):
    return [instruction.opcode for instruction in code]


def test_loops_over_tiles_are_the_innermost_that_multiply():
    kernel = sass.parse(LISTING)
    full, partial = kernel.tile_loops()
    assert opcodes(kernel.blocks[full.header])[0].startswith("SYNCS")
    assert kernel.blocks[partial.header][0].shape == (64, 128, 16)
    [around] = kernel.around(full)
    assert kernel.around(partial) == [around] and kernel.blocks[around.header][0].name == "LDG"


def test_a_repeated_wait_far_below_belongs_to_the_loop_that_waits():
    kernel = sass.parse(LISTING)
    full, _ = kernel.tile_loops()
    waits = [b for b in full.blocks if kernel.blocks[b][0].name == "SYNCS"]
    assert len(waits) == 2 and not any(kernel.blocks[b][0].name == "EXIT" for b in full.blocks)


def test_one_pass_takes_one_of_two_warpgroups_branches():
    kernel = sass.parse(LISTING)
    full, _ = kernel.tile_loops()
    code = kernel.one_pass(full, TILE)
    assert Counter(i.shape for i in code if i.shape) == TILE
    assert "FADD" in opcodes(code)  # the longer branch
    assert opcodes(code).count("SYNCS.PHASECHK.TRANS64.TRYWAIT") == 1  # it succeeds at once


@pytest.mark.parametrize("shape", [(64, 128, 16), (64, 32, 16)])
@pytest.mark.parametrize("difference", [1, -1])
def test_a_loop_that_multiplies_anything_else_than_a_tile_is_an_error(shape, difference):
    kernel = sass.parse(LISTING)
    wanted = TILE + Counter()
    wanted[shape] += difference
    with pytest.raises(ValueError, match="no way through a loop multiplies"):
        kernel.one_pass(kernel.tile_loops()[1], +wanted)


def test_the_full_tiles_loop_has_fewer_comparisons():
    pieces = kernel_cost.pieces_of(sass.parse(LISTING), "dq", TILE, masked=1)
    full, partial, item = (pieces[name] for name in ("full", "partial", "item"))
    assert full.products == partial.products == {"64x32x16": 1, "64x128x16": 2}
    assert full.tensor == 2 * 64 + 16 == full.cycles()["tensor"]
    assert (full.special, full.half, full.local) == (1, 1, 0)
    assert (partial.special, partial.half, partial.local) == (0, 2, 1)
    assert full.synchronising == {"SYNCS": 1, "WARPGROUP": 2}
    right, left = 2 * 16 * (128 + 128 + 32), 2 * 16 * 64 * 2  # operands; one of three in registers
    assert full.shared == partial.shared == right + left
    assert item.instructions == 7 and not item.products  # from LDG to BRA, without tiles


def test_consumers_that_multiply_the_same_shapes_in_code_of_their_own_are_told_apart():
    start, end = LISTING.index(".L_x_0:"), LISTING.index(".L_x_9:")
    other = (
        LISTING[start:end].replace(".L_x_", ".L_y_").replace("0170", "0170*/ FADD R1, R2 ;\n/*0171")
    )
    both = LISTING.replace("@P0 BRA `(.L_x_9)", "@P0 BRA `(.L_y_0)") + other
    one, two = (kernel_cost.pieces_of(sass.parse(both), "dq", TILE, 1, i) for i in (0, 1))
    assert one == kernel_cost.pieces_of(sass.parse(LISTING), "dq", TILE, masked=1)
    assert two["full"] == one["full"]
    assert two["partial"].instructions == one["partial"].instructions + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "H", "tensor", "barriers"),
    [
        ("dq", 128, 1536, 0),
        ("dkdv", 128, 2048, 0),
        ("dkdv", 256, 2048, 0),
        ("single_pass", 128, 2560, 2),
    ],
)
def test_what_a_tile_of_the_backward_pass_takes(kind, H, tensor, barriers):
    """Compiled for an H200 that is not there."""
    pytest.importorskip("jax_cuda13_plugin", reason="jax[cuda13] compiles for absent GPUs")
    cost = kernel_cost.cost_of(kind, H, "causal", kernel_cost.h200.device())
    assert cost.spills == (0, 0)
    for piece in ("full", "partial"):
        assert cost.bounds()[piece].cycles["tensor"] == tensor
        assert {w.synchronising.get("BAR", 0) for w in cost.pieces[piece]} == {barriers}


def test_a_kernel_without_a_mask_where_one_is_expected_is_an_error():
    with pytest.raises(ValueError, match="no loop has 64 more"):
        kernel_cost.pieces_of(sass.parse(LISTING), "dq", TILE, masked=64)


def test_a_listing_without_machine_code_is_an_error():
    with pytest.raises(ValueError, match="nvdisasm"):
        sass.parse("ptxas info    : Used 168 registers")


def test_a_bound_is_the_busiest_unit_or_products_and_the_busiest_other_one():
    works = [
        Work({}, 100.0, 60, 11, 20, 0, 0, {}),
        Work({}, 40.0, 90, 1, 0, 0, 0, {}),
    ]
    bound = kernel_cost.Bound.of(works)
    wanted = {"tensor": 140.0, "shared": 0, "special": 96, "half": 40, "issue": 150}
    assert bound.cycles == wanted
    assert (bound.overlapped, bound.unit) == (150, "issue")
    assert bound.serial == 100 + 88 + 40 + 90
    assert kernel_cost.Bound.of(works, copied=128 * 200).serial == 200 + 88 + 90


@pytest.mark.parametrize("items", [7, schedule.PROGRAMS, 3 * schedule.PROGRAMS + 5])
def test_items_are_dealt_back_and_forth_and_each_once(items):
    order = np.random.default_rng(0).permutation(items).astype(np.int32)
    found = kernel_model.share_out(jnp.asarray(order), jnp.eye(items, dtype=jnp.int32))
    programs = min(items, schedule.PROGRAMS)
    wanted = np.zeros((programs, items), np.int32)
    for turn, start in enumerate(range(0, items, programs)):
        seats = range(programs) if turn % 2 == 0 else range(programs - 1, -1, -1)
        for i, seat in enumerate(seats):
            if start + i < items:
                wanted[seat, order[start + i]] = 1
    assert (found == wanted).all() and found.sum() == items


def case_of(**rest):
    shape = dict(batch=2, queries=1024, keys=1024, heads=6, kv_heads=3, head_dim=64, value_dim=64)
    return AttentionCase(name="a case", **shape, **rest)


@pytest.mark.parametrize("kind", kernel_cost.KINDS)
def test_pieces_of_all_items_are_all_tiles(kind):
    case = case_of(causal=True, documents=5)
    lists = kernel_model.lists_of(case, kind, {"q": 128, "k": 64})
    item, head, full, partial = kernel_model.pieces_by_item(case, kind, lists).sum(axis=0)
    by_key = kind in ("dkdv", "single_pass")
    assert item == 2 * (3 * 16 if by_key else 6 * 8)
    assert head == (2 * 6 * 16 if by_key else 0)
    first = 2 * 6 * 8 if kind == "forward" else 0
    seen = np.broadcast_to(np.asarray(lists.seen), (2, 6, lists.seen.shape[-1]))
    assert full > 0 and full + partial == seen.sum() - first


@pytest.mark.parametrize("kind", kernel_cost.KINDS)
def test_with_products_alone_the_share_is_coverage_times_balance(kind):
    case = case_of(causal=True)
    wanted = kernel_cost.product(128, 64) + kernel_cost.product(64, 128)
    tile = Work({}, sum(n * w / 2 for (_, w, _), n in wanted.items()), 0, 0, 0, 0, 0, {})
    nothing = Work({}, 0.0, 0, 0, 0, 0, 0, {})
    by_key = kind in ("dkdv", "single_pass")
    pieces = {"item": [tile if kind == "forward" else nothing] * 2, "full": [tile] * 2}
    pieces |= {"partial": [tile] * 2} | ({"head": [nothing] * 2} if by_key else {})
    blocks = {"q": 128, "k": 128, "stages": 2}
    cost = Cost(kind, 64, "causal", blocks, 168, (0, 0), pieces)
    found = kernel_model.predict(case, cost)
    share = kernel_model.share(case, "forward", found["overlapped"])
    programs = min(found["items"], kernel_model.PROCESSORS)
    expected = found["coverage"] * found["overlapped_balance"] * programs / kernel_model.PROCESSORS
    assert 0 < share < 1 and share == pytest.approx(expected)
    assert found["overlapped"] == found["serial"]


PROGRAM = """HloModule jit_f, is_scheduled=true

%fused_copy (p: bf16[2,3]) -> bf16[3,2] {
  %p = bf16[2,3]{1,0} parameter(0)
  ROOT %transpose.1 = bf16[3,2]{1,0} transpose(%p), dimensions={1,0}
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%again (state: (pred[], bf16[2,3])) -> (pred[], bf16[2,3]) {
  %state = (pred[], bf16[2,3]{1,0}) parameter(0)
  %x = bf16[2,3]{1,0} get-tuple-element(%state), index=1
  %kernel.2 = bf16[2,3]{1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2"
  ROOT %tuple = (pred[], bf16[2,3]{1,0}) tuple(%x, %kernel.2)
}

%whether (state: (pred[], bf16[2,3])) -> pred[] {
  %state = (pred[], bf16[2,3]{1,0}) parameter(0)
  ROOT %flag = pred[] get-tuple-element(%state), index=0
}

ENTRY %main (x: bf16[2,3]) -> bf16[3,2] {
  %x = bf16[2,3]{1,0} parameter(0)
  %k = (bf16[2,3]{1,0}, /*index=1*/f32[2]{0}) custom-call(%x), custom_call_target="mosaic_gpu_v2"
  %y = bf16[2,3]{1,0} get-tuple-element(%k), index=0
  %all = f32[] all-reduce(%y), to_apply=%add
  %loop = (pred[], bf16[2,3]{1,0}) while(%t), condition=%whether, body=%again
  %z = bf16[2,3]{1,0} get-tuple-element(%loop), index=1
  ROOT %copy_fusion = bf16[3,2]{1,0} fusion(%z), kind=kLoop, calls=%fused_copy
}
"""


def test_kernels_of_a_program_are_counted_where_they_run():
    assert kernel_program.count(PROGRAM) == {
        "always": {"all-reduce": 1, "fusion with transpose": 1, "mosaic": 1, "while": 1},
        "nested": {"mosaic": 1},
    }


def test_what_is_written_can_be_read_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_model, "CELLS", (("causal-16k-h128-s2048", "causal"),))
    work = Work({"64x128x16": 16}, 1024.0, 581, 66, 109, 1 << 16, 0, {"SYNCS": 6})
    pieces = {"item": [work] * 2, "full": [work] * 2, "partial": [work] * 2}
    blocks = {"q": 128, "k": 128, "stages": 2}
    costs = [Cost("forward", 128, "causal", blocks, 168, (0, 0), pieces)]
    written = kernel_model.record(costs, [], {})
    file = tmp_path / "costs.json"
    file.write_text(kernel_model.lines_of({"versions": {"jax": "0.11.2"}} | written))
    assert kernel_cost.read(file.read_text()) == costs
    assert kernel_model.main(["--read", str(file), "--out", str(tmp_path / "again.json")]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["kernels"] == json.loads(file.read_text())["kernels"]
    assert [row["case"] for row in again["cells"]] == ["causal-16k-h128-s2048"]
    assert "causal-16k-h128-s2048" in (tmp_path / "again.txt").read_text()


def test_a_file_has_a_line_for_each_row():
    results = {"versions": {"jax": "0.11.2"}, "cells": [{"case": "a"}, {"case": "b"}], "goals": {}}
    text = kernel_model.lines_of(results)
    assert json.loads(text) == results and '\n{"case": "b"}\n' in text


@pytest.mark.parametrize("kind", kernel_cost.KINDS)
def test_packed_queries_have_the_tiles_that_hold_them(kind):
    """Four heads of 16 queries are 64 rows, which one tile holds, of 128 or of 64."""
    costs = kernel_cost.read(packed_queries.COUNTED.read_text())
    [cost] = [c for c in costs if (c.kind, c.H, c.scores) == (kind, 128, "causal")]
    case = packed_queries.case_of(32)
    apart, packed = (packed_queries.cycles(case, cost, packs) for packs in (False, True))
    columns = 8192 // cost.blocks["k"]
    assert (apart["tiles"], packed["tiles"]) == (8 * 32 * columns, 8 * 8 * columns)
    for bound in ("overlapped", "serial"):
        assert packed[bound] < 0.51 * apart[bound]
