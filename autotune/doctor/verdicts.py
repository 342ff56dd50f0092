"""What the facts of a check mean for a search: pure functions, one an assumption."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from autotune.devices.selftest import Facts
from autotune.study.place import DEFAULT_FOLDER
from autotune.units import GIB, MIB, format_bytes, format_seconds

LIMIT_SHARE = 0.1  # how far below its limit memory may end: fragments, the last block
BOOKS_SHARE = 0.05  # by which two accounts of the same memory may differ
EQUAL_SPEED, EQUAL_PEAK = 0.1, 0.05  # between two equal probes
CLOCK_SHARE = 0.1  # by which two clocks may differ over a short run
TESTED_DEVICES, TESTED_PROCESSORS = {"cpu"}, {"x86_64", "amd64"}  # on which the package's own tests have run
WRONG_PEAKS = "measured peaks are wrong: leave a larger --headroom"
UNKNOWN_RATES = "precisions are offered by tables instead of by their speed"


class State(StrEnum):
    """What came of a check."""

    OK = "ok"
    DIFFERS = "differs"
    UNAVAILABLE = "unavailable"


Verdict = tuple[State, str, str]  # what was found, and what it means for a search; no meaning where all is well
Judge = Callable[[Facts], Verdict]


def _right(holds: bool, said: str, meaning: str) -> Verdict:
    """What was found, and what it means where the assumption does not hold."""
    return (State.OK, said, "") if holds else (State.DIFFERS, said, meaning)


def judge_driver(facts: Facts) -> Verdict:
    """NVML answers."""
    if "why_none" in facts:
        meaning = "without a GPU nothing is missing; with one, other processes, heat and free memory cannot be seen"
        return State.UNAVAILABLE, facts["why_none"], meaning
    return State.OK, f"driver {facts['driver']}, {len(facts['boards'])} visible", ""


def judge_limit(facts: Facts) -> Verdict:
    """Memory ends at the limit, not before and not behind it."""
    limit_bytes, allocated_bytes = facts["limit_bytes"], facts["allocated_bytes"]
    held_bytes = facts.get("held_bytes", facts["start_bytes"] + allocated_bytes)
    said = f"memory ended at {format_bytes(held_bytes)}, with a limit of {format_bytes(limit_bytes)}"
    if not facts["error"]:
        found = f"{format_bytes(allocated_bytes)} could be allocated within a limit of {format_bytes(limit_bytes)}"
        meaning = "configs that do not fit would run, or fill the device: give a --memory-limit well below it"
        return State.DIFFERS, found, meaning
    if facts["crowded"]:
        return State.UNAVAILABLE, f"{said}: other processes hold the rest", "end them, and run this again"
    if held_bytes > limit_bytes + facts["block_bytes"]:
        return State.DIFFERS, said, "configs may need more memory than a search says: leave a larger --headroom"
    reached = held_bytes + facts["attempted_bytes"] >= limit_bytes * (1 - LIMIT_SHARE)
    return _right(reached, said, "configs that fit would be taken for too large")


def judge_recognition(facts: Facts) -> Verdict:
    """Running out of memory is recognised as that."""
    if not facts["error"]:
        return State.UNAVAILABLE, "memory did not end", "see the memory limit"
    if facts["recognised"]:
        return State.OK, f"told from other errors by: {facts['error'][:80]}", ""
    meaning = "too large configs would count as errors, and others be tried in vain"
    return State.DIFFERS, f"not recognised: {facts['error']}", meaning


def judge_other_error(facts: Facts) -> Verdict:
    """Another error is not taken for a lack of memory."""
    if facts["error"] and not facts["recognised"]:
        return State.OK, "an error about shapes is not taken for a lack of memory", ""
    return State.DIFFERS, f"taken for a lack of memory: {facts['error']}", "errors of your code would be hidden"


def judge_peak(facts: Facts) -> Verdict:
    """The peak grows by what is allocated, and keeps it."""
    expected, grown = facts["allocated_bytes"], facts["grown_bytes"]
    said = f"{format_bytes(expected)} allocated, {format_bytes(grown)} seen, {format_bytes(facts['kept_bytes'])} kept in the peak"
    right = all(abs(seen - expected) <= BOOKS_SHARE * expected + 8 * MIB for seen in (grown, facts["kept_bytes"]))
    return _right(right, said, WRONG_PEAKS)


def judge_books(facts: Facts) -> Verdict:
    """The driver books on this process what it holds."""
    if "booked_bytes" not in facts:
        return State.UNAVAILABLE, "a CPU's memory is the kernel's own figure", ""
    booked, peak = facts["booked_bytes"], facts["peak_bytes"]
    if booked is None or booked < facts["allocated_bytes"]:
        said = "the driver does not book this process's memory (a container, WSL)"
        meaning = "what lies outside torch's allocator is taken from the growth of the whole card's use"
        return State.UNAVAILABLE, said, meaning
    said = f"{format_bytes(booked)} booked, a peak of {format_bytes(peak)}"
    return _right(abs(booked - peak) <= BOOKS_SHARE * peak + 32 * MIB, said, WRONG_PEAKS)


def judge_release(facts: Facts) -> Verdict:
    """The device has a killed process's memory back at once."""
    if "why" in facts:
        return State.UNAVAILABLE, facts["why"], ""
    if facts["after_bytes"] > facts["while_bytes"] - facts["held_bytes"] / 2:
        if not facts["gpu"]:  # where every program of the machine changes what is in use
            return State.UNAVAILABLE, "other processes' memory changes too much to tell", "run it on a quieter machine"
        said = f"{format_bytes(facts['held_bytes'])} were not back after {format_seconds(facts['released_s'])}"
        return State.DIFFERS, said, "each probe would find less memory than the one before"
    return State.OK, f"{format_bytes(facts['held_bytes'])} back {format_seconds(facts['released_s'])} after a kill", ""


def judge_clock(facts: Facts) -> Verdict:
    """The wall clock, read when the device is done, agrees with the device's own."""
    said = f"{format_seconds(facts['wall_s'])} by the clock, {format_seconds(facts['device_s'])} by the GPU's events"
    agree = abs(facts["wall_s"] / facts["device_s"] - 1) <= CLOCK_SHARE
    meaning = "measured speeds are wrong: the machine starts work late, or waits for other things than the GPU"
    return _right(agree, said, meaning)


def judge_page_locked(facts: Facts) -> Verdict:
    """Copies from page-locked memory are faster."""
    slow, fast = facts["pageable_bytes_per_s"], facts["pinned_bytes_per_s"]
    said = f"{fast / GIB:.1f} GiB/s from page-locked memory, {slow / GIB:.1f} from other"
    return _right(fast > slow, said, "page-locked batches gain nothing here")


def judge_workers(facts: Facts) -> Verdict:
    """Data can be loaded in processes of their own."""
    if facts["sum"] == facts["expected"]:
        return State.OK, "two workers loaded all samples", ""
    return State.DIFFERS, "samples were lost", "do not use data workers"


def judge_fork(facts: Facts) -> Verdict:
    """Probes are forked from a process that has imported torch."""
    if facts["slow_start"]:
        return State.DIFFERS, facts["slow_start"], "each probe takes seconds longer to start"
    return State.OK, "each probe starts as a copy of a process that has imported torch, within milliseconds", ""


def judge_equal(facts: Facts) -> Verdict:
    """Two equal probes agree."""
    (first, second) = facts["measured"]
    speeds = sorted(measured["samples_per_s"] for measured in (first, second))
    peaks = sorted(measured["peak_bytes"] for measured in (first, second))
    faster, larger = speeds[1] / speeds[0] - 1, peaks[1] / peaks[0] - 1
    said = f"two equal probes differ by {faster:.1%} in speed and by {larger:.1%} in memory"
    if any(measured["disturbances"] for measured in (first, second)):
        return State.UNAVAILABLE, f"{said}, while others work on the machine", "run it on a quieter machine"
    if larger > EQUAL_PEAK:
        return State.DIFFERS, said, "memory is less certain than a search says: leave a larger --headroom"
    meaning = "small gains cannot be told from noise: give a larger --budget, or quieten the machine"
    return _right(faster <= EQUAL_SPEED, said, meaning)


def judge_quiet(facts: Facts) -> Verdict:
    """Nobody else works on the device."""
    said = sorted({text for measured in facts["measured"] for text in measured["disturbances"]})
    if said:
        return State.UNAVAILABLE, "; ".join(said), "disturbed probes are run again, and small gains stay unknown"
    return State.OK, "nothing disturbed the probes", ""


def judge_calibration(facts: Facts) -> Verdict:
    """The device can be measured."""
    if not facts["calibrated"]:
        return State.DIFFERS, facts["calibration"].get("cause", ""), UNKNOWN_RATES
    if not (rates := facts["calibration"]["rates"]):
        return State.UNAVAILABLE, "no rate was measured in time", UNKNOWN_RATES
    best = {
        rate["arithmetic"]: max(rate["flops_per_s"])
        for rate in rates
        if rate["work"] == "matmul" and rate["flops_per_s"]
    }
    said = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in best.items()) or f"{len(rates)} rates"
    return State.OK, f"matrix products in {said}", ""


def judge_prediction(facts: Facts) -> Verdict:
    """Memory is predicted before anything runs."""
    peak = facts["measured"][0]["peak_bytes"]
    if facts["predicted"] is None:
        return State.UNAVAILABLE, f"not traced: {'; '.join(facts['untraced'])}", "memory is learned from probes"
    median, low, high = facts["predicted"]
    said = (
        f"{format_bytes(median)} ({format_bytes(low)} to {format_bytes(high)}) predicted, {format_bytes(peak)} measured"
    )
    return _right(
        low <= peak <= high, said, "first probes may run out of memory, or be too small, until probes correct it"
    )


def judge_compiler(facts: Facts) -> Verdict:
    """`torch.compile` finds what it needs."""
    if facts["missing"]:
        return State.UNAVAILABLE, facts["missing"], "a model that calls torch.compile fails"
    return State.OK, "what torch.compile needs is there", ""


def judge_study(facts: Facts) -> Verdict:
    """A study can be kept in the working directory."""
    if facts["error"]:
        meaning = "nothing would be kept: run in a folder that may be written, or give --storage"
        return State.DIFFERS, facts["error"], meaning
    return State.OK, "a study can be kept in the working directory", ""


def judge_cards(facts: Facts) -> Verdict:
    """Each rank has a card to itself."""
    if facts["same"]:
        meaning = "NCCL needs a card for each rank: name others, or one of them"
        return State.DIFFERS, f"parts of one card: {', '.join(facts['same'])}", meaning
    if not facts["paths"]:
        return State.UNAVAILABLE, facts["why"], ""
    return State.OK, "each process has a card to itself", ""


def judge_paths(facts: Facts) -> Verdict:
    """How devices reach each other is known."""
    by_path: dict[str, list[str]] = {}
    for pair, path in facts["paths"].items():
        by_path.setdefault(path, []).append(pair)
    if not by_path or "" in by_path:
        return State.UNAVAILABLE, facts["why"], ""
    said = (path if len(by_path) == 1 else f"{path}: {', '.join(pairs)}" for path, pairs in by_path.items())
    return State.OK, "; ".join(said), ""


def judge_group(facts: Facts) -> Verdict:
    """The devices see each other."""
    wrong = [
        name for name, rank in zip(facts["devices"], facts["ranks"], strict=True) if rank["sum"] != rank["expected"]
    ]
    meaning = "gradients would be wrong: train on one device"
    said = f"sums are wrong on {', '.join(wrong)}" if wrong else f"{len(facts['ranks'])} processes add up their numbers"
    return _right(not wrong, said, meaning)


def judge_collective(name: str, sent: float) -> Judge:
    """How fast a collective moves data over the slowest link, as nccl-tests counts it ("bus bandwidth").

    Args:
        sent: times the tensor's bytes, in the limit of many ranks, that each link carries. The factor (n - 1) / n for n ranks comes
            in addition. Source: nccl-tests, doc/PERFORMANCE.md.
    """

    def judge(facts: Facts) -> Verdict:
        ranks = facts["ranks"]
        share = sent * (len(ranks) - 1) / len(ranks)
        said = (
            f"{share * num_bytes / max(rank['seconds'][name][index] for rank in ranks) / GIB:.3g} GiB/s for {format_bytes(num_bytes)}"
            for index, num_bytes in enumerate(ranks[0]["bytes"])
        )
        return State.OK, ", ".join(said), ""

    return judge


def judge_communicator(facts: Facts) -> Verdict:
    """What the first collective takes beside tensors is known."""
    taken = zip(facts["devices"], facts["ranks"], strict=True)
    said = (f"{name} {format_bytes(max(0, rank['outside_bytes']))}" for name, rank in taken)
    kept = f"; kept in {DEFAULT_FOLDER}, where searches reckon with it" if facts["kept"] else ""
    return State.OK, f"outside torch's allocator: {', '.join(said)}{kept}", ""


def judge_tested(facts: Facts) -> Verdict:
    """Machines of this kind have run the package's own tests."""
    if facts["device_kind"] not in TESTED_DEVICES:
        found = (
            "no real GPU has run the package's tests; torch's CUDA build has, over GPUs that the tests play: errors, "
            "neighbours and memory are proven there, values, speed and the workspaces of cuDNN are not"
        )
        return State.UNAVAILABLE, found, "the lines above are the proof for this GPU: please report what differs"
    if facts["processor"] not in TESTED_PROCESSORS:
        found = f"the package's tests have not run on {facts['processor']}, on x86-64 processors alone"
        return State.UNAVAILABLE, found, "the lines above are the proof for this machine: please report what differs"
    return State.OK, "the package's tests run on x86-64 processors with and without bf16 arithmetic", ""
