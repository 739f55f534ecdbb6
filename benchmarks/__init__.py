"""Benchmarks, with one table of shapes and one script per question, and comparisons with peers."""
