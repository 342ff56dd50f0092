"""Classes for techniques that import torch. A technique's own file must not, because a process that searches does without torch."""
