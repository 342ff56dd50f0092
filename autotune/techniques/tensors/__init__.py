"""Tensor classes that techniques use. They import torch, which the technique's own file must not: whoever searches has none."""
