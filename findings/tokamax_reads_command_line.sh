#!/usr/bin/env bash
# The first attention call of tokamax parses the command line of the process.
#
# tokamax 0.0.12, jax 0.10.2, absl-py as resolved, Python 3.11.7; seen on 2026-11-30.
# Expected: a function of arrays does not depend on sys.argv.
# Seen: the same call works in a script without arguments and raises UnrecognizedFlagError if the script has its
# own option, such as --steps, because the first call passes sys.argv to absl's flag parser.
#
# Output seen:
#   without arguments: (1, 4, 2, 8)
#   with --steps 3: UnrecognizedFlagError: Unknown command line flag 'steps'
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/env"
"$work/env/bin/pip" install -q jax==0.10.2 tokamax==0.0.12
cd "$work"
cat > call.py <<'PY'
import jax
import tokamax

x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
try:
    print(tokamax.dot_product_attention(x, x, x, implementation="xla").shape)
except Exception as error:
    print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
PY
export JAX_PLATFORMS=cpu
plain=$(env/bin/python call.py 2>/dev/null)
option=$(env/bin/python call.py --steps 3 2>/dev/null)
echo "without arguments: $plain"
echo "with --steps 3: $option"
[ "$plain" = "(1, 4, 2, 8)" ]
[[ "$option" == "UnrecognizedFlagError: "* ]]
