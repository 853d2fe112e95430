"""The mutants that ``scripts/mutate.py`` makes of a change."""

from __future__ import annotations

import ast

from scripts.mutate import find_tests, mutants_of

SOURCE = '''\
def pay(account, amount):
    """Take an ämount."""
    if amount < 0:  # ä
        raise ValueError(amount)
    account.log("ä", level=1); account.balance -= amount
    kept = 1
    return account.balance
'''


def test_each_statement_condition_and_keyword_of_an_added_line_is_mutated() -> None:
    """Every mutant parses and differs from the source only in one added line."""
    mutants = list(mutants_of("fsdp/pay.py", SOURCE, {2, 3, 4, 5, 7}))
    assert [str(mutant) for mutant in mutants] == [
        "fsdp/pay.py:3: negate `amount < 0`",
        "fsdp/pay.py:4: delete `raise ValueError(amount)`",
        'fsdp/pay.py:5: delete `account.log("ä", level=1)`',
        'fsdp/pay.py:5: drop level= of `account.log("ä", level=1)`',
        "fsdp/pay.py:5: delete `account.balance -= amount`",
        "fsdp/pay.py:7: return None instead of `return account.balance`",
    ]
    lines = SOURCE.splitlines()
    for mutant in mutants:
        changed = mutant.apply(SOURCE)
        ast.parse(changed)
        assert [i for i, (old, new) in enumerate(zip(lines, changed.splitlines(), strict=True), 1) if old != new] == [
            mutant.line
        ]
    assert "    if (not (amount < 0)):  # ä\n" in mutants[0].apply(SOURCE)


def test_tests_of_a_file_are_found_by_their_imports() -> None:
    assert {"tests/test_layout.py", "tests/test_ragged.py"} <= set(find_tests("fsdp/flat/layout.py"))
    assert "tests/test_migrate.py" not in find_tests("fsdp/flat/layout.py")
