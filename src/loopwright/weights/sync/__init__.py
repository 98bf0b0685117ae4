"""New weights for a component that is in memory: taken from a module, sent somewhere, checked, written in place.

    from loopwright.weights import sync

    model.update_weights("transformer", trained)                        # a module of this process
    model.update_weights("transformer", "runs/fox/model/transformer")   # files

    with sync.shared(sync.full(trained)) as path: ...                   # to another process here: tell it the path
    model.update_weights("transformer", sync.read(path, component))

    delivery = sync.broadcast(sync.full(trained) if rank == 0 else None, source=0, device="cuda")

A `Delivery` has a checksum from where it was packed, and whoever receives it compares before anything changes. `bind`
compares names, shapes and dtypes of all of it with the module, and only then gives what `write` copies. Deliberately
absent: who may be running meanwhile, and versions (`engine.update`).
"""

from .binding import Pairs, bind, write
from .collective import broadcast
from .delivery import Delivery
from .files import SHARED, read, shared
from .packing import adapter, full, merged, pack
from .sums import checksum

__all__ = [
    "SHARED",
    "Delivery",
    "Pairs",
    "adapter",
    "bind",
    "broadcast",
    "checksum",
    "full",
    "merged",
    "pack",
    "read",
    "shared",
    "write",
]
