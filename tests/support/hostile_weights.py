"""Malicious weight files, written by hand or mutated, and the cost of reading them.

As a script, the module opens all of them one by one and prints the cost of each.
"""

import ctypes
import io
import json
import os
import pickle
import struct
import sys
import time
import zipfile
from pathlib import Path

import numpy as np

from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.pretrained.safetensors_folder import SINGLE, open_folder

SIZES = {"F32": 4, "BF16": 2, "U8": 1, "I64": 8, "BOOL": 1}


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with any header and any stated header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: object = "F32", shape: object = (2,), begin: object = 0, end: object = 8) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def text(name: str, **parts: str) -> bytes:
    """Return a header entry that json.dumps cannot write."""
    parts = {"dtype": '"F32"', "shape": "[2]", "data_offsets": "[0,8]"} | parts
    return f'"{name}":{{{",".join(f"{k!s}:{v}" for k, v in _quoted(parts))}}}'.encode()


def _quoted(parts: dict[str, str]) -> list[tuple[str, str]]:
    return [(json.dumps(key), value) for key, value in parts.items()]


def zipped(name: str, content: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return stream.getvalue()


EIGHT = bytes(range(8))
GOOD = raw({"a": entry()}, EIGHT)
TOO_LARGE = r"header has \d+ bytes"
NO = "not a safetensors file"

FILES: dict[str, tuple[bytes, str]] = {
    # content, and the last part of the error
    "empty": (b"", NO),
    "seven bytes": (b"\0" * 7, NO),
    "length alone": (struct.pack("<Q", 2), NO),
    "zeros": (b"\0" * 4096, NO),
    "ones": (b"\xff" * 4096, NO),
    "length 2^63": (raw(b"{}", length=2**63), TOO_LARGE),
    "length 2^64-1": (raw(b"{}", length=2**64 - 1), TOO_LARGE),
    "length one more": (raw(b"{}", length=3), TOO_LARGE),
    "length of the format's cap": (raw(b"{}", length=10**8), TOO_LARGE),
    "header cut short": (GOOD[:40], TOO_LARGE),
    "data cut short": (GOOD[:-1], "'a': ends at byte 8, but the file has 7 bytes"),
    "no data": (GOOD[:-8], "'a': ends at byte 8, but the file has 0 bytes"),
    "not UTF-8": (raw(b'{"\xff\xfe":1}'), "header is not JSON"),
    "UTF-16": (raw("{}".encode("utf-16-le")), "header is not JSON"),
    "not JSON": (raw(b"{'a': 1}"), "header is not JSON"),
    "two objects": (raw(b"{}{}"), "header is not JSON"),
    "a list": (raw([]), NO),
    "space before": (raw(b" {}"), NO),
    "nested lists": (raw(b'{"a":' + b"[" * 100_000), "nested more than 64 levels deep"),
    "nested objects": (raw(b'{"a":' * 100_000), "nested more than 64 levels deep"),
    "many values": (raw(b'{"a":[' + b"0," * 2**20 + b"0]}"), "more than 1048576 values"),
    "many commas": (raw(b'{"a":[' + b'"",,' * 2**20), "more than 1048576 values"),
    "name twice": (raw(b"{" + text("a") + b"," + text("a") + b"}", EIGHT), "'a' appears twice"),
    "name twice, spelled apart": (raw(b"{" + text("a") + b"," + text("\\u0061") + b"}", EIGHT),
        "'a' appears twice"),
    "field twice": (raw(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        EIGHT), "'dtype' appears twice"),
    "NaN": (raw(b"{" + text("a", shape="[NaN]") + b"}", EIGHT), "'NaN' is not a finite number"),
    "1e999": (raw(b"{" + text("a", shape="[1e999]") + b"}", EIGHT), "'1e999' is not a finite"),
    "overlap": (raw({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)), "tensor `b`"),
    "same bytes": (raw({"a": entry(), "b": entry()}, EIGHT), "tensor `[ab]`"),
    "hole": (raw({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20)), "tensor `b`"),
    "hole at the start": (raw({"a": entry(begin=4, end=12)}, bytes(12)), "tensor `a`"),
    "trailing bytes": (GOOD + b"\0", "header"),
    "trailing zip": (GOOD + zipped("x", b"x"), "header"),
    "no data at all": (raw({"a": entry(end=0, shape=[0]), "b": entry()}), "'b': ends at"),
    "2^32 by 2^32": (raw({"a": entry(shape=[2**32, 2**32])}, EIGHT), "'a': float32"),
    "2^32 by 2^32 and 0": (raw({"a": entry(shape=[2**32, 2**32], end=0)}), "'a': float32"),
    "2^62 bytes": (raw({"a": entry("U8", [2**62], 0, 2**62)}, EIGHT), "'a': ends at"),
    "end before begin": (raw({"a": entry(begin=8, end=0)}, EIGHT), "'a': float32"),
    "offsets of 2^64": (raw({"a": entry(begin=2**64, end=2**64 + 8)}, EIGHT), "'a': ends"),
    "negative size": (raw({"a": entry(shape=[-1, -2])}, EIGHT), "'a': shape"),
    "negative offsets": (raw({"a": entry(begin=-8, end=0)}, EIGHT), "'a': shape"),
    "float size": (raw({"a": entry(shape=[2.0])}, EIGHT), "'a': shape"),
    "true for a size": (raw({"a": entry(shape=[True, 2])}, EIGHT), "'a': shape"),
    "string size": (raw({"a": entry(shape=["2"])}, EIGHT), "'a': shape"),
    "shape no list": (raw({"a": entry(shape="2")}, EIGHT), "'a': shape"),
    "33 sizes": (raw({"a": entry(shape=[1] * 32 + [2])}, EIGHT), "'a': shape"),
    "sizes of many digits": (raw({"a": entry(shape=[10**4000] * 32)}, EIGHT), "'a': float32"),
    "more digits than are read": (raw(b"{" + text("a", shape="[" + "9" * 9999 + "]") + b"}", EIGHT),
        "header is not JSON"),
    "wrong size": (raw({"a": entry(shape=[3])}, EIGHT), "'a': float32"),
    "unknown dtype": (raw({"a": entry("F128")}, EIGHT), "'a': dtype 'F128'"),
    "dtype of eight bits": (raw({"a": entry("F8_E4M3", [8])}, EIGHT), "'a': dtype 'F8_E4M3'"),
    "dtype of four bits": (raw({"a": entry("F4", [16])}, EIGHT), "'a': dtype 'F4'"),
    "dtype of a machine": (raw({"a": entry("<f4")}, EIGHT), "'a': dtype '<f4'"),
    "dtype a list": (raw({"a": entry(["F32"])}, EIGHT), "'a': must have a dtype"),
    "long dtype": (raw({"a": entry("F" * 10**6)}, EIGHT), "'a': dtype 'FFF"),
    "no dtype": (raw({"a": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT), "'a': must have"),
    "three offsets": (raw({"a": entry() | {"data_offsets": [0, 4, 8]}}, EIGHT), "'a': must have"),
    "entry a number": (raw({"a": 1}), "'a': must have"),
    "entry null": (raw({"a": None}), "'a': must have"),
    "metadata a list": (raw({"__metadata__": [], "a": entry()}, EIGHT), "header"),
    "metadata of numbers": (raw({"__metadata__": {"x": 1}, "a": entry()}, EIGHT), "header"),
    "half a surrogate": (raw(b"{" + text("\\ud800") + b"}", EIGHT), "header"),
    "control characters": (raw({"a\x1b[2J\n": entry("?")}, EIGHT), r"'a\\x1b\[2J\\n': dtype"),
}  # fmt: skip


class Touch:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def payloads(canary: Path) -> dict[str, bytes]:
    """Return files that other loaders execute, unpack or evaluate."""
    code = pickle.dumps(Touch(canary))
    arrays = io.BytesIO()
    np.savez(arrays, a=np.array([Touch(canary)], object))
    return {
        "pickle": code,
        "old torch": pickle.dumps(0x1950A86A20F9469CFC6C) + pickle.dumps(1001) + code,
        "torch": zipped("archive/data.pkl", code),
        "npz": arrays.getvalue(),
        "zip bomb": zipped("0", bytes(10**7)),
        "python": f"import os\nos.mkdir({str(canary)!r})\n".encode(),
        "yaml": f"!!python/object/apply:os.mkdir ['{canary}']\n".encode(),
    }


def lay(folder: Path, content: bytes, config: bytes = b"{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(config)
    (folder / SINGLE).write_bytes(content)
    return folder


def mutated(rng: np.random.Generator, content: bytes) -> bytes:
    """Apply up to three mutations: a bit, a byte, a digit or bracket, a removed or doubled part."""
    found = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        at, kind = int(rng.integers(len(found))), rng.integers(7)
        piece = int(rng.integers(1, 20))
        if kind == 0:
            found[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            found[at] = rng.integers(256)
        elif kind == 2:
            marks = [i for i, c in enumerate(found) if chr(c) in '0123456789[]{}",:']
            if marks:
                found[marks[at % len(marks)]] = ord(rng.choice(list('0123456789-.[]{}",:')))
        elif kind == 3:
            del found[at : at + piece]
        elif kind == 4:
            found[at:at] = found[at : at + piece]
        elif kind == 5:
            found[:8] = struct.pack("<Q", int(rng.integers(0, 2 ** int(rng.integers(1, 63)))))
        elif len(found) > 9:
            del found[max(at, 8) :]
        if not found:
            break
    return bytes(found)


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def measured(call) -> tuple[float, int]:
    """Return the seconds of CPU time and the peak growth of the resident set, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # cached free memory would hide new allocations
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident(), time.process_time()
    call()
    return time.process_time() - start, peak() - before


def main(folder: Path) -> None:
    open_folder(lay(folder, GOOD)).read("a")
    found = {}
    for name, (content, _) in FILES.items():
        lay(folder, content)

        def call():
            try:
                open_folder(folder)
            except CheckpointError:
                return
            raise AssertionError("was read")

        found[name] = measured(call)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
