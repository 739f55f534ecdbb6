#!/usr/bin/env bash
# Worker processes change the batches of a grain DataLoader, and they need parsed absl flags if jax is installed.
#
# grain 0.2.18, jax 0.10.2, Python 3.11.7; seen on 2026-11-30.
# Expected: worker_count changes only the speed, so the batches are the same with 0 and with 2 workers.
# Seen: a plain script raises UnparsedFlagAccessError until it parses absl's flags. After that, each worker batches
# its own share of the elements, so the batches contain other elements than without workers.
#
# Output seen:
#   0 workers: [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
#   2 workers: UnparsedFlagAccessError
#   2 workers, flags parsed: [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q grain==0.2.18 jax==0.10.2
cd "$work"
cat > batches.py <<'PY'
import grain.python as grain
from absl import flags


def batches(workers):
    sampler = grain.IndexSampler(
        num_records=12, shuffle=False, num_epochs=1, seed=0, shard_options=grain.NoSharding()
    )
    loader = grain.DataLoader(
        data_source=range(12), sampler=sampler, operations=[grain.Batch(3)], worker_count=workers
    )
    return [batch.tolist() for batch in loader]


if __name__ == "__main__":
    alone = batches(0)
    try:
        unparsed = str(batches(2))
    except flags.UnparsedFlagAccessError as error:
        unparsed = type(error).__name__
    flags.FLAGS(["batches"])
    parsed = batches(2)
    print(f"0 workers: {alone}")
    print(f"2 workers: {unparsed}")
    print(f"2 workers, flags parsed: {parsed}")
    assert alone[0] == [0, 1, 2] and unparsed == "UnparsedFlagAccessError"
    assert parsed == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
PY
env/bin/python batches.py 2>/dev/null
