"""The contract between a loop and whoever drives it: a step is data, a loop is a stateless state machine.

The engine asks `next` for a `Step`, runs its op somewhere (here, merged with others, as a graph, in another process,
under autograd) and hands the `Result` to `advance`. `next` is pure: asked twice, it gives the same step.

Deliberately absent: schedulers, devices, and at run time even torch: a tensor is what has a shape and a dtype.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeVar

from .request import ATTENTION, KERNELS, Request

if TYPE_CHECKING:
    from torch import Tensor


Tensors = Mapping[str, "Tensor"]
Op = Callable[..., Tensors]
Key = Hashable
S = TypeVar("S")


class Unit(Enum):
    """What kind of work a step is, for progress, prices and metrics."""

    EMBED = "embed"  # a small input to features that any request may reuse
    ENCODE = "encode"
    DENOISE = "denoise"
    TOKEN = "token"  # the next token of a sequence
    CHUNK = "chunk"  # the next chunk of a video that is made from its past
    DECODE = "decode"
    REWARD = "reward"  # what a model thinks of a clip


@dataclass(frozen=True, slots=True)
class Binding:
    """What a step is bound to besides its components: where it runs, in which precision, by which kernels.

    `attention` and `kernels` are the request's, so that a step of another choice never shares its call or graph;
    `compile` is the model's: compiled blocks give other bits. So are `adapters`, which says which ones, by content, and
    how much they count.
    """

    device: str
    precision: str
    attention: str = ATTENTION
    kernels: str = KERNELS
    compile: bool = False
    adapters: str = ""


@dataclass(frozen=True, slots=True)
class Ref:
    """A slot of the request's own storage: constant conditioning that stays where it is and is never concatenated."""

    slot: str


@dataclass(frozen=True, slots=True)
class Page:
    """What one page of a pool holds: name, shape and precision of each tensor. `tokens` of a sequence fill it."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Append:
    """A lease that keeps all its tokens, `limit` at most."""

    limit: int


@dataclass(frozen=True, slots=True)
class Window:
    """A lease that keeps the `last` pages committed and, for good, the first `sinks`; a step writes one page."""

    last: int
    sinks: int = 0


@dataclass(frozen=True, slots=True)
class PoolRef:
    """Pages leased to the request, by the `lease`'s name; they are its own while the stage lasts.

    The step reads `committed` tokens and may write the `new` ones after them, nothing else: so it can be run again, and
    what it wrote counts once the loop's state says that it is committed.
    """

    lease: str
    page: Page
    keep: Append | Window
    committed: int
    new: int = 1


@dataclass(frozen=True, slots=True)
class Step:
    """One unit of work as data: `op(parts, **tensors, **handles, **leases, **static)` returns tensors.

    Attributes:
        op: an importable pure function.
        uses: components it calls; their versions enter the key.
        tensors: rows on dim 0.
        handles: storage lent to the op, as a tuple with one tensor a request of the call.
        leases: pages lent to the op. For `kv` it gets the storage of the pool, the same for all requests of the call
            (`kv`: tensors by name, pages on dim 0), and two rows: the pages in the order of what they hold (`kv_pages`,
            int32 [1, C]) and how many tokens there are to read (`kv_length`, int32 [1]).
        static: hashable arguments; part of the key.
        reads: results that decide what comes next; the host waits for them, `advance` gets them as Python lists, a
            value a row.
        finite: what to call the step where its result `finite` (bool [B]) is false, which ends the request. Nothing
            waits for it: it is looked at when the device has come so far, at the latest when the stage ends.
    """

    op: Op
    uses: tuple[str, ...]
    binding: Binding
    tensors: Tensors
    handles: Mapping[str, Ref] = field(default_factory=dict)
    static: Mapping[str, Hashable] = field(default_factory=dict)
    unit: Unit = Unit.ENCODE
    reads: tuple[str, ...] = ()
    finite: str = ""
    leases: Mapping[str, PoolRef] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to run until `feed` has given `port` an item or closed it."""

    port: str


@dataclass(frozen=True, slots=True)
class Result:
    """What an op returned. `host` holds the step's `reads` as Python lists."""

    tensors: Tensors
    host: Mapping[str, Sequence[float]] = field(default_factory=dict)


class Env(Protocol):
    """What a loop may see while it initialises: the card's settings, its binding, host-side parts as a tokenizer."""

    @property
    def binding(self) -> Binding: ...

    @property
    def settings(self) -> Mapping[str, object]: ...

    def part(self, name: str) -> object: ...


class Loop(Protocol[S]):
    """A stateless state machine; `S` is its typed, serialisable state (a dataclass, `state_type`)."""

    semantics: str
    state_type: type[S]

    def init(self, request: Request, inputs: Tensors, env: Env) -> S:
        """The first state. Draws the request's noise; host preprocessing happens here."""

    def next(self, state: S) -> Step | Wait | None:
        """The next step, or `Wait`, or None when done. Pure."""

    def advance(self, state: S, result: Result) -> tuple[S, Tensors]:
        """The state after `result`, and what is emitted now. Launches no kernels but owned copies."""

    def feed(self, state: S, port: str, item: Tensors | None) -> S:
        """Another loop's output arrives at `port`; None closes it."""

    def outlook(self, state: S) -> Sequence[tuple[Unit, int]]:
        """The work left, an upper bound: how many steps of which unit."""

    def finish(self, state: S) -> Tensors:
        """The slots this loop writes. Selects; launches nothing."""


def key_of(step: Step, version: Callable[[str], int], storage: Tensors) -> Key:
    """Steps with equal keys may share one call, one captured graph, one compiled form.

    `version` gives a component's version, `storage` is what the step's handles point to. Of a lease counts what its
    pages are and, as the shape of a row, how many there can be; never how full they are.
    """
    pages = tuple([(name, ref.page) for name, ref in step.leases.items()]) if step.leases else ()
    return (
        step.op,
        tuple([(name, version(name)) for name in step.uses]),
        step.binding,
        tuple([(name, t.shape, t.dtype) for name, t in step.tensors.items()]),
        tuple([(name, (t := storage[ref.slot]).shape, t.dtype) for name, ref in step.handles.items()]) + pages,
        tuple(step.static.items()),
    )


def versionless(key: Key) -> Key:
    """The key without its components' versions: what stays the same when weights are replaced where they lie."""
    assert isinstance(key, tuple)
    op, uses, *rest = key
    return (op, tuple([name for name, _ in uses]), *rest)
