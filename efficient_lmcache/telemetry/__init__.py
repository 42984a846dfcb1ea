"""What a cache tier tells the scheduler about itself, once a second, and what engines tell each other of their pool.

    report:      one `core.tier.TierReport`, the unit that a worker sends
    observation: one `core.observation.Observation`, the unit that a scheduler sends
    payload:     either as bytes (msgpack: `report.py`, `observation.py`, `wire.py`)
    channel:     where one engine's newest payload can be found; holds one payload, not a queue
    sink:        the channel's writing end, in the worker of rank 0 (`ReportPublisher` drives it)
    source:      the channel's reading end, in the scheduler's process (`ReportPoller` drives its reader)
    transport:   a sink and a source that fit together: `local.py`; the contract is `transport.py`
    outbox:      brings payloads to Redis (`redis_outbox.py`, which has a sink for reports)
    feed:        hears payloads from Redis (`redis_feed.py`)
    view:        what a feed has brought, decoded (`cluster.py`, which has a reader of one's own reports)

Telemetry is advice. Whatever fails here is logged and leaves the scheduler without a fresh report, never a request
without an answer.
"""
