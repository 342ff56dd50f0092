"""The devices that memory is predicted for: kinds whose kernels allocate alike, cards by name, and a stand-in for a GPU not at hand."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from autotune.devices import capabilities_of
from autotune.devices.cpu import CpuDevice
from autotune.devices.cuda import TYPICAL_CONTEXT_BYTES
from autotune.errors import ConfigError
from autotune.lazy import torch
from autotune.records.device import DeviceInfo
from autotune.units import GIB, MIB, format_bytes, parse_bytes

Target = str  # torch's name of the type; if known, followed by compute capability and number of multiprocessors

FLASH_CAPABILITY = (8, 0)
_TYPICAL_CAPABILITY, _TYPICAL_MULTIPROCESSORS = (8, 0), 108  # an A100's
# threads per multiprocessor; 2048 for other capabilities (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")
_MAX_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
_UNKNOWN_CAPABILITY = (8, 0)  # assumed for a card given by its size alone: it has bfloat16 and flash attention
_NUM_NEAREST = 4  # similar names that are offered for an unknown one


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """What decides how much memory the kernels of a GPU allocate.

    Attributes:
        capability: CUDA compute capability.
        num_multiprocessors: streaming multiprocessors.
    """

    capability: tuple[int, int] = _TYPICAL_CAPABILITY
    num_multiprocessors: int = _TYPICAL_MULTIPROCESSORS

    @property
    def threads_per_multiprocessor(self) -> int:
        """The most threads that can be resident on one multiprocessor."""
        return _MAX_THREADS.get(self.capability, 2048)

    @property
    def has_flash_attention(self) -> bool:
        """Whether torch's flash attention runs on this GPU."""
        return self.capability >= FLASH_CAPABILITY


def target_of(device: DeviceInfo) -> Target:
    """The target that a device belongs to. A GPU of unknown compute capability counts as an A100."""
    if device.capability <= (0, 0):
        return device.kind
    return f"{device.kind} {device.capability[0]}.{device.capability[1]} {device.num_multiprocessors}"


def kind_of(target: Target) -> str:
    """torch's name of the type of devices that a target stands for."""
    return target.partition(" ")[0]


def gpu_of(target: Target) -> GpuKind:
    """The GPU that a target stands for."""
    _, *known = target.split()
    if not known:
        return GpuKind()
    capability, number = known
    major, minor = map(int, capability.split("."))
    return GpuKind(capability=(major, minor), num_multiprocessors=int(number) or _TYPICAL_MULTIPROCESSORS)


@dataclass(frozen=True, kw_only=True)
class Card:
    """A graphics card.

    Attributes:
        name: as NVIDIA writes it, or the size that the user gave.
        total_bytes: the total of `torch.cuda.mem_get_info`, a little less than the printed size; for cards that can switch
            error correction, with it switched on.
        capability: CUDA compute capability.
        num_multiprocessors: streaming multiprocessors; 0 for a card given by its size alone.
    """

    name: str
    total_bytes: int
    capability: tuple[int, int]
    num_multiprocessors: int = 0


# name, total in MiB as the driver reports it (some MiB differ between drivers and boards), compute capability, and streaming
# multiprocessors from NVIDIA's data sheets
_KNOWN = (
    ("B300 288GB", 274_000, (10, 3), 148),
    ("B200 180GB", 182_000, (10, 0), 148),
    ("GH200 96GB", 96_768, (9, 0), 132),
    ("H200 141GB", 143_156, (9, 0), 132),
    ("H100 NVL 94GB", 95_320, (9, 0), 132),
    ("H100 80GB", 81_080, (9, 0), 132),
    ("A100 80GB", 81_100, (8, 0), 108),
    ("A100 40GB", 40_337, (8, 0), 108),
    ("A30 24GB", 24_060, (8, 0), 56),
    ("A40 48GB", 45_490, (8, 6), 84),
    ("A10 24GB", 22_590, (8, 6), 72),
    ("A10G 24GB", 22_590, (8, 6), 80),
    ("A16 16GB", 14_880, (8, 6), 10),
    ("L40S 48GB", 45_460, (8, 9), 142),
    ("L40 48GB", 45_460, (8, 9), 142),
    ("L4 24GB", 22_560, (8, 9), 58),
    ("V100 32GB", 32_500, (7, 0), 80),
    ("V100 16GB", 16_150, (7, 0), 80),
    ("T4 16GB", 14_910, (7, 5), 40),
    ("P100 16GB", 16_270, (6, 0), 56),
    ("RTX PRO 6000 Blackwell 96GB", 97_240, (12, 0), 188),
    ("RTX 6000 Ada 48GB", 48_500, (8, 9), 142),
    ("RTX 5000 Ada 32GB", 32_100, (8, 9), 100),
    ("RTX 4000 Ada 20GB", 20_000, (8, 9), 48),
    ("RTX A6000 48GB", 48_530, (8, 6), 84),
    ("RTX A5000 24GB", 24_110, (8, 6), 64),
    ("RTX A4500 20GB", 20_000, (8, 6), 56),
    ("RTX A4000 16GB", 15_980, (8, 6), 48),
    ("Quadro RTX 8000 48GB", 48_400, (7, 5), 72),
    ("Quadro RTX 6000 24GB", 24_200, (7, 5), 72),
    ("Quadro RTX 5000 16GB", 16_120, (7, 5), 48),
    ("TITAN RTX 24GB", 24_210, (7, 5), 72),
    ("RTX 5090 32GB", 32_110, (12, 0), 170),
    ("RTX 5080 16GB", 15_850, (12, 0), 84),
    ("RTX 5070 Ti 16GB", 15_850, (12, 0), 70),
    ("RTX 5070 12GB", 11_850, (12, 0), 48),
    ("RTX 5060 Ti 16GB", 15_850, (12, 0), 36),
    ("RTX 5060 Ti 8GB", 7_800, (12, 0), 36),
    ("RTX 4090 24GB", 24_080, (8, 9), 128),
    ("RTX 4080 SUPER 16GB", 15_950, (8, 9), 80),
    ("RTX 4080 16GB", 15_950, (8, 9), 76),
    ("RTX 4070 Ti SUPER 16GB", 15_950, (8, 9), 66),
    ("RTX 4070 Ti 12GB", 11_990, (8, 9), 60),
    ("RTX 4070 SUPER 12GB", 11_990, (8, 9), 56),
    ("RTX 4070 12GB", 11_990, (8, 9), 46),
    ("RTX 4060 Ti 16GB", 15_950, (8, 9), 34),
    ("RTX 4060 Ti 8GB", 7_930, (8, 9), 34),
    ("RTX 4060 8GB", 7_930, (8, 9), 24),
    ("RTX 3090 Ti 24GB", 24_240, (8, 6), 84),
    ("RTX 3090 24GB", 24_150, (8, 6), 82),
    ("RTX 3080 Ti 12GB", 12_040, (8, 6), 80),
    ("RTX 3080 12GB", 12_040, (8, 6), 70),
    ("RTX 3080 10GB", 10_010, (8, 6), 68),
    ("RTX 3070 8GB", 7_970, (8, 6), 46),
    ("RTX 3060 12GB", 12_040, (8, 6), 28),
    ("RTX 3050 8GB", 7_970, (8, 6), 20),
    ("RTX 2080 Ti 11GB", 11_010, (7, 5), 68),
    ("RTX 2080 8GB", 7_970, (7, 5), 46),
    ("RTX 2070 8GB", 7_970, (7, 5), 36),
    ("RTX 2060 6GB", 5_930, (7, 5), 30),
    ("GTX 1080 Ti 11GB", 11_170, (6, 1), 28),
    ("GTX 1080 8GB", 8_110, (6, 1), 20),
)
CARDS = tuple(
    Card(name=name, total_bytes=total_mib * MIB, capability=capability, num_multiprocessors=number)
    for name, total_mib, capability, number in _KNOWN
)


def card_of(text: str) -> Card:
    """The card that the user means by a name or a memory size.

    Args:
        text: `RTX 4090`, `a100-80gb`, `NVIDIA A100-SXM4-80GB`, `80GiB`. Case, spaces, dashes and NVIDIA's additions to the
            name do not matter. The size is optional if the card comes in one size.

    Raises:
        ConfigError: the text is neither a size of at least 1 GiB nor the name of exactly one card.
    """
    key = _key(text)
    matches = [card for card in CARDS if key in (_key(card.name), _key(_without_size(card.name)))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{text!r} comes in several sizes: write {' or '.join(card.name for card in matches)}")
    try:
        total_bytes = parse_bytes(text)
    except ValueError:
        raise ConfigError(_unknown(text, key)) from None
    if total_bytes < GIB:
        raise ConfigError(f"{text!r} is less than 1 GiB; write the GPU's memory with its unit, such as 24GiB")
    return Card(name=format_bytes(total_bytes), total_bytes=total_bytes, capability=_UNKNOWN_CAPABILITY)


def _unknown(text: str, key: str) -> str:
    names = {_key(_without_size(card.name)): _without_size(card.name) for card in CARDS}
    near = [names[near] for near in difflib.get_close_matches(key, names, n=_NUM_NEAREST, cutoff=0.5)]
    hint = f"the nearest names are {', '.join(near)}" if near else "names look like RTX 4090 or A100 80GB"
    return f"{text!r} is not a known GPU; {hint}. Or give its memory, such as 24GiB"


def _without_size(name: str) -> str:
    return re.sub(r" \d+GB$", "", name)


def _key(text: str) -> str:
    key = re.sub(r"[^a-z0-9]", "", text.lower())
    key = re.sub(r"^(nvidia)?(geforce|tesla)?", "", key).replace("gib", "gb")
    return re.sub(r"sxm\d?|pcie|hbm\d?e?|generation", "", key)


class AbsentGpu(CpuDevice):
    """Stands for a GPU that is known only by its description, to find out what would apply there. All work runs on the CPU.

    Nothing can be measured on it. A process on it is assumed to hold as much as a typical CUDA context.

    Args:
        info: its type, memory and compute capability.
    """

    def __init__(self, info: DeviceInfo) -> None:
        super().__init__()
        self.name = self.kind = info.kind
        self.capabilities = capabilities_of(info.kind)
        self._info = info

    def info(self) -> DeviceInfo:
        """The description that was given."""
        return self._info

    @property
    def torch_device(self) -> torch.device:
        """The CPU, where the work runs."""
        return torch.device("cpu")

    def current_bytes(self) -> int:
        """Memory of a typical CUDA context and its libraries."""
        return TYPICAL_CONTEXT_BYTES
