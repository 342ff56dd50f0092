"""A CUDA driver of the tests' own: torch's CUDA build runs over it on a machine without a GPU.

It stands in for libcudart, libcuda, cuBLAS, cuDNN, NVML and NCCL below the real torch, whose allocator, autograd, streams,
events, errors and process groups are its own.

What it tells truly:

- Memory of the cards over all processes: contexts, allocations, the dead, neighbours; so the caching allocator's figures,
  `torch.OutOfMemoryError`, memory fractions, expandable segments, and NVML's used memory and processes.
- Which call fails and what follows: an error that breaks a context for good, a card off the bus, a driver too old, no NVML.
- The order of things: events, graphs, collectives that end when all ranks have begun them, and never on a mismatch.

What it cannot tell, so that tests of it need a real card:

- Values. What a kernel writes reads back as 0, a bool as true; numbers of up to 8 bytes that were filled or uploaded stay.
  `PLAYED_COPIES_UP_TO=65536` keeps what is copied, which groups need: DDP tells the others the order of its buckets.
- Speed. Kernels take a made-up time on one timeline for all streams of a device; copies and kernels never overlap.
- cuDNN's real workspaces and engines (one setting for all plans) and NCCL's real buffers (one setting a communicator).
- Recurrent networks of cuDNN, sends and receives between ranks, peer access, sharing memory between processes.
- The time that each process takes of a card, as NVML samples it.

With groups, use a `FileStore`, not a port that was free a moment ago; `broadcast_object_list` hangs (it sums in a kernel),
`all_gather_object` works.
"""
