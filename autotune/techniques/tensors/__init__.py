"""Classes for techniques that import torch, which a technique's own file must not: whoever searches has none."""
