"""What the kernels of a device allocate that fake tensors do not show."""
