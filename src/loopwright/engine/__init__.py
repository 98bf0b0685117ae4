"""Drives loops one step at a time: residents, instances, jobs, events, the runner and saved jobs."""
