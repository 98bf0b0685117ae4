"""What ships stays small, is stored in bfloat16, and says what it is."""

from safetensors import safe_open

from loopwright import catalog

MEGABYTE = 10**6


def test_the_shipped_files_are_small():
    sizes = {path: path.stat().st_size for path in catalog.ZOO.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= 28 * MEGABYTE and max(sizes.values()) <= 15 * MEGABYTE


def test_shipped_weights_are_bfloat16_and_counted_by_the_card():
    for name, folder in catalog.SHIPPED.items():
        card = catalog.find(name)
        for part, component in card.components.items():
            total = 0
            for file in (folder / part).glob("*.safetensors"):
                with safe_open(file, framework="pt") as tensors:
                    for key in tensors.keys():  # noqa: SIM118
                        assert tensors.get_slice(key).get_dtype() == "BF16", f"{file.name}: {key}"
                        total += tensors.get_tensor(key).numel()
            assert component.parameters == total


def test_the_shipped_card_fits_its_configurations():
    """`card.json` differs from what the folder alone says in defaults, precision and sizes, in nothing else."""
    from loopwright.models import wan

    for name, folder in catalog.SHIPPED.items():
        shipped, described = catalog.find(name), wan.describe(folder, name)
        for field in ("name", "family", "loops", "programs", "settings", "claims", "recipe"):
            assert getattr(shipped, field) == getattr(described, field), field
