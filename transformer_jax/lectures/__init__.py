"""The wing of the lectures: models before transformers, toy tasks, demonstrations, comparisons."""
