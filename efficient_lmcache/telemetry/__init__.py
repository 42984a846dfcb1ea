"""What a cache tier tells the scheduler about itself, once a second.

    report:    one `core.tier.TierReport`, the unit that travels
    payload:   a report as bytes (msgpack, `report.py`)
    channel:   where one engine's newest payload can be found; holds one payload, not a queue
    sink:      the channel's writing end, in the worker of rank 0 (`ReportPublisher` drives it)
    source:    the channel's reading end, in the scheduler's process (`ReportPoller` drives it)
    transport: a sink and a source that fit together (`local.py`; the contract is `transport.py`)

Telemetry is advice. Whatever fails here is logged and leaves the scheduler without a fresh report, never a request
without an answer.
"""
