"""Memory that the kernels of a device allocate and fake tensors do not show."""
