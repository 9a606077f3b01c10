"""Mutations of kernel sources: tags, statements, the result of each edit; and no mutation goes unnoticed."""

from __future__ import annotations

from pathlib import Path

import mutations
import pytest
from mutations import After, Before, Condition, Drop, Edit, Initial, Relaxed, Swap, mutated, tags

SOURCE = """
// A comment with @no-tag; and { a brace.
void f() {
  first();  // @plain it may say anything
  // @long
  g(a,   // one; of
    b);  // two
  if (is_there(x) && y) {  // @branch
    h();
  } else {
    k();
  }
  PO_UNROLL
  for (int i = 0; i < n; ++i) last(i, [&] { return x; });  // @loop
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);  // @order
}
inline constexpr int kWords = 1024;  // @size of a chunk
"""
STATEMENTS = {
    "plain": "first();",
    "long": "g(a,   // one; of\n    b);",
    "branch": "if (is_there(x) && y) {  // @branch\n    h();\n  } else {\n    k();\n  }",
    "loop": "for (int i = 0; i < n; ++i) last(i, [&] { return x; });",
    "order": "return __atomic_load_n(flag, __ATOMIC_ACQUIRE);",
    "size": "inline constexpr int kWords = 1024;",
}


def _statement(tag: str) -> str:
    begin, end = mutations._statement(SOURCE, tag)
    return SOURCE[begin:end]


@pytest.mark.parametrize("tag", STATEMENTS)
def test_a_tag_is_of_the_statement_that_begins_there(tag: str) -> None:
    assert _statement(tag) == STATEMENTS[tag]


@pytest.mark.parametrize(
    ("edits", "becomes"),
    [
        ([Drop("plain")], "if (m != 1) { first(); }"),
        ([Drop("plain"), Drop("plain")], "if (m != 1 && m != 2) { first(); }"),
        ([Before("plain", "x();"), After("plain", "y();")], "if (m == 1) { x(); } first(); if (m == 2) { y(); }"),
        ([Swap("long", "b", "c")], "g(a,   // one; of\n    (m == 1 ? (c) : (b)));"),
        (
            [Swap("loop", "i < n", "i <= n"), Swap("loop", "i < n", "false")],
            "for (int i = 0; (m == 1 ? (i <= n) : m == 2 ? (false) : (i < n)); ++i) last(i, [&] { return x; });",
        ),
        (
            [Relaxed("order")],
            "return (m == 1 ? (__atomic_load_n(flag, __ATOMIC_RELAXED)) : (__atomic_load_n(flag, __ATOMIC_ACQUIRE)));",
        ),
        ([Initial("size", "1")], "inline constexpr int kWords = 1;"),
    ],
)
def test_an_edit_leaves_the_statement_to_be_chosen(edits: list[Edit], becomes: str) -> None:
    assert mutations._edited(_statement(edits[0].tag), list(enumerate(edits, 1)), "m") == becomes


def test_a_condition_is_another_one() -> None:
    found = mutations._edited(_statement("branch"), [(1, Condition("branch", "true"))], "m")
    assert found.startswith("if ((m == 1 ? (true) : (is_there(x) && y))) {")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (Swap("long", "z", "c"), "0 times"),
        (Swap("branch", "()", "c"), "2 times"),
        (Condition("plain", "true"), "no if"),
        (Relaxed("plain"), "no atomic operation"),
        (Initial("plain", "1"), "no constant"),
    ],
)
def test_what_is_not_there_fails(edit: Edit, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        mutations._edited(_statement(edit.tag), [(1, edit)], "m")


def test_a_tag_that_is_missing_or_stands_twice_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no source has @nowhere"):
        mutated(tmp_path, (Drop("nowhere"),))
    for name in ("a.cuh", "b.cuh"):
        (tmp_path / name).write_text("f();  // @twice\n")
    with pytest.raises(AssertionError, match="@twice stands in"):
        tags(tmp_path)
