"""A GPU that no machine has to have, for which techniques say whether they apply."""

from autotune.devices.targets import AbsentGpu
from autotune.records.device import DeviceInfo

GPU = AbsentGpu(DeviceInfo(name="cuda", model="a GPU", total_bytes=2**34, free_bytes=2**34, capability=(8, 0)))
