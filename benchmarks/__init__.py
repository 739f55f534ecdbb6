"""Measurements: one table of shapes, one script per question, peers beside ours."""
