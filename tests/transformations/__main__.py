"""Print the table: `python -m tests.transformations [--write PAGE]`."""

from tests.transformations.table import main

main()
