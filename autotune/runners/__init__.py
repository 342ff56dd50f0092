"""What runs probes, checks and traces: local processes, or a recorded table."""
