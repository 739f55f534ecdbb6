"""Compare texts that a model wrote with those that were wanted, and labels with labels."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np


def compare_texts(
    written: Sequence[str], wanted: Sequence[str], *, translations: bool = True
) -> dict[str, float]:
    """Return how alike texts are: exact_match, word_error_rate, and bleu and chrf in 0..100.

    exact_match is the share of equal texts, spaces at their ends aside. word_error_rate is the
    words to insert, delete or replace, by those that were wanted. BLEU (Papineni et al. 2002) and
    chrF (Popović 2015) are sacrebleu's, of the corpus, with its usual settings; they are left out
    if it is not installed. BLEU is also left out if no wanted text has four words: it counts
    4-grams, and sacrebleu would give even a perfect copy 0.

    Args:
        written: n texts, at least one.
        wanted: n texts.
        translations: whether to give bleu and chrf.
    """
    if len(written) != len(wanted):
        rule = f"there are {len(wanted)} that were wanted"
        raise ValueError(f"written has {len(written)} texts: {rule}")
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
    """Return the fewest insertions, deletions and replacements that make one sequence the other.

    Levenshtein (1966), a row of the table at a time.

    Args:
        one: items that are compared by ==.
        two: likewise.
    """
    before = list(range(len(two) + 1))
    for i, item in enumerate(one, start=1):
        row = [i]
        for j, other in enumerate(two, start=1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (item != other)))
        before = row
    return before[-1]


def confusion_matrix(
    said: np.ndarray,  # i32[n]
    wanted: np.ndarray,  # i32[n]
    classes: int,
) -> np.ndarray:  # i64[C, C]
    """Return how often class i was taken for class j, at [i, j]."""
    return np.bincount(wanted * classes + said, minlength=classes**2).reshape(classes, classes)


def macro_f1(confusion: np.ndarray) -> float:  # [C, C]
    """Return the mean over classes of F1 = 2 TP / (2 TP + FP + FN).

    A class that neither occurs nor is said has no F1, and is left out.
    """
    right = np.diag(confusion)
    total = confusion.sum(axis=0) + confusion.sum(axis=1)
    counted = total > 0
    return float((2 * right[counted] / total[counted]).mean())
