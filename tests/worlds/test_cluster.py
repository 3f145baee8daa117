"""The cost model: the laws of its distributions and links, and one line for every mistake in a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks import arrivals

from polyrhythm.core.errors import UsageError
from polyrhythm.worlds.cluster import Cluster
from polyrhythm.worlds.cost_model import CostModel, Host, Site
from polyrhythm.worlds.tables import BYTES_PER_SECOND, SECONDS, quantity

EXAMPLES = Path(__file__).parents[2] / "examples"
W0, W1, W2, S0, S1 = ("worker", 0), ("worker", 1), ("worker", 2), ("server", 0), ("server", 1)
MB = 1_000_000


def cluster(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return Cluster.load(path)


def costs(tmp_path: Path, text: str, workers: int = 3, servers: int = 2, seed: int = 0) -> CostModel:
    return cluster(tmp_path, text).cost_model(workers, servers, seed)


# Steps


@pytest.mark.parametrize(
    ("step_time", "average", "law"),
    [
        ('"20 ms"', mean, 0.02),
        ('{ uniform = ["10 ms", "30 ms"] }', mean, 0.02),
        ('{ exponential = "20 ms" }', mean, 0.02),
        ('{ lognormal = "20 ms", sigma = 0.3 }', median, 0.02),
        ('{ lognormal = "20 ms", sigma = 0.3 }', mean, 0.02 * 2.718281828 ** (0.3**2 / 2)),
    ],
)
@pytest.mark.parametrize("speed", [1.0, 0.25])
def test_steps_follow_their_distribution(
    tmp_path: Path, step_time: str, average, law: float, speed: float
) -> None:
    these = costs(tmp_path, f"[[hosts]]\nstep_time = {step_time}\nspeed = {speed}")
    assert average(these.step_time(0, 0.0) for _ in range(20_000)) == pytest.approx(law / speed, rel=0.03)


def test_uniform_stays_within_its_bounds(tmp_path: Path) -> None:
    these = costs(tmp_path, '[[hosts]]\nstep_time = { uniform = ["10 ms", "30 ms"] }\nspeed = 2')
    draws = [these.step_time(0, 0.0) for _ in range(1000)]
    assert 0.005 <= min(draws) < 0.006 and 0.014 < max(draws) <= 0.015


def test_each_worker_has_a_stream_of_its_own(tmp_path: Path) -> None:
    text = '[[hosts]]\nstep_time = { exponential = "20 ms" }'
    one, other = costs(tmp_path, text), costs(tmp_path, text)
    alone = [one.step_time(1, 0.0) for _ in range(5)]
    mixed = [(other.step_time(0, 0.0), other.step_time(1, 0.0))[1] for _ in range(5)]
    assert alone == mixed
    assert alone[0] != other.step_time(2, 0.0)
    assert alone[0] != costs(tmp_path, text, seed=1).step_time(1, 0.0)


def test_step_times_are_the_same_in_every_process_and_need_no_torch() -> None:
    code = (
        "import sys; from polyrhythm.worlds.cluster import Cluster; "
        "costs = Cluster.load(sys.argv[1]).cost_model(12, 1, 7); "
        "print([costs.step_time(worker, 0.0) for worker in range(12)], 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(EXAMPLES / "wan.toml")]
    environments = ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})
    root = EXAMPLES.parent
    outputs = [subprocess.check_output(command, env=env, cwd=root, text=True) for env in environments]
    here = Cluster.load(EXAMPLES / "wan.toml").cost_model(12, 1, 7)
    assert outputs == [f"{[here.step_time(worker, 0.0) for worker in range(12)]} False\n"] * 2


def test_stragglers_are_slower_for_a_while(tmp_path: Path) -> None:
    these = costs(
        tmp_path,
        '[[hosts]]\ncount = 1\n[[hosts]]\nname = "old"\n'
        '[[stragglers]]\nworkers = [0, 2]\nfrom = "10 s"\nto = "20 s"\nslowdown = 5\n'
        '[[stragglers]]\nhost = "old"\nfrom = "15 s"\nslowdown = 2.0',
    )
    at = {
        now: [these.step_time(worker, now) / 0.01 for worker in range(3)] for now in (9.9, 10.0, 15.0, 20.0)
    }
    assert at[9.9] == [1, 1, 1]
    assert at[10.0] == pytest.approx([5, 1, 5])
    assert at[15.0] == pytest.approx([5, 2, 10])
    assert at[20.0] == pytest.approx([1, 2, 2])


def test_workers_are_dealt_in_order_and_one_group_takes_the_rest(tmp_path: Path) -> None:
    text = """
        hosts = [{ count = 1, step_time = "1 s" }, { step_time = "2 s" }, { count = 2, step_time = "3 s" }]
    """
    for workers, steps in ((5, [1, 2, 2, 3, 3]), (3, [1, 3, 3]), (2, [1, 3]), (1, [1])):
        these = costs(tmp_path, text, workers)
        assert [these.step_time(rank, 0.0) for rank in range(workers)] == steps


def test_servers_take_time_only_when_the_file_says_so(tmp_path: Path) -> None:
    assert costs(tmp_path, "").apply_time(0) == 0
    assert costs(tmp_path, '[servers]\nstep_time = "1 ms"\nspeed = 0.5').apply_time(1) == 0.002


# Links


LINKS = (
    '[[hosts]]\nbandwidth = "1 MB/s"\nlatency = "0.1 s"\n[servers]\nbandwidth = "2 MB/s"\nlatency = "0.2 s"'
)


def test_a_message_takes_both_latencies_and_the_narrower_bandwidth(tmp_path: Path) -> None:
    assert arrivals(costs(tmp_path, LINKS), (W0, S0, MB, 10.0)) == pytest.approx([10 + 1 + 0.3])
    assert arrivals(costs(tmp_path, LINKS), (S0, S1, MB, 10.0)) == pytest.approx([10 + 0.5 + 0.4])


@pytest.mark.parametrize(("first", "second"), [((W0, S0), (W0, S1)), ((W0, S0), (W0, S0))])
def test_two_messages_on_one_link_take_twice_as_long(tmp_path: Path, first: Any, second: Any) -> None:
    these = costs(tmp_path, LINKS)
    assert arrivals(these, (*first, MB, 0.0), (*second, MB, 0.0)) == pytest.approx([1.3, 2.3])


def test_links_are_full_duplex_and_separate(tmp_path: Path) -> None:
    ways = ((W0, S0), (S0, W0), (W1, S1))
    assert arrivals(costs(tmp_path, LINKS), *((*way, MB, 0.0) for way in ways)) == pytest.approx([1.3] * 3)


def test_a_wide_link_takes_several_narrow_ones_at_once(tmp_path: Path) -> None:
    """Three workers at 1 MB/s share a server's 2 MB/s: two arrive undisturbed, the third does not."""
    sent = ((worker, S0, MB, 0.0) for worker in (W0, W1, W2))
    assert arrivals(costs(tmp_path, LINKS), *sent) == pytest.approx([1.3, 1.3, 1.8])


def test_a_downlink_serves_messages_in_order_of_arrival(tmp_path: Path) -> None:
    """A message from afar does not hold up one that was sent later and is here earlier."""
    far = '[[hosts]]\ncount = 1\nlatency = "1 s"\n[[hosts]]\n[servers]\nbandwidth = "1 MB/s"'
    sent = (W0, S0, MB, 0.0), (W1, S0, MB, 0.5)
    assert arrivals(costs(tmp_path, far), *sent) == pytest.approx([2.5, 1.5])


def test_a_link_is_free_again_afterwards(tmp_path: Path) -> None:
    sent = (W0, S0, MB, 0.0), (W0, S0, MB, 5.0)
    assert arrivals(costs(tmp_path, LINKS), *sent) == pytest.approx([1.3, 6.3])


def test_a_link_without_a_limit_is_never_busy(tmp_path: Path) -> None:
    these = costs(tmp_path, '[[hosts]]\nbandwidth = "1 MB/s"\n[servers]')
    for sent in (((W0, S0), (W1, S0)), ((S0, W0), (S0, W1))):
        assert arrivals(these, *((*way, MB, 0.0) for way in sent)) == [1, 1]


def test_the_default_network_is_free() -> None:
    these = Cluster.uniform().cost_model(3, 1, 0)
    assert arrivals(these, *((W0, S0, 10**12, t) for t in (1.0, 1.0, 2.0))) == [1, 1, 2]
    assert these.all_reduce([0, 1, 2], 10**12) == 0
    assert these.step_time(2, 0.0) == 0.01


@given(
    st.lists(
        st.tuples(st.sampled_from([W0, W1, W2]), st.sampled_from([S0, S1]), st.integers(0, MB)), max_size=20
    )
)
def test_no_link_carries_more_than_its_bandwidth(
    messages: list[tuple[tuple[str, int], tuple[str, int], int]],
) -> None:
    """Whatever crosses a link takes as long as all bytes together at 125 MB/s, up and down."""
    these = Cluster.load(EXAMPLES / "cluster.toml").cost_model(3, 2, 0)
    times = arrivals(these, *((*message, 0.0) for message in messages))
    for end in (0, 1):
        for node in {message[end] for message in messages}:
            own = [(t, each[2]) for t, each in zip(times, messages, strict=True) if each[end] == node]
            assert max(t for t, _ in own) >= sum(nbytes for _, nbytes in own) / 125e6 - 1e-9


def test_collectives_take_two_hops(tmp_path: Path) -> None:
    """All-reduce moves 2(n-1)/n of the vector over the narrowest link; a broadcast n-1 over its root's."""
    these = costs(
        tmp_path,
        '[[hosts]]\ncount = 2\nbandwidth = "4 MB/s"\nlatency = "10 ms"\n'
        '[[hosts]]\nbandwidth = "1 MB/s"\nlatency = "50 ms"',
        workers=4,
    )
    assert these.all_reduce([0, 1], MB) == pytest.approx(2 * 0.020 + 2 / 2 * 0.25)
    assert these.all_reduce([0, 1, 2], MB) == pytest.approx(2 * 0.060 + 4 / 3)
    assert these.all_reduce([0, 1, 2, 3], MB) == pytest.approx(2 * 0.100 + 6 / 4)
    assert these.broadcast([0, 1], 0, MB) == pytest.approx(2 * 0.020 + 0.25)
    assert these.broadcast([0, 1, 2, 3], 0, MB) == pytest.approx(2 * 0.100 + 1)
    assert these.broadcast([0, 1, 2, 3], 3, MB) == pytest.approx(2 * 0.100 + 3)


# Files


@given(
    st.floats(0, 1e200),
    st.sampled_from([SECONDS, BYTES_PER_SECOND]),
    st.data(),
    st.sampled_from(["", " ", "  "]),
)
def test_any_number_in_any_unit_round_trips(
    number: float, units: dict[str, float], data: st.DataObject, gap: str
) -> None:
    unit = data.draw(st.sampled_from(list(units)))
    assert quantity(f"{number!r}{gap}{unit}", units) == number * units[unit]


def test_units_of_time_and_bandwidth_are_converted() -> None:
    for text in ("8 Gbit/s", "1 GB/s", "1000 MB/s", "8e6kbit/s", "1000000000 B/s"):
        assert quantity(text, BYTES_PER_SECOND) == 1e9
    for text in ("1 s", "1000 ms", "1e6 us", "1000000000ns"):
        assert quantity(text, SECONDS) == pytest.approx(1.0)


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert cluster(tmp_path, "").hosts == Cluster.uniform().hosts


def line(caught: pytest.ExceptionInfo[UsageError]) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[[hosts]]\nlatency = '5 parsecs'",
            "hosts[0]: latency = '5 parsecs': unknown unit; use ns, us, ms or s",
        ),
        ("[[hosts]]\nlatency = '5'", "latency = '5': no unit; use ns, us, ms or s"),
        ("[[hosts]]\nlatency = 5", "latency = 5: must be a text with a number and a unit"),
        ("[[hosts]]\nlatency = '-1 ms'", "latency = '-1 ms': must be 0 or more"),
        ("[[hosts]]\nlatency = '1e999 s'", "latency = '1e999 s': too large"),
        ("[[hosts]]\nlatency = 'nan s'", "latency = 'nan s': must be a text"),
        ("[[hosts]]\nlatency = '''5 ms\n\n7'''", "unknown unit"),
        ("[[hosts]]\nbandwidth = '0 B/s'", "bandwidth = '0 B/s': must be above 0"),
        ("[[hosts]]\nbandwidth = '1 gbit'", "bandwidth = '1 gbit': unknown unit; use bit/s, kbit/s"),
        ("[[hosts]]\nbandwith = '1 GB/s'", "hosts[0]: unknown key 'bandwith'; did you mean bandwidth?"),
        (
            "[[hosts]]\nx = 1",
            "unknown key 'x'; the keys here are name, count, speed, step_time, bandwidth, latency and site",
        ),
        ("[[host]]", "unknown key 'host'; did you mean hosts?"),
        ("[hosts]", "hosts must be a list of tables; write [[hosts]]"),
        ("hosts = [3]", "hosts[0]: must be a table, not 3"),
        ("servers = 2", "servers: must be a table, not 2"),
        ("[servers]\ncount = 2", "servers: unknown key 'count'"),
        ("[[hosts]]\ncount = 0", "count = 0: must be a whole number, 1 or more"),
        ("[[hosts]]\ncount = true", "count = True: must be a whole number"),
        ("[[hosts]]\ncount = 2.5", "count = 2.5: must be a whole number"),
        ("[[hosts]]\nspeed = 0", "speed = 0: must be a number above 0"),
        ("[[hosts]]\nspeed = nan", "speed = nan: must be a number above 0"),
        ("[[hosts]]\nspeed = 'fast'", "speed = 'fast': must be a number above 0"),
        ("[[hosts]]\nname = 3", "name = 3: must be a text"),
        ("[[hosts]]\n[[hosts]]", "more than one group has no count"),
        ("[[hosts]]\nname = 'a'\ncount = 1\n[[hosts]]\nname = 'a'", "two groups have the name 'a'"),
        ("[[hosts]]\nstep_time = { uniform = ['3 ms', '1 ms'] }", "the lower bound comes first"),
        ("[[hosts]]\nstep_time = { uniform = ['3 ms'] }", 'use "20 ms", { uniform'),
        ("[[hosts]]\nstep_time = { normal = '3 ms' }", 'use "20 ms", { uniform'),
        ("[[hosts]]\nstep_time = { lognormal = '3 ms' }", 'use "20 ms", { uniform'),
        ("[[hosts]]\nstep_time = { exponential = '3 h' }", "unknown unit; use ns, us, ms or s"),
        ("[[hosts]]\nstep_time = '-3 ms'", "step_time = '-3 ms': must be 0 or more"),
        ("[[stragglers]]\nworkers = [0]", "stragglers[0]: slowdown is missing"),
        ("[[stragglers]]\nslowdown = 2", "stragglers[0]: name the workers"),
        ("[[stragglers]]\nslowdown = -2", "slowdown = -2: must be a number above 0"),
        ("[[stragglers]]\nworkers = 3\nslowdown = 2", "workers = 3: must be a list of ranks"),
        ("[[stragglers]]\nworkers = [-1]\nslowdown = 2", "workers = [-1]: must be a list of ranks"),
        (
            "[[hosts]]\ncount = 2\n[[stragglers]]\nworkers = [2]\nslowdown = 2",
            "only 2 hosts, so ranks are 0 to 1",
        ),
        ("[[stragglers]]\nhost = 'a'\nslowdown = 2", "host = 'a': there is no such group of hosts"),
        ("[[hosts]]\nname = 'laptop'\n[[stragglers]]\nhost = 'labtop'\nslowdown = 2", "did you mean laptop?"),
        (
            "[[stragglers]]\nworkers = [0]\nfrom = '2 s'\nto = '1 s'\nslowdown = 2",
            "to = '1 s': must be later than from",
        ),
        ("[[hosts", "not valid TOML: "),
        ("x = " + "[" * 5000, "not valid TOML: "),
    ],
)
def test_cluster_file_errors_are_one_line_and_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cluster(tmp_path, text)
    assert line(caught).startswith(f"{tmp_path / 'c.toml'}: ")
    assert message in line(caught)


def test_missing_or_unreadable_cluster_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for name, message in (
        ("none.toml", "no such file"),
        ("bytes.toml", "not valid TOML"),
        (".", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            Cluster.load(tmp_path / name)
        line(caught)


def test_too_few_hosts_says_how_many_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="6 workers, but only 4 hosts; use --workers 4 or fewer, raise a count"
    ) as caught:
        cluster(tmp_path, "[[hosts]]\ncount = 3\n[[hosts]]\ncount = 1").cost_model(6, 1, 0)
    assert "c.toml" in line(caught)


def test_the_examples_have_room_for_any_number() -> None:
    for path in sorted(EXAMPLES.glob("*.toml")):
        for workers in (1, 4, 64):
            costs = Cluster.load(path).cost_model(workers, 1, 0)
            assert all(costs.step_time(rank, 0.0) > 0 for rank in range(workers)), path


# Sites


TWO = """
[[hosts]]
count = 2
site = "a"
bandwidth = "100 MB/s"
latency = "1 ms"
[[hosts]]
site = "b"
bandwidth = "100 MB/s"
latency = "1 ms"
[[sites]]
name = "b"
bandwidth = "1 MB/s"
latency = "20 ms"
"""


def test_workers_are_assigned_to_sites_in_group_order(tmp_path: Path) -> None:
    """In the order of their groups, those without a worker included; without sites, nobody is anywhere."""
    assert cluster(tmp_path, TWO).ranks_by_site(5) == {"a": [0, 1], "b": [2, 3, 4]}
    assert cluster(tmp_path, TWO).ranks_by_site(2) == {"a": [0, 1], "b": []}
    three = '[[hosts]]\ncount = 1\nsite = "x"\n[[hosts]]\ncount = 2\nsite = "y"\n[[hosts]]\nsite = "x"'
    assert cluster(tmp_path, three).ranks_by_site(5) == {"x": [0, 3, 4], "y": [1, 2]}
    assert cluster(tmp_path, "[[hosts]]\ncount = 3").ranks_by_site(3) == {}


FAR = TWO + '[[sites]]\nname = "a"\nbandwidth = "2 MB/s"\nlatency = "300 ms"\n'


def test_a_message_between_sites_passes_both_links(tmp_path: Path) -> None:
    """It is as late as all latencies together, and as slow as the narrowest link; inside there are none."""
    sent = (W0, W1, MB, 0.0), (W0, W2, MB, 1.0)
    assert arrivals(costs(tmp_path, TWO, workers=4), *sent) == pytest.approx([0.002 + 0.01, 2.0 + 0.022])
    for source, target in ((W0, W2), (W2, W0)):
        these = costs(tmp_path, FAR, workers=4)
        assert arrivals(these, (source, target, MB, 0.0)) == pytest.approx([0.002 + 0.300 + 0.020 + 1.0])


def test_all_hosts_of_a_site_share_its_link(tmp_path: Path) -> None:
    """Two that send to two at the same time take twice as long; the other way is free meanwhile."""
    sent = (W0, W2, MB, 0.0), (W1, ("worker", 3), MB, 0.0), (W2, W0, MB, 0.0)
    assert arrivals(costs(tmp_path, TWO, workers=4), *sent) == pytest.approx([1.022, 2.022, 1.022])
    # Out of a at 2 MB/s, one after the other, and into b at 1 MB/s: the second waits there.
    assert arrivals(costs(tmp_path, FAR, workers=4), *sent[:2]) == pytest.approx([1.322, 2.322])


def test_a_site_takes_messages_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    """What is far away when it is sent does not hold the link of the other site for so long."""
    third = FAR + '[[hosts]]\ncount = 1\nsite = "c"\nlatency = "1 ms"\nbandwidth = "100 MB/s"\n'
    these = costs(tmp_path, third.replace('site = "b"', 'site = "b"\ncount = 2'), workers=5)
    sent = (W0, W2, MB, 0.0), (("worker", 4), ("worker", 3), MB, 0.1)
    # The one from c is at b at 0.122 s and through at 1.122 s; that from a is there at 0.322 s, and waits.
    assert arrivals(these, *sent) == pytest.approx([2.122, 1.122])


def test_a_server_without_a_site_is_reached_over_the_site_link(tmp_path: Path) -> None:
    """And one at a site is on the same side of it as the workers there."""
    assert arrivals(costs(tmp_path, TWO), (W2, S0, MB, 0.0)) == pytest.approx([0.021 + 1.0])
    near = TWO + '[servers]\nsite = "b"\n'
    assert arrivals(costs(tmp_path, near), (W2, S0, MB, 0.0)) == pytest.approx([0.001 + 0.01])
    assert arrivals(costs(tmp_path, near), (W0, S0, MB, 0.0)) == pytest.approx([0.021 + 1.0])


def test_collectives_pass_the_links_of_sites(tmp_path: Path) -> None:
    """Slices, codes and copies of all workers of a site share its link; inside a site nothing passes it."""
    these = costs(tmp_path, TWO, workers=5)
    everyone, inside, firsts = range(5), [2, 3, 4], [0, 2]
    assert these.all_reduce(inside, MB) == pytest.approx(2 * 0.002 + 4 / 3 * 0.01)
    assert these.all_reduce(firsts, MB) == pytest.approx(2 * 0.022 + 1.0)
    assert these.all_reduce(everyone, MB) == pytest.approx(2 * 0.022 + 2 * 3 * 2 / 5)
    assert these.all_gather(firsts, [MB, MB // 2]) == pytest.approx(0.022 + 1.0)
    assert these.all_gather(everyone, [MB] * 5) == pytest.approx(0.022 + 3 * 2)
    assert these.broadcast(everyone, 0, MB) == pytest.approx(2 * 0.022 + 3.0)
    assert these.broadcast(everyone, 2, MB) == pytest.approx(2 * 0.022 + 2.0)
    assert these.broadcast(inside, 2, MB) == pytest.approx(2 * 0.002 + 0.02)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=8))
def test_without_limits_sites_cost_nothing(places: list[int]) -> None:
    """Links that are free change no time: the cost is that of the hosts alone, to the last bit."""
    hosts = [Host(site=str(place), count=1, bandwidth=1e6, latency=0.01) for place in places]
    names = dict.fromkeys(host.site for host in hosts)
    plain = Cluster(hosts=tuple(hosts)).cost_model(len(hosts), 0, 0)
    sites = Cluster(hosts=tuple(hosts), sites=tuple(map(Site, names))).cost_model(len(hosts), 0, 0)
    ranks = range(len(hosts))
    assert plain.all_reduce(ranks, MB) == sites.all_reduce(ranks, MB)
    assert plain.all_gather(ranks, [MB] * len(hosts)) == sites.all_gather(ranks, [MB] * len(hosts))
    assert plain.broadcast(ranks, 0, MB) == sites.broadcast(ranks, 0, MB)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[hosts]]\ncount = 1\nsite = "a"\n[[hosts]]', "hosts[1]: site is missing; if one group has a site"),
        ("[[hosts]]\nsite = 3", "site = 3: must be a text"),
        ('[[sites]]\nname = "a"', "sites[0]: name = 'a': no group of hosts is at such a site"),
        (
            TWO + '[[sites]]\nname = "c"',
            "name = 'c': no group of hosts is at such a site; the sites here are a",
        ),
        (TWO + '[[sites]]\nname = "b"', "sites[1]: name = 'b': this site is listed twice"),
        (TWO + "[[sites]]", "sites[1]: name: no group of hosts is at such a site"),
        (TWO + '[[sites]]\nname = "a"\nlatncy = "1 s"', "unknown key 'latncy'; did you mean latency?"),
        (TWO + '[[sites]]\nname = "a"\nbandwidth = "1 s"', "bandwidth = '1 s': unknown unit"),
        (TWO + '[servers]\nsite = "c"', "servers: site = 'c': no group of hosts is there"),
        ("sites = 3", "sites must be a list of tables"),
    ],
)
def test_a_mistake_about_sites_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    test_cluster_file_errors_are_one_line_and_name_the_file(tmp_path, text, message)


def test_a_colocated_server_is_where_its_worker_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave out their bandwidth and latency and site"):
        cluster(tmp_path, TWO + '[servers]\nsite = "b"').cost_model(4, 4, 0, colocated=True)
    these = cluster(tmp_path, TWO).cost_model(4, 4, 0, colocated=True)
    assert arrivals(these, (W2, ("server", 3), MB, 0.0)) == pytest.approx([0.002 + 0.01])
