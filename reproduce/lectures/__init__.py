"""Demonstrate what the lectures claim: one short script for each claim.

    python -m reproduce.lectures.vanishing_gradients --out runs/lectures

Each script prints its figures, saves a picture, and returns the figures to its test in
`tests/reproduce/test_lectures.py`. `--quick` makes everything small. docs/lectures/ explains them.
"""
