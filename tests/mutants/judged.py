"""What a reader found about each mutant that the tests let pass.

Each key is that of `python -m tests.mutants --list`. "equivalent": no caller can tell the
difference. "speed": only time or memory changes. "hole": a test was missing; the reason names it.
"""

from __future__ import annotations

JUDGED: dict[str, tuple[str, str]] = {
    "02210b99aab4": ("hole", "not closed: grid lines of a picture"),
    "032b2e6ef80c": ("hole", "not closed: a size of a demonstration"),
    "07e75597fe46": ("equivalent", "nothing is hidden if all ids are known"),
    "0cab6bd7ae07": ("hole", "not closed: a label of a picture"),
    "1c5f2a3bb6af": ("speed", "fewer results are computed ahead"),
    "3963304c751a": ("hole", "not closed: a replacement that finds nothing gives units back"),
    "440e5bc863c3": ("hole", "test_the_first_position_past_the_capacity_is_refused"),
    "45b0db5b1ffd": ("hole", "test_proposals_of_a_draft_change_no_greedy_token"),
    "4e4fc1264784": ("hole", "test_a_scanned_stack_is_stepped_as_a_looped_one"),
    "6cb85b3faea9": ("hole", "test_masked_and_random_tokens_may_be_all_that_are_predicted"),
    "79d3895eaa8a": ("speed", "a state is copied instead of donated"),
    "9135db6dbd80": ("hole", "not closed by default: a slow test searches translations"),
    "c2f3630f7db6": ("hole", "test_a_known_row_without_a_page_is_refused_by_name"),
    "d41b8584e561": ("equivalent", "the larger of two numbers"),
    "e49eccbec399": ("hole", "test_columns_of_a_patching_name_both_tokens_where_they_differ"),
    "ee277268082a": ("equivalent", "the product of two vectors"),
}
