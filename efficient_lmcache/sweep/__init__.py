"""Sweeps: many replays of one trace, planned in a file, predicted before they run, resumed after a crash.

plan          what a person writes
expand        the plan on a trace and a model: one `RunOptions` per run
requirements  what the machine must have
predictions   what each run is expected to measure, written down before the first one starts
state         sweep.json: which runs there are, and how far each has come
sweep         runs what is left to run
"""
