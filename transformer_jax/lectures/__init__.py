"""Lecture material: models before transformers, toy tasks, demonstrations, and comparisons."""
