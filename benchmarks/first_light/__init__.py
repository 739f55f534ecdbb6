"""First run of the kernels on a GPU, within half an hour; `__main__` is the command.

    checks     one process per check, with a time limit; records as JSON lines
    machine    driver, ptxas, device, clocks, versions
    smoke      step 1: does it run, and is it correct (smoke_calls)?
    speed      step 2: goals, and the cost of parts of a call (ablations)
    why        step 3: ncu counters of each kernel (profiled)
    tune       step 4: tile sizes, and the goals again with them (goals_with_rows)
    ampere     the kernels for all other NVIDIA GPUs, on request
    models     decoding and training, on request
    summary    one page: passed checks, reached goals, suggested changes

With `--rehearse` everything runs on a CPU over few tokens (rehearsal), as a test of the scripts.
"""
