"""Measure and draw the structure of the library: its imports, its floors, the length of its parts.

`imports` reads the files and holds FLOORS; `naming` and `carriers` measure how many files know one
thing and which types carry a mask; `figures` puts all figures in a table; `drawing` draws the
floors. `python -m benchmarks.structure --help` says what the command does.
"""
