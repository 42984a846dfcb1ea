"""Size the host tier before deployment: reference streams, pool model, planner, trace profile and lint."""
