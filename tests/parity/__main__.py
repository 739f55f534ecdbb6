"""Print the parity matrix: `python -m tests.parity [--write docs/reference/parity_matrix.md]`."""

from tests.parity.matrix import main

main()
