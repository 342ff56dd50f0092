"""A small model in whose training step something bad happens; the batch size says what. Batches up to 8 train well."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import torch
from torch import nn

LEAKED = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, x):
        return self.layers(x)


def segfault():
    ctypes.string_at(0)


def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def real_oom():
    torch.empty(2**40, dtype=torch.uint8).fill_(1)


def wrapped_oom():
    try:
        real_oom()
    except RuntimeError as error:
        raise ValueError("the layer failed") from error


def oom_in_words():
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (just kidding)")


def memory_error():
    bytearray(2**40)


def print_much():
    print('{"result": {"outcome": {"kind": "ok"}}}')
    sys.stdout.write("x" * 3_000_000 + "\n")
    os.write(1, b'{"exit_code": 0, "timed_out": false, "oom_killed": false}\n')


def close_descriptors():
    os.closerange(0, 4096)


def change_directory():
    os.chdir("/")


def leave_children():
    command = [sys.executable, "-c", "import time; time.sleep(600) # autotune-orphan"]
    subprocess.Popen(command)
    subprocess.Popen(command, start_new_session=True)


def start_thread():
    if threading.active_count() == 1:
        threading.Thread(target=time.sleep, args=(600,)).start()


def leak():
    LEAKED.append(torch.ones(512 * 1024))  # 2 MiB that stay


def user_error():
    raise KeyError("no such word in the vocabulary")


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    10: segfault,
    11: lambda: os._exit(0),
    12: lambda: sys.exit(0),
    13: hang,
    14: real_oom,
    15: wrapped_oom,
    16: oom_in_words,
    17: memory_error,
    18: print_much,
    19: close_descriptors,
    20: change_directory,
    21: leave_children,
    22: start_thread,
    23: leak,
    24: user_error,
    25: kill_self,
}


def build_model():
    return Net()


def make_batch(batch_size):
    return torch.randn(batch_size, 64), torch.randn(batch_size, 64)


def training_step(model, batch):
    x, y = batch
    if len(x) in FAULTS:
        FAULTS[len(x)]()
    prediction = model(x)
    time.sleep(0.03)  # which config is the fastest is clear then, and no play-off takes long
    if prediction.dtype == torch.float16:
        prediction = prediction * 1e6  # beyond fp16's range: NaN there and nowhere else
        prediction = prediction - prediction
    elif prediction.dtype == torch.bfloat16:
        time.sleep(0.06)
    return nn.functional.mse_loss(prediction.float(), y)


BASELINE = {"batch_size": 4}
