"""Which kernels run where, decided from made-up devices; nothing here needs the hardware it speaks of."""

import pytest

from loopwright.backends.device import Probe, pick, probe
from loopwright.backends.registry import ATTENTIONS, KERNELS, KINDS, SETS, load, manifest, precisions, require, why_not
from loopwright.backends.registry import require_precision as require_dtype
from loopwright.errors import BackendError, RequestError

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
EVERYTHING = frozenset({"triton", "cudnn", "fa3_fwd_interface"})
CPU = Probe("cpu", "cpu")
MPS = Probe("mps", "mps")


def cuda(major: int, minor: int, packages: frozenset[str] = EVERYTHING, archs: tuple[str, ...] = ARCHS) -> Probe:
    return Probe("cuda:0", "cuda", (major, minor), "made up", archs, packages)


def running(device: Probe) -> set[str]:
    return {kernel.name for kernel, reason in manifest(device) if not reason}


FUSED = {"adaptive_norm", "norm_rotary", "euler_update", "unipc_update"}


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (CPU, {"sdpa", "math", "flash"}),
        (MPS, {"sdpa", "math"}),
        (cuda(7, 5), {"sdpa", "math"}),
        (cuda(8, 0), {"sdpa", "math", "flash", "cudnn"} | FUSED),
        (cuda(8, 9), {"sdpa", "math", "flash", "cudnn", "fp8_linear"} | FUSED),
        (cuda(9, 0), set(KERNELS)),
        (cuda(10, 0), set(KERNELS) - {"fa3"}),
        (cuda(9, 0, frozenset()), {"sdpa", "math", "flash"}),
        (cuda(9, 0, archs=("sm_80",)), set()),
    ],
    ids=lambda value: f"{value.arch}, {len(value.packages)} packages" if isinstance(value, Probe) else "",
)
def test_each_device_runs_what_its_architecture_and_packages_allow(device: Probe, expected: set[str]) -> None:
    assert running(device) == expected


@pytest.mark.parametrize(
    ("name", "device", "dtype", "reason"),
    [
        ("fa3", CPU, None, "needs cuda"),
        ("flash", MPS, None, "needs cpu or cuda"),
        ("fa3", cuda(8, 0), None, "needs sm_9x, this is sm_80"),
        ("cudnn", cuda(7, 5), None, "needs sm_80, this is sm_75"),
        ("fp8_linear", cuda(8, 6), None, "needs sm_89, this is sm_86"),
        ("fa3", cuda(9, 0, frozenset()), None, "needs fa3_fwd_interface, which is not installed"),
        ("flash", cuda(9, 0), "float32", "needs bfloat16 or float16, not float32"),
        ("fa3", cuda(9, 0), "float16", "needs bfloat16, not float16"),
        ("flash", cuda(9, 0), "bfloat16", ""),
        ("flash", CPU, "float32", ""),
        ("sdpa", cuda(9, 0, archs=("sm_80",)), None, "this build of torch has no code for sm_90 (it has sm_80)"),
    ],
)
def test_the_reason_is_told(name: str, device: Probe, dtype: str | None, reason: str) -> None:
    assert why_not(KERNELS[name], device, dtype) == reason


@pytest.mark.parametrize(
    ("archs", "capability", "usable"),
    [
        (("sm_80",), (8, 9), True),  # a later chip of the generation
        (("sm_89",), (8, 0), False),
        (("sm_80",), (9, 0), False),  # binary code does not cross generations
        (("sm_80", "compute_80"), (9, 0), True),  # portable code does
        (("compute_90",), (8, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),  # code for one chip alone
        (("sm_100f",), (10, 3), True),
        (("sm_120",), (12, 0), True),
        (("gfx942",), (9, 4), False),
        ((), (9, 0), False),
    ],
)
def test_a_device_is_usable_if_the_installed_torch_has_code_for_it(
    archs: tuple[str, ...], capability: tuple[int, int], usable: bool
) -> None:
    assert (cuda(*capability, archs=archs).unusable == "") is usable


@pytest.mark.parametrize(
    ("device", "precision", "choice", "message"),
    [
        (CPU, "float32", {"attention": "cudnn"},
         r"attention not available on cpu \(needs cuda\): 'cudnn'; choices: sdpa, math, flash, fa3 \(needs cuda\)"),
        (CPU, "float32", {"kernels": "fused"},
         r"kernels not available on cpu \(adaptive_norm needs cuda\): 'fused'; choices: plain"),
        (CPU, "float32", {"attention": "quick"}, "unknown attention: 'quick'; choices: sdpa, math"),
        (CPU, "float32", {"kernels": ""}, "unknown kernels: ''; choices: plain, fused"),
        (cuda(8, 0), "bfloat16", {"attention": "fa3"}, r"\(needs sm_9x, this is sm_80\): 'fa3'.*cudnn"),
        (cuda(9, 0), "float32", {"attention": "flash"}, r"\(needs bfloat16 or float16, not float32\): 'flash'"),
    ],
)  # fmt: skip
def test_an_unavailable_choice_is_an_error_that_names_the_others(
    device: Probe, precision: str, choice: dict[str, str], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        require(device, precision, **choice)


@pytest.mark.parametrize("precision", ["bfloat16", "float8"])
def test_an_available_choice_passes_and_float8_computes_in_bfloat16(precision: str) -> None:
    for attention in ATTENTIONS:
        require(cuda(9, 0), precision, attention=attention, kernels="fused")


def test_float8_is_refused_where_there_is_no_such_arithmetic() -> None:
    require_dtype(cuda(9, 0), "float8")
    require_dtype(CPU, "bfloat16")
    for device, reason in ((CPU, "needs cuda"), (cuda(8, 0), "needs sm_89, this is sm_80")):
        with pytest.raises(BackendError, match=reason):
            require_dtype(device, "float8")


def test_the_list_is_in_order() -> None:
    assert {kernel.kind for kernel in KERNELS.values()} == set(KINDS)
    assert {name for names in SETS.values() for name in names} <= set(KERNELS)
    assert {name for name in ATTENTIONS if not KERNELS[name].backward} == {"fa3"}
    assert precisions(KERNELS["flash"], CPU) == ("float32", "bfloat16", "float16")
    assert precisions(KERNELS["fa3"], CPU) == ()


def test_every_kernel_this_device_runs_can_be_loaded() -> None:
    for kernel, reason in manifest(probe(pick("auto"))):
        if not reason:
            assert callable(load(kernel.name))


def test_the_probe_of_this_machine_and_an_absent_device() -> None:
    here = probe("cpu")
    assert (here.kind, here.arch, here.capability, here.unusable) == ("cpu", "cpu", None, "")
    with pytest.raises(RequestError, match="no such device"):
        pick("cuda:99")
