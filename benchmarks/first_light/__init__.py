"""Run the kernels on a GPU for the first time, within half an hour: `__main__` is the command.

    checks     one process a check, under a time limit; a step's records as JSON lines
    machine    driver, ptxas, device, clocks, versions
    smoke      step 1: does it run, and is it right (smoke_calls)?
    speed      step 2: goals, and what parts of a call cost (ablations)
    why        step 3: what ncu counts in each kernel (profiled)
    tune       step 4: tile sizes, and the goals again with them (goals_with_rows)
    ampere     the kernels for every other NVIDIA GPU, when asked for
    models     decoding and training, when asked for
    summary    one page: what passed, what was reached, what to change first

With `--rehearse` all of it runs on a CPU over a few tokens (rehearsal), to see that it would run.
"""
