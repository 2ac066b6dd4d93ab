"""Instruments that stand beside the engine: every storage of a step, and a trace of every rank."""
