"""Work on a device recorded once, and replayed without the host that asked for it.

    capture = capture_on("cuda")
    recording = capture.record(lambda: op(x))      # x is read where it lies: fill it anew before each replay
    recording.replay()
    recording.outputs["out"]                       # the same storage after every replay

The recordings of one capture share its memory for intermediate results, so only one of them runs at a time: whoever
replays calls `follow` first, and copies the outputs out before anything else is replayed.

Deliberately absent: what to record, when, and for how long (`engine.graphs`).
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Protocol

import torch

from ..errors import BackendError
from ..loop import Tensors

Run = Callable[[], Tensors]


class Recording(Protocol):
    """Recorded work."""

    @property
    def outputs(self) -> Tensors:
        """What the work returned; a replay overwrites it."""

    def replay(self) -> None:
        """Do the work again, on what its inputs hold now."""


class Capture(Protocol):
    """Makes recordings that share memory."""

    @property
    def bytes(self) -> int:
        """Bytes its recordings hold on the device, inputs left out."""

    def record(self, run: Run) -> Recording:
        """Record what `run` does; it may be called several times. Raises whatever forbids recording it."""

    def follow(self) -> None:
        """What this thread asks of the device from now on waits for what others have replayed here."""

    def release(self) -> None:
        """The last recording is gone: give the memory back to the device."""


class CudaRecording:
    """A graph and what it writes to."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Tensors) -> None:
        self.outputs = outputs
        self._graph = graph

    def replay(self) -> None:
        """One launch on the current stream."""
        self._graph.replay()


class _Studio:
    """Where a device's recordings are made, one at a time.

    Libraries keep a workspace for every stream that ever used them, 33 MiB of cuBLAS's on an H200: so all recordings
    take one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.stream = torch.cuda.Stream(device)


_studio = cache(_Studio)


class CudaCapture:
    """CUDA graphs with one memory pool, recorded on a stream of their own. Regions that inductor compiled are fine."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        with torch.cuda.device(self._device):
            self._studio = _studio(torch.device("cuda", torch.cuda.current_device()))
            self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.Stream | None = None

    @property
    def bytes(self) -> int:
        """Of the pool's segments: what intermediates and outputs take, whoever of the recordings uses them."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))

    def record(self, run: Run) -> CudaRecording:
        """Runs it once to warm the stream up, and once to record it."""
        with torch.cuda.device(self._device), self._studio.lock:
            self._warm_up(run)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._studio.stream):
                # errors of this thread alone: others may allocate and load weights meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = run()
                except BaseException:
                    self._abandon(graph)
                    raise
                self._end(graph)
            return CudaRecording(graph, outputs)

    def follow(self) -> None:
        """Streams are ordered by themselves as long as every thread uses the same one."""
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def release(self) -> None:
        """The pool's segments go back once no graph uses them."""
        torch.cuda.empty_cache()

    def _warm_up(self, run: Run) -> None:
        """Libraries make their handles and workspaces of a stream at first use, which cannot be recorded."""
        current = torch.cuda.current_stream()
        self._studio.stream.wait_stream(current)
        with torch.cuda.stream(self._studio.stream):
            run()
        current.wait_stream(self._studio.stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the allocator keeps for this stream would be of no use to any other

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except BaseException:
            self._stop_allocating()
            raise

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Leave the recording state; that the recording is invalid is known already."""
        with suppress(RuntimeError):
            graph.capture_end()
        self._stop_allocating()

    def _stop_allocating(self) -> None:
        """A recording that fails to end leaves its pool marked as in use, and memory would not be reused any more.

        torch has no public call for it; it raises where the mark is gone.
        """
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


def capture_on(device: str) -> Capture:
    """A new capture. Raises BackendError for a device that has none."""
    require_capture(device)
    return CudaCapture(device)


def require_capture(device: str) -> None:
    """Raise BackendError where work cannot be recorded."""
    if not device.startswith("cuda"):
        raise BackendError("captured graphs need a CUDA device", value=device, remedy='load with graphs="never"')
