"""Intervals of 95 %: the one constant that every room takes them from."""

NORMAL_95 = 1.96  # standard deviations of a normal distribution, on either side of the mean, that hold 95 % of it
