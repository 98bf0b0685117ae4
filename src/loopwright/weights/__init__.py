"""Checkpoints on disk and on the hub: fetch, load, save, convert.

    from loopwright.weights.hub import fetch
    fetch("org/model", revision="v1.0", weights=False).folder / "model_index.json"

Deliberately absent: imports. Each module here is imported by those who need it, since some of them need torch.
"""
