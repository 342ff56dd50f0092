"""What a library says when it has no kernel for a processor, and what only sounds like it."""

import pytest

from autotune.devices.oom import is_out_of_memory, missing_kernel

BEFORE_2_6 = "could not create a primitive descriptor"
LATER = (
    "could not create a primitive descriptor for the LSTM forward propagation primitive. Run workload with environment "
    "variable ONEDNN_VERBOSE=all to get additional diagnostic information."
)


@pytest.mark.parametrize("message", [BEFORE_2_6, LATER])
def test_a_kernel_that_onednn_does_not_have_is_named_in_one_clause(message):
    told = "oneDNN, torch's CPU library, has no kernel for this on this processor: "
    assert missing_kernel(RuntimeError(message)) == told + message.partition(".")[0]


def test_a_graph_that_no_engine_of_cudnn_takes_is_a_missing_kernel_whatever_the_memory():
    error = RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.")
    assert missing_kernel(error).startswith("cuDNN has no kernel for this on this GPU: ")
    assert not is_out_of_memory(error, scarce=lambda: True)


def test_it_is_found_as_the_cause_of_another_error():
    error = ValueError("the layer failed")
    error.__cause__ = RuntimeError(LATER)
    assert missing_kernel(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("could not create a primitive"),
        RuntimeError(f"our layer: {LATER}"),
        ValueError(LATER),
    ],
)
def test_another_error_is_none(error):
    assert missing_kernel(error) == ""
