"""Requests of nodes to the coordinator, and the replies.

`pack` and `unpack` turn a request into the kind and the fields of a message, and back.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from polyrhythm.core.errors import WireError
from polyrhythm.core.events import Totals, UpdatesLost
from polyrhythm.core.lease import Lease
from polyrhythm.core.message import Scalar
from polyrhythm.core.resolve import ResolvedStrategy

R = TypeVar("R")
Location = tuple[str, str, int]  # where a process is: its address, the id of its host, its arena there
NOWHERE: Location = ("", "", -1)


class Request(msgspec.Struct, Generic[R], frozen=True):
    """Base class of all requests; `R` is the type of the reply."""

    reply: ClassVar[Any] = None  # the same type, for `unpack_reply`


# --- replies ----------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True):
    """The state of the run, for a node that has joined."""

    strategy: ResolvedStrategy
    seed: int
    peers: list[tuple[str, int, Location]]  # role, rank and location of all nodes that have been announced
    workers: int  # that the run began with
    incarnation: int
    batch_norm: str
    cohort: int  # the number of the present cohort, see `coordination.leases`
    far: list[tuple[str, int]]  # role and rank of all nodes at other sites


class PreparedReply(msgspec.Struct, frozen=True):
    """What worker 0's script has seeded, see `session.seeds`, and whether that of another worker differs."""

    seed: int | None
    differ: bool = False
    settings: str = ""  # in words, how the settings of a worker differ from those of worker 0


class LeaseReply(msgspec.Struct, frozen=True):
    lease: Lease | None  # None: the epoch is over


class DataPosition(msgspec.Struct, frozen=True):
    """Which batches of a loader the workers have leased so far; of several positions the last one counts."""

    number: int  # how many positions the coordinator has given out
    leased: dict[int, int]  # by epoch: how many batches
    returned: list[Lease]  # those of them that wait for another worker
    left: list[Lease] = []  # those that wait for another worker of the same epoch


class EpochShare(msgspec.Struct, frozen=True):
    """The workers that share an epoch, which epoch it is, and how many cohorts there were before this one."""

    ranks: list[int]
    number: int
    epoch: int


class ShareReply(msgspec.Struct, frozen=True):
    share: EpochShare | None  # None: for this worker the epoch is over


class Gathered(msgspec.Struct, frozen=True):
    values: list[bytes]  # by rank, of the workers that are alive
    number: int  # of gathers before it in this run


class Farewell(msgspec.Struct, frozen=True):
    last: bool  # this worker has to send the final parameters


class WorkerNames(msgspec.Struct, frozen=True):
    workers: list[str]


class ReplicaDifference(msgspec.Struct, frozen=True):
    """Where a replica differs from that of another worker: in a setting of its optimizer, or in a tensor."""

    other: str = ""  # the other worker; "": they are equal
    group: int = 0
    setting: str = ""
    theirs: str = ""  # the value of the setting
    tensor: int = 0
    count: int = 0  # how many tensors differ
    rounding: bool = False  # they differ by no more than rounding
    batches: int | None = None  # the replicas are equal, but the other worker has got so many batches


class TensorSummary(msgspec.Struct, frozen=True, array_like=True):
    """What replicas compare of a tensor."""

    checksum: int  # of its bits
    projection: float  # the sum of its elements with pseudo-random weights, the same on all workers
    norm: float


# --- requests ---------------------------------------------------------------------------------------


class JoinRun(Request[Welcome], frozen=True, tag="join"):
    """Joins the run, and proposes a strategy and a batch norm in case none is set. The reply comes when all
    nodes are there."""

    reply: ClassVar[Any] = Welcome

    strategy: ResolvedStrategy
    batch_norm: str
    location: Location = NOWHERE


class Prepared(Request[PreparedReply], frozen=True, tag="prepared"):
    """The node has built its model. The reply comes when all nodes have."""

    reply: ClassVar[Any] = PreparedReply

    layout: str  # the hash of the layout
    part: str = ""  # the name of the part of the model that this node holds; "" is all of it
    seed: int | None = None  # what the script has seeded
    outline: list[str] = []  # its first parameters in words, to name what differs
    settings: list[tuple[str, dict[str, str]]] = []  # of parameter groups and schedulers, with their names


class TakeLease(Request[LeaseReply], frozen=True, tag="lease"):
    """Requests the next batches of an epoch."""

    reply: ClassVar[Any] = LeaseReply

    loader: int
    epoch: int
    batches: int  # of the epoch
    unseen: int  # leased batches that the worker has loaded and not trained on yet
    steps: int
    samples: int


class ReturnLease(Request[None], frozen=True, tag="return lease"):
    """Returns leased batches. `peeked`: nobody has trained on anything of this lease."""

    loader: int
    leases: list[Lease]
    peeked: bool = False


class WhereIsData(Request[DataPosition], frozen=True, tag="where"):
    """Requests which batches of a loader have been leased."""

    reply: ClassVar[Any] = DataPosition

    loader: int


class ResumeData(Request[None], frozen=True, tag="resume data"):
    """The worker continues from a saved position of a loader; the batches in `held` are its own.

    Where batches are leased, the reply comes when all have loaded theirs, except to a replacement.
    """

    loader: int
    epoch: int
    batches: int  # of this epoch that the worker has trained on
    position: DataPosition | None = None  # None in lockstep
    held: list[Lease] = []


STREAM = "stream "


class OrderDrawn(Request[None], frozen=True, tag="order"):
    """The worker has drawn the order of an epoch, and this is a hash of how it begins."""

    loader: int
    epoch: int
    digest: str  # begins with STREAM if it is of a batch that was read
    data: str = ""  # what it sees of the training set, see `session.dataset_identity`


class ShareEpoch(Request[ShareReply], frozen=True, tag="share epoch"):
    """Requests the workers that share an epoch. The reply comes when it begins."""

    reply: ClassVar[Any] = ShareReply

    loader: int
    epoch: int


class ExamplesDue(Request[None], frozen=True, tag="due"):
    """How many examples this worker will have trained on when it has finished its share of the epoch."""

    samples: int


class BeginEpoch(Request[None], frozen=True, tag="epoch"):
    """The script begins an epoch, of `count`."""

    epoch: int
    count: int


class LogMetrics(Request[None], frozen=True, tag="metrics"):
    """The script logs numbers."""

    t: float
    step: int
    values: dict[str, Scalar]
    reduce: str = "mean"  # how values of several workers become one, see `coordination.metrics`
    samples: int = 0  # that this worker has trained on so far


class Gather(Request[Gathered], frozen=True, tag="gather"):
    """Sends bytes to all workers. The reply, with those of all workers, comes when all have sent theirs."""

    reply: ClassVar[Any] = Gathered

    point: str  # the call in the script; all workers must be at the same one
    value: bytes
    path: str = ""  # the lines of the script that have led to the call
    epochs: int = 0  # of training data that the script has begun
    steps: int = 0  # that this worker has taken


class EnterCall(Request[None], frozen=True, tag="call"):
    """The script makes a call that all workers make together."""

    point: str  # equal on all workers
    text: str  # the call with its line in the script
    exchanges: int = 0  # that this worker has begun in training


class FileWritten(Request[None], frozen=True, tag="written"):
    """The script has written a file by `torch.save` or `session.save`, after so many steps of this worker."""

    path: str
    step: int = 0
    inode: int = 0  # by which it is found when the script has renamed it
    once: bool = False  # no other worker writes it: `session.save`


class ShowNote(Request[None], frozen=True, tag="note"):
    """Something that a person should know about this run, in one line."""

    text: str


class LastStep(Request[None], frozen=True, tag="last step"):
    """The script is over, after so many steps."""

    steps: int


class StepsDone(Request[None], frozen=True, tag="done"):
    """The worker has taken its last step, and has the replies to all its requests to others.

    The reply comes when that is true of all workers: from then on their training messages are complete.
    """


class LeaveRun(Request[Farewell], frozen=True, tag="bye"):
    """The node has finished."""

    reply: ClassVar[Any] = Farewell

    result: bool = True  # False: the workers have no final parameters to send


class TrainedBy(Request[None], frozen=True, tag="trained by"):
    """The script trains by another tool than `session.prepare`."""

    tool: str


class WhoIsLate(Request[WorkerNames], frozen=True, tag="late"):
    """Requests the workers that others wait for, at the start of an epoch or at the end."""

    reply: ClassVar[Any] = WorkerNames


class WhoIsLost(Request[WorkerNames], frozen=True, tag="lost"):
    """Requests the workers that have died and will not be replaced."""

    reply: ClassVar[Any] = WorkerNames


class CompareReplica(Request[ReplicaDifference], frozen=True, tag="compare"):
    """Reports a worker's replica after a step. The reply says if it differs from that of another worker."""

    reply: ClassVar[Any] = ReplicaDifference

    part: int  # which optimizer of the script
    step: int
    tensors: list[TensorSummary]
    settings: list[dict[str, str]]  # of each parameter group
    over: bool = False  # the script has ended
    batches: int = 0  # that the script has got so far


class StepsTaken(Request[None], frozen=True, tag="steps"):
    """How many steps a worker had taken when it was asked to stop. Sent one way."""

    steps: int


class OfferResult(Request[Farewell], frozen=True, tag="offer"):
    """The run has failed, and this worker has parameters: of `source`, which is itself, all workers or the
    servers."""

    reply: ClassVar[Any] = Farewell

    source: str


class NodeFailed(Request[None], frozen=True, tag="failed"):
    """The node cannot continue."""

    error: str
    exit_code: int
    waited: bool = False  # too long for a worker that is named in the error


class ScriptAt(Request[None], frozen=True, tag="script at"):
    """The run has failed, and this is the line in which the script of a worker was then."""

    place: str


class ReleaseMemory(Request[None], frozen=True, tag="release"):
    """The node no longer uses memory of a worker that has died. Sent one way."""

    rank: int
    incarnation: int


class Report(Request[None], frozen=True, tag="report"):
    """A node's totals so far, and its events since the last report. Sent one way."""

    totals: Totals | None = None
    staleness: dict[int, int] = {}  # how many updates were applied with each staleness
    dropped: int = 0
    updates_lost: UpdatesLost | None = None
    lines: bytes = b""  # events as JSON lines


REQUESTS: dict[str, type[Request[Any]]] = {
    str(each.__struct_config__.tag): each
    for each in (
        JoinRun, Prepared, TakeLease, ReturnLease, WhereIsData, ResumeData, OrderDrawn, ShareEpoch,
        ExamplesDue, BeginEpoch, LogMetrics, Gather, EnterCall, FileWritten, ShowNote,
        LastStep, StepsDone, LeaveRun, WhoIsLate, WhoIsLost, CompareReplica, StepsTaken, OfferResult,
        NodeFailed, ScriptAt, ReleaseMemory, Report, TrainedBy,
    )
}  # fmt: skip


def kind_of(request: Request[Any]) -> str:
    """The kind of the message that carries a request."""
    return str(request.__struct_config__.tag)


def pack(request: Request[Any]) -> tuple[str, dict[str, Any]]:
    """The kind and the fields of the message that carries a request."""
    return kind_of(request), msgspec.structs.asdict(request)


def unpack(kind: str, fields: dict[str, Any]) -> Request[Any]:
    """The request that `pack` made these from."""
    if kind not in REQUESTS:
        raise WireError(f"unknown request to the coordinator: {kind!r}")
    return _convert({**fields, "type": kind}, REQUESTS[kind], kind)  # type: ignore[no-any-return]


def pack_reply(reply: Any) -> dict[str, Any]:
    """The fields of the message that carries a reply."""
    return {} if reply is None else msgspec.structs.asdict(reply)


def unpack_reply(request: Request[R], fields: dict[str, Any]) -> R:
    """The reply to a request."""
    reply = None if request.reply is None else _convert(fields, request.reply, "the reply")
    return reply  # type: ignore[return-value]


def _convert(fields: dict[str, Any], to: Any, what: str) -> Any:
    try:
        return msgspec.convert(fields, to, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise WireError(f"{what!r} has wrong fields: {error}") from None
