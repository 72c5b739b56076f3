"""Benchmarks whose arms run in turns, and the timelines they share with the demonstration."""
