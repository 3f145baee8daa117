"""Which strategies and codecs compose: what `refusal` says of every pair is what parsing it does."""

from __future__ import annotations

import pytest

from polyrhythm.collectives.choose import ALGORITHMS, check_codec
from polyrhythm.core.codec import Codec
from polyrhythm.core.compose import refusal
from polyrhythm.core.errors import UsageError
from polyrhythm.core.registry import describe, parse
from polyrhythm.core.strategy import Strategy

STRATEGIES = [row.name for row in describe()]
CODECS = [row.name for row in describe("codec")]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_refusal_of_a_pair_is_the_error_of_parsing_it(strategy: str, codec: str) -> None:
    """The classes alone tell, before anything is configured, and in one line."""
    text = f"{strategy}+{codec}"
    why = refusal(Strategy.registry[strategy], Codec.registry[codec])
    assert "\n" not in why
    if why:
        with pytest.raises(UsageError) as error:
            parse(text)
        assert str(error.value) == f"{text}: {why}"
    else:
        assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_refusal_with_a_collective_is_the_error_of_the_run(collective: str) -> None:
    """The same for every pair that can be parsed; at least one is refused if sums are taken on the way."""
    refused = set()
    for strategy in STRATEGIES:
        for codec in CODECS:
            classes = Strategy.registry[strategy], Codec.registry[codec]
            if refusal(*classes):
                assert refusal(*classes, collective) == refusal(*classes)
                continue
            why = refusal(*classes, collective)
            made = parse(f"{strategy}+{codec}")
            try:
                check_codec(collective, made)
            except UsageError as error:
                assert str(error) == f"{made}: {why}" != f"{made}: "
                refused.add((strategy, codec))
            else:
                assert not why
    assert bool(refused) == (collective in ("ring", "hierarchical", "shared"))


@pytest.mark.parametrize(
    ("strategy", "codec", "says"),
    [
        ("gossip", "topk", "gossip takes no codec"),
        ("local", "dgc", "dgc compresses gradients only; local sends parameter updates"),
        ("local", "sign", ""),
        ("allreduce", "sign:vote=yes", ""),
        ("local", "sign:vote=yes", "compresses gradients only; local sends parameter updates"),
    ],
)
def test_refusal_looks_at_the_configuration_of_a_codec(strategy: str, codec: str, says: str) -> None:
    """A vote has no size, so `sign` composes with fewer strategies than its class does."""
    made = parse(f"allreduce+{codec}").codec
    assert made is not None
    why = refusal(Strategy.registry[strategy], made)
    assert (says in why) if says else not why
