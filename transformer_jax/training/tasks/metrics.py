"""Metrics for generated texts and for predicted labels."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np


def compare_texts(
    written: Sequence[str], wanted: Sequence[str], *, translations: bool = True
) -> dict[str, float]:
    """Compare texts with references. Return exact_match, word_error_rate, bleu, and chrf.

    The exact_match is the fraction of texts that equal their reference, ignoring spaces at both
    ends. The word_error_rate is the number of words to insert, delete, or replace, divided by the
    number of reference words. BLEU (Papineni et al. 2002) and chrF (Popović 2015) range from 0 to
    100. They are sacrebleu's corpus scores with default settings, and are computed only if
    sacrebleu is installed. BLEU is omitted if no reference has four words, because even a perfect
    copy would score 0.

    Args:
        written: the n texts to compare, at least one.
        wanted: n references.
        translations: whether to compute bleu and chrf.
    """
    if len(written) != len(wanted):
        rule = f"must have {len(wanted)}, as many as wanted"
        raise ValueError(f"written contains {len(written)} texts: {rule}")
    pairs = [(one.strip(), two.strip()) for one, two in zip(written, wanted, strict=True)]
    if not pairs:
        raise ValueError("written is empty: must have at least one text")
    found = {"exact_match": float(np.mean([one == two for one, two in pairs]))}
    words = sum(len(two.split()) for _, two in pairs)
    errors = sum(edit_distance(one.split(), two.split()) for one, two in pairs)
    found["word_error_rate"] = errors / max(words, 1)
    if not translations or importlib.util.find_spec("sacrebleu") is None:
        return found
    import sacrebleu

    hypotheses, references = [one for one, _ in pairs], [[two for _, two in pairs]]
    if sacrebleu.corpus_bleu(references[0], references).totals[3]:
        found["bleu"] = float(sacrebleu.corpus_bleu(hypotheses, references).score)
    found["chrf"] = float(sacrebleu.corpus_chrf(hypotheses, references).score)
    return found


def edit_distance(one: Sequence[object], two: Sequence[object]) -> int:
    """Return the minimum number of insertions, deletions, and replacements (Levenshtein 1966).

    Args:
        one: sequence of items, which are compared with ==.
        two: sequence of items.
    """
    before = list(range(len(two) + 1))
    for i, item in enumerate(one, start=1):
        row = [i]
        for j, other in enumerate(two, start=1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (item != other)))
        before = row
    return before[-1]


def confusion_matrix(
    predicted: np.ndarray,  # i32[n]
    wanted: np.ndarray,  # i32[n]
    classes: int,
) -> np.ndarray:  # i64[C, C]
    """Return the confusion matrix, where [i, j] counts examples of class i predicted as class j."""
    return np.bincount(wanted * classes + predicted, minlength=classes**2).reshape(classes, classes)


def macro_f1(confusion: np.ndarray) -> float:  # [C, C]
    """Return the mean of F1 = 2 TP / (2 TP + FP + FN) over the classes.

    Classes that neither occur nor are predicted are excluded.
    """
    right = np.diag(confusion)
    total = confusion.sum(axis=0) + confusion.sum(axis=1)
    counted = total > 0
    return float((2 * right[counted] / total[counted]).mean())
