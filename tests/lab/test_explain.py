"""`polyrhythm explain ring`: the drawing is what the real ring did, as the formula predicts."""

from __future__ import annotations

import json
import re

import pytest

from polyrhythm.cli.entry import main
from polyrhythm.core.errors import UsageError
from polyrhythm.lab import explain


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 16])
def test_explained_ring_follows_the_ring_algorithm_step_by_step(n):
    what = explain.ring(n)
    assert [(step.phase, step.step) for step in what.steps] == [
        (phase, k) for phase in ("share-reduce", "share-only") for k in range(n - 1)
    ]
    holds = [[{rank} for _ in range(n)] for rank in range(n)]  # by hand, from the rule as it is written
    for step in what.steps:
        k, before = step.step, [list(row) for row in holds]
        for p, move in enumerate(step.moves):
            sends, gets = ((p - k) % n, (p - k - 1) % n)
            if step.phase == "share-only":
                sends, gets = (p + 1 - k) % n, (p - k) % n
            assert (move.rank, move.to, move.chunk, move.got) == (p, (p + 1) % n, sends, gets)
            came = before[(p - 1) % n][gets]
            assert not came & before[p][gets] or step.phase == "share-only"  # nobody is counted twice
            holds[p][gets] = came | before[p][gets] if step.phase == "share-reduce" else came
        assert [[set(who) for who in row] for row in step.holds] == holds
        if (step.phase, k) == ("share-reduce", n - 2):
            assert all(holds[p][(p + 1) % n] == set(range(n)) for p in range(n))
    assert all(who == set(range(n)) for row in holds for who in row)


@pytest.mark.parametrize("n, length", [(4, 17), (4, 3), (3, 0), (5, 1), (7, 100), (16, 16)])
def test_explained_ring_counts_elements_as_the_formula_does(n, length):
    what = explain.ring(n, length)
    assert what.elements == what.formula
    assert what.nbytes == [8 * sent for sent in what.elements]
    assert sum(what.chunks) == length and len(what.steps) == 2 * (n - 1)
    if (n, length) == (4, 17):
        assert what.elements == [26, 25, 25, 26]


def cells(line: str) -> list[str]:
    return re.findall(r"\S+", line)


def test_explain_ring_prints_every_step_of_the_trace(capsys):
    assert main(["explain", "ring", "--workers", "4"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text
    lines = iter(text.splitlines())
    what = explain.ring(4)
    before = what.start
    for step in what.steps:
        title = f"{step.phase}, step {step.step + 1} of 3"
        while next(lines) != title:
            pass
        assert cells(next(lines)) == ["chunk", "0", "chunk", "1", "chunk", "2", "chunk", "3"]
        for move, held, old in zip(step.moves, step.holds, before, strict=True):
            shown = ["+".join(map(str, who)) for who in held]
            shown = [f"[{cell}]" if a != b else cell for cell, a, b in zip(shown, held, old, strict=True)]
            expected = f"worker {move.rank} sends chunk {move.chunk} to {move.to}".split() + shown
            assert cells(next(lines)) == expected
        before = step.holds
    assert "steps: 6 = 2(n-1)" in text and "6; as in theory: 2(n-1)/n x length = 6" in text


@pytest.mark.parametrize("n", [2, 3, 8])
def test_ring_drawing_fits_80_columns_and_marks_changed_chunks(n):
    what = explain.ring(n)
    plain = explain.draw(what)
    assert max(map(len, plain.splitlines())) <= 80
    assert re.sub(r"\x1b\[[0-9;]*m", "", explain.draw(what, colour=True)) == plain
    changed = re.findall(r"^worker.*\[", plain, flags=re.M)
    assert len(changed) == 2 * (n - 1) * n  # one cell per worker and step


def test_a_chunk_without_elements_is_shown_as_such():
    assert " - " in explain.draw(explain.ring(4, 2))


def test_explain_ring_json_has_the_whole_trace(capsys):
    assert main(["explain", "ring", "-n", "3", "--length", "7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == explain.ring(3, 7).plain()
    assert found["steps"][0]["moves"][0] == {
        "rank": 0, "to": 1, "chunk": 0, "elements": 2, "nbytes": 16, "got": 2,
    }  # fmt: skip


@pytest.mark.parametrize("n, length, message", [
    (1, None, "--workers 1: the drawing has room for 2 to 16"),
    (17, None, "--workers 17: the drawing has room for 2 to 16"),
    (4, -1, "--length -1: it must be 0 to 1,048,576"),
])  # fmt: skip
def test_explain_ring_refuses_sizes_out_of_range(n, length, message, capsys):
    with pytest.raises(UsageError, match=message):
        explain.ring(n, length)
    more = [] if length is None else ["--length", str(length)]
    assert main(["explain", "ring", "--workers", str(n), *more]) == 2
    assert message in capsys.readouterr().err
