"""First run of the kernels on a GPU, within half an hour. `__main__` is the command.

    checks     one process per check, with a time limit; records as JSON lines
    machine    driver, ptxas, device, clocks, versions
    smoke      step 1: do the kernels run, and are they correct (smoke_calls)?
    speed      step 2: goals, and the cost of the parts of a call (ablations)
    why        step 3: ncu counters of each kernel (profiled)
    tune       step 4: best tile sizes, and the goals with these sizes (goals_with_rows)
    ampere     the kernels for all other NVIDIA GPUs, on request
    models     decoding and training, on request
    summary    one page: passed checks, reached goals, suggested changes

With `--rehearse`, everything runs on a CPU with few tokens (rehearsal) to test the scripts.
"""
