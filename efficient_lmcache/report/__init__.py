"""What run directories say: the paper's tables and figures as numbers, and the page that shows them.

    runs            `read_inputs(paths)`: run directories and sweeps, already read; what is absent says why
    table           Table 3: a row per run
    predictions     Tables 4 and 5: predicted against measured
    capacity        Figures 2 to 4: series over host capacity; pools against each other
    latency         queueing, first token and whole calls
    thresholds      Figure 5: the same decisions under other kappa and theta
    declined        Figure 6: when declined chunks are referenced again
    pressure        the factors of Eq. 10 over time
    gap             Section 1: the gap between an agent's turns, and what is evicted in it
    condensers      Table 13: what edits of the history do to reuse
    analyses        `analyse(inputs)`: all of these

    lookups         which call a decision was taken for
    prefixes        what a trace's calls share with the one before
    sweep_fields    what is read of a sweep.json, checked
    redecide        the policies of `core.admission`, asked again

Every result is a frozen dataclass of plain values (`to_json`). An analysis that a run's files do not allow is an
`Absent` with its reason.
"""
