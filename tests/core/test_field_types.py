"""Strategies and codecs that Python code makes, without the grammar: fields take what a text could say."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest

from polyrhythm.core import grammar
from polyrhythm.core.codec import Codec
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import describe, parse
from polyrhythm.core.strategy import Strategy


@pytest.mark.parametrize("kind", ["strategy", "codec"])
def test_constructors_refuse_field_values_of_the_wrong_type(kind: Any) -> None:
    """Each field of each of them: what no text could spell is refused, and what it is by default is not."""
    for row in describe(kind):
        cls = (Strategy if kind == "strategy" else Codec).registry[row.name]
        cls(**{option.name: option.default for option in grammar.options(cls)})
        for name, takes, _ in row.fields:
            for wrong in (object(), ["x"], math.nan, b"1", "x" if takes != "text" else 1):
                with pytest.raises(UsageError) as caught:
                    cls(**{name: wrong})
                assert str(caught.value) == f"{row.name}: {name} takes {takes}, not {wrong!r}"


def test_positional_fields_and_codec_arguments_are_type_checked() -> None:
    describe()  # which loads them
    local, allreduce = Strategy.registry["local"], Strategy.registry["allreduce"]
    with pytest.raises(UsageError, match=r"^local: period takes a whole number or auto, not 1\.5$"):
        local(1.5)
    with pytest.raises(UsageError, match=r"^local: period takes a whole number or auto, not True$"):
        local(True)
    with pytest.raises(
        UsageError, match=r"allreduce: codec takes a codec, such as parse_codec.*, not 'int8'"
    ):
        allreduce(codec="int8")
    with pytest.raises(UsageError, match="a strategy is named by a string such as 'local:8', not by 8"):
        parse(8)
    assert local(8) == parse("local") and copy.deepcopy(local(4)) == replace(local(), period=4)
