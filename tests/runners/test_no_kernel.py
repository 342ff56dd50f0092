"""A config whose operators the processor's library lacks is unsupported, and so is neither out of memory nor the user's error."""

from pathlib import Path

import pytest

from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from tests.room import limit_bytes

techniques = find_techniques()

MODEL = Path(__file__).parent.parent / "prediction" / "models" / "recurrent.py"


def test_an_lstm_in_bf16_is_unsupported_with_avx2(avx2, tmp_path):
    settings = ProbeSettings(memory_limit_bytes=limit_bytes(800), max_timed_s=0.3, max_warmup_s=0.3, timeout_s=30)
    with LocalRunner(TaskSource.of(MODEL), device="cpu", logs=tmp_path) as prober:
        plain, short = (
            prober.probe(techniques.complete({"amp": amp}, global_batch=32), settings) for amp in ("off", "bf16")
        )
    assert plain.kind is Kind.OK, plain
    if short.ok:
        pytest.skip("this torch has the operator")
    assert short.kind is Kind.UNSUPPORTED
    assert "has no kernel for this on this processor" in short.cause
    assert "LSTM" in short.cause or short.cause.endswith("primitive descriptor")
