"""The reply to a node that joins a run."""

from __future__ import annotations

from polyrhythm.coordination.membership import Membership
from polyrhythm.core.peer import Peer
from polyrhythm.core.plan import Plan
from polyrhythm.core.requests import Welcome
from polyrhythm.core.resolve import ResolvedStrategy


def welcome(
    plan: Plan, strategy: ResolvedStrategy, membership: Membership, peer: Peer, cohort: int
) -> Welcome:
    """The reply to a node that has joined; the BatchNorm policy is known by now."""
    assert plan.batch_norm is not None
    return Welcome(
        strategy=strategy,
        seed=plan.seed,
        peers=[(each.role, each.rank, place) for each, place in membership.announced_to(peer).items()],
        workers=plan.workers,
        incarnation=membership.incarnations[peer],
        batch_norm=plan.batch_norm,
        cohort=cohort,
        far=_far(plan, peer),
    )


def _far(plan: Plan, peer: Peer) -> list[tuple[str, int]]:
    """Role and rank of all nodes at other sites."""
    counts = {"worker": plan.workers, "server": plan.servers or 0} if plan.sites else {}
    nodes = [Peer(role, rank) for role, count in counts.items() for rank in range(count)]
    site_of = {rank: name for name, ranks in plan.sites.items() for rank in ranks}

    def site(node: Peer) -> str:
        apart = node.role == "server" and plan.servers_at is not None
        return plan.servers_at or "" if apart else site_of[node.rank]

    return [(each.role, each.rank) for each in nodes if site(each) != site(peer)]
