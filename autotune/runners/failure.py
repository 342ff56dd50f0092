"""What becomes of a job that raised: its outcome says whether memory, the device, the user's code or autotune itself is the cause."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from autotune.records.outcome import Kind, Outcome
from autotune.units import format_bytes

if TYPE_CHECKING:
    from autotune.devices import Device


def outcome_of_failure(error: BaseException, device: Device | None, stage: str, train_s: float = 0.0) -> Outcome:
    """The outcome of a job that raised.

    Args:
        device: None where the device could not be entered; memory that was short then is held by others.
    """
    from autotune.devices.torch_errors import attempted_bytes, is_out_of_memory
    from autotune.probe.finite import NonFiniteError
    from autotune.probe.passes import TooFewSamplesError

    oom = is_out_of_memory(error) if device is None else device.is_out_of_memory(error)
    kind = Kind.OOM if oom else Kind.NONFINITE if isinstance(error, NonFiniteError) else None
    attempted = attempted_bytes(error) if oom else 0
    held, crowded = 0, oom
    on_host = oom and device is not None and device.is_of_host(error)
    if device is not None:
        # read now: `failure` clears the error's frames, and with them what the training held
        held = _quietly(partial(device.held_bytes, attempted) if attempted else device.peak_bytes)
        crowded = oom and bool(_quietly(partial(device.is_crowded, attempted)))
    outcome = failure(error, stage, train_s, kind=kind, peak_bytes=held)
    outcome = replace(outcome, too_few_samples=isinstance(error, TooFewSamplesError), on_host=on_host)
    if on_host:
        return replace(outcome, cause=f"the host's memory ran out, not the GPU's: {outcome.cause}")
    if crowded:
        said = f"other processes hold memory of the device that the limit allows: {outcome.cause}"
        outcome = replace(outcome, crowded=True, cause=said)
    return outcome


def failure(
    error: BaseException, stage: str, train_s: float, *, kind: Kind | None = None, peak_bytes: int = 0
) -> Outcome:
    """The outcome of an exception alone. Its frames are cleared, which frees what they held.

    Args:
        kind: where more is known than the exception says.
    """
    from autotune.devices.torch_errors import (
        attempted_bytes,
        broken_context,
        chain,
        is_accelerators,
        is_librarys,
        is_out_of_memory,
        missing_kernel,
    )
    from autotune.errors import AutotuneError, DeviceError, first_line, in_one_line
    from autotune.task.usercode import arose_in_autotune, user_frames
    from autotune.techniques.base import UnsupportedError

    missing, broken = "", None
    if kind is None and is_out_of_memory(error):
        kind = Kind.OOM
    elif kind is None and isinstance(error, SystemExit):
        kind = Kind.CRASHED
    elif kind is None:
        broken = broken_context() if is_librarys(error) else None
        missing = missing_kernel(error) if broken is None else ""
        kind = Kind.UNSUPPORTED if missing or isinstance(error, UnsupportedError) else Kind.ERROR
    attempted = attempted_bytes(error) if kind is Kind.OOM else 0
    if isinstance(error, SystemExit):
        cause = f"the training code called sys.exit({error.code!r})"
    elif isinstance(error, AutotuneError | UnsupportedError):
        cause = str(error)
    elif missing:
        cause = missing
    elif broken is not None and first_line(broken) != first_line(error):
        cause = f"{in_one_line(broken)} (it shows as {in_one_line(error)})"
    else:
        cause = in_one_line(error)
    own_fault = kind is Kind.ERROR and arose_in_autotune(error) and broken is None and not is_accelerators(error)
    if own_fault:
        cause = f"a fault of autotune itself: {cause}"
    if attempted:
        cause = f"an allocation of {format_bytes(attempted)} failed"  # the library's own words are in the detail
    is_of_ours = isinstance(error, AutotuneError | UnsupportedError)
    if is_of_ours or kind is Kind.NONFINITE:  # which is found here, in no line of the user's
        detail = getattr(error, "frames", "")
    elif own_fault:
        detail = "".join(traceback.format_tb(error.__traceback__)) + cause
    else:
        detail = user_frames(error)
        if "\n  File " not in detail:  # none of it is the user's own
            detail = "".join(traceback.format_exception(error))
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)
    gc.collect()
    return Outcome(
        kind=kind,
        cause=cause[:500],
        detail=detail[-8000:],
        stage=stage,
        train_s=train_s,
        peak_bytes=peak_bytes,
        attempted_bytes=attempted,
        own_fault=own_fault,
        device_fault=isinstance(error, DeviceError),
    )


def _quietly(read: Callable[[], int]) -> int:
    try:
        return read()
    except Exception:
        return 0
