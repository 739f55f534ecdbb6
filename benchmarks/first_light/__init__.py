"""The first run on a new GPU, in one command of nine minutes. `__main__` contains its steps.

checks      one process per task, with a deadline; results are written as they come
tasks       the work of each process
attached    the tests of the kernels, for pytest
rehearsal   the same on a CPU with few tokens, to test the scripts
summary     one page of results
carry       peers for a machine without a network
"""
