"""Benchmarks: one table of shapes, one script per question, with comparisons to peers."""
