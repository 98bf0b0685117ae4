"""From a name to a model that is ready to run: what was asked for is checked, no weight is read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .. import catalog
from ..backends.capture import require_capture
from ..backends.device import pick, preferred_dtype
from ..backends.precision import DTYPES
from ..card import Card, derive, experts
from ..engine.graphs import Graphs
from ..engine.instance import Instance
from ..engine.residence import MEMORY
from ..engine.store import Store
from ..errors import RequestError
from ..files import cache_folder
from ..loops.denoise import SOLVERS
from ..weights import lora as adapters
from ..weights.hub import is_local
from ..weights.load import load_component
from .model import Model, denoising

GRAPHS = ("auto", "always", "never")


def load(
    source: str | Path,
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str | Mapping[str, str] | None = None,
    sampler: str | None = None,
    store: Store | None = None,
    memory: str = "auto",
    graphs: str = "auto",
    compile: bool = False,
    lora: str | Path | Sequence[str | Path] = (),
) -> Model:
    """A model from a shipped id, a Diffusers folder or a hub name.

    Args:
        revision: branch, tag or commit of a hub name.
        device: "auto" takes the fastest of this machine.
        dtype: precision of the generator, or of components by name; by default the card's ("auto" on a card without
            a preference: bfloat16 on CUDA, float32 elsewhere; encoders and autoencoder float32). "float8" is bfloat16
            with the feed-forward layers in 8 bits, on CUDA from sm_89.
        sampler: "euler" or "unipc" instead of the card's, if its weights allow it.
        store: share components with other models.
        memory: "high" keeps weights on the device after their first use; "low" keeps them on the host and brings them
            for the steps that use them, the generator a layer at a time; "auto" is "high" where all weights fit in
            three quarters of the device's free memory, by their files' headers. Results are the same bit for bit.
        graphs: "always" captures denoising steps as CUDA graphs once they have run, which saves the host's time and
            takes device memory (at most `engine.graphs.LIMIT`); "auto" is "always" on CUDA unless memory is "low".
            Results are the same bit for bit. What cannot be captured runs eagerly: `Model.graphs.breaks` says what,
            and why.
        compile: compile the generator's blocks: faster, after some seconds at the first step of each shape. Results
            are close to those without, not the same, in `exact` mode too. Needs memory "high".
        lora: adapters of the generator, files in the layout of diffusers, ComfyUI or kohya: "style.safetensors", or
            "style.safetensors:0.8" to scale what it adds (0 is the model without it, bit for bit). Of a model with two
            experts, "transformer_2=style.safetensors" says whose it is. They run unmerged, in the generator's
            precision, which must not be "float8". An adapter that does not fit is refused.

    Raises WeightsError, CardError, RequestError or BackendError before any weight is read.
    """
    for what, value, choices in (("memory", memory, MEMORY), ("graphs", graphs, GRAPHS)):
        if value not in choices:
            raise RequestError(f"unknown {what}", value=value, choices=choices)
    if memory == "low" and (compile or graphs == "always"):
        raise RequestError(
            f"{'compiled blocks' if compile else 'captured graphs'} need weights that stay on the device",
            value="memory low",
            choices=("memory high", "memory auto"),
        )
    card = catalog.find(str(source), revision=revision)
    device = pick(device)
    card = _with_sampler(_with_precision(card, dtype, device), sampler)
    uses = _adapters(card, [lora] if isinstance(lora, (str, Path)) else lora)
    store = Store(prices=cache_folder() / "prices") if store is None else store
    instance = Instance(
        card,
        catalog.loops(card),
        store,
        device=device,
        locate=catalog.locate,
        prepare=catalog.preparation(card),
        memory=memory,
        compile=compile,
        adapters=uses,
    )
    return Model(_lasting(str(source)), instance, _graphs(graphs, memory, store, device))


def _adapters(card: Card, given: Sequence[str | Path]) -> tuple[adapters.Use, ...]:
    """The adapters, known to fit: shapes are compared with modules without weights."""
    uses = adapters.uses(given, experts(card))
    for use in uses:
        component = card.components[use.component]
        folder = catalog.locate(card, component, weights=False)
        outline = load_component(component, folder, "meta")
        assert isinstance(outline, torch.nn.Module)
        adapters.check(outline, use.adapter)
    return uses


def _graphs(choice: str, memory: str, store: Store, device: str) -> Graphs | None:
    """Raises BackendError where they are asked for and the device has none."""
    if choice == "auto":
        choice = "always" if device.startswith("cuda") and memory != "low" else "never"
    if choice == "never":
        return None
    require_capture(device)
    return Graphs(ledger=store.ledger(device))


def _lasting(source: str) -> str:
    """The source as it can be named from any folder: a local one by its absolute path."""
    return str(Path(source).expanduser().resolve()) if source not in catalog.SHIPPED and is_local(source) else source


def _with_sampler(card: Card, sampler: str | None) -> Card:
    if sampler is None:
        return card
    if sampler not in SOLVERS:
        raise RequestError("unknown sampler", value=sampler, choices=SOLVERS)
    return derive(card, loops={denoising(card): SOLVERS[sampler].semantics})


def _with_precision(card: Card, dtype: str | Mapping[str, str] | None, device: str) -> Card:
    asked = dict.fromkeys(experts(card), dtype) if isinstance(dtype, str) else dict(dtype or {})
    weighted = {name: component for name, component in card.components.items() if component.dtype}
    for name, value in asked.items():
        if value not in DTYPES:
            raise RequestError("unknown dtype", value=value, choices=DTYPES)
        if name not in weighted:
            raise RequestError(f"{card.name} has no such component with weights", value=name, choices=weighted)
    chosen = {name: replace(component, dtype=asked.get(name, component.dtype)) for name, component in weighted.items()}
    auto = preferred_dtype(device)
    return derive(card, components={n: replace(c, dtype=auto) if c.dtype == "auto" else c for n, c in chosen.items()})
