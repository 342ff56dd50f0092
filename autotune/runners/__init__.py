"""What runs probes, checks and traces: local processes, a recorded table, a closed form."""
