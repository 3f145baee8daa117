"""Events: what happens in a run, as a tagged union of small records.

A node logs events with `Node.log`, and the coordinator logs its own. The run folder keeps them as JSON lines
(`record/event_file.py`):

    ["server 0",1.234567,["apply",17,0,23,9,1,19220]]

The first line of a file names the version of the format and the fields of every kind of event. Change
`VERSION` when a field changes its meaning or its position.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import msgspec

VERSION = 1
EventPolicy = Literal["all", "sample", "off"]
POLICIES: tuple[EventPolicy, ...] = get_args(EventPolicy)


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base class of all events."""

    frequent: ClassVar[bool] = False  # one or more a step: recorded in part only, if the run samples events


# --- training ---------------------------------------------------------------------------------------


class StepDone(Event, frozen=True, tag="step"):
    """A worker has taken a step."""

    frequent: ClassVar[bool] = True

    step: int  # of this worker, counted from 1
    samples: int  # examples since its last step
    compute_s: float
    wait_s: float


class MicroBatch(Event, frozen=True, tag="micro-batch"):
    """A stage of a divided model has computed one micro-batch.

    `direction` is forward, backward, or weights: the weight gradients that are computed when the gradient of
    the stage's input is on its way. In simulation they are a part of backward. Under a schedule that computes
    them later, a pass without them is input.
    """

    frequent: ClassVar[bool] = True

    direction: str
    stage: int
    began: float  # seconds since the run began
    seconds: float
    segment: int = 0  # of the model: a stage may have several
    micro_batch: int = 0  # of its batch


class PeriodChosen(Event, frozen=True, tag="period"):
    """`local:auto` has chosen how many steps workers take between two averages."""

    period: int
    communication_s: float
    step_s: float


class LocalStepsChosen(Event, frozen=True, tag="local steps"):
    """A worker has chosen how many steps it takes before its next push, from its speed / the fastest."""

    step: int
    steps: int
    share: float


class ResidualLeft(Event, frozen=True, tag="residual"):
    """A worker has sent its last broadcast; the norm of the rest is still in its residual."""

    messages: int
    tau: float
    norm: float | None


class ReplicaDigest(Event, frozen=True, tag="replica"):
    """The digest of the updates that a worker's replica contains, after the last broadcast."""

    peer: str
    digest: str


class UpdatesLost(Event, frozen=True, tag="lost updates"):
    """How many of the updates to shared memory that were counted were overwritten."""

    counted: int
    lost: int
    share: float


# --- servers ----------------------------------------------------------------------------------------


class Applied(Event, frozen=True, tag="apply"):
    """A server has applied a push. Without a server: a worker has applied its own update."""

    frequent: ClassVar[bool] = True

    version: int | None = None
    worker: int | None = None
    sequence: int | None = None
    step: int | None = None
    staleness: int = 0
    bytes: int | None = None


class Dropped(Event, frozen=True, tag="drop"):
    """A server has dropped a push that was too stale or too late."""

    frequent: ClassVar[bool] = True

    version: int
    worker: int
    sequence: int
    step: int
    staleness: int
    bytes: int


class Pulled(Event, frozen=True, tag="pull"):
    """A server has sent its parameters to a worker that pulled without a push."""

    frequent: ClassVar[bool] = True

    worker: int
    version: int


class Refused(Event, frozen=True, tag="refused"):
    """A server could not decode a push and counted it as zero."""

    worker: int
    sequence: int
    why: str


# --- messages and membership, as a node sees them ---------------------------------------------------


class Delivered(Event, frozen=True, tag="deliver"):
    """A node has received a message."""

    frequent: ClassVar[bool] = True

    sender: str
    sequence: int
    kind: str


class DeliveredLate(Event, frozen=True, tag="late"):
    """A node has discarded a message whose sender had died."""

    frequent: ClassVar[bool] = True

    sender: str
    sequence: int
    kind: str


class PeerLeft(Event, frozen=True, tag="left"):
    """A node knows that another one has left, and uses none of its memory any longer."""

    peer: str
    incarnation: int
    reason: str


class PeerJoined(Event, frozen=True, tag="joined"):
    """A node knows that another one has joined."""

    peer: str


# --- the coordinator --------------------------------------------------------------------------------


class NodeJoined(Event, frozen=True, tag="join"):
    """A node has joined the run."""

    peer: str
    incarnation: int


class NodeLeft(Event, frozen=True, tag="leave"):
    """A node has left the run; so many of the batches that it had leased go to others."""

    peer: str
    incarnation: int
    reason: str
    returned: int


class LeaseTaken(Event, frozen=True, tag="lease"):
    """A worker has leased batches `first` to `first + count` of an epoch."""

    frequent: ClassVar[bool] = True

    peer: str
    loader: int
    epoch: int
    first: int
    count: int


class LeaseReturned(Event, frozen=True, tag="give back"):
    """A worker has returned batches that it will not train on."""

    peer: str
    loader: int
    returned: int


class RunFailed(Event, frozen=True, tag="fail"):
    """The run has failed."""

    message: str


# --- reports ----------------------------------------------------------------------------------------


class Totals(Event, frozen=True, tag="totals"):
    """What a node has done since it joined."""

    steps: int = 0
    samples: int = 0
    bytes_sent: int = 0
    bytes_between: int = 0  # of these, to other sites
    compute_s: float = 0.0
    wait_s: float = 0.0


class Metrics(Event, frozen=True, tag="metrics", gc=True):
    """Numbers that the script has logged; they go to `metrics.jsonl`."""

    step: int
    values: dict[str, int | float | str | bool | None]


class Note(Event, frozen=True, tag="note", gc=True):
    """An event of a user's own strategy."""

    name: str
    values: dict[str, Any] = {}


class Gap(Event, frozen=True, tag="gap"):
    """So many events of this node are not recorded: its buffer was full, or they could not be encoded."""

    events: int


AnyEvent = (
    StepDone | MicroBatch | PeriodChosen | LocalStepsChosen | ResidualLeft | ReplicaDigest | UpdatesLost
    | Applied | Dropped | Pulled | Refused | Delivered | DeliveredLate | PeerLeft | PeerJoined | NodeJoined
    | NodeLeft | LeaseTaken | LeaseReturned | RunFailed | Totals | Metrics | Note | Gap
)  # fmt: skip


class Record(msgspec.Struct, frozen=True, array_like=True):
    """An event with the node that logged it and the time since the run began, in seconds."""

    node: str
    t: float
    event: AnyEvent


class EventHeader(msgspec.Struct, frozen=True):
    """The first line of an event file."""

    format: str = "polyrhythm events"
    version: int = VERSION
    events: EventPolicy = "all"
    fields: dict[str, list[str]] = {}


def kind(event: Event | type[Event]) -> str:
    """The tag of an event, such as "apply"."""
    return str(event.__struct_config__.tag)


def field_names() -> dict[str, list[str]]:
    """The fields of every kind of event, in the order in which they are encoded."""
    return {kind(each): list(each.__struct_fields__) for each in get_args(AnyEvent)}
